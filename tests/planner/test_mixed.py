"""Stages on devices that differ: cuts and bounds against brute force, the search against all of its candidates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autopar import api
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import FP32
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation
from autopar.planner.space.space import load_space
from tests.support.clusters import three_kinds, two_kinds
from tests.support.planner.tasks import ROUNDING, check_search, planner_of

PINS = ["pp=2", "dp_replicate=2", "dp_shard=1", "tp=1", "zero=0", "micro_batch=2", "schedule=1F1B"]


# --- bounds


@pytest.mark.slow
@pytest.mark.parametrize("memory", [400 * 2**20 + 1_500_000, 400 * 2**20 + 1_200_000])
def test_a_mode_of_recompute_more_makes_no_candidate_slower(graph: Graph, memory: int) -> None:
    cluster = two_kinds(factor=3.0, slow_memory=memory)
    some, more = (
        planner_of(graph, "data_shares=equal", cluster=cluster, space=replace(load_space("default"), recompute=modes))
        for modes in (("none", "full"), ("none", "selective", "full"))
    )
    compared = 0
    for candidate in some.pool:
        one, other = (made.evaluator.evaluate(candidate) for made in (some, more))
        if isinstance(one, Evaluation):
            assert isinstance(other, Evaluation)
            assert other.prediction.step_time_s <= one.prediction.step_time_s * ROUNDING
            compared += candidate.virtual_stages > 1
    assert compared


CLUSTERS = {
    "two kinds": two_kinds(factor=3.0),
    "little memory": two_kinds(factor=3.0, slow_memory=400 * 2**20 + 1_500_000),
    "three kinds": three_kinds(2),  # in some orders a pipeline rank of two lies on the first node and the last one
}


@pytest.mark.slow
@pytest.mark.parametrize("kinds", CLUSTERS)
def test_the_search_finds_the_best_of_all_and_its_bounds_hold(graph: Graph, kinds: str) -> None:
    def make() -> Planner:
        return planner_of(graph, "data_shares=equal", cluster=CLUSTERS[kinds])

    found, plans = check_search(make)
    alone, fresh = (make().evaluator for _ in range(2))
    assert any(candidate.order for candidate in plans)
    for candidate, plan in plans.items():
        time_s = plan.prediction.step_time_s
        # a time that a plan takes is never called impossible
        assert fresh.bounds_s(LEVELS - 1, [candidate], time_s * (1 + 1e-6))[0] <= time_s * ROUNDING
        for part in (1.0, 1.01, 1.2):  # of its time, that is aimed at
            goal_s = part * time_s
            assert alone.closest_s(candidate, goal_s)[0] <= time_s * ROUNDING
            assert alone.closest_s(candidate, goal_s, whole_s=goal_s)[0] <= time_s * ROUNDING
            assert alone.chained_s(candidate, goal_s) <= time_s * ROUNDING
    assert found.lower_bound_s <= min(alone.improved(plan).time_s for plan in plans.values())


def test_a_faster_device_gets_more_layers_and_the_plan_says_which(graph: Graph) -> None:
    plan = api.search(graph, cluster=two_kinds(factor=3.0), global_batch_size=16, pins=PINS)
    sizes = {plan.devices_of(stage.pp_rank): stage.stop - stage.start for stage in plan.stages}
    assert sizes["cpu",] > sizes["cpu-slow",]
    text = str(plan)
    assert "on cpu-slow" in text
    assert "number the nodes in this order" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert [(g.start, g.stop) for g in plan.groups] == [(0, 2), (2, 4)]


def test_the_order_of_the_groups_may_be_pinned(graph: Graph) -> None:
    cluster = two_kinds(factor=3.0)
    for order, first in (("0-1", "cpu"), ("1-0", "cpu-slow")):
        plan = api.search(graph, cluster=cluster, global_batch_size=16, pins=[*PINS, f"groups={order}"])
        assert plan.devices_of(0) == (first,)
        assert plan.groups[0].device == first
    with pytest.raises(UsageError, match="Choose one of: 0-1, 1-0"):
        api.search(graph, cluster=cluster, global_batch_size=16, pins=["groups=0-2"])
    with pytest.raises(UsageError, match="groups=1-0"):
        api.search(graph, cluster=cluster, global_batch_size=16, pins=["groups=fast"])


def test_a_space_may_ask_for_equal_stages(graph: Graph, checkout: Path, tmp_path: Path) -> None:
    path, shipped = tmp_path / "even.toml", (checkout / "search" / "quick.toml").read_text(encoding="utf-8")
    path.write_text(f"{shipped}\nequal_stages = true\n")
    pins = ["pp=2", "tp=1", "micro_batch=2", "schedule=1F1B"]
    plan = api.search(graph, cluster=two_kinds(factor=3.0), global_batch_size=16, pins=pins, space=str(path))
    assert len({stage.stop - stage.start for stage in plan.stages}) == 1
    free = api.search(graph, cluster=two_kinds(factor=3.0), global_batch_size=16, pins=[*pins, "zero=0"])
    assert free.predicted.step_time_s < plan.predicted.step_time_s


def test_memory_of_each_rank_is_that_of_its_device(graph: Graph) -> None:
    """What the small device cannot hold moves to the large one, though it is slower."""
    reserve = 400 * 2**20
    free = api.search(graph, cluster=two_kinds(factor=3.0), global_batch_size=16, pins=PINS)
    small = two_kinds(factor=3.0, fast_memory=reserve + 2_600_000)
    plan = api.search(graph, cluster=small, global_batch_size=16, pins=PINS)
    assert plan.predicted.fits
    assert set(plan.predicted.memory_limits_bytes) == {reserve + 2_600_000, small.groups[1].device.memory_bytes}
    fast, before = (next(s for s in p.stages if p.devices_of(s.pp_rank) == ("cpu",)) for p in (plan, free))
    assert fast.stop - fast.start < before.stop - before.start
    assert all(plan.predicted.rank_fits(memory) for memory in plan.predicted.memory)


def test_a_model_too_large_for_both_names_both(graph: Graph) -> None:
    reserve = 400 * 2**20
    small = two_kinds(fast_memory=reserve + 1_000_000, slow_memory=reserve + 500_000)
    with pytest.raises(InfeasibleError, match=r"400\.5 MiB to 401\.0 MiB of memory a device"):
        api.search(graph, cluster=small, global_batch_size=16, pins=PINS)


def test_equal_groups_plan_as_one(graph: Graph) -> None:
    (group,) = Cluster.parse("cpu:1x2").groups
    one = Cluster.parse("cpu:2x2")
    both = replace(one, groups=(group, group))
    plans = [api.search(graph, cluster=c, global_batch_size=16, pins=["pp=2"]) for c in (one, both)]
    assert plans[0].predicted == plans[1].predicted
    assert not plans[1].groups


def test_an_order_of_groups_needs_whole_domains_of_switches() -> None:
    cluster = two_kinds()
    assert cluster.orders == ((0, 1), (1, 0))
    three = replace(cluster, groups=(*cluster.groups, cluster.groups[0]))
    assert three.orders == ((0, 1, 2), (0, 2, 1), (1, 0, 2))
    from autopar.hardware.cluster import Tier

    rack = Tier(name="rack", num_nodes=2, uplink=cluster.groups[0].nic)
    assert replace(cluster, tiers=(rack,)).orders == ((0, 1),)


def test_cpus_beside_gpus_are_refused() -> None:
    mixed = replace(two_kinds(), groups=(*Cluster.parse("cpu:1x2").groups, *Cluster.parse("h100-sxm5-80gb:1x2").groups))
    with pytest.raises(UsageError, match="mixes GPUs and CPUs"):
        CostModel(mixed, FP32, "adamw")

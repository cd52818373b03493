import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import api
from autopar.cost.model import CostModel
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster, Tier
from autopar.plan.plan import FP32, Plan
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation
from autopar.planner.space.constraints import divisors
from autopar.planner.space.space import load_space
from autopar.planner.space.variants import nearest
from autopar.planner.studies.study import params
from tests.support.clusters import of_one, three_kinds, two_kinds
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import ROUNDING, check_search, planner_of, plans_of
from tests.support.said import refuses

PINS = ["pp=2", "dp_replicate=2", "dp_shard=1", "tp=1", "zero=0", "micro_batch=2", "schedule=1F1B"]


@pytest.mark.slow
def test_a_mode_of_recompute_more_makes_no_candidate_slower(graph: Graph) -> None:
    cluster = two_kinds(factor=3.0, slow_memory=400 * 2**20 + 1_200_000)
    some, more = (
        planner_of(graph, "data_shares=equal", cluster=cluster, space=replace(load_space("default"), recompute=modes))
        for modes in (("none", "full"), ("none", "selective", "full"))
    )
    compared = 0
    for candidate in some.pool:
        one, other = (made.evaluator.evaluate(candidate) for made in (some, more))
        if isinstance(one, Evaluation):
            assert other.prediction.step_time_s <= one.prediction.step_time_s * ROUNDING
            compared += candidate.virtual_stages > 1
    assert compared


CLUSTERS = {
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
    assert "on cpu-slow" in text and "number the nodes in this order" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert [(g.start, g.stop) for g in plan.groups] == [(0, 2), (2, 4)]


def test_the_order_of_the_groups_may_be_pinned(graph: Graph) -> None:
    cluster = two_kinds(factor=3.0)
    for order, first in (("0-1", "cpu"), ("1-0", "cpu-slow")):
        plan = api.search(graph, cluster=cluster, global_batch_size=16, pins=[*PINS, f"groups={order}"])
        assert plan.devices_of(0) == (first,) and plan.groups[0].device == first
    for wrong, said in (("groups=0-2", "Choose one of: 0-1, 1-0"), ("groups=fast", "groups=1-0")):
        refuses(UsageError, said, api.search, graph, cluster=cluster, global_batch_size=16, pins=[wrong])


def test_a_space_may_ask_for_equal_stages(graph: Graph, checkout: Path, tmp_path: Path) -> None:
    path, shipped = tmp_path / "even.toml", (checkout / "search" / "quick.toml").read_text(encoding="utf-8")
    path.write_text(f"{shipped}\nequal_stages = true\n")
    pins = ["pp=2", "tp=1", "micro_batch=2", "schedule=1F1B", "zero=0"]
    given = {"cluster": two_kinds(factor=3.0), "global_batch_size": 16, "pins": pins}
    plan, free = api.search(graph, space=str(path), **given), api.search(graph, **given)
    assert len({stage.stop - stage.start for stage in plan.stages}) == 1
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
    said = "400 MiB to 401 MiB of memory a device"
    refuses(InfeasibleError, said, api.search, graph, cluster=small, global_batch_size=16, pins=PINS)


def test_equal_groups_plan_as_one(graph: Graph) -> None:
    one = Cluster.parse("cpu:2x2")
    both = replace(one, groups=Cluster.parse("cpu:1x2").groups * 2)
    plans = [api.search(graph, cluster=c, global_batch_size=16, pins=["pp=2"]) for c in (one, both)]
    assert plans[0].predicted == plans[1].predicted and not plans[1].groups


def test_an_order_of_groups_needs_whole_domains_of_switches() -> None:
    cluster = two_kinds()
    assert cluster.orders == ((0, 1), (1, 0))
    three = replace(cluster, groups=(*cluster.groups, cluster.groups[0]))
    assert three.orders == ((0, 1, 2), (0, 2, 1), (1, 0, 2))
    rack = Tier(name="rack", num_nodes=2, uplink=cluster.groups[0].nic)
    assert replace(cluster, tiers=(rack,)).orders == ((0, 1),)


def test_cpus_beside_gpus_are_refused() -> None:
    mixed = replace(two_kinds(), groups=(*Cluster.parse("cpu:1x2").groups, *Cluster.parse("h100-sxm5-80gb:1x2").groups))
    refuses(UsageError, "mixes GPUs and CPUs", CostModel, mixed, FP32, "adamw")


# --- shares by speed

BATCH = 12


@pytest.fixture(scope="module")
def wide() -> Graph:
    return mlp(layers=3, batch=2, width=128, hidden=512)


def every(total: int, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to deal out samples, one at least for each rank."""
    for some in product(*(range(1, total // n + 1) for n in ranks)):
        if sum(n * share for n, share in zip(ranks, some, strict=True)) == total and len(set(some)) > 1:
            yield some


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 40),
    st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 5.0), st.floats(0.1, 4.0)), min_size=2, max_size=3),
)
def test_the_nearest_shares_are_the_quickest_of_all(total: int, groups: list[tuple[int, float, float]]) -> None:
    ranks, lines = [n for n, _, _ in groups], [(a, b) for _, a, b in groups]

    def time_s(shares: Sequence[int]) -> float:
        return max(a + b * share for (a, b), share in zip(lines, shares, strict=True))

    found, ways = nearest(total, ranks, lines), list(every(total, ranks))
    assert [time_s(shares) for shares in found] == sorted(map(time_s, ways))[:3] and set(found) <= set(ways)


def of_batch(wide: Graph, cluster: Cluster, *pins: str, batch: int = BATCH, space: str = "default") -> Planner:
    return planner_of(wide, *pins, cluster=cluster, global_batch_size=batch, space=space)


def search(wide: Graph, cluster: Cluster, *pins: str, space: str = "default") -> Plan:
    return api.search(wide, cluster=cluster, global_batch_size=BATCH, pins=pins, space=space)


SHARED = {
    "1 and 1": two_kinds(1, 1, factor=3.0),
    "1 and 2, little memory": two_kinds(1, 2, factor=3.0, slow_memory=400 * 2**20 + 12_000_000),
    "three": three_kinds(),
}


@pytest.mark.parametrize("kinds", SHARED)
def test_the_search_finds_the_best_of_all_shares(wide: Graph, kinds: str) -> None:
    cluster, times = SHARED[kinds], list[float]()
    ranks = [group.num_devices for group in cluster.groups]
    made = of_batch(wide, cluster, "data_shares!=equal")
    for zero, mesh in {(c.zero_stage, c.mesh): None for c in made.pool}:
        for count in divisors(BATCH):
            for shares in every(BATCH // count, ranks):
                one = replace(made.pool[0], zero_stage=zero, mesh=mesh, num_micro_batches=count)
                found = made.evaluator.evaluate(replace(one, shares=shares, micro_batch_size=max(shares)))
                times += [found.prediction.step_time_s] if isinstance(found, Evaluation) else []
    plan = search(wide, cluster, "pp=1", "tp=1", "data_shares!=equal")
    assert plan.predicted.step_time_s == pytest.approx(min(times), rel=1e-12)
    assert plan.search.lower_bound_s <= min(times)
    assert len(times) > 20


def test_unequal_shares_win_where_devices_differ_and_bounds_hold(wide: Graph) -> None:
    cluster = two_kinds(1, 1, factor=3.0)
    found = search(wide, cluster, "pp=1", "tp=1")
    equal = search(wide, cluster, "pp=1", "tp=1", "data_shares=equal")
    fast, slow = found.data_shares
    assert fast > slow and not equal.data_shares
    assert any("slowest device sets the pace" in note for note in equal.notes)
    assert found.predicted.step_time_s < equal.predicted.step_time_s
    made = of_batch(wide, cluster, "pp=1")
    assert len({tuple(params(c).values()) for c in made.pool}) == len(made.pool)
    plans = plans_of(made.evaluator, made.pool)
    assert [*plans] == made.pool
    for candidate, plan in plans.items():
        most_s = plan.prediction.step_time_s * ROUNDING
        assert made.evaluator.closest_s(candidate, most_s)[0] <= most_s


def test_blocks_recompute_for_the_group_that_has_to(wide: Graph) -> None:
    pins = ("data_shares=200-40", "num_micro_batches=1", "zero=0")
    roomy = of_batch(wide, two_kinds(1, 1), *pins, batch=240).estimate()
    needs = roomy.predicted.peak_memory_bytes
    cluster = two_kinds(1, 1, fast_memory=needs - 1000)
    plan = of_batch(wide, cluster, *pins, batch=240).estimate()
    assert roomy.recompute == "none" != plan.recompute
    assert plan.predicted.fits and plan.predicted.step_time_s > roomy.predicted.step_time_s


def test_bounds_count_what_each_group_recomputes_to_fit() -> None:
    deep, raised, excluded = mlp(layers=12, batch=2, width=16, hidden=64), 0, 0
    for spare in (300_000, 400_000, 500_000, 600_000):
        cluster = two_kinds(1, 1, slow_memory=400 * 2**20 + spare)
        made = of_batch(deep, cluster, "data_shares=20-40", "num_micro_batches=4", batch=240)
        for candidate in made.pool:
            found = made.evaluator.evaluate(candidate)
            quickest_s, fitting_s = (made.evaluator.bounds_s(level, [candidate])[0] for level in (1, LEVELS - 1))
            if isinstance(found, Evaluation):
                assert quickest_s <= fitting_s <= found.prediction.step_time_s
                raised += fitting_s > 1.01 * quickest_s
            excluded += math.isinf(fitting_s)
    assert min(raised, excluded) >= 4


@pytest.mark.parametrize("shares", ["20-40", "40-20"])
def test_bounds_leave_each_group_its_own_memory(shares: str) -> None:
    """Each has exactly what blocks need that do not recompute."""
    deep, pins = mlp(layers=12, batch=2, width=16, hidden=64), (f"data_shares={shares}", "num_micro_batches=4")
    roomy = of_batch(deep, two_kinds(1, 1), *pins, batch=240)
    for candidate in roomy.pool:
        free = roomy.evaluator.evaluate(candidate)
        fast, slow = (memory.total for memory in free.prediction.memory)
        made = of_batch(deep, two_kinds(1, 1, fast_memory=fast, slow_memory=slow), *pins, batch=240)
        assert made.evaluator.bounds_s(LEVELS - 1, [candidate])[0] <= free.prediction.step_time_s
        for less in ({"fast_memory": fast - 400_000}, {"slow_memory": slow - 400_000}):
            own = {"fast_memory": fast, "slow_memory": slow, **less}
            tight = of_batch(deep, two_kinds(1, 1, **own), *pins, batch=240)
            assert math.isinf(tight.evaluator.bounds_s(LEVELS - 1, [candidate])[0])


def test_the_order_of_the_groups_goes_with_their_shares(wide: Graph) -> None:
    plan = search(wide, two_kinds(1, 2, factor=3.0), "data_shares=4-1", "groups=1-0")
    assert [group.device for group in plan.groups] == ["cpu-slow", "cpu"] and plan.data_shares == (1, 4)
    assert [plan.micro_batch_of(rank) for rank in range(3)] == [1, 1, 4]


def test_spaces_say_whether_shares_are_tried(wide: Graph, checkout: Path, tmp_path: Path) -> None:
    path, shipped = tmp_path / "own.toml", (checkout / "search" / "quick.toml").read_text(encoding="utf-8")
    path.write_text("\n".join(line for line in shipped.splitlines() if not line.startswith("data_shares")))
    cluster = two_kinds(1, 1, factor=3.0)
    assert not any(c.shares for c in of_batch(wide, cluster, space=str(path)).pool)
    assert any(c.shares for c in of_batch(wide, cluster, "data_shares=5-1", space=str(path)).pool)
    assert not any(c.shares for c in of_batch(wide, of_one(cluster, 0)).pool)
    assert all(c.shares for c in of_batch(wide, cluster, "data_shares!=equal").pool)
    most = [max(c.shares) for c in of_batch(wide, cluster, "micro_batch<=3", "data_shares!=equal").pool]
    assert most and max(most) <= 3


BAD = {
    "divides the global batch 12, got 1 x 3 + 1 x 2 = 5": ["data_shares=3-2"],
    "The pin 'data_shares=fast' gives no shares": ["data_shares=fast"],
    "These constraints conflict: data_shares=3-1; ": ["data_shares=3-1", "pp=2"],
    "These constraints conflict: data_shares=5-1; micro_batch=2": ["data_shares=5-1", "micro_batch=2"],
    "Expected node groups that differ, got 3-1": ["data_shares=3-1"],
}


@pytest.mark.parametrize(("message", "pins"), BAD.items(), ids=[" ".join(pins) for pins in BAD.values()])
def test_bad_pins_are_named(wide: Graph, message: str, pins: list[str]) -> None:
    cluster = two_kinds(1, 1, factor=3.0)
    given = of_one(cluster, 0) if "groups that differ" in message else cluster
    refuses(AutoparError, re.escape(message), search, wide, given, *pins)

"""Shares by speed: dealt out against every way to do so, the search against every plan with every shares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import api
from autopar.errors import AutoparError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation
from autopar.planner.space.constraints import divisors
from autopar.planner.space.variants import nearest
from autopar.planner.studies.study import params
from tests.support.clusters import of_one, three_kinds, two_kinds
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import ROUNDING, planner_of, plans_of

BATCH = 12


@pytest.fixture(scope="module")
def graph() -> Graph:
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
    assert [time_s(shares) for shares in found] == sorted(map(time_s, ways))[:3]
    assert set(found) <= set(ways)


def planner(graph: Graph, cluster: Cluster, *pins: str, batch: int = BATCH, space: str = "default") -> Planner:
    return planner_of(graph, *pins, cluster=cluster, global_batch_size=batch, space=space)


def search(graph: Graph, cluster: Cluster, *pins: str, space: str = "default") -> Plan:
    return api.search(graph, cluster=cluster, global_batch_size=BATCH, pins=pins, space=space)


CLUSTERS = {
    "1 and 1": two_kinds(1, 1, factor=3.0),
    "1 and 2, little memory": two_kinds(1, 2, factor=3.0, slow_memory=400 * 2**20 + 12_000_000),
    "three": three_kinds(),
}


@pytest.mark.parametrize("kinds", CLUSTERS)
def test_the_search_finds_the_best_of_all_shares(graph: Graph, kinds: str) -> None:
    cluster, times = CLUSTERS[kinds], list[float]()
    ranks = [group.num_devices for group in cluster.groups]
    made = planner(graph, cluster, "data_shares!=equal")
    for zero, mesh in {(c.zero_stage, c.mesh): None for c in made.pool}:
        for count in divisors(BATCH):
            for shares in every(BATCH // count, ranks):
                one = replace(made.pool[0], zero_stage=zero, mesh=mesh, num_micro_batches=count)
                found = made.evaluator.evaluate(replace(one, shares=shares, micro_batch_size=max(shares)))
                times += [found.prediction.step_time_s] if isinstance(found, Evaluation) else []
    plan = search(graph, cluster, "pp=1", "tp=1", "data_shares!=equal")
    assert plan.predicted.step_time_s == pytest.approx(min(times), rel=1e-12)
    assert plan.search.lower_bound_s <= min(times)
    assert len(times) > 20


def test_unequal_shares_win_where_devices_differ_and_bounds_hold(graph: Graph) -> None:
    cluster = two_kinds(1, 1, factor=3.0)
    found = search(graph, cluster, "pp=1", "tp=1")
    equal = search(graph, cluster, "pp=1", "tp=1", "data_shares=equal")
    fast, slow = found.data_shares
    assert fast > slow
    assert not equal.data_shares
    assert any("slowest device sets the pace" in note for note in equal.notes)
    assert found.predicted.step_time_s < equal.predicted.step_time_s
    made = planner(graph, cluster, "pp=1")
    assert len({tuple(params(c).values()) for c in made.pool}) == len(made.pool)
    plans = plans_of(made.evaluator, made.pool)
    assert [*plans] == made.pool
    for candidate, plan in plans.items():
        most_s = plan.prediction.step_time_s * ROUNDING
        assert made.evaluator.closest_s(candidate, most_s)[0] <= most_s


def test_blocks_recompute_for_the_group_that_has_to(graph: Graph) -> None:
    pins = ("data_shares=200-40", "num_micro_batches=1", "zero=0")
    roomy = planner(graph, two_kinds(1, 1), *pins, batch=240).estimate()
    needs = roomy.predicted.peak_memory_bytes
    cluster = two_kinds(1, 1, fast_memory=needs - 1000)
    plan = planner(graph, cluster, *pins, batch=240).estimate()
    assert roomy.recompute == "none"
    assert plan.recompute != "none"
    assert plan.predicted.fits
    assert plan.predicted.step_time_s > roomy.predicted.step_time_s


def test_bounds_count_what_each_group_recomputes_to_fit() -> None:
    deep, raised, excluded = mlp(layers=12, batch=2, width=16, hidden=64), 0, 0
    for spare in (300_000, 400_000, 500_000, 600_000):
        cluster = two_kinds(1, 1, slow_memory=400 * 2**20 + spare)
        made = planner(deep, cluster, "data_shares=20-40", "num_micro_batches=4", batch=240)
        for candidate in made.pool:
            found = made.evaluator.evaluate(candidate)
            quickest_s, fitting_s = (made.evaluator.bounds_s(level, [candidate])[0] for level in (1, LEVELS - 1))
            if isinstance(found, Evaluation):
                assert quickest_s <= fitting_s <= found.prediction.step_time_s
                raised += fitting_s > 1.01 * quickest_s
            excluded += math.isinf(fitting_s)
    assert raised >= 4
    assert excluded >= 4


@pytest.mark.parametrize("shares", ["20-40", "40-20"])
def test_bounds_leave_each_group_its_own_memory(shares: str) -> None:
    """Each has exactly what blocks need that do not recompute."""
    deep, pins = mlp(layers=12, batch=2, width=16, hidden=64), (f"data_shares={shares}", "num_micro_batches=4")
    roomy = planner(deep, two_kinds(1, 1), *pins, batch=240)
    for candidate in roomy.pool:
        free = roomy.evaluator.evaluate(candidate)
        assert isinstance(free, Evaluation)
        fast, slow = (memory.total for memory in free.prediction.memory)
        made = planner(deep, two_kinds(1, 1, fast_memory=fast, slow_memory=slow), *pins, batch=240)
        assert made.evaluator.bounds_s(LEVELS - 1, [candidate])[0] <= free.prediction.step_time_s
        for less in ({"fast_memory": fast - 400_000}, {"slow_memory": slow - 400_000}):
            tight = planner(
                deep, two_kinds(1, 1, **{"fast_memory": fast, "slow_memory": slow, **less}), *pins, batch=240
            )
            assert math.isinf(tight.evaluator.bounds_s(LEVELS - 1, [candidate])[0])


def test_the_order_of_the_groups_goes_with_their_shares(graph: Graph) -> None:
    plan = search(graph, two_kinds(1, 2, factor=3.0), "data_shares=4-1", "groups=1-0")
    assert [group.device for group in plan.groups] == ["cpu-slow", "cpu"]
    assert plan.data_shares == (1, 4)
    assert [plan.micro_batch_of(rank) for rank in range(3)] == [1, 1, 4]


def test_spaces_say_whether_shares_are_tried(graph: Graph, checkout: Path, tmp_path: Path) -> None:
    path, shipped = tmp_path / "own.toml", (checkout / "search" / "quick.toml").read_text(encoding="utf-8")
    path.write_text("\n".join(line for line in shipped.splitlines() if not line.startswith("data_shares")))
    cluster = two_kinds(1, 1, factor=3.0)
    assert not any(c.shares for c in planner(graph, cluster, space=str(path)).pool)
    assert any(c.shares for c in planner(graph, cluster, "data_shares=5-1", space=str(path)).pool)
    assert not any(c.shares for c in planner(graph, of_one(cluster, 0)).pool)
    assert all(c.shares for c in planner(graph, cluster, "data_shares!=equal").pool)
    most = [max(c.shares) for c in planner(graph, cluster, "micro_batch<=3", "data_shares!=equal").pool]
    assert most
    assert max(most) <= 3


BAD = {
    "Expected a share for each of 2 node groups, got 3-1-1.": ["data_shares=3-1-1"],
    "Expected at least one sample for every data rank, got 3-0.": ["data_shares=3-0"],
    "Expected shares that differ, got 2-2.": ["data_shares=2-2"],
    "divides the global batch 12, got 1 x 3 + 1 x 2 = 5": ["data_shares=3-2"],
    "The pin 'data_shares=fast' gives no shares": ["data_shares=fast"],
    "These constraints conflict: data_shares=3-1; ": ["data_shares=3-1", "pp=2"],
    "These constraints conflict: data_shares=5-1; micro_batch=2": ["data_shares=5-1", "micro_batch=2"],
}


@pytest.mark.parametrize(("message", "pins"), BAD.items(), ids=[" ".join(pins) for pins in BAD.values()])
def test_bad_pins_are_named(graph: Graph, message: str, pins: list[str]) -> None:
    with pytest.raises(AutoparError) as caught:
        search(graph, two_kinds(1, 1, factor=3.0), *pins)
    assert message in str(caught.value)


def test_equal_nodes_have_no_shares(graph: Graph) -> None:
    with pytest.raises(AutoparError, match="Expected node groups that differ, got 3-1"):
        search(graph, of_one(two_kinds(1, 1), 0), "data_shares=3-1")

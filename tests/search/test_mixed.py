"""Stages on devices that differ: cuts and bounds against brute force, the search against all of its candidates."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import api
from autopar.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.ir import Graph
from autopar.plan import FP32
from autopar.search.bound_rows import BlockPrice
from autopar.search.candidates import Problem, candidates
from autopar.search.evaluate import Evaluation, Evaluator
from autopar.search.inter import BlockOption, CutBlock, StageCutter
from autopar.search.mixed import in_orders
from autopar.search.mixed_bounds import PlaceRow, mixed_bounds, mixed_row
from autopar.search.outer import Limits, OuterSearch
from autopar.search.pins import Pins
from autopar.search.space import load_space
from tests.mixed_clusters import two_kinds

from .graphs import mlp

PINS = ["pp=2", "dp_replicate=2", "dp_shard=1", "tp=1", "zero=0", "micro_batch=2", "schedule=1F1B"]


# --- the cut


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[CutBlock]], list[float], int]:
    """Blocks as each of up to four ranks runs them, on one of two kinds of devices, and the limit of each rank."""
    keys = draw(st.lists(st.integers(0, 2), min_size=2, max_size=6))
    seed, m = draw(st.integers(0, 2**32 - 1)), draw(st.integers(1, 8))
    kinds = draw(st.lists(st.integers(0, 1), min_size=1, max_size=min(4, len(keys))))
    limits = (draw(st.integers(5, 60)), draw(st.integers(5, 60)))

    def block(key: int, kind: int) -> CutBlock:
        common, own = np.random.default_rng([seed, key]), np.random.default_rng([seed, key, kind])
        held, extra, static = (float(n) for n in common.integers([2, 0, 0], [9, 3, 5]))
        time_s = float(own.integers(1, 20))
        return CutBlock(
            key=key,
            options=(
                BlockOption(mode="none", time_s=time_s, held_bytes=held, transient_bytes=extra),
                BlockOption(mode="full", time_s=time_s * 4 / 3, held_bytes=1.0, transient_bytes=extra + held),
            ),
            static_bytes=static,
        )

    return [[block(key, kind) for key in keys] for kind in kinds], [float(limits[kind]) for kind in kinds], m


def least_of_cuts(ranks: list[list[CutBlock]], limits: list[float], in_flight: list[int], m: int) -> float:
    """``sum + (m - 1) * max`` of the stages' times, over every cut and every choice of recompute that fits."""
    best, n = float("inf"), len(ranks[0])
    for inner in combinations(range(1, n), len(ranks) - 1):
        times = []
        for s, (start, stop) in enumerate(zip((0, *inner), (*inner, n), strict=True)):
            own, least = ranks[s][start:stop], float("inf")
            for modes in product((0, 1), repeat=len(own)):
                options = [b.options[mode] for b, mode in zip(own, modes, strict=True)]
                held = in_flight[s] * sum(o.held_bytes for o in options) + max(o.transient_bytes for o in options)
                if held + sum(b.static_bytes for b in own) <= limits[s]:
                    least = min(least, sum(o.time_s for o in options))
            times.append(least)
        best = min(best, sum(times) + (m - 1) * max(times))
    return best


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_cut_over_two_kinds_of_devices_is_the_best_of_all(
    found: tuple[list[list[CutBlock]], list[float], int],
) -> None:
    ranks, limits, m = found
    in_flight = [min(m, len(ranks) - s) for s in range(len(ranks))]
    cutters = [StageCutter(blocks) for blocks in ranks]
    cut = cutters[0].cut(len(ranks), in_flight=in_flight, limit_bytes=limits, num_micro_batches=m, by_rank=cutters)
    best = least_of_cuts(ranks, limits, in_flight, m)
    assert (cut is None) == (best == float("inf"))
    if cut is not None:
        assert cut.time_s == pytest.approx(best)


# --- bounds


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[BlockPrice]], list[float], list[float], list[float], int]:
    """For each rank the prices of a first block, equal ones and a last one; limits, what is beside, sends; micro-batches."""
    count, pp, m = draw(st.integers(1, 5)), draw(st.integers(2, 3)), draw(st.integers(1, 6))
    seconds, size = st.floats(0.1, 4.0), st.floats(0.0, 3.0)

    def kind(common: list[tuple[float, ...]]) -> list[BlockPrice]:
        first, group, last = (
            BlockPrice(
                time_s=draw(seconds),
                again_s=draw(st.floats(0.0, 1.0)),
                once_s=draw(st.floats(0.0, 1.0)),
                forward_s=0.0,
                gather_s=draw(st.floats(0.0, 1.0)),
                static_bytes=static,
                held_bytes=1.0 + held,
                held_again_bytes=again,
                passing_bytes=passing,
            )
            for static, held, again, passing in common
        )
        return [first, *[group] * count, last]

    common = [(draw(size), draw(size), draw(st.floats(0.0, 1.0)), draw(st.floats(0.0, 1.0))) for _ in range(3)]
    kinds = [(kind(common), draw(st.floats(2.0, 40.0)), draw(st.sampled_from([0.0, 0.2]))) for _ in range(2)]
    ranks = [kinds[draw(st.integers(0, 1))] for _ in range(pp)]
    sends = [draw(st.sampled_from([0.0, 0.5])) for _ in range(pp - 1)]
    return [r[0] for r in ranks], [r[1] for r in ranks], [r[2] for r in ranks], sends, m


def row_of(blocks: list[BlockPrice], limit: float, every_s: float, pp: int, m: int) -> PlaceRow:
    return PlaceRow(
        first=blocks[0],
        last=blocks[-1],
        group=blocks[1],
        count=len(blocks) - 2,
        alone=False,
        others=0,
        before_s=tuple(sum(b.time_s for b in blocks[:r]) for r in range(pp)),
        every_s=every_s,
        limit_bytes=limit,
        virtual_stages=1,
        num_micro_batches=m,
        waits=True,
        in_flight=tuple(min(m, pp - r) for r in range(pp)),
    )


@settings(max_examples=60, deadline=None)
@given(chains())
def test_no_cut_over_two_kinds_is_quicker_than_the_bound(
    chain: tuple[list[list[BlockPrice]], list[float], list[float], list[float], int],
) -> None:
    ranks, limits, every, sends, m = chain
    pp, n, best = len(ranks), len(ranks[0]), float("inf")
    for inner in combinations(range(1, n), pp - 1):
        edges = list(zip((0, *inner), (*inner, n), strict=True))
        for again in product((0, 1), repeat=n):
            time_s, before, gathered, fits = 0.0, 0.0, 0.0, True
            for r, (start, stop) in enumerate(edges):
                own = list(zip(ranks[r][start:stop], again[start:stop], strict=True))
                spent = sum(b.time_s + b.again_s * a for b, a in own) + every[r]
                held = sum(b.held_again_bytes if a else b.held_bytes for b, a in own)
                used = sum(b.static_bytes for b, _ in own) + min(m, pp - r) * held
                fits &= used + max(b.passing_bytes for b, _ in own) <= limits[r]
                gathers = sum(b.gather_s for b, _ in own)
                once = sum(b.once_s for b, _ in own)
                time_s = max(time_s, max(before, gathered + once) + m * spent + gathers)
                gathered += gathers
                before += spent + gathers + (sends[r] if r < pp - 1 else 0.0)
            best = min(best, time_s) if fits else best
    rows = [row_of(blocks, limits[r], every[r], pp, m) for r, blocks in enumerate(ranks)]
    bound = mixed_bounds([mixed_row(rows, ranks, [1] * n, sends)])[0]
    assert bound <= best * (1 + 1e-9)


# --- the search


@pytest.fixture(scope="module")
def graph() -> Graph:
    return mlp(layers=6, batch=2, width=64, hidden=256)


def outer(graph: Graph, cluster: Cluster) -> OuterSearch:
    space = load_space("quick")
    problem = Problem(
        world_size=4, devices_per_node=2, global_batch_size=16, num_blocks=len(graph.blocks), heads=(), space=space
    )
    evaluator = Evaluator(graph, CostModel(cluster, FP32, "adamw"), global_batch_size=16, pins=Pins(), space=space)
    pool = in_orders(candidates(problem, Pins()), cluster)
    return OuterSearch(evaluator, pool, exhaustive=10_000, trials=12, limits=Limits())


@pytest.mark.parametrize("memory", [None, 400 * 2**20 + 1_500_000])
def test_the_search_finds_the_best_of_all_and_its_bounds_hold(graph: Graph, memory: int | None) -> None:
    cluster = two_kinds(factor=3.0, slow_memory=memory)
    search = outer(graph, cluster)
    found = search.run()
    assert found.best is not None
    alone, times = outer(graph, cluster).evaluator, []
    assert any(c.order for c in search.pool)
    for candidate in search.pool:
        one = alone.evaluate(candidate)
        if isinstance(one, Evaluation):
            times.append(one.prediction.step_time_s)
            for bounds_s in (alone.ideal_bounds_s, alone.least_bounds_s, alone.bounds_s):
                assert bounds_s([candidate])[0] <= times[-1] * (1 + 1e-9)
    assert found.best.prediction.step_time_s == min(times)
    assert found.lower_bound_s <= min(times)


def test_a_faster_device_gets_more_layers_and_the_plan_says_which(graph: Graph) -> None:
    plan = api.search(graph, cluster=two_kinds(factor=3.0), global_batch_size=16, pins=PINS)
    sizes = {plan.devices_of(stage.pp_rank): stage.stop - stage.start for stage in plan.stages}
    assert sizes["cpu",] > sizes["cpu-slow",]
    text = str(plan)
    assert "on cpu-slow" in text
    assert "number the nodes in this order" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert [(g.start, g.stop) for g in plan.groups] == [(0, 2), (2, 4)]


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
    from autopar.cluster import Tier

    rack = Tier(name="rack", num_nodes=2, uplink=cluster.groups[0].nic)
    assert replace(cluster, tiers=(rack,)).orders == ((0, 1),)


def test_cpus_beside_gpus_are_refused() -> None:
    mixed = replace(two_kinds(), groups=(*Cluster.parse("cpu:1x2").groups, *Cluster.parse("h100-sxm5-80gb:1x2").groups))
    with pytest.raises(UsageError, match="all GPUs or all CPUs"):
        CostModel(mixed, FP32, "adamw")

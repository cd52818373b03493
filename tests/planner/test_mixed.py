"""Stages on devices that differ: cuts and bounds against brute force, the search against all of its candidates."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import api
from autopar.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.cost.step.critical_path import longest_chains
from autopar.cost.step.simulation import StageTimes, simulate
from autopar.errors import InfeasibleError, UsageError
from autopar.graph.ir import Graph
from autopar.plan import FP32
from autopar.planner.bounds.bound_rows import BlockPrice, forwards_done
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.bounds.mixed_bounds import PRECISION, impossible, mixed_bounds
from autopar.planner.bounds.mixed_chains import Chains
from autopar.planner.bounds.mixed_rows import MixedRow, PlaceRow, holds, work_and_slowness, work_bound_s
from autopar.planner.bounds.mixed_whole import whole_bound_s
from autopar.planner.branch_and_bound.branch_and_bound import BranchAndBound
from autopar.planner.context import load_of
from autopar.planner.evaluate.evaluation import Evaluation
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.layouts.types import layout_key_of
from autopar.planner.outcome import Limits
from autopar.planner.space.candidates import Problem, candidates
from autopar.planner.space.pins import Pins
from autopar.planner.space.rank_orders import in_orders
from autopar.planner.space.space import load_space
from tests.mixed_clusters import two_kinds
from tests.planner.test_bounds import mode, priced

from .graphs import mlp

PINS = ["pp=2", "dp_replicate=2", "dp_shard=1", "tp=1", "zero=0", "micro_batch=2", "schedule=1F1B"]


# --- bounds


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[list[BlockPrice]], list[float], list[float], list[float], int, str, int]:
    """For each rank the prices of a first block, equal ones and a last one; limits, what is beside, sends; the schedule."""
    v, pp = draw(st.sampled_from([1, 1, 2])), draw(st.integers(2, 3))
    schedule = "Interleaved1F1B" if v > 1 else draw(st.sampled_from(["1F1B", "GPipe"]))
    m = pp * draw(st.integers(1, 2)) if v > 1 else draw(st.integers(1 if schedule == "GPipe" else pp, 6))
    count = draw(st.integers(max(pp * v - 2, 1), pp * v + (1 if v == 1 else -1)))
    seconds, size, has_three = st.floats(0.1, 4.0), st.floats(0.0, 3.0), draw(st.booleans())

    def block(static: float, held: float, again: float, passing: float, freed: float) -> BlockPrice:
        time_s, again_s = draw(seconds), draw(st.floats(0.0, 1.0))
        parts = {
            "time_s": time_s,
            "once_s": draw(st.sampled_from([0.0, 1.0, 9.0])),
            "forward_s": time_s * draw(st.floats(0.1, 0.6)),
            "gather_s": draw(st.sampled_from([0.0, 0.5])),
            "static_bytes": static,
            "held_bytes": 1.0 + held,
            "held_again_bytes": again,
        }
        share = draw(st.sampled_from([1.0, 0.5, 0.1]))
        if has_three:
            return priced(share, again_s, freed, (passing,) * 3, **parts)
        return BlockPrice(
            again_s=again_s, least_again_s=again_s * share, passing_bytes=passing, lean_bytes=passing, **parts
        )

    def kind(common: list[tuple[float, ...]]) -> list[BlockPrice]:
        first, group, last = (block(*own) for own in common)
        return [first, *[group] * count, last]

    common = [
        (
            *(draw(size) for _ in range(2)),
            *(draw(st.floats(0.0, 1.0)) for _ in range(2)),
            draw(st.sampled_from([0.3, 0.5, 0.9])),
        )
        for _ in range(3)
    ]
    kinds = [(kind(common), draw(st.floats(2.0, 40.0)), draw(st.sampled_from([0.0, 0.2]))) for _ in range(2)]
    ranks = [kinds[draw(st.integers(0, 1))] for _ in range(pp)]
    sends = [draw(st.sampled_from([0.0, 0.5, 3.0])) for _ in range(pp - 1)]
    return [r[0] for r in ranks], [r[1] for r in ranks], [r[2] for r in ranks], sends, m, schedule, v


def row_of(blocks: list[BlockPrice], limit: float, every_s: float, pp: int, m: int, schedule: str, v: int) -> PlaceRow:
    done = forwards_done(schedule, pp, v, m)
    return PlaceRow(
        first=blocks[0],
        last=blocks[-1],
        group=blocks[1],
        count=len(blocks) - 2,
        least=0,
        alone=False,
        others=0,
        before_s=tuple(sum(b.time_s for b in blocks[:r]) for r in range(pp)),
        before_forward_s=tuple(sum(b.forward_s for b in blocks[:r]) for r in range(pp)),
        every_s=every_s,
        limit_bytes=limit,
        schedule=schedule,
        virtual_stages=v,
        num_micro_batches=m,
        waits=v == 1,
        in_flight=tuple(map(int, done.min(axis=1))),
        most_done=tuple(map(int, done.max(axis=1))),
        is_one=True,
    )


AROUND_S, TIE_S, STAGE_BYTES = 0.4, 0.7, 0.3
"""Of messages from the last rank to the first; of sums on both; of what a stage keeps to send."""


def _ends(stages: int) -> list[int]:
    return [int(s in (0, stages - 1)) for s in range(stages)]


@settings(max_examples=60, deadline=None)
@given(chains())
def test_no_cut_over_two_kinds_is_quicker_than_the_bound(
    chain: tuple[list[list[BlockPrice]], list[float], list[float], list[float], int, str, int],
) -> None:
    """Every cut and every choice of recompute, each simulated action by action, with what each rank does once a step."""
    ranks, limits, every, sends, m, schedule, v = chain
    pp, n, best = len(ranks), len(ranks[0]), float("inf")
    held = forwards_done(schedule, pp, v, m)
    for inner in combinations(range(1, n), pp * v - 1):
        edges = list(zip((0, *inner), (*inner, n), strict=True))
        for again in product((0, 1, 2), repeat=n) if n <= 4 else [(alike,) * n for alike in (0, 1, 2)]:
            used, once, times = [0.0] * pp, [0.0] * pp, []
            passing = [0.0] * pp
            for s, (start, stop) in enumerate(edges):
                r = s % pp
                own = list(zip(ranks[r][start:stop], again[start:stop], strict=True))
                forward_s = sum(b.forward_s for b, _ in own) + every[r]
                backward_s = sum(b.time_s - b.forward_s + mode(b, a)[0] for b, a in own)
                hop = sends[r] if r < pp - 1 else AROUND_S * (s < pp * v - 1)
                back = sends[r - 1] if r else AROUND_S * (s > 0)
                gathers = sum(b.gather_s for b, _ in own)
                times.append(
                    StageTimes(
                        forward_s=forward_s,
                        backward_s=backward_s,
                        send_forward_s=hop,
                        send_backward_s=back,
                        first_forward_s=gathers,
                        schedule_s=0.0,
                    )
                )
                used[r] += sum(b.static_bytes + held[r, s // pp] * mode(b, a)[1] for b, a in own)
                later = 0.0  # what blocks behind kept of the micro-batch is gone
                for b, a in reversed(own):
                    passing[r] = max(passing[r], b.passing_bytes - later)
                    later += mode(b, a)[1]
                once[r] += sum(b.once_s for b, _ in own) + TIE_S * (s in (0, pp * v - 1))
                used[r] += held[r, s // pp] * STAGE_BYTES * (s < pp * v - 1)
            if all(u + p <= limit for u, p, limit in zip(used, passing, limits, strict=True)):
                finish = simulate(schedule, pp, m, times).finish_s
                best = min(best, max(f + o for f, o in zip(finish, once, strict=True)))
    rows = [row_of(blocks, limits[r], every[r], pp, m, schedule, v) for r, blocks in enumerate(ranks)]
    work_s, slowness = work_and_slowness(ranks, [1] * n)
    row = MixedRow(
        ranks=tuple(rows), work_s=work_s, slowness=slowness, sends_s=tuple(sends), sends_back_s=tuple(sends),
        around_s=AROUND_S, around_back_s=AROUND_S, tie_s=TIE_S, stage_bytes=STAGE_BYTES,
    )  # fmt: skip
    quick_s = work_bound_s(row) if holds(row, [own.group.static_bytes for own in rows]) else float("inf")
    for bound in (quick_s, mixed_bounds([row])[0], mixed_bounds([row], 30.0)[0]):
        assert bound <= best * (1 + 1e-9) or (bound == 30.0 and best > 30.0)
    chains = Chains()
    for at_most_s, precision in ((best, None), (float("inf"), 1e-6)):
        if best < float("inf"):  # memory is left to the other bounds
            assert chains.bound_s(row, at_most_s, precision=precision) <= best * (1 + 1e-9)
    if best < float("inf"):
        known_s = chains.bound_s(row, best, precision=1e-6)
        for share in (0.98, 1.0, 1.05):  # what some cut takes is never called impossible
            assert whole_bound_s(row, chains.of(row), known_s, share * best) <= best * (1 + 1e-9)
    if v == 1:
        tested = mixed_bounds([row], best, only_test=True)[0] if best < float("inf") else best
        assert tested <= best * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(chains(), st.integers(0, 2**32 - 1))
def test_the_longest_chain_takes_as_long_as_the_simulated_step(
    chain: tuple[list[list[BlockPrice]], list[float], list[float], list[float], int, str, int], seed: int
) -> None:
    """Its counts times the seconds of each action add up to the step; with any other seconds to no more."""
    ranks, _, _, _, m, schedule, v = chain
    pp, stages = len(ranks), len(ranks) * v

    def step_and_parts(seed: int) -> tuple[float, list[list[float]], list[float], tuple[float, list[list[int]], int]]:
        numbers = np.random.default_rng(seed)
        forward, backward, first, send, back = numbers.uniform(0.0, 2.0, (5, stages)).tolist()
        once = numbers.uniform(0.0, 5.0, pp).tolist()
        times = [
            StageTimes(
                forward_s=forward[s],
                backward_s=backward[s],
                first_forward_s=first[s],
                send_forward_s=send[s],
                send_backward_s=back[s],
            )
            for s in range(stages)
        ]
        finish = simulate(schedule, pp, m, times).finish_s
        (chain,) = longest_chains(schedule, pp, m, times, once, 1)
        columns = (chain.forwards, chain.backwards, chain.firsts, chain.sends, chain.sends_back)
        found = chain.time_s, np.stack(columns, axis=1).tolist(), chain.rank
        parts = [list(own) for own in zip(forward, backward, first, send, back, strict=True)]
        return max(f + o for f, o in zip(finish, once, strict=True)), parts, once, found

    step_s, parts, once, (time_s, counts, rank) = step_and_parts(seed)
    assert time_s == pytest.approx(step_s)
    own = sum(n * s for ns, ss in zip(counts, parts, strict=True) for n, s in zip(ns, ss, strict=True))
    assert own + once[rank] == pytest.approx(step_s)
    other_s, others, once, _ = step_and_parts(seed + 1)
    own = sum(n * s for ns, ss in zip(counts, others, strict=True) for n, s in zip(ns, ss, strict=True))
    assert own + once[rank] <= other_s * (1 + 1e-9)


# --- the search


@pytest.fixture(scope="module")
def graph() -> Graph:
    return mlp(layers=6, batch=2, width=64, hidden=256)


def outer(graph: Graph, cluster: Cluster, space_name: str = "quick") -> BranchAndBound:
    space = load_space(space_name)
    problem = Problem(
        world_size=4, devices_per_node=2, global_batch_size=16, num_blocks=len(graph.blocks), heads=(), space=space
    )
    evaluator = Evaluator.of(graph, CostModel(cluster, FP32, "adamw"), global_batch_size=16, pins=Pins(), space=space)
    pool = in_orders(candidates(problem, Pins()), cluster)
    return BranchAndBound(evaluator, pool, limits=Limits())


@pytest.mark.parametrize("memory", [None, 400 * 2**20 + 1_500_000, 400 * 2**20 + 1_200_000])
def test_a_mode_of_recompute_more_makes_no_candidate_slower(graph: Graph, memory: int | None) -> None:
    spaces = [
        replace(load_space("default"), recompute=modes) for modes in (("none", "full"), ("none", "selective", "full"))
    ]
    cluster = two_kinds(factor=3.0, slow_memory=memory)
    some, more = (
        Evaluator.of(graph, CostModel(cluster, FP32, "adamw"), global_batch_size=16, pins=Pins(), space=space)
        for space in spaces
    )
    compared = 0
    for candidate in outer(graph, cluster, "default").pool:
        one, other = some.evaluate(candidate), more.evaluate(candidate)
        if isinstance(one, Evaluation):
            assert isinstance(other, Evaluation)
            assert other.prediction.step_time_s <= one.prediction.step_time_s * (1 + 1e-9)
            compared += candidate.virtual_stages > 1
    assert compared


def test_one_row_is_below_those_of_several_layouts(graph: Graph) -> None:
    """Of which each is priced as where all devices are alike."""
    search = outer(graph, two_kinds(factor=3.0), "default")
    evaluator = search.evaluator
    placed, below, several = evaluator.cascade.placed, 0, 0
    for candidate in search.pool:
        drafts = evaluator.layouts.typed(layout_key_of(candidate), load_of(candidate))
        if not placed.has(candidate):
            continue
        options = [evaluator.layouts.price(draft) for draft in drafts]
        if candidate.mesh.tp > 1:  # any other blocks do
            options.append(evaluator.layouts.unsplit(layout_key_of(candidate)))
        step = evaluator.context.step(candidate, options[0])
        rows = [placed.exact(candidate, option, step) for option in options]
        least_s = mixed_bounds([placed.least(candidate, options, step)])[0]
        every_s = mixed_bounds(rows)
        assert least_s <= every_s.min() * (1 + PRECISION)
        for time_s in (0.9 * every_s).tolist():  # what is called impossible for all is so for each
            if impossible([placed.least(candidate, options, step)], time_s)[0]:
                assert impossible(rows, time_s).all()
                assert impossible(rows, 0.9 * time_s).all()
                below += 1
        several += len(rows) > 1
        for own in set(placed.places(candidate)):
            maker = placed._maker(own)
            parts = [evaluator.layouts.on_device(option, placed.model.part(own)) for option in options]
            for least, *each in zip(
                *(maker.prices(maker.works(some), step) for some in (parts, *([part] for part in parts))), strict=True
            ):
                assert least.forward_s <= min(price.forward_s for price in each)
                assert least.time_s - least.forward_s <= min(p.time_s - p.forward_s for p in each) * (1 + 1e-9)
        for option in options:
            for own in set(placed.places(candidate)):
                part = evaluator.layouts.on_device(option, placed.model.part(own))
                maker = placed._maker(own)
                for price, alone in zip(
                    maker.prices(maker.works([part]), step), maker.exact_prices(part, step)[0], strict=True
                ):
                    assert price.once_s >= alone.once_s
                    for name in (field.name for field in fields(price)):
                        if name != "once_s":
                            assert getattr(price, name) == pytest.approx(getattr(alone, name), rel=1e-9, abs=1e-15)
    assert several
    assert below


@pytest.mark.parametrize(("memory", "space"), [(None, "quick"), (400 * 2**20 + 1_500_000, "quick")])
def test_the_search_finds_the_best_of_all_and_its_bounds_hold(graph: Graph, memory: int | None, space: str) -> None:
    cluster = two_kinds(factor=3.0, slow_memory=memory)
    search = outer(graph, cluster, space)
    found = search.run()
    assert found.best is not None
    alone, fresh = (outer(graph, cluster, space).evaluator for _ in range(2))
    times, plans = [], []
    assert any(c.order for c in search.pool)
    for candidate in search.pool:
        one = alone.evaluate(candidate)
        if isinstance(one, Evaluation):
            times.append(one.prediction.step_time_s)
            plans.append(one)
            # a time that a plan takes is never called impossible
            assert fresh.bounds_s(LEVELS - 1, [candidate], times[-1] * (1 + 1e-6))[0] <= times[-1] * (1 + 1e-9)
            for level in range(LEVELS):
                assert alone.bounds_s(level, [candidate])[0] <= times[-1] * (1 + 1e-9)
            for part in (1.0, 1.01, 1.2):  # of its time, that is aimed at
                assert alone.closest_s(candidate, part * times[-1]) <= times[-1] * (1 + 1e-9)
    assert found.best.prediction.step_time_s == min(times)
    assert found.lower_bound_s <= min(alone.improved(plan).time_s for plan in plans)


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
    with pytest.raises(UsageError, match="the orders are 0-1, 1-0"):
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
    from autopar.cluster import Tier

    rack = Tier(name="rack", num_nodes=2, uplink=cluster.groups[0].nic)
    assert replace(cluster, tiers=(rack,)).orders == ((0, 1),)


def test_cpus_beside_gpus_are_refused() -> None:
    mixed = replace(two_kinds(), groups=(*Cluster.parse("cpu:1x2").groups, *Cluster.parse("h100-sxm5-80gb:1x2").groups))
    with pytest.raises(UsageError, match="all GPUs or all CPUs"):
        CostModel(mixed, FP32, "adamw")

"""The linear program of a candidate against every cut of small chains of blocks in every choice of modes."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cluster import Cluster
from autopar.cost.model import CostModel
from autopar.cost.step.critical_path import longest_chains
from autopar.cost.step.simulation import StageTimes, simulate
from autopar.plan import BF16
from autopar.planner.bounds import whole_blocks
from autopar.planner.bounds.bound_rows import BlockPrice, Row
from autopar.planner.bounds.linear import Every, Kind, LinearProgram
from autopar.planner.bounds.mode_counts import lower_corners
from autopar.planner.bounds.peaks import corner_peaks
from autopar.planner.evaluate.evaluation import Evaluation
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.space.candidates import Problem, candidates
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.schedule import live_peaks, peak_table

from .graphs import mlp

DEGREES = [("1F1B", 2, 1, 4), ("GPipe", 2, 1, 3), ("1F1B", 3, 1, 4), ("Interleaved1F1B", 2, 2, 4)]
SOME = BlockPrice(
    time_s=1.0, forward_s=0.0, again_s=0.0, least_again_s=0.0, once_s=0.0, gather_s=0.0, static_bytes=0.0, held_bytes=0.0,
    held_again_bytes=0.0, passing_bytes=0.0, lean_bytes=0.0,
)  # fmt: skip


def kind(chance: random.Random, first: int, count: int, *, modes: int, in_group: bool) -> Kind:
    """The first mode is the quickest and keeps the most."""
    forward_s, backward_s = chance.uniform(0.5, 1.5), chance.uniform(0.5, 2.0)
    again = sorted(chance.uniform(0.0, 1.5) for _ in range(modes - 1))
    held = sorted((chance.uniform(0.5, 4.0) for _ in range(modes)), reverse=True)
    return Kind(
        first=first, count=count, in_group=in_group, forward_s=(forward_s,) * modes,
        backward_s=tuple(backward_s + more for more in (0.0, *again)), shared_forward_s=chance.choice([0.0, 0.3]),
        gather_s=chance.choice([0.0, 0.5]), once_s=chance.choice([0.0, 2.0]), static_bytes=chance.uniform(0.0, 2.0),
        held_bytes=tuple(held), passing_bytes=tuple(chance.uniform(0.0, 2.0) for _ in range(modes)),
        stage_bytes=chance.choice([0.0, 1.0]),
    )  # fmt: skip


def problem(chance: random.Random) -> LinearProgram:
    schedule, pp, v, m = chance.choice(DEGREES)
    count, modes = chance.choice([3, 4]), chance.choice([1, 2, 2, 3])
    kinds = [
        kind(chance, 0, 1, modes=1, in_group=False),
        kind(chance, 1, count, modes=modes, in_group=True),
        kind(chance, 1 + count, 1, modes=chance.choice([1, 2]), in_group=False),
    ]
    row = Row(
        first=SOME, last=SOME, group=SOME, count=count, alone=False, others=0, total_s=1.0, forward_s=0.0, before_s=(),
        before_forward_s=(), after_backward_s=(), once_s=0.0, gathers_s=0.0, stage_gathers_s=(), every_s=0.0,
        send_s=chance.choice([0.0, 0.2]), send_back_s=chance.choice([0.0, 0.3]), stage_bytes=chance.choice([0.0, 0.5]),
        limit_bytes=chance.uniform(8.0, 50.0), most=chance.choice([math.inf, -(-count // (pp * v)) + 1]) if v > 1 else math.inf,
        schedule=schedule, pp=pp, virtual_stages=v, num_micro_batches=m,
    )  # fmt: skip
    stages = pp * v
    every = Every(
        shares=tuple(chance.random() for _ in range(stages)), forward_s=(chance.choice([0.0, 0.1]),) * stages,
        backward_s=chance.choice([0.0, 0.2]), first_s=chance.choice([0.0, 0.4]), once_s=chance.choice([0.0, 1.0]),
    )  # fmt: skip
    return LinearProgram(row, kinds, every)


def step_s(program: LinearProgram, stages: Sequence[Sequence[tuple[Kind, int]]]) -> float:
    """The simulated step of one cut, each block in a mode; infinite where it does not fit."""
    row, every, pp = program.row, program.every, program.pp
    times, kept, once_s, static, passing = [], [], [every.once_s] * pp, [0.0] * pp, [0.0] * pp
    for s, own in enumerate(stages):
        is_last = s == len(stages) - 1
        times.append(
            StageTimes(
                forward_s=sum(k.forward_s[j] + every.shares[s] * k.shared_forward_s for k, j in own)
                + every.forward_s[s],
                backward_s=sum(k.backward_s[j] for k, j in own) + every.backward_s,
                send_forward_s=0.0 if is_last else row.send_s,
                send_backward_s=row.send_back_s if s else 0.0,
                first_forward_s=sum(k.gather_s for k, _ in own) + every.first_s,
            )
        )
        kept.append(sum(k.held_bytes[j] for k, j in own) + (not is_last) * row.stage_bytes)
        kept[-1] += max(k.stage_bytes for k, _ in own)
        once_s[s % pp] += sum(k.once_s for k, _ in own)
        static[s % pp] += sum(k.static_bytes for k, _ in own)
        passing[s % pp] = max(passing[s % pp], own[-1][0].passing_bytes[own[-1][1]])
    for rank in range(pp):
        peaks = live_peaks(row.schedule, pp, row.virtual_stages, row.num_micro_batches, rank)
        held = max(sum(n * size for n, size in zip(counts, kept[rank::pp], strict=True)) for counts in peaks)
        if static[rank] + passing[rank] + held > row.limit_bytes:
            return math.inf
    ends = simulate(row.schedule, pp, row.num_micro_batches, times).finish_s
    return max(end + after for end, after in zip(ends, once_s, strict=True))


def least_of_all(program: LinearProgram) -> float:
    row, best = program.row, math.inf
    blocks = [k for k in program.kinds for _ in range(k.count)]
    n = len(blocks)
    for modes in product(*(range(len(k.forward_s)) for k in blocks)):
        both = list(zip(blocks, modes, strict=True))
        for stops in combinations(range(1, n), program.stages - 1):
            edges = list(zip((0, *stops), (*stops, n), strict=True))
            if all(sum(k.in_group for k in blocks[a:b]) <= row.most for a, b in edges):
                best = min(best, step_s(program, [both[a:b] for a, b in edges]))
    return best


@pytest.mark.parametrize("seed", range(16))
def test_no_cut_is_quicker_than_the_program(seed: int) -> None:
    program = problem(random.Random(seed))
    least_s = least_of_all(program)
    for share in (1.0, 1.001, 1.02, 1.1, 2.0):  # how many blocks a rank has time for depends on it
        goal_s = share * least_s if math.isfinite(least_s) else 100.0
        assert problem(random.Random(seed)).bound_s(0.0, goal_s) <= least_s
    assert problem(random.Random(seed)).bound_s(0.5 * goal_s, goal_s) >= 0.5 * goal_s  # what is known stays so


@pytest.mark.parametrize("rested", [1, whole_blocks.RESTED])
@pytest.mark.parametrize("seed", range(16))
def test_no_cut_is_quicker_than_whole_blocks(monkeypatch: pytest.MonkeyPatch, seed: int, rested: int) -> None:
    """Branched on to the end, whatever the program without branches says, and whichever chains rest."""
    monkeypatch.setattr(whole_blocks, "NEAR", 0.0)
    monkeypatch.setattr(whole_blocks, "RESTED", rested)
    least_s = least_of_all(problem(random.Random(seed)))
    for share in (1.0, 1.001, 1.1, 2.0):
        goal_s = share * least_s if math.isfinite(least_s) else 100.0
        assert problem(random.Random(seed)).bound_s(0.0, goal_s) <= least_s


@settings(deadline=None, max_examples=40)
@given(st.integers(min_value=0), st.floats(0.9, 3.0), st.sampled_from([0, 3_000, whole_blocks.WORK]))
def test_branches_that_are_left_open_are_bounded_too(seed: int, share: float, work: int) -> None:
    least_s = least_of_all(problem(random.Random(seed)))
    goal_s = share * least_s if math.isfinite(least_s) else 100.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whole_blocks, "NEAR", 2.0)
        in_parts_s = problem(random.Random(seed)).bound_s(0.0, goal_s)
        patch.setattr(whole_blocks, "NEAR", 0.0)
        patch.setattr(whole_blocks, "WORK", work)
        assert in_parts_s * (1 - 1e-9) <= problem(random.Random(seed)).bound_s(0.0, goal_s) <= least_s


@pytest.mark.parametrize(("schedule", "pp", "virtual_stages", "m", "count"), [
    ("1F1B", 3, 1, 6, 7), ("1F1B", 4, 1, 8, 9), ("GPipe", 3, 1, 3, 8), ("Interleaved1F1B", 2, 2, 4, 7), ("Interleaved1F1B", 3, 2, 6, 8),
])  # fmt: skip
def test_whole_blocks_are_found(
    monkeypatch: pytest.MonkeyPatch, schedule: str, pp: int, virtual_stages: int, m: int, count: int
) -> None:
    """Blocks that do not divide evenly and need no recompute: the bound is the step of the best cut, in parts it is well below."""
    chance = random.Random(count)
    only = replace(kind(chance, 0, count, modes=1, in_group=True), once_s=0.0)
    row = replace(
        problem(chance).row, schedule=schedule, pp=pp, virtual_stages=virtual_stages, num_micro_batches=m, limit_bytes=1e3,
        most=math.inf,
    )  # fmt: skip
    stages = pp * virtual_stages
    every = Every(shares=(1.0,) * stages, forward_s=(0.1,) * stages, backward_s=0.1, first_s=0.2, once_s=0.3)
    least_s = least_of_all(LinearProgram(row, [only], every))
    monkeypatch.setattr(whole_blocks, "NEAR", 2.0)
    assert LinearProgram(row, [only], every).bound_s(0.0, 1.5 * least_s) < 0.99 * least_s
    monkeypatch.setattr(whole_blocks, "NEAR", 0.0)
    found_s = LinearProgram(row, [only], every).bound_s(0.0, 1.5 * least_s)
    assert found_s == pytest.approx(least_s, rel=2e-3) and found_s <= least_s


def test_the_program_is_tight_where_nothing_is_relaxed() -> None:
    """Blocks that divide evenly and need no recompute: the step is the longest chain of the only good cut."""
    chance = random.Random(1)
    only = kind(chance, 0, 8, modes=1, in_group=True)
    program = problem(chance)
    row = Row(**{
        **{name: getattr(program.row, name) for name in Row.__slots__},
        "schedule": "Interleaved1F1B", "pp": 2, "virtual_stages": 2, "num_micro_batches": 4, "limit_bytes": 1e3, "most": 2,
    })  # fmt: skip
    every = Every(shares=(1.0,) * 4, forward_s=(0.1,) * 4, backward_s=0.1, first_s=0.2, once_s=0.3)
    program = LinearProgram(row, [only], every)
    least_s = step_s(program, [[(only, 0)] * 2] * 4)
    assert program.bound_s(0.0, 2 * least_s) == pytest.approx(least_s, rel=1e-4)


@pytest.mark.parametrize(("schedule", "pp", "virtual_stages", "m"), DEGREES)
def test_chains_take_as_long_as_the_ranks_that_they_end_on(schedule: str, pp: int, virtual_stages: int, m: int) -> None:
    chance = random.Random(m)
    names = ("forward_s", "backward_s", "send_forward_s", "send_backward_s", "first_forward_s")
    stages = [StageTimes(**{name: chance.random() for name in names}) for _ in range(pp * virtual_stages)]
    after_s = [chance.random() for _ in range(pp)]
    ends = simulate(schedule, pp, m, stages).finish_s
    chains = longest_chains(schedule, pp, m, stages, after_s, pp)
    assert chains[0].time_s == max(end + after for end, after in zip(ends, after_s, strict=True))
    for chain in chains:
        assert chain.time_s == pytest.approx(ends[chain.rank] + after_s[chain.rank])
        taken = sum(
            chain.forwards[s] * own.forward_s
            + chain.backwards[s] * own.backward_s
            + chain.firsts[s] * own.first_forward_s
            for s, own in enumerate(stages)
        )
        assert chain.time_s == pytest.approx(taken + chain.sends_s + after_s[chain.rank])


@pytest.mark.parametrize("room_bytes", [2_500_000, 20_000_000])
def test_no_plan_is_quicker_than_its_sharper_bound(room_bytes: int) -> None:
    """Whatever the degrees and the memory."""
    large = CostModel(Cluster.parse("h100-sxm5-80gb:1x4"), BF16, "adamw")
    memory_bytes = round((large.device.reserved_bytes + room_bytes) * large.memory_spread)
    model = CostModel(Cluster.parse(f"h100-sxm5-80gb:1x4?memory={memory_bytes}"), BF16, "adamw")
    graph, space = mlp(layers=9, batch=2, width=64, hidden=256), load_space("default")
    evaluator = Evaluator(graph, model, global_batch_size=16, pins=Pins(), space=replace(space, every=0))
    asked = Problem(
        world_size=4, devices_per_node=4, global_batch_size=16, num_blocks=len(graph.blocks), heads=(), space=space
    )
    pool = [c for c in candidates(asked, Pins()) if c.mesh.pp > 1]
    evaluated, raised = 0, 0
    for candidate in pool[:: max(1, len(pool) // 40)]:
        found = evaluator.evaluate(candidate)
        if isinstance(found, Evaluation):
            time_s = found.prediction.step_time_s
            bound_s = evaluator.sharper_bound_s(candidate, 2 * time_s)
            assert bound_s <= time_s * (1 + 1e-9)
            evaluated, raised = evaluated + 1, raised + (bound_s > evaluator.bounds_s([candidate])[0])
    assert evaluated > 10 and raised > 5


def test_corners_of_a_hull() -> None:
    assert lower_corners([(0, 0.0), (1, 3.0), (2, 2.0), (3, 6.0)]) == [(0, 0.0), (2, 2.0), (3, 6.0)]


@given(pp=st.sampled_from([2, 3, 4, 8]), v=st.integers(1, 5), rounds=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_the_corner_moments_of_a_rank_hold_as_much_as_all(pp: int, v: int, rounds: int, seed: int) -> None:
    schedule = "Interleaved1F1B" if v > 1 else "1F1B"
    held = np.random.default_rng(seed).uniform(0.0, 5.0, v)
    corners = corner_peaks(schedule, pp, v, pp * rounds)
    for rank in range(pp):
        every = peak_table(schedule, pp, v, pp * rounds, rank)
        assert len(corners(rank)) <= len(every)
        assert (corners(rank) @ held).max() == pytest.approx((every @ held).max(), rel=1e-12)

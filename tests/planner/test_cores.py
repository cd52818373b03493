"""Bounds where ranks share cores against every cut of small chains; tests/campaigns holds them against every plan of small problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from autopar.api import PRECISIONS
from autopar.cluster import Cluster
from autopar.cost.step.simulation import After, StageTimes, durations_of, sends_of, shared_ends_s
from autopar.planner.bounds.bound_rows import BlockPrice, Row
from autopar.planner.bounds.bounds import bounds
from autopar.planner.bounds.core_bounds import least_ends_s
from autopar.planner.bounds.cores import at_part, at_speed_s, chain_s, least_part
from autopar.planner.evaluate.evaluation import Evaluation
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.planner import Planner
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.planner.stages import core_cuts
from autopar.planner.task import Task
from tests.planner.graphs import mlp
from tests.planner.test_bounds import least_of_all, rows

_DEGREES = [
    ("GPipe", 2, 1, 1),
    ("GPipe", 2, 1, 3),
    ("GPipe", 3, 1, 2),
    ("1F1B", 2, 1, 2),
    ("1F1B", 2, 1, 5),
    ("1F1B", 3, 1, 3),
    ("Interleaved1F1B", 2, 2, 1),
    ("Interleaved1F1B", 2, 2, 4),
]


def of_shared_cores(
    core_share: float, host_s: float, row: Row, stages: Sequence[StageTimes], once: Sequence[float]
) -> float:
    """A step as ``CostModel.breakdown`` says; ``host_s``: of one micro-batch on all stages."""
    own_s = host_s / (2 * len(stages))
    stages = [replace(s, forward_s=s.forward_s + own_s, backward_s=s.backward_s + own_s) for s in stages]
    after = [After(wait_s=0.0, work_s=own_s) for own_s in once]
    return max(shared_ends_s(row.schedule, row.pp, row.num_micro_batches, stages, after, core_share))


def bound_of(row: Row, core_share: float, host_s: float) -> float:
    speed = least_part(core_share, row.pp)
    return at_speed_s(row, float(bounds([at_part(row, speed)])[0]), speed=speed, host_s=host_s)


@settings(max_examples=20, deadline=None)
@given(rows(_DEGREES), st.sampled_from([0.25, 0.5, 0.6, 0.9]), st.sampled_from([0.0, 1.0]))
def test_no_cut_of_ranks_that_share_cores_is_quicker_than_the_bound(
    one: tuple[Row, list[float]], core_share: float, host_s: float
) -> None:
    row, alone_s = one
    least_s = least_of_all(row, alone_s, lambda *own: of_shared_cores(core_share, host_s, *own))
    bound_s = bound_of(row, core_share, host_s)
    assert bound_s <= least_s * (1 + 1e-9)
    if bound_s == math.inf:
        assert least_s == math.inf


@pytest.mark.parametrize("core_share", [0.25, 0.5, 0.9])
def test_a_bound_is_reached_by_one_micro_batch_after_which_there_is_nothing(core_share: float) -> None:
    """Its actions follow each other, with a message between any two of them."""
    price = BlockPrice(
        time_s=3.0, forward_s=1.0, again_s=0.0, least_again_s=0.0, once_s=0.0, gather_s=0.0, static_bytes=0.0,
        held_bytes=1.0, held_again_bytes=1.0, passing_bytes=0.0, lean_bytes=0.0,
    )  # fmt: skip
    row = Row(
        first=price, last=price, group=price, count=2, alone=False, others=0, total_s=12.0, forward_s=4.0,
        before_s=(0.0, 3.0), before_forward_s=(0.0, 1.0), after_backward_s=(2.0, 0.0), once_s=0.0, gathers_s=0.0,
        stage_gathers_s=(0.0,) * 3, every_s=0.1, send_s=0.3, send_back_s=0.4, stage_bytes=0.0, limit_bytes=100.0,
        most=math.inf, schedule="GPipe", pp=2, virtual_stages=1, num_micro_batches=1,
    )  # fmt: skip
    least_s = least_of_all(row, [0.0] * 4, lambda *own: of_shared_cores(core_share, 0.5, *own))
    assert least_s == pytest.approx(max(core_share, 0.5) * (12.0 + 2 * 0.1 + 0.5) + 0.3 + 0.4)
    assert bound_of(row, core_share, 0.5) == pytest.approx(least_s)


@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stages", [2, 4])
def test_a_chain_is_as_long_as_the_longest_of_stages_that_fill_it(stages: int, num_micro_batches: int) -> None:
    length_s, messages_s, m = 10.0, 0.3, num_micro_batches
    own: list[float] = []
    for r in range(stages):
        own.append((length_s - sum(own) - r * messages_s) / m)
    assert chain_s(sum(own), messages_s, stages, m) == pytest.approx(length_s)


_seconds = st.sampled_from([0.0, 0.3, 1.0, 2.5])
_stages = st.builds(
    StageTimes, forward_s=_seconds, backward_s=_seconds, send_forward_s=_seconds, send_backward_s=_seconds, first_forward_s=_seconds
)  # fmt: skip
_after = st.builds(After, wait_s=_seconds, work_s=_seconds)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([*_DEGREES, ("GPipe", 4, 1, 2)]), st.sampled_from([0.25, 0.5, 0.6, 0.9]))
def test_no_pipeline_with_these_stages_or_longer_ones_is_quicker_than_its_bound(
    data: st.DataObject, degrees: tuple[str, int, int, int], core_share: float
) -> None:
    name, pp, virtual_stages, count = degrees
    own = data.draw(st.lists(_stages, min_size=pp * virtual_stages, max_size=pp * virtual_stages))
    own = [replace(own[0], send_backward_s=0.0), *own[1:-1], replace(own[-1], send_forward_s=0.0)]
    after = data.draw(st.lists(_after, min_size=pp, max_size=pp))
    bound_s = bound_of_stages(degrees, own, after, core_share)
    place, more_s = data.draw(st.integers(0, len(own) - 1)), data.draw(_seconds)  # as a block does that recomputes
    longer = [replace(s, backward_s=s.backward_s + more_s * (i == place)) for i, s in enumerate(own)]
    for stages in (own, longer):
        assert bound_s <= max(shared_ends_s(name, pp, count, stages, after, core_share)) * (1 + 1e-9)


def bound_of_stages(
    degrees: tuple[str, int, int, int], stages: Sequence[StageTimes], after: Sequence[After], core_share: float
) -> float:
    def column(values: Sequence[float]) -> NDArray[np.float64]:
        return np.array([values]).T

    waits, works = column([own.wait_s for own in after]), column([own.work_s for own in after])
    return float(
        least_ends_s(degrees, column(durations_of(stages)), column(sends_of(stages)), waits, works, core_share)[0]
    )


@pytest.mark.parametrize("count", [1, 4])
def test_the_bound_of_two_ranks_on_one_core_is_their_work(count: int) -> None:
    """One of the two always works, and the core is never idle."""
    stages, after = [StageTimes(forward_s=1.0, backward_s=2.0), StageTimes(forward_s=3.0, backward_s=5.0)], [2.0, 7.0]
    follows = [After(wait_s=0.0, work_s=own_s) for own_s in after]
    expected = (count * 11.0 + 9.0) / 2
    assert max(shared_ends_s("GPipe", 2, count, stages, follows, 0.5)) == pytest.approx(expected)
    assert bound_of_stages(("GPipe", 2, 1, count), stages, follows, 0.5) == pytest.approx(expected)


def planner_of(ranks: int, cores: int) -> Planner:
    return Planner(
        Task(
            graph=mlp(layers=7, batch=12, width=64, hidden=256),
            cluster=Cluster.parse(f"cpu:1x{ranks}?cores={cores}"),
            global_batch_size=12,
            precision=PRECISIONS["fp32"],
            optimizer="adamw",
            pins=Pins.parse(["tp=1", "bucket_bytes=26214400"]),
            space=replace(load_space("default"), every=0),
        )
    )


def every_cut_s(planner: Planner, candidate: Candidate, option: PricedLayout) -> dict[tuple[int, ...], float]:
    """Steps by where stages end, where nothing recomputes; memory is no matter."""
    evaluator, blocks, pp = planner.evaluator, len(planner.task.graph.blocks), candidate.mesh.pp
    found = {}
    for inner in combinations(range(1, blocks), pp - 1):
        stages = evaluator.cuts.stages((*inner, blocks), ("none",) * blocks, option, pp)
        found[*inner, blocks] = planner.model.breakdown(stages, evaluator.step(candidate, option)).total_s
    return found


def pipelines(planner: Planner) -> list[Candidate]:
    found = [c for c in planner.pool if c.mesh.pp > 1 and c.virtual_stages == 1]
    assert len(found) > 2
    return found


@pytest.mark.parametrize(("ranks", "cores"), [(4, 2), (3, 2)])
def test_the_cut_of_ranks_that_share_cores_is_the_best_of_all(ranks: int, cores: int) -> None:
    """Of each pipeline, against every cut of its layout; likewise where it must be faster than a plan that is known."""
    planner, other = planner_of(ranks, cores), planner_of(ranks, cores)
    for candidate in pipelines(planner):
        evaluator, found = planner.evaluator, planner.evaluator.evaluate(candidate)
        assert isinstance(found, Evaluation)
        least_s = min(every_cut_s(planner, candidate, found.option).values())
        assert found.prediction.step_time_s == pytest.approx(least_s, rel=1e-9), candidate
        assert evaluator.lower_bound_s(candidate) <= least_s * (1 + 1e-9)
        assert evaluator.sharper_bound_s(candidate, math.inf) <= least_s * (1 + 1e-9)
        again = other.evaluator.evaluate(candidate, at_most_s=least_s * (1 + 1e-7))
        assert isinstance(again, Evaluation)
        assert again.stops == found.stops


def test_of_many_cuts_none_with_a_block_on_the_next_stage_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_cuts, "MANY", 0)
    planner = planner_of(4, 2)
    for candidate in pipelines(planner):
        found = planner.evaluator.evaluate(candidate)
        assert isinstance(found, Evaluation)
        for stops, time_s in every_cut_s(planner, candidate, found.option).items():
            if sum(abs(a - b) for a, b in zip(stops, found.stops, strict=True)) == 1:
                assert time_s >= found.prediction.step_time_s * (1 - 1e-9)

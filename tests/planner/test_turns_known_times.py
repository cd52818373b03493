"""What a candidate whose stages take turns gives does not depend on the times that were known when it was evaluated.

Searches that share their work know other times at the same candidate, whatever the number of their processes: a plan that
depended on these would be another one from run to run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from autopar.cluster import Cluster
from autopar.graph.ir import Graph
from autopar.models import resolve_model
from autopar.plan import FP32, Recompute
from autopar.planner.evaluate.evaluator import BEGUN, FEW, Evaluation
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.planner import Planner
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.planner.stages.fitting import busy_s
from autopar.planner.stages.stage_cut import Cut
from autopar.planner.task import Task

PP = 4
TWO: tuple[Recompute, ...] = ("none", "full")
THREE: tuple[Recompute, ...] = ("none", "selective", "full")

# memory for some of the recompute of 16 layers; a short step, and a long one whose choices are compared when it has begun
CASES = [(modes, batch, memory) for modes in (TWO, THREE) for batch in (16, 64) for memory in ("431MB", "433MB")]
BY_CASE = pytest.mark.parametrize(("modes", "batch", "memory"), CASES, ids=lambda own: str(own).replace("'", ""))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return resolve_model("gpt:layers=16,hidden=64,heads=4,vocab=512", sequence_length=64).trace()


def planner(graph: Graph, modes: tuple[Recompute, ...], batch: int, memory: str) -> Planner:
    return Planner(
        Task(
            graph=graph, cluster=Cluster.parse(f"cpu:1x{PP}?memory={memory}"), global_batch_size=batch, precision=FP32,
            optimizer="adamw", pins=Pins.parse([f"pp={PP}", "schedule=Interleaved1F1B", "tp=1", "micro_batch=2"]),
            space=replace(load_space("default"), recompute=modes, every=0),
        )
    )  # fmt: skip


def without_turns(evaluator: Evaluator, candidate: Candidate) -> Evaluation:
    evaluator.pipelines._takes_turns = lambda *_: False  # type: ignore[method-assign]
    found = evaluator.evaluate(candidate)
    assert isinstance(found, Evaluation)
    return found


@BY_CASE
def test_a_plan_is_the_same_whatever_time_is_known(
    graph: Graph, modes: tuple[Recompute, ...], batch: int, memory: str
) -> None:
    fresh = partial(planner, graph, modes, batch, memory)
    turned = 0
    for candidate in fresh().pool:
        found = fresh().evaluator.evaluate(candidate)
        assert isinstance(found, Evaluation)
        time_s = found.prediction.step_time_s
        plain_s = without_turns(fresh().evaluator, candidate).prediction.step_time_s
        assert time_s <= plain_s
        turned += time_s < plain_s
        for known_s in (
            1.5 * time_s,
            1.02 * time_s,
            plain_s * (1 + 1e-8),
            plain_s,
            1.001 * time_s,
            time_s * (1 + 1e-8),
        ):
            if known_s > time_s:
                again = fresh().evaluator.evaluate(candidate, at_most_s=known_s)
                assert isinstance(again, Evaluation), known_s / time_s
                assert again.prediction == found.prediction
                assert (again.stops, again.modes, again.bucket_bytes) == (found.stops, found.modes, found.bucket_bytes)
        for known_s in (time_s, 0.999 * time_s, 0.9 * time_s):
            slow = fresh().evaluator.evaluate(candidate, at_most_s=known_s)
            assert not isinstance(slow, Evaluation) or slow.prediction.step_time_s >= known_s
    assert turned  # else it says nothing of turns


def asked(evaluator: Evaluator, candidate: Candidate) -> Iterator[tuple[Any, ...]]:
    """What choices of turns are asked with in an evaluation, without the time."""
    calls: list[tuple[Any, ...]] = []
    own = evaluator.pipelines._turns

    def record(*call: Any) -> list[tuple[float, int, Cut]]:
        calls.append(call[:-1])
        return own(*call)

    evaluator.pipelines._turns = record  # type: ignore[method-assign]
    evaluator.evaluate(candidate)
    evaluator.pipelines._turns = own  # type: ignore[method-assign]
    yield from calls


@BY_CASE
def test_turns_are_the_same_ones_or_none_whatever_time_is_known(
    graph: Graph, modes: tuple[Recompute, ...], batch: int, memory: str
) -> None:
    made = planner(graph, modes, batch, memory)
    evaluator, weighed, few, close = made.evaluator, 0, 0, 0
    for candidate in made.pool:
        count = candidate.num_micro_batches
        for call in asked(evaluator, candidate):
            _, option, step, cutters, plan = call
            every = evaluator.pipelines.cuts.by_turns(candidate, plan, option, step, cutters)
            bounds_s = [busy_s(cut, cutters[0], PP, count, by_rank=cutters, with_once=True) for cut in every]
            whole = evaluator.pipelines._turns(*call, float("inf"))
            assert all(cut.modes == every[place].modes for _, place, cut in whole)
            for least_s, place, cut in whole:
                step_s = evaluator.model.breakdown(
                    evaluator.pipelines.cuts.stages(cut.stops, cut.modes, option, PP), step
                ).total_s
                assert bounds_s[place] <= least_s <= step_s
                close += least_s > bounds_s[place]
            is_long = len(every) > FEW and count >= 2 * BEGUN * PP
            assert len(whole) == (FEW if is_long else len(every))
            for late_s in {
                late for bound_s in bounds_s for late in (bound_s * (1 - 1e-9), bound_s, bound_s * (1 + 1e-9))
            }:
                found = evaluator.pipelines._turns(*call, late_s)
                assert found == whole if min(bounds_s) < late_s else not found
            weighed += len(every)
            few += is_long
    assert weighed
    assert close or batch > 16
    assert few or batch < 64 or modes == TWO

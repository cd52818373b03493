"""A plan fits when the upper end of its memory interval does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.hardware.cluster import Cluster
from autopar.plan.prediction import Memory
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation, Misfit
from tests.support.clusters import with_device
from tests.support.example_plans import llama_plan
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import planner_of

SPREAD = 0.2
GRAPH = mlp(layers=4, batch=2, width=64, hidden=256)


def planner(*, spread: float = 0.0, **device: Any) -> Planner:
    cluster = with_device(Cluster.parse("cpu:1x2"), memory_uncertainty=spread, **device)
    return planner_of(GRAPH, cluster=cluster, global_batch_size=8)


def replicated(planner: Planner) -> Evaluation | Misfit:
    return planner.evaluator.evaluate(next(c for c in planner.pool if c.mesh.dp_replicate == 2))


def fitting(planner: Planner) -> Evaluation:
    found = replicated(planner)
    assert isinstance(found, Evaluation)
    return found


def test_the_interval_is_that_of_the_profile() -> None:
    found = fitting(planner(spread=SPREAD)).prediction
    peak = found.peak_memory_bytes
    assert found.peak_memory_interval_bytes == (round(peak / (1 + SPREAD)), round(peak * (1 + SPREAD)))
    assert found.fits


def test_what_fits_by_its_middle_alone_does_not_fit() -> None:
    free = fitting(planner()).prediction
    limit = round(free.peak_memory_bytes * 1.1)
    assert fitting(planner(memory_bytes=limit)).prediction == replace(free, memory_limit_bytes=limit)
    unsure = replicated(planner(memory_bytes=limit, spread=SPREAD))
    if isinstance(unsure, Misfit):
        assert unsure.needs_bytes * (1 + SPREAD) > limit
    else:  # a leaner plan
        assert unsure.prediction.peak_memory_bytes * (1 + SPREAD) <= limit + 1
        assert unsure.prediction.step_time_s > free.step_time_s


def test_a_bound_of_what_is_sure_to_fit_stays_below_its_price() -> None:
    peak = fitting(planner()).prediction.peak_memory_bytes
    tight = planner(memory_bytes=round(peak * 1.25), spread=SPREAD)
    found = fitting(tight)
    assert tight.evaluator.closest_s(found.candidate, float("inf"))[0] <= found.prediction.step_time_s


def test_a_plan_of_an_older_version_is_judged_by_its_middle() -> None:
    memory = Memory(pp_rank=0, parameters=1, gradients=1, optimizer=1, activations=1, transient=1, reserved=1)
    old = replace(
        llama_plan().predicted, peak_memory_interval_bytes=(), peak_memory_bytes=memory.total, memory_limit_bytes=6
    )
    assert old.fits
    assert not replace(old, peak_memory_interval_bytes=(5, 7)).fits

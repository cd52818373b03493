"""A plan fits when the upper end of its memory interval does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cost.model import CostModel
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import FP32
from autopar.plan.prediction import Memory
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.search import Evaluation, Misfit
from autopar.planner.space.candidates import candidates
from autopar.planner.space.constraints import Problem
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from tests.support.planner.graphs import mlp

SPREAD = 0.2


@pytest.fixture(scope="module")
def graph() -> Graph:
    return mlp(layers=4, batch=2, width=64, hidden=256)


def evaluator(graph: Graph, *, memory_bytes: int | None = None, spread: float = 0.0) -> Evaluator:
    cluster = Cluster.parse("cpu:1x2")
    groups = tuple(
        replace(
            group,
            device=replace(
                group.device, memory_uncertainty=spread, memory_bytes=memory_bytes or group.device.memory_bytes
            ),
        )
        for group in cluster.groups
    )
    model = CostModel(replace(cluster, groups=groups), FP32, "adamw")
    return Evaluator.of(graph, model, global_batch_size=8, pins=Pins(), space=load_space("quick"))


def test_the_interval_is_that_of_the_profile(graph: Graph) -> None:
    found = _best(graph, evaluator(graph, spread=SPREAD))
    assert isinstance(found, Evaluation)
    low, high = found.prediction.peak_memory_interval_bytes
    peak = found.prediction.peak_memory_bytes
    assert (low, high) == (round(peak / (1 + SPREAD)), round(peak * (1 + SPREAD)))
    assert found.prediction.fits


def test_what_fits_by_its_middle_alone_does_not_fit(graph: Graph) -> None:
    free = _best(graph, evaluator(graph))
    assert isinstance(free, Evaluation)
    limit = round(free.prediction.peak_memory_bytes * 1.1)
    certain = _best(graph, evaluator(graph, memory_bytes=limit))
    assert isinstance(certain, Evaluation)
    assert certain.prediction == replace(free.prediction, memory_limit_bytes=limit)
    unsure = _best(graph, evaluator(graph, memory_bytes=limit, spread=SPREAD))
    if isinstance(unsure, Misfit):
        assert unsure.needs_bytes * (1 + SPREAD) > limit
    else:  # a leaner plan
        assert unsure.prediction.peak_memory_bytes * (1 + SPREAD) <= limit + 1
        assert unsure.prediction.step_time_s > free.prediction.step_time_s


def test_a_bound_of_what_is_sure_to_fit_stays_below_its_price(graph: Graph) -> None:
    free = _best(graph, evaluator(graph))
    assert isinstance(free, Evaluation)
    tight = evaluator(graph, memory_bytes=round(free.prediction.peak_memory_bytes * 1.25), spread=SPREAD)
    found = _best(graph, tight)
    assert isinstance(found, Evaluation)
    assert tight.closest_s(found.candidate, float("inf"))[0] <= found.prediction.step_time_s


def test_a_plan_of_an_older_version_is_judged_by_its_middle() -> None:
    memory = Memory(pp_rank=0, parameters=1, gradients=1, optimizer=1, activations=1, transient=1, reserved=1)
    from tests.support.example_plans import llama_plan

    old = replace(
        llama_plan().predicted, peak_memory_interval_bytes=(), peak_memory_bytes=memory.total, memory_limit_bytes=6
    )
    assert old.fits
    assert not replace(old, peak_memory_interval_bytes=(5, 7)).fits


def _best(graph: Graph, evaluator: Evaluator) -> Evaluation | Misfit:
    problem = Problem(
        world_size=2, devices_per_node=2, global_batch_size=8, num_blocks=len(graph.blocks), heads=(),
        space=evaluator.context.space,
    )  # fmt: skip
    candidate = next(c for c in candidates(problem, Pins()) if c.mesh.dp_replicate == 2)
    return evaluator.evaluate(candidate)

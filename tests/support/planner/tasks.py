"""Planners of small tasks, and what holds of all of their candidates."""

import math
from collections.abc import Iterable
from typing import Any

from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import FP32
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation, Limits, Outcome, Task
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space

CLUSTER = "cpu:1x4"
ROUNDING = 1 + 1e-9


def task_of(graph: Graph, *pins: str, **changes: Any) -> Task:
    """A task of four CPU ranks; ``cluster`` and ``space`` may be texts."""
    given: dict[str, Any] = {
        "graph": graph, "cluster": CLUSTER, "global_batch_size": 16, "precision": FP32, "optimizer": "adamw",
        "pins": Pins.parse(pins), "space": "quick", **changes,
    }  # fmt: skip
    for name, read in (("cluster", Cluster.parse), ("space", load_space)):
        if isinstance(given[name], str):
            given[name] = read(given[name])
    return Task(**given)


def planner_of(graph: Graph, *pins: str, **changes: Any) -> Planner:
    return Planner(task_of(graph, *pins, **changes))


def plans_of(evaluator: Evaluator, pool: Iterable[Candidate]) -> dict[Candidate, Evaluation]:
    """Of all candidates that have one; no bound of a candidate is above the time of its plan."""
    plans = {}
    for candidate in pool:
        plan = evaluator.evaluate(candidate)
        if isinstance(plan, Evaluation):
            plans[candidate] = plan
            bounds_s = [evaluator.bounds_s(level, [candidate])[0] for level in range(LEVELS)]
            bounds_s.append(evaluator.closest_s(candidate, math.inf)[0])
            assert max(bounds_s) <= plan.prediction.step_time_s * ROUNDING, (candidate, bounds_s)
    return plans


def check_search(make: Any) -> tuple[Outcome, dict[Candidate, Evaluation]]:
    """The search of a planner against all of its candidates, by another planner: it finds the best, and bounds hold."""
    planner, alone = make(), make()
    found, plans = planner.branch_and_bound(Limits()).run(), plans_of(alone.evaluator, alone.pool)
    least_s = min(plan.prediction.step_time_s for plan in plans.values())
    assert found.best is not None and found.finished
    assert found.best.prediction.step_time_s == least_s and found.lower_bound_s <= least_s
    return found, plans

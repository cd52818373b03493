"""Plan files are the same byte for byte, however many processes searched and whichever of them was quick."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.hardware.cluster import Cluster
from autopar.plan.file import save_plan
from autopar.plan.plan import Plan
from autopar.planner import planner as planning
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.process_group import ProcessGroup, available
from autopar.planner.explain.reasons import compare
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation, Limits
from autopar.planner.space.space import load_space
from tests.support.clusters import two_kinds
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import task_of

MAX_DELAY_S = 0.02


def planner(cluster: str, space: str) -> Planner:
    kinds: dict[str, Callable[[], Cluster]] = {
        "alike": lambda: Cluster.parse("cpu:1x8"),
        "mixed": lambda: two_kinds(4, 4, factor=3.0),
    }
    made = replace(load_space(space), recompute=("none", "selective", "full"))
    graph = mlp(layers=9, width=64, hidden=256)
    return Planner(task_of(graph, cluster=kinds[cluster](), global_batch_size=32, space=made))


def written(plan: Plan, folder: Path) -> bytes:
    """But for how long the search took, and how many candidates it came to in that time."""
    path = folder / "plan.json"
    save_plan(replace(plan, search=replace(plan.search, wall_time_s=0.0, evaluated=0)), path)
    return path.read_bytes()


CASES = [("alike", "default"), ("alike", "quick"), ("mixed", "default")]


@pytest.mark.slow
@pytest.mark.skipif(not available(), reason="processes are copied on Linux alone")
@pytest.mark.parametrize(("cluster", "space"), CASES)
def test_neither_processes_nor_their_timing_leave_a_trace(
    cluster: str, space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = written(planner(cluster, space).search(limits=Limits()), tmp_path)
    claim = ProcessGroup.claim
    monkeypatch.setattr(planning, "ProcessGroup", lambda size=1: ProcessGroup(size, min_candidates=0))
    for size, seed in ((2, 1), (3, 2)):

        def late(group: ProcessGroup, part: Hashable, seed: int = seed) -> bool:
            """Each process is slow at other times: others take its parts, and know of its times later."""
            if group.is_forked:
                own = random.Random(f"{seed} {group.rank} {time.monotonic_ns()}")
                time.sleep(own.choice([0.0, 0.0, MAX_DELAY_S]) * own.random())
            return claim(group, part)

        monkeypatch.setattr(ProcessGroup, "claim", late)
        assert written(planner(cluster, space).search(limits=Limits(), processes=size), tmp_path) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "space"), CASES)
def test_what_was_looked_at_before_is_not_seen_in_the_certificate_and_the_reasons(cluster: str, space: str) -> None:
    """Of an evaluator that has searched, and of one that has not been asked for anything."""
    warm = planner(cluster, space)
    best = warm.branch_and_bound(Limits()).run().best
    assert isinstance(best, Evaluation)
    best_s = best.prediction.step_time_s
    goals = [best_s, best_s / 1.02]
    fresh_evaluator = planner(cluster, space).evaluator
    reasons = [list(map(str, compare(one, warm.pool, best))) for one in (warm.evaluator, fresh_evaluator)]
    assert reasons[0] == reasons[1]
    first = warm.evaluator.bounds_s(0, warm.pool)
    few = sorted(range(len(warm.pool)), key=first.__getitem__)[:12]
    every = [(i, goal_s) for goal_s in goals for i in few]
    fresh = planner(cluster, space)
    for i, goal_s in reversed(every):
        candidate = warm.pool[i]
        for level in range(LEVELS):
            found = [made.evaluator.bounds_s(level, [candidate], goal_s) for made in (warm, fresh)]
            assert [min(bound_s, goal_s) for bound_s in found[0]] == [min(bound_s, goal_s) for bound_s in found[1]]
        assert warm.evaluator.closest_s(candidate, goal_s) == fresh.evaluator.closest_s(candidate, goal_s)

import logging
import os
import random
import signal
import time
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from autopar.planner import planner as planning
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.branch_and_bound import BranchAndBound
from autopar.planner.branch_and_bound.process_group import LostProcessError, ProcessGroup, can_fork
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.explain.reasons import compare
from autopar.planner.planner import Planner
from autopar.planner.search import Limits
from autopar.planner.space.space import load_space
from tests.support.clusters import two_kinds
from tests.support.planner.graphs import mlp
from tests.support.planner.interleaved import Known, candidate
from tests.support.planner.tasks import task_of
from tests.support.said import refuses

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are copied on Linux alone")


def planner(**fields: Any) -> Planner:
    return Planner(task_of(mlp(), **fields))


def timeless(plan: Plan) -> Plan:
    """But for how long the search took, and how many candidates it came to in that time."""
    return replace(plan, search=replace(plan.search, wall_time_s=0.0, evaluated=0))


By = Callable[..., Plan]


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> By:
    """A search by so many processes, however few candidates it has."""
    monkeypatch.setattr(planning, "ProcessGroup", lambda size=1: ProcessGroup(size, min_candidates=0))

    def search(size: int, made: Planner | None = None, progress: Any = None, **limits: Any) -> Plan:
        return (made or planner()).search(limits=Limits(**limits), processes=size, progress=progress)

    return search


def no_process_is_left() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG) == (0, 0)  # another test's
    except ChildProcessError:
        return True


@pytest.fixture(scope="module")
def alone() -> Plan:
    return timeless(planner().search(limits=Limits()))


def test_other_questions_ask_several_processes_too_and_no_plan_is_told_of_once(alone: Plan, by: By) -> None:
    made = planner()
    assert timeless(made.fastest(Limits(), processes=2)) == alone
    most_s = alone.search.lower_bound_s / 2
    assert made.fastest(Limits(max_step_time_s=most_s), processes=2) is None
    refuses(InfeasibleError, "at most", by, 2, max_step_time_s=most_s)
    assert no_process_is_left()


@pytest.mark.parametrize("dies", ["killed", "fails"])
def test_a_search_survives_its_processes(
    dies: str, alone: Plan, by: By, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, bounds_s = os.getpid(), Evaluator.bounds_s

    def dying(self: Evaluator, *given: Any, **named: Any) -> list[float]:
        if os.getpid() != first:
            if dies == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise KeyError("a fault")
        return bounds_s(self, *given, **named)

    monkeypatch.setattr(Evaluator, "bounds_s", dying)
    with caplog.at_level(logging.WARNING, "autopar"):
        assert timeless(by(3)) == alone
    said = "it was ended from outside" if dies == "killed" else "KeyError: 'a fault'"
    assert caplog.messages == [f"a process of the search ended early, one alone searches again: {said}"]
    assert no_process_is_left()


def test_an_interrupt_gives_the_best_so_far_and_leaves_no_process(alone: Plan, by: By) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if "best" in what:
            raise KeyboardInterrupt

    plan = by(2, progress=stop)
    assert plan.predicted.step_time_s >= alone.predicted.step_time_s
    assert any("interrupted" in note for note in plan.notes)
    assert not plan.search.reasons  # comparing alternatives would take as long as many evaluations
    assert no_process_is_left()


def test_an_interrupt_before_there_are_bounds_is_one(by: By, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes stand at another meeting than the last one."""
    first, allgather, calls = os.getpid(), ProcessGroup.allgather, []

    def interrupted(self: ProcessGroup, value: Any) -> list[Any]:
        calls.append(value)
        if os.getpid() == first and len(calls) == 1:
            raise KeyboardInterrupt
        return allgather(self, value)

    monkeypatch.setattr(ProcessGroup, "allgather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by(2)
    assert no_process_is_left()


def test_one_process_reports(by: By, tmp_path: Path) -> None:
    def note(what: str, done: int, total: int) -> None:
        with (tmp_path / "who").open("a") as who:
            print(os.getpid(), file=who)

    by(3, progress=note)
    assert {*(tmp_path / "who").read_text().split()} == {str(os.getpid())}


def test_a_limit_of_trials_is_for_one_process(by: By, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which candidates are the first is known to no process of several."""
    first, evaluate, others = os.getpid(), Evaluator.evaluate, []
    told = lambda self, *a, **k: (others.append(os.getpid() != first), evaluate(self, *a, **k))[1]
    monkeypatch.setattr(Evaluator, "evaluate", told)
    by(2, planner(space=replace(load_space("default"), exhaustive=0)), trials=2)
    assert not any(others)


def test_a_search_of_few_candidates_stays_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("it was not worth it"))
    assert len(planner().pool) < ProcessGroup().min_candidates
    planner().search(limits=Limits(), processes=2)


@settings(max_examples=10)
@given(
    numbers=st.lists(
        st.tuples(st.floats(1, 4), st.sampled_from([1.0, 1.0, 1.3, 2.0, float("inf")])), min_size=1, max_size=12
    ),
    size=st.integers(2, 3),
)
def test_any_times_and_bounds(numbers: list[tuple[float, float]], size: int) -> None:
    bounds, times = [bound for bound, _ in numbers], [bound * more for bound, more in numbers]
    pool = [candidate(i) for i in range(len(numbers))]

    def outcome(group: ProcessGroup) -> tuple[object, ...]:
        found = BranchAndBound(Known(bounds, times), pool, limits=Limits(), group=group).run()
        return found.best and pool.index(found.best.candidate), found.lower_bound_s, found.finished

    with ProcessGroup(size, min_candidates=0) as group:
        several = outcome(group)
    assert several == outcome(ProcessGroup())


def test_each_part_is_one_processs() -> None:
    with ProcessGroup(3) as group:
        group.fork([f"part {i}" for i in range(50)])
        mine = [i for i in range(50) if group.claim(f"part {i}")]
        claimed = group.allgather(mine)
        owners = [group.owner(f"part {i}") for i in range(50)]
        assert group.claim("no part") is (group.rank == 0) and group.owner("no part") == 0
        assert group.broadcast(lambda: f"of {group.rank}", owners[7]) == f"of {owners[7]}"
        assert group.broadcast(lambda: group.rank) == 0 and group.size == 3
    assert sorted(i for own in claimed for i in own) == list(range(50))
    assert all(owners[i] == rank for rank, own in enumerate(claimed) for i in own)
    assert group.size == 1


def test_what_no_process_can_send_is_an_error() -> None:
    with ProcessGroup(2) as group:
        group.fork(["part"])
        refuses(
            LostProcessError, "local object", group.allgather, SimpleNamespace() if group.rank == 0 else (lambda: None)
        )


# --- plan files

MAX_DELAY_S = 0.02


def of_space(cluster: str, space: str) -> Planner:
    kinds = {"alike": Cluster.parse("cpu:1x8"), "mixed": two_kinds(4, 4, factor=3.0)}
    made = replace(load_space(space), recompute=("none", "selective", "full"))
    graph = mlp(layers=9, width=64, hidden=256)
    return Planner(task_of(graph, cluster=kinds[cluster], global_batch_size=32, space=made))


def written(plan: Plan, folder: Path) -> bytes:
    timeless(plan).save(folder / "plan.json")
    return (folder / "plan.json").read_bytes()


CASES = [("alike", "default"), ("mixed", "default")]


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "space"), CASES)
def test_neither_processes_nor_their_timing_leave_a_trace(
    cluster: str, space: str, tmp_path: Path, by: By, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = written(of_space(cluster, space).search(limits=Limits()), tmp_path)
    claim = ProcessGroup.claim
    for size, seed in ((2, 1), (3, 2)):

        def late(group: ProcessGroup, part: Hashable, seed: int = seed) -> bool:
            """Each process is slow at other times: others take its parts, and know of its times later."""
            if group.is_forked:
                own = random.Random(f"{seed} {group.rank} {time.monotonic_ns()}")
                time.sleep(own.choice([0.0, 0.0, MAX_DELAY_S]) * own.random())
            return claim(group, part)

        monkeypatch.setattr(ProcessGroup, "claim", late)
        assert written(by(size, of_space(cluster, space)), tmp_path) == alone


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "space"), CASES)
def test_what_was_looked_at_before_is_not_seen_in_the_certificate_and_the_reasons(cluster: str, space: str) -> None:
    """Of an evaluator that has searched, and of one that has not been asked for anything."""
    warm = of_space(cluster, space)
    best = warm.branch_and_bound(Limits()).run().best
    goals = [best.prediction.step_time_s / part for part in (1.0, 1.02)]
    fresh_evaluator = of_space(cluster, space).evaluator
    reasons = [list(map(str, compare(one, warm.pool, best))) for one in (warm.evaluator, fresh_evaluator)]
    assert reasons[0] == reasons[1]
    first = warm.evaluator.bounds_s(0, warm.pool)
    few = sorted(range(len(warm.pool)), key=first.__getitem__)[:12]
    every = [(i, goal_s) for goal_s in goals for i in few]
    fresh = of_space(cluster, space)
    for i, goal_s in reversed(every):
        candidate = warm.pool[i]
        for level in range(LEVELS):
            found = [made.evaluator.bounds_s(level, [candidate], goal_s) for made in (warm, fresh)]
            assert [min(bound_s, goal_s) for bound_s in found[0]] == [min(bound_s, goal_s) for bound_s in found[1]]
        assert warm.evaluator.closest_s(candidate, goal_s) == fresh.evaluator.closest_s(candidate, goal_s)

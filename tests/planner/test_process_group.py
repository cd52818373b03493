"""One search by several processes gives the plan of one, with the same certificate, whichever of them die."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.plan.plan import Plan
from autopar.planner import planner as planning
from autopar.planner.branch_and_bound.branch_and_bound import BranchAndBound
from autopar.planner.branch_and_bound.process_group import LostProcessError, ProcessGroup, available
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.planner import Planner
from autopar.planner.search import Limits
from autopar.planner.space.space import load_space
from tests.support.planner.graphs import mlp
from tests.support.planner.interleaved import Known, candidate
from tests.support.planner.tasks import task_of

pytestmark = pytest.mark.skipif(not available(), reason="processes are copied on Linux alone")


def planner(**fields: Any) -> Planner:
    return Planner(task_of(mlp(), **fields))


def same(one: Plan, other: Plan) -> bool:
    """But for how many were evaluated, and for how long."""
    neutral = {"wall_time_s": 0.0, "evaluated": 0}
    return replace(one, search=replace(one.search, **neutral)) == replace(
        other, search=replace(other.search, **neutral)
    )


def by(size: int, monkeypatch: pytest.MonkeyPatch, made: Planner | None = None, **limits: Any) -> Plan:
    """A search by several processes, however few candidates it has."""
    monkeypatch.setattr(planning, "ProcessGroup", lambda size=1: ProcessGroup(size, min_candidates=0))
    return (planner() if made is None else made).search(limits=Limits(**limits), processes=size)


def no_process_is_left() -> bool:
    try:
        return os.waitpid(-1, os.WNOHANG) == (0, 0)  # another test's
    except ChildProcessError:
        return True


@pytest.fixture(scope="module")
def alone() -> Plan:
    return planner().search(limits=Limits())


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_give_the_plan_and_the_bound_of_one(
    size: int, alone: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert same(by(size, monkeypatch), alone)
    assert no_process_is_left()


def test_other_questions_ask_several_processes_too(alone: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "ProcessGroup", lambda size=1: ProcessGroup(size, min_candidates=0))
    made = planner()
    plan = made.fastest(Limits(), processes=2)
    assert plan is not None
    assert same(plan, alone)
    assert made.fastest(Limits(max_step_time_s=alone.search.lower_bound_s / 2), processes=2) is None
    assert no_process_is_left()


def test_pins_that_leave_no_plan_are_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = by(2, monkeypatch)
    with pytest.raises(InfeasibleError, match="at most"):
        by(2, monkeypatch, max_step_time_s=plan.search.lower_bound_s / 2)
    assert no_process_is_left()


@pytest.mark.parametrize("dies", ["killed", "fails"])
def test_a_search_survives_its_processes(
    dies: str, alone: Plan, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
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
        assert same(by(3, monkeypatch), alone)
    said = "it was ended from outside" if dies == "killed" else "KeyError: 'a fault'"
    assert caplog.messages == [f"a process of the search ended early, one alone searches again: {said}"]
    assert no_process_is_left()


def test_an_interrupt_gives_the_best_so_far_and_leaves_no_process(monkeypatch: pytest.MonkeyPatch, alone: Plan) -> None:
    made = planner()

    def stop(what: str, done: int, total: int) -> None:
        if "best" in what:
            raise KeyboardInterrupt

    monkeypatch.setattr(planning, "ProcessGroup", lambda size=1: ProcessGroup(size, min_candidates=0))
    plan = made.search(limits=Limits(), processes=2, progress=stop)
    assert plan.predicted.step_time_s >= alone.predicted.step_time_s
    assert any("interrupted" in note for note in plan.notes)
    assert no_process_is_left()


def test_an_interrupt_before_there_are_bounds_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other processes stand at another meeting than the last one."""
    first, allgather, calls = os.getpid(), ProcessGroup.allgather, []

    def interrupted(self: ProcessGroup, value: Any) -> list[Any]:
        calls.append(value)
        if os.getpid() == first and len(calls) == 1:
            raise KeyboardInterrupt
        return allgather(self, value)

    monkeypatch.setattr(ProcessGroup, "allgather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        by(2, monkeypatch)
    assert no_process_is_left()


def test_one_process_reports(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planning, "ProcessGroup", lambda size=1: ProcessGroup(size, min_candidates=0))

    def note(what: str, done: int, total: int) -> None:
        with (tmp_path / "who").open("a") as who:
            print(os.getpid(), file=who)

    planner().search(limits=Limits(), processes=3, progress=note)
    assert {*(tmp_path / "who").read_text().split()} == {str(os.getpid())}


def test_a_limit_of_trials_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which candidates are the first is known to no process of several."""
    first, evaluate = os.getpid(), Evaluator.evaluate
    others = []
    monkeypatch.setattr(
        Evaluator, "evaluate", lambda self, *a, **k: (others.append(os.getpid() != first), evaluate(self, *a, **k))[1]
    )
    made = planner(space=replace(load_space("default"), exhaustive=0))
    by(2, monkeypatch, made, trials=2)
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
        found = BranchAndBound(
            Known(bounds, times),
            pool,
            limits=Limits(),
            group=group,  # type: ignore[arg-type]
        ).run()
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
        assert group.claim("no part") is (group.rank == 0)
        assert group.owner("no part") == 0
        assert group.broadcast(lambda: f"of {group.rank}", owners[7]) == f"of {owners[7]}"
        assert group.broadcast(lambda: group.rank) == 0
        assert group.size == 3
    assert sorted(i for own in claimed for i in own) == list(range(50))
    assert all(owners[i] == rank for rank, own in enumerate(claimed) for i in own)
    assert group.size == 1


def send_what_cannot_be() -> None:
    with ProcessGroup(2) as group:
        group.fork(["part"])
        group.allgather(SimpleNamespace() if group.rank == 0 else (lambda: None))


def test_what_no_process_can_send_is_an_error() -> None:
    with pytest.raises(LostProcessError, match="pickle"):
        send_what_cannot_be()

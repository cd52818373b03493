"""Searches that take turns: each in a thread of its own, which goes on only when it is told to."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from autopar.plan.mesh import Mesh
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.branch_and_bound import BranchAndBound
from autopar.planner.branch_and_bound.frontier import LocalLedger, Result
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.search import SLOW, Evaluation, Misfit
from autopar.planner.space.candidates import Candidate


class Died(BaseException):
    """A search that is killed where it stands: nothing that it does on an error is done."""


class Turns:
    """Work in a thread that stops at each call of :meth:`pause` until its next turn."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.is_over = False
        self._dies = False
        self._error: Exception | None = None
        self._go, self._stands = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            self._wait()
            work()
        except Died:
            pass
        except Exception as error:  # noqa: BLE001  raised again in the thread that asks
            self._error = error
        self.is_over = True
        self._stands.release()

    def pause(self) -> None:
        self._stands.release()
        self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._dies:
            raise Died

    def go_on(self) -> bool:
        """Let the work go on to its next pause; whether there was one."""
        if not self.is_over:
            self._go.release()
            self._stands.acquire()
        if self._error is not None:
            raise self._error
        return not self.is_over

    def kill(self) -> None:
        self._dies = True
        self.go_on()
        self._thread.join()

    def finish(self) -> None:
        """Let the work go on to its end."""
        while self.go_on():
            pass
        self._thread.join()


def candidate(index: int) -> Candidate:
    """Of one of three splits, so that bounds are asked for in groups."""
    return Candidate(
        mesh=Mesh(tp=1 + index % 3, dp_shard=1 + index), micro_batch_size=1, num_micro_batches=1, zero_stage=1,
        schedule="none", virtual_stages=1,
    )  # fmt: skip


@dataclass
class Known:
    """An evaluator of candidates whose bounds and times are given; infinite: it has no plan."""

    bounds: Sequence[float]
    times: Sequence[float]
    asked: list[int] = field(default_factory=list)
    pause: Callable[[], None] = lambda: None
    layouts: Any = field(default_factory=lambda: SimpleNamespace(memos=dict, learn=lambda memos: None))
    model: Any = field(default_factory=lambda: SimpleNamespace(is_mixed=False))

    def _index(self, found: Candidate) -> int:
        return found.mesh.dp_shard - 1

    def bounds_s(self, level: int, pool: Sequence[Candidate], goal_s: float = float("inf")) -> list[float]:
        """The last one is worked out to the end below ``goal_s`` alone."""
        part = (level + 2) / (LEVELS + 1)
        found = [self.bounds[self._index(c)] for c in pool]
        return [
            part * bound_s if level < LEVELS - 1 else min(bound_s, max(0.75 * bound_s, goal_s)) for bound_s in found
        ]

    def chained_s(self, found: Candidate, goal_s: float) -> float:
        return 0.0

    def closest_s(
        self, found: Candidate, goal_s: float, known: Sequence[object] = (), *, whole_s: float = 0.0
    ) -> tuple[float, tuple[()]]:
        return min(self.times[self._index(found)], 1.5 * self.bounds[self._index(found)], goal_s), ()

    def evaluate(self, found: Candidate, *, at_most_s: float = float("inf")) -> Evaluation | Misfit:
        index = self._index(found)
        self.asked.append(index)
        self.pause()
        if self.times[index] == float("inf"):
            return Misfit(candidate=found, reason="memory", needs_bytes=8)
        if self.times[index] * (1 + 2e-9) >= at_most_s:  # by a bound inside, which is above it by rounding
            return Misfit(candidate=found, reason=SLOW)
        prediction = SimpleNamespace(step_time_s=self.times[index], peak_memory_bytes=1)
        return Evaluation(candidate=found, layout=None, stops=(), modes=(), prediction=prediction)


@dataclass
class Board:
    """What all searches have written."""

    results: list[tuple[int, Result]] = field(default_factory=list)
    claimed: dict[int, int] = field(default_factory=dict)


class View(LocalLedger):
    """The ledger of one search: it knows of the others what it has read."""

    is_shared = True

    def __init__(self, board: Board) -> None:
        super().__init__(ProcessGroup())
        self.board = board
        self.pause: Callable[[], None] = lambda: None
        self.claimed: Mapping[int, int] = {}

    @property
    def incumbent_s(self) -> float:
        return min((one.time_s for one in self.results.values() if one.time_s is not None), default=float("inf"))

    def read(self) -> None:
        self.pause()
        self._take_in()

    def _take_in(self) -> None:
        self.claimed = dict(self.board.claimed)
        for index, result in self.board.results:
            before = self.results.get(index)
            if before is None or before.at_least_s is not None:
                self.results[index] = result

    def is_claimed(self, index: int) -> bool:
        return index in self.claimed

    def claim(self, index: int, bound_s: float) -> None:
        self.board.claimed[index] = 1
        self.pause()

    def release(self, index: int) -> None:
        self.board.claimed.pop(index, None)

    def record(self, index: int, result: Result) -> None:
        self.board.results.append((index, result))
        self.board.claimed.pop(index, None)
        self._take_in()


def in_turns(known: Known, make: Callable[[Known], BranchAndBound]) -> tuple[BranchAndBound, Turns]:
    """A search that stops before it reads the ledger, after it has claimed a candidate, and while it evaluates one."""
    known = replace(known)
    made = make(known)
    turns = Turns(made.work)
    known.pause = made.ledger.pause = turns.pause
    return made, turns


def interleave(
    known: Known, make: Callable[[Known], BranchAndBound], workers: int, turns: Sequence[tuple[int, int]], deadly: int
) -> BranchAndBound:
    """Give turns to searches until the last one has come to its end, and return it; where a number is ``deadly``, kill one."""
    running = {w: in_turns(known, make)[1] for w in range(1, workers)}
    made, last = in_turns(known, make)
    for worker, chance in turns:
        if worker in running:
            if chance == deadly:
                running.pop(worker).kill()
            elif not running[worker].go_on():
                del running[worker]
        if not worker or chance % 2:
            last.go_on()
    last.finish()
    for left in running.values():
        left.kill()
    return made

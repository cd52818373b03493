"""Several processes for one search: copies of the one that began it, made when its candidates are known.

All run the same code. Layouts are what costs time, and candidates that share theirs are a part of the work: a process takes
the next part that nobody has, in the one order of bounds (``docs/adr/0017-processes.md``). The least time found is in
memory that all share, everything else is told where they meet. The first process alone goes on in the end; were one of the
others to die, it searches again by itself.
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TypeVar

import numpy as np

from autopar.planner.branch_and_bound.ledger import Ledger, Told

T = TypeVar("T")

MOST = 4
"""Processes that a search takes by itself: its parts are few, and each process holds what it has worked out."""

MANY = 200
"""Candidates from which on other processes are worth what it takes to make them."""

MAX_REASONS = 10
"""Neighbours that a plan is compared with in the end: each comparison is a part of the work, by its number."""


class LostProcessError(Exception):
    """A process of a search ended, with what it said."""


def available() -> bool:
    """Whether a process can be copied on this system, as threads and devices leave it safe to."""
    return hasattr(os, "fork") and os.uname().sysname == "Linux"


def cores() -> int:
    """On which this process may run, at most :data:`MOST`; one where processes cannot be copied."""
    return min(MOST, len(os.sched_getaffinity(0))) if available() else 1


class Crew:
    """The processes of one search; this one alone until :meth:`fork`.

    A copy never leaves the ``with`` of its crew: there it ends.

    Args:
        size: processes, this one included.
        many: candidates from which on there are others.

    Attributes:
        rank: of this process; the one that began the search has 0.
        is_forked: whether there are others.
        least_s: least time that any of them has found.
    """

    def __init__(self, size: int = 1, *, many: int = MANY) -> None:
        self.wanted, self.many, self.rank, self.is_forked = size, many, 0, False
        self._others: list[tuple[int, Connection]] = []
        """Of the first process: the ids of the others, and the ways to them."""
        self._first: Connection | None = None
        self._parent = 0

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.rank:
            self._leave(error)
        self.dissolve()

    def ledger(self) -> Ledger:
        """Of one of these processes."""
        return _CrewLedger(self)

    # --- from one process to several

    def fork(self, parts: Collection[Hashable]) -> None:
        """Make the others; all return from here.

        Args:
            parts: of the work.
        """
        if self.wanted == 1 or self.is_forked:
            return
        size, self._parts = self.wanted, {part: i for i, part in enumerate((*parts, *range(MAX_REASONS)))}
        memory = mmap.mmap(-1, 16 * size + 8 + len(self._parts))
        self._least = np.frombuffer(memory, np.float64, size)
        self._done = np.frombuffer(memory, np.int64, size, offset=8 * size)
        self._stopped = np.frombuffer(memory, np.int64, 1, offset=16 * size)
        self._owners = np.frombuffer(memory, np.int8, len(self._parts), offset=16 * size + 8)
        self._least[:] = math.inf
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115  closed with the crew
        self._parent = os.getpid()
        self.is_forked = True
        for rank in range(1, size):
            ours, theirs = multiprocessing.Pipe()
            pid = _fork()
            if pid == 0:
                self._begin(rank, theirs, ours)
                return
            theirs.close()
            self._others.append((pid, ours))

    def _begin(self, rank: int, first: Connection, own: Connection) -> None:
        """A copy: an interrupt is the first process's to answer."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        own.close()
        for _, connection in self._others:
            connection.close()
        self.rank, self._first, self._others = rank, first, []

    def dissolve(self) -> None:
        """The first process goes on alone."""
        for pid, connection in self._others:
            connection.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if self.is_forked:
            self._lock.close()
        self._others, self.is_forked, self.wanted = [], False, 1

    def _leave(self, error: BaseException | None) -> None:
        """The end of a copy; the first process is told of an error."""
        assert self._first is not None
        with suppress(OSError):
            if error is not None:
                self._first.send((None, "".join(traceback.format_exception(error)[-1:]).strip()))
        os._exit(0)

    # --- work

    @property
    def least_s(self) -> float:
        return float(self._least.min()) if self.is_forked else math.inf

    @property
    def num_done(self) -> int:
        """Candidates that the others have come to."""
        return int(self._done.sum() - self._done[self.rank]) if self.is_forked else 0

    @property
    def is_stopped(self) -> bool:
        """Whether the work ends here: by the first process, or because it is gone."""
        return self.is_forked and (bool(self._stopped[0]) or (self.rank > 0 and os.getppid() != self._parent))

    def stop(self) -> None:
        """No process begins anything more."""
        if self.is_forked:
            self._stopped[0] = 1

    def came_to(self, count: int) -> None:
        """Say how many candidates this process has come to."""
        if self.is_forked:
            self._done[self.rank] = count

    def found(self, time_s: float) -> None:
        """Say a time."""
        if self.is_forked:
            self._least[self.rank] = min(self._least[self.rank], time_s)

    def takes(self, part: Hashable) -> bool:
        """Whether a part is this process's, which it becomes if it is nobody's; what is no part is the first one's."""
        if not self.is_forked:
            return True
        number = self._parts.get(part)
        if number is None:
            return self.rank == 0
        if not self._owners[number]:
            import fcntl  # not on systems where processes cannot be copied

            fcntl.lockf(self._lock, fcntl.LOCK_EX)  # let go by the system where a process dies
            try:
                if not self._owners[number]:
                    self._owners[number] = 1 + self.rank
            finally:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)
        return bool(self._owners[number] == 1 + self.rank)

    def share(self, items: Sequence[T], weight: Callable[[T], float]) -> list[T]:
        """Of these the ones for this process: the heaviest first, each for the one that has the least."""
        loads, mine = [0.0] * (self.wanted if self.is_forked else 1), []
        for item in sorted(items, key=lambda item: -weight(item)):
            rank = loads.index(min(loads))
            loads[rank] += weight(item)
            if rank == self.rank:
                mine.append(item)
        return mine

    def owner(self, part: Hashable) -> int:
        """The rank of the process of a part, 0 where it is nobody's; settled once all have met."""
        if not self.is_forked or part not in self._parts:
            return 0
        return max(0, int(self._owners[self._parts[part]]) - 1)

    def distance(self, part: Hashable) -> int:
        """0 for a part of this process, 1 for one that is nobody's, 2 for another's."""
        number = self._parts.get(part) if self.is_forked else None
        if number is None or not self._owners[number]:
            return 1
        return 0 if self._owners[number] == 1 + self.rank else 2

    # --- meetings: every process comes to each of them, in the same order

    def gather(self, value: T) -> list[T]:
        """What each process brings, by rank.

        Raises:
            LostProcessError: another one has ended.
        """
        if not self.is_forked:
            return [value]
        try:
            if self._first is not None:
                self._first.send((value, ""))
                told: list[T] = self._first.recv()
                return told
            values = [value]
            for _, connection in self._others:
                brought, error = connection.recv()
                if error:
                    raise LostProcessError(error)
                values.append(brought)
            for _, connection in self._others:
                connection.send(values)
        except (EOFError, OSError) as error:
            raise LostProcessError("it was ended from outside") from error
        return values

    def of_first(self, ask: Callable[[], T]) -> T:
        """What the first process has to say."""
        found = self.gather(ask() if self.rank == 0 else None)[0]
        assert found is not None
        return found

    def of_owner(self, part: Hashable, ask: Callable[[], T]) -> T:
        """What the process of a part has to say."""
        owner = self.owner(part)
        found = self.gather(ask() if owner == self.rank else None)[owner]
        assert found is not None
        return found


class _CrewLedger:
    """Its own outcomes, and the least time that any process has found."""

    is_shared = False

    def __init__(self, crew: Crew) -> None:
        self.found: dict[int, Told] = {}
        self._crew, self._own_s = crew, math.inf

    @property
    def least_s(self) -> float:
        return min(self._own_s, self._crew.least_s)

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Nobody sees it."""

    def tidy(self, excluded_s: Callable[[int], float | None]) -> None:
        """Nothing is open."""

    def read(self) -> None:
        """What there is to read, is read when it is asked for."""

    def is_running(self, index: int) -> bool:
        return False  # no other process comes to the same candidates

    def claim(self, index: int, bound_s: float) -> None:
        """Nobody else asks."""

    def release(self, index: int) -> None:
        """Nobody else asks."""

    def tell(self, index: int, told: Told) -> None:
        self.found[index] = told
        if told.time_s is not None:
            self._own_s = min(self._own_s, told.time_s)
            self._crew.found(told.time_s)


def _fork() -> int:
    """A copy of this process.

    It computes, speaks through its pipe and ends without cleaning up: it asks for no lock that another thread of the first
    process may hold, of which Python warns.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()

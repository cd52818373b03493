"""Several processes for one search: copies of the one that began it, made when its candidates are known.

All processes run the same code. Layouts are what costs time, so the work is divided into parts of candidates that share
their layouts: a process claims the next part that nobody has, in the one order of dual bounds. The least time found so far
(the incumbent) lies in memory that all share; everything else is exchanged where all meet (:meth:`ProcessGroup.allgather`,
:meth:`ProcessGroup.broadcast`). The first process alone goes on in the end. Were another one to die, the first one searches
again by itself (``docs/adr/0023-planner.md``).
"""

from __future__ import annotations

import math
import mmap
import multiprocessing
import os
import signal
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Hashable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

T = TypeVar("T")

MAX_PROCESSES = 4
"""Processes that a search takes by itself: its parts are few, and each process holds what it has worked out."""

MIN_CANDIDATES = 200
"""Candidates from which on further processes are worth what it takes to make them."""


class LostProcessError(Exception):
    """A process of a search ended, with what it said."""


def available() -> bool:
    """Whether a process can be copied on this system, as threads and devices leave it safe to."""
    return hasattr(os, "fork") and os.uname().sysname == "Linux"


def cores() -> int:
    """Cores on which this process may run, at most :data:`MAX_PROCESSES`; one where processes cannot be copied."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0))) if available() else 1


def idle_cores() -> int:
    """As :func:`cores`; one where copies of this process would not know of its threads, devices or other ranks."""
    is_busy = torch.cuda.is_initialized() or (dist.is_available() and dist.is_initialized())  # type: ignore[no-untyped-call]
    return cores() if threading.active_count() == 1 and not is_busy else 1


class ProcessGroup:
    """The processes of one search; this one alone until :meth:`fork`.

    A copy never leaves the ``with`` of its group: it ends there.

    Args:
        max_size: processes after :meth:`fork`, this one included.
        min_candidates: candidates from which on a search makes the others.

    Attributes:
        rank: of this process; the one that began the search has 0.
        size: processes that there are now.
    """

    def __init__(self, max_size: int = 1, *, min_candidates: int = MIN_CANDIDATES) -> None:
        self.max_size, self.min_candidates = max_size, min_candidates
        self.rank, self.size = 0, 1
        self._children: list[
            tuple[int, Connection]
        ] = []  # of the first process: the others' ids, and the pipes to them
        self._first: Connection | None = None  # of the others: the pipe to the first process
        self._first_pid = 0

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.rank:
            self._leave(error)
        self.dissolve()

    @property
    def is_forked(self) -> bool:
        """Whether there are other processes."""
        return self.size > 1

    # --- from one process to several

    def fork(self, parts: Collection[Hashable]) -> None:
        """Make the other processes; all return from here.

        Args:
            parts: of the work, each of which one process will claim.
        """
        if self.max_size == 1 or self.is_forked:
            return
        size = self.max_size
        self._parts = {part: i for i, part in enumerate(dict.fromkeys(parts))}
        memory = mmap.mmap(-1, 16 * size + 8 + len(self._parts))
        self._least_s = np.frombuffer(memory, np.float64, size)
        self._num_done = np.frombuffer(memory, np.int64, size, offset=8 * size)
        self._stopped = np.frombuffer(memory, np.int64, 1, offset=16 * size)
        self._owners = np.frombuffer(
            memory, np.int8, len(self._parts), offset=16 * size + 8
        )  # 0: of nobody, else 1 + rank
        self._least_s[:] = math.inf
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115  closed with the group
        self._first_pid = os.getpid()
        self.size = size
        for rank in range(1, size):
            ours, theirs = multiprocessing.Pipe()
            pid = _fork()
            if pid == 0:
                self._begin(rank, theirs, ours)
                return
            theirs.close()
            self._children.append((pid, ours))

    def _begin(self, rank: int, first: Connection, parents_end: Connection) -> None:
        """The begin of a copy: an interrupt is the first process's to answer."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parents_end.close()
        for _, connection in self._children:
            connection.close()
        self.rank, self._first, self._children = rank, first, []

    def dissolve(self) -> None:
        """End the other processes, each where it stands or comes to this; the first one goes on alone."""
        if self.rank:
            self._leave(None)
        for pid, connection in self._children:
            connection.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if self.is_forked:
            self._lock.close()
        self._children, self.size, self.max_size = [], 1, 1

    def _leave(self, error: BaseException | None) -> None:
        """The end of a copy; the first process is told of an error."""
        assert self._first is not None
        with suppress(OSError):
            if error is not None:
                self._first.send((None, "".join(traceback.format_exception(error)[-1:]).strip()))
        os._exit(0)

    # --- what all see at once

    @property
    def incumbent_s(self) -> float:
        """The least time that any process has offered; infinite before there is one."""
        return float(self._least_s.min()) if self.is_forked else math.inf

    def offer(self, time_s: float) -> None:
        """Let all know of a plan of this time."""
        if self.is_forked:
            self._least_s[self.rank] = min(self._least_s[self.rank], time_s)

    def count(self, num_done: int) -> None:
        """Let all know how many candidates this process has come to."""
        if self.is_forked:
            self._num_done[self.rank] = num_done

    @property
    def num_done_elsewhere(self) -> int:
        """Candidates that the other processes have come to."""
        return int(self._num_done.sum() - self._num_done[self.rank]) if self.is_forked else 0

    def stop(self) -> None:
        """No process begins anything more."""
        if self.is_forked:
            self._stopped[0] = 1

    @property
    def is_stopped(self) -> bool:
        """Whether the work ends here: by :meth:`stop`, or because the first process is gone."""
        return self.is_forked and (bool(self._stopped[0]) or (self.rank > 0 and os.getppid() != self._first_pid))

    # --- who does what

    def claim(self, part: Hashable) -> bool:
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
        return self.owner(part) == self.rank

    def owner(self, part: Hashable) -> int:
        """The rank of the process that has claimed a part, 0 where nobody has; settled once all have met."""
        if not self.is_forked or part not in self._parts:
            return 0
        return max(0, int(self._owners[self._parts[part]]) - 1)

    # --- meetings: every process comes to each of them, in the same order

    def others_wait(self, timeout_s: float) -> bool:
        """Of the first process: whether each other one has come to the next meeting, or ended; asked for so long at most."""
        return all(connection.poll(timeout_s) for _, connection in self._children)

    def allgather(self, value: T) -> list[T]:
        """What each process brings, by rank.

        Raises:
            LostProcessError: another process has ended.
        """
        if not self.is_forked:
            return [value]
        try:
            if self._first is not None:
                self._first.send((value, ""))
                received: list[T] = self._first.recv()
                return received
            values = [value]
            for _, connection in self._children:
                brought, error = connection.recv()
                if error:
                    raise LostProcessError(error)
                values.append(brought)
            for _, connection in self._children:
                connection.send(values)
        except (EOFError, OSError) as error:
            raise LostProcessError("it was ended from outside") from error
        return values

    def broadcast(self, make: Callable[[], T], root: int = 0) -> T:
        """What ``make`` gives in the process of rank ``root``, which alone calls it.

        Raises:
            LostProcessError: another process has ended.
        """
        made = self.allgather(make() if root == self.rank else None)[root]
        assert made is not None
        return made


def _fork() -> int:
    """A copy of this process.

    It computes, speaks through its pipe and ends without cleaning up: it asks for no lock that another thread of the first
    process may hold, of which Python warns.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()

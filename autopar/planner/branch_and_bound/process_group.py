"""Several processes for one search: forks of the process that began it, made once the candidates are known.

All processes run the same code. Layouts cost most of the time, so the work is divided into parts of candidates that share their layouts:
a process claims the next unclaimed part, in the order of dual bounds. The incumbent's time lies in shared memory. Everything else is
exchanged at meetings (:meth:`ProcessGroup.allgather`, :meth:`ProcessGroup.broadcast`), which all processes reach in the same order.

At the end the first process goes on alone. If another process dies, the first one searches again by itself
(``docs/adr/0023-planner.md``).
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
"""The number of processes that a search uses by default at most: it has few parts, and each process keeps its layouts in memory."""

MIN_CANDIDATES = 200
"""The number of candidates from which on further processes are worth the time of their start."""


class LostProcessError(Exception):
    """A process of the group ended; the message is its error."""


def can_fork() -> bool:
    """Return whether processes can be forked safely on this system (Linux)."""
    return hasattr(os, "fork") and os.uname().sysname == "Linux"


def cores() -> int:
    """Return the number of cores on which this process may run, at most :data:`MAX_PROCESSES`; 1 where processes cannot be forked."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0))) if can_fork() else 1


def idle_cores() -> int:
    """Return :func:`cores`; 1 if this process has other threads, uses a device or is a rank of a job, none of which a fork would copy."""
    is_busy = torch.cuda.is_initialized() or (dist.is_available() and dist.is_initialized())  # type: ignore[no-untyped-call]
    return cores() if threading.active_count() == 1 and not is_busy else 1


class ProcessGroup:
    """The processes of one search; only this one until :meth:`fork`.

    A forked process never leaves the ``with`` block of its group: it exits there.

    Args:
        max_size: the number of processes after :meth:`fork`, this one included.
        min_candidates: the number of candidates from which on a search forks.

    Attributes:
        rank: the rank of this process; 0 is the one that began the search.
        size: the number of processes now.
    """

    def __init__(self, max_size: int = 1, *, min_candidates: int = MIN_CANDIDATES) -> None:
        self.max_size, self.min_candidates = max_size, min_candidates
        self.rank, self.size = 0, 1
        self._children: list[
            tuple[int, Connection]
        ] = []  # in the first process: the id of each other process and the pipe to it
        self._first: Connection | None = None  # in the other processes: the pipe to the first process
        self._first_pid = 0

    def __enter__(self) -> ProcessGroup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.rank:
            self._exit_child(error)
        self.dissolve()

    @property
    def is_forked(self) -> bool:
        """Whether there are several processes."""
        return self.size > 1

    # --- from one process to several

    def fork(self, parts: Collection[Hashable]) -> None:
        """Start the other processes; every process returns from this call.

        Args:
            parts: the parts of the work; one process will claim each.
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
        )  # 0: unclaimed, else 1 + the owner's rank
        self._least_s[:] = math.inf
        self._lock = tempfile.TemporaryFile()  # noqa: SIM115  closed by dissolve
        self._first_pid = os.getpid()
        self.size = size
        for rank in range(1, size):
            ours, theirs = multiprocessing.Pipe()
            pid = _fork()
            if pid == 0:
                self._set_up_child(rank, theirs, ours)
                return
            theirs.close()
            self._children.append((pid, ours))

    def _set_up_child(self, rank: int, first: Connection, parents_end: Connection) -> None:
        """Set up a forked process. It ignores Ctrl-C, which the first process handles."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parents_end.close()
        for _, connection in self._children:
            connection.close()
        self.rank, self._first, self._children = rank, first, []

    def dissolve(self) -> None:
        """End the other processes and go on alone; called in another process, it ends that one."""
        if self.rank:
            self._exit_child(None)
        for pid, connection in self._children:
            connection.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if self.is_forked:
            self._lock.close()
        self._children, self.size, self.max_size = [], 1, 1

    def _exit_child(self, error: BaseException | None) -> None:
        """End a forked process, after it has sent its error, if any, to the first process."""
        assert self._first is not None
        with suppress(OSError):
            if error is not None:
                self._first.send((None, "".join(traceback.format_exception(error)[-1:]).strip()))
        os._exit(0)

    # --- shared memory

    @property
    def incumbent_s(self) -> float:
        """The least step time in seconds that any process has offered; infinite before there is one."""
        return float(self._least_s.min()) if self.is_forked else math.inf

    def offer(self, time_s: float) -> None:
        """Offer the step time of a plan in seconds to all processes."""
        if self.is_forked:
            self._least_s[self.rank] = min(self._least_s[self.rank], time_s)

    def count(self, num_done: int) -> None:
        """Publish how many candidates this process has visited."""
        if self.is_forked:
            self._num_done[self.rank] = num_done

    @property
    def num_done_elsewhere(self) -> int:
        """The number of candidates that the other processes have visited."""
        return int(self._num_done.sum() - self._num_done[self.rank]) if self.is_forked else 0

    def stop(self) -> None:
        """Ask all processes to begin no further candidate."""
        if self.is_forked:
            self._stopped[0] = 1

    @property
    def is_stopped(self) -> bool:
        """Whether the processes are to stop: after :meth:`stop`, or because the first process has ended."""
        return self.is_forked and (bool(self._stopped[0]) or (self.rank > 0 and os.getppid() != self._first_pid))

    # --- parts of the work

    def claim(self, part: Hashable) -> bool:
        """Claim a part if it is unclaimed, and return whether this process owns it; rank 0 owns what is no part."""
        if not self.is_forked:
            return True
        number = self._parts.get(part)
        if number is None:
            return self.rank == 0
        if not self._owners[number]:
            import fcntl  # missing on systems that cannot fork

            fcntl.lockf(self._lock, fcntl.LOCK_EX)  # the system releases it if the process dies
            try:
                if not self._owners[number]:
                    self._owners[number] = 1 + self.rank
            finally:
                fcntl.lockf(self._lock, fcntl.LOCK_UN)
        return self.owner(part) == self.rank

    def owner(self, part: Hashable) -> int:
        """Return the rank of the process that has claimed a part, 0 if none has; final once all processes have met."""
        if not self.is_forked or part not in self._parts:
            return 0
        return max(0, int(self._owners[self._parts[part]]) - 1)

    # --- meetings: every process calls each of them, in the same order

    def others_wait(self, timeout_s: float) -> bool:
        """Return, in the first process, whether each other one has reached the next meeting or ended; waits ``timeout_s`` for each at most."""
        return all(connection.poll(timeout_s) for _, connection in self._children)

    def allgather(self, value: T) -> list[T]:
        """Return the values of all processes, by rank.

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
                received_value, error = connection.recv()
                if error:
                    raise LostProcessError(error)
                values.append(received_value)
            for _, connection in self._children:
                connection.send(values)
        except (EOFError, OSError) as error:
            raise LostProcessError("it was ended from outside") from error
        return values

    def broadcast(self, make: Callable[[], T], root: int = 0) -> T:
        """Call ``make`` in the process of rank ``root`` alone and return its value in all.

        Raises:
            LostProcessError: another process has ended.
        """
        value = self.allgather(make() if root == self.rank else None)[root]
        assert value is not None
        return value


def _fork() -> int:
    """Fork this process and return the child's id, 0 in the child.

    Python warns that another thread of the first process may hold a lock. A child asks for none: it computes, writes to its pipe and exits
    without cleaning up.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()

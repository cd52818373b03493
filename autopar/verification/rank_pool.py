"""A pool of local worker processes that run jobs as the ranks of one gloo world.

Workers are forked from a server process that has imported torch once, so that a job costs its own
work and not an import. Every job gets a process group of its own, over a fresh file, and a hard time
limit: a job that exceeds it, or loses a rank, ends with its workers killed; the next one gets new ones.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from autopar.errors import AutoparError

_LOG = logging.getLogger(__name__)

_CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL))
"""Of which a job is run once more: a thread of gloo has been seen to crash in one of thousands of jobs, and that says nothing
of the job. One that crashes by itself does so again."""

_GRACE_S = 3.0
"""How long the others may still answer after one rank has failed: they say more than a time-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """``died``: of which signal the process did, 0 if of none."""

    value: Any = None
    failure: str = ""
    died: int = 0


MAX_JOBS = 8
"""After so many jobs workers are replaced: torch's caches hold on to some of a job's groups, whose threads never sleep."""


@dataclass(slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection


class WorkerPool:
    """``size`` worker processes; :meth:`run` makes them the ranks of one world.

    Args:
        size: how many workers.
        preload: modules that the server imports before it forks (those that jobs need and that start
            no threads).

    Use as a context manager, or call :meth:`close`.
    """

    def __init__(self, size: int, *, preload: Sequence[str] = ("torch",)) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload, __name__])
        self._workers: list[_Worker] = []
        self._jobs = 0

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, size: int | None = None, timeout_s: float = 120.0
    ) -> tuple[Any, ...]:
        """``function(*args)`` on each of the first ``size`` workers, in one process group: a value a rank.

        Args:
            function: importable by name; it finds its rank by ``torch.distributed.get_rank()``.
            args: picklable.
            size: ranks; all workers when None.
            timeout_s: for the whole job, after which its workers are killed.

        Raises:
            AutoparError: a rank failed (its traceback is in the message), crashed twice, or the time is up.
        """
        size = self.size if size is None else size
        outcomes = self._attempt(function, args, size, timeout_s)
        if any(o.died in _CRASHES for o in outcomes):
            _LOG.warning("a worker crashed (signal %d): the job is run again", max(o.died for o in outcomes))
            outcomes = self._attempt(function, args, size, timeout_s)
        failures = [f"rank {rank}: {o.failure}" for rank, o in enumerate(outcomes) if o.failure]
        if failures:
            raise AutoparError(
                f"{len(failures)} of {size} ranks failed",
                got="\n" + "\n".join(failures),
                fix="Correct what the first of them reports",
            )
        return tuple(outcome.value for outcome in outcomes)

    def _attempt(
        self, function: Callable[..., Any], args: tuple[Any, ...], size: int, timeout_s: float
    ) -> list[_Outcome]:
        if self._jobs == MAX_JOBS:
            self.close()
        self._start()
        self._jobs += 1
        workers = self._workers[:size]
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            job = pickle.dumps((function, args, str(Path(folder) / "store"), size, timeout_s))
            for worker in workers:
                worker.connection.send_bytes(job)
            outcomes = self._collect(workers, timeout_s)
        if any(o.failure for o in outcomes):
            self.close(kill=True)
        return outcomes

    def close(self, *, kill: bool = False) -> None:
        """Ends the workers; ``kill`` does not wait for what they do."""
        for worker in self._workers:
            if not kill:
                with suppress(OSError):  # the worker is gone, which is what was asked for
                    worker.connection.send_bytes(b"")
            worker.connection.close()
        deadline = time.monotonic() + (0.0 if kill else _GRACE_S)
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers, self._jobs = [], 0

    def _start(self) -> None:
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close(kill=True)
        while len(self._workers) < self.size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs, len(self._workers)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _collect(self, workers: list[_Worker], timeout_s: float) -> list[_Outcome]:
        outcomes: dict[int, _Outcome] = {}
        deadline = time.monotonic() + timeout_s
        late = f"no answer within {timeout_s:g} s"
        while len(outcomes) < len(workers):
            pending = {id(w.connection): rank for rank, w in enumerate(workers) if rank not in outcomes}
            ready = wait([workers[rank].connection for rank in pending.values()], deadline - time.monotonic())
            if not ready:
                break
            for connection in ready:
                rank = pending[id(connection)]
                outcome = outcomes[rank] = _receive(workers[rank])
                if outcome.failure and not any(o.failure for o in outcomes.values() if o is not outcome):
                    deadline, late = min(deadline, time.monotonic() + _GRACE_S), "waited for the one that failed"
        return [outcomes.get(rank, _Outcome(failure=late)) for rank in range(len(workers))]


def _receive(worker: _Worker) -> _Outcome:
    try:
        answer = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(_GRACE_S)
        died = max(0, -(worker.process.exitcode or 0))
        return _Outcome(failure="the process died" + (f" of signal {died}" if died else ""), died=died)
    assert isinstance(answer, _Outcome)
    return answer


def _serve(connection: Connection, rank: int) -> None:
    """A worker's life: jobs from the pipe, one after the other, until an empty message."""
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported stays: a job is not to look through it for garbage, nor to copy its pages
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if not message:
            return
        connection.send_bytes(pickle.dumps(_perform(message, rank)))


def _perform(message: bytes, rank: int) -> _Outcome:
    try:
        function, args, store, size, timeout_s = pickle.loads(message)
        dist.init_process_group(
            "gloo",
            store=FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout_s),
        )
        value = function(*args)
        dist.barrier()  # a rank that is done at once must not hang up on others that are still connecting
        dist.destroy_process_group()
        gc.collect()  # modules hold themselves in circles, and with them groups, each of which has threads
    except BaseException:  # noqa: BLE001  whatever a job raises belongs to the one who asked for it
        if dist.is_initialized():
            dist.destroy_process_group()
        return _Outcome(failure=traceback.format_exc())
    return _Outcome(value=value)

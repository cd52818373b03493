"""A pool of local worker processes that run jobs as the ranks of one gloo process group.

Workers are forked from a server process that has imported torch once, so that a job does not pay for imports. Each job gets a process group
of its own, over a new file, and a time limit. If a job exceeds the limit or loses a rank, its workers are killed, and the next job starts
new ones.
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
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import AutoparError

_LOG = logging.getLogger(__name__)

_CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL))
"""Signals after which a job runs a second time.

Threads of gloo have been seen to crash in one of thousands of jobs, which says nothing about the job. A job that causes a crash does so
again."""

_GRACE_S = 3.0
"""Seconds for which the other ranks may still answer after one has failed: their errors say more than a time-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The answer of one rank.

    Attributes:
        value: what the function returned.
        failure: the traceback of an error, or why there is no answer; empty on success.
        signal: the signal that ended the process, or 0.
    """

    value: Any = None
    failure: str = ""
    signal: int = 0


@dataclass(slots=True)
class _Worker:
    process: ForkServerProcess
    connection: Connection


class WorkerPool:
    """``size`` worker processes that :meth:`run` makes the ranks of one process group.

    Args:
        size: the number of workers.
        preload: modules that the server imports before it forks: those that jobs need and that start no threads.

    Use it as a context manager, or call :meth:`close`.
    """

    def __init__(self, size: int, *, preload: Sequence[str] = ("torch",)) -> None:
        self.size = size
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*preload, __name__])
        self._workers: list[_Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, function: Callable[..., Any], *args: Any, size: int | None = None, timeout_s: float = 120.0
    ) -> tuple[Any, ...]:
        """Call ``function(*args)`` on the first ``size`` workers, as one process group, and return the value of each rank.

        A job in which a process crashed runs once more.

        Args:
            function: a function that can be imported by name; ``torch.distributed.get_rank()`` gives it its rank.
            args: picklable arguments.
            size: the number of ranks; all workers when None.
            timeout_s: the time limit of the job, after which its workers are killed.

        Raises:
            AutoparError: a rank failed (the message has its traceback), crashed twice, or exceeded the time limit.
        """
        size = self.size if size is None else size
        outcomes = self._attempt(function, args, size, timeout_s)
        if any(o.signal in _CRASHES for o in outcomes):
            _LOG.warning("a worker crashed (signal %d): the job is run again", max(o.signal for o in outcomes))
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
        """Run a job once and return the outcome of each rank; after a failure the workers are killed."""
        self._start()
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
        """End the workers; with ``kill`` without waiting for their jobs."""
        for worker in self._workers:
            if not kill:
                with suppress(OSError):  # the worker has already ended
                    worker.connection.send_bytes(b"")
            worker.connection.close()
        deadline = time.monotonic() + (0.0 if kill else _GRACE_S)
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
        self._workers = []

    def _start(self) -> None:
        """Start the workers that are missing; if one has died, all are replaced.

        Raises:
            AutoparError: a worker ended at its start, as it does where the script of this program cannot be imported.
        """
        if any(not worker.process.is_alive() for worker in self._workers):
            self.close(kill=True)
        num_running = len(self._workers)
        while len(self._workers) < self.size:
            pool_end, worker_end = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(worker_end, len(self._workers)), daemon=True)
            process.start()
            worker_end.close()
            self._workers.append(_Worker(process, pool_end))
        try:
            for worker in self._workers[num_running:]:
                worker.connection.recv_bytes()
        except (EOFError, ConnectionResetError) as error:
            self.close(kill=True)
            fix = 'In a script, make this call under `if __name__ == "__main__":`, as each process imports the script first'
            raise AutoparError("A process of the ranks ended at its start", fix=fix) from error

    def _collect(self, workers: list[_Worker], timeout_s: float) -> list[_Outcome]:
        """Return the outcome of each worker. After the first failure the others have :data:`_GRACE_S` seconds left."""
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
    """Return the answer of a worker, or a failure if its process has ended."""
    try:
        answer = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join(_GRACE_S)
        code = max(0, -(worker.process.exitcode or 0))
        return _Outcome(failure="the process died" + (f" of signal {code}" if code else ""), signal=code)
    assert isinstance(answer, _Outcome)
    return answer


def _serve(connection: Connection, rank: int) -> None:
    """Run jobs from the pipe, one after the other, until an empty message."""
    torch.set_num_threads(1)
    gc.freeze()  # no collection goes through the server's imports, which would take time and copy their pages
    connection.send_bytes(b"")
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        if not message:
            return
        connection.send_bytes(pickle.dumps(_perform(message, rank)))


def _perform(message: bytes, rank: int) -> _Outcome:
    """Run one pickled job in a new process group and return its outcome."""
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
        dist.barrier()  # a rank that ends early must not close connections that others are still opening
        dist.destroy_process_group()
        _let_go_of_groups()
    except BaseException:  # noqa: BLE001  every error of a job is reported to the caller of run()
        if dist.is_initialized():
            dist.destroy_process_group()
        return _Outcome(failure=traceback.format_exc())
    return _Outcome(value=value)


def _let_go_of_groups() -> None:
    """Free the process groups of a job that has ended: each has threads that poll a hundred times a second.

    Its meshes refer to them. DTensor's caches keep meshes, and torch 2.11 never frees those of products, so the references are taken out.
    """
    for mesh in gc.get_objects():
        if type(mesh) is DeviceMesh:
            mesh._pg_registry.clear()
    gc.collect()  # modules in reference cycles refer to groups too

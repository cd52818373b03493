"""The study that a search shares, and its worker processes: each computes the same candidates and takes unclaimed ones from the study.

The identity of a study is everything that its times depend on. Two searches share a study only if all of it is equal. A search without a
storage forks its processes instead, where the system can (:mod:`autopar.planner.branch_and_bound.process_group`).
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import UsageError, check_counts
from autopar.graph.graph import Graph, digest
from autopar.planner.branch_and_bound.process_group import can_fork
from autopar.planner.search import Limits, Task
from autopar.planner.space.candidates import Candidate
from autopar.rules.missing import extra_rules
from autopar.rules.table import Rule
from autopar.util.files import child_environment, sources

if TYPE_CHECKING:
    from autopar.planner.studies.study import StudyLedger
GRACE_S = 5.0
"""Seconds that a worker has after SIGTERM to end its trial in the study, before it is killed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """How a search shares its results.

    Attributes:
        storage: the URL of an Optuna storage; None: an SQLite file that is deleted after the search.
        study_name: the name of the study in it; None: the name of :func:`study_name`.
        workers: the number of processes, this one included.
    """

    storage: str | None = None
    study_name: str | None = None
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker process gets, pickled in a file.

    Attributes:
        task: the task of the search.
        rules: the rules of the task's operators that are not shipped; a new process does not have them.
        limits: when to stop.
        storage: the URL of the storage.
        study_name: the name of the study.
        identity: the identity of the study.
        durable: see :func:`autopar.planner.studies.study.open_storage`.
        parent: the id of the process that started the worker; the worker stops when it has ended.
    """

    task: Task
    rules: Mapping[str, Rule]
    limits: Limits
    storage: str
    study_name: str
    identity: Mapping[str, str]
    durable: bool
    parent: int

    def open_study(self, pool: Sequence[Candidate]) -> StudyLedger:
        """Open the study, or begin it, with these candidates; for errors see :class:`autopar.planner.studies.study.StudyLedger`."""
        from autopar.planner.studies.study import StudyLedger  # optuna is slow to import

        return StudyLedger(
            pool, storage=self.storage, name=self.study_name, identity=self.identity, durable=self.durable
        )


def sharing_of(storage: str | None, study_name: str | None, workers: int) -> Sharing | None:
    """Return how a search with these options shares its results; None if it does not, as it has one process or can fork the others.

    Raises:
        UsageError: the options contradict each other.
    """
    check_counts(workers=workers)
    for name, text, example in (("storage", storage, "sqlite:///study.db"), ("study_name", study_name, "mine")):
        if not isinstance(text, str | None):
            raise UsageError(f"{name} takes a text, but got {text!r}", fix=f"Write for example {name}='{example}'")
    if study_name is not None and storage is None:
        raise UsageError(
            f"The study '{study_name}' has no storage to lie in", where="--study-name", fix="Say which with --storage"
        )
    if storage is None and (workers == 1 or can_fork()):
        return None
    if workers > 1 and storage in ("sqlite://", "sqlite:///:memory:"):
        raise UsageError(
            f"Several workers cannot share the storage {storage} in memory",
            where="--storage",
            fix="Leave it out for a temporary file, or write sqlite:///study.db",
        )
    return Sharing(storage=storage, study_name=study_name, workers=workers)


@contextmanager
def shared_study(task: Task, pool: Sequence[Candidate], sharing: Sharing, limits: Limits) -> Iterator[StudyLedger]:
    """Yield a search's study, and run its other workers until the ``with`` block ends.

    Raises:
        UsageError: the storage cannot be opened, or its study has another identity.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-", ignore_cleanup_errors=True) as folder:
        job = Job(
            task=replace(task, graph=replace(task.graph)),  # without what the graph caches, which would be pickled too
            rules=extra_rules(task.graph),
            limits=limits,
            storage=sharing.storage or f"sqlite:///{Path(folder) / 'study.db'}",
            study_name=sharing.study_name or study_name(task),
            identity=identity(task),
            durable=sharing.storage is not None,
            parent=os.getpid(),
        )
        study = job.open_study(pool)
        workers: list[subprocess.Popen[bytes]] = []
        try:
            if sharing.workers > 1:
                path = Path(folder) / "job"
                path.write_bytes(pickle.dumps(job))
                workers.extend(_start(path, number) for number in range(1, sharing.workers))
            yield study
        finally:
            _stop(workers, Path(folder))
            study.close()


def _start(job: Path, number: int) -> subprocess.Popen[bytes]:
    """Start a worker with the job of a file; its stderr goes to a log beside that file."""
    with _log(job.parent, number).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "autopar.planner.studies.worker_main", str(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=child_environment(),
        )


def _stop(workers: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """Stop the workers, and warn of those that failed earlier: the search went on without them."""
    for number, worker in enumerate(workers, 1):
        code = worker.poll()
        if code is None:
            worker.terminate()
        elif code != 0:
            tail = _log(folder, number).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            logging.getLogger("autopar").warning(
                "worker %d of the search ended early with code %d: %s", number, code, tail[-1] if tail else "no message"
            )
    for worker in workers:
        try:
            worker.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()


def _log(folder: Path, number: int) -> Path:
    return folder / f"worker{number}.log"


def identity(task: Task) -> dict[str, str]:
    """Return the parts of the identity of a task's study by name; they are equal on every machine. Hashes cover what names do not say."""
    graph, cluster = task.graph, task.cluster
    return {
        "model": f"{graph.name} {_graph_hash(graph)}",
        "cluster": f"{cluster.name} {digest(repr(cluster))}",
        "global batch": str(task.global_batch_size),
        "precision": f"{task.precision.name} {digest(repr(task.precision))}",
        "optimizer": task.optimizer,
        "pins": ", ".join(task.pins.texts),
        "space": f"{task.space.name} {digest(repr(task.space))}",
        "rules": digest(repr(extra_rules(graph))),
        "version of autopar": sources(),
    }


def study_name(task: Task) -> str:
    """Return the name of a task's study where the user gives none; other tasks have other names."""
    return f"{task.graph.name} on {task.cluster.name} {digest(repr(identity(task)))}"


def _graph_hash(graph: Graph) -> str:
    """Return a hash of everything in a graph that costs depend on; not of source lines, which differ between machines."""
    parts: list[object] = [graph.fingerprint, graph.batch_size, graph.inputs, graph.parameters, graph.blocks]
    parts += [graph.loss, graph.sums, graph.mutations, graph.mixing, graph.exact]
    parts += [(buffer.name, buffer.fqn, buffer.spec) for buffer in graph.buffers]
    parts += [(op.name, op.target, op.args, op.kwargs, op.outputs, op.layouts) for op in (*graph.prelude, *graph.ops)]
    return digest(repr(parts))

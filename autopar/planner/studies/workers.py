"""Further processes for one search: each makes the same candidates and works on the same study.

What the times of a study depend on is its identity: two searches share a study only where all of it is equal.
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

from autopar.errors import UsageError
from autopar.graph.graph import Graph, digest
from autopar.planner.branch_and_bound.process_group import available
from autopar.planner.search import Limits, Task
from autopar.planner.space.candidates import Candidate
from autopar.rules.missing import OwnRule, own_rules
from autopar.util.files import child_environment, sources

if TYPE_CHECKING:
    from autopar.planner.studies.study import Study
GRACE_S = 5.0
"""For a worker that is told to stop to say in the study that it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """With whom a search shares what it finds.

    Attributes:
        storage: URL of an Optuna storage; None for a file that is deleted with the search.
        study_name: of the study in it; None for one that says what it is of.
        workers: processes, this one included.
    """

    storage: str | None = None
    study_name: str | None = None
    workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker is given.

    Attributes:
        rules: of the task's operators that a new process does not know.
        durable: see :func:`autopar.planner.studies.study.open_storage`.
        parent: the process without which the worker stops.
    """

    task: Task
    rules: tuple[OwnRule, ...]
    limits: Limits
    storage: str
    study_name: str
    identity: Mapping[str, str]
    durable: bool
    parent: int

    def study(self, pool: Sequence[Candidate]) -> Study:
        """The study of these candidates; see there for errors."""
        from autopar.planner.studies.study import Study  # optuna is slow to import

        return Study(pool, storage=self.storage, name=self.study_name, identity=self.identity, durable=self.durable)


def shared(storage: str | None, study_name: str | None, workers: int) -> Sharing | None:
    """How a search shares what it finds by way of a storage; None for one that need not, whose workers are its own copies.

    Raises:
        UsageError: these do not go together.
    """
    if not isinstance(workers, int) or workers < 1:
        raise UsageError(f"A search with {workers!r} workers does nothing", where="workers", fix="Give 1 or more")
    if study_name is not None and storage is None:
        raise UsageError(
            f"The study '{study_name}' has no storage to lie in", where="--study-name", fix="Say which with --storage"
        )
    if storage is None and (workers == 1 or available()):
        return None
    if workers > 1 and storage in ("sqlite://", "sqlite:///:memory:"):
        raise UsageError(
            f"Several workers cannot share the storage {storage} in memory",
            where="--storage",
            fix="Leave it out for a temporary file, or write sqlite:///study.db",
        )
    return Sharing(storage=storage, study_name=study_name, workers=workers)


@contextmanager
def helpers(task: Task, pool: Sequence[Candidate], sharing: Sharing, limits: Limits) -> Iterator[Study]:
    """A search's study, with the other workers at work on it until the body ends.

    Raises:
        UsageError: the storage cannot be opened, or its study is of something else.
    """
    with tempfile.TemporaryDirectory(prefix="autopar-", ignore_cleanup_errors=True) as folder:
        job = Job(
            task=replace(task, graph=replace(task.graph)),  # without what the graph has looked up
            rules=own_rules(task.graph),
            limits=limits,
            storage=sharing.storage or f"sqlite:///{Path(folder) / 'study.db'}",
            study_name=sharing.study_name or study_name(task),
            identity=identity(task),
            durable=sharing.storage is not None,
            parent=os.getpid(),
        )
        study = job.study(pool)
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
    with _log(job.parent, number).open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "autopar.planner.studies.worker_main", str(job)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=child_environment(),
        )


def _stop(workers: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
    """End the workers; one that failed before is told of, for the search went on without it."""
    for number, worker in enumerate(workers, 1):
        code = worker.poll()
        if code is None:
            worker.terminate()
        elif code != 0:
            said = _log(folder, number).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            logging.getLogger("autopar").warning(
                "worker %d of the search ended early with code %d: %s", number, code, said[-1] if said else "no message"
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
    """By name what a study is of, with a hash where a name does not say all of it. Equal on every machine."""
    graph, cluster = task.graph, task.cluster
    return {
        "model": f"{graph.name} {_graph(graph)}",
        "cluster": f"{cluster.name} {digest(repr(cluster))}",
        "global batch": str(task.global_batch_size),
        "precision": f"{task.precision.name} {digest(repr(task.precision))}",
        "optimizer": task.optimizer,
        "pins": ", ".join(task.pins.texts),
        "space": f"{task.space.name} {digest(repr(task.space))}",
        "rules": digest(repr(own_rules(graph))),
        "version of autopar": sources(),
    }


def study_name(task: Task) -> str:
    """For a study of a task alone."""
    return f"{task.graph.name} on {task.cluster.name} {digest(repr(identity(task)))}"


def _graph(graph: Graph) -> str:
    """Of all that costs depend on: not the lines of the user's code, which lie elsewhere on another machine."""
    parts: list[object] = [graph.fingerprint, graph.batch_size, graph.inputs, graph.parameters, graph.blocks]
    parts += [graph.loss, graph.sums, graph.mutations, graph.mixing, graph.exact]
    parts += [(buffer.name, buffer.fqn, buffer.spec) for buffer in graph.buffers]
    parts += [(op.name, op.target, op.args, op.kwargs, op.outputs, op.layouts) for op in (*graph.prelude, *graph.ops)]
    return digest(repr(parts))

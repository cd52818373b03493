"""The problems of ``problems.toml``, and one problem asked of one tree of the code in a process of its own.

This process imports nothing of the package: trees of other revisions are asked by the same code.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

HOME = Path(__file__).resolve().parent
ROOT = HOME.parents[1]
WORKER = HOME / "problem_worker.py"

NOT_TRACING = frozenset(
    [
        "search",
        "planner",
        "cost",
        "lower",
        "runtime",
        "report",
        "cli",
        "validate",
        "verify",
        "benchmark",
        "measure",
        "profile",
        "hardware",
        "questions",
        "integrations",
    ]
)
"""Packages in which the classes of a graph are not."""

NO_PLAN_S = 3
"""How many times its limit a search may take before it is ended: the limit is looked at between two evaluations only."""

ENOUGH_CPU_S = 20.0
"""Past so many CPU seconds a problem is not asked again: the noise of a long search is small beside its own length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What a search is asked.

    Attributes:
        study: name of a shipped study that says model, cluster, batch, sequence and precision; empty: they stand here.
        groups: of the cluster where it is made of several kinds of devices.
        is_exhaustive: every candidate of its pool can be evaluated in minutes.
    """

    name: str
    kinds: tuple[str, ...]
    study: str = ""
    model: str = ""
    cluster: str = ""
    groups: tuple[tuple[tuple[str, str | int], ...], ...] = ()
    batch: int = 0
    sequence: int | None = None
    precision: str = "bf16"
    space: str = "default"
    pins: tuple[str, ...] = ()
    is_exhaustive: bool = False

    def asked(self) -> dict[str, Any]:
        """What the worker reads, as JSON."""
        if self.study:
            return {"study": self.study, "space": self.space, "pins": list(self.pins), "batch": 0, "precision": ""}
        own = asdict(self)
        for key in ("name", "kinds", "study", "is_exhaustive"):
            del own[key]
        return {**own, "pins": list(self.pins), "groups": [dict(group) for group in self.groups]}


def load_problems(path: Path = HOME / "problems.toml") -> dict[str, Problem]:
    """By name.

    Raises:
        ValueError: a problem has an unknown key or lacks one; names both.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    clusters = data.get("clusters", {})
    return {name: _problem(name, dict(own), clusters) for name, own in data["problems"].items()}


def _problem(name: str, own: dict[str, Any], clusters: dict[str, list[dict[str, Any]]]) -> Problem:
    known = {"kinds", "study", "model", "cluster", "batch", "sequence", "precision", "space", "pins", "exhaustive"}
    needed = {"kinds", "study"} if "study" in own else {"kinds", "model", "cluster", "batch"}
    if wrong := own.keys() - known:
        raise ValueError(f"Problem {name} has the key {min(wrong)!r}. Known are: {', '.join(sorted(known))}.")
    if missing := needed - own.keys():
        raise ValueError(f"Problem {name} has no key {min(missing)!r}. Add it.")
    is_exhaustive = own.pop("exhaustive", False)
    groups = tuple(tuple(group.items()) for group in clusters.get(own.get("cluster", ""), ()))
    kinds, pins = (tuple(own.pop(key, ())) for key in ("kinds", "pins"))
    return Problem(name=name, groups=groups, is_exhaustive=is_exhaustive, kinds=kinds, pins=pins, **own)


# --- trees of the code


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree of the code under test; ``revision``: the commit that changed it last, with ``+`` where its files differ from that."""

    path: Path
    revision: str

    def key(self, *, for_traces: bool = False) -> str:
        """Of the files that results depend on; or of those alone by which a traced model is made and read."""
        files = sorted((self.path / "autopar").rglob("*.py"))
        if for_traces:
            files = [f for f in files if f.relative_to(self.path).parts[1] not in NOT_TRACING]
        else:
            files += sorted(p for part in ("profiles", "search") for p in (self.path / part).rglob("*.toml"))
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.relative_to(self.path)}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:16]


def this_tree() -> Tree:
    """The tree that this file is in."""
    parts = ("--", "autopar", "profiles", "search")
    revision = _git("log", "-1", "--format=%h", *parts)
    changed = _git("status", "--porcelain", *parts)
    return Tree(path=ROOT, revision=revision + "+" * bool(changed))


@contextmanager
def tree_of(revision: str | None) -> Iterator[Tree]:
    """A revision in a git worktree that is removed afterwards; None: :func:`this_tree`."""
    if revision is None:
        yield this_tree()
        return
    commit = _git("rev-parse", "--short", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(path), commit)
        try:
            yield Tree(path=path, revision=commit)
        finally:
            _git("worktree", "remove", "--force", str(path))


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


# --- one problem


class Worker:
    """A process that answers questions about one tree, each in a copy of itself; ends with the ``with`` block."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        environment = {**os.environ, "PYTHONPATH": str(tree.path), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)], env=environment, cwd=tree.path, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
        )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        """An interrupt ends it in the middle of a question too."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        if error[0] is not None:
            os.killpg(self._process.pid, signal.SIGTERM)  # with the copy that is at work
        self._process.wait()
        self._process.stdout.close()

    def ask(self, verb: str, problem: Problem, graph: Path, *, most_s: float | None = None, **options: Any) -> Any:
        """The answer.

        Raises:
            AnswerError: there is none, with the reason; within ``most_s`` CPU seconds, where they are given.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        question = {"verb": verb, "problem": problem.asked(), "graph": str(graph), "most_s": most_s, **options}
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit(f"The worker of {self.tree.path} ended; it says above why.")
        reply = json.loads(line)
        if "answer" not in reply:
            raise AnswerError(reply["error"])
        return reply["answer"]


class AnswerError(Exception):
    """A worker has no answer."""


def traced(worker: Worker, problem: Problem) -> Path:
    """The file of the problem's traced model, made where it is not there.

    All trees get the same graph, as it is the planner that is compared; a tree that cannot read it, since its classes
    differ, gets one of its own.
    """
    asked = {key: value for key, value in problem.asked().items() if key not in ("cluster", "groups", "space", "pins")}
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
    home = os.environ.get("AUTOPAR_CACHE")
    folder = Path(home) / "problems" if home else ROOT / "out" / "problems" / "traces"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{key}.graph"
    if path.exists() and not worker.ask("reads", problem, path):
        path = folder / f"{key}-{worker.tree.key(for_traces=True)}.graph"
    if not path.exists():
        worker.ask("trace", problem, path)
    return path


def search_once(worker: Worker, problem: Problem, limit_s: float, pins: Sequence[str] = ()) -> dict[str, Any]:
    """The record of one search, under further pins; ``failed`` says why there is no plan."""
    try:
        graph = traced(worker, problem)
        problem = replace(problem, pins=(*problem.pins, *pins))
        result: dict[str, Any] = worker.ask("search", problem, graph, most_s=NO_PLAN_S * limit_s, limit_s=limit_s)
    except AnswerError as error:
        return {"failed": str(error)}
    return result


def search_in_turn(workers: Sequence[Worker], problem: Problem, limit_s: float, rounds: int) -> list[dict[str, Any]]:
    """The records of each worker's tree, asked in turn; CPU seconds are medians of the rounds.

    Whether all rounds of a tree gave the same plan stands in ``is_steady``: searches that stop at a limit need not.
    """
    runs: list[list[dict[str, Any]]] = [[] for _ in workers]
    for _ in range(rounds):
        for worker, own in zip(workers, runs, strict=True):
            own.append(search_once(worker, problem, limit_s))
        if sum(run.get("cpu_s", ENOUGH_CPU_S) for own in runs for run in own) >= ENOUGH_CPU_S:
            break
    return [_median(own) for own in runs]


def _median(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if any("cpu_s" not in run for run in runs):
        return next(run for run in runs if "cpu_s" not in run)
    compared = ("failed", "time_s", "bound_s", "evaluated", "plan")
    return {
        **runs[0],
        "cpu_s": median(run["cpu_s"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "rounds": len(runs),
        "is_steady": all(run.get(key) == runs[0].get(key) for run in runs for key in compared),
    }


def evaluated(worker: Worker, problem: Problem, folder: Path) -> list[dict[str, Any]]:
    """Every candidate of a problem's pool with its step time or the reason why it has none; kept in ``folder`` one by one.

    Raises:
        AnswerError: the evaluation ended early; what it came to is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    asked = hashlib.sha256(json.dumps(problem.asked()).encode()).hexdigest()[:8]
    kept = folder / f"{problem.name}-{worker.tree.key()}-{asked}.jsonl"
    worker.ask("evaluate", problem, traced(worker, problem), kept=str(kept))
    return [json.loads(line) for line in kept.read_text(encoding="utf-8").splitlines()]


def write_whole(path: Path, text: str) -> None:
    """Under a temporary name beside ``path``, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f".{path.name}.{os.getpid()}")
    made.write_text(text, encoding="utf-8")
    made.replace(path)

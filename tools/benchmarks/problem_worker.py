"""Problems asked of one tree of the code: the only code of the problems' command that calls the planner.

Run by path, ``python -P problem_worker.py``, with the tree first in ``PYTHONPATH``, so that one version of this file asks
any revision; it imports nothing of ``tests``. It loads the package, and answers each line of JSON that it reads by one that
it prints: every question in a copy of this process, so that memory and caches are clean, and imports are not timed.

- ``trace`` writes the file ``graph``, the pickled traced model;
- ``reads``: whether this tree's classes are those of that file;
- ``search``: the record of one search by one process, with a limit of ``limit_s`` CPU seconds;
- ``evaluate`` evaluates each candidate that has no line in the file ``kept``, and adds its line.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

PLANNER = next(name for name in ("autopar.planner", "autopar.search") if find_spec(name) is not None)
"""The package of the planner: it had the second name."""

STUDIES = ("autopar.questions.comparisons", "autopar.questions.published_layouts", "autopar.studies")
"""Where published layouts are posed as problems, or were."""


def found(name: str, *modules: str) -> Any:
    """What the first of the modules that has ``name`` calls by it: revisions keep things in different places."""
    for module in modules:
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    raise ImportError(f"No module of {', '.join(modules)} has {name}. The worker has to learn its new place.")


# --- calls of the package under test


def plan_of(problem: Mapping[str, Any], graph: Any, cluster: Any, limit_s: float) -> Any:
    """The plan of a search by this process alone."""
    search = found("search", "autopar.api")
    takes = inspect.signature(search).parameters
    limit = next((name for name in ("search_timeout_s", "timeout_s") if name in takes), "timeout_s")
    return search(graph, **{limit: limit_s}, workers=1, **asked(problem, cluster))


def evaluations_of(
    problem: Mapping[str, Any], graph: Any, cluster: Any
) -> Iterator[tuple[Any, Callable[[], float | str]]]:
    """Every candidate of the pool, with what evaluates it: seconds of its best plan, or the reason why it has none."""
    homes = (
        "autopar.request",
        f"{PLANNER}.search",
        f"{PLANNER}.request",
        "autopar.wish",
        f"{PLANNER}.task",
        "autopar.api",
    )
    task_of = found("task_of", *homes)
    try:
        wish_type = found("Request", *homes)
    except ImportError:
        wish_type = found("Wish", *homes)
    given = asked(problem, cluster)
    has_cluster = any(field.name == "cluster" for field in fields(wish_type))
    where = {"cluster": given.pop("cluster")} if has_cluster else {}
    given.pop("cluster", None)
    wish = wish_type(example_inputs=None, optimizer="adamw", name="", loss_fn=None, opaque=(), **where, **given)
    task = task_of(graph, wish) if has_cluster else task_of(graph, cluster, wish, None)
    planner = found("Planner", f"{PLANNER}.planner")(task)

    def evaluate(candidate: Any) -> float | str:
        evaluation = planner.evaluator.evaluate(candidate)
        prediction = getattr(evaluation, "prediction", None)
        return str(evaluation.reason) if prediction is None else float(prediction.step_time_s)

    for candidate in planner.pool:
        yield candidate, partial(evaluate, candidate)


def graph_of(problem: Mapping[str, Any]) -> Any:
    """The traced model."""
    if "study" in problem:
        load, graph = (found(name, *STUDIES) for name in ("load_study", "graph_of"))
        return graph(load(problem["study"]))
    source = found("resolve_model", "autopar.models.resolve", "autopar.models")(
        problem["model"], sequence_length=problem["sequence"]
    )
    about = {"global_batch_size": problem["batch"], "name": problem["model"]}
    try:
        trace_model = found("trace_model", "autopar.api", "autopar.tracing")
    except ImportError:
        trace = found("trace", "autopar.api")
        return trace(source.model, example_inputs=source.example_inputs, precision=problem["precision"], **about)
    precision = found("PRECISIONS", "autopar.api", "autopar.wish")[problem["precision"]]
    return trace_model(source.model, source.example_inputs, precision, **about)


def reads(graph_file: Path) -> bool:
    """Whether a graph that another tree has written is one of this tree: its classes are there, and have the same fields."""
    try:
        graph = pickle.loads(graph_file.read_bytes())
        parts = (graph, graph.ops[0], graph.parameters[0], graph.inputs[0], graph.blocks[0], graph.ops[0].outputs[0])
        return all(hasattr(part, field.name) for part in parts for field in fields(part))
    except (ImportError, AttributeError, TypeError):
        return False


def graph_in(graph_file: Path) -> Any:
    """The graph of a file, with the look-ups of this tree in place of those of the tree that wrote it."""
    return replace(pickle.loads(graph_file.read_bytes()))


def cluster_of(problem: Mapping[str, Any]) -> Any:
    """The cluster: of a study, of groups, or of a text."""
    if "study" in problem:
        load, cluster = (found(name, *STUDIES) for name in ("load_study", "cluster_of"))
        return cluster(load(problem["study"]))
    parse = found("Cluster", "autopar").parse
    if not problem["groups"]:
        return parse(problem["cluster"])
    lines = [f"name = {json.dumps(problem['cluster'])}"]
    for group in problem["groups"]:
        lines += ["[[group]]", *(f"{key} = {json.dumps(value)}" for key, value in group.items())]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.toml"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return parse(str(path))


def asked(problem: Mapping[str, Any], cluster: Any) -> dict[str, Any]:
    """Arguments that a search and an evaluation share."""
    batch, precision = problem["batch"], problem["precision"]
    if "study" in problem:
        study = found("load_study", *STUDIES)(problem["study"])
        batch, precision = study.global_batch_size, study.precision
    return {
        "cluster": cluster,
        "global_batch_size": batch,
        "pins": tuple(problem["pins"]),
        "precision": precision,
        "space": problem["space"],
    }


# --- what is recorded


def described(plan: Any) -> dict[str, Any]:
    """The choices of a plan that the search makes, as JSON; empty ones are left out."""
    recompute = [f"{block.recompute}{'+offload' if block.offload else ''}" for block in plan.blocks]
    choices = {
        "mesh": str(plan.mesh),
        "micro_batch": plan.micro_batch_size,
        "zero": plan.zero_stage,
        "schedule": plan.schedule if plan.mesh.pp > 1 else "",
        "virtual_stages": plan.virtual_stages if plan.virtual_stages > 1 else "",
        "stages": " ".join(str(stage.stop - stage.start) for stage in plan.stages) if len(plan.stages) > 1 else "",
        "recompute": " ".join(f"{len(list(run))}x{mode}" for mode, run in groupby(recompute)),
        "padding": {own.parameter: own.length for own in plan.padding},
        "bucket_mib": plan.bucket_bytes / 2**20,
        "offload": list(plan.offload),
        "data_shares": list(plan.data_shares),
        "groups": [group.device for group in plan.groups] if len(plan.groups) > 1 else [],
    }
    return {key: value for key, value in choices.items() if value or key in ("zero",)}


def choices_of(plan: Any) -> list[str]:
    """The plan's candidate as pins, for another tree to price: layouts, stages and recompute are left to it."""
    mesh = plan.mesh
    pins = [f"{axis}={getattr(mesh, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep_data")]
    pins += [f"zero={plan.zero_stage}", f"micro_batch={plan.micro_batch_size}"]
    if mesh.pp > 1:
        pins += [f"schedule={plan.schedule}", f"virtual_stages={plan.virtual_stages}"]
    return [*pins, f"data_shares={'-'.join(map(str, plan.data_shares))}"] if plan.data_shares else pins


def cpu_s() -> float:
    """CPU seconds of this process and of those that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_bytes() -> int:
    """The largest resident memory of this process since it began to run this file: what its parent had is not counted."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def searched(problem: Mapping[str, Any], graph_file: Path, limit_s: float) -> dict[str, Any]:
    """The record of one search; ``failed`` says why there is no plan."""
    graph = graph_in(graph_file)
    cluster = cluster_of(problem)
    before_bytes = peak_bytes()
    time.monotonic = (
        time.process_time
    )  # limits of time are CPU seconds: what else runs on the machine changes no result
    start_cpu_s = cpu_s()
    try:
        plan = plan_of(problem, graph, cluster, limit_s)
    except found("AutoparError", "autopar") as error:
        return {"failed": str(error), "cpu_s": cpu_s() - start_cpu_s, "peak_bytes": peak_bytes()}
    return {
        "cpu_s": cpu_s() - start_cpu_s,
        "peak_bytes": peak_bytes(),
        "before_bytes": before_bytes,
        "hit_limit": cpu_s() - start_cpu_s >= limit_s,
        "time_s": plan.predicted.step_time_s,
        "memory_bytes": plan.predicted.peak_memory_bytes,
        "bound_s": plan.search.lower_bound_s,
        "gap": plan.search.gap,
        "candidates": plan.search.candidates,
        "evaluated": plan.search.evaluated,
        "plan": described(plan),
        "choices": choices_of(plan),
    }


def evaluate_all(problem: Mapping[str, Any], graph_file: Path, kept: Path) -> None:
    """Add a line to ``kept`` for every candidate that has none there."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
    done = {json.loads(line)["number"] for line in lines}
    graph = graph_in(graph_file)
    with kept.open("a", encoding="utf-8") as file:
        for number, (candidate, evaluate) in enumerate(evaluations_of(problem, graph, cluster_of(problem))):
            if number not in done:
                answer = evaluate()
                key = "reason" if isinstance(answer, str) else "time_s"
                file.write(json.dumps({"number": number, "candidate": str(candidate), key: answer}) + "\n")
                file.flush()


def answer(question: Mapping[str, Any]) -> Any:
    """What one verb gives."""
    verb, problem, graph_file = question["verb"], question["problem"], Path(question["graph"])
    if verb == "trace":
        made = graph_file.with_suffix(f".{os.getpid()}")
        made.write_bytes(pickle.dumps(graph_of(problem)))
        return made.replace(graph_file).name
    if verb == "reads":
        return reads(graph_file)
    if verb == "search":
        return searched(problem, graph_file, question["limit_s"])
    if verb == "evaluate":
        return evaluate_all(problem, graph_file, Path(question["kept"]))
    raise ValueError(f"Unknown verb {verb!r}. Choose one of: trace, reads, search, evaluate.")


def in_a_copy(question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a copy of this process, which the system ends past ``most_s`` CPU seconds, where these are given."""
    theirs, own = multiprocessing.get_context("fork").Pipe(duplex=False)

    def work() -> None:
        if question["most_s"] is not None:
            most_s = math.ceil(time.process_time() + question["most_s"])
            resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s + 1))
        try:
            own.send({"answer": answer(question)})
        except BaseException:  # noqa: BLE001  told to the other side, whatever it is
            own.send({"error": traceback.format_exc()})

    copy = multiprocessing.get_context("fork").Process(target=work)
    copy.start()
    own.close()
    try:
        reply: dict[str, Any] = theirs.recv()
        copy.join()
    except EOFError:
        copy.join()
        late = copy.exitcode in (-signal.SIGXCPU, -signal.SIGKILL)
        why = (
            f"ended after {question['most_s']} CPU seconds, or for want of memory"
            if late
            else f"ended with {copy.exitcode}"
        )
        reply = {"error": f"the process {why}"}
    return reply


def main() -> int:
    """Answer questions, one line of JSON each, until there are no more."""
    tree, home = os.environ["PYTHONPATH"].split(os.pathsep)[0], importlib.import_module("autopar").__file__
    if home is None or Path(home).parents[1].resolve() != Path(tree).resolve():
        raise SystemExit(f"The package comes from {home}, not from {tree}. Put the tree first in PYTHONPATH.")
    importlib.import_module("autopar.api")  # and what its verbs import when they are called: so that no import is timed
    for module in (
        f"{PLANNER}.planner",
        f"{PLANNER}.request",
        f"{PLANNER}.search",
        f"{PLANNER}.task",
        f"{PLANNER}.studies.workers",
        "scipy.optimize",
    ):
        with suppress(ModuleNotFoundError):
            importlib.import_module(module)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        replies.write(json.dumps(in_a_copy(json.loads(line))) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

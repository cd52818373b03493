"""What the times of a study depend on: two searches share a study only where all of it is equal."""

from __future__ import annotations

import hashlib
from pathlib import Path

from autopar.graph.ir import Graph, digest
from autopar.planner.task import Task
from autopar.rules.missing import own_rules

_NOT_PRICED = ("cli", "report", "runtime", "lower", "benchmark", "validate", "profile")
"""Folders of the package that no time depends on."""


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


def sources() -> str:
    """A hash of the code that makes graphs and times: searches by different versions must not mix."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if name.parts[0] not in _NOT_PRICED:
            found.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]

"""Other ways to run a block's emitted code than as it stands: as in ``eval()``, with values inside of it given out as well."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from autopar.graph.graph import Op, Ref
from autopar.graph.operator_kinds import draws_random
from autopar.ops import seeded, sharded
from autopar.ops import sequence as sequence_ops

_PROBABILITIES: dict[Callable[..., Any], str] = {
    seeded.dropout: "p",
    seeded.attention: "dropout_p",
    sequence_ops.attention_gathered: "dropout_p",
    sequence_ops.attention_ring: "dropout_p",
}
"""The argument of each function that drops."""

_AT_REST: dict[Callable[..., Any], Callable[..., Any]] = {sharded.batch_norm_running: sharded.batch_norm_at_rest}
"""What functions that take statistics of the batch are where running ones are read: their arguments and results are the same."""


def variant(body: fx.GraphModule, code: fx.Graph, *, trains: bool, taps: Sequence[Ref]) -> Callable[..., Any]:
    """``code`` as a function that reads parameters, buffers and regions where ``body`` has them.

    Args:
        trains: as ``code`` stands; else as in ``eval()``: nothing is dropped, and batch norms read their running statistics.
        taps: values that it returns behind its outputs.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    outputs = graph.graph_copy(code, copies)
    assert isinstance(outputs, tuple)
    made = {node.meta["op"]: copies[node] for node in code.nodes if "op" in node.meta}
    graph.output((*outputs, *(_part(graph, made[ref.name], ref.index) for ref in taps)))
    if not trains:
        _rest(graph)
    return partial(type(fx.GraphModule(body, graph)).forward, body)


def _part(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    """One output of a call, which may have several."""
    parts = [user for user in node.users if user.target is operator.getitem]
    is_one = not parts and index == 0 and "types" in node.meta
    if is_one:
        return node
    known = next((part for part in parts if part.args[1] == index), None)
    return known or graph.call_function(operator.getitem, (node, index))


def _rest(graph: fx.Graph) -> None:
    for node in graph.nodes:
        node.target = _AT_REST.get(node.target, node.target) if node.op == "call_function" else node.target
        name = _PROBABILITIES.get(node.target) if node.op == "call_function" else None
        if name is None:
            continue
        position = list(inspect.signature(node.target).parameters).index(name)
        if position < len(node.args):
            node.update_arg(position, 0.0)
        else:
            node.update_kwarg(name, 0.0)


def noise(made: Sequence[Op]) -> Op | None:
    """An operator that draws random numbers which are no dropout; None: there is none."""
    return next((op for op in made if draws_random(op.target) and op.target != "autopar.dropout"), None)

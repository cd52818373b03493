"""Emitted code without its dropout, for evaluations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

from autopar.graph.graph import Op
from autopar.graph.random import draws_random
from autopar.ops import collectives as ops
from autopar.ops import sequence as sequence_ops

_PROBABILITIES: dict[Callable[..., Any], str] = {
    ops.dropout: "p",
    ops.attention: "dropout_p",
    sequence_ops.attention_gathered: "dropout_p",
    sequence_ops.attention_ring: "dropout_p",
}
"""The argument of each function that drops."""


def without_dropout(body: fx.GraphModule, code: fx.Graph) -> Callable[..., Any]:
    """``code`` that drops nothing, as a function that reads parameters, buffers and regions where ``body`` has them."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(code, {}))
    for node in graph.nodes:
        name = _PROBABILITIES.get(node.target) if node.op == "call_function" else None
        if name is None:
            continue
        position = list(inspect.signature(node.target).parameters).index(name)
        if position < len(node.args):
            node.update_arg(position, 0.0)
        else:
            node.update_kwarg(name, 0.0)
    return partial(type(fx.GraphModule(body, graph)).forward, body)


def noise(made: Sequence[Op]) -> Op | None:
    """An operator that draws random numbers which are no dropout; None: there is none."""
    return next((op for op in made if draws_random(op.target) and op.target != "autopar.dropout"), None)

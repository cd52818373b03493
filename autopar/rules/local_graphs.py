"""Graphs of one rank with the experts of mixtures spread over data ranks.

The axis ``ep_data`` is a factor of the data ranks and is applied after ``batch``. Every tensor with samples is split by then, so that the
mixture is the only operator that changes, and the type of its weights, S(0), is the only new one.

The gradients of these weights are complete for the tokens of the ranks of ``ep_data``. They are pending sums only over the data ranks
that hold the same experts (``ep_outer``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from fractions import Fraction

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Op, Parameter, digest
from autopar.graph.rewrites import signature
from autopar.plan.mesh import S
from autopar.rules.local_calls import part_of

AXIS = "ep_data"
"""The axis of the data ranks that experts are spread over."""
EXPERTS = "autopar.experts"
"""The operator of a mixture of experts."""
DISPATCH = "dispatch"
"""The name of the strategy of a mixture whose experts are spread."""
SAMPLES = "samples"
"""The name of the strategy of every other operator, which works on the samples of its rank."""


def expert_counts(graph: Graph) -> tuple[int, ...]:
    """Returns the number of experts of each mixture that can be spread."""
    return tuple(graph.spec(op.operands[-1]).shape[0] for op in graph.ops if can_spread(graph, op))


def can_spread(graph: Graph, op: Op) -> bool:
    """Returns whether ``op`` is a mixture of experts whose weights are parameters that nothing else reads."""
    weights = op.operands[3:]
    return op.target == EXPERTS and all(graph.is_parameter(ref) and len(graph.users(ref)) == 1 for ref in weights)


def spread(graph: Graph, size: int, only: Collection[str] | None = None) -> Graph:
    """Returns the graph of one data rank with the experts of mixtures split over ``size`` data ranks.

    Args:
        graph: the graph of one micro-batch on one data rank (axis ``batch`` applied, and no other).
        size: the number of data ranks.
        only: the names of the mixtures that are spread; None spreads all that can be.

    Raises:
        RuleError: a mixture of ``only`` cannot be spread, or ``size`` does not divide the number of its experts.
    """
    mixtures = [op for op in graph.ops if (can_spread(graph, op) if only is None else op.name in only)]
    split_names: set[str] = set()
    for op in mixtures:
        num_experts = graph.spec(op.operands[-1]).shape[0]
        if num_experts % size or not can_spread(graph, op):
            raise RuleError(
                f"{num_experts} experts cannot be spread over {size} data ranks",
                where=f"{op.name}, {op.module or 'no module'}",
                fix="Pin an ep that divides the experts (which share no weights), or ep=1",
            )
        split_names |= {ref.name for ref in op.operands[3:]}
    names = {op.name for op in mixtures}

    def local(op: Op) -> Op:
        if op.name not in names:
            return op
        args = (*op.args, AXIS, graph.spec(op.operands[-1]).shape[0])
        return replace(op, target="autopar.experts_dispatch", args=args)

    def part(parameter: Parameter) -> Parameter:
        if parameter.name not in split_names:
            return parameter
        spec = part_of(parameter.spec, S(0), Fraction(size), parameter.fqn, axis=AXIS)
        return replace(parameter, spec=spec, layout=(*parameter.layout, (AXIS, S(0))))

    local_graph = replace(graph, parameters=tuple(map(part, graph.parameters)), ops=tuple(map(local, graph.ops)))
    blocks = tuple(
        replace(b, hash=digest(f"{b.hash}|{AXIS}|{signature(local_graph.block_ops(b), local_graph.spec)}"))
        if any(op.name in names for op in graph.block_ops(b))
        else b
        for b in graph.blocks
    )
    return replace(local_graph, blocks=blocks)

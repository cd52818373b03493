"""Graphs of one rank with experts spread over data ranks.

The axis ``ep_data`` is a factor of the data ranks, applied after ``batch``: every tensor with samples is split there
already, so the one operator that changes is the mixture itself, and the one layout that of its weights, S(0).

Gradients of these weights are whole for the tokens of the ranks of ``ep_data``, and a pending sum over those data
ranks that hold the same experts (``ep_outer``) alone.
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
EXPERTS = "autopar.experts"
DISPATCH = "dispatch"
"""Name of the strategy of a mixture whose experts are spread."""
SAMPLES = "samples"
"""Name of that of every other operator: it works on its rank's samples."""


def expert_counts(graph: Graph) -> tuple[int, ...]:
    """Experts of each mixture that can be spread: its weights are parameters that nothing else reads."""
    return tuple(graph.spec(op.operands[-1]).shape[0] for op in graph.ops if can_spread(graph, op))


def can_spread(graph: Graph, op: Op) -> bool:
    """Whether ``op`` is a mixture of experts whose weights are parameters that nothing else reads."""
    weights = op.operands[3:]
    return op.target == EXPERTS and all(graph.is_parameter(ref) and len(graph.users(ref)) == 1 for ref in weights)


def spread(graph: Graph, size: int, only: Collection[str] | None = None) -> Graph:
    """One data rank's graph with the experts of its mixtures split over ``size`` data ranks.

    Args:
        graph: of one micro-batch on one data rank (axis ``batch`` applied, no other).
        only: names of the mixtures that are spread; all that can be when None.

    Raises:
        RuleError: a mixture of ``only`` cannot be spread, or its experts do not divide.
    """
    chosen = [op for op in graph.ops if (can_spread(graph, op) if only is None else op.name in only)]
    split: set[str] = set()
    for op in chosen:
        count = graph.spec(op.operands[-1]).shape[0]
        if count % size or not can_spread(graph, op):
            raise RuleError(
                f"{count} experts cannot be spread over {size} data ranks",
                where=f"{op.name}, {op.module or 'no module'}",
                fix="Pin an ep that divides the experts (which share no weights), or ep=1",
            )
        split |= {ref.name for ref in op.operands[3:]}
    names = {op.name for op in chosen}

    def local(op: Op) -> Op:
        if op.name not in names:
            return op
        args = (*op.args, AXIS, graph.spec(op.operands[-1]).shape[0])
        return replace(op, target="autopar.experts_dispatch", args=args)

    def part(parameter: Parameter) -> Parameter:
        if parameter.name not in split:
            return parameter
        spec = part_of(parameter.spec, S(0), Fraction(size), parameter.fqn, axis=AXIS)
        return replace(parameter, spec=spec, layout=(*parameter.layout, (AXIS, S(0))))

    made = replace(graph, parameters=tuple(map(part, graph.parameters)), ops=tuple(map(local, graph.ops)))
    blocks = tuple(
        replace(b, hash=digest(f"{b.hash}|{AXIS}|{signature(made.block_ops(b), made.spec)}"))
        if any(op.name in names for op in graph.block_ops(b))
        else b
        for b in graph.blocks
    )
    return replace(made, blocks=blocks)

"""Sums in the checks of one rank's graph: each gradient is summed where it must be, and only there; which operators pass pending sums.

**Gradients.** The check needs nothing of the strategies that were chosen, only what a plain operator does backward, one axis at a time: the
gradient that it passes to an operand differs between ranks if the one that arrives does, if another operand differs, or
if the operand itself is split. Such a gradient is a part (S) or a summand (R); any other is whole on every rank (I, P).
What the types say must be that; of a parameter at rest the types say whether the runtime sums its gradient over the axis.

The checker of emitted code infers types too, but not of operators that it does not know and that a pending sum on another
axis passes, nor of those with several outputs.

**Pending sums.** An operator that is linear in an operand may be given ranks' summands of it: its results are summands of the result.
The checker knows that of functions of torch. Of operators of our own, and of products with a bias, it is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import spmd_types
import torch
from spmd_types import _checker

from autopar.errors import InternalError
from autopar.graph.graph import Argument, Graph, Op, Ref
from autopar.lower.emit import TARGETS, layout_of, use_layout
from autopar.lower.program import Program
from autopar.ops import collectives, seeded
from autopar.ops import sequence as sequence_ops
from autopar.ops import sharded as sharded_ops
from autopar.plan.mesh import DATA_AXES, R, Type
from autopar.rules.apply import BATCH, OVER_DATA


def check_program(program: Program) -> None:
    """:func:`check_gradients` on every axis of a program; quick enough to precede every run.

    Raises:
        InternalError: see there.
    """
    plan = program.plan
    axes = [axis for axis in ("cp", "tp") if getattr(plan.mesh, axis) > 1]
    for axis in (BATCH, *axes) if plan.mesh.data * plan.num_micro_batches > 1 else axes:
        check_gradients(program.graph, axis)


def check_gradients(graph: Graph, axis: str) -> int:
    """Checks every way from the loss to a parameter on one axis.

    Args:
        graph: one rank's, with its types.
        axis: ``cp``, ``tp`` or ``batch``.

    Returns:
        The number of operands whose gradient was followed.

    Raises:
        InternalError: a gradient lacks its sum over the axis, or is summed though it is whole; names the operator.
    """
    return _Walk(graph, axis).run()


class _Walk:
    """The state of one :func:`check_gradients`."""

    def __init__(self, graph: Graph, axis: str) -> None:
        self.graph, self.axis = graph, axis
        self.names = frozenset(DATA_AXES) if axis == BATCH else frozenset((axis,))
        self.totals = frozenset(graph.sums) if axis == BATCH else frozenset[Ref]()

    def run(self) -> int:
        reached, count = {self.graph.loss}, 0
        for op in reversed(self.graph.ops):
            made = [ref for ref in (Ref(op.name, i) for i in range(len(op.outputs))) if ref in reached]
            if not made:
                continue
            trained = {ref for ref in op.operands if self.graph.spec(ref).requires_grad}
            reached |= trained
            if self._works_over_axis(op):  # a change of type, or an operator that was executed against its types
                continue
            self._values(op, made)
            for ref in trained:
                self._gradient(op, made, ref)
            count += len(trained)
        return count

    def _works_over_axis(self, op: Op) -> bool:
        is_change = self.axis == BATCH and op.target == OVER_DATA
        return is_change or _mentions((op.args, tuple(value for _, value in op.kwargs)), self.names)

    def _values(self, op: Op, made: list[Ref]) -> None:
        """What differs between ranks makes nothing that is the same on all of them."""
        different = [ref for ref in op.operands if _differs(self._type(ref))]
        whole = [ref for ref in made if self._type(ref).kind in ("I", "R")]
        if different and whole:
            raise InternalError(
                f"A value of type {self._type(whole[0])} on {self.axis} is made of {different[0]}, "
                f"which is {self._type(different[0])} and differs between ranks",
                where=self._place(op),
            )

    def _gradient(self, op: Op, made: list[Ref], ref: Ref) -> None:
        """The gradient that ``op`` passes back to one operand is what the operand's type says."""
        kind = self._type(ref)
        other = next((r for r in op.operands if r != ref and self._meets(kind, self._type(r))), None)
        arrives = next((r for r in made if _has_own_gradient(self._type(r))), None)
        found = other is not None or arrives is not None or kind.is_split
        if found == _has_own_gradient(kind):
            return
        if found:
            beside = f"{op.name} of type {self._type(arrives)}" if arrives is not None else ""
            beside = f"{other} of type {self._type(other)} beside it" if other is not None else beside
            raise InternalError(
                f"The gradient of {self._called(ref)}, {kind} on {self.axis}, lacks its sum over the ranks "
                f"(it gets a summand on each by {beside})",
                where=self._place(op),
            )
        raise InternalError(
            f"The gradient of {self._called(ref)}, {kind} on {self.axis}, is summed over the ranks although it is complete on each "
            f"({made[0]} is {self._type(made[0])})",
            where=self._place(op),
        )

    @staticmethod
    def _meets(kind: Type, other: Type) -> bool:
        """Whether a gradient takes up what differs in another operand; to a pending sum others are added (a bias of one)."""
        return kind.kind != "P" and _differs(other)

    def _type(self, ref: Ref) -> Type:
        if ref in self.totals:
            return R
        graph = self.graph
        layout = use_layout(graph.parameter(ref.name)) if graph.is_parameter(ref) else layout_of(graph, ref)
        return dict(layout).get(self.axis, R)

    def _called(self, ref: Ref) -> str:
        return f"parameter {self.graph.parameter(ref.name).key}" if self.graph.is_parameter(ref) else str(ref)

    def _place(self, op: Op) -> str:
        block = self.graph.blocks[self.graph.block_of(op.name)]
        return f"block {block.index} ({block.label}): {op.name} ({op.target})"


def _differs(kind: Type) -> bool:
    return kind.kind in ("S", "P")


def _has_own_gradient(kind: Type) -> bool:
    """Whether each rank has a gradient of its own: a part, or a summand."""
    return kind.kind in ("S", "R")


def _mentions(argument: Argument, names: frozenset[str]) -> bool:
    if isinstance(argument, tuple):
        return any(_mentions(item, names) for item in argument)
    return isinstance(argument, str) and argument in names


CHANGES = frozenset(
    (
        collectives.all_gather,
        collectives.all_reduce,
        collectives.all_to_all,
        collectives.invariant_to_replicate,
        collectives.keep_on_first,
        collectives.reduce_scatter,
        collectives.shard,
    )
)
"""Changes of type on one axis: linear, so that a pending sum on another one may pass; the checker does not know it."""

_LINEAR = frozenset(
    (
        seeded.dropout,  # all summands lose the same elements
        sequence_ops.attention_gathered,  # in the values
        sequence_ops.attention_ring,
        sharded_ops.change_over_data,
        sharded_ops.total,
    )
)
"""Operators of our own, besides, that are linear in what may be a pending sum on another axis."""

_CHOOSE = frozenset((torch.gather, torch.index_select, torch.repeat_interleave))
"""Linear in what is chosen from; the checker would have the indices be summands too."""


def passes_by(target: Any, call: Callable[..., Any]) -> bool:
    """Whether the checker cannot follow a pending sum through an operator that the program states to be linear in it."""
    return not _is_known(call) or target in _LINEAR or target in CHANGES


def _is_known(call: Callable[..., Any]) -> bool:
    """Whether the checker can tell that a pending sum may pass."""
    return call in _checker._OP_REGISTRY or call.__module__ in (
        "autopar.ops.collectives",
        "autopar.ops.plain",
        "autopar.ops.seeded",
        "autopar.ops.sharded",
        "autopar.ops.sequence",
        __name__,
    )


def linear_call(target: Any) -> Callable[..., Any]:
    """What the checker knows as linear in place of ``target``: it knows functions of torch, not overloads."""
    name = target_name(target)
    if name in ("aten.linear.default", "autopar.linear_t"):
        return _product_t if name == "autopar.linear_t" else _product
    if target is sharded_ops.embedding_vocabulary:
        return _looked_up
    if isinstance(target, torch._ops.OpOverload):
        public = getattr(torch, target._schema.name.partition("::")[2], None)
        if public in _checker._OP_REGISTRY and public not in _CHOOSE:
            return cast("Callable[..., Any]", public)
    return cast("Callable[..., Any]", target)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _product_t(x, torch.t(weight), bias)


def _product_t(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product, and the addition of a bias of which each rank has a summand."""
    y = torch.matmul(x, weight)
    if bias is None:
        return y
    for axis, kind in spmd_types.get_local_type(bias).items():
        if kind is spmd_types.P and spmd_types.get_axis_local_type(y, axis) is spmd_types.V:
            spmd_types.mutate_type(y, axis, src=spmd_types.V, dst=spmd_types.P)
    return torch.add(y, bias)


def _looked_up(weight: torch.Tensor, ids: torch.Tensor, axis: str, padding_idx: int = -1) -> torch.Tensor:
    """A look-up as the product of who is chosen and the table, of which each rank of another axis may have a summand."""
    chosen = ids.unsqueeze(-1).expand(*ids.shape, weight.shape[0]).to(weight.dtype)
    return sharded_ops._pending(torch.matmul(chosen, weight), collectives.group(axis))


def target_name(target: Any) -> str:
    """What graphs call the function of a node."""
    if target in TARGETS:
        return TARGETS[target]
    if isinstance(target, torch._ops.OpOverload):
        return str(target)  # as graphs name it
    return f"autopar.{target.__name__}" if callable(target) else str(target)

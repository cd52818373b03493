"""Checks that every gradient of a program is summed exactly where it must be, and says which operators pass pending sums.

**Gradients.** The check does not look at the chosen strategies. It follows what a plain operator does in backward, one axis at a time: the
gradient of an operand differs between ranks if the gradient of the result does, if another operand differs, or if the operand itself is
split. Such a gradient is a shard (S) or a summand (R); any other gradient is complete on every rank (I, P). The stated types must agree
with this. The type of a parameter at rest says whether the runtime sums its gradient over the axis.

The checker of emitted code (:mod:`autopar.lower.check_types`) infers types too. It cannot follow operators that it does not know while a
pending sum on another axis passes through them, nor operators with several outputs. This check covers them.

**Pending sums.** An operator that is linear in an operand may take each rank's summand of it: its results are summands of the result.
The checker knows the linear functions of torch. This module lists autopar's linear operators and handles products with a bias.
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
    """Check the gradients of a program on every axis (:func:`check_gradients`). It is fast enough to precede every run.

    Raises:
        InternalError: as in :func:`check_gradients`.
    """
    plan = program.plan
    axes = [axis for axis in ("cp", "tp") if getattr(plan.mesh, axis) > 1]
    for axis in (BATCH, *axes) if plan.mesh.data * plan.num_micro_batches > 1 else axes:
        check_gradients(program.graph, axis)


def check_gradients(graph: Graph, axis: str) -> int:
    """Check the gradients on all paths from the loss to the parameters, on one axis.

    Args:
        graph: the graph of one rank, with types.
        axis: ``cp``, ``tp`` or ``batch``.

    Returns:
        The number of operands whose gradients were checked.

    Raises:
        InternalError: a gradient lacks its sum over the axis, or is summed although it is complete; the error names the operator.
    """
    return _Walk(graph, axis).run()


class _Walk:
    """The state of one :func:`check_gradients`.

    Attributes:
        names: the mesh axes that ``axis`` stands for.
        totals: values that are summed over samples before the step, and so are R on ``batch``.
    """

    def __init__(self, graph: Graph, axis: str) -> None:
        self.graph, self.axis = graph, axis
        self.names = frozenset(DATA_AXES) if axis == BATCH else frozenset((axis,))
        self.totals = frozenset(graph.sums) if axis == BATCH else frozenset[Ref]()

    def run(self) -> int:
        """Check all operators that the loss depends on, and return the number of checked operands."""
        reached, count = {self.graph.loss}, 0
        for op in reversed(self.graph.ops):
            outputs = [ref for ref in (Ref(op.name, i) for i in range(len(op.outputs))) if ref in reached]
            if not outputs:
                continue
            trained = {ref for ref in op.operands if self.graph.spec(ref).requires_grad}
            reached |= trained
            if self._works_over_axis(op):
                continue
            self._check_values(op, outputs)
            for ref in trained:
                self._check_gradient(op, outputs, ref)
            count += len(trained)
        return count

    def _works_over_axis(self, op: Op) -> bool:
        """Return whether an operator changes types or communicates over the axis itself."""
        is_change = self.axis == BATCH and op.target == OVER_DATA
        return is_change or _mentions((op.args, tuple(value for _, value in op.kwargs)), self.names)

    def _check_values(self, op: Op, outputs: list[Ref]) -> None:
        """Check that no output is stated to be equal on all ranks if an operand differs between them."""
        different = [ref for ref in op.operands if _differs(self._type(ref))]
        equal = [ref for ref in outputs if self._type(ref).kind in ("I", "R")]
        if different and equal:
            raise InternalError(
                f"A value of type {self._type(equal[0])} on {self.axis} is made of {different[0]}, "
                f"which is {self._type(different[0])} and differs between ranks",
                where=self._place(op),
            )

    def _check_gradient(self, op: Op, outputs: list[Ref], ref: Ref) -> None:
        """Check that the gradient that ``op`` passes back to its operand ``ref`` has the form that the operand's type states."""
        kind = self._type(ref)
        # the gradient of a pending sum takes up no differences: other summands (a bias of one) are only added to it
        others = () if kind.kind == "P" else op.operands
        other = next((r for r in others if r != ref and _differs(self._type(r))), None)
        result = next((r for r in outputs if _gradient_differs(self._type(r))), None)
        differs = other is not None or result is not None or kind.is_split
        if differs == _gradient_differs(kind):
            return
        if differs:
            source = f"{op.name} of type {self._type(result)}" if result is not None else ""
            source = f"{other} of type {self._type(other)} beside it" if other is not None else source
            raise InternalError(
                f"The gradient of {self._label(ref)}, {kind} on {self.axis}, lacks its sum over the ranks "
                f"(it gets a summand on each by {source})",
                where=self._place(op),
            )
        raise InternalError(
            f"The gradient of {self._label(ref)}, {kind} on {self.axis}, is summed over the ranks although it is complete on each "
            f"({outputs[0]} is {self._type(outputs[0])})",
            where=self._place(op),
        )

    def _type(self, ref: Ref) -> Type:
        """Return the stated type of a tensor on the axis, where operators read it."""
        if ref in self.totals:
            return R
        graph = self.graph
        layout = use_layout(graph.parameter(ref.name)) if graph.is_parameter(ref) else layout_of(graph, ref)
        return dict(layout).get(self.axis, R)

    def _label(self, ref: Ref) -> str:
        return f"parameter {self.graph.parameter(ref.name).key}" if self.graph.is_parameter(ref) else str(ref)

    def _place(self, op: Op) -> str:
        block = self.graph.blocks[self.graph.block_of(op.name)]
        return f"block {block.index} ({block.label}): {op.name} ({op.target})"


def _differs(kind: Type) -> bool:
    """Return whether the value of a tensor differs between ranks."""
    return kind.kind in ("S", "P")


def _gradient_differs(kind: Type) -> bool:
    """Return whether the gradient of a tensor differs between ranks, which have a shard or a summand of it."""
    return kind.kind in ("S", "R")


def _mentions(argument: Argument, names: frozenset[str]) -> bool:
    """Return whether one of the mesh axes is among the arguments of an operator."""
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
"""Changes of type on one axis. They are linear, so that a pending sum on another axis may pass; the checker does not know this."""

_LINEAR = frozenset(
    (
        seeded.dropout,  # all summands share one mask
        sequence_ops.attention_gathered,  # linear in the values
        sequence_ops.attention_ring,
        sharded_ops.change_over_data,
        sharded_ops.total,
    )
)
"""Other operators of autopar that are linear in the operand that may be a pending sum on another axis."""

_CHOOSE = frozenset((torch.gather, torch.index_select, torch.repeat_interleave))
"""Operators that are linear in the tensor that they select from; the checker would require that the indices are summands too."""


def passes_by(target: Any, call: Callable[..., Any]) -> bool:
    """Return whether the checker cannot follow a pending sum through an operator that the program states to be linear in it.

    Args:
        target: the function of the program.
        call: the function that replaces it in the check (:func:`linear_call`).
    """
    return not _is_known(call) or target in _LINEAR or target in CHANGES


def _is_known(call: Callable[..., Any]) -> bool:
    """Return whether the checker can find out if a pending sum may pass."""
    return call in _checker._OP_REGISTRY or call.__module__ in (
        "autopar.ops.collectives",
        "autopar.ops.plain",
        "autopar.ops.seeded",
        "autopar.ops.sharded",
        "autopar.ops.sequence",
        __name__,
    )


def linear_call(target: Any) -> Callable[..., Any]:
    """Return the function that replaces ``target`` in the check: a linear function that the checker knows, as it knows no overloads."""
    name = target_name(target)
    if name in ("aten.linear.default", "autopar.linear_t"):
        return _linear_t if name == "autopar.linear_t" else _linear
    if target is sharded_ops.embedding_vocabulary:
        return _embedding_product
    if isinstance(target, torch._ops.OpOverload):
        public = getattr(torch, target._schema.name.partition("::")[2], None)
        if public in _checker._OP_REGISTRY and public not in _CHOOSE:
            return cast("Callable[..., Any]", public)
    return cast("Callable[..., Any]", target)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _linear_t(x, torch.t(weight), bias)


def _linear_t(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight + bias``, in which each rank may have a summand of the bias."""
    y = torch.matmul(x, weight)
    if bias is None:
        return y
    for axis, kind in spmd_types.get_local_type(bias).items():
        if kind is spmd_types.P and spmd_types.get_axis_local_type(y, axis) is spmd_types.V:
            spmd_types.mutate_type(y, axis, src=spmd_types.V, dst=spmd_types.P)
    return torch.add(y, bias)


def _embedding_product(weight: torch.Tensor, ids: torch.Tensor, axis: str, padding_idx: int = -1) -> torch.Tensor:
    """Return embeddings as the product of one-hot rows and the table, of which ranks on another axis may have summands."""
    chosen = ids.unsqueeze(-1).expand(*ids.shape, weight.shape[0]).to(weight.dtype)
    return sharded_ops._pending(torch.matmul(chosen, weight), collectives.group(axis))


def target_name(target: Any) -> str:
    """Return the name that graphs have for the function of a node (``Op.target``)."""
    if target in TARGETS:
        return TARGETS[target]
    if isinstance(target, torch._ops.OpOverload):
        return str(target)  # as graphs name it
    return f"autopar.{target.__name__}" if callable(target) else str(target)

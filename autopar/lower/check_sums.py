"""Checks that every gradient of a program is summed exactly where it must be.

The check does not look at the chosen strategies. It follows what a plain operator does in backward, one axis at a time: the
gradient of an operand differs between ranks if the gradient of the result does, if another operand differs, or if the operand itself is
split. Such a gradient is a shard (S) or a summand (R); any other gradient is complete on every rank (I, P). The stated types must agree
with this. The type of a parameter at rest says whether the runtime sums its gradient over the axis.
"""

from __future__ import annotations

from autopar.errors import InternalError
from autopar.graph.graph import Argument, Graph, Op, Ref
from autopar.lower.emit import read_layout
from autopar.lower.program import Program
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
    """

    def __init__(self, graph: Graph, axis: str) -> None:
        self.graph, self.axis = graph, axis
        self.names = frozenset(DATA_AXES) if axis == BATCH else frozenset((axis,))

    def run(self) -> int:
        """Check all operators that the loss depends on, and return the number of checked operands."""
        reached, count = {self.graph.loss}, 0
        for op in reversed(self.graph.ops):
            outputs = [ref for ref in op.refs if ref in reached]
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
        problem = f"is summed over the ranks although it is complete on each ({outputs[0]} is {self._type(outputs[0])})"
        if differs:
            source = f"{op.name} of type {self._type(result)}" if result is not None else ""
            source = f"{other} of type {self._type(other)} beside it" if other is not None else source
            problem = f"lacks its sum over the ranks (it gets a summand on each by {source})"
        name = f"The gradient of {self._label(ref)}, {kind} on {self.axis}"
        raise InternalError(f"{name}, {problem}", where=self._place(op))

    def _type(self, ref: Ref) -> Type:
        """Return the stated type of a tensor on the axis, where operators read it."""
        return dict(read_layout(self.graph, ref)).get(self.axis, R)

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

"""Numbers that a trace takes for constants although they count samples.

``loss.sum() / labels.numel()`` traces as a division by a number, that of the example's batch: for another batch size
it would be wrong. Whether a number depends on the batch size, a second trace at twice the size tells; of a number that the
model's own code multiplies by, forward passes at both sizes tell it too, in a fraction of the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeGuard

from autopar.errors import TraceError
from autopar.graph.graph import Graph, Op, Ref
from autopar.tracing.guards.repeated_steps import Call

_SCALING = frozenset(f"aten.{name}.{kind}" for name in ("mul", "div") for kind in ("Tensor", "Scalar"))
_SHIFTING = _SCALING | {
    f"aten.{name}.{kind}" for name in ("add", "sub", "rsub", "pow") for kind in ("Tensor", "Scalar")
}


class CountError(TraceError):
    """A loss is scaled by a number that depends on the batch size."""


def suspects(graph: Graph) -> list[Op]:
    """Operators that scale by a number what has a gradient and may have no batch dim: surely not, or near the loss."""
    last = graph.blocks[-1].start
    found = [
        op
        for i, op in enumerate(graph.ops)
        if op.target in _SCALING
        and op.spec.requires_grad
        and (not op.spec.shape or op.spec.shape[0] % graph.batch_size or i >= last)
        and any(n != 1 for n in _numbers(graph, op))
    ]
    return found + [op for op in _for_buffers(graph) if op not in found and any(_numbers(graph, op))]


def _for_buffers(graph: Graph) -> Iterator[Op]:
    """Elementwise operators with numbers that new values of buffers depend on (a count of samples seen)."""
    needed = {m.value.name for m in graph.mutations}
    for op in reversed((*graph.prelude, *graph.ops)):
        if op.name in needed:
            needed.update(ref.name for ref in op.operands)
            if op.target in _SHIFTING and not op.spec.requires_grad:
                yield op


def are_same(graph: Graph, calls: Sequence[Call], larger: Sequence[Call]) -> bool:
    """Whether two forward passes show that no number of :func:`suspects` depends on the batch size; False where they may not.

    They show it where both scale and shift by the same numbers in the same order, the suspects' among them: constants that are
    computed, and numbers that a trace has made of others, are not.

    Args:
        calls, larger: of passes at the batch size of ``graph`` and at another (:func:`autopar.tracing.guards.repeated_steps.calls`).
    """
    here, there = (list(_shifts(own)) for own in (calls, larger))
    if here != there:
        return False
    called = {(target, float(n)) for target, *given in here for n in given if _is_number(n)}
    for op in suspects(graph):
        literals = [float(n) for n in op.args if _is_number(n)]
        if literals != list(_numbers(graph, op)) or not called.issuperset((op.target, n) for n in literals):
            return False
    return True


def _shifts(calls: Iterable[Call]) -> Iterator[Call]:
    """Those that scale or shift, in place or not, which are the same in a graph."""
    for name, *given in calls:
        target = str(name).replace("_.", ".")
        if target in _SHIFTING:
            yield target, *given


def check(graph: Graph, larger: Graph) -> None:
    """Compare a trace with one at another batch size.

    Raises:
        CountError: a number of :func:`suspects` differs.
    """
    others = {op.name: op for op in (*larger.prelude, *larger.ops)}
    for op in suspects(graph):
        other = others.get(op.name)
        here, there = list(_numbers(graph, op)), [] if other is None else list(_numbers(larger, other))
        if here != there:
            raise CountError(
                f"A number in a loss or buffer depends on the batch size: {here} for a batch of {graph.batch_size}, "
                f"{there} for one of {larger.batch_size}",
                where=op.source or op.module or op.name,
                fix="Take a mean, or divide by a count of the inputs: (labels != -100).sum()",
            )


def _numbers(graph: Graph, op: Op) -> Iterator[float]:
    """Literals, and constants of one value, among the arguments."""
    values = {buffer.name: buffer.value for buffer in graph.buffers if not buffer.fqn}
    for argument in op.args:
        if _is_number(argument):
            yield float(argument)
        elif isinstance(argument, Ref):
            value = values.get(argument.name)
            if value is not None and value.numel() == 1:
                yield float(value.item())


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)

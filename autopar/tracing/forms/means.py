"""A number beside a mean: ``1 - x.mean()`` is the mean of ``1 - x``, and so a sum over samples."""

from __future__ import annotations

from autopar.graph.graph import Argument, Op, Ref
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, generic

_MEAN = "aten.mean.default"
_SCALES = frozenset(
    {*(f"aten.{name}.{kind}" for name in ("mul", "div") for kind in ("Tensor", "Scalar")), "aten.neg.default"}
)


def shifted(builder: Builder, call: Call) -> Value:
    """A number plus or minus a mean of all elements, scaled or not, as the mean of elements that are scaled and shifted."""
    mean, *numbers = call.args
    if not isinstance(mean, Ref) or call.spec.shape or not call.grad or not all(map(_is_number, numbers)):
        return generic(builder, call)
    scales: list[Op] = []
    producer = builder.producers.get(mean.name)
    while producer is not None and _is_scale(producer):
        scales.append(producer)
        producer = builder.producers.get(producer.operands[0].name)
    if producer is None or producer.target != _MEAN or len(producer.args) > 1 or producer.kwargs:
        return generic(builder, call)
    value = producer.operands[0]
    spec = builder.specs[value]
    for op in reversed(scales):
        value = builder.emit(call, op.target, (value, *op.args[1:]), spec)
    value = builder.emit(call, call.target, (value, *numbers), spec, kwargs=call.kwargs)
    return builder.emit(call, _MEAN, (value,), call.spec)


def _is_scale(op: Op) -> bool:
    return op.target in _SCALES and isinstance(op.args[0], Ref) and all(map(_is_number, op.args[1:])) and not op.kwargs


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


SHIFTS: dict[str, Handler] = dict.fromkeys(
    ("aten.rsub.Scalar", "aten.sub.Tensor", "aten.sub.Scalar", "aten.add.Scalar"), shifted
)


def _add(builder: Builder, call: Call) -> Value:
    """Zeros plus x, in the shape and dtype of x, is x."""
    first, second = call.args[:2]
    if call.kwargs.get("alpha", 1) == 1:
        for zero, other in ((first, second), (second, first)):
            if _is_zero(builder, zero) and isinstance(other, Ref):
                spec = builder.specs[other]
                if (spec.shape, spec.dtype) == (call.spec.shape, call.spec.dtype):
                    return other
    return shifted(builder, call)


def _scatter_add(builder: Builder, call: Call) -> Value:
    """Into zeros: ``autopar.scatter_sum``, of which parts of the source are summands."""
    given = call.bound()
    zeros, index, source, dim = given["self"], given["index"], given["src"], given["dim"]
    if not _is_zero(builder, zeros) or not isinstance(dim, int) or not call.spec.shape:
        return generic(builder, call)
    shape = call.spec.shape
    return builder.emit(call, "autopar.scatter_sum", (index, source, dim % len(shape), shape), call.spec)


def _is_zero(builder: Builder, value: Argument) -> bool:
    known = builder.values.get(value) if isinstance(value, Ref) else None
    return known is not None and not bool(known.any())


SUMS: dict[str, Handler] = {"aten.add.Tensor": _add, "aten.scatter_add.default": _scatter_add}

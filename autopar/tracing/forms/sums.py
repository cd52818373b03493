"""Sums that begin with zeros: nothing is added to nothing, and counts by a scatter are sums over what is scattered."""

from __future__ import annotations

from autopar.graph.graph import Argument, Ref
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, generic
from autopar.tracing.forms.means import shifted


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

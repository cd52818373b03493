"""Indexing by tensors, x[i, j, ...], in the forms whose samples can be told apart."""

from __future__ import annotations

from math import prod

import torch

from autopar.graph.graph import Argument, Ref, TensorSpec
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import Handler, generic, view_to


def _index(builder: Builder, call: Call) -> Value:
    """x[i, j, ...]: a view where every index counts up along a dim of its own, in order."""
    source, indices = call.args
    assert isinstance(source, Ref) and isinstance(indices, tuple)
    shape = builder.shape(source)
    values = [builder.values.get(index) if isinstance(index, Ref) else None for index in indices]
    if (picked := _one_of_each(builder, call, source, indices)) is not None:
        return picked
    rank = len(call.spec.shape) - (len(shape) - len(indices))
    places: list[int] = []
    for size, value in zip(shape, values, strict=False):
        if value is None or value.dtype == torch.bool or value.numel() != size or size == 1:
            return generic(builder, call)
        if not torch.equal(value.flatten(), torch.arange(size)):
            return generic(builder, call)
        lead = rank - value.dim()
        places.append(lead + next(d for d, n in enumerate(value.shape) if n > 1))
    if places != sorted(set(places)) or prod(call.spec.shape) != prod(shape):
        return generic(builder, call)
    return view_to(builder, call, source, call.spec.shape)


def _one_of_each(builder: Builder, call: Call, source: Ref, indices: tuple[Argument, ...]) -> Ref | None:
    """x[arange(n), i] with i [n] picks one row of each sample: a gather, whose samples are independent."""
    shape = builder.shape(source)
    if len(indices) != 2 or not all(isinstance(index, Ref) for index in indices):
        return None
    first, second = indices
    assert isinstance(first, Ref) and isinstance(second, Ref)
    counting, spec = builder.values.get(first), builder.specs[second]
    if counting is None or second in builder.values or spec.dtype != torch.int64 or spec.shape != shape[:1]:
        return None
    if builder.shape(first) != shape[:1] or not torch.equal(counting.expand(shape[0]), torch.arange(shape[0])):
        return None
    lead, rest = shape[0], shape[2:]
    index = builder.emit(call, "aten.remainder.Scalar", (second, shape[1]), spec)  # an index may count from the end
    index = view_to(builder, call, index, (lead, 1, *(1,) * len(rest)))
    if rest:
        index = builder.emit(
            call, "aten.expand.default", (index, (lead, 1, *rest)), TensorSpec(shape=(lead, 1, *rest), dtype=spec.dtype)
        )
    found = TensorSpec(shape=(lead, 1, *rest), dtype=call.spec.dtype)
    rows = builder.emit(call, "aten.gather.default", (source, 1, index), found)
    return view_to(builder, call, rows, (lead, *rest))


INDEXING: dict[str, Handler] = {"aten.index.Tensor": _index}

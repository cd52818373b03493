"""One form for each operation: handlers that turn traced calls into the operators of a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TypeAlias, cast

import torch

from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import SKIPPED_KWARGS, Builder, Call, Value
from autopar.tracing.constants import CONVERSIONS, LOGICAL, allows_all, is_causal

Handler: TypeAlias = Callable[[Builder, Call], Value]

_DIM_NAMES = ("dim", "dim0", "dim1", "dims", "axis", "start_dim", "end_dim")
_SCALAR_FORMS = aten_targets("mul.Tensor add.Tensor sub.Tensor div.Tensor")
LINEAR_TARGETS = ("aten.linear.default", "autopar.linear_t")


def generic(builder: Builder, call: Call) -> Value:
    """The call as it is: dims counted from the front, devices dropped, constants of one value as numbers."""
    args = tuple(_normal_args(builder, call))
    kwargs = {key: value for key, value in call.kwargs.items() if key not in SKIPPED_KWARGS}
    target = LOGICAL.get(call.target, call.target)
    if target in _SCALAR_FORMS:
        args = _scalars(builder, call, args)
    ref = builder.emit(call, target, args, kwargs=kwargs)
    if len(call.outputs) == 1:
        return ref
    return tuple(Ref(ref.name, i) if spec is not None else None for i, spec in enumerate(call.outputs))


def _normal_args(builder: Builder, call: Call) -> list[Argument]:
    result = list(call.args)
    rank = _rank(builder, call)
    for position, argument in enumerate(call.overload._schema.arguments[: len(result)]):
        if argument.name in _DIM_NAMES and rank:
            result[position] = _wrap(result[position], rank)
    return result


def _rank(builder: Builder, call: Call) -> int:
    first = call.args[0] if call.args else None
    while isinstance(first, tuple):
        first = first[0] if first else None
    rank = len(builder.shape(first)) if isinstance(first, Ref) else 0
    return rank + (call.target in ("aten.unsqueeze.default", "aten.stack.default"))


def _wrap(dim: Argument, rank: int) -> Argument:
    if isinstance(dim, tuple):
        return tuple(_wrap(item, rank) for item in dim)
    return dim + rank if isinstance(dim, int) and dim < 0 else dim


def _scalars(builder: Builder, call: Call, args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """A constant second operand of one value becomes a number where neither shape nor dtype changes."""
    value = builder.values.get(args[1]) if isinstance(args[1], Ref) else None
    if value is None or value.numel() != 1 or not isinstance(args[0], Ref):
        return args
    first = builder.specs[args[0]]
    if first.shape != call.spec.shape or first.dtype != call.spec.dtype or value.dtype == torch.bool:
        return args
    return (args[0], value.item(), *args[2:])


# --- shapes ---------------------------------------------------------------------------------------


def view_to(builder: Builder, call: Call, source: Ref, shape: tuple[int, ...]) -> Ref:
    """``source`` with another shape: no view of a view, no view to the same shape."""
    producer = builder.producers.get(source.name)
    while producer is not None and producer.target in ("aten.view.default", "aten.clone.default"):
        source = producer.operands[0]  # a view copies where it must, so no copy is needed for it
        producer = builder.producers.get(source.name)
    if builder.shape(source) == shape:
        return source
    if producer is not None and producer.target in LINEAR_TARGETS:
        unflattened = _unflatten(builder, call, producer, shape)
        if unflattened is not None:
            return unflattened
    spec = TensorSpec(shape=shape, dtype=builder.specs[source].dtype)
    return builder.emit(call, "aten.view.default", (source, shape), spec)


def _unflatten(builder: Builder, call: Call, producer: Op, shape: tuple[int, ...]) -> Ref | None:
    """view(linear(view(x))) with the leading dims of ``shape``, where the inner view only flattened them."""
    source = producer.operands[0]
    flat = builder.producers.get(source.name)
    if flat is None or flat.target != "aten.view.default" or len(producer.spec.shape) != 2:
        return None
    rows, features = producer.spec.shape
    lead = next((k for k in range(len(shape)) if prod(shape[:k]) == rows), 0)
    if lead < 2 or prod(shape[lead:]) != features:
        return None
    width = builder.shape(source)[-1]
    origin = view_to(builder, call, flat.operands[0], (*shape[:lead], width))
    spec = TensorSpec(shape=(*shape[:lead], features), dtype=producer.spec.dtype)
    made = builder.emit(call, producer.target, (origin, *producer.args[1:]), spec, name=producer.name)
    return view_to(builder, call, made, shape)


def _view(builder: Builder, call: Call) -> Value:
    return view_to(builder, call, call.operands[0], call.spec.shape)


def _identity(builder: Builder, call: Call) -> Value:
    return call.args[0]


def _detach(builder: Builder, call: Call) -> Value:
    return detached(builder, call, call.operands[0])


def detached(builder: Builder, call: Call, ref: Ref) -> Ref:
    """``ref`` cut off from its gradient, where it has one."""
    spec = builder.specs[ref]
    return builder.emit(replace(call, grad=False), "aten.detach.default", (ref,), spec) if spec.requires_grad else ref


def _clone(builder: Builder, call: Call) -> Value:
    """Copies that make contiguous stay, until a view reads them."""
    source = call.operands[0]
    if call.kwargs.get("memory_format") != torch.contiguous_format and call.target != "aten.contiguous.default":
        return source
    kwargs: dict[str, Argument] = {"memory_format": torch.contiguous_format}
    return builder.emit(call, "aten.clone.default", (source,), kwargs=kwargs)


def _expand(builder: Builder, call: Call) -> Value:
    return _expanded(builder, call, call.operands[0], call.spec)


def _expanded(builder: Builder, call: Call, source: Ref, spec: TensorSpec) -> Ref:
    if builder.shape(source) == spec.shape:
        return source
    return builder.emit(call, "aten.expand.default", (source, spec.shape), spec)


def _broadcast(builder: Builder, call: Call) -> Value:
    """broadcast_tensors: an expansion of each tensor that is not as large already."""
    pairs = zip(call.operands, call.outputs, strict=True)
    return tuple(_expanded(builder, call, source, spec) for source, spec in pairs if spec is not None)


def _repeat(builder: Builder, call: Call) -> Value:
    """A repetition of dims of size one is an expansion (a parameter for every sample of the batch)."""
    source, repeats = call.args
    assert isinstance(source, Ref) and isinstance(repeats, tuple)
    shape = builder.shape(source)
    padded = (1,) * (len(repeats) - len(shape)) + shape
    if any(times != 1 and size != 1 for times, size in zip(repeats, padded, strict=True)):
        return _copies(builder, call, source) if _is_outer(padded, call.spec.shape) else generic(builder, call)
    return _expanded(builder, call, view_to(builder, call, source, padded), call.spec)


def _is_outer(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    return 1 < before[0] < after[0] and before[1:] == after[1:]


def _copies(builder: Builder, call: Call, source: Ref) -> Ref:
    """Rows repeated as a whole, some times over: copies in a dim of their own, which may be that of the samples."""
    shape = call.spec.shape
    size = builder.shape(source)[0]
    whole = TensorSpec(shape=(shape[0] // size, size, *shape[1:]), dtype=call.spec.dtype)
    one = view_to(builder, call, source, (1, *whole.shape[1:]))
    return view_to(builder, call, builder.emit(call, "aten.expand.default", (one, whole.shape), whole), shape)


def _slice(builder: Builder, call: Call) -> Value:
    given = call.bound()
    source, dim = _source_and_dim(builder, call)
    bounds = slice(*(cast("int | None", given[key]) for key in ("start", "end", "step")))
    start, stop, step = bounds.indices(builder.shape(source)[dim])
    return slice_of(builder, call, source, dim, start, max(start, stop), step)


def _source_and_dim(builder: Builder, call: Call) -> tuple[Ref, int]:
    """The first tensor of a call and its argument ``dim``, counted from the front."""
    source, dim = call.operands[0], call.bound()["dim"]
    assert isinstance(dim, int)
    return source, dim % len(builder.shape(source))


def slice_of(builder: Builder, call: Call, source: Ref, dim: int, start: int, stop: int, step: int = 1) -> Ref:
    """``source[start:stop:step]`` along ``dim``."""
    spec = builder.specs[source]
    if (start, stop, step) == (0, spec.shape[dim], 1):
        return source
    size = -(-(stop - start) // step)
    out = TensorSpec(shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]), dtype=spec.dtype)
    known = builder.values.get(source)
    if known is not None:
        index = slice(start, stop, step) if known.shape[dim] > 1 else slice(None)
        return builder.constant(call, known[(slice(None),) * dim + (index,)], out)
    args = (source, dim, start, stop, step) if step != 1 else (source, dim, start, stop)
    return builder.emit(call, "aten.slice.Tensor", args, out)


def _select(builder: Builder, call: Call) -> Value:
    source, dim = _source_and_dim(builder, call)
    index = call.bound()["index"]
    assert isinstance(index, int)
    return _selected(builder, call, source, dim, index % builder.shape(source)[dim])


def _selected(builder: Builder, call: Call, source: Ref, dim: int, index: int) -> Ref:
    """``source[index]`` along ``dim``, the dim removed."""
    spec = builder.specs[source]
    out = TensorSpec(shape=spec.shape[:dim] + spec.shape[dim + 1 :], dtype=spec.dtype)
    known = builder.values.get(source)
    if known is not None:
        return builder.constant(call, known.select(dim, min(index, known.shape[dim] - 1)), out)
    return builder.emit(call, "aten.select.int", (source, dim, index), out)


def _paste(builder: Builder, call: Call) -> Value:
    """``whole`` with ``part`` in its place; of complex numbers, whose gradient torch does not have, as pairs of real ones."""
    if not call.spec.dtype.is_complex:
        return generic(builder, call)

    def pairs(ref: Argument) -> Ref:
        copy = builder.make(call, "aten.clone.default", ref)  # a conjugate is a view, which has no pairs
        return builder.make(call, "aten.view_as_real.default", copy)

    whole, part, *where = _normal_args(builder, call)
    result = builder.make(call, call.target, pairs(whole), pairs(part), *where, name=call.name, **call.kwargs)
    return builder.emit(call, "aten.view_as_complex.default", (result,))


def _split(builder: Builder, call: Call) -> Value:
    """split, split_with_sizes, chunk, tensor_split: one slice for each output."""
    source, dim = _source_and_dim(builder, call)
    pieces: list[Argument] = []
    start = 0
    for spec in call.outputs:
        assert spec is not None
        stop = start + spec.shape[dim]
        pieces.append(slice_of(builder, call, source, dim, start, stop))
        start = stop
    return tuple(pieces)


def _unbind(builder: Builder, call: Call) -> Value:
    source, dim = _source_and_dim(builder, call)
    return tuple(_selected(builder, call, source, dim, i) for i in range(len(call.outputs)))


def _cat(builder: Builder, call: Call) -> Value:
    """Without the parts that are empty."""
    given = call.bound()
    parts = given["tensors"]
    assert isinstance(parts, tuple)
    full = tuple(part for part in parts if isinstance(part, Ref) and builder.specs[part].numel)
    if len(full) == 1 and builder.specs[full[0]].dtype == call.spec.dtype:
        return full[0]
    dim = given["dim"]
    assert isinstance(dim, int)
    return builder.emit(call, "aten.cat.default", (full or parts, dim % len(call.spec.shape)))


def _t(builder: Builder, call: Call) -> Value:
    """``x.t()`` and ``x.T``: all dims in reversed order."""
    rank = len(call.spec.shape)
    if rank < 2:
        return call.args[0]
    if rank > 2:
        return builder.emit(call, "aten.permute.default", (call.args[0], tuple(reversed(range(rank)))))
    return builder.emit(call, "aten.transpose.int", (call.args[0], 0, 1))


def _last_two(builder: Builder, call: Call) -> Value:
    """``x.mT``."""
    rank = len(call.spec.shape)
    return builder.emit(call, "aten.transpose.int", (call.args[0], rank - 2, rank - 1))


def _permute(builder: Builder, call: Call) -> Value:
    """That of a matrix is its transpose, whichever way it is written."""
    _, dims = call.args
    assert isinstance(dims, tuple)
    return _t(builder, call) if dims in ((1, 0), (-1, 0), (1, -2), (-1, -2)) else generic(builder, call)


# --- values ---------------------------------------------------------------------------------------


def _to_copy(builder: Builder, call: Call) -> Value:
    return cast_to(builder, call, call.operands[0], call.spec.dtype)


def cast_to(builder: Builder, call: Call, source: Ref, dtype: torch.dtype) -> Ref:
    """``source`` in a dtype."""
    spec = builder.specs[source]
    if spec.dtype == dtype:
        return source
    return builder.emit(call, "aten.to.dtype", (source, dtype), replace(spec, dtype=dtype))


def _copy(builder: Builder, call: Call) -> Value:
    """copy(destination, source): the source in the destination's shape and dtype."""
    return _expanded(builder, call, cast_to(builder, call, call.operands[1], call.spec.dtype), call.spec)


def _dropout(builder: Builder, call: Call) -> Value:
    """native_dropout and dropout: ``autopar.dropout(x, p, salt)``, the identity when nothing is dropped."""
    source, p, training = call.args
    if training is False or p == 0:
        dropped: Value = source
    else:
        dropped = dropped_out(builder, call, source, p)
    return (dropped, None) if call.target == "aten.native_dropout.default" else dropped


def dropped_out(builder: Builder, call: Call, source: Argument, p: Argument) -> Ref:
    """``autopar.dropout(source, p, salt)``; the salt counts the dropouts of the graph, so that each draws its own numbers."""
    builder.salts += 1
    return builder.emit(call, "autopar.dropout", (source, p, builder.salts - 1), call.spec)


def _attention(builder: Builder, call: Call) -> Value:
    """All arguments in place; a causal mask becomes ``is_causal``, an empty one goes."""
    given = call.bound()
    query, key, mask = given["query"], given["key"], given["attn_mask"]
    causal, p = given["is_causal"], given["dropout_p"]
    if isinstance(mask, Ref) and not causal:
        value = builder.lazies.get(mask) or builder.known(mask)
        if value is not None and mask not in builder.masks:
            builder.masks[mask] = (is_causal(value, builder.shape(mask)), allows_all(value))
        causal, empty = builder.masks.get(mask, (False, False))
        mask = None if causal or empty else mask
    kwargs = {"scale": given["scale"], "enable_gqa": given["enable_gqa"]}
    return builder.emit(call, call.target, (query, key, given["value"], mask, p, causal), call.spec, kwargs=kwargs)


def _with_all_arguments(builder: Builder, call: Call) -> Value:
    """An operator of autopar with all arguments in place."""
    return builder.emit(call, call.target.removesuffix(".default"), tuple(call.bound().values()))


def _repeat_interleave(builder: Builder, call: Call) -> Value:
    """Without the length of its output, which the operands tell and which differs between a rank and the whole."""
    kwargs = {key: value for key, value in call.kwargs.items() if key != "output_size"}
    return generic(builder, replace(call, kwargs=kwargs))


def put_where(builder: Builder, call: Call) -> Value:
    """Write ``x[mask] = value`` as a choice between ``value`` and ``x``, which leaves samples apart, where all places get the same value."""
    given = call.bound()
    source, indices, value = given["self"], given["indices"], given["values"]
    assert isinstance(source, Ref) and isinstance(indices, tuple) and isinstance(value, Ref)
    masks = [index for index in indices if isinstance(index, Ref)]
    if given["accumulate"] or len(masks) != 1 or builder.specs[masks[0]].dtype != torch.bool:
        return generic(builder, call)
    dims = len(call.spec.shape)
    num_behind = dims - (len(indices) - 1) - len(builder.shape(masks[0]))
    first, behind = builder.shape(value)[: -num_behind or dims], builder.shape(value)[-num_behind or dims :]
    if any(size != 1 for size in first):
        return generic(builder, call)
    mask = view_to(builder, call, masks[0], builder.shape(masks[0]) + (1,) * num_behind)
    return builder.emit(call, "aten.where.self", (mask, view_to(builder, call, value, behind), source))


def _square(builder: Builder, call: Call) -> Value:
    """As a decomposed program has it; for losses that end in a square the whole program would be traced once more."""
    return builder.emit(call, "aten.pow.Tensor_Scalar", (call.args[0], 2))


HANDLERS: dict[str, Handler] = {
    "aten.repeat_interleave.self_int": _repeat_interleave,
    **dict.fromkeys(
        aten_targets(
            "view.default _unsafe_view.default reshape.default flatten.using_ints unflatten.int squeeze.dim squeeze.dims"
            " squeeze.default view_as.default reshape_as.default"
        ),
        _view,
    ),
    **dict.fromkeys(aten_targets("expand.default expand_as.default broadcast_to.default"), _expand),
    **dict.fromkeys(CONVERSIONS, _to_copy),
    **dict.fromkeys(aten_targets("alias.default lift_fresh_copy.default lift_fresh.default"), _identity),
    **dict.fromkeys(aten_targets("detach.default detach_.default"), _detach),
    **dict.fromkeys(aten_targets("clone.default contiguous.default"), _clone),
    "aten.broadcast_tensors.default": _broadcast,
    "aten.repeat.default": _repeat,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    **dict.fromkeys(aten_targets("slice_scatter.default select_scatter.default"), _paste),
    **dict.fromkeys(aten_targets("split.Tensor split_with_sizes.default chunk.default tensor_split.sections"), _split),
    "aten.unbind.int": _unbind,
    "aten.cat.default": _cat,
    **dict.fromkeys(aten_targets("t.default numpy_T.default"), _t),
    "aten.mT.default": _last_two,
    "aten.permute.default": _permute,
    "aten.copy.default": _copy,
    **dict.fromkeys(aten_targets("native_dropout.default dropout.default"), _dropout),
    "aten.square.default": _square,
    "aten.scaled_dot_product_attention.default": _attention,
    **dict.fromkeys(("autopar.experts.default", "autopar.ctc_losses.default"), _with_all_arguments),
}
"""By target as traced; whatever is not here passes through :func:`generic`."""

COMPOSITES = aten_targets(
    "__and__.Tensor __or__.Tensor conv2d.default diff.default layer_norm.default log_softmax.int pad.default rms_norm.default"
    " softmax.int"
)
"""Composite operators, besides the handled ones, that stay as they are."""

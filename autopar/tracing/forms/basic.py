"""Handlers that turn traced calls into the canonical operators of a graph: shapes, slices and casts.

Several torch operators express the same operation. A handler emits one of them for all, so that the sharding rules and the cost
model need to know only that one. Losses and layers have modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import TypeAlias

import torch

from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import SKIPPED_KWARGS, Builder, Call, Value
from autopar.tracing.constants import CONVERSIONS, LOGICAL

Handler: TypeAlias = Callable[[Builder, Call], Value]
"""A function that adds the operators of a call to the graph under construction and returns the value of the call."""

_DIM_NAMES = ("dim", "dim0", "dim1", "dims", "axis", "start_dim", "end_dim")
"""Names of the arguments that are dims in schemas of torch."""

_SCALAR_FORMS = aten_targets("mul.Tensor add.Tensor sub.Tensor div.Tensor")
"""Operators whose second operand may be a tensor or a number."""

LINEAR_TARGETS = ("aten.linear.default", "autopar.linear_t")
"""Products with a weight; ``autopar.linear_t`` takes the weight as [in, out]."""


def generic(builder: Builder, call: Call) -> Value:
    """Add the call as a single operator with normalised arguments.

    Negative dims become non-negative, arguments about devices are dropped, and a constant operand with a single value becomes a
    number where the operator takes one.
    """
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
    """Return the positional arguments of a call with non-negative dims."""
    result = list(call.args)
    rank = _rank(builder, call)
    for position, argument in enumerate(call.overload._schema.arguments[: len(result)]):
        if argument.name in _DIM_NAMES and rank:
            result[position] = _wrap(result[position], rank)
    return result


def _rank(builder: Builder, call: Call) -> int:
    """Return the number of dims that the dim arguments of a call index, which is 0 if the call has no tensor first."""
    first = call.args[0] if call.args else None
    while isinstance(first, tuple):
        first = first[0] if first else None
    rank = len(builder.shape(first)) if isinstance(first, Ref) else 0
    return rank + (call.target in ("aten.unsqueeze.default", "aten.stack.default"))


def _wrap(dim: Argument, rank: int) -> Argument:
    """Return a dim, or a tuple of dims, with non-negative values."""
    if isinstance(dim, tuple):
        return tuple(_wrap(item, rank) for item in dim)
    return dim + rank if isinstance(dim, int) and dim < 0 else dim


def _scalars(builder: Builder, call: Call, args: tuple[Argument, ...]) -> tuple[Argument, ...]:
    """Replace a constant second operand with a single value by a number, unless this would change the shape or the dtype."""
    value = builder.values.get(args[1]) if isinstance(args[1], Ref) else None
    if value is None or value.numel() != 1 or not isinstance(args[0], Ref):
        return args
    first = builder.specs[args[0]]
    if first.shape != call.spec.shape or first.dtype != call.spec.dtype or value.dtype == torch.bool:
        return args
    return (args[0], value.item(), *args[2:])


# --- shapes ---------------------------------------------------------------------------------------


def view_to(builder: Builder, call: Call, source: Ref, shape: tuple[int, ...]) -> Ref:
    """Return a view of ``source`` with another shape.

    A view of a view becomes one view, and a view to the same shape becomes ``source``. A view of a linear that itself reads a
    flattened tensor becomes a linear of the tensor before it was flattened, because leading dims that are separate can be split.
    """
    producer = builder.producers.get(source.name)
    while producer is not None and producer.target in ("aten.view.default", "aten.clone.default"):
        source = producer.operands[0]  # a view of a graph copies if it must, so that it can replace a copy too
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
    """Rewrite view(linear(view(x))) as a linear with the leading dims of ``shape``; None unless the inner view only flattened these."""
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
    linear = builder.emit(call, producer.target, (origin, *producer.args[1:]), spec, name=producer.name)
    return view_to(builder, call, linear, shape)


def _view(builder: Builder, call: Call) -> Value:
    return view_to(builder, call, call.operands[0], call.spec.shape)


def _identity(builder: Builder, call: Call) -> Value:
    return call.args[0]


def _detach(builder: Builder, call: Call) -> Value:
    return detached(builder, call, call.operands[0])


def detached(builder: Builder, call: Call, ref: Ref) -> Ref:
    """Return ``ref`` detached from its gradient; ``ref`` itself if it requires none."""
    spec = builder.specs[ref]
    return builder.emit(replace(call, grad=False), "aten.detach.default", (ref,), spec) if spec.requires_grad else ref


def _clone(builder: Builder, call: Call) -> Value:
    """Keep only copies that make a tensor contiguous; a view that reads such a copy reads its source instead."""
    source = call.operands[0]
    if call.kwargs.get("memory_format") != torch.contiguous_format and call.target != "aten.contiguous.default":
        return source
    kwargs: dict[str, Argument] = {"memory_format": torch.contiguous_format}
    return builder.emit(call, "aten.clone.default", (source,), kwargs=kwargs)


def _expand(builder: Builder, call: Call) -> Value:
    return expanded(builder, call, call.operands[0], call.spec)


def expanded(builder: Builder, call: Call, source: Ref, spec: TensorSpec) -> Ref:
    """Return ``source`` expanded to the shape of ``spec``; ``source`` itself if it has that shape."""
    if builder.shape(source) == spec.shape:
        return source
    return builder.emit(call, "aten.expand.default", (source, spec.shape), spec)


def _broadcast(builder: Builder, call: Call) -> Value:
    """Expand each tensor of a ``broadcast_tensors`` that does not have the common shape."""
    pairs = zip(call.operands, call.outputs, strict=True)
    return tuple(expanded(builder, call, source, spec) for source, spec in pairs if spec is not None)


def _repeat(builder: Builder, call: Call) -> Value:
    """Emit a repetition of dims of size 1 as an expansion, such as that of a parameter to all samples of the batch."""
    source, repeats = call.bound().values()
    shape = builder.shape(source)
    padded = (1,) * (len(repeats) - len(shape)) + shape
    if any(times != 1 and size != 1 for times, size in zip(repeats, padded, strict=True)):
        is_of_outer_dim = 1 < padded[0] < call.spec.shape[0] and padded[1:] == call.spec.shape[1:]
        return _copies(builder, call, source) if is_of_outer_dim else generic(builder, call)
    return expanded(builder, call, view_to(builder, call, source, padded), call.spec)


def _copies(builder: Builder, call: Call, source: Ref) -> Ref:
    """Repeat dim 0 of ``source`` by an expansion along a new outer dim, which may count the samples, and a view that joins the two."""
    shape = call.spec.shape
    size = builder.shape(source)[0]
    copies = TensorSpec(shape=(shape[0] // size, size, *shape[1:]), dtype=call.spec.dtype)
    unsqueezed = view_to(builder, call, source, (1, *copies.shape[1:]))
    expanded = builder.emit(call, "aten.expand.default", (unsqueezed, copies.shape), copies)
    return view_to(builder, call, expanded, shape)


def _slice(builder: Builder, call: Call) -> Value:
    given = call.bound()
    source, dim = _source_and_dim(builder, call)
    bounds = slice(given["start"], given["end"], given["step"])
    start, stop, step = bounds.indices(builder.shape(source)[dim])
    return slice_of(builder, call, source, dim, start, max(start, stop), step)


def _source_and_dim(builder: Builder, call: Call) -> tuple[Ref, int]:
    """Return the first tensor of a call and its argument ``dim``, made non-negative."""
    source = call.operands[0]
    return source, call.bound()["dim"] % len(builder.shape(source))


def slice_of(builder: Builder, call: Call, source: Ref, dim: int, start: int, stop: int, step: int = 1) -> Ref:
    """Return ``source[start:stop:step]`` along ``dim``, with ``0 <= start <= stop <= size``; a constant if ``source`` is one."""
    spec = builder.specs[source]
    if (start, stop, step) == (0, spec.shape[dim], 1):
        return source
    size = -(-(stop - start) // step)
    out = TensorSpec(shape=(*spec.shape[:dim], size, *spec.shape[dim + 1 :]), dtype=spec.dtype)
    value = builder.values.get(source)
    if value is not None:
        index = slice(start, stop, step) if value.shape[dim] > 1 else slice(None)
        return builder.constant(call, value[(slice(None),) * dim + (index,)], out)
    args = (source, dim, start, stop, step) if step != 1 else (source, dim, start, stop)
    return builder.emit(call, "aten.slice.Tensor", args, out)


def _select(builder: Builder, call: Call) -> Value:
    source, dim = _source_and_dim(builder, call)
    return _selected(builder, call, source, dim, call.bound()["index"] % builder.shape(source)[dim])


def _selected(builder: Builder, call: Call, source: Ref, dim: int, index: int) -> Ref:
    """Return ``source[index]`` along ``dim``, which is removed; a constant if ``source`` is one."""
    spec = builder.specs[source]
    out = TensorSpec(shape=spec.shape[:dim] + spec.shape[dim + 1 :], dtype=spec.dtype)
    value = builder.values.get(source)
    if value is not None:
        return builder.constant(call, value.select(dim, min(index, value.shape[dim] - 1)), out)
    return builder.emit(call, "aten.select.int", (source, dim, index), out)


def _paste(builder: Builder, call: Call) -> Value:
    """Scatter a slice into a tensor. Complex tensors are scattered as real ones, because torch lacks the gradient for complex ones."""
    if not call.spec.dtype.is_complex:
        return generic(builder, call)

    def as_real(ref: Argument) -> Ref:
        copy = builder.make(call, "aten.clone.default", ref)  # view_as_real does not take a conjugate view
        return builder.make(call, "aten.view_as_real.default", copy)

    target, source, *place = _normal_args(builder, call)
    result = builder.make(call, call.target, as_real(target), as_real(source), *place, name=call.name, **call.kwargs)
    return builder.emit(call, "aten.view_as_complex.default", (result,))


def _split(builder: Builder, call: Call) -> Value:
    """Emit one slice for each output of split, split_with_sizes, chunk or tensor_split."""
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
    """Concatenate the tensors that are not empty. Those of ``x.unbind()`` are a view of ``x``."""
    given = call.bound()
    tensors, dim = given["tensors"], given["dim"]
    whole = _unbound(builder, tensors)
    if dim == 0 and whole is not None and builder.specs[whole].dtype == call.spec.dtype:
        return view_to(builder, call, whole, call.spec.shape)
    nonempty = tuple(ref for ref in tensors if isinstance(ref, Ref) and builder.specs[ref].numel)
    if len(nonempty) == 1 and builder.specs[nonempty[0]].dtype == call.spec.dtype:
        return nonempty[0]
    return builder.emit(call, "aten.cat.default", (nonempty or tensors, dim % len(call.spec.shape)))


def _unbound(builder: Builder, tensors: tuple[Argument, ...]) -> Ref | None:
    """Return the tensor whose elements along dim 0 are these tensors, all of them and in order; None if there is none."""
    producers = [builder.producers.get(ref.name) for ref in tensors if isinstance(ref, Ref)]
    first = producers[0] if producers else None
    if first is None or first.target != "aten.select.int" or len(producers) != builder.shape(first.operands[0])[0]:
        return None
    whole = first.operands[0]
    elements = [(first.target, (whole, 0, i)) for i in range(len(producers))]
    return whole if [op and (op.target, op.args) for op in producers] == elements else None


def _stacked(builder: Builder, call: Call) -> Value:
    """Emit a vstack or hstack of tensors of two dims or more as a concatenation, which joins them along dim 0 or 1."""
    (tensors,) = call.args
    dim = 0 if call.target == "aten.vstack.default" else 1
    if not isinstance(tensors, tuple) or any(len(builder.shape(ref)) < 2 for ref in tensors):
        return generic(builder, call)
    return builder.emit(call, "aten.cat.default", (tensors, dim))


def _t(builder: Builder, call: Call) -> Value:
    """Reverse the dims, as ``x.t()`` and ``x.T`` do; those of a matrix are transposed."""
    rank = len(call.spec.shape)
    if rank < 2:
        return call.args[0]
    if rank > 2:
        return builder.emit(call, "aten.permute.default", (call.args[0], tuple(reversed(range(rank)))))
    return builder.emit(call, "aten.transpose.int", (call.args[0], 0, 1))


def _last_two(builder: Builder, call: Call) -> Value:
    """Transpose the last two dims, as ``x.mT`` does."""
    rank = len(call.spec.shape)
    return builder.emit(call, "aten.transpose.int", (call.args[0], rank - 2, rank - 1))


def _permute(builder: Builder, call: Call) -> Value:
    """Permute the dims. A permutation of a matrix becomes a transpose."""
    _, dims = call.args
    assert isinstance(dims, tuple)
    return _t(builder, call) if dims in ((1, 0), (-1, 0), (1, -2), (-1, -2)) else generic(builder, call)


# --- values ---------------------------------------------------------------------------------------


def _to_copy(builder: Builder, call: Call) -> Value:
    return cast_to(builder, call, call.operands[0], call.spec.dtype)


def cast_to(builder: Builder, call: Call, source: Ref, dtype: torch.dtype) -> Ref:
    """Return ``source`` converted to ``dtype``; ``source`` itself if it has that dtype."""
    spec = builder.specs[source]
    if spec.dtype == dtype:
        return source
    return builder.emit(call, "aten.to.dtype", (source, dtype), replace(spec, dtype=dtype))


def _copy(builder: Builder, call: Call) -> Value:
    """Return the source of ``copy(destination, source)`` in the shape and dtype of the destination."""
    return expanded(builder, call, cast_to(builder, call, call.operands[1], call.spec.dtype), call.spec)


def _repeat_interleave(builder: Builder, call: Call) -> Value:
    """Drop ``output_size``: the operands determine it, and on a rank that has a part of the operands it would be wrong."""
    kwargs = {key: value for key, value in call.kwargs.items() if key != "output_size"}
    return generic(builder, replace(call, kwargs=kwargs))


def _affine_grid(builder: Builder, call: Call) -> Value:
    """Emit the places that an affine map ``theta`` [samples, d, d + 1] takes a grid to as a product with the places of the grid."""
    given = call.bound()
    theta, size, align = given["theta"], given["size"], given["align_corners"]
    dims = len(size) - 2
    sizes = [1, *size[1:]]
    identity = torch.eye(dims, dims + 1, dtype=torch.promote_types(call.spec.dtype, torch.float32))
    with torch._C.DisableTorchFunction():
        places = torch.nn.functional.affine_grid(identity[None], sizes, align).reshape(-1, dims)
    places = torch.cat((places, torch.ones(len(places), 1)), 1).to(call.spec.dtype)
    grid = builder.constant(call, places, TensorSpec.of(places))
    product = builder.make(call, "aten.matmul.default", grid, builder.make(call, "aten.transpose.int", theta, 1, 2))
    return view_to(builder, call, product, call.spec.shape)


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
    **dict.fromkeys(aten_targets("vstack.default hstack.default"), _stacked),
    **dict.fromkeys(aten_targets("t.default numpy_T.default"), _t),
    "aten.mT.default": _last_two,
    "aten.permute.default": _permute,
    "aten.copy.default": _copy,
    "aten.affine_grid_generator.default": _affine_grid,
}
"""Handlers by target as traced. A call without a handler in any module passes through :func:`generic`."""

COMPOSITES = aten_targets(
    "__and__.Tensor __or__.Tensor conv2d.default diff.default layer_norm.default log_softmax.int pad.default rms_norm.default"
    " softmax.int"
)
"""Composite operators without a handler that a graph keeps, so that they do not require a decomposition."""

"""Constant folding while a graph is built: values that no input and no parameter can change."""

from __future__ import annotations

from math import prod

import torch

from autopar.graph.aliasing import dim_groups
from autopar.graph.graph import Argument, Ref, TensorSpec
from autopar.tracing.builder import FOLD_LIMIT, LAZY_SIZE, SKIPPED_KWARGS, Builder, Call, Value, broadcast, compact
from autopar.tracing.lazy_masks import Known, Lazy

_FILLS = {
    "zeros": 0,
    "ones": 1,
    "empty": 0,
    "zeros_like": 0,
    "ones_like": 1,
    "empty_like": 0,
    "new_zeros": 0,
    "new_ones": 1,
    "new_empty": 0,
    "empty_strided": 0,
    "new_empty_strided": 0,
    "full": None,
    "full_like": None,
    "new_full": None,
}

LOGICAL = {"aten.__and__.Tensor": "aten.bitwise_and.Tensor", "aten.__or__.Tensor": "aten.bitwise_or.Tensor"}
"""Python's operators by the elementwise operators that they are."""

CONVERSIONS = {
    "aten._to_copy.default",
    "aten.to.dtype",
    "aten.to.dtype_layout",
    "aten.to.device",
    "aten.to.other",
    "aten.type_as.default",
}
_RANDOM_TAGS = (torch.Tag.nondeterministic_seeded,)
VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.flatten.using_ints")
_SAME_VALUE = {
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten.lift_fresh.default",
}


def fold(builder: Builder, call: Call) -> Value | None:
    """The constant that ``call`` gives, or None where it depends on more than constants.

    What depends on a model buffer is not replaced (a buffer of a meta model has no value, and
    both must give the same graph) but its value is remembered in ``builder.hints``.
    """
    name = call.target.split(".")[1] if call.target.startswith("aten.") else ""
    if name in _FILLS:
        return _fill(builder, call, name)
    if len(call.outputs) != 1 or call.outputs[0] is None or any(tag in call.overload.tags for tag in _RANDOM_TAGS):
        return None
    refs = _refs((*call.args, *call.kwargs.values()))
    if any(ref not in builder.values and ref not in builder.lazies for ref in refs):
        return None
    if _is_pointwise(call):
        shape = broadcast(*(tuple(_constant(builder, ref).shape) for ref in refs))
        if any(ref in builder.lazies for ref in refs) or (prod(shape) > LAZY_SIZE and len(shape) > 1):
            return _lazy(builder, call, shape)
    if any(ref in builder.lazies for ref in refs):
        return _same_lazy(builder, call)
    if _joins_copies(builder, call):
        return None
    value = evaluate(builder, call)
    return None if value is None else builder.constant(call, value)


def _joins_copies(builder: Builder, call: Call) -> bool:
    """Whether a view or a repetition makes one dim of copies and of what is copied, copies outermost.

    Windows of a batch as samples, say: as a value nobody could tell any more which rows belong to which sample.
    """
    source = call.args[0] if call.args else None
    if not isinstance(source, Ref) or source not in builder.values:
        return False
    held, before, after = builder.values[source].shape, builder.shape(source), call.spec.shape
    if call.target == "aten.repeat.default":
        return len(before) == len(after) and held[0] > 1 and after[0] > before[0]
    if call.target not in VIEWS:
        return False
    return any(
        len(long := [i for i in ins if before[i] > 1]) > 1
        and held[long[0]] == 1
        and any(held[i] > 1 for i in long)
        and next((after[j] for j in outs if after[j] > 1), 0) != before[long[0]]
        for ins, outs in dim_groups(before, after)
    )


def _lazy(builder: Builder, call: Call, shape: tuple[int, ...]) -> Value:
    """An elementwise operator on constants whose value is too large to hold."""
    args = tuple(_constant(builder, arg) if isinstance(arg, Ref) else arg for arg in call.args)
    kwargs: dict[str, object] = {key: value for key, value in call.kwargs.items() if key not in SKIPPED_KWARGS}
    return builder.lazy(call, Lazy(call, args, kwargs, shape))


def _same_lazy(builder: Builder, call: Call) -> Value | None:
    """Copies and expansions of such a value."""
    source = call.args[0]
    held = builder.lazies.get(source) if isinstance(source, Ref) else None
    same = call.target in _SAME_VALUE or call.target == "aten.expand.default"
    same = same or (
        call.target in CONVERSIONS and isinstance(source, Ref) and builder.specs[source].dtype == call.spec.dtype
    )
    if held is None or not same or len(held.shape) != len(call.spec.shape):
        return None
    return builder.lazy(call, held)


def _is_pointwise(call: Call) -> bool:
    return torch.Tag.pointwise in call.overload.tags or call.target in LOGICAL


def _constant(builder: Builder, ref: Ref) -> Known:
    held = builder.lazies.get(ref)
    return builder.values[ref] if held is None else held


def hint(builder: Builder, call: Call, ref: Value) -> None:
    """Remembers the value of ``ref`` where constants and model buffers determine it, for recognising masks."""
    if not isinstance(ref, Ref) or ref in builder.values or len(call.outputs) != 1 or call.outputs[0] is None:
        return
    refs = _refs((*call.args, *call.kwargs.values()))
    if any(tag in call.overload.tags for tag in _RANDOM_TAGS):
        return
    if refs and all(builder.known(r) is not None for r in refs):
        value = evaluate(builder, call)
        if value is not None:
            builder.hints[ref] = compact(value)


def evaluate(builder: Builder, call: Call) -> torch.Tensor | None:
    """Runs ``call`` on known values; None when that would be too large."""
    spec = call.spec
    pointwise = _is_pointwise(call)
    if call.target in _SAME_VALUE:
        return builder.known(call.args[0])
    if call.target in CONVERSIONS:
        given = builder.known(call.args[0])
        return None if given is None else given.to(spec.dtype)
    if call.target in ("aten.expand.default", "aten.expand_as.default"):
        small = builder.known(call.args[0])
        assert small is not None
        return small.reshape((1,) * (len(spec.shape) - small.dim()) + tuple(small.shape))

    def tensor(argument: Argument) -> object:
        if isinstance(argument, Ref):
            value = builder.known(argument)
            assert value is not None
            return value if pointwise else value.expand(builder.shape(argument))
        if isinstance(argument, tuple):
            return [tensor(item) for item in argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    args = [tensor(argument) for argument in call.args]
    kwargs = {key: tensor(value) for key, value in call.kwargs.items() if key not in SKIPPED_KWARGS}
    positional = len(args)
    if any(argument.name == "device" for argument in call.overload._schema.arguments[positional:]):
        kwargs["device"] = torch.device("cpu")
    if _size(args, spec, pointwise) > FOLD_LIMIT:
        return None
    views = ("aten.view.default", "aten._unsafe_view.default")  # what is kept compact may have other strides
    result = (torch.ops.aten.reshape.default if call.target in views else call.overload)(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None


def _fill(builder: Builder, call: Call, name: str) -> Value | None:
    fill = _FILLS[name]
    if fill is None:
        literal = call.bound()["fill_value"]
        if not isinstance(literal, bool | int | float):
            return None
        value = torch.full((1,) * len(call.spec.shape), literal, dtype=call.spec.dtype)
    else:
        value = torch.full((1,) * len(call.spec.shape), fill, dtype=call.spec.dtype)
    return builder.constant(call, value)


def _size(args: list[object], spec: TensorSpec, pointwise: bool) -> int:
    if not pointwise:
        return spec.numel
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return prod(broadcast(*(tuple(t.shape) for t in tensors))) if tensors else spec.numel


def _refs(arguments: tuple[Argument, ...]) -> list[Ref]:
    found: list[Ref] = []
    for argument in arguments:
        if isinstance(argument, Ref):
            found.append(argument)
        elif isinstance(argument, tuple):
            found.extend(_refs(argument))
    return found

"""Constant folding while a graph is built: values that no input can change; those too large to hold are evaluated some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from autopar.graph.aliasing import dim_groups
from autopar.graph.graph import Argument, Ref, TensorSpec
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import FOLD_LIMIT, LAZY_SIZE, SKIPPED_KWARGS, Builder, Call, Value, broadcast, compact

_ROWS_AT_ONCE = 2**22
"""Elements of a mask that are looked at together."""

_WHOLE = 8192
"""Rows up to which every row of a mask is compared; beyond, masks of comparisons of positions are sampled."""

_SAMPLES = 512


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """An elementwise operator on constants, not evaluated.

    Attributes:
        call: as traced; its tensors by name.
        args, kwargs: with compact values in the place of names.
        shape: of the value, size 1 where it is equal along a dim.
    """

    call: Call
    args: tuple[object, ...]
    kwargs: dict[str, object]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements when evaluated."""
        return prod(self.shape)

    def rows(self, low: int, high: int) -> torch.Tensor:
        """Rows ``low:high`` of the dim before the last."""
        args = tuple(_rows(arg, low, high) for arg in self.args)
        result = self.call.overload(*args, **self.kwargs)
        assert isinstance(result, torch.Tensor)
        return result

    def whole(self) -> torch.Tensor:
        """All of it."""
        return self.rows(0, self.shape[-2])


Known: TypeAlias = "torch.Tensor | Lazy"
"""A constant."""


def is_causal(value: Known, shape: tuple[int, ...]) -> bool:
    """True when an attention mask of ``shape`` with compact ``value`` is the square lower triangle.

    Bool: True where attention is allowed. Float: 0 where allowed and the lowest number elsewhere.
    """
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] == 1 or any(size != 1 for size in value.shape[:-2]):
        return False
    if tuple(value.shape[-2:]) != shape[-2:]:
        return False
    columns = torch.arange(shape[-1])
    for low, high in _spans(value, shape[-1]):
        allowed = _allowed(_rows(value, low, high))
        if allowed is None:
            return False
        if not torch.equal(allowed.reshape(high - low, -1), columns <= torch.arange(low, high)[:, None]):
            return False
    return True


def allows_all(value: Known) -> bool:
    """True when a mask hides nothing; a mask too large to hold is taken to hide something."""
    if isinstance(value, Lazy):
        return False
    allowed = _allowed(value)
    return allowed is not None and bool(allowed.all())


def _spans(value: Known, rows: int) -> Iterator[tuple[int, int]]:
    """Rows to look at: all, or a sample where a mask compares positions that count up evenly.

    Comparisons of evenly spaced positions cut the mask along straight lines: a line that no sampled
    row meets would have to start and end between two samples.
    """
    if isinstance(value, Lazy) and rows > _WHOLE and _is_even(value):
        edge = _SAMPLES // 4
        yield 0, edge
        yield from ((row, row + 1) for row in range(edge, rows - edge, (rows - 2 * edge) * 2 // _SAMPLES))
        yield rows - edge, rows
        return
    step = max(_ROWS_AT_ONCE // rows, 1)
    yield from ((low, min(low + step, rows)) for low in range(0, rows, step))


def _is_even(value: object) -> bool:
    """Whether all tensors in a lazy value count up (or down) evenly."""
    if isinstance(value, Lazy):
        return all(_is_even(arg) for arg in value.args)
    if not isinstance(value, torch.Tensor) or value.numel() < 3:
        return True
    steps = value.flatten().to(torch.float64).diff()
    return max(value.shape) == value.numel() and bool((steps == steps[0]).all())


def _rows(value: object, low: int, high: int) -> torch.Tensor:
    if isinstance(value, Lazy):
        return value.rows(low, high)
    if isinstance(value, torch.Tensor):
        return value[..., low:high, :] if value.dim() >= 2 and value.shape[-2] > 1 else value
    return value  # type: ignore[return-value]  # literals pass


def _allowed(mask: torch.Tensor) -> torch.Tensor | None:
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    allowed = mask == 0
    return allowed if bool((allowed | (mask <= torch.finfo(mask.dtype).min)).all()) else None


_FILLS = {"zeros": 0, "ones": 1, "empty": 0, "full": None}
"""Factories by the value that they give, ``new_zeros``, ``zeros_like`` and ``empty_strided`` among them; None: an argument says it."""

_ELEMENTWISE = aten_targets("where.Scalar where.ScalarOther where.ScalarSelf masked_fill.Tensor rsub.Tensor")
"""Those that torch does not mark so."""

LOGICAL = {"aten.__and__.Tensor": "aten.bitwise_and.Tensor", "aten.__or__.Tensor": "aten.bitwise_or.Tensor"}
"""Python's operators by the elementwise operators that they are."""

CONVERSIONS = aten_targets("_to_copy.default to.dtype to.dtype_layout to.device to.other type_as.default")
VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.flatten.using_ints")
_SAME_VALUE = aten_targets("clone.default contiguous.default lift_fresh_copy.default lift_fresh.default")


def fold(builder: Builder, call: Call) -> Value | None:
    """The constant that ``call`` gives, or None where it depends on more than constants.

    What depends on a model buffer is not replaced (a buffer of a meta model has no value, and
    both must give the same graph) but its value is remembered in ``builder.hints``.
    """
    name = call.target.removeprefix("aten.").partition(".")[0]
    factory = name.removeprefix("new_").removesuffix("_like").removesuffix("_strided")
    if call.overload.namespace == "aten" and factory in _FILLS:
        return _fill(builder, call, factory)
    if len(call.outputs) != 1 or call.outputs[0] is None or _is_random(call):
        return None
    refs = call.operands
    if any(ref not in builder.values and ref not in builder.lazies for ref in refs):
        return None
    has_lazy = any(ref in builder.lazies for ref in refs)
    if _is_pointwise(call):
        shape = broadcast(*(tuple(_constant(builder, ref).shape) for ref in refs))
        if has_lazy or (prod(shape) > LAZY_SIZE and len(shape) > 1):
            return _lazy(builder, call, shape)
    if has_lazy:
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
    return builder.constant(call, Lazy(call, args, kwargs, shape))


def _same_lazy(builder: Builder, call: Call) -> Value | None:
    """Copies and expansions of such a value."""
    source = call.operands[0]
    held = builder.lazies.get(source)
    same = call.target in _SAME_VALUE or call.target == "aten.expand.default"
    same = same or (call.target in CONVERSIONS and builder.specs[source].dtype == call.spec.dtype)
    if held is None or not same or len(held.shape) != len(call.spec.shape):
        return None
    return builder.constant(call, held)


def _is_random(call: Call) -> bool:
    return torch.Tag.nondeterministic_seeded in call.overload.tags


def _is_pointwise(call: Call) -> bool:
    return torch.Tag.pointwise in call.overload.tags or call.target in LOGICAL or call.target in _ELEMENTWISE


def _constant(builder: Builder, ref: Ref) -> Known:
    held = builder.lazies.get(ref)
    return builder.values[ref] if held is None else held


def hint(builder: Builder, call: Call, ref: Value) -> None:
    """Remembers the value of ``ref`` where constants and model buffers determine it, for recognising masks."""
    if not isinstance(ref, Ref) or ref in builder.values or len(call.outputs) != 1 or call.outputs[0] is None:
        return
    refs = [] if _is_random(call) else call.operands
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
    if any(argument.name == "device" for argument in call.overload._schema.arguments[len(args) :]):
        kwargs["device"] = torch.device("cpu")
    if _size(args, spec, pointwise) > FOLD_LIMIT:
        return None
    views = ("aten.view.default", "aten._unsafe_view.default")  # what is kept compact may have other strides
    result = (torch.ops.aten.reshape.default if call.target in views else call.overload)(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None


def _fill(builder: Builder, call: Call, factory: str) -> Value | None:
    fill: float | None = _FILLS[factory]
    if fill is None:
        literal = call.bound()["fill_value"]
        if not isinstance(literal, bool | int | float):
            return None
        fill = literal
    return builder.constant(call, torch.full((1,) * len(call.spec.shape), fill, dtype=call.spec.dtype))


def _size(args: list[object], spec: TensorSpec, pointwise: bool) -> int:
    if not pointwise:
        return spec.numel
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    return prod(broadcast(*(tuple(t.shape) for t in tensors))) if tensors else spec.numel

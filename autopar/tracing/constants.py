"""Constant folding during tracing.

A call whose operands are all constants is evaluated instead of being added to the graph. A result that is too large to store is
kept unevaluated as a :class:`Lazy` and is evaluated a few rows at a time. The module also recognises causal attention masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from autopar.graph.aliasing import dim_groups
from autopar.graph.graph import Argument, Ref
from autopar.ops.kernels import aten_targets
from autopar.tracing.builder import FOLD_LIMIT, LAZY_SIZE, SKIPPED_KWARGS, Builder, Call, Value, broadcast, compact

_ELEMENTS_AT_ONCE = 2**22
"""Number of elements of a mask that are examined at once."""

_MAX_ROWS_EXAMINED = 8192
"""Largest number of rows of a mask of which every row is examined. Of larger masks that compare positions, some rows are sampled."""

_SAMPLED_ROWS = 512
"""Approximate number of rows that are examined of a larger mask."""


@dataclass(frozen=True, slots=True, eq=False)
class Lazy:
    """An elementwise operator on constants that has not been evaluated.

    Attributes:
        call: The traced call.
        args: Its positional arguments, in which each tensor is a compact value or itself unevaluated.
        kwargs: Its keyword arguments, without those that a graph does not record.
        shape: The compact shape of the value.
    """

    call: Call
    args: tuple[object, ...]
    kwargs: dict[str, object]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements of the evaluated compact value."""
        return prod(self.shape)

    def rows(self, low: int, high: int) -> torch.Tensor:
        """Evaluate rows ``low:high`` of the second-to-last dim."""
        args = tuple(_rows(arg, low, high) for arg in self.args)
        result = self.call.overload(*args, **self.kwargs)
        assert isinstance(result, torch.Tensor)
        return result

    def evaluate(self) -> torch.Tensor:
        """Evaluate the complete compact value."""
        return self.rows(0, self.shape[-2])


Known: TypeAlias = "torch.Tensor | Lazy"
"""The compact value of a constant, evaluated or not."""


def is_causal(value: Known, shape: tuple[int, ...]) -> bool:
    """Return whether an attention mask allows exactly the square lower triangle.

    A bool mask is True where attention is allowed. A floating-point mask is 0 where attention is allowed, and at most the lowest
    finite number of its dtype elsewhere. The same mask must apply to all samples and heads.

    Args:
        value: The compact value of the mask.
        shape: The full shape of the mask, ``[..., queries, keys]``.
    """
    is_square = len(shape) >= 2 and shape[-1] == shape[-2] != 1
    if not is_square or prod(value.shape[:-2]) != 1 or tuple(value.shape[-2:]) != shape[-2:]:
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
    """Return whether an attention mask allows attention everywhere. A mask that has not been evaluated is assumed not to."""
    if isinstance(value, Lazy):
        return False
    allowed = _allowed(value)
    return allowed is not None and bool(allowed.all())


def _spans(value: Known, rows: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows of a square mask to examine: all rows, or a sample if the mask compares evenly spaced positions.

    Comparisons of evenly spaced positions divide the mask along straight lines. A line that crosses no sampled row would have to
    start and end between two samples.
    """
    if isinstance(value, Lazy) and rows > _MAX_ROWS_EXAMINED and _is_even(value):
        edge = _SAMPLED_ROWS // 4
        yield 0, edge
        yield from ((row, row + 1) for row in range(edge, rows - edge, (rows - 2 * edge) * 2 // _SAMPLED_ROWS))
        yield rows - edge, rows
        return
    step = max(_ELEMENTS_AT_ONCE // rows, 1)
    yield from ((low, min(low + step, rows)) for low in range(0, rows, step))


def _is_even(value: object) -> bool:
    """Return whether the elements of each tensor in an unevaluated value are evenly spaced along a single dim."""
    if isinstance(value, Lazy):
        return all(_is_even(arg) for arg in value.args)
    if not isinstance(value, torch.Tensor) or value.numel() < 3:
        return True
    steps = value.flatten().to(torch.float64).diff()
    return max(value.shape) == value.numel() and bool((steps == steps[0]).all())


def _rows(value: object, low: int, high: int) -> torch.Tensor:
    """Rows ``low:high`` of a compact value, which may have a single row for all; a literal is returned unchanged."""
    if isinstance(value, Lazy):
        return value.rows(low, high)
    if isinstance(value, torch.Tensor):
        return value[..., low:high, :] if value.dim() >= 2 and value.shape[-2] > 1 else value
    return value  # type: ignore[return-value]  # a literal


def _allowed(mask: torch.Tensor) -> torch.Tensor | None:
    """Return where an attention mask allows attention, as a bool tensor; None if it is not a mask that only allows or forbids."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        return None
    allowed = mask == 0
    return allowed if bool((allowed | (mask <= torch.finfo(mask.dtype).min)).all()) else None


_FILLS = {"zeros": 0, "ones": 1, "empty": 0, "full": "fill_value", "fill": "value", "zero": 0}
"""The value with which each factory fills its tensor, or the argument that gives it.

The names stand for all variants of a factory, such as ``new_zeros``, ``zeros_like`` and ``empty_strided``.
"""

_ELEMENTWISE = aten_targets("where.Scalar where.ScalarOther where.ScalarSelf masked_fill.Tensor rsub.Tensor")
"""Elementwise operators that torch does not tag as pointwise."""

LOGICAL = {"aten.__and__.Tensor": "aten.bitwise_and.Tensor", "aten.__or__.Tensor": "aten.bitwise_or.Tensor"}
"""The elementwise operator that each of Python's logical operators calls."""

CONVERSIONS = aten_targets("_to_copy.default to.dtype to.dtype_layout to.device to.other type_as.default")
"""Operators that change nothing but the dtype or the device."""

VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default", "aten.flatten.using_ints")
"""Operators that change only the shape, and may join dims."""

_SAME_VALUE = aten_targets("clone.default contiguous.default lift_fresh_copy.default lift_fresh.default")
"""Operators that return the value of their operand."""


def fold(builder: Builder, call: Call) -> Value | None:
    """Return the constant that ``call`` evaluates to, or None if the call must be added to the graph.

    A call that reads a model buffer is never folded: a buffer on meta has no value, and a model must give the same graph on meta
    and on other devices. :func:`hint` records the value of such a call instead.
    """
    name = call.target.removeprefix("aten.").partition(".")[0]
    factory = name.removeprefix("new_").removesuffix("_like").removesuffix("_strided")
    if call.overload.namespace == "aten" and factory in _FILLS:
        filled = _fill(builder, call, factory)
        if filled is not None:
            return filled
    if len(call.outputs) != 1 or call.outputs[0] is None or _is_random(call):
        return None
    # Of its second operand expand_as takes nothing but the shape.
    refs = call.operands[:1] if call.target == "aten.expand_as.default" else call.operands
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
    """Return whether a view or a repetition joins an outer dim of copies with a dim of the values that are copied.

    An example is a view that makes the windows of each sample new samples. Such a call is not folded, because the value of its
    result would no longer show which rows belong to which sample.
    """
    source = call.args[0] if call.args else None
    if not isinstance(source, Ref) or source not in builder.values:
        return False
    stored, before, after = builder.values[source].shape, builder.shape(source), call.spec.shape
    if call.target == "aten.repeat.default":
        return len(before) == len(after) and stored[0] > 1 and after[0] > before[0]
    if call.target not in VIEWS:
        return False
    return any(
        len(joined := [i for i in ins if before[i] > 1]) > 1
        and stored[joined[0]] == 1
        and any(stored[i] > 1 for i in joined)
        and next((after[j] for j in outs if after[j] > 1), 0) != before[joined[0]]
        for ins, outs in dim_groups(before, after)
    )


def _lazy(builder: Builder, call: Call, shape: tuple[int, ...]) -> Value:
    """Register the result of an elementwise operator on constants without evaluating it."""
    args = tuple(_constant(builder, arg) if isinstance(arg, Ref) else arg for arg in call.args)
    kwargs: dict[str, object] = {key: value for key, value in call.kwargs.items() if key not in SKIPPED_KWARGS}
    return builder.constant(call, Lazy(call, args, kwargs, shape))


def _same_lazy(builder: Builder, call: Call) -> Value | None:
    """Return a constant for a call that copies or expands an unevaluated constant; None for any other call."""
    source = call.operands[0]
    lazy = builder.lazies.get(source)
    is_same = call.target in _SAME_VALUE or call.target in ("aten.expand.default", "aten.expand_as.default")
    is_same = is_same or (call.target in CONVERSIONS and builder.specs[source].dtype == call.spec.dtype)
    if lazy is None or not is_same or len(lazy.shape) != len(call.spec.shape):
        return None
    return builder.constant(call, lazy)


def _is_random(call: Call) -> bool:
    return torch.Tag.nondeterministic_seeded in call.overload.tags


def _is_pointwise(call: Call) -> bool:
    return torch.Tag.pointwise in call.overload.tags or call.target in LOGICAL or call.target in _ELEMENTWISE


def _constant(builder: Builder, ref: Ref) -> Known:
    lazy = builder.lazies.get(ref)
    return builder.values[ref] if lazy is None else lazy


def hint(builder: Builder, call: Call, ref: Value) -> None:
    """Record the value of ``ref``, the result of ``call``, if constants and model buffers determine it.

    The values serve to recognise attention masks.
    """
    if not isinstance(ref, Ref) or ref in builder.values or len(call.outputs) != 1 or call.outputs[0] is None:
        return
    refs = [] if _is_random(call) else call.operands
    if refs and all(builder.known(r) is not None for r in refs):
        value = evaluate(builder, call)
        if value is not None:
            builder.hints[ref] = compact(value)


def evaluate(builder: Builder, call: Call) -> torch.Tensor | None:
    """Evaluate ``call``, whose operands all have known values.

    Returns:
        A value in which a dim may have size 1 if all values along it are equal; None if the evaluation would take more than
        :data:`FOLD_LIMIT` elements or does not return a single tensor.
    """
    spec = call.spec
    is_pointwise = _is_pointwise(call)
    if call.target in _SAME_VALUE:
        return builder.known(call.args[0])
    if call.target in CONVERSIONS:
        source = builder.known(call.args[0])
        return None if source is None else source.to(spec.dtype)
    if call.target in ("aten.expand.default", "aten.expand_as.default"):
        source = builder.known(call.args[0])
        assert source is not None
        return source.reshape((1,) * (len(spec.shape) - source.dim()) + tuple(source.shape))

    def concrete(argument: Argument) -> object:
        if isinstance(argument, Ref):
            value = builder.known(argument)
            assert value is not None
            return value if is_pointwise else value.expand(builder.shape(argument))
        if isinstance(argument, tuple):
            return [concrete(item) for item in argument]
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    args = [concrete(argument) for argument in call.args]
    kwargs = {key: concrete(value) for key, value in call.kwargs.items() if key not in SKIPPED_KWARGS}
    if any(argument.name == "device" for argument in call.overload._schema.arguments[len(args) :]):
        kwargs["device"] = torch.device("cpu")
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    is_compact = is_pointwise and bool(tensors)  # elementwise operators run on compact values
    numel = prod(broadcast(*(tuple(value.shape) for value in tensors))) if is_compact else spec.numel
    if numel > FOLD_LIMIT:
        return None
    # The strides of a compact value may differ from those of the traced tensor, so that a view of it may be impossible.
    views = ("aten.view.default", "aten._unsafe_view.default")
    result = (torch.ops.aten.reshape.default if call.target in views else call.overload)(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None


def _fill(builder: Builder, call: Call, factory: str) -> Value | None:
    """Return the constant of a factory that fills a tensor with one value; None if the value is not a literal."""
    fill: Any = _FILLS[factory]
    fill = call.bound()[fill] if isinstance(fill, str) else fill
    if not isinstance(fill, bool | int | float):
        return None
    return builder.constant(call, torch.full((1,) * len(call.spec.shape), fill, dtype=call.spec.dtype))

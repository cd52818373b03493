"""Constants too large to hold, and what attention masks are: evaluated some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import torch

from autopar.tracing.builder import Call

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

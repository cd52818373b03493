"""How far tensors may differ: by a part of the largest element, as sums in another order do on another machine."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ROUNDING = {
    torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3,
}  # fmt: skip
"""What sums in another order are off by at most, a few times over, as a part of the largest element."""

NOISE = 1e-3
"""Of tensors that belong together one that is nothing but rounding has no measure of its own: it counts as large as this part of
the largest element of all."""


def error_of(found: Tensor, wanted: Tensor, floor: float = 0.0) -> float:
    """The largest difference over the largest element that is wanted (at least ``floor``); infinite without a number."""
    found, wanted = (value.detach().to(torch.promote_types(value.dtype, torch.float64)) for value in (found, wanted))
    if torch.equal(found, wanted) or not wanted.numel():
        return 0.0
    error, largest = float((found - wanted).abs().max()), max(float(wanted.abs().max()), floor)
    return error / largest if error <= largest else float("inf")


def assert_close(found: Any, wanted: Any, relative: float | None = None, place: str = "", floor: float = 0.0) -> None:
    """Tensors, numbers, and sequences and mappings of them (``found`` may have more), that are equal but for rounding.
    Whole numbers and truth values must be equal. ``relative``: part of the largest element of each tensor that its elements
    may be off by, by its dtype if not given; ``floor``: as large counts the largest element of each at least, see :data:`NOISE`.
    """
    if isinstance(wanted, Mapping):
        assert found.keys() >= wanted.keys(), place
        for name, value in wanted.items():
            assert_close(found[name], value, relative, f"{place} {name}", max(floor, NOISE * _largest(wanted.values())))
        return
    if isinstance(wanted, Sequence):
        assert len(found) == len(wanted), place
        for number, value in enumerate(wanted):
            assert_close(found[number], value, relative, f"{place} {number}", max(floor, NOISE * _largest(wanted)))
        return
    if not isinstance(wanted, Tensor):
        found, wanted = (torch.tensor(value, dtype=torch.float64) for value in (found, wanted))
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), place
    limit = ROUNDING.get(wanted.dtype, 0.0) if relative is None else relative
    error = error_of(found, wanted, floor)
    assert error <= limit, f"{place}: off by {error:.1e} of the largest element, at most {limit:.0e} is rounding"


def _largest(tensors: Any) -> float:
    some = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    return max((float(t.detach().abs().max()) for t in some), default=0.0)

"""Numbers that tell whether tensors hold the same bits, made on their devices; the same on all kinds of device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WIDTH = 1024
"""Elements are laid in rows of so many: nothing as long as the tensor is made besides it."""

_FACTORS = (-7046029254386353131, -4658895280553007687)
"""Those of splitmix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"), as signed numbers."""

_ROWS = 512
"""So many fit a cache of a CPU."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksums(tensors: Sequence[Tensor]) -> Tensor:
    """A number of each tensor's bits and their places: [tensors] of int64 on their device, without waiting for it.

    Sums of whole numbers over rows and over columns, so that their order does not matter, each times an odd number of its own: one
    change of any element is seen, and so are elements and rows that have changed places.

    Args:
        tensors: on one device, at least one.

    >>> one, other = checksums([torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])]).tolist()
    >>> one == other, one == int(checksums([torch.tensor([1.0, 2.0])]))
    (False, True)
    """
    pieces, sizes = list[Tensor](), list[int]()
    for bits in map(_bits, tensors):
        whole = bits.numel() // _WIDTH * _WIDTH
        own = [bits[whole:].to(torch.int64), *_sums(bits[:whole].view(-1, _WIDTH))]
        pieces += own
        sizes.append(sum(piece.numel() for piece in own))
    base = _weights(max(sizes), tensors[0].device)
    weighted = torch.cat(pieces) * torch.cat([base[:size] for size in sizes])
    return torch.stack([part.sum() for part in torch.split(weighted, sizes)])


def _bits(value: Tensor) -> Tensor:
    """The elements as whole numbers, flat."""
    value = value.detach()
    flat = (torch.view_as_real(value.resolve_conj()) if value.is_complex() else value.resolve_neg()).contiguous()
    flat = flat.view(-1)
    return flat.to(torch.int8) if flat.dtype == torch.bool else flat.view(_INTEGERS[flat.element_size()])


def _sums(grid: Tensor) -> list[Tensor]:
    """Over columns, and over rows; no bit is lost in sums of 64."""
    if not grid.numel():
        return []
    if grid.device.type != "cpu":
        return [grid.sum(0, dtype=torch.int64), grid.sum(1, dtype=torch.int64)]
    columns, rows = torch.zeros(_WIDTH, dtype=torch.int64), list[Tensor]()
    for part in grid.split(_ROWS):  # type: ignore[no-untyped-call]
        wide = part.to(torch.int64)  # sums into another dtype go one by one there, and take three times as long
        columns += wide.sum(0)
        rows.append(wide.sum(1))
    return [columns, *rows]


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern."""
    number = torch.arange(1, count + 1, device=device) * _FACTORS[0]
    return (((number >> 30) ^ number) * _FACTORS[1]) | 1

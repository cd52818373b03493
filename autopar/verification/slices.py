"""Comparison of the parts of a tensor on ranks with the whole tensor: slices as their types say, with pending sums added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from autopar.graph.graph import Graph, Layout
from autopar.ops.sequence import zigzag
from autopar.plan.mesh import DATA_AXES, Mesh
from autopar.rules.apply import BATCH
from autopar.rules.local_calls import SPREAD
from autopar.rules.strategy import RING

TOLERANCE = 1e-8
"""Largest difference over largest element, in float64, up to which tensors agree."""

NOISE = 1e-12
"""Rounding that may remain where terms cancel, relative to the largest element of the operands."""

_MASK = 1e30
"""Elements of at least this size stand for minus infinity in masks, and do not count for the size of a tensor."""

NUM_SAMPLES = 3
"""Elements that a mismatch shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One wrong element: its index in a rank's part, its value, and the expected value."""

    index: tuple[int, ...]
    found: float
    expected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """The difference of a tensor from that of one device.

    Attributes:
        ranks, micro_batches: those that hold wrong parts; of a wrong sum, all that hold its summands. Results of a whole step have no
            micro-batches.
        error: largest difference over the largest element.
        local_shape: shape of a rank's part.
        shape: shape of the whole tensor.
        samples: the elements that differ most, in the part with the largest error.
    """

    ranks: tuple[int, ...]
    micro_batches: tuple[int, ...]
    error: float
    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """How a plan distributes tensors.

    Attributes:
        mesh: the plan's mesh.
        num_micro_batches: micro-batches of a data rank in a step.
        zigzag_axes: axes on which split dims are in zig-zag order, except those of parameters.
    """

    mesh: Mesh
    num_micro_batches: int
    zigzag_axes: frozenset[str]

    @staticmethod
    def of(mesh: Mesh, num_micro_batches: int, local: Graph) -> Split:
        """Return the distribution of one rank's graph; ring attention has zig-zag order."""
        rings = (dict(op.kwargs)["axis"] for op in local.ops if op.target == RING)
        return Split(mesh, num_micro_batches, frozenset(axis for axis in rings if isinstance(axis, str)))

    def _parts(self, axis: str) -> int:
        """Return the number of parts on an axis."""
        return self.mesh.data * self.num_micro_batches if axis == BATCH else int(getattr(self.mesh, axis))

    def coordinate(self, rank: int, micro_batch: int) -> dict[str, int]:
        """Return the position on each axis; data rank and micro-batch together are the position on ``batch``."""
        position = {axis: at for axis, at in self.mesh.coordinate(rank).items() if axis not in DATA_AXES}
        position[BATCH] = self.mesh.data_index(rank) * self.num_micro_batches + micro_batch
        position[SPREAD] = self.mesh.data_index(rank) % self.mesh.ep_data
        return position

    def part(self, whole: Tensor, layout: Layout, at: Mapping[str, int]) -> Tensor:
        """Return the part of ``whole`` at a position; pending sums are ignored."""
        for axis, kind in layout:
            if not kind.is_split:
                continue
            parts = self._parts(axis)
            if axis in self.zigzag_axes:
                whole = zigzag(whole, kind.dim, parts)
            size = whole.shape[kind.dim] // parts
            whole = whole.narrow(kind.dim, at[axis] * size, size)
        return whole

    def compare(
        self,
        pieces: Mapping[tuple[int, int], Tensor | None],
        whole: Tensor,
        layout: Layout,
        *,
        scale: float = 0.0,
        counts: Tensor | None = None,
        tolerance: float = TOLERANCE,
    ) -> Mismatch | None:
        """Return the difference between parts and the whole tensor, or None.

        Args:
            pieces: parts by rank and micro-batch; None stands for zeros (a gradient that never came).
            whole: the tensor on one device.
            layout: the types of the parts.
            scale: largest element of the operands that the tensor was computed from.
            counts: a tensor of the whole shape; elements where it is zero are ignored. All elements count when None.
            tolerance: largest difference over largest element up to which they agree.
        """
        pending = {axis for axis, kind in layout if kind.kind == "P"}
        if not any(axis == SPREAD and kind.is_split for axis, kind in layout):
            pending.add(SPREAD)  # this axis renames data ranks, and does not split this tensor
        groups: dict[tuple[tuple[str, int], ...], list[tuple[int, int]]] = {}
        for rank, micro_batch in pieces:
            at = self.coordinate(rank, micro_batch)
            groups.setdefault(tuple((a, i) for a, i in at.items() if a not in pending), []).append((rank, micro_batch))
        error, shape, samples = 0.0, tuple[int, ...](), tuple[Sample, ...]()
        ranks, numbers = set[int](), set[int]()
        for key, members in groups.items():
            position = dict(key)
            expected = self.part(whole, layout, position)
            weight = None if counts is None else self.part(counts, layout, position)
            part = _sum((pieces[member] for member in members), expected)
            part_error, furthest = _compare(part, expected, weight, size=_size(whole), scale=scale, tolerance=tolerance)
            if part_error > 0.0:
                ranks |= {rank for rank, _ in members}
                numbers |= {micro_batch for _, micro_batch in members}
            if part_error > error:
                error, shape, samples = part_error, tuple(part.shape), furthest
        if not ranks:
            return None
        return Mismatch(
            ranks=tuple(sorted(ranks)),
            micro_batches=tuple(sorted(numbers)),
            error=error,
            local_shape=shape,
            shape=tuple(whole.shape),
            samples=samples,
        )


def gradient_layout(layout: Layout) -> Layout:
    """Return the types of the gradient of a tensor."""
    return tuple((axis, kind.gradient) for axis, kind in layout)


def text(layout: Layout) -> str:
    """Return a layout as text, such as ``batch S(0), tp P``."""
    return ", ".join(f"{axis} {kind}" for axis, kind in layout) or "the same on every rank"


def largest(values: Iterable[Tensor | None]) -> float:
    """Return the largest absolute element of some tensors; masks and NaN do not count."""
    return max((_size(value) for value in values if value is not None), default=0.0)


def _sum(pieces: Iterable[Tensor | None], like: Tensor) -> Tensor:
    """Return the sum of the pieces that are there, or zeros."""
    present = [piece for piece in pieces if piece is not None]
    return reduce(torch.add, present) if present else torch.zeros_like(like)


def _compare(
    found: Tensor, expected: Tensor, weight: Tensor | None, *, size: float, scale: float, tolerance: float
) -> tuple[float, tuple[Sample, ...]]:
    """Return the error of one group of ranks, zero if it is within the tolerance, and the elements that differ most.

    Args:
        found: the part of the ranks, with summands added up.
        expected: the same part of one device's tensor.
        weight: elements where it is zero are ignored.
        size: largest element of the whole tensor, to which errors are relative.
        scale: largest element of the operands.
        tolerance: largest error up to which they agree.
    """
    if found.shape != expected.shape:
        return float("inf"), ()
    if found.numel() == 0:
        return 0.0, ()
    a, b = _wide(found), _wide(expected)
    difference = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
    difference = torch.where(difference.isnan(), float("inf"), difference)
    if weight is not None:
        difference = torch.where(weight != 0, difference, 0.0)
    largest_difference = float(difference.max())
    if largest_difference <= max(tolerance * size, NOISE * scale):
        return 0.0, ()
    samples = []
    for flat in difference.flatten().topk(min(NUM_SAMPLES, difference.numel())).indices.tolist():
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
        if float(difference[index]) > 0.0:
            samples.append(Sample(index=index, found=float(a[index].real), expected=float(b[index].real)))
    measure = max(size, NOISE / tolerance * scale)  # zero if all expected elements are zero and there are no operands
    return largest_difference / measure if measure else float("inf"), tuple(samples)


def _wide(value: Tensor) -> Tensor:
    """Return a tensor in the widest dtype of its kind."""
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _size(value: Tensor) -> float:
    """Return the largest absolute element that is neither a mask nor NaN."""
    if value.numel() == 0:
        return 0.0
    size = _wide(value.detach()).abs()
    return float(torch.where(size < _MASK, size, 0.0).max())

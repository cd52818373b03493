"""Compares what ranks hold with the whole tensor: its slices by their types, summands added up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from autopar.graph.graph import Graph, Layout
from autopar.ops.sequence import zigzag
from autopar.plan.mesh import DATA_AXES, Mesh
from autopar.rules.apply import BATCH
from autopar.rules.local_graphs import AXIS as SPREAD
from autopar.rules.strategy import RING

TOLERANCE = 1e-8
"""Largest difference over largest element, in float64."""

NOISE = 1e-12
"""Of the largest element of what a tensor is made from: what may be left of it where it should cancel."""

_MASK = 1e30
"""Elements from here on stand for minus infinity: no measure of the others."""

NUM_SAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One element: its index in a rank's part, what is there and what should be."""

    index: tuple[int, ...]
    found: float
    expected: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A tensor that is not that of one device.

    Attributes:
        ranks, micro_batches: which hold wrong parts (or wrong summands: then all that are added); no micro-batches for
            what a step leaves.
        error: largest difference over the largest element.
        local_shape, shape: of a rank's part and of the whole.
        samples: the elements furthest off, of the first such rank.
    """

    ranks: tuple[int, ...]
    micro_batches: tuple[int, ...]
    error: float
    local_shape: tuple[int, ...]
    shape: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Split:
    """How a plan spreads tensors: ``zigzag_axes`` hold split dims in zig-zag order, those of parameters aside."""

    mesh: Mesh
    num_micro_batches: int
    zigzag_axes: frozenset[str]

    @staticmethod
    def of(mesh: Mesh, num_micro_batches: int, local: Graph) -> Split:
        """That of one rank's graph."""
        rings = (dict(op.kwargs)["axis"] for op in local.ops if op.target == RING)
        return Split(mesh, num_micro_batches, frozenset(axis for axis in rings if isinstance(axis, str)))

    @property
    def in_own_order(self) -> Split:
        """That of parameters."""
        return replace(self, zigzag_axes=frozenset())

    def _parts(self, axis: str) -> int:
        return self.mesh.data * self.num_micro_batches if axis == BATCH else int(getattr(self.mesh, axis))

    def coordinate(self, rank: int, micro_batch: int) -> dict[str, int]:
        """Position on each axis, micro-batches and data ranks together as ``batch``."""
        found = {axis: at for axis, at in self.mesh.coordinate(rank).items() if axis not in DATA_AXES}
        found[BATCH] = self.mesh.data_index(rank) * self.num_micro_batches + micro_batch
        found[SPREAD] = self.mesh.data_index(rank) % self.mesh.ep_data
        return found

    def part(self, whole: Tensor, layout: Layout, at: Mapping[str, int]) -> Tensor:
        """The part of ``whole`` at a position, pending sums aside."""
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
        """What differs; None when nothing does.

        Args:
            pieces: by rank and micro-batch; None stands for zeros (a gradient that never came).
            whole: on one device.
            scale: largest element of what it is made from.
            counts: where not zero, elements count; everywhere when None.
            tolerance: largest difference over largest element.
        """
        pending = {axis for axis, kind in layout if kind.kind == "P"}
        if not any(axis == SPREAD and kind.is_split for axis, kind in layout):
            pending.add(SPREAD)  # another name of data ranks, which holds no parts of this tensor
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
            found = _sum((pieces[member] for member in members), expected)
            off, furthest = _compare(found, expected, weight, size=_size(whole), scale=scale, tolerance=tolerance)
            if off > 0.0:
                ranks |= {rank for rank, _ in members}
                numbers |= {micro_batch for _, micro_batch in members}
            if off > error:
                error, shape, samples = off, tuple(found.shape), furthest
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
    """Types of the gradient of a tensor."""
    return tuple((axis, kind.gradient) for axis, kind in layout)


def text(layout: Layout) -> str:
    """``batch S(0), tp P``."""
    return ", ".join(f"{axis} {kind}" for axis, kind in layout) or "the same on every rank"


def largest(values: Iterable[Tensor | None]) -> float:
    """The largest element that is a number and no mask."""
    return max((_size(value) for value in values if value is not None), default=0.0)


def _sum(pieces: Iterable[Tensor | None], like: Tensor) -> Tensor:
    given = [piece for piece in pieces if piece is not None]
    return reduce(torch.add, given) if given else torch.zeros_like(like)


def _compare(
    found: Tensor, expected: Tensor, weight: Tensor | None, *, size: float, scale: float, tolerance: float
) -> tuple[float, tuple[Sample, ...]]:
    """The error of one group of ranks, zero where it is within the bounds, and the elements furthest off.

    Args:
        size: largest element of the whole tensor, which errors are relative to.
        scale: of what it is made from.
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
    off = float(difference.max())
    if off <= max(tolerance * size, NOISE * scale):
        return 0.0, ()
    samples = []
    for flat in difference.flatten().topk(min(NUM_SAMPLES, difference.numel())).indices.tolist():
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
        if float(difference[index]) > 0.0:
            samples.append(Sample(index=index, found=float(a[index].real), expected=float(b[index].real)))
    measure = max(size, NOISE / tolerance * scale)  # zero where all elements are to be zero, and nothing made them
    return off / measure if measure else float("inf"), tuple(samples)


def _wide(value: Tensor) -> Tensor:
    return value.to(torch.complex128 if value.is_complex() else torch.float64)


def _size(value: Tensor) -> float:
    if value.numel() == 0:
        return 0.0
    size = _wide(value.detach()).abs()
    return float(torch.where(size < _MASK, size, 0.0).max())

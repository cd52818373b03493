"""The mesh: how many ranks each axis has, and which ranks form a group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from autopar.errors import UsageError

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Outermost first: ranks of the last axis are neighbours. ``ep`` borrows ranks and has no place here."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Ranks that differ on these alone have other samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of the axes; the world size is the product of all but ``ep``.

    ``ep`` says over how many ranks experts are split: those of ``tp``, or 1 where they are whole.

    >>> mesh = Mesh(pp=2, tp=2)
    >>> mesh.world_size, mesh.coordinate(3)["tp"], mesh.group(3, ("tp",))
    (4, 1, (2, 3))
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*MESH_AXES, "ep"):
            if getattr(self, axis) < 1:
                raise UsageError(f"the degree of {axis} is at least 1", value=getattr(self, axis))

    @property
    def degrees(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in MESH_AXES)

    @property
    def world_size(self) -> int:
        return prod(self.degrees)

    @property
    def data(self) -> int:
        """Ranks that see different samples: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    def size(self, axes: tuple[str, ...]) -> int:
        return prod(getattr(self, axis) for axis in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Position of a rank on each axis."""
        found = {}
        for axis, degree in zip(reversed(MESH_AXES), reversed(self.degrees), strict=True):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis in MESH_AXES}

    def rank(self, coordinate: dict[str, int]) -> int:
        """The rank at a position."""
        rank = 0
        for axis, degree in zip(MESH_AXES, self.degrees, strict=True):
            rank = rank * degree + coordinate[axis]
        return rank

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` on ``axes`` alone, ascending, itself included."""
        here = self.coordinate(rank)
        ranges = [range(getattr(self, axis)) if axis in axes else (here[axis],) for axis in MESH_AXES]
        return tuple(self.rank(dict(zip(MESH_AXES, position, strict=True))) for position in product(*ranges))

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """All groups over ``axes``: a partition of the world."""
        return tuple(dict.fromkeys(self.group(rank, axes) for rank in range(self.world_size)))

    def data_index(self, rank: int) -> int:
        """Which part of the global batch a rank takes, of ``data``."""
        here = self.coordinate(rank)
        return here["dp_replicate"] * self.dp_shard + here["dp_shard"]

    def __str__(self) -> str:
        axes = [f"{axis}={getattr(self, axis)}" for axis in MESH_AXES if getattr(self, axis) > 1]
        return (" x ".join(axes) or "one rank") + (f" (ep={self.ep} on tp)" if self.ep > 1 else "")

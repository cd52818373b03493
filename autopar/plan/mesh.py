"""The mesh, with the number of ranks on each axis and the groups of ranks; and types, which say how a tensor is laid out on one axis.

| type | forward          | gradient         | typical tensor                                    |
|------|------------------|------------------|---------------------------------------------------|
| I    | same on all ranks| I, the same      | a replicated parameter at rest, the residual stream|
| R    | same on all ranks| P, a pending sum | an input of work that is split over the axis      |
| S(d) | dim d is split   | S(d)             | batch, sequence, heads, hidden, vocabulary        |
| P    | a pending sum    | R, the same      | output of a contraction over a split dim          |

The types are those of ``spmd-types`` (BSD-3); see docs/adr/0001-types.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Literal

import numpy as np

from autopar.errors import UsageError, whole

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes, outermost first: ranks of the last axis are neighbours. ``ep`` is not among them, as it uses the ranks of other axes."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks have different samples."""

EXPERT_MESH_AXES = ("pp", "ep_outer", "ep_data", "cp", "tp")
"""Axes of the same ranks in the same order, with data ranks divided differently: experts are split over the inner ``ep_data``."""

EXPERT_AXIS = "ep"
"""``ep_data`` and ``tp`` together: the ranks over which experts are split if both axes split them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The degrees of the axes. The world size is the product of all degrees except ``ep`` and ``ep_data``.

    Experts are split over ``ep`` ranks of other axes: over ``ep_data`` neighbouring data ranks, and over the ranks of ``tp`` too if
    ``ep`` is ``ep_data * tp``. They are not split if ``ep`` is 1.

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
    ep_data: int = 1

    def __post_init__(self) -> None:
        for axis in (*MESH_AXES, "ep", "ep_data"):
            degree = getattr(self, axis)
            if type(degree) is not int or degree < 1:  # searches make many meshes
                object.__setattr__(self, axis, whole(f"degree of {axis}", degree, least=1))

    @property
    def degrees(self) -> tuple[int, ...]:
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def world_size(self) -> int:
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def data(self) -> int:
        """The number of parts of the batch: dp_replicate * dp_shard."""
        return self.dp_replicate * self.dp_shard

    @property
    def ep_outer(self) -> int:
        """The number of data ranks that have the same experts."""
        return self.data // self.ep_data

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        """Degrees of :data:`EXPERT_MESH_AXES`."""
        return tuple(getattr(self, axis) for axis in EXPERT_MESH_AXES)

    def cut(self, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
        """Return the names and degrees of the division of the world that contains ``axes``, and the names of ``axes`` in it."""
        if axes == (EXPERT_AXIS,):
            axes = ("ep_data", "tp")
        if any(axis in ("ep_outer", "ep_data") for axis in axes):
            return EXPERT_MESH_AXES, self.expert_degrees, axes
        return MESH_AXES, self.degrees, axes

    def size(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks in a group over ``axes``."""
        return prod(getattr(self, axis) for axis in self.cut(axes)[2])

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the position of a rank on each axis."""
        return dict(zip(MESH_AXES, map(int, np.unravel_index(rank, self.degrees)), strict=True))

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only on ``axes``, with ``rank`` itself, in ascending order."""
        return next(group for group in self.groups(axes) if rank in group)

    def groups(self, axes: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        """Return all groups over ``axes``, which partition the world, in the order of their first ranks."""
        names, degrees, axes = self.cut(axes)
        inner = [i for i, name in enumerate(names) if name in axes]
        ranks = np.moveaxis(np.arange(self.world_size).reshape(degrees), inner, range(-len(inner), 0))
        return tuple(map(tuple, ranks.reshape(-1, self.size(axes)).tolist()))

    def data_index(self, rank: int) -> int:
        """Return the index of a rank's part of the global batch, from 0 to ``data - 1``."""
        position = self.coordinate(rank)
        return position["dp_replicate"] * self.dp_shard + position["dp_shard"]

    def __str__(self) -> str:
        axes = [f"{axis}={getattr(self, axis)}" for axis in MESH_AXES if getattr(self, axis) > 1]
        return (" x ".join(axes) or "one rank") + (f" (ep={self.ep} on {self.ep_ranks})" if self.ep > 1 else "")

    @property
    def ep_ranks(self) -> str:
        """The axes over which experts are split, for people: ``tp``, ``data`` or ``data x tp``."""
        if self.ep == self.ep_data:
            return "data" if self.ep > 1 else ""
        return f"data={self.ep_data} x tp={self.tp}" if self.ep_data > 1 else "tp"


Kind = Literal["I", "R", "S", "P"]


@dataclass(frozen=True, slots=True, order=True)
class Type:
    """The type of one tensor on one mesh axis; ``dim`` is set only for S, and never negative.

    There is only one object for each type, as comparisons and look-ups are frequent and have to be fast.

    >>> import pickle
    >>> pickle.loads(pickle.dumps(Type("S", 2))) is S(2)
    True
    """

    kind: Kind
    dim: int = -1

    def __new__(cls, kind: Kind, dim: int = -1) -> Type:
        return _one(kind, dim)

    def __post_init__(self) -> None:
        if (self.kind == "S") != (self.dim >= 0):
            raise ValueError(f"S needs a dim >= 0 and {self.kind} none: {self.kind}, {self.dim}")

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __reduce__(self) -> tuple[type[Type], tuple[Kind, int]]:
        return Type, (self.kind, self.dim)

    def to_table(self) -> str:
        """Return the text of the type."""
        return str(self)

    @staticmethod
    def from_text(text: str) -> Type:
        """Return the type that is written ``I``, ``R``, ``P`` or ``S(d)``.

        >>> Type.from_text("S(1)")
        S(1)

        Raises:
            UsageError: for any other text.
        """
        if text in ("I", "R", "P"):
            return {"I": I, "R": R, "P": P}[text]
        if match := re.fullmatch(r"S\((\d+)\)", text):
            return S(int(match[1]))
        raise UsageError(f"Unknown type '{text}'", fix="Write I, R, P or S(d), for example S(0)")

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_split(self) -> bool:
        """Whether a dim of the tensor is split over the axis."""
        return self.kind == "S"

    @property
    def gradient(self) -> Type:
        """The type of this tensor's gradient."""
        return {"I": I, "R": P, "P": R}.get(self.kind, self)


@cache
def _one(kind: Kind, dim: int) -> Type:
    """Return the only object of a type; the constructor sets its fields."""
    return object.__new__(Type)


I = Type("I")  # noqa: E741  the field's name for the type
R = Type("R")
P = Type("P")


@cache
def S(dim: int) -> Type:  # noqa: N802  the field's name for the type
    """Return the type of a tensor that is split along ``dim``."""
    return Type("S", dim)


def type_at_rest(text: str, *, where: str) -> tuple[str, Type]:
    """Return the axis and the type of a parameter at rest that ``text`` says, such as ``tp:S(0)``.

    Raises:
        UsageError: the axis is missing or not ``tp``, or the type is neither I nor S(d).
    """
    axis, colon, kind = text.rpartition(":")
    if colon and axis != "tp":
        raise UsageError.unknown("axis", axis, ("tp",), where=where)
    if not colon or not re.fullmatch(r"I|S\(\d+\)", kind):
        fix = "Write tp:I or tp:S(d), for example tp:S(0)"
        raise UsageError(f"A parameter cannot be stored as {kind}", where=where, fix=fix)
    return axis, Type.from_text(kind)


# --- changes of type
# The table follows ``spmd-types`` and the operators f and g of Megatron; see docs/adr/0001-types.md. For a tensor without gradient nothing
# moves backward, and I and R are the same.


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How one type becomes another on one axis.

    Attributes:
        target: the operator in emitted code, ``autopar.NAME``; empty if nothing is emitted.
        forward: the collective that it runs forward, or None.
        backward: the collective that it runs backward, or None.
        arguments: gives the arguments of the operator after the tensor and the axis, from the type before and the type after.
    """

    target: str
    forward: str | None
    backward: str | None
    arguments: Callable[[Type, Type], tuple[str | int, ...]]


UNCHANGED = Conversion(target="", forward=None, backward=None, arguments=lambda _, __: ())
"""The conversion between equal types, and between I and R without gradient."""


def _change(
    name: str, forward: str | None, backward: str | None, arguments: Callable[[Type, Type], tuple[str | int, ...]]
) -> Conversion:
    return Conversion(target=f"autopar.{name}", forward=forward, backward=backward, arguments=arguments)


_CHANGES = {
    ("I", "R"): _change("invariant_to_replicate", None, "all_reduce", lambda _, __: ()),
    ("I", "S"): _change("shard", None, "all_gather", lambda before, after: (after.dim, before.kind)),
    ("I", "P"): _change("keep_on_first", None, None, lambda before, _: (before.kind,)),
    ("R", "S"): _change("shard", None, None, lambda before, after: (after.dim, before.kind)),
    ("R", "P"): _change("keep_on_first", None, None, lambda before, _: (before.kind,)),
    ("S", "R"): _change("all_gather", "all_gather", "reduce_scatter", lambda before, after: (before.dim, after.kind)),
    ("S", "I"): _change("all_gather", "all_gather", None, lambda before, after: (before.dim, after.kind)),
    ("S", "S"): _change("all_to_all", "all_to_all", "all_to_all", lambda before, after: (after.dim, before.dim)),
    ("P", "I"): _change("all_reduce", "all_reduce", None, lambda _, after: (after.kind,)),
    ("P", "R"): _change("all_reduce", "all_reduce", "all_reduce", lambda _, after: (after.kind,)),
    ("P", "S"): _change("reduce_scatter", "reduce_scatter", "all_gather", lambda _, after: (after.dim,)),
}
"""The changes by the kinds before and after. Their operators are functions of :mod:`autopar.ops.collectives`."""


def conversion(source: Type, target: Type, *, requires_grad: bool) -> Conversion | None:
    """Return the change from ``source`` to ``target``; None if there is none (R to I with a gradient, S to P).

    Equal types give a conversion that does nothing.

    >>> conversion(S(1), R, requires_grad=True).backward
    'reduce_scatter'
    >>> conversion(R, I, requires_grad=True) is None
    True
    """
    if source == target or (not requires_grad and {source.kind, target.kind} <= {"I", "R"}):
        return UNCHANGED
    change = _CHANGES.get((source.kind, target.kind))
    return change if change is None or requires_grad else replace(change, backward=None)

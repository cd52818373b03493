"""Layouts: one type for each mesh axis of each tensor.

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
from dataclasses import dataclass
from functools import cache
from typing import Literal

from autopar.errors import UsageError

Kind = Literal["I", "R", "S", "P"]


@dataclass(frozen=True, slots=True, order=True)
class Type:
    """What one tensor holds on one mesh axis; ``dim`` is set for S alone and never negative.

    There is one object of each type: equal ones are the same, which is quick to see, and types are looked up again and again.

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

    def __str__(self) -> str:
        return f"S({self.dim})" if self.kind == "S" else self.kind

    def __repr__(self) -> str:
        return str(self)

    @property
    def is_split(self) -> bool:
        return self.kind == "S"

    @property
    def gradient(self) -> Type:
        """The type of this tensor's gradient."""
        return {"I": I, "R": P, "P": R}.get(self.kind, self)


@cache
def _one(kind: Kind, dim: int) -> Type:
    """The object of a type; its fields are set by the constructor."""
    return object.__new__(Type)


I = Type("I")  # noqa: E741  the field's name for the type
R = Type("R")
P = Type("P")


@cache
def S(dim: int) -> Type:  # noqa: N802  the field's name for the type
    """The type of a tensor split along ``dim``."""
    return Type("S", dim)


def parse_type(text: str) -> Type:
    """Reads ``I``, ``R``, ``P`` or ``S(d)``.

    >>> parse_type("S(1)")
    S(1)

    Raises:
        UsageError: for any other text.
    """
    if text in ("I", "R", "P"):
        return {"I": I, "R": R, "P": P}[text]
    if match := re.fullmatch(r"S\((\d+)\)", text):
        return S(int(match[1]))
    raise UsageError(f"Unknown type '{text}'", fix="Write I, R, P or S(d), for example S(0)")

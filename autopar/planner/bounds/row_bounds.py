"""Bounds of rows of both kinds: of pipelines whose ranks are alike, and of others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.bounds import PRECISION, bounds
from autopar.planner.bounds.flow import whole_s
from autopar.planner.bounds.mixed_bounds import mixed_bounds
from autopar.planner.bounds.mixed_rows import MixedRow

MANY = 64
"""Rows from which on they are bounded in groups of like numbers of pipeline ranks, between these:"""

FEW_RANKS = (2, 8, 24)


def row_bounds(
    rows: Sequence[Row | MixedRow],
    at_most_s: float = float("inf"),
    *,
    precision: float = PRECISION,
    settles: bool = False,
    mixed: Callable[[list[MixedRow]], NDArray[np.float64]] | None = None,
) -> list[float]:
    """Of rows of both kinds, in their order.

    Args:
        settles: see :func:`autopar.planner.bounds.bounds.bounds`.
        mixed: the bounds of those whose ranks differ; None: those of :func:`mixed_bounds`.
    """
    plain = iter(plain_bounds([row for row in rows if isinstance(row, Row)], at_most_s, precision, settles))
    some = [row for row in rows if isinstance(row, MixedRow)]
    others = iter(mixed_bounds(some, at_most_s) if mixed is None else mixed(some))
    return [float(next(plain if isinstance(row, Row) else others)) for row in rows]


def plain_bounds(rows: Sequence[Row], at_most_s: float, precision: float, settles: bool = False) -> list[float]:
    """Of rows of one kind: many at once, those with few pipeline ranks apart from those with many."""
    if len(rows) < MANY:
        known = [whole_s(row) for row in rows]
        left = [row for row, bound_s in zip(rows, known, strict=True) if bound_s is None]
        others = iter(bounds(left, at_most_s, precision=precision, settles=settles))
        return [float(next(others)) if bound_s is None else bound_s for bound_s in known]
    found = [0.0] * len(rows)
    for least, most in pairwise((0, *FEW_RANKS, math.inf)):
        places = [i for i, row in enumerate(rows) if least < row.pp <= most]
        some = bounds([rows[i] for i in places], at_most_s, precision=precision, settles=settles)
        for i, bound in zip(places, some, strict=True):
            found[i] = float(bound)
    return found

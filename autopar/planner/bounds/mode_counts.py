"""In how many ways the blocks of a stage share the modes of recompute, as far as they are worth weighing, and the hull below what they take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def useful_counts(most: int, more_s: Array, held_bytes: Array, passing_bytes: Array) -> NDArray[np.int64]:
    """How many of up to ``most`` blocks are in each mode [choices, modes], as far as no other choice for as many is as good.

    Args:
        more_s, held_bytes, passing_bytes: of each mode; a stage has in passing at least the least of the modes that it has.
    """
    found = np.indices((most + 1,) * len(held_bytes)).reshape(len(held_bytes), -1).T
    found = found[found.sum(axis=1) <= most]
    blocks, time_s, kept = found.sum(axis=1), found @ more_s, (found @ held_bytes).astype(np.float64)
    last = np.where(found > 0, passing_bytes, np.inf).min(axis=1)
    # of more blocks always less than of fewer ones, so that the least so far is that of as many blocks
    kept -= blocks * (float(kept.max()) + 1.0)
    worth = np.zeros(len(found), dtype=bool)
    for size in np.unique(last):
        own = np.flatnonzero(last <= size)
        own = own[np.lexsort((last[own], kept[own], time_s[own], blocks[own]))]
        before = np.concatenate([[np.inf], np.minimum.accumulate(kept[own])[:-1]])
        worth[own] |= (last[own] == size) & (kept[own] < before)
    counts: NDArray[np.int64] = found[worth]
    return counts


def lower_corners(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of points (x, y) from left to right the corners of their lower convex hull."""
    found: list[tuple[int, float]] = []
    for x, y in points:
        while len(found) > 1:
            (x0, y0), (x1, y1) = found[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            found.pop()
        found.append((x, y))
    return found

"""Values once each, in order: what ``numpy.unique`` does, which imports masked arrays for it when it is first called.

That import takes longer than all calls of a search together.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_T = TypeVar("_T", bound=np.generic)


def distinct(values: NDArray[_T]) -> NDArray[_T]:
    """The values that differ, sorted.

    >>> distinct(np.array([3, 1, 3, 2])).tolist()
    [1, 2, 3]
    """
    ordered = np.sort(values, axis=None)
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_new]


def distinct_rows(table: NDArray[_T]) -> tuple[NDArray[_T], NDArray[np.intp]]:
    """The rows that differ, sorted by their first column, then the second and so on, and for each row of the table its place among them.

    >>> rows, which = distinct_rows(np.array([[1, 2], [0, 3], [1, 2]]))
    >>> rows.tolist(), which.tolist()
    ([[0, 3], [1, 2]], [1, 0, 1])
    """
    order = np.lexsort(table.T[::-1])
    ordered = table[order]
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    which = np.empty(len(ordered), dtype=np.intp)
    which[order] = np.cumsum(is_new) - 1
    return ordered[is_new], which

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


def distinct_rows(table: NDArray[np.int64], most: int) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """The rows of numbers from 0 to ``most`` that differ, sorted by their first column, then the second and so on.

    And for each row of the table its place among them. Where that fits, a row is one number.

    >>> rows, which = distinct_rows(np.array([[1, 2], [0, 3], [1, 2]]), 3)
    >>> rows.tolist(), which.tolist()
    ([[0, 3], [1, 2]], [1, 0, 1])
    """
    columns = table.shape[1]
    is_short = (most + 1) ** columns < 1 << 62
    numbers = table @ ((most + 1) ** np.arange(columns - 1, -1, -1, dtype=np.int64)) if is_short else None
    order = np.lexsort(table.T[::-1]) if numbers is None else np.argsort(numbers, kind="stable")
    ordered = table[order] if numbers is None else numbers[order][:, None]
    is_new = np.ones(len(ordered), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    which = np.empty(len(ordered), dtype=np.intp)
    which[order] = np.cumsum(is_new) - 1
    return table[order[is_new]], which

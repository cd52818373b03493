"""How the dims of a view belong together."""

from __future__ import annotations


def dim_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Smallest runs of dims of both shapes with equal products; trailing ones are left out.

    >>> dim_groups((4, 6, 5), (24, 5))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 2))]
    """
    groups = []
    i = j = 0
    while i < len(before) and j < len(after):
        start_i, start_j = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups.append((range(start_i, i), range(start_j, j)))
    return groups

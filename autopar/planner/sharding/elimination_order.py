"""In which order the variables of an energy are eliminated: the order decides how large the tables on the way become.

Finding the best order is NP-hard; greedy orders by the size of the new table, or by the fill edges that eliminating a variable
adds to the graph of variables with a common table, come close (Kjaerulff, 1990).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from math import inf, log2, prod

MANY_ENTRIES = 1 << 19
"""Entries of a table (4 MiB of float64) from which on a better order is searched for."""
ORDERS = 32
"""Orders that are tried then."""


def elimination_order(
    sizes: Sequence[int], scopes: Iterable[Sequence[int]], keep: Iterable[int] = ()
) -> tuple[tuple[int, ...], int]:
    """An order of all variables but those of ``keep``, and the entries of its largest table.

    Args:
        sizes: number of states of each variable.
        scopes: the variables of each table.

    Greedy: smallest new table first, fewest fill edges on ties. Where that is wide, the best of several that take the
    least fill first, each edge weighted by the bits of its two variables (after Kjaerulff, 1990), all but the first of
    them with noise: which of many good looking steps leads into a wide table shows only later.
    """
    scopes, keep = tuple(scopes), tuple(keep)
    best = _greedy(sizes, scopes, keep)
    if MANY_ENTRIES < best[1] < MANY_ENTRIES**2:  # past that no order will do
        noise = random.Random(0)
        for i in range(ORDERS):
            found = _greedy(sizes, scopes, keep, noise if i else None, by_fill=True, bound=best[1])
            best = min(best, found, key=lambda order: order[1])
    return best


def _greedy(
    sizes: Sequence[int],
    scopes: Sequence[Sequence[int]],
    keep: tuple[int, ...],
    noise: random.Random | None = None,
    *,
    by_fill: bool = False,
    bound: float = inf,
) -> tuple[tuple[int, ...], int]:
    """One greedy order and the entries of its largest table, see :func:`elimination_order`; broken off at ``bound``."""
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)
    for v, around in enumerate(neighbours):
        around.discard(v)
    left = set(range(len(sizes))) - set(keep)

    bits = [log2(max(size, 1)) for size in sizes]

    def score(v: int) -> tuple[float, float, int]:
        around = neighbours[v]
        fill = [(a, b) for a in around for b in around if a < b and b not in neighbours[a]] if len(around) > 1 else []
        if not by_fill:
            return entries(v), len(fill), v
        weighted = sum(bits[a] * bits[b] for a, b in fill)
        return weighted * (1.0 if noise is None else noise.uniform(1.0, 1.6)), entries(v), v

    def entries(v: int) -> int:
        return prod([sizes[u] for u in neighbours[v]]) * sizes[v]

    scores = {v: score(v) for v in left}
    order, largest = list[int](), 1
    while left and largest < bound:
        best = min(left, key=scores.__getitem__)
        left.remove(best)
        order.append(best)
        largest = max(largest, entries(best))
        around = neighbours[best]
        for u in around:
            neighbours[u] |= around
            neighbours[u] -= {u, best}
        for u in around.union(*(neighbours[w] for w in around)) & left:
            scores[u] = score(u)
    return tuple(order), largest

"""What a typing costs in parts that are weighted later, tables of such costs, and in which order their variables are eliminated.

Every cost has four parts, so that one problem serves a whole sweep of memory prices: seconds a micro-batch, seconds a step (gradient sums),
bytes of saved activations, bytes of state.

The order decides how large the tables on the way become. Finding the best order is NP-hard; a greedy order by the fill edges that eliminating a
variable adds to the graph of variables with a common table comes close (Kjaerulff, 1990).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
States = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Factor:
    """A cost for each combination of the variables of ``scope``; ``table`` has one dim for each, in that order."""

    scope: tuple[int, ...]
    table: Table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Energy:
    """``sizes``: number of states of each variable. The energy of an assignment is the sum of its table entries."""

    sizes: tuple[int, ...]
    factors: tuple[Factor, ...]

    def value(self, assignment: Sequence[int]) -> float:
        """The energy of one assignment (a state for each variable)."""
        return float(sum(f.table[tuple(assignment[v] for v in f.scope)] for f in self.factors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """An assignment of least energy."""

    assignment: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What one unit of each part of a cost is worth, in seconds of a micro-batch.

    Attributes:
        per_step_s: a second of once a step: one over the number of micro-batches.
        saved_byte: a byte that is saved for backward.
        state_byte: a byte of parameters, gradients and optimizer states.
    """

    per_step_s: float = 0.0
    saved_byte: float = 0.0
    state_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Parts of a cost; see :class:`Weights`. ``time_s``: of a micro-batch, forward and backward."""

    time_s: float = 0.0
    step_s: float = 0.0
    saved_bytes: float = 0.0
    state_bytes: float = 0.0


FREE = Cost()


@dataclass(frozen=True, slots=True)
class PartedFactor:
    """A factor of an energy whose table is weighted later.

    Attributes:
        scope: its variables.
        parts: tables of seconds, seconds a step, saved bytes and state bytes; later ones may be missing.
    """

    scope: tuple[int, ...]
    parts: tuple[Table, ...]

    def weighted(self, weights: Sequence[Weights]) -> Table:
        """The table under each of these, side by side; once where they are all the same."""
        table = self.parts[0][None]
        if len(self.parts) == 1:
            return table
        scales = [(1.0, w.per_step_s, w.saved_byte, w.state_byte) for w in weights]
        for i, part in enumerate(self.parts[1:], 1):
            factors = np.array([scale[i] for scale in scales])
            if np.count_nonzero(factors) and np.count_nonzero(part):
                table = table + factors.reshape(-1, *(1,) * part.ndim) * part
        return table


def sums_of(terms: Sequence[NDArray[np.intp]], costs: Sequence[Cost | None]) -> tuple[Table, ...]:
    """The parts of a table whose entries are sums of a few costs; empty where all is free.

    Args:
        terms: for the first, second, ... term of each entry its place among the costs; 0: none.
        costs: the first one free; None forbids.
    """
    if not terms:
        return ()
    columns = columns_of(costs)
    sums = [column[terms[0]] for column in columns]
    for term in terms[1:]:
        sums = [part + column[term] for part, column in zip(sums, columns, strict=True)]
    return tuple(sums)


def columns_of(costs: Sequence[Cost | None]) -> list[NDArray[np.float64]]:
    """The parts of costs in a row, None where it forbids; those that all costs lack at the end are left out."""
    if not any(c is not None and (c.step_s or c.saved_bytes or c.state_bytes) for c in costs):
        times = np.array([np.inf if c is None else c.time_s for c in costs], dtype=np.float64)
        return [times] if np.count_nonzero(times) else []
    table = np.array(
        [(np.inf, 0, 0, 0) if c is None else (c.time_s, c.step_s, c.saved_bytes, c.state_bytes) for c in costs],
        dtype=np.float64,
    ).reshape(-1, 4)
    used = table.any(axis=0)
    return [table[:, i] for i in range(1 + int(np.flatnonzero(used)[-1]))]


def elimination_order(
    sizes: Sequence[int], scopes: Iterable[Sequence[int]], keep: Iterable[int] = ()
) -> tuple[tuple[int, ...], int]:
    """An order of all variables but those of ``keep``, and the entries of its largest table.

    Greedy: least fill first, each edge weighted by the bits of its two variables (after Kjaerulff, 1990), the smallest table on ties.

    Args:
        sizes: number of states of each variable.
        scopes: the variables of each table.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)
    for v, around in enumerate(neighbours):
        around.discard(v)
    left = set(range(len(sizes))) - set(keep)
    bits = [log2(max(size, 1)) for size in sizes]

    def score(v: int) -> tuple[float, int, int]:
        around = neighbours[v]
        fill = sum([bits[a] * bits[b] for a in around for b in around if a < b and b not in neighbours[a]])
        return fill, entries(v), v

    def entries(v: int) -> int:
        return prod([sizes[u] for u in neighbours[v]]) * sizes[v]

    scores = {v: score(v) for v in left}
    order, largest = list[int](), 1
    while left:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EliminationStep:
    """One variable eliminated, or what stays in the end.

    Attributes:
        variable: -1 in the end.
        scope: of the table that is left.
        shape: of the sum, that of the variable in front.
        parts: the tables that are added up, those of earlier steps counted on; how their dims are ordered, None: as they are;
            and their shape, None: as they are.
    """

    variable: int
    scope: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None], ...]


def elimination_steps(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], order: Sequence[int], keep: tuple[int, ...]
) -> tuple[EliminationStep, ...]:
    """The variables of ``order`` eliminated one by one."""
    alive = dict(enumerate(scopes))
    buckets: list[dict[int, tuple[int, ...]]] = [{} for _ in sizes]
    for key, scope in alive.items():
        for v in scope:
            buckets[v][key] = scope
    steps = []
    for v in order:
        bucket = dict(buckets[v])
        left = tuple(sorted({u for scope in bucket.values() for u in scope} - {v}))
        steps.append(_step(v, left, (v, *left), bucket, sizes))
        for key, scope in bucket.items():
            del alive[key]
            for u in scope:
                del buckets[u][key]
        key = len(scopes) + len(steps) - 1
        alive[key] = left
        for u in left:
            buckets[u][key] = left
    return (*steps, _step(-1, keep, keep, alive, sizes))


def _step(
    variable: int,
    scope: tuple[int, ...],
    over: tuple[int, ...],
    parts: dict[int, tuple[int, ...]],
    sizes: Sequence[int],
) -> EliminationStep:
    """``over``: the variables of the sum, in order; ``parts``: scopes of the tables that it adds up."""
    position = {u: i for i, u in enumerate(over)}
    full = tuple([sizes[u] for u in over])
    ordered_parts = []
    for key, part in parts.items():
        places = [position[u] for u in part]
        ordered = sorted(places)
        axes = None if ordered == places else (0, *[1 + places.index(i) for i in ordered])
        shape = None
        if len(part) < len(over):
            around = [1] * len(over)
            for i in places:
                around[i] = full[i]
            shape = tuple(around)
        ordered_parts.append((key, axes, shape))
    return EliminationStep(variable=variable, scope=scope, shape=full, parts=tuple(ordered_parts))

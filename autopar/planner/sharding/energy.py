"""Energies of typings: cost tables in four parts, and the order in which variable elimination removes the variables.

An energy is a sum of tables over small sets of discrete variables. Each cost has four parts that are weighted only when an energy is
solved, so that one problem serves a whole sweep of memory prices: seconds of a micro-batch, seconds of a step (gradient sums), bytes of
saved activations, and bytes of state.

The elimination order decides how large the intermediate tables become. Finding the best order is NP-hard. The greedy min-fill order, which
minimises the edges that eliminating a variable adds to the graph of variables that share a table, comes close (Kjaerulff, 1990).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2, prod

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]
States = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The price of one unit of each part of a :class:`Cost`, in seconds of a micro-batch.

    Attributes:
        per_step_s: price of a second spent once a step; it is one over the number of micro-batches.
        saved_byte: price of a byte that is saved for backward.
        state_byte: price of a byte of parameters, gradients and optimizer states.
    """

    per_step_s: float = 0.0
    saved_byte: float = 0.0
    state_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """A cost in four parts, which :class:`Weights` turn into one number.

    Attributes:
        time_s: seconds of the forward and backward of a micro-batch.
        step_s: seconds spent once a step.
        saved_bytes: bytes that are saved for backward.
        state_bytes: bytes of parameters, gradients and optimizer states.
    """

    time_s: float = 0.0
    step_s: float = 0.0
    saved_bytes: float = 0.0
    state_bytes: float = 0.0


FREE = Cost()


@dataclass(frozen=True, slots=True)
class UnweightedFactor:
    """A factor whose table is kept as the parts of its costs, to be weighted later.

    Attributes:
        scope: the variables.
        parts: tables of the four parts of :class:`Cost`, in the order of its fields; parts at the end may be missing where they are zero.
    """

    scope: tuple[int, ...]
    parts: tuple[Table, ...]

    def weighted(self, weights: Sequence[Weights]) -> Table:
        """Return the tables under the given weights [weights, *states].

        The first dim has length 1 where the table does not depend on the weights.
        """
        table = self.parts[0][None]
        if len(self.parts) == 1:
            return table
        scales = [(1.0, w.per_step_s, w.saved_byte, w.state_byte) for w in weights]
        for i, part in enumerate(self.parts[1:], 1):
            factors = np.array([scale[i] for scale in scales])
            if np.count_nonzero(factors) and np.count_nonzero(part):
                table = table + factors.reshape(-1, *(1,) * part.ndim) * part
        return table


def summed_parts(terms: Sequence[NDArray[np.intp]], costs: Sequence[Cost | None]) -> tuple[Table, ...]:
    """Return the parts of a table whose entries are sums of a few costs; return an empty tuple if every entry is free.

    Args:
        terms: the n-th array holds, for each entry of the table, the index in ``costs`` of its n-th term. Index 0 stands for no term.
        costs: the costs; the first one must be free, and None forbids an entry.
    """
    if not terms:
        return ()
    columns = cost_columns(costs)
    sums = [column[terms[0]] for column in columns]
    for term in terms[1:]:
        sums = [part + column[term] for part, column in zip(sums, columns, strict=True)]
    return tuple(sums)


def cost_columns(costs: Sequence[Cost | None]) -> list[NDArray[np.float64]]:
    """Return the parts of a list of costs as arrays; None becomes an infinite time.

    Parts that are zero for all costs are left out at the end of the list.
    """
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
    """Return an elimination order of all variables outside ``keep``, and the number of entries of the largest table on the way.

    The order is greedy by weighted min-fill (after Kjaerulff, 1990): an edge weighs the product of the bits of its two variables.
    Ties go to the smallest table.

    Args:
        sizes: the number of states of each variable.
        scopes: the variables of each table.
        keep: the variables that are not eliminated.
    """
    neighbours: list[set[int]] = [set() for _ in sizes]
    for scope in scopes:
        for v in scope:
            neighbours[v].update(scope)
    for v, adjacent in enumerate(neighbours):
        adjacent.discard(v)
    remaining = set(range(len(sizes))) - set(keep)
    bits = [log2(max(size, 1)) for size in sizes]

    def score(v: int) -> tuple[float, int, int]:
        adjacent = neighbours[v]
        fill = sum([bits[a] * bits[b] for a in adjacent for b in adjacent if a < b and b not in neighbours[a]])
        return fill, entries(v), v

    def entries(v: int) -> int:
        return prod([sizes[u] for u in neighbours[v]]) * sizes[v]

    scores = {v: score(v) for v in remaining}
    order, largest = list[int](), 1
    while remaining:
        best = min(remaining, key=scores.__getitem__)
        remaining.remove(best)
        order.append(best)
        largest = max(largest, entries(best))
        adjacent = neighbours[best]
        for u in adjacent:
            neighbours[u] |= adjacent
            neighbours[u] -= {u, best}
        for u in adjacent.union(*(neighbours[w] for w in adjacent)) & remaining:
            scores[u] = score(u)
    return tuple(order), largest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EliminationStep:
    """The elimination of one variable, or the final sum over the kept variables.

    Attributes:
        variable: the eliminated variable; -1 for the final sum.
        scope: the variables of the resulting table.
        shape: the shape of the sum of the tables, with the eliminated variable as first dim.
        parts: the tables that are added up, each as (index, permutation, shape). The index counts the factors, then the tables of earlier
            steps. The permutation orders the dims of the table, whose first dim is that of the energies; None keeps their order. The shape
            has dims of 1 for missing variables; None if there are none.
    """

    variable: int
    scope: tuple[int, ...]
    shape: tuple[int, ...]
    parts: tuple[tuple[int, tuple[int, ...] | None, tuple[int, ...] | None], ...]


def elimination_steps(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], order: Sequence[int], keep: tuple[int, ...]
) -> tuple[EliminationStep, ...]:
    """Return the steps that eliminate the variables of ``order`` one by one, and the final sum over ``keep``."""
    live_scopes = dict(enumerate(scopes))
    buckets: list[dict[int, tuple[int, ...]]] = [{} for _ in sizes]
    for key, scope in live_scopes.items():
        for v in scope:
            buckets[v][key] = scope
    steps = []
    for v in order:
        bucket = dict(buckets[v])
        neighbours = tuple(sorted({u for scope in bucket.values() for u in scope} - {v}))
        steps.append(_step(v, neighbours, (v, *neighbours), bucket, sizes))
        for key, scope in bucket.items():
            del live_scopes[key]
            for u in scope:
                del buckets[u][key]
        key = len(scopes) + len(steps) - 1
        live_scopes[key] = neighbours
        for u in neighbours:
            buckets[u][key] = neighbours
    return (*steps, _step(-1, keep, keep, live_scopes, sizes))


def _step(
    variable: int,
    scope: tuple[int, ...],
    sum_scope: tuple[int, ...],
    parts: dict[int, tuple[int, ...]],
    sizes: Sequence[int],
) -> EliminationStep:
    """Return the step that adds up the tables of ``parts``.

    Args:
        variable: the variable that the step eliminates, or -1.
        scope: the variables of the resulting table.
        sum_scope: the variables of the sum, in the order of its dims.
        parts: the scopes of the tables that are added up, by index of the table.
    """
    dim_of = {u: i for i, u in enumerate(sum_scope)}
    sum_shape = tuple([sizes[u] for u in sum_scope])
    ordered_parts = []
    for key, part_scope in parts.items():
        dims = [dim_of[u] for u in part_scope]
        ordered = sorted(dims)
        axes = None if ordered == dims else (0, *[1 + dims.index(i) for i in ordered])
        shape = None
        if len(part_scope) < len(sum_scope):
            broadcast_shape = [1] * len(sum_scope)
            for i in dims:
                broadcast_shape[i] = sum_shape[i]
            shape = tuple(broadcast_shape)
        ordered_parts.append((key, axes, shape))
    return EliminationStep(variable=variable, scope=scope, shape=sum_shape, parts=tuple(ordered_parts))

"""Exact minimum of a discrete energy by variable elimination, with a MILP where the width grows too large.

An energy is a sum of tables over small sets of discrete variables (dynamic programming on a graph, after
Bertele and Brioschi, 1972; "bucket elimination", Dechter 1999). ``inf`` forbids a combination.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from math import inf, log2, prod

import numpy as np
from numpy.typing import NDArray

from autopar.planner.sharding.steps import Step, eliminate, steps_of

Table = NDArray[np.float64]

MAX_TABLE_ENTRIES = 1 << 23
"""Largest table that elimination may make (64 MiB of float64); past it the problem goes to the MILP."""

MANY_ENTRIES = 1 << 19
"""A table that is worth the search for a better order."""
ORDERS = 32

MAX_KNOWN, MAX_KNOWN_ENTRIES = 128, 1 << 16
"""Energies of which it is kept, whatever they cost, how they are solved; and their entries at most."""

MAX_SIDE_BY_SIDE = 1 << 20
"""Entries of the tables of several energies that are eliminated at once."""
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

    @classmethod
    def pairwise(cls, unary: Sequence[Table], pairs: dict[tuple[int, int], Table]) -> Energy:
        """An energy from one table a variable and one a pair."""
        factors = [Factor(scope=(i,), table=np.asarray(t, dtype=np.float64)) for i, t in enumerate(unary)]
        factors += [Factor(scope=pair, table=np.asarray(t, dtype=np.float64)) for pair, t in pairs.items()]
        return cls(sizes=tuple(len(t) for t in unary), factors=tuple(factors))

    def value(self, assignment: Sequence[int]) -> float:
        """The energy of one assignment (a state for each variable)."""
        return float(sum(f.table[tuple(assignment[v] for v in f.scope)] for f in self.factors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Minimum:
    """An assignment of least energy."""

    assignment: tuple[int, ...]
    value: float


Decoder = Callable[[Sequence[tuple[int, tuple[int, ...]]]], list[tuple[int, ...]]]
"""From energies and entries of their marginals to the assignments that reach these."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marginal:
    """The least energy for every combination of the kept variables.

    Attributes:
        table: one dim for each kept variable; ``inf`` where nothing is allowed.
        which: of the energies that were solved side by side this one is.
        decoder: of all of these; see :func:`decode_all`.
    """

    table: Table
    which: int
    decoder: Decoder

    def decode(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """The assignment of all variables that reaches the entry of ``table`` at ``index``."""
        return self.decoder([(self.which, index)])[0]


def decode_all(asked: Sequence[tuple[Marginal, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """As :meth:`Marginal.decode` for each of these: those that were solved side by side are decoded so too."""
    places: dict[int, list[int]] = {}
    for i, (marginal, _) in enumerate(asked):
        places.setdefault(id(marginal.decoder), []).append(i)
    found: list[tuple[int, ...]] = [()] * len(asked)
    for own in places.values():
        decoder = asked[own[0]][0].decoder
        for i, assignment in zip(own, decoder([(asked[i][0].which, asked[i][1]) for i in own]), strict=True):
            found[i] = assignment
    return found


def _no_assignment(asked: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Of an energy that forbids everything."""
    return [() for _ in asked]


def _one_by_one(
    decode: Callable[[tuple[int, ...]], tuple[int, ...]], asked: Sequence[tuple[int, tuple[int, ...]]]
) -> NDArray[np.intp]:
    """As the decoder of :func:`autopar.planner.sharding.steps.eliminate`, of a single energy."""
    return np.array([decode(index) for _, index in asked], dtype=np.intp).T


def minimise(energy: Energy, *, max_entries: int = MAX_TABLE_ENTRIES) -> Minimum | None:
    """The exact minimum; None when every assignment is forbidden.

    Args:
        max_entries: bound on a table of the elimination; past it ``scipy.optimize.milp`` (HiGHS) solves the same.
    """
    marginal = marginalise(energy, (), max_entries=max_entries)
    value = float(marginal.table)
    return None if np.isinf(value) else Minimum(assignment=marginal.decode(()), value=value)


def marginalise(energy: Energy, keep: tuple[int, ...], *, max_entries: int = MAX_TABLE_ENTRIES) -> Marginal:
    """The minimum over all variables but ``keep``, for every combination of those."""
    return prepare(energy, keep, max_entries=max_entries).solve([f.table for f in energy.factors])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What solving an energy needs to know apart from its finite costs: worked out once for a whole sweep of prices.

    Attributes:
        sizes, scopes: of the energy.
        states: for each variable the states that some assignment may take.
        order: of elimination; None where the tables would grow too large.
        keep: variables that stay.
        largest: entries of the largest table on the way.
        steps: of the elimination, where there is an order.
    """

    sizes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    states: tuple[NDArray[np.intp], ...]
    order: tuple[int, ...] | None
    keep: tuple[int, ...]
    largest: int
    steps: tuple[Step, ...] = ()

    def solve(self, tables: Sequence[Table]) -> Marginal:
        """The marginal of the energy with these tables, which forbid what those it was prepared for forbid."""
        return self.solve_all([table[None] for table in tables], 1)[0]

    def solve_all(self, tables: Sequence[Table], count: int) -> list[Marginal]:
        """The marginals of several energies at once, each the same as alone.

        Args:
            tables: with one more dim in front, as long as there are energies, or 1 where a table is that of all.
            count: of the energies.
        """
        shape = [self.sizes[k] for k in self.keep]
        if any(len(s) == 0 for s in self.states):
            return [Marginal(table=np.full(shape, np.inf), which=i, decoder=_no_assignment) for i in range(count)]
        kept = [self.restrict(scope, table, 1) for scope, table in zip(self.scopes, tables, strict=True)]
        some = max(1, MAX_SIDE_BY_SIDE // self.largest) if self.order is not None else 1
        found: list[Marginal] = []
        for start in range(0, count, some):
            part = [table if len(table) == 1 else table[start : start + some] for table in kept]
            found += self._solved(part, min(some, count - start))
        return found

    def _solved(self, tables: Sequence[Table], count: int) -> list[Marginal]:
        sizes = tuple(len(s) for s in self.states)
        if self.order is not None:
            small, decode_small = eliminate(self.steps, tables, self.keep, len(sizes))
        else:
            factors = tuple(Factor(scope=s, table=t[0]) for s, t in zip(self.scopes, tables, strict=True))
            one, decode_one = _by_milp(Energy(sizes=sizes, factors=factors), self.keep)
            small, decode_small = one[None], partial(_one_by_one, decode_one)
        full = np.full([count, *(self.sizes[k] for k in self.keep)], np.inf)
        full[np.ix_(np.arange(count), *(self.states[k] for k in self.keep))] = small
        back = [{int(state): i for i, state in enumerate(self.states[k])} for k in self.keep]

        def decode(asked: Sequence[tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
            inside = [(w, tuple([lookup[i] for lookup, i in zip(back, index, strict=True)])) for w, index in asked]
            chosen = [states[own] for states, own in zip(self.states, decode_small(inside), strict=True)]
            return [
                tuple(assignment) for assignment in np.array(chosen, dtype=np.intp).reshape(-1, len(asked)).T.tolist()
            ]

        return [Marginal(table=full[i], which=i, decoder=decode) for i in range(count)]

    def restrict(self, scope: tuple[int, ...], table: Table, before: int = 0) -> Table:
        """A table over the states that are left; one that is restricted already stays as it is.

        Args:
            before: dims of the table in front of those of ``scope``.
        """
        for axis, v in enumerate(scope, before):
            if len(self.states[v]) != table.shape[axis]:
                table = table.take(self.states[v], axis=axis)
        return table


def prepare(
    energy: Energy,
    keep: tuple[int, ...],
    *,
    max_entries: int = MAX_TABLE_ENTRIES,
    known: dict[object, Prepared] | None = None,
) -> Prepared:
    """Drops states that cannot be, and finds an order.

    Args:
        known: what was prepared for others; it depends on what an energy forbids, not on its finite costs.
    """
    if known is None:
        return _prepare(energy, keep, max_entries)
    allowed = b"".join([np.isfinite(f.table).tobytes() for f in energy.factors])
    key = keep, max_entries, energy.sizes, tuple([f.scope for f in energy.factors]), allowed
    if key not in known:
        known[key] = _known(*key) if len(allowed) <= MAX_KNOWN_ENTRIES else _prepare(energy, keep, max_entries)
    return known[key]


@lru_cache(maxsize=MAX_KNOWN)
def _known(
    keep: tuple[int, ...], max_entries: int, sizes: tuple[int, ...], scopes: tuple[tuple[int, ...], ...], allowed: bytes
) -> Prepared:
    """As :func:`_prepare`, of an energy that costs nothing where it is allowed: other models have equal blocks too."""
    factors, start = [], 0
    for scope in scopes:
        shape = tuple([sizes[v] for v in scope])
        free = np.frombuffer(allowed, dtype=np.bool_, count=prod(shape), offset=start).reshape(shape)
        factors.append(Factor(scope=scope, table=np.where(free, 0.0, np.inf)))
        start += free.size
    return _prepare(Energy(sizes=sizes, factors=tuple(factors)), keep, max_entries)


def _prepare(energy: Energy, keep: tuple[int, ...], max_entries: int) -> Prepared:
    small, states = _prune(energy)
    order, largest = elimination_order(small, keep)
    scopes, is_small = tuple(f.scope for f in energy.factors), largest <= max_entries
    return Prepared(
        sizes=energy.sizes,
        scopes=scopes,
        states=tuple(states),
        order=order if is_small else None,
        keep=keep,
        largest=largest,
        steps=steps_of(small.sizes, scopes, order, keep) if is_small else (),
    )


def elimination_order(energy: Energy, keep: Iterable[int] = ()) -> tuple[tuple[int, ...], int]:
    """An order and the entries of its largest table.

    Greedy: smallest new table first, fewest fill edges on ties. Where that is wide, the best of several that take the
    least fill first, each edge weighted by the bits of its two variables (after Kjaerulff, 1990), all but the first of
    them with noise: which of many good looking steps leads into a wide table shows only later.
    """
    keep = tuple(keep)
    best = _greedy(energy, keep)
    if MANY_ENTRIES < best[1] < MANY_ENTRIES**2:  # past that no order will do
        noise = random.Random(0)
        for i in range(ORDERS):
            found = _greedy(energy, keep, noise if i else None, by_fill=True, bound=best[1])
            best = min(best, found, key=lambda order: order[1])
    return best


def _greedy(
    energy: Energy,
    keep: tuple[int, ...],
    noise: random.Random | None = None,
    *,
    by_fill: bool = False,
    bound: float = inf,
) -> tuple[tuple[int, ...], int]:
    """One greedy order and the entries of its largest table, see :func:`elimination_order`; broken off at ``bound``."""
    neighbours: list[set[int]] = [set() for _ in energy.sizes]
    for factor in energy.factors:
        for v in factor.scope:
            neighbours[v].update(factor.scope)
    for v, around in enumerate(neighbours):
        around.discard(v)
    left = set(range(len(energy.sizes))) - set(keep)

    bits = [log2(max(size, 1)) for size in energy.sizes]

    def score(v: int) -> tuple[float, float, int]:
        around = neighbours[v]
        fill = [(a, b) for a in around for b in around if a < b and b not in neighbours[a]] if len(around) > 1 else []
        if not by_fill:
            return entries(v), len(fill), v
        weighted = sum(bits[a] * bits[b] for a, b in fill)
        return weighted * (1.0 if noise is None else noise.uniform(1.0, 1.6)), entries(v), v

    def entries(v: int) -> int:
        return prod([energy.sizes[u] for u in neighbours[v]]) * energy.sizes[v]

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


def _by_milp(energy: Energy, keep: tuple[int, ...]) -> tuple[Table, Callable[[tuple[int, ...]], tuple[int, ...]]]:
    """The same table by one integer program for each combination of the kept variables."""
    from autopar.planner.sharding.milp import minimise_by_milp  # imports scipy: only where it is needed

    table = np.full([energy.sizes[k] for k in keep], np.inf)
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for index in product(*(range(energy.sizes[k]) for k in keep)):
        best = minimise_by_milp(energy, fixed=dict(zip(keep, index, strict=True)))
        if best is not None:
            table[index], found[index] = best.value, best.assignment
    return table, found.__getitem__


def _prune(energy: Energy) -> tuple[Energy, list[NDArray[np.intp]]]:
    """Drop states that some factor forbids whatever the others do (arc consistency); the states that stay."""
    states = [np.arange(n) for n in energy.sizes]
    tables = [f.table for f in energy.factors]
    finite = [np.isfinite(t) for t in tables]
    of_variable: list[list[tuple[int, int]]] = [[] for _ in energy.sizes]
    for k, factor in enumerate(energy.factors):
        for axis, v in enumerate(factor.scope):
            of_variable[v].append((k, axis))
    todo = {k for k, table in enumerate(finite) if np.count_nonzero(table) < table.size}
    while todo:
        k = todo.pop()
        for axis, v in enumerate(energy.factors[k].scope):
            others = tuple([a for a in range(finite[k].ndim) if a != axis])
            supported = np.logical_or.reduce(finite[k], axis=others) if others else finite[k]
            if np.count_nonzero(supported) == len(supported):
                continue
            kept = np.flatnonzero(supported)
            states[v] = states[v][kept]
            for j, along in of_variable[v]:
                tables[j] = tables[j].take(kept, axis=along)
                finite[j] = finite[j].take(kept, axis=along)
                todo.add(j)
    factors = tuple(Factor(scope=f.scope, table=t) for f, t in zip(energy.factors, tables, strict=True))
    return Energy(sizes=tuple(len(s) for s in states), factors=factors), states

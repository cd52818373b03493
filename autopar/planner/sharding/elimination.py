"""Exact minimum of a discrete energy by variable elimination, with an integer program where the tables would grow too large.

An energy is a sum of tables over small sets of discrete variables; ``inf`` forbids a combination. Variables are eliminated
one by one: all tables over a variable are added up and minimised over it, which leaves one table over its neighbours
(dynamic programming on a graph, after Bertele and Brioschi, 1972; "bucket elimination", Dechter 1999).

What an elimination adds up at each step follows from the scopes of the tables, not from what is in them: :func:`prepare` works it
out once, and :meth:`Prepared.solve_all` solves many energies of one structure side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from autopar.errors import InternalError
from autopar.planner.sharding.energy import (
    EliminationStep,
    Energy,
    Factor,
    Minimum,
    States,
    Table,
    elimination_order,
    elimination_steps,
)

MAX_TABLE_ENTRIES = 1 << 23
"""Largest table that elimination may make (64 MiB of float64); past it the problem goes to the integer program."""

MAX_SIDE_BY_SIDE = 1 << 20
"""Entries of the tables of several energies that are eliminated at once (8 MiB of float64)."""

_NOTHING: Table = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the marginals of several energies: which energy, and the states of its kept variables."""

    energy: int
    index: tuple[int, ...]


Decoder = Callable[[Sequence[Entry]], States]
"""Finds the assignments that reach entries of marginals: the states of all variables [entries, variables]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marginals:
    """Of several energies of one structure the least energy for every combination of the kept variables.

    Attributes:
        tables: the energies in front, then one dim for each kept variable; ``inf`` where nothing is allowed.
        at_once: how many energies were solved side by side.
        decoders: of each so many of them.
    """

    tables: Table
    at_once: int
    decoders: tuple[Decoder, ...]

    def decode(self, entries: Sequence[Entry]) -> list[tuple[int, ...]]:
        """The assignments of all variables that reach these entries, which must be finite."""
        assignments: dict[Entry, tuple[int, ...]] = {}
        for part, decoder in enumerate(self.decoders):
            own = [entry for entry in entries if entry.energy // self.at_once == part]
            inside = [Entry(entry.energy % self.at_once, entry.index) for entry in own]
            assignments |= zip(own, map(tuple, decoder(inside).tolist()), strict=True)
        return [assignments[entry] for entry in entries]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prepared:
    """What solving an energy needs to know apart from its tables.

    Attributes:
        sizes, scopes: of the energy.
        keep: variables that stay.
        largest: entries of the largest table on the way.
        steps: of the elimination; None where the tables would grow too large.
    """

    sizes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    keep: tuple[int, ...]
    largest: int
    steps: tuple[EliminationStep, ...] | None

    def solve_all(self, tables: Sequence[Table], count: int) -> Marginals:
        """The marginals of several energies, each the same as alone.

        Args:
            tables: of each factor, with one more dim in front: as long as there are energies, or 1 where a table is that of
                all.
            count: of the energies.
        """
        full = np.full([count, *(self.sizes[k] for k in self.keep)], np.inf)
        if 0 in self.sizes:  # nothing fits together
            return Marginals(tables=full, at_once=1, decoders=())
        at_once = 1 if self.steps is None else max(1, MAX_SIDE_BY_SIDE // self.largest)
        decoders: list[Decoder] = []
        for start in range(0, count, at_once):
            part = [table if len(table) == 1 else table[start : start + at_once] for table in tables]
            full[start : start + at_once], decoder = self._solve(part)
            decoders.append(decoder)
        return Marginals(tables=full, at_once=at_once, decoders=tuple(decoders))

    def _solve(self, tables: Sequence[Table]) -> tuple[Table, Decoder]:
        if self.steps is not None:
            return _eliminate(self.steps, tables, self.keep, len(self.sizes))
        factors = tuple(Factor(scope=s, table=t[0]) for s, t in zip(self.scopes, tables, strict=True))
        return _by_integer_program(Energy(sizes=self.sizes, factors=factors), self.keep)


# --- preparing


def prepare(
    sizes: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    keep: tuple[int, ...],
    *,
    max_entries: int = MAX_TABLE_ENTRIES,
    known: dict[object, Prepared] | None = None,
) -> Prepared:
    """Finds an order of elimination.

    Args:
        sizes: number of states of each variable.
        scopes: the variables of each table.
        keep: variables that stay.
        known: what was prepared for other energies.
    """
    known = {} if known is None else known
    key = keep, max_entries, sizes, scopes
    if key not in known:
        order, largest = elimination_order(sizes, scopes, keep)
        steps = elimination_steps(sizes, scopes, order, keep) if largest <= max_entries else None
        known[key] = Prepared(sizes=sizes, scopes=scopes, keep=keep, largest=largest, steps=steps)
    return known[key]


# --- eliminating


def _parts(step: EliminationStep, tables: Sequence[Table]) -> list[Table]:
    """The tables of a step, each with the energies in front and dims for the step's variable and context, of 1 where it has none."""
    parts = []
    for k, axes, shape in step.parts:
        part = tables[k] if axes is None else tables[k].transpose(axes)
        parts.append(part if shape is None else part.reshape((len(part), *shape)))
    return parts


def _sum(step: EliminationStep, parts: Sequence[Table]) -> Table:
    """The sum of the parts of a step, the energies side by side in front."""
    total = np.zeros((max([len(part) for part in parts], default=1), *step.shape))
    for part in parts:
        total += part
    return total


@dataclass(frozen=True, slots=True)
class _Minima:
    """Of a step its variable, its context, and the parts whose sum has a minimum for each of the context's states."""

    variable: int
    scope: tuple[int, ...]
    parts: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class _Backwards:
    """Decodes an elimination: variables take their best states in the reverse order, of sums worked out again where they are asked for."""

    keep: tuple[int, ...]
    num_variables: int
    minima: tuple[_Minima, ...]

    def __call__(self, entries: Sequence[Entry]) -> States:
        energies = np.array([entry.energy for entry in entries], dtype=np.intp)
        same = np.zeros_like(energies)  # of a dim of 1
        indices = np.array([entry.index for entry in entries], dtype=np.intp).reshape(len(entries), len(self.keep))
        assignments = np.zeros((len(entries), self.num_variables), dtype=np.intp)
        assignments[:, self.keep] = indices
        for step in reversed(self.minima):
            context = [energies, *(assignments[:, u] for u in step.scope)]
            total: Table | float = 0.0
            for part in step.parts:
                row, *others = [
                    c if n > 1 else same for c, n in zip(context, part.shape[:1] + part.shape[2:], strict=True)
                ]
                index: tuple[Any, ...] = (row, slice(None), *others)
                total = total + part[index]
            assignments[:, step.variable] = np.argmin(total, axis=-1)
        return assignments


def _eliminate(
    steps: Sequence[EliminationStep], tables: Sequence[Table], keep: tuple[int, ...], num_variables: int
) -> tuple[Table, Decoder]:
    """Minimise over the variables of the steps one by one, remembering what the best states follow from."""
    alive = list(tables)
    minima = []
    for step in steps[:-1]:
        parts = _parts(step, alive)
        minima.append(_Minima(step.variable, step.scope, tuple(parts)))
        alive.append(np.minimum.reduce(_sum(step, parts), axis=1))
        for k, _, _ in step.parts:
            alive[k] = _NOTHING  # nobody asks for it again
    return _sum(steps[-1], _parts(steps[-1], alive)), _Backwards(keep, num_variables, tuple(minima))


# --- the integer program


def _by_integer_program(energy: Energy, keep: tuple[int, ...]) -> tuple[Table, Decoder]:
    """The same by one integer program for each combination of the kept variables; one energy in front."""
    table = np.full([1, *(energy.sizes[k] for k in keep)], np.inf)
    assignments: dict[tuple[int, ...], tuple[int, ...]] = {}
    for index in product(*(range(energy.sizes[k]) for k in keep)):
        best = minimise_by_milp(energy, fixed=dict(zip(keep, index, strict=True)))
        if best is not None:
            table[0, *index], assignments[index] = best.value, best.assignment
    return table, lambda entries: np.array([assignments[entry.index] for entry in entries], dtype=np.intp)


_OPTIMAL, _INFEASIBLE = 0, 2  # status codes of scipy.optimize.milp

_Row = tuple[list[tuple[int, float]], float]
"""An equality: columns with their factors, and the right side."""


def minimise_by_milp(energy: Energy, *, fixed: Mapping[int, int] | None = None) -> Minimum | None:
    """The exact minimum with the variables of ``fixed`` held; None when every assignment is forbidden.

    One 0/1 column for each state of each variable and one column in [0, 1] for each allowed entry of each table of
    two or more variables, tied to the states by marginalisation (the local polytope of Wainwright and Jordan).

    Raises:
        InternalError: the solver stops without an answer.
    """
    first = np.concatenate([[0], np.cumsum(energy.sizes)]).astype(int)
    cost: list[float] = [0.0] * int(first[-1])
    upper = [1.0] * int(first[-1])
    rows: list[_Row] = [([(int(first[v]) + s, 1.0) for s in range(n)], 1.0) for v, n in enumerate(energy.sizes)]
    rows += [([(int(first[v]) + state, 1.0)], 1.0) for v, state in (fixed or {}).items()]
    constant = 0.0
    for factor in energy.factors:
        if not factor.scope:
            constant += float(factor.table)
        elif len(factor.scope) == 1:
            start, stop = first[factor.scope[0]], first[factor.scope[0] + 1]
            allowed = np.isfinite(factor.table)
            upper[start:stop] = (np.array(upper[start:stop]) * allowed).tolist()
            cost[start:stop] = (np.array(cost[start:stop]) + np.where(allowed, factor.table, 0.0)).tolist()
        else:
            _add_joint(factor, energy.sizes, first, cost, rows)
    if np.isinf(constant):
        return None
    return _solve(energy, first, np.array(cost), np.array(upper + [1.0] * (len(cost) - len(upper))), rows)


def _add_joint(factor: Factor, sizes: tuple[int, ...], first: np.ndarray, cost: list[float], rows: list[_Row]) -> None:
    """A column for each allowed entry of a table; those with a state in common add up to that state's column."""
    sums: dict[tuple[int, int], list[tuple[int, float]]] = {
        (v, s): [(int(first[v]) + s, -1.0)] for v in factor.scope for s in range(sizes[v])
    }
    for index in product(*(range(sizes[v]) for v in factor.scope)):
        value = float(factor.table[index])
        if np.isfinite(value):
            for v, s in zip(factor.scope, index, strict=True):
                sums[v, s].append((len(cost), 1.0))
            cost.append(value)
    rows += [(terms, 0.0) for terms in sums.values()]


def _solve(energy: Energy, first: np.ndarray, cost: np.ndarray, upper: np.ndarray, rows: list[_Row]) -> Minimum | None:
    from scipy.optimize import Bounds, LinearConstraint, milp  # slow to import: only where it is needed
    from scipy.sparse import coo_array

    scale = float(np.max(np.abs(cost), initial=0.0)) or 1.0  # the solver's tolerances are absolute
    integrality = np.zeros(len(cost))
    integrality[: first[-1]] = 1
    entries = [(value, row, column) for row, (terms, _) in enumerate(rows) for column, value in terms]
    values, at, columns = zip(*entries, strict=True)
    right = [right for _, right in rows]
    matrix = coo_array((values, (at, columns)), shape=(len(rows), len(cost))).tocsc()
    result = milp(
        cost / scale * 1e3,
        integrality=integrality,
        bounds=Bounds(np.zeros(len(cost)), upper),
        constraints=LinearConstraint(matrix, right, right),
        options={"mip_rel_gap": 0.0},
    )
    if result.status == _INFEASIBLE:
        return None
    if result.status != _OPTIMAL:
        raise InternalError(f"The integer program has no answer: {result.message}")
    assignment = tuple(int(np.argmax(result.x[first[v] : first[v + 1]])) for v in range(len(energy.sizes)))
    return Minimum(assignment=assignment, value=energy.value(assignment))

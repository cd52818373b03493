"""Exact minimisation of a discrete energy by variable elimination, or by an integer program where the tables would grow too large.

An energy is a sum of tables over small sets of discrete variables; an infinite entry forbids a combination. Elimination adds up all tables
that contain a variable and minimises the sum over it, which leaves one table over the neighbours of the variable (dynamic programming on a
graph, after Bertele and Brioschi, 1972; "bucket elimination", Dechter 1999).

The steps of an elimination depend only on the structure of an energy: the numbers of states and the scopes of the tables, not the
entries. :func:`prepare` therefore works them out once, and :meth:`EnergySolver.solve_all` solves many energies of one structure together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InternalError
from autopar.planner.sharding.energy import (
    EliminationStep,
    States,
    Table,
    elimination_order,
    elimination_steps,
)

if TYPE_CHECKING:
    from scipy.sparse import csc_array

MAX_TABLE_ENTRIES = 1 << 23
"""Entries of the largest table that elimination may make (64 MiB of float64). Energies with larger ones go to the integer program."""

MAX_SIDE_BY_SIDE = 1 << 20
"""Limit on the entries of the largest table times the number of energies that are eliminated at once (8 MiB of float64)."""

_RELEASED: Table = np.zeros(0)
"""Takes the place of a table that is no longer needed, so that its memory is freed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of the marginals of several energies.

    Attributes:
        energy: the index of the energy.
        index: the states of the kept variables.
    """

    energy: int
    index: tuple[int, ...]


Decoder = Callable[[Sequence[Entry]], States]
"""Returns the assignments that attain some entries of marginals, as states [entries, variables]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Marginals:
    """The min-marginals of several energies of one structure: the least energy for every combination of states of the kept variables.

    Attributes:
        tables: least energies [energies, *states of the kept variables]; infinite where every assignment is forbidden.
        chunk_size: the number of energies that were solved side by side.
        decoders: one decoder for each such chunk of energies, in order.
    """

    tables: Table
    chunk_size: int
    decoders: tuple[Decoder, ...]

    def decode(self, entries: Sequence[Entry]) -> list[tuple[int, ...]]:
        """Return for each entry an assignment of all variables that attains it.

        The entries must be finite.
        """
        assignments: dict[Entry, tuple[int, ...]] = {}
        for chunk, decoder in enumerate(self.decoders):
            in_chunk = [entry for entry in entries if entry.energy // self.chunk_size == chunk]
            local_entries = [Entry(entry.energy % self.chunk_size, entry.index) for entry in in_chunk]
            assignments |= zip(in_chunk, map(tuple, decoder(local_entries).tolist()), strict=True)
        return [assignments[entry] for entry in entries]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EnergySolver:
    """A solver for all energies of one structure: it knows everything but the entries of the tables.

    Attributes:
        sizes: the number of states of each variable.
        scopes: the variables of each table.
        keep: the variables that are not minimised over.
        largest: the number of entries of the largest table on the way.
        steps: the steps of the elimination; None where its tables would grow too large.
    """

    sizes: tuple[int, ...]
    scopes: tuple[tuple[int, ...], ...]
    keep: tuple[int, ...]
    largest: int
    steps: tuple[EliminationStep, ...] | None

    def solve_all(self, tables: Sequence[Table], count: int) -> Marginals:
        """Return the marginals of several energies; each is the same as if it were solved alone.

        Args:
            tables: for each scope its tables, with the energies as first dim. This dim has length 1 where all energies share the table.
            count: the number of energies.
        """
        least = np.full([count, *(self.sizes[k] for k in self.keep)], np.inf)
        if 0 in self.sizes:  # some variable has no state that is allowed
            return Marginals(tables=least, chunk_size=1, decoders=())
        chunk_size = 1 if self.steps is None else max(1, MAX_SIDE_BY_SIDE // self.largest)
        decoders: list[Decoder] = []
        for start in range(0, count, chunk_size):
            chunk = [table if len(table) == 1 else table[start : start + chunk_size] for table in tables]
            least[start : start + chunk_size], decoder = self._solve_chunk(chunk)
            decoders.append(decoder)
        return Marginals(tables=least, chunk_size=chunk_size, decoders=tuple(decoders))

    def _solve_chunk(self, tables: Sequence[Table]) -> tuple[Table, Decoder]:
        """Return the table of one chunk of energies over ``keep``, and its decoder."""
        if self.steps is not None:
            return _eliminate(self.steps, tables, self.keep, len(self.sizes))
        return _by_integer_program(self.sizes, self.scopes, [table[0] for table in tables], self.keep)


# --- preparing


def prepare(
    sizes: tuple[int, ...],
    scopes: tuple[tuple[int, ...], ...],
    keep: tuple[int, ...],
    *,
    max_entries: int = MAX_TABLE_ENTRIES,
    cache: dict[object, EnergySolver] | None = None,
) -> EnergySolver:
    """Return the solver of energies of one structure, with an order of elimination.

    Args:
        sizes: the number of states of each variable.
        scopes: the variables of each table.
        keep: the variables that are not minimised over.
        max_entries: entries of the largest table that elimination may make; past it the solver uses an integer program.
        cache: cache of solvers by structure, which this call extends; None caches nothing.
    """
    cache = {} if cache is None else cache
    key = keep, max_entries, sizes, scopes
    if key not in cache:
        order, largest = elimination_order(sizes, scopes, keep)
        steps = elimination_steps(sizes, scopes, order, keep) if largest <= max_entries else None
        cache[key] = EnergySolver(sizes=sizes, scopes=scopes, keep=keep, largest=largest, steps=steps)
    return cache[key]


# --- eliminating


def _parts(step: EliminationStep, tables: Sequence[Table]) -> list[Table]:
    """Return the tables that a step adds up, transposed and reshaped so that they broadcast over [energies, *step.shape]."""
    parts = []
    for k, permutation, shape in step.parts:
        part = tables[k] if permutation is None else tables[k].transpose(permutation)
        parts.append(part if shape is None else part.reshape((len(part), *shape)))
    return parts


def _sum(step: EliminationStep, parts: Sequence[Table]) -> Table:
    """Return the sum of the parts of a step [energies, *step.shape]."""
    total = np.zeros((max([len(part) for part in parts], default=1), *step.shape))
    for part in parts:
        total += part
    return total


@dataclass(frozen=True, slots=True)
class _EliminatedVariable:
    """What a step of the elimination leaves behind to find the best state of its variable.

    Attributes:
        variable: the eliminated variable.
        scope: the variables on which its best state depends.
        parts: the tables whose sum the step minimised.
    """

    variable: int
    scope: tuple[int, ...]
    parts: tuple[Table, ...]


@dataclass(frozen=True, slots=True)
class _Backtracking:
    """A decoder that assigns the eliminated variables their best states in reverse order.

    The sums are worked out again at the requested entries only, so that elimination need not store the best states.
    """

    keep: tuple[int, ...]
    num_variables: int
    eliminated: tuple[_EliminatedVariable, ...]

    def __call__(self, entries: Sequence[Entry]) -> States:
        energies = np.array([entry.energy for entry in entries], dtype=np.intp)
        zeros = np.zeros_like(energies)  # index into dims of length 1
        indices = np.array([entry.index for entry in entries], dtype=np.intp).reshape(len(entries), len(self.keep))
        assignments = np.zeros((len(entries), self.num_variables), dtype=np.intp)
        assignments[:, self.keep] = indices
        for eliminated in reversed(self.eliminated):
            context = [energies, *(assignments[:, u] for u in eliminated.scope)]
            total: Table | float = 0.0
            for part in eliminated.parts:
                energy_index, *others = [
                    c if n > 1 else zeros for c, n in zip(context, part.shape[:1] + part.shape[2:], strict=True)
                ]
                index: tuple[Any, ...] = (energy_index, slice(None), *others)
                total = total + part[index]
            assignments[:, eliminated.variable] = np.argmin(total, axis=-1)
        return assignments


def _eliminate(
    steps: Sequence[EliminationStep], tables: Sequence[Table], keep: tuple[int, ...], num_variables: int
) -> tuple[Table, Decoder]:
    """Minimise over the variables of the steps one by one; return the table over ``keep``, which the last step sums, and its decoder."""
    live_tables = list(tables)
    eliminated = []
    for step in steps[:-1]:
        parts = _parts(step, live_tables)
        eliminated.append(_EliminatedVariable(step.variable, step.scope, tuple(parts)))
        live_tables.append(np.minimum.reduce(_sum(step, parts), axis=1))
        for k, _, _ in step.parts:
            live_tables[k] = _RELEASED  # each table is read by one step only
    return _sum(steps[-1], _parts(steps[-1], live_tables)), _Backtracking(keep, num_variables, tuple(eliminated))


# --- the integer program


def _by_integer_program(
    sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], tables: Sequence[Table], keep: tuple[int, ...]
) -> tuple[Table, Decoder]:
    """Return the same as :func:`_eliminate` by one integer program for each combination of the kept variables, for a single energy."""
    least = np.full([1, *(sizes[k] for k in keep)], np.inf)
    assignments: dict[tuple[int, ...], tuple[int, ...]] = {}
    program = _Program.of(sizes, scopes, tables)
    for index in product(*(range(sizes[k]) for k in keep)):
        assignment = program.best(dict(zip(keep, index, strict=True)))
        if assignment is not None:
            assignments[index] = assignment
            entries = [table[tuple(assignment[v] for v in scope)] for scope, table in zip(scopes, tables, strict=True)]
            least[0, *index] = sum(entries)
    return least, lambda entries: np.array([assignments[entry.index] for entry in entries], dtype=np.intp)


_OPTIMAL, _INFEASIBLE = 0, 2  # of scipy.optimize.milp's status codes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Program:
    """An energy as an integer program over columns (unknowns).

    There is a binary column for each state of each variable, and a column in [0, 1] for each allowed entry of each table of two or more
    variables. Marginalisation constraints tie these entries to the states (the local polytope of Wainwright, Jordan).

    Attributes:
        first: the column of the first state of each variable, and the number of such columns at the end.
        cost: the cost of each column; infinite where it is forbidden.
        matrix: the coefficients of the equality constraints [rows, columns].
        rhs: their right-hand sides.
    """

    first: NDArray[np.int64]
    cost: Table
    matrix: csc_array
    rhs: Table

    @classmethod
    def of(cls, sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], tables: Sequence[Table]) -> _Program:
        """Return the program of an energy."""
        from scipy.sparse import coo_array  # slow to import: only where it is needed

        first = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        states, num_columns, num_rows = np.zeros(first[-1]), int(first[-1]), len(sizes)
        costs = [states]
        # (rows, columns, coefficients): the states of a variable add up to one
        entries = [(np.repeat(np.arange(len(sizes)), sizes), np.arange(num_columns), np.ones(num_columns))]
        for scope, table in zip(scopes, tables, strict=True):
            if len(scope) <= 1:
                for v in scope or (0,):
                    states[first[v] : first[v + 1]] += table
                continue
            allowed = np.nonzero(np.isfinite(table))
            columns = num_columns + np.arange(len(allowed[0]))
            # Entries with a state in common add up to its column.
            for v, state in zip(scope, allowed, strict=True):
                every = np.arange(sizes[v])
                entries.append((num_rows + state, columns, np.ones(len(columns))))
                entries.append((num_rows + every, first[v] + every, -np.ones(len(every))))
                num_rows += len(every)
            costs.append(table[allowed])
            num_columns += len(columns)
        rows, places, coefficients = (np.concatenate(parts) for parts in zip(*entries, strict=True))
        matrix = coo_array((coefficients, (rows, places)), shape=(num_rows, num_columns)).tocsc()
        rhs = (np.arange(num_rows) < len(sizes)).astype(float)
        return cls(first=first, cost=np.concatenate(costs), matrix=matrix, rhs=rhs)

    def best(self, fixed: Mapping[int, int]) -> tuple[int, ...] | None:
        """Return the assignment of least cost with the variables of ``fixed`` held at their states; None where no assignment is allowed.

        Raises:
            InternalError: the solver stops without an answer.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        is_allowed = np.isfinite(self.cost)
        for v, state in fixed.items():
            columns = np.arange(self.first[v], self.first[v + 1])
            is_allowed[columns[columns != self.first[v] + state]] = False
        cost = np.where(is_allowed, self.cost, 0.0)
        scale = float(np.max(np.abs(cost), initial=0.0)) or 1.0  # the tolerances of the solver are absolute
        result = milp(
            cost / scale * 1e3,
            integrality=np.arange(len(cost)) < self.first[-1],
            bounds=Bounds(0.0, is_allowed.astype(float)),
            constraints=LinearConstraint(self.matrix, self.rhs, self.rhs),
            options={"mip_rel_gap": 0.0},
        )
        if result.status == _INFEASIBLE:
            return None
        if result.status != _OPTIMAL:
            raise InternalError(f"The integer program has no answer: {result.message}")
        states = np.split(result.x, self.first[1:])[:-1]
        return tuple(int(np.argmax(of_variable)) for of_variable in states)

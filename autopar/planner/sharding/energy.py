"""What a typing costs in parts that are weighted later, and tables of such costs.

Every cost has four parts, so that one problem serves a whole sweep of memory prices: seconds a micro-batch, seconds a step
(gradient sums), bytes of saved activations, bytes of state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True, eq=False)
class SumTable:
    """A table whose entries are sums of a few costs, whatever these are.

    Attributes:
        terms: for the first, second, ... term of each entry its place among the costs; 0: none.
    """

    terms: tuple[NDArray[np.intp], ...]

    def parts(self, costs: Sequence[Cost | None]) -> tuple[Table, ...]:
        """The parts of the table; empty where all is free.

        Args:
            costs: the first one free; None forbids.
        """
        if not self.terms:
            return ()
        columns = columns_of(costs)
        sums = [column[self.terms[0]] for column in columns]
        for term in self.terms[1:]:
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

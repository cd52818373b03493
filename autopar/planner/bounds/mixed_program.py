"""The least step over all cuts into parts of blocks, as a linear program that grows with the chains that are found.

With n blocks of the group on a stage and x of them recomputed, no chain of a row takes longer than the step T, what a rank keeps
fits in its memory, no more blocks recompute than there are. All of it is linear in n, x and T, and divided by T has a right
side of ones (chains) and zeros (the others): the most of 1 / T is sought, from no blocks at all. Of the many laws few bind. The
program begins with those of the ranks' own work, and takes in the one that its solution breaks most, until it breaks none; from one
solution to the next a few exchanges of the dual simplex method lead, also where a new chain is found.

Its weights are never trusted: a bound is worked out from them again (:meth:`Stages.least_s`).
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.bound_rows import Array
from autopar.planner.bounds.mixed_stages import Chain, Stages, side_by_side

EXCHANGES = 400
"""Of one solution, at most: beyond them rounding, or a circle, is more likely than an end."""

BROKEN = 1e-7
"""Of a law, up to which it is held: seconds against the step, bytes against those that there are."""

NEVER = 1e-6
"""Of what is expected of 1 / T, which is none."""

FREE = 0.01
"""Of a block, what the stages share freely at least: where all of them are bound to a stage, each is bound to that much less."""

ROOM = 64
"""Rows of a table that is begun."""

_PIVOT = 1e-9
_COUNTS = tuple(field.name for field in fields(Chain) if field.name != "byte_s")


class Solution(NamedTuple):
    """Blocks and recomputed ones (of each part) on each stage in the shortest step, and the chains weighed."""

    blocks: Array
    again: Array
    weighed: Chain


class Program:
    """The program of one row.

    Args:
        chains: that are known; the first ones, as many as there are ranks, have each block on one of them.
        scale_s: about as long as the step.
    """

    def __init__(self, stages: Stages, chains: Sequence[Chain], scale_s: float) -> None:
        self.stages, self.scale_s = stages, scale_s
        n, pp = len(stages.rank), stages.pp
        free = stages.count - float(stages.least.sum())
        self.least = stages.least - max(FREE - free, 0.0) / n
        self.free = max(free, FREE)
        parts = stages.num_parts
        self.tableau = _Tableau(np.concatenate([np.full(n, 1.0), np.zeros(parts * n)]))
        self.chains: list[Chain] = []
        self.is_impossible = False
        """Whether it was found that no blocks keep the laws: the step has no end."""
        own = (stages.rank == np.arange(pp)[:, None]).astype(float)
        size = np.maximum(np.abs(stages.room_bytes), 1.0)[:, None]
        # what is kept where all are as few as they can be, and by each more; no more recompute than there are
        freed = np.tile(own, parts) * stages.freed_bytes
        memory = self._laws(own * stages.num_bytes / size, -freed / size, -stages.room_bytes / size[:, 0])
        fewer = self._laws(np.tile(-np.eye(n), (parts, 1)), np.eye(parts * n), np.zeros(parts * n))
        self.laws = np.concatenate([memory, fewer])
        self.names = -1 - np.arange(len(self.laws))
        self.limits = np.zeros(len(self.laws))
        self.add(chains)

    def _laws(self, blocks: Array, again: Array, fixed: Array) -> Array:
        """What blocks, recomputed ones and the step say of each law, as rows over the variables of the program."""
        alone = (fixed + blocks @ self.least) / self.free
        return np.concatenate([blocks + alone[:, None], again], axis=1)

    def add(self, chains: Sequence[Chain]) -> None:
        """More chains."""
        if not chains:
            return
        block, again, fixed = self.stages.each_s(side_by_side(chains))
        laws = self._laws(block / self.scale_s, again / self.scale_s, fixed / self.scale_s)
        self.laws = np.concatenate([self.laws, laws])
        self.limits = np.concatenate([self.limits, np.ones(len(laws))])
        self.names = np.concatenate([self.names, len(self.chains) + np.arange(len(laws))])
        self.chains += chains

    def twin(self) -> Program:
        """The same program, to which other laws may be added."""
        other = copy(self)
        other.tableau, other.chains = self.tableau.twin(), [*self.chains]
        return other

    def halves(self, sums: Array, values: Array) -> tuple[Array, Array]:
        """The laws that each sum [sums, stages] of blocks is no more than its value without the part, or more than that."""
        none, floor = np.zeros((len(sums), len(self.stages.again_s))), np.floor(values)
        return self._laws(sums, none, -floor), self._laws(-sums, none, floor + 1.0)

    def halves_again(self, sums: Array, values: Array) -> tuple[Array, Array]:
        """As :meth:`halves`, of sums [sums, parts * stages] of recomputed blocks."""
        none, floor = np.zeros((len(sums), len(self.stages.rank))), np.floor(values)
        return self._laws(none, sums, -floor), self._laws(none, -sums, floor + 1.0)

    def keep(self, law: Array) -> None:
        """One more law."""
        self.laws = np.concatenate([self.laws, law[None]])
        self.limits = np.append(self.limits, 0.0)
        self.names = np.append(self.names, -1 - len(self.laws))

    def least_s(self) -> float:
        """Seconds of the shortest step at least, from the prices of the last solution and the laws themselves."""
        prices = dict(self.tableau.prices())
        weights = np.array([prices.get(name, 0.0) for name in self.names.tolist()])
        total = weights @ self.limits
        # what the priced laws say of the variables less than the aim does, as rounding leaves it
        over = max(float((self.tableau.gains - weights @ self.laws).max()), 0.0)
        most = over * (self.free + self.stages.count)
        return float(self.scale_s * (self.free - most) / total) if total > 0 else 0.0

    def solve(self) -> Solution | None:
        """The shortest step by all that is known; None where there is none, or it is not found.

        Rounding adds up from one solution to the next: where it leads nowhere, the program is solved from its beginning.
        """
        was_empty, found = not self.tableau.size, self._solved()
        if found is None and not (was_empty or self.is_impossible):
            self.tableau = _Tableau(self.tableau.gains)
            found = self._solved()
        return found

    def _solved(self) -> Solution | None:
        if not self.tableau.size:
            for i in np.flatnonzero(self.limits)[: self.stages.pp].tolist():
                self.tableau.add(self.laws[i], self.limits[i], int(self.names[i]))
            if not self.tableau.primal():
                return None
        for _ in range(EXCHANGES):
            values = self.tableau.values()
            over = self.laws @ values - self.limits
            worst = int(over.argmax())
            if over[worst] <= BROKEN:
                return self._solution(values)
            self.tableau.add(self.laws[worst], self.limits[worst], int(self.names[worst]))
            if not self.tableau.dual():
                return None
        return None

    def _solution(self, values: Array) -> Solution | None:
        stages, n = self.stages, len(self.stages.rank)
        weights, byte_s = np.zeros(len(self.chains)), np.zeros(stages.pp)
        for name, price in self.tableau.prices():
            if name >= 0:
                weights[name] = price
            elif -1 - name < stages.pp:
                byte_s[-1 - name] = price
        total = weights.sum()
        share = values[:n].sum() / self.free
        self.is_impossible = bool(share <= NEVER)
        if total <= 0 or self.is_impossible:
            return None
        some = np.flatnonzero(weights)
        every = side_by_side([self.chains[i] for i in some])
        weighed = {name: weights[some] / total @ getattr(every, name) for name in _COUNTS}
        byte_s *= self.scale_s / total / np.maximum(np.abs(stages.room_bytes), 1.0)
        return Solution(self.least + values[:n] / share, values[n:] / share, Chain(**weighed, byte_s=byte_s))


class _Tableau:
    """What is most of ``gains @ v`` with ``v >= 0`` under laws ``a @ v <= b``, that are added one by one.

    The first row is the aim. Each basic variable is its last column less its row times the variables that are zero. Variables of
    laws, what is left of them, are numbered after those of ``v``.
    """

    def __init__(self, gains: Array) -> None:
        self.gains, self.width, self.size = gains, len(gains), 0
        self._room, self._names = np.empty((ROOM, self.width + 1)), np.empty(ROOM, dtype=np.int64)
        """The table and the basic variables, with rows to come: laws are many, and each would else copy those before."""
        self._room[0] = np.append(gains, 0.0)
        self.zero: NDArray[np.int64] = np.arange(self.width)
        self.names: list[int] = []
        self._view()

    def _view(self) -> None:
        self.table, self.basic = self._room[: self.size + 1], self._names[: self.size]

    def twin(self) -> _Tableau:
        """The same."""
        other = copy(self)
        other._room, other._names = self._room.copy(), self._names.copy()
        other.zero, other.names = self.zero.copy(), [*self.names]
        other._view()
        return other

    def add(self, law: Array, limit: float, name: int) -> None:
        """A law by its name; in terms of the variables that are zero now."""
        own = self._now(np.append(law, limit)[None])[0]
        if len(self._room) == self.size + 1:
            self._room, self._names = (np.concatenate([kept, kept]) for kept in (self._room, self._names))
        self._room[self.size + 1], self._names[self.size] = own, self.width + self.size
        self.names.append(name)
        self.size += 1
        self._view()

    def _now(self, laws: Array) -> Array:
        """Laws, with their limits last, in terms of the variables that are zero now."""
        every = np.zeros((len(laws), self.width + self.size))  # of laws none but by those of ``v``
        every[:, : self.width] = laws[:, :-1]
        found: Array = np.concatenate([every[:, self.zero], laws[:, -1:]], axis=1)
        found -= every[:, self.basic] @ self.table[1:]
        return found

    def worth(self, laws: Array) -> Array:
        """What each of these laws, of a limit of 0, would take from the aim at least, were it added: by the first exchange."""
        own = self._now(np.concatenate([laws, np.zeros((len(laws), 1))], axis=1))
        may = own[:, :-1] < -_PIVOT
        ratios = np.where(may, self.table[0, :-1] / np.where(may, own[:, :-1], -1.0), np.inf).min(axis=1)
        broken = own[:, -1] < -_PIVOT
        found: Array = np.where(broken, -own[:, -1] * np.where(broken, ratios, 0.0), 0.0)
        return found

    def values(self) -> Array:
        """Of ``v``."""
        found = np.zeros(self.width + self.size)
        found[self.basic] = self.table[1:, -1]
        return found[: self.width]

    def prices(self) -> list[tuple[int, float]]:
        """Of the laws that bind, by name."""
        binding = (self.zero >= self.width).nonzero()[0]
        names, aims = (self.zero[binding] - self.width).tolist(), (-self.table[0, binding]).tolist()
        return [(self.names[name], max(aim, 0.0)) for name, aim in zip(names, aims, strict=True)]

    def primal(self) -> bool:
        """To the most, from where no law is broken; False where it is not found."""
        for _ in range(EXCHANGES):
            enters = int(self.table[0, :-1].argmax())
            if self.table[0, enters] <= _PIVOT:
                return True
            column = self.table[1:, enters]
            ratios = np.where(column > _PIVOT, self.table[1:, -1] / np.where(column > _PIVOT, column, 1.0), np.inf)
            leaves = int(ratios.argmin())
            if not np.isfinite(ratios[leaves]):
                return False
            self._exchange(leaves, enters)
        return False

    def dual(self) -> bool:
        """To where no law is broken, from what is the most without the broken ones; False where it is not found."""
        table = self.table
        aims, left = table[0, :-1], table[1:, -1]
        for _ in range(EXCHANGES):
            leaves = int(left.argmin())
            if left[leaves] >= -_PIVOT:
                return True
            row = table[leaves + 1, :-1]
            may = (row < -_PIVOT).nonzero()[0]
            if not len(may):
                return False
            some = row[may]
            ratios = aims[may] / some
            # of equal ones the largest: what is divided by it rounds least
            near = (ratios <= ratios.min() + _PIVOT).nonzero()[0]
            place = near[0] if len(near) == 1 else near[some[near].argmin()]
            self._exchange(leaves, int(may[place]))
        return False

    def _exchange(self, leaves: int, enters: int) -> None:
        """The basic variable of a law and one that is zero."""
        table, at = self.table, leaves + 1
        pivot, column = table[at, enters], table[:, enters].copy()
        row = table[at] / pivot
        table -= column[:, None] * row
        table[at] = row
        table[:, enters] = -column / pivot
        table[at, enters] = 1 / pivot
        self.basic[leaves], self.zero[enters] = self.zero[enters], self.basic[leaves]

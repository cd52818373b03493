"""The program of :mod:`autopar.planner.bounds.mixed_chains` where each stage has a whole number of blocks of the group.

Blocks in parts spread evenly; of whole ones a slow device that has time for 2.6 takes two or three. So the program is branched on
the blocks of a stage: no more than two, or no fewer than three. Each branch takes on the solution of what it comes from, which one
law more breaks. The branch of the least bound is always the next one, until its cut is of whole blocks and its longest chain is
known, or its bound is what is aimed at. Left after some branches, that bound is one of all cuts.

Where recompute frees what modes free, blocks that recompute are whole too, which is branched on next. What is relaxed: elsewhere
they are not, and few of the chains are known. Where a cut of whole blocks is found, it is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from autopar.planner.bounds.bound_rows import Array
from autopar.planner.bounds.mixed_program import Program, Solution
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.bounds.mixed_stages import ROUNDING, Chain, Stages

NEAR = 0.92
"""Of the time that is aimed at: bounds below are left, as whole blocks raise them by some percent at most."""

NODES = 600
"""Branches that are looked at."""

MOST_STAGES = 64

LEAST = 1e-12
"""Of what a branch is worth: where it is not known, the stage whose blocks are least whole is taken."""

SLACK = 1e-5
"""Of a step and of a block, what is taken as none."""


def whole_bound_s(row: MixedRow, chains: Sequence[Chain], known_s: float, goal_s: float) -> float:
    """A bound, in seconds, from ``known_s`` to ``goal_s``.

    Args:
        chains: of the row's schedule, the longest of any cuts.
        known_s: a bound.
        goal_s: what is not possible in less is not looked at more closely.
    """
    num_stages = len(row.ranks) * row.ranks[0].virtual_stages
    if not chains or not math.isfinite(goal_s) or not NEAR * goal_s <= known_s < goal_s or num_stages > MOST_STAGES:
        return known_s
    return min(max(known_s, _Branches(row, chains, goal_s).bound_s()), goal_s)


class _Branches:
    """The branches of one row.

    Attributes:
        open: the bound of each, when it came, what says it and its solution.
        least_s: of those of which more is not known.
    """

    def __init__(self, row: MixedRow, chains: Sequence[Chain], goal_s: float) -> None:
        self.stages, self.chains, self.goal_s = Stages(row), [*chains], goal_s
        self.schedule = row.ranks[0].schedule
        own = self.stages.rank == np.arange(self.stages.pp)[:, None]
        self.sums = np.concatenate([own, np.eye(len(self.stages.rank))]).astype(float)
        parts = self.stages.num_parts
        again = np.concatenate([np.kron(np.eye(parts), own), np.eye(parts * len(self.stages.rank))])
        self.again = again * (self.stages.freed_bytes > 0)  # what frees nothing may be any part of a block
        self.open: list[tuple[float, int, Program, Solution]] = []
        self.least_s, self.made = goal_s, 0
        self._take(Program(self.stages, self.chains, goal_s), 0.0)

    def _take(self, program: Program, before_s: float) -> None:
        """A branch, whose bound is at least that of what it came from."""
        program.add(self.chains[len(program.chains) :])
        found = program.solve()
        if found is None:
            self.least_s = min(self.least_s, math.inf if program.is_impossible else before_s)
            return
        bound_s = max(program.least_s() * (1 - ROUNDING), before_s)
        if bound_s < self.goal_s:
            self.made += 1
            heappush(self.open, (bound_s, self.made, program, found))

    def bound_s(self) -> float:
        """Of all branches."""
        for _ in range(NODES):
            if not self.open or self.open[0][0] >= self.least_s:
                break
            bound_s, _, program, found = heappop(self.open)
            halves = self._halves(program, found)
            if halves is not None:
                other = program.twin()
                program.keep(halves[0])
                other.keep(halves[1])
                self._take(program, bound_s)
                self._take(other, bound_s)
                continue
            time_s, longest = self.stages.longest(self.schedule, np.round(found.blocks), found.again)
            if time_s <= bound_s * (1 + SLACK):
                return bound_s
            self.chains.append(longest)
            self._take(program, bound_s)
        return min([self.least_s, *(own[0] for own in self.open[:1])])

    def _halves(self, program: Program, found: Solution) -> tuple[Array, Array] | None:
        """The laws of two branches, one of which any whole blocks hold; None where all are whole."""
        values = self.sums @ found.blocks
        parts = np.abs(values - np.round(values))
        fewer, more = program.halves(self.sums, values)
        if parts.max() <= SLACK:
            values = self.again @ found.again
            parts = np.abs(values - np.round(values))
            if parts.max() <= SLACK or not self.stages.counts_again:
                return None
            fewer, more = program.halves_again(self.again, values)
        # the one of which both branches are sure to take longer
        worth = np.minimum(program.tableau.worth(fewer), 1.0) * np.minimum(program.tableau.worth(more), 1.0)
        place = int(np.where(parts > SLACK, worth + LEAST * parts, -1.0).argmax())
        return fewer[place], more[place]

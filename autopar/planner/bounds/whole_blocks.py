"""The program of :mod:`autopar.planner.bounds.linear` where each rank has a whole number of blocks of the group.

Blocks in parts spread evenly, so that of 58 on 32 ranks each has 1.8; of whole ones some rank has two. So the program is branched on
the sums of ranks: no more than one block of the group on a rank, or no fewer than two; then on those of a rank's stages. The rank that
has the most is the first one, as it is what the others wait for. The branch of the least bound is always the next one, and chains that
are found for one hold for all. What is left open after some work has a bound too, and the least of these is one of all cuts.

What is relaxed: in which modes blocks are is not whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autopar.planner.bounds.linear import LinearProgram

WORK = 40_000_000
"""Numbers in all programs together that are solved for one, after which no more branches are looked at."""

ROUNDS = 3
"""Programs that are solved for a branch, with new chains between them."""

CHAINS = 2
"""Added at once: a program takes longer by each of them, and the next one binds as often as one of more."""

RESTED = 12
"""Programs after which a chain that binds none of them is left out: the more there are, the longer a program takes."""

NEAR = 0.97
"""Of the time that is aimed at: bounds below are left, as whole blocks raise them by a few percent at most."""

SOLVED, INFEASIBLE = 0, 2
"""What scipy calls a program with a solution, and one without."""

PLAIN = {"presolve": False}
"""Options of the solver: to presolve these programs takes as long as to solve them."""

PART = 1e-5
"""Of a block, what is taken as none."""

STEP = 1e-4
"""Of the value of a branch that is of whole blocks, by which it has to rise to be looked at once more."""

CLOSE = 1e-3
"""Of the time that is aimed at, what is missing to it where the values of programs below an earlier bound are raised too."""

BINDS = 1e-7
"""Of the time that is aimed at, up to which a chain is as long as the step."""

BROKEN = 1e-6
"""Likewise, by how much longer one is that is taken in again."""

Array = NDArray[np.float64]


def in_whole_blocks(
    program: LinearProgram, found: float, goal_s: float, aim: Array, upper: Array, slack: float
) -> float:
    """A bound from ``found`` on, both as parts of ``goal_s``; 1: nothing takes less.

    Args:
        program: solved, with the chains that were found.
        aim, upper: of its columns, what is minimised and their most.
        slack: of the solver's value.
    """
    if not NEAR <= found < 1.0 or not program.grouped.any():
        return found
    return _Branches(program, goal_s, aim, upper, slack).bound(found)


@dataclass(order=True, frozen=True, slots=True)
class _Branch:
    """A branch by its bound, the last value of its program, and when it came: blocks of the group on each rank, at least and at most.

    What was known before may be above the values of programs, which rise with more chains.
    """

    bound: float
    value: float = field(compare=False)
    made: int
    least: Array = field(compare=False)
    most: Array = field(compare=False)


class _Branches:
    """The branches of one program; see :func:`in_whole_blocks`.

    Attributes:
        sums: over the columns, the blocks of the group on each rank, and on each stage where a rank has several.
        laws, low, high: rows of the program.
        idle: of each of them for how many solutions it did not bind; those that are no chains are always in.
        inside, inside_s: blocks of each column in the shortest step that is known, and its seconds.
        work: see ``WORK``.
    """

    def __init__(self, program: LinearProgram, goal_s: float, aim: Array, upper: Array, slack: float) -> None:
        self.program, self.goal_s, self.aim, self.upper, self.slack = program, goal_s, aim, upper, slack
        of_stage = program.stage == np.arange(program.stages * (program.stages > program.pp))[:, None]
        sums = np.concatenate([program.rank == np.arange(program.pp)[:, None], of_stage]) * program.grouped
        self.sums = np.hstack([sums, np.zeros((len(sums), len(aim) - len(program.kind)))])
        self.laws = np.zeros((0, len(aim)))
        self.low = self.high = np.zeros(0)
        self.idle = np.zeros(0, dtype=np.int64)
        self.inside, self.inside_s = np.zeros(0), math.inf
        self.work = 0
        self._collect()

    def bound(self, found: float) -> float:
        """Of all branches, of which ``found`` is one."""
        sums = len(self.sums)
        open_ = [_Branch(found, 0.0, 0, np.zeros(sums), np.full(sums, np.inf))]
        least = 1.0  # of those of which more is not found
        for looked in count(1):
            if not open_ or open_[0].bound >= least or self.work > WORK:
                break
            branch = heappop(open_)
            bound, value, blocks = self._solved(branch)
            if bound >= 1.0:
                continue
            part = np.abs(blocks - np.round(blocks))
            if not len(blocks) or part.max() <= PART:
                if bound > branch.bound * (1 + STEP) or self._may_reach(
                    branch, value
                ):  # more chains may raise it further
                    heappush(open_, replace(branch, bound=bound, value=value, made=2 * looked))
                else:
                    least = min(least, bound)
                continue
            of_ranks = part[: self.program.pp]  # of a rank's stages only where all ranks are whole
            parts = of_ranks if of_ranks.max() > PART else part
            some = int(np.where(parts > PART, np.floor(blocks[: len(parts)]) + parts, -1.0).argmax())
            fewer, more = branch.most.copy(), branch.least.copy()
            fewer[some], more[some] = math.floor(blocks[some]), math.floor(blocks[some]) + 1.0
            heappush(open_, _Branch(bound, value, 2 * looked, branch.least, fewer))
            heappush(open_, _Branch(bound, value, 2 * looked + 1, more, branch.most))
        return min([least, *(branch.bound for branch in open_[:1])])

    def _may_reach(self, branch: _Branch, value: float) -> bool:
        """Whether a branch whose bound is close to the goal has a program whose value rises still, below that bound or above."""
        left = 1.0 - branch.bound
        return left < CLOSE and value > branch.value * (1 + min(STEP, left / ROUNDS))

    def _solved(self, branch: _Branch) -> tuple[float, float, Array]:
        """The bound of a branch, the last value of its program, and the blocks of each rank in its solution; none where there is none."""
        bound, value, blocks = branch.bound, branch.value, np.zeros(0)
        for _ in range(ROUNDS):
            value, columns = self._solve(branch)
            if not len(columns):
                return (1.0 if math.isinf(value) else bound), branch.value, np.zeros(0)
            bound = max(bound, value * (1 - self.slack))
            blocks = self.sums @ columns
            if bound >= 1.0:
                break
            if not self._takes_in(columns):
                self._cut(columns)
        return bound, value, blocks

    def _solve(self, branch: _Branch) -> tuple[float, Array]:
        """The value of a branch's program and its columns; without a solution infinity and none, where the solver fails 0 and none."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        some = np.flatnonzero(self.idle < RESTED)
        sums = np.flatnonzero((branch.least > 0.0) | np.isfinite(branch.most))
        self.work += (len(some) + len(sums)) * len(self.aim)
        result = milp(
            self.aim,
            bounds=Bounds(np.zeros(len(self.aim)), self.upper),
            constraints=LinearConstraint(
                np.concatenate([self.laws[some], self.sums[sums]]),
                np.concatenate([self.low[some], branch.least[sums]]),
                np.concatenate([self.high[some], branch.most[sums]]),
            ),
            options=PLAIN,
        )
        if result.status == INFEASIBLE:
            return math.inf, np.zeros(0)
        if result.status != SOLVED:
            return 0.0, np.zeros(0)
        over = self.laws[some] @ result.x - self.low[some]
        is_chain = self.laws[some] @ self.aim > 0
        self.idle[some] = np.where(is_chain & (over > BINDS), self.idle[some] + 1, 0)
        return float(result.fun), np.asarray(result.x)

    def _collect(self) -> None:
        """The rows that the program has by now."""
        new = slice(len(self.laws), None)
        if self.program.rows[new]:
            self.laws = np.concatenate([self.laws, np.array(self.program.rows[new])])
            self.low, self.high = np.array(self.program.low), np.array(self.program.high)
            self.idle = np.append(self.idle, np.zeros(len(self.laws) - len(self.idle), dtype=np.int64))

    def _takes_in(self, columns: Array) -> bool:
        """Whether chains that were left out are longer than the step of a solution: they are in again."""
        broken = (self.idle >= RESTED) & (self.laws @ columns < self.low - BROKEN)
        self.idle[broken] = 0
        return bool(broken.any())

    def _cut(self, columns: Array) -> None:
        """Adds the longest chains of stages between a solution's and the best so far, or else of its own, that it breaks."""
        taken = columns[: len(self.program.kind)]
        points = [(self.inside + taken) / 2] if len(self.inside) else []
        for point in (*points, taken):
            time_s = self.program.cut_at(point, self.goal_s, CHAINS)
            if time_s < self.inside_s:
                self.inside, self.inside_s = point, time_s
            new = len(self.laws)
            self._collect()
            if (self.laws[new:] @ columns < self.low[new:] - BROKEN).any():
                break

"""The program of :mod:`autopar.search.linear` where each rank has a whole number of blocks of the group.

Blocks in parts spread evenly, so that of 58 on 32 ranks each has 1.8; of whole ones some rank has two. Which ranks is branched
on by the solver, which is stopped after a few branches: the least that those which are left may take is a bound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from autopar.search.linear import LinearProgram

NODES = 40
"""Branches of one program."""

ROUNDS = 6
"""Times that chains are added."""

NEAR = 0.97
"""Of the time that is aimed at: bounds below are left, as whole blocks raise them by a few percent at most."""

INFEASIBLE = 2
"""What scipy calls a program without a solution."""

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
    from scipy.optimize import Bounds, LinearConstraint, milp

    if not NEAR <= found < 1.0 or not program.grouped.any():
        return found
    ranks, size, columns = program.pp, len(aim), len(program.kind)
    none = np.zeros(ranks)
    counts = np.zeros((ranks, size + ranks))
    for rank in range(ranks):
        counts[rank, :columns] = (program.rank == rank) * program.grouped
        counts[rank, size + rank] = -1.0
    most = np.concatenate([upper, np.full(ranks, np.inf)])
    for _ in range(ROUNDS):
        rows = np.hstack([np.array(program.rows), np.zeros((len(program.rows), ranks))])
        result = milp(
            np.concatenate([aim, none]),
            bounds=Bounds(np.zeros(len(most)), most),
            constraints=LinearConstraint(np.vstack([rows, counts]), [*program.low, *none], [*program.high, *none]),
            integrality=np.concatenate([np.zeros(size), np.ones(ranks)]),
            options={"node_limit": NODES},
        )
        if result.status == INFEASIBLE:
            return 1.0
        if result.mip_dual_bound is not None:
            found = max(found, result.mip_dual_bound * (1 - slack))
        if result.x is None or found >= 1.0:
            break
        program.cut_at(result.x[:columns], goal_s)
    return found

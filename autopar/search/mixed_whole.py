"""The program of :mod:`autopar.search.mixed_chains` where each stage has a whole number of blocks of the group.

Blocks in parts spread evenly; of whole ones a slow device that has time for 2.6 takes two or three. With as many blocks n of
the group on a stage, of which x recompute, every chain of actions takes a number of seconds that is linear in n and x, and is
no longer than the step; what a rank keeps is linear in them and has to fit; n are whole numbers that add up to all blocks. A
step of less than the goal would be a solution with all chains below it. The solver branches on n: where it finds that there
is no solution, no cut takes less than the goal. Left after some branches, its least open branch is a bound.

What is relaxed: x is not whole, and few of the chains are known. What solutions there are is given back to be simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from autopar.search.bound_rows import Array
from autopar.search.mixed_bounds import MixedRow
from autopar.search.mixed_chains import GIB, Chain, Stages, side_by_side

NEAR = 0.92
"""Of the time that is aimed at: bounds below are left, as whole blocks raise them by some percent at most."""

NODES = 300
"""Branches of one program."""

ROUNDS = 6
"""Times that a chain is added."""

MOST_STAGES = 64

SLACK = 1e-5
"""Of seconds and bytes: the solver's tolerances are below."""

INFEASIBLE = 2
"""What scipy calls a program without a solution."""


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
    stages, chains = Stages(row), list(chains)
    for _ in range(ROUNDS):
        found, blocks, again = _solved(stages, chains, goal_s)
        known_s = min(max(known_s, found), goal_s)
        if blocks is None or known_s >= goal_s:
            break
        time_s, longest = stages.longest(row.ranks[0].schedule, blocks, again)
        if time_s <= max(known_s, found) * (1 + SLACK):
            break
        chains.append(longest)
    return known_s


def _solved(stages: Stages, chains: Sequence[Chain], goal_s: float) -> tuple[float, Array | None, Array]:
    """A bound, and the blocks of a cut and those that recompute; none where there is no cut, or it is not known."""
    from scipy.optimize import Bounds, LinearConstraint, milp  # as large to import as a search is long

    n, pp = len(stages.rank), stages.pp
    block, again, fixed = stages.each_s(side_by_side(chains))
    own = (stages.rank == np.arange(pp)[:, None]).astype(float)
    total = np.concatenate([np.ones(n), np.zeros(n + 1)])[None]
    laws = np.vstack([
        np.hstack([block / goal_s, again / goal_s, np.full((len(chains), 1), -1.0)]),
        np.hstack([own * stages.bytes / GIB, -own * stages.freed / GIB, np.zeros((pp, 1))]),
        np.hstack([-np.eye(n), np.eye(n), np.zeros((n, 1))]),
        total,
    ])  # fmt: skip
    room = stages.room / GIB
    most = np.concatenate([-fixed / goal_s, room + SLACK * np.abs(room), np.zeros(n), [stages.count]])
    least = np.full(len(most), -np.inf)
    least[-1] = stages.count
    low, high = np.zeros(2 * n + 1), np.full(2 * n + 1, float(stages.count))
    low[:n], high[-1] = np.ceil(stages.least), 1 + SLACK
    aim = np.zeros(2 * n + 1)
    aim[-1] = 1.0
    result = milp(
        aim,
        bounds=Bounds(low, high),
        constraints=LinearConstraint(laws, least, most),
        integrality=np.concatenate([np.ones(n), np.zeros(n + 1)]),
        options={"node_limit": NODES},
    )
    if result.status == INFEASIBLE:
        return goal_s, None, np.zeros(n)
    found = result.mip_dual_bound
    bound_s = found * (1 - SLACK) * goal_s if found is not None and math.isfinite(found) else 0.0
    if result.x is None:
        return bound_s, None, np.zeros(n)
    return bound_s, np.round(result.x[:n]), result.x[n : 2 * n]

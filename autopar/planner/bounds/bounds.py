"""Lower bounds on the step time of candidates, for many of them at once.

A plan puts consecutive blocks on the stages of pipeline ranks. Whatever the cut and whichever blocks recompute, three
chains of actions follow each other for each rank r that holds the blocks K_r. With F, B the forward and the backward of a
micro-batch, G what the first forward takes longer because parameters are gathered, m micro-batches:

1. the forwards of the first micro-batch on the stages before the rank's first one, all work of K_r, what follows on the
   rank once a step (optimizer, exposed reductions);
2. the same until the rank's last backward, the last micro-batch's backwards on the stages before, what follows on rank 0;
3. the first micro-batch's forwards on *all* stages and its backwards on those after the rank's last one; then the rank's
   first backward begins: all its backwards and the forwards that it has not done by then, and from there as 2.

What K_r keeps for the micro-batches in flight, less what it recomputes, has to fit beside its parameters. A step time T is
*possible* if ranks can take all blocks under these laws. :func:`bounds` finds the smallest possible T by bisection, with
two relaxations: only the largest group of equal blocks is cut (the first and the last block stay where they must be,
others are left out), and a block may be recomputed in part. From the last rank to the first each takes as many blocks as
it can: the fewer are left, the less stands before the ranks that follow, so taking the most is never wrong. (In 3 what
stands before and after a rank of one stage is all that the rank does not hold, wherever it is.)

A second bound has all blocks but neither memory nor whole blocks (:func:`flow_s`). The larger one counts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.bound_columns import Columns, Ranks
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.flow import flow_s

Array = NDArray[np.float64]

STEPS = 60
"""Times at most that an interval is cut into parts, or doubled. Its lower end is returned, so that the bound stays one."""

SIDE_BY_SIDE = 192
"""Times that are tried at once, of all rows together, where an interval is cut into more than two parts."""

MAX_PARTS = 15

PRECISION = 1e-4
"""Of a bound, at which it is taken as it is."""

TRIES = 3
"""Times that a block is taken off a rank on which whole blocks do not fit, where parts do."""


def bounds(
    rows: Sequence[Row], at_most_s: float = np.inf, *, precision: float = PRECISION, settles: bool = False
) -> Array:
    """For each row the step time, in seconds, below which no plan exists; infinite where none fits in memory.

    Args:
        at_most_s: what is not possible in this time is not looked at more closely: it is then the bound, or infinity.
        precision: of a bound, at which it is taken as it is.
        settles: what the first rank does once a step is sought for each time until it is no more than was assumed. Else it is
            that of times looked at before, which are others in other company: bounds are then no more than these.
    """
    if not rows:
        return np.zeros(0)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        columns = Columns(rows)
    low = np.array([flow_s(row, beside) for row, beside in zip(rows, columns.around, strict=True)])
    found = np.where(_fits(columns), low, np.inf)
    asked = np.flatnonzero(np.isfinite(found) & (low < at_most_s))
    low, once_s = low[asked], columns.once_s[asked]
    high = low * 2 if np.isinf(at_most_s) else np.full(len(low), at_most_s)
    is_known = np.zeros(len(low), dtype=bool)  # whether the upper end is possible
    for step in range(STEPS):
        if not len(asked):
            break
        # most rows are settled by the two ends; where the upper one is possible, it is known what is so below it
        parts = int(np.clip(SIDE_BY_SIDE // len(asked), 2, MAX_PARTS)) if step else 1
        points = low[:, None] + (high - low)[:, None] * (np.arange(parts + 1) / parts)
        points[:, -1] = high
        tested = slice(min(step, 1), parts + (not is_known.all()))  # the lower end is known after the first step
        is_possible, once = _at_points(columns, asked, points[:, tested], once_s, settles)
        place = np.where(is_possible.any(axis=1), is_possible.argmax(axis=1) + min(step, 1), parts + 1)
        place = np.where(is_known, np.minimum(place, parts), place)
        one = np.arange(len(asked))
        is_above, is_low = place > parts, place == 0
        inner = np.clip(place, 1, parts)
        tests = np.clip(inner - min(step, 1), 0, once.shape[1] - 1)
        once_s = np.where(is_possible[one, tests], once[one, tests], once_s)
        low = np.where(is_above, high, np.where(is_low, low, points[one, inner - 1]))
        high = np.where(is_above, high * 2, points[one, inner])
        is_known |= ~is_above
        found[asked] = low
        left = ~is_low & (high - low > precision * low)
        if np.isfinite(at_most_s):
            left &= ~is_above
        asked, low, high, once_s, is_known = asked[left], low[left], high[left], once_s[left], is_known[left]
    return found


def _at_points(
    c: Columns, rows: NDArray[np.intp], times_s: Array, once_s: Array, settles: bool
) -> tuple[NDArray[np.bool_], Array]:
    """:func:`_possible` for several times of each of these rows: [rows, times]; ``settles``: see :func:`bounds`."""
    count = times_s.shape[1]
    ranks, before_s = c.only(np.repeat(rows, count)), np.repeat(once_s, count)
    found, once = _possible(ranks, times_s.reshape(-1), before_s)
    while settles and bool((found & (once > before_s)).any()):  # by a block more of the first rank each time
        before_s = once
        found, once = _possible(ranks, times_s.reshape(-1), before_s)
    return found.reshape(times_s.shape), once.reshape(times_s.shape)


def _fits(c: Columns) -> NDArray[np.bool_]:
    """Whether the ranks can take all blocks of the group in any time."""
    left = c.count
    fits = np.asarray((c.fits).all(axis=0))
    leanest = np.floor(c.leanest + 1e-6)
    for rank in reversed(range(c.ranks)):
        taken = np.maximum(np.minimum(leanest[rank], left - c.reserved[rank]), 0.0)
        fits &= taken >= c.least[rank]
        left = left - taken
    return fits & (left <= 0)


def _possible(c: Ranks, time_s: Array, once_s: Array) -> tuple[NDArray[np.bool_], Array]:
    """Whether the ranks can take all blocks of the group in ``time_s``.

    Args:
        once_s: what the first rank does at least once a step, in plans that take no longer.

    Returns:
        Beside the answer ``once_s`` of plans that take no longer than ``time_s``: in less time other ranks take fewer
        blocks, so that the first one has more.
    """
    left, least = c.count, c.count
    fits = np.ones(len(time_s), dtype=bool)
    chains = np.stack([time_s, time_s - once_s, time_s - once_s]) - c.chain_fixed_s
    for rank in reversed(range(c.ranks)):
        budget = chains[rank] - left * c.chain_before_s
        lines = (budget + c.room_s[rank]) / c.slope[rank]
        most = np.minimum.reduce(np.maximum(np.minimum.reduce(lines, axis=1), c.unhurried[rank]), axis=0)
        most = np.floor(np.minimum(most, c.leanest[rank]) + 1e-6)
        taken = _whole(c, rank, np.maximum(np.minimum(most, left - c.reserved[rank]), 0.0), budget)
        fits &= (np.minimum.reduce(budget, axis=0) >= 0.0) & (taken >= c.least[rank])
        least, left = left, left - taken
        if not np.count_nonzero(fits):
            return fits, once_s
    fits &= left <= 0
    return fits, np.where(fits, np.maximum(c.first_once_s + least * c.group_once_s, once_s), once_s)


def _whole(c: Ranks, rank: int, most: Array, budget: Array) -> Array:
    """``most`` blocks, or fewer where so many cannot be: of whole blocks, those that recompute too."""
    enough, slope, whole, less = budget * (1 + 1e-9), c.chain_slope[rank], c.whole[rank], c.whole_less[rank]
    for _ in range(TRIES):
        lines = most * whole - less
        again = np.ceil(np.maximum(np.maximum(lines[0], lines[1]), 0.0))
        again_s = again * c.again_s
        if c.has_some:  # what these do not free, others free at the least seconds
            again_s = np.maximum(again_s, np.maximum(lines[2], lines[3]) + again * c.over_s)
        late = (again_s > np.minimum.reduce(enough - most * slope, axis=0)) & (most > 0.0)
        if not np.count_nonzero(late):
            break
        most = most - late
    return most

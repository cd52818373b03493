"""The feasibility relaxation: can ranks take all blocks in a step time T?

Whatever the cut and whichever blocks recompute, four chains of actions follow each other for each rank r that holds the blocks K_r.
With F, B the forward and the backward of a micro-batch, m micro-batches, h those that the rank holds when its first backward begins:

1. the forwards of the first micro-batch on the stages before the rank's first one, all work of K_r, what follows on the
   rank once a step (optimizer, exposed reductions);
2. the same until the rank's last backward, the last micro-batch's backwards on the stages before, what follows on rank 0;
3. a micro-batch's forwards on *all* stages and its backwards on those after the rank's last one; then the rank's
   first backward begins: all its backwards and the m - h forwards that it has not done by then, and from there as 2. It is
   the last micro-batch whose forward the last stage has done before its first backward: the first one, or all m of them (GPipe),
   whose forwards the rank then does before it goes on;
4. the same until the rank's own last backward, and what follows on the rank.

What K_r keeps for the h micro-batches, in the modes of recompute that are taken, has to fit in its memory, and so has what the
optimizer's step has in passing when they are gone. At any price y of a byte
(:func:`autopar.planner.bounds.columns.line_costs`) that gives laws that are linear in K_r. A time T is *possible* if ranks can take all
blocks under these laws. The bound is the largest T of a grid, anchored at the work relaxation, that is not possible: a
function of the instance alone, and up to a goal the same whatever the goal is.

With one stage a rank, blocks are taken in order, whole: from the last rank to the first each takes as many as it can, which may
be none: the one block that is next may be too long for this rank alone, and fit on an earlier one. The fewer are left, the less
stands before the ranks that follow, so taking the most is never wrong. With virtual stages a rank's blocks are anywhere: each takes the most of them, the most of the largest group of equal ones, and the most of their work, the cheapest ones first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.columns import CHAINS, Columns, lean_costs, line_costs, side_by_side
from autopar.planner.bounds.instance import Array, PipelineInstance
from autopar.planner.bounds.whole_recompute import SLACK, WholeRecompute, between

PRECISION = 5e-4
"""The ratio of a bound to the next one of the grid, less one."""

FARTHEST = 16_384
"""Steps of the grid from the work relaxation, beyond which a time is not sought: some thousand times the work."""

STAGES = 1024
"""Of all instances and times that are tried at once, where more than one time of each is."""

TRIES = 3
"""Blocks that are taken off a rank at most, where whole ones recompute longer than there is time."""


def feasible_bounds(
    instances: Sequence[PipelineInstance], goal_s: float = np.inf, *, precision: float = PRECISION, whole: bool = False
) -> Array:
    """For each instance the step time below which no plan exists, at most ``goal_s``; infinite where none fits in memory.

    Args:
        precision: the ratio of a bound to the next one of the grid, less one.
        whole: with one stage a rank too, blocks recompute whole or not at all.
    """
    found = np.zeros(len(instances))
    for places, columns in side_by_side(instances):
        test = _test(columns)
        if whole and isinstance(test, _InOrder):
            test.recompute_whole()
        at_once = STAGES // (columns.active.shape[1] * columns.v)
        found[places] = _least(columns.work_s(), test.possible, goal_s, float(np.log1p(precision)), at_once)
    return found


def excluded(instances: Sequence[PipelineInstance], goal_s: float) -> NDArray[np.bool_]:
    """Whether :func:`feasible_bounds` of the instances, and of all with higher floors, come to a goal."""
    found = np.zeros(len(instances), dtype=bool)
    for places, columns in side_by_side(instances):
        every = np.arange(len(places))
        found[places] = ~_test(columns).possible(every, np.full(len(every), goal_s * (1 + PRECISION)))
    return found


def _test(columns: Columns) -> _InOrder | _InAnyOrder:
    return _InOrder(columns) if columns.v == 1 else _InAnyOrder(columns)


def _least(
    low: Array,
    possible: Callable[[NDArray[np.intp], Array], NDArray[np.bool_]],
    goal_s: float,
    step: float,
    at_once: int,
) -> Array:
    """The largest time of each row's grid that is not possible, at most ``goal_s``; ``step``: of the logarithms of its times; ``at_once``: times that are tried."""
    every = np.arange(len(low))
    found = low.copy()
    if np.isinf(goal_s):
        found[~possible(every, np.full(len(low), np.inf))] = np.inf
    # the grid grows from the work relaxation by factors: where that is zero (measured parts may be quicker than any share) it stays
    open_ = every[np.isfinite(found) & (low < goal_s) & (low > 0.0)]
    # places on the grid: ``least`` is not possible (-1: the work relaxation itself), ``most`` is, or is at the goal
    ends = np.full(len(low), FARTHEST)
    if np.isfinite(goal_s):
        with np.errstate(divide="ignore", invalid="ignore"):
            far = np.ceil(np.log(goal_s / low) / step)
        ends = np.clip(np.nan_to_num(far, nan=0.0, posinf=FARTHEST), 0, FARTHEST).astype(np.int64)
    least, most, is_known = np.full(len(low), -1), ends, np.zeros(len(low), dtype=bool)
    # most are excluded by the goal, or possible soon
    shares = np.array([1.0]) if np.isfinite(goal_s) else 2.0 ** -np.arange(10.0)[::-1]
    while len(open_):
        width = most[open_] - least[open_]
        points = least[open_][:, None] + np.maximum(np.ceil(width[:, None] * shares), 1).astype(np.int64)
        points = np.minimum(points, most[open_][:, None])
        times = low[open_][:, None] * np.exp(step * points)
        good = possible(np.repeat(open_, points.shape[1]), times.reshape(-1)).reshape(points.shape)
        least[open_] = np.maximum(least[open_], np.where(good, -1, points).max(axis=1))
        most[open_] = np.minimum(most[open_], np.where(good, points, FARTHEST).min(axis=1))
        is_known[open_] |= good.any(axis=1)
        if np.isfinite(goal_s):
            found[open_[~is_known[open_]]] = goal_s
        open_ = open_[is_known[open_] & (most[open_] - least[open_] > 1)]
        parts = int(np.clip(at_once // max(len(open_), 1), 2, 24))
        shares = np.arange(1, parts) / parts
    is_open = is_known & (least >= 0)
    found[is_open] = (low * np.exp(step * least))[is_open]
    return np.where(np.isfinite(found), np.minimum(found, goal_s), found)


class _Laws:
    """The laws of ranks: of each line what blocks add [i, r, v, l, k], and what the time has to be without any [i, r, l].

    The last lines are of memory alone, whatever the time is: when the rank's first backward begins, and while the optimizer steps,
    where that may be more.
    """

    def __init__(self, c: Columns) -> None:
        self.c, v = c, c.virtual[:, None]
        m, prices = c.m[:, None], c.prices()
        room_s = prices * c.room_bytes[:, :, None]
        sends, backs = c.before(c.sends_s), c.before(c.backs_s)
        forward_s, backward_s = c.stage_forward_s, c.stage_backward_s
        place = np.arange(c.active.shape[1])[None]
        start_s = sends + c.before(forward_s) + place * c.first_s[:, None]
        end_s = backs + c.before(backward_s)
        own_s = v * m * (forward_s + backward_s) + v * c.first_s[:, None]
        is_first = c.turns == 1.0  # that goes through all stages: it is the one that waits for their gathers
        all_s = np.where(
            is_first, c.least_forward_s @ c.counts + c.virtual * c.pp * c.first_s, c.plain_forward_s @ c.counts
        )
        all_s = all_s + c.total(c.sends_s) * c.virtual - c.total(c.sends_s * c.is_last)
        all_s = all_s + c.total(c.backs_s * ~c.is_last) + c.virtual * c.total(forward_s)
        third = all_s[:, None] + c.total(backward_s)[:, None] - backward_s + v * m * backward_s
        third = third + (c.others * c.has_stage[:, None]).sum(axis=2) * forward_s
        ties_s = c.tie_s[:, None] * (c.is_first | c.is_last)
        times = (start_s + own_s + ties_s, start_s + own_s + end_s, third, third - end_s + ties_s)
        costs, peak = line_costs(c, prices)
        peaks = self._peaks(peak)
        lean, lean_peak = lean_costs(c)
        fixed = [time_s[:, :, None] - room_s + peaks for time_s in times]
        memory, rooms = [lean], [self._peaks(lean_peak) - c.room_bytes[:, :, None]]
        stepped = np.broadcast_to(c.stepped_bytes[:, :, None, None], lean.shape)
        if (stepped > lean).any():
            memory, rooms = [lean, stepped], [*rooms, -c.limit_bytes[:, :, None]]
        self.costs = np.concatenate([*costs, *memory], axis=3)
        self.fixed = np.concatenate([*fixed, *rooms], axis=2)
        self.num_prices = prices.shape[2]
        self.is_timed = np.arange(self.costs.shape[3]) < CHAINS * self.num_prices

    def _peaks(self, peaks: Array) -> Array:
        """What is in passing when the last block of a stage is at its peak, at the least of all stages of a rank [i, r, l]."""
        may_end = self.c.may_end()[:, :, :, None]
        every = [np.where(may_end[..., k], peaks[..., k], np.inf) for k in range(peaks.shape[4])]
        least = np.minimum.reduce(every)
        found: Array = np.where(self.c.has_stage[:, None, :, None], least, -np.inf).max(axis=2)
        return found

    def line(self, chain: int) -> slice:
        """The lines of a chain, from 0."""
        return slice(chain * self.num_prices, (chain + 1) * self.num_prices)


class _InOrder:
    """One stage a rank: consecutive blocks, as runs of equal ones."""

    def __init__(self, c: Columns) -> None:
        self.c, laws = c, _Laws(c)
        self.again_s = np.zeros((0, 0, 0))
        """Seconds that so many blocks recompute at least if they do so whole [i, blocks, r]; none: they may in part."""
        self.again_in_run_s: dict[int, Array] = {}
        """The same of the blocks of one long run, where there are several kinds."""
        self.laws, costs = laws, laws.costs[:, :, 0]  # [i, r, l, k]
        before = np.zeros(costs.shape)
        before[:, :, laws.line(0)] = c.least_forward_s[:, None, None]
        before[:, :, laws.line(1)] = (c.least_forward_s + c.least_backward_s)[:, None, None]
        before[:, :, laws.line(3)] = -c.least_backward_s[:, None, None]
        # the backwards of all blocks, once: those of the rank's own are taken off its lines
        for chain in (2, 3):
            laws.fixed[:, :, laws.line(chain)] += (c.least_backward_s @ c.counts)[:, None, None]
        before = np.minimum(before, costs)  # a block that a rank takes costs no less than before it
        kinds, sizes = [kind for kind, _ in c.runs], np.array([count for _, count in c.runs], dtype=float)
        self.sizes, self.ends = sizes, np.concatenate([[0.0], np.cumsum(sizes)])
        zeros = np.zeros((*costs.shape[:3], 1))
        self.slope = costs[..., kinds]
        self.cost = np.concatenate([zeros, np.cumsum(self.slope * sizes, axis=3)], axis=3)
        self.less = self.slope - before[..., kinds]
        """What a block of each run costs less if it stands before a rank [i, r, l, run], and for the first ones of all up to a run's."""
        self.saved = np.concatenate([zeros, np.cumsum(self.less * sizes, axis=3)], axis=3)
        once = c.once_s[:, 0][:, kinds]
        self.once_slope, self.once = once, np.concatenate([zeros[:, 0, 0], np.cumsum(once * sizes, axis=1)], axis=1)

    def recompute_whole(self) -> None:
        """From now on blocks recompute whole or not at all."""
        c, most = self.c, int(self.ends[-1])
        if most <= 2:  # nothing stands between the first block and the last one
            return
        kinds = [k for k in range(len(c.counts)) if c.counts[k] - (k == c.first) - (k == c.last) > 0]
        self.again_s = self._again_s(kinds)
        long_runs = [run for run, (kind, size) in enumerate(c.runs) if size > 1 and len(kinds) > 1]
        self.again_in_run_s = {run: self._again_s([c.runs[run][0]]) for run in long_runs}

    def _again_s(self, kinds: Sequence[int]) -> Array:
        """Seconds that so many blocks of these kinds recompute at least [i, blocks, r]."""
        c, most = self.c, int(self.ends[-1])
        rows, count = np.divmod(np.arange(len(c.m) * (most + 1)), most + 1)
        made = WholeRecompute(c, np.full((len(c.m), c.v), float(most)), kinds)
        every = made.least_s(rows, np.repeat(count[:, None] * 1.0, c.active.shape[1], axis=1))
        again_s: Array = (c.m[rows][:, None] * every).reshape(len(c.m), most + 1, -1)
        return again_s

    def _whole(self, rows: NDArray[np.intp], rank: int, left: Array, taken: Array, over: Array) -> Array:
        """Of how many blocks that are left a rank takes those behind, or one or a few more where it has to recompute whole ones."""
        lines = [chain * self.laws.num_prices for chain in range(CHAINS)]
        for _ in range(TRIES):
            run = np.clip(np.searchsorted(self.ends, taken, side="right") - 1, 0, len(self.sizes) - 1)
            at = rows[:, None], rank, lines, run[:, None]
            spared = self.saved[at] + (taken - self.ends[run])[:, None] * self.less[at]
            again_s = self._recomputed_s(rows, rank, left, taken)
            is_never = np.isinf(again_s)
            again_s = np.where(is_never, 0.0, again_s)[:, None]
            is_late = is_never | (over[:, lines] - spared + again_s > 1e-9 * again_s).any(axis=1)
            is_late &= taken < left
            if not is_late.any():
                break
            taken = taken + is_late
        return taken

    def _recomputed_s(self, rows: NDArray[np.intp], rank: int, left: Array, taken: Array) -> Array:
        """What a rank that has the blocks from ``taken`` up to ``left`` recomputes at least: all of them, or those of one run alone."""
        end = self.ends[-1]

        def count(start: Array, stop: Array) -> NDArray[np.int64]:
            """Blocks beside the first and the last one of the model."""
            inner = np.minimum(stop, end - 1) - np.maximum(start, 1)
            found: NDArray[np.int64] = np.maximum(inner, 0).astype(np.int64)
            return found

        again_s: Array = self.again_s[rows, count(taken, left), rank]
        for run, of_run_s in self.again_in_run_s.items():
            size = count(np.maximum(taken, self.ends[run]), np.minimum(left, self.ends[run + 1]))
            again_s = np.maximum(again_s, of_run_s[rows, size, rank])
        return again_s

    def possible(self, rows: NDArray[np.intp], time_s: Array) -> NDArray[np.bool_]:
        """Whether the ranks of each of these rows can take all blocks in a time."""
        one = self._once(rows, np.ones(len(rows)))
        found, first = self._takes(rows, time_s, one)
        again = np.flatnonzero(found & np.isfinite(time_s))
        if len(again):  # the first rank has what the others leave: what it does once follows every chain
            once_s = self._once(rows[again], first[again])
            found[again] = self._takes(rows[again], time_s[again], once_s)[0]
        return found

    def _once(self, rows: NDArray[np.intp], count: Array) -> Array:
        """What the first rank does once a step with so many blocks at least."""
        run = np.searchsorted(self.ends, count) - 1
        own: Array = self.once[rows, run] + (count - self.ends[run]) * self.once_slope[rows, run]
        own += self.c.tie_s[rows]
        return own

    def _takes(self, rows: NDArray[np.intp], time_s: Array, once_s: Array) -> tuple[NDArray[np.bool_], Array]:
        """Whether all blocks are taken, and how many are left for the first rank."""
        c, laws, last = self.c, self.laws, len(self.sizes)
        left, first = np.full(len(rows), self.ends[-1]), np.ones(len(rows))
        fits = np.ones(len(rows), dtype=bool)
        time = np.where(laws.is_timed, time_s[:, None] * (1 + 1e-9), 0.0)
        time[:, laws.num_prices : 3 * laws.num_prices] -= once_s[:, None]
        place_of, lines = rows[:, None], np.arange(time.shape[1])
        for rank in reversed(range(c.active.shape[1])):
            is_here = c.active[rows, rank]
            run = np.searchsorted(self.ends, left) - 1
            cost = self.cost[rows, rank, :, run] + (left - self.ends[run])[:, None] * self.slope[rows, rank, :, run]
            over = cost + laws.fixed[rows, rank] - time  # what the blocks before have to spare this rank
            place = (self.saved[rows, rank] < over[..., None]).sum(axis=2)  # breakpoints at which it takes too much
            inner = np.minimum(np.maximum(place, 1), last) - 1
            less, base = self.less[place_of, rank, lines, inner], self.saved[place_of, rank, lines, inner]
            with np.errstate(divide="ignore", invalid="ignore"):
                own = self.ends[inner] + np.ceil((over - base) / less - SLACK)
            own[place == 0] = 0.0
            own[place > last] = np.inf
            taken = np.maximum(own.max(axis=1), rank)
            if self.again_s.size:
                taken = np.where(
                    np.isfinite(taken), self._whole(rows, rank, left, np.minimum(taken, left), over), taken
                )
            fits &= ~is_here | (taken <= left)
            if rank == 0:
                first = np.where(is_here, left, first)
            left = np.where(is_here, np.minimum(taken, left), left)
            if not fits.any():
                return fits, first
        return fits & (left <= 0), first


class _InAnyOrder:
    """Several stages a rank: any blocks of each group of equal ones; the first and the last block stand where they have to."""

    def __init__(self, c: Columns) -> None:
        self.c, laws = c, _Laws(c)
        self.laws = laws
        inner = c.counts.copy()
        inner[c.first] -= 1
        inner[c.last] -= 1
        kinds = [own for group in c.groups if (own := [k for k in group if inner[k] > 0])]
        counts = np.array([inner[own].sum() for own in kinds])
        large, stages = int(counts.argmax()), c.pp * c.virtual
        # blocks of the largest group that every stage has, as the others cannot hold them
        each = np.where(c.most < counts[large], np.maximum(counts[large] - c.most * (stages - 1), 0.0), 0.0)
        fixed = laws.fixed
        fixed += np.where(c.is_first[:, :, None], laws.costs[:, :, 0, :, c.first], 0.0)
        fixed += np.where(c.is_last[:, :, None], laws.costs[:, :, -1, :, c.last], 0.0)
        self._before(kinds, large, each)
        costs = np.stack([laws.costs[..., own].min(axis=4) for own in kinds], axis=4)  # [i, r, v, l, group]
        costs = np.maximum(costs, 1e-30)
        most = counts * c.has_stage[:, :, None]
        most[:, :, large] = np.minimum(most[:, :, large], np.where(c.has_stage, c.most[:, None], 0.0))
        self.needed = c.virtual[:, None] - c.is_first * 1.0 - c.is_last
        every = np.ones((len(c.m), len(counts)))
        measures = [
            (slice(None), every)
        ]  # whole blocks of all groups; of the largest one, which others may not stand for; work
        if len(counts) > 1:
            work = np.stack([c.least_s[:, own].min(axis=1) for own in kinds], axis=1)
            measures += [(slice(large, large + 1), every), (slice(None), work)]
        self.whole = WholeRecompute(c, most.sum(axis=2), [k for own in kinds for k in own])
        self.tables = [self._table(costs[..., own], most[..., own], value[:, own]) for own, value in measures]
        self.totals = [(value * counts)[:, own].sum(axis=1) for own, value in measures]

    def _before(self, kinds: Sequence[Sequence[int]], large: int, each: Array) -> None:
        """Adds to the chains what stands before and after a rank's stages at the least, and what the first rank does once."""
        c, laws = self.c, self.laws
        some = [k for own in kinds for k in own]

        def stages(values: Array, count: Array, end: int) -> Array:
            """The least of so many stages at an end of the model, whose block of that end is on one of them."""
            some_s, large_s = values[:, some].min(axis=1), values[:, kinds[large]].min(axis=1)
            others = np.maximum(np.maximum(count - 1, 0) * some_s[:, None], count * (each * large_s)[:, None])
            found: Array = (count > 0) * values[:, end][:, None] + others
            return found

        before = np.broadcast_to(np.arange(float(c.active.shape[1])), c.active.shape)
        before_s = stages(c.least_forward_s, before, c.first)
        end_s = stages(c.least_backward_s, before, c.first)
        after_s = stages(c.least_backward_s, np.maximum(c.pp[:, None] - 1 - before, 0), c.last)
        once_s = c.once_s[:, 0, c.first] + c.tie_s
        once_s = once_s + (c.virtual - 1) * np.maximum(each, 1.0) * c.once_s[:, 0][:, some].min(axis=1)
        laws.fixed[:, :, laws.line(0)] += before_s[:, :, None]
        laws.fixed[:, :, laws.line(1)] += (before_s + end_s + once_s[:, None])[:, :, None]
        laws.fixed[:, :, laws.line(2)] += (after_s + end_s + once_s[:, None])[:, :, None]
        laws.fixed[:, :, laws.line(3)] += after_s[:, :, None]

    def _table(self, costs: Array, most: Array, value: Array) -> tuple[Array, Array, Array]:
        """The cheapest blocks first, on the stages where they cost least: their cost and their value together [i, r, l, places]."""
        i, r, v, lines, groups = costs.shape
        cost = np.moveaxis(costs, 3, 2).reshape(i, r, lines, v * groups)
        worth = np.broadcast_to(value[:, None], (i, v, groups)).reshape(i, 1, 1, v * groups)
        size = most.reshape(i, 1, 1, v * groups)
        with np.errstate(divide="ignore"):
            order = np.argsort(cost / worth, axis=3)
        spent = np.take_along_axis(cost * size, order, axis=3)
        had = np.take_along_axis(np.broadcast_to(worth * size, cost.shape), order, axis=3)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.nan_to_num(had / spent)
        sums = np.zeros((3, i, r, lines, v * groups + 1))
        np.cumsum(spent, axis=3, out=sums[0, ..., 1:])
        np.cumsum(had, axis=3, out=sums[1, ..., 1:])
        sums[2, ..., :-1] = rate
        return sums[0], sums[1], sums[2]

    def possible(self, rows: NDArray[np.intp], time_s: Array) -> NDArray[np.bool_]:
        """Whether the ranks of each of these rows can take all blocks in a time."""
        c, laws = self.c, self.laws
        is_here = c.active[rows]
        time = np.where(laws.is_timed, time_s[:, None, None] * (1 + 1e-9), 0.0)
        budget = np.where(is_here[:, :, None], time - laws.fixed[rows], 0.0)
        fits: NDArray[np.bool_] = np.asarray((budget >= 0.0).all(axis=(1, 2)))
        at = rows[:, None, None], np.arange(budget.shape[1])[:, None], np.arange(budget.shape[2])
        for number, ((spent, had, rate), total) in enumerate(zip(self.tables, self.totals, strict=True)):
            place = np.maximum((spent[rows] <= budget[..., None]).sum(axis=3) - 1, 0)
            begun, done, more = (x[*at, place] for x in (spent, had, rate))
            with np.errstate(invalid="ignore"):
                value = np.where(more > 0, done + (budget - begun) * more, done).min(axis=2)
            if number < 2:
                value = np.floor(value + SLACK)
            value = np.where(is_here, value, 0.0)
            fits &= value.sum(axis=1) >= total[rows] * (1 - 1e-9)
            if number == 0:
                fits &= ((value >= self.needed[rows]) | ~is_here).all(axis=1)
                blocks = value
        value = blocks
        # no rank has more than a few blocks taken off
        is_near = value.sum(axis=1) - TRIES * c.pp[rows] < self.totals[0][rows]
        left = np.flatnonzero(fits & is_near & np.isfinite(time_s))
        if len(left):
            some = self._whole(rows[left], value[left], budget[left])
            fits[left] = some.sum(axis=1) >= self.totals[0][rows[left]] * (1 - 1e-9)
        return fits

    def _whole(self, rows: NDArray[np.intp], value: Array, budget: Array) -> Array:
        """So many blocks, or fewer where those that recompute have to do so whole."""
        lines = [chain * self.laws.num_prices for chain in range(CHAINS)]  # those of time alone
        spent, had, _ = (table[:, :, lines][rows] for table in self.tables[0])
        for _ in range(TRIES):
            again_s = self.c.m[rows][:, None] * self.whole.least_s(rows, value)
            cost = between(value[:, :, None, None], had, spent)[..., 0]
            is_late = (cost + again_s[:, :, None] > budget[:, :, lines]).any(axis=2)
            is_late &= self.c.active[rows] & (value > 0)
            if not is_late.any():
                break
            value = value - is_late
        return value

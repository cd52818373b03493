"""The feasibility relaxation: can the ranks take all blocks within a step time T?

For every cut and every choice of recompute, each rank r with the blocks K_r has four chains of actions that no step can be shorter than.
Let the pipeline have m micro-batches, h of which the rank holds when its first backward begins.

1. The forwards of the first micro-batch on the stages before the rank's first one; all work of K_r; the rank's work once a step (optimizer,
   exposed reductions).
2. As 1 up to the rank's last backward; then the last micro-batch's backwards on the stages before, and rank 0's work once a step.
3. One micro-batch's forwards on *all* stages and its backwards on those after the rank's last one; then the rank's first backward begins:
   all its backwards and the m - h forwards left; then as 2. The micro-batch is the last one whose forward the last stage has done before
   its first backward: the first of all, or the last (GPipe), and then the rank's forwards of all earlier ones count too.
4. As 3 up to the rank's last backward, then the rank's work once a step.

Two constraints are of memory alone: what K_r keeps for h micro-batches, and what the optimizer step needs. At any price of a byte
(:func:`autopar.planner.bounds.columns.line_costs`) all are linear in K_r. T is *possible* if ranks can take all blocks under these
constraints. The bound is the largest T of a grid, anchored at the work relaxation, that is not possible: a function of the instance, which
up to the goal does not depend on the goal.

With one stage a rank, whole blocks are taken in order, from the last rank to the first. Each takes as many as it can, or none if the next
block is too long for it. This is optimal, as fewer remaining blocks mean less before the other ranks. With virtual stages a rank may take
any blocks, the cheapest ones first. The most blocks, the most blocks of the largest group and the most work that ranks can take are added
up and compared with the totals.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.columns import CHAINS, Columns, Constraints, side_by_side
from autopar.planner.bounds.instance import Array, PipelineInstance
from autopar.planner.bounds.whole_recompute import SLACK, WholeRecompute, between

PRECISION = 1e-4
"""The ratio of neighbouring times on the grid, less one."""

MAX_RATIO = 4096.0
"""Without a goal, times of more than that many times the work relaxation are not searched."""

MAX_STAGES_AT_ONCE = 1024
"""The limit on stages that are tested at once, over all instances and times, where several times of each instance are tested."""

MAX_TAKEN_OFF = 3
"""The limit on blocks that are taken off a rank because recompute in whole blocks takes longer than the time allows."""


def feasible_bounds(
    instances: Sequence[PipelineInstance], goal_s: float = np.inf, *, precision: float = PRECISION, whole: bool = False
) -> Array:
    """Return for each instance a step time below which no plan exists, at most ``goal_s``; infinite where none fits in memory.

    Args:
        instances: the instances.
        goal_s: the step time from which on a bound may stop; usually that of the best plan so far.
        precision: the ratio of neighbouring times on the grid, less one.
        whole: if True, a block is in exactly one mode of recompute also where ranks have one stage each.
    """
    bounds = np.zeros(len(instances))
    for places, columns in side_by_side(instances):
        test = _test(columns)
        if whole and isinstance(test, _InOrder):
            test.use_whole_recompute()
        at_once = MAX_STAGES_AT_ONCE // (columns.active.shape[1] * columns.v)
        step = float(np.log1p(precision))
        bounds[places] = _largest_impossible(columns.work_s(), test.possible, goal_s, step, at_once)
    return bounds


def excluded(instances: Sequence[PipelineInstance], goal_s: float) -> NDArray[np.bool_]:
    """Return whether :func:`feasible_bounds` of each instance, and of any instance with higher floors, reaches the goal; one test each."""
    is_excluded = np.zeros(len(instances), dtype=bool)
    for places, columns in side_by_side(instances):
        rows = np.arange(len(places))
        is_excluded[places] = ~_test(columns).possible(rows, np.full(len(rows), goal_s * (1 + PRECISION)))
    return is_excluded


def _test(columns: Columns) -> _InOrder | _InAnyOrder:
    return _InOrder(columns) if columns.v == 1 else _InAnyOrder(columns)


def _largest_impossible(
    low: Array,
    possible: Callable[[NDArray[np.intp], Array], NDArray[np.bool_]],
    goal_s: float,
    step: float,
    at_once: int,
) -> Array:
    """Return for each row the largest time of its grid that is not possible, at most ``goal_s``.

    Args:
        low: the first time of each grid, which is a bound already.
        possible: returns whether times are possible, given the row and the time of each test.
        goal_s: the largest bound to return.
        step: the difference of the logarithms of neighbouring times.
        at_once: the number of pairs of row and time that are tested at once.
    """
    rows = np.arange(len(low))
    bounds = low.copy()
    if np.isinf(goal_s):
        bounds[~possible(rows, np.full(len(low), np.inf))] = np.inf
    # The grid grows by factors: a work relaxation of zero stays the bound (measured parts may be faster than any share).
    open_ = rows[np.isfinite(bounds) & (low < goal_s) & (low > 0.0)]
    # Positions on the grid: ``least`` is not possible (-1: ``low`` stays the bound); ``most`` is possible or reaches the goal.
    least, most, is_known = np.full(len(low), -1), np.zeros(len(low), dtype=np.int64), np.zeros(len(low), dtype=bool)
    most[open_] = np.ceil(np.log(goal_s / low[open_] if np.isfinite(goal_s) else MAX_RATIO) / step)
    # The first points, as shares of the interval: most rows are excluded at the goal, or possible early on the grid.
    shares = np.array([1.0]) if np.isfinite(goal_s) else 2.0 ** -np.arange(10.0)[::-1]
    while len(open_):
        width = most[open_] - least[open_]
        points = least[open_][:, None] + np.maximum(np.ceil(width[:, None] * shares), 1).astype(np.int64)
        points = np.minimum(points, most[open_][:, None])
        times = low[open_][:, None] * np.exp(step * points)
        is_possible = possible(np.repeat(open_, points.shape[1]), times.reshape(-1)).reshape(points.shape)
        least[open_] = np.maximum(least[open_], np.where(is_possible, -1, points).max(axis=1))
        most[open_] = np.where(is_possible, points, most[open_][:, None]).min(axis=1)
        is_known[open_] |= is_possible.any(axis=1)
        if np.isfinite(goal_s):
            bounds[open_[~is_known[open_]]] = goal_s
        open_ = open_[is_known[open_] & (most[open_] - least[open_] > 1)]
        parts = int(np.clip(at_once // max(len(open_), 1), 2, 24))
        shares = np.arange(1, parts) / parts
    is_open = is_known & (least >= 0)
    bounds[is_open] = (low * np.exp(step * least))[is_open]
    return np.where(np.isfinite(bounds), np.minimum(bounds, goal_s), bounds)


class _InOrder:
    """The test for one stage a rank: consecutive blocks, as runs of equal ones."""

    def __init__(self, c: Columns) -> None:
        self.c, constraints = c, Constraints(c)
        self.recompute_s = np.zeros((0, 0, 0))
        """Least seconds that a rank recomputes in whole blocks, by its number of blocks [i, blocks, r]; empty: blocks may do so in part."""
        self.recompute_in_run_s: dict[int, Array] = {}
        """Likewise by its number of blocks of one long run, by the index of the run, where there are several kinds."""
        self.constraints, costs = constraints, constraints.costs[:, :, 0]  # [i, r, l, k]
        before = np.zeros(costs.shape)  # what a block before the rank adds to the constraints of the rank
        before[:, :, constraints.of_chain(0)] = c.least_forward_s[:, None, None]
        before[:, :, constraints.of_chain(1)] = (c.least_forward_s + c.least_backward_s)[:, None, None]
        before[:, :, constraints.of_chain(3)] = -c.least_backward_s[:, None, None]
        # Chains 3 and 4 have the least backward of every block once; line_costs has subtracted it for the rank's blocks.
        for chain in (2, 3):
            constraints.fixed[:, :, constraints.of_chain(chain)] += (c.least_backward_s @ c.counts)[:, None, None]
        before = np.minimum(before, costs)  # a block adds no less on the rank than before it
        kinds, sizes = [kind for kind, _ in c.runs], np.array([count for _, count in c.runs], dtype=float)
        self.sizes, self.ends = sizes, np.concatenate([[0.0], np.cumsum(sizes)])
        # Runs are the first axis, along which numpy compares and adds all tests at once.
        self.cost_slope = np.moveaxis(costs[..., kinds], 3, 0).copy()
        self.cost = _sums(self.cost_slope, sizes)
        self.saved_slope = self.cost_slope - np.moveaxis(before[..., kinds], 3, 0)
        """What a block of each run saves by standing before a rank instead of on it [run, i, r, l]; ``saved`` are its sums."""
        self.saved = _sums(self.saved_slope, sizes)
        self.once_slope = c.once_s[:, 0][:, kinds].T
        self.once = _sums(self.once_slope, sizes)

    def use_whole_recompute(self) -> None:
        """Test from now on with each block in exactly one mode of recompute."""
        c, most = self.c, int(self.ends[-1])
        if most <= 2:  # there is no inner block
            return
        kinds = [k for k in range(len(c.counts)) if c.counts[k] - (k == c.first) - (k == c.last) > 0]
        self.recompute_s = self._recompute_table_s(kinds)
        long_runs = [run for run, (kind, size) in enumerate(c.runs) if size > 1 and len(kinds) > 1]
        self.recompute_in_run_s = {run: self._recompute_table_s([c.runs[run][0]]) for run in long_runs}

    def _recompute_table_s(self, kinds: Sequence[int]) -> Array:
        """Return the least seconds of a step that a rank recomputes, by its number of blocks of these kinds [i, blocks, r]."""
        c, most = self.c, int(self.ends[-1])
        rows, count = np.divmod(np.arange(len(c.m) * (most + 1)), most + 1)
        bound = WholeRecompute(c, np.full((len(c.m), c.v), float(most)), kinds)
        per_micro_batch_s = bound.least_s(rows, np.repeat(count[:, None] * 1.0, c.active.shape[1], axis=1))
        recompute_s: Array = (c.m[rows][:, None] * per_micro_batch_s).reshape(len(c.m), most + 1, -1)
        return recompute_s

    def _start_if_whole(self, rows: NDArray[np.intp], rank: int, stop: Array, start: Array, over: Array) -> Array:
        """Return ``start``, raised by up to ``MAX_TAKEN_OFF`` blocks where the rank would take too long if it recomputes whole blocks.

        Args:
            rows: the instances [n].
            rank: the pipeline rank.
            start, stop: the rank takes the blocks from ``start`` to ``stop`` [n].
            over: by how much its constraints exceed the time if it takes all blocks up to ``stop`` [n, l].
        """
        at_price_0 = [chain * self.constraints.num_prices for chain in range(CHAINS)]
        for _ in range(MAX_TAKEN_OFF):
            run = np.clip(np.searchsorted(self.ends, start, side="right") - 1, 0, len(self.sizes) - 1)
            at = run[:, None], rows[:, None], rank, at_price_0
            spared = self.saved[at] + (start - self.ends[run])[:, None] * self.saved_slope[at]
            recompute_s = self._recomputed_s(rows, rank, stop, start)
            is_never = np.isinf(recompute_s)
            recompute_s = np.where(is_never, 0.0, recompute_s)[:, None]
            is_late = is_never | (over[:, at_price_0] - spared + recompute_s > 1e-9 * recompute_s).any(axis=1)
            is_late &= start < stop
            if not is_late.any():
                break
            start = start + is_late
        return start

    def _recomputed_s(self, rows: NDArray[np.intp], rank: int, stop: Array, start: Array) -> Array:
        """Return the least seconds that a rank with the blocks ``start`` to ``stop`` recomputes: all of them, or those of one run."""
        end = self.ends[-1]

        def count(start: Array, stop: Array) -> NDArray[np.int64]:
            """Return the number of blocks without the first and the last one of the model."""
            inner = np.minimum(stop, end - 1) - np.maximum(start, 1)
            size: NDArray[np.int64] = np.maximum(inner, 0).astype(np.int64)
            return size

        recompute_s: Array = self.recompute_s[rows, count(start, stop), rank]
        for run, of_run_s in self.recompute_in_run_s.items():
            size = count(np.maximum(start, self.ends[run]), np.minimum(stop, self.ends[run + 1]))
            recompute_s = np.maximum(recompute_s, of_run_s[rows, size, rank])
        return recompute_s

    def possible(self, rows: NDArray[np.intp], time_s: Array) -> NDArray[np.bool_]:
        """Return whether the ranks of each row can take all blocks within its time."""
        least_once_s = self._once(rows, np.ones(len(rows)))
        fits, first = self._takes(rows, time_s, least_once_s)
        retested = np.flatnonzero(fits & np.isfinite(time_s))
        if len(retested):  # the first rank takes all that is left: its work once a step follows every chain
            once_s = self._once(rows[retested], first[retested])
            fits[retested] = self._takes(rows[retested], time_s[retested], once_s)[0]
        return fits

    def _once(self, rows: NDArray[np.intp], count: Array) -> Array:
        """Return the least work once a step of the first rank if it has at least so many blocks."""
        run = np.searchsorted(self.ends, count) - 1
        once_s: Array = self.once[run, rows] + (count - self.ends[run]) * self.once_slope[run, rows]
        once_s += self.c.ranks_s[rows, 0]
        return once_s

    @np.errstate(divide="ignore", invalid="ignore")
    def _takes(self, rows: NDArray[np.intp], time_s: Array, once_s: Array) -> tuple[NDArray[np.bool_], Array]:
        """Return whether ranks can take all blocks, and how many the first rank takes.

        From the last rank to the first, each takes the blocks from ``start`` to ``stop``, and ``start`` is the ``stop`` of the rank before.
        A constraint is exceeded by ``over`` if the rank takes all blocks up to ``stop``. Leaving the first ones to earlier ranks saves
        enough from some ``start`` on, which is found in the sums ``saved`` over runs and then within a run.

        Args:
            rows: the instances [n].
            time_s: the step time of each test [n].
            once_s: the work once a step of the first rank [n], with which chains 2 and 3 end.
        """
        c, constraints, last = self.c, self.constraints, len(self.sizes)
        stop, first = np.full(len(rows), self.ends[-1]), np.ones(len(rows))
        fits = np.ones(len(rows), dtype=bool)
        time = np.where(constraints.is_timed, time_s[:, None] * (1 + 1e-9), 0.0)
        time[:, constraints.num_prices : 3 * constraints.num_prices] -= once_s[:, None]
        lines = np.arange(time.shape[1])
        for rank in reversed(range(c.active.shape[1])):
            is_here = c.active[rows, rank]
            run = np.searchsorted(self.ends, stop) - 1
            at_run = run, rows, rank
            cost = self.cost[at_run] + (stop - self.ends[run])[:, None] * self.cost_slope[at_run]
            over = cost + constraints.fixed[rows, rank] - time
            num_short = (self.saved[:, rows, rank] < over).sum(axis=0)  # starts of runs that save too little
            inner = np.minimum(np.maximum(num_short, 1), last) - 1
            at = inner, rows[:, None], rank, lines
            slope, base = self.saved_slope[at], self.saved[at]
            starts = self.ends[inner] + np.ceil((over - base) / slope - SLACK)
            starts[num_short == 0] = 0.0
            starts[num_short > last] = np.inf
            start = np.maximum(starts.max(axis=1), rank)
            if self.recompute_s.size:
                start = np.where(
                    np.isfinite(start), self._start_if_whole(rows, rank, stop, np.minimum(start, stop), over), start
                )
            fits &= ~is_here | (start <= stop)
            if rank == 0:
                first = np.where(is_here, stop, first)
            stop = np.where(is_here, np.minimum(start, stop), stop)
            if not fits.any():
                return fits, first
        return fits & (stop <= 0), first


def _sums(slopes: Array, sizes: Array) -> Array:
    """Return the sums of runs of ``sizes`` blocks before each run and before the end, from what a block of each run counts [run, ...]."""
    sums = np.zeros((len(sizes) + 1, *slopes.shape[1:]))
    np.cumsum(slopes * np.expand_dims(sizes, tuple(range(1, slopes.ndim))), axis=0, out=sums[1:])
    return sums


class _InAnyOrder:
    """The test for several stages a rank: blocks of each group in any order; the first and the last block of the model on their stages.

    Attributes:
        needed: the least number of blocks of each rank besides the first and the last block of the model [i, r].
        tables: for each measure of what ranks take (blocks, blocks of the largest group, work) its table, see :meth:`_table`.
        totals: for each measure the total that the ranks must take [i].
        whole: the least recompute in whole blocks.
    """

    def __init__(self, c: Columns) -> None:
        self.c, constraints = c, Constraints(c)
        self.constraints = constraints
        inner = c.counts.copy()
        inner[c.first] -= 1
        inner[c.last] -= 1
        groups = [members for group in c.groups if (members := [k for k in group if inner[k] > 0])]
        counts = np.array([inner[members].sum() for members in groups])
        largest, stages = int(counts.argmax()), c.pp * c.virtual
        # ``each``: a stage has at least as many blocks of the largest group as the other stages cannot hold
        each = np.where(c.most < counts[largest], np.maximum(counts[largest] - c.most * (stages - 1), 0.0), 0.0)
        fixed = constraints.fixed
        fixed += np.where(c.is_first[:, :, None], constraints.costs[:, :, 0, :, c.first], 0.0)
        fixed += np.where(c.is_last[:, :, None], constraints.costs[:, :, -1, :, c.last], 0.0)
        self._add_other_stages(groups, largest, each)
        cheapest = [constraints.costs[..., members].min(axis=4) for members in groups]
        costs = np.maximum(np.stack(cheapest, axis=4), 1e-30)  # [i, r, v, l, group]
        most = counts * c.has_stage[:, :, None]
        most[:, :, largest] = np.minimum(most[:, :, largest], np.where(c.has_stage, c.most[:, None], 0.0))
        self.needed = c.virtual[:, None] - c.is_first * 1.0 - c.is_last
        ones = np.ones((len(c.m), len(counts)))
        # the groups that count and what a block of them counts: a block; a block of the largest group; its work
        measures = [(slice(None), ones)]
        if len(counts) > 1:
            work = np.stack([c.least_s[:, members].min(axis=1) for members in groups], axis=1)
            measures += [(slice(largest, largest + 1), ones), (slice(None), work)]
        self.whole = WholeRecompute(c, most.sum(axis=2), [k for members in groups for k in members])
        self.tables = [
            self._table(costs[..., members], most[..., members], value[:, members]) for members, value in measures
        ]
        self.totals = [(value * counts)[:, members].sum(axis=1) for members, value in measures]

    def _add_other_stages(self, groups: Sequence[Sequence[int]], largest: int, each: Array) -> None:
        """Add to ``fixed`` the least work on the stages before and after each rank, and the first rank's work once a step."""
        c, constraints = self.c, self.constraints
        inner = [k for members in groups for k in members]

        def over_stages(values: Array, count: Array, end: int) -> Array:
            """Return the least total of ``values`` over so many stages at one end of the model, one of which has the block of that end."""
            any_s, largest_s = values[:, inner].min(axis=1), values[:, groups[largest]].min(axis=1)
            others = np.maximum(np.maximum(count - 1, 0) * any_s[:, None], count * (each * largest_s)[:, None])
            least: Array = (count > 0) * values[:, end][:, None] + others
            return least

        before = np.broadcast_to(np.arange(float(c.active.shape[1])), c.active.shape)
        before_s = over_stages(c.least_forward_s, before, c.first)
        end_s = over_stages(c.least_backward_s, before, c.first)
        after_s = over_stages(c.least_backward_s, np.maximum(c.pp[:, None] - 1 - before, 0), c.last)
        once_s = c.once_s[:, 0, c.first] + c.ranks_s[:, 0]
        once_s = once_s + (c.virtual - 1) * np.maximum(each, 1.0) * c.once_s[:, 0][:, inner].min(axis=1)
        constraints.fixed[:, :, constraints.of_chain(0)] += before_s[:, :, None]
        constraints.fixed[:, :, constraints.of_chain(1)] += (before_s + end_s + once_s[:, None])[:, :, None]
        constraints.fixed[:, :, constraints.of_chain(2)] += (after_s + end_s + once_s[:, None])[:, :, None]
        constraints.fixed[:, :, constraints.of_chain(3)] += after_s[:, :, None]

    def _table(self, costs: Array, most: Array, value: Array) -> tuple[Array, Array, Array]:
        """Return cumulative costs and values of blocks and their ratio [i, r, l, places], the cheapest blocks for their value first.

        These are the greedy solutions of fractional knapsacks, one for each constraint of each rank.

        Args:
            costs: what a block of each group adds to each constraint [i, r, v, l, group].
            most: the most blocks of each group on each stage [i, v, group].
            value: what a block of each group counts [i, group].
        """
        i, r, v, lines, groups = costs.shape
        cost = np.moveaxis(costs, 3, 2).reshape(i, r, lines, v * groups)
        worth = np.broadcast_to(value[:, None], (i, v, groups)).reshape(i, 1, 1, v * groups)
        size = most.reshape(i, 1, 1, v * groups)
        with np.errstate(divide="ignore"):
            order = np.argsort(cost / worth, axis=3)
        spent = np.take_along_axis(cost * size, order, axis=3)
        values = np.take_along_axis(np.broadcast_to(worth * size, cost.shape), order, axis=3)
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = np.nan_to_num(values / spent)
        sums = np.zeros((3, i, r, lines, v * groups + 1))
        np.cumsum(spent, axis=3, out=sums[0, ..., 1:])
        np.cumsum(values, axis=3, out=sums[1, ..., 1:])
        sums[2, ..., :-1] = rate
        return sums[0], sums[1], sums[2]

    def possible(self, rows: NDArray[np.intp], time_s: Array) -> NDArray[np.bool_]:
        """Return whether the ranks of each row can take all blocks within its time."""
        c, constraints = self.c, self.constraints
        is_here = c.active[rows]
        time = np.where(constraints.is_timed, time_s[:, None, None] * (1 + 1e-9), 0.0)
        budget = np.where(is_here[:, :, None], time - constraints.fixed[rows], 0.0)
        fits: NDArray[np.bool_] = np.asarray((budget >= 0.0).all(axis=(1, 2)))
        at = rows[:, None, None], np.arange(budget.shape[1])[:, None], np.arange(budget.shape[2])
        for measure, ((spent, values, rate), total) in enumerate(zip(self.tables, self.totals, strict=True)):
            place = np.maximum((spent[rows] <= budget[..., None]).sum(axis=3) - 1, 0)
            spent_before, value_before, slope = (x[*at, place] for x in (spent, values, rate))
            with np.errstate(invalid="ignore"):
                value = np.where(slope > 0, value_before + (budget - spent_before) * slope, value_before).min(axis=2)
            if measure < 2:  # numbers of blocks are whole
                value = np.floor(value + SLACK)
            value = np.where(is_here, value, 0.0)
            fits &= value.sum(axis=1) >= total[rows] * (1 - 1e-9)
            if measure == 0:
                fits &= ((value >= self.needed[rows]) | ~is_here).all(axis=1)
                count = value
        # Recompute in whole blocks takes at most MAX_TAKEN_OFF blocks off a rank, so that only close cases are tested.
        is_near = count.sum(axis=1) - MAX_TAKEN_OFF * c.pp[rows] < self.totals[0][rows]
        close = np.flatnonzero(fits & is_near & np.isfinite(time_s))
        if len(close):
            lowered = self._lowered(rows[close], count[close], budget[close])
            fits[close] = lowered.sum(axis=1) >= self.totals[0][rows[close]] * (1 - 1e-9)
        return fits

    def _lowered(self, rows: NDArray[np.intp], count: Array, budget: Array) -> Array:
        """Return the number of blocks of each rank, lowered by up to ``MAX_TAKEN_OFF`` where recompute in whole blocks takes too long."""
        at_price_0 = [chain * self.constraints.num_prices for chain in range(CHAINS)]
        spent, values, _ = (table[:, :, at_price_0][rows] for table in self.tables[0])
        for _ in range(MAX_TAKEN_OFF):
            recompute_s = self.c.m[rows][:, None] * self.whole.least_s(rows, count)
            cost = between(count[:, :, None, None], values, spent)[..., 0]
            is_late = (cost + recompute_s[:, :, None] > budget[:, :, at_price_0]).any(axis=2)
            is_late &= self.c.active[rows] & (count > 0)
            if not is_late.any():
                break
            count = count - is_late
        return count

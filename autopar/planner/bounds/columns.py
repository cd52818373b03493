"""Pipeline instances of one model as arrays, so that a relaxation bounds many of them at once; the work relaxation; linear constraints.

Dims are named by letters: i instances, r pipeline ranks (shorter pipelines have inactive ones), k kinds of blocks, o modes of recompute, v
virtual stages of a rank (padded likewise), l constraints that are linear in what a rank holds, see
:mod:`autopar.planner.bounds.feasibility`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.instance import FIELDS, FITS, Array, PipelineInstance, forwards_done, runs_of

CHUNK = 128
"""The limit on instances in one object, so that its tables stay in the cache."""

LARGEST = 2
"""The number of groups of blocks, the largest first, whose modes give the prices at which memory is weighed against time."""

BITS = 36
"""The bits of a work bound that are kept; the others depend on which instances are in the same array."""


class Columns:
    """Instances as arrays.

    Attributes:
        forward_s, more_s, gather_s, once_s, static_bytes, stepped_bytes: the fields of a block's floor [i, r, k].
        backward_s, kept_bytes, passing_bytes: those of its modes [i, r, k, o].
        counts: the number of blocks of each kind [k]; ``first``, ``last``: the kinds of the first and of the last block.
        active: whether a pipeline has a rank [i, r]; ``is_last``: whether it is the last one.
        held: the micro-batches whose forward a stage has done when its rank's first backward begins [i, r, v].
        room_bytes: a rank's memory for the blocks of its stages [i, r]; ``limit_bytes``: likewise when no activations are held.
        stage_forward_s, stage_backward_s: the seconds of each stage besides its blocks [i, r].
        sends_s, backs_s: a rank's message to the next rank and the message back [i, r]; the last rank's are with the first one.
        ranks_s: what a rank does once a step besides its blocks' part [i, r].
    """

    def __init__(self, instances: Sequence[PipelineInstance]) -> None:
        first, tables = instances[0], _tables(instances)
        kind_of, num_kinds = _same_kinds(tables)
        self.runs = runs_of([kind_of[kind] for kind in first.kind_of_block])
        self.groups = _joined([{kind_of[k] for k in group} for group in first.groups])
        tables = tables[:, :, [kind_of.index(k) for k in range(num_kinds)]]
        self.pp = np.array([one.pp for one in instances])
        self.m = np.array([float(one.num_micro_batches) for one in instances])
        self.virtual = np.array([float(one.virtual_stages) for one in instances])
        self.v = int(self.virtual.max())
        ranks, num = int(self.pp.max()), len(instances)
        place = np.arange(ranks)
        self.active, self.is_last = place < self.pp[:, None], place == self.pp[:, None] - 1
        self.is_first = np.broadcast_to(place == 0, (num, ranks))
        device = np.zeros((num, ranks), dtype=np.int64)
        self.sends_s, self.backs_s, self.ranks_s = np.zeros((3, num, ranks))
        self.held = np.ones((self.v, num, ranks)).transpose(1, 2, 0)
        by_device = np.zeros((3, num, tables.shape[1]))
        for i, one in enumerate(instances):
            device[i, : one.pp] = one.device_of_rank
            if one.sends_s:
                self.sends_s[i, : one.pp], self.backs_s[i, : one.pp] = one.sends_s, one.sends_back_s
            if one.ranks_s:
                self.ranks_s[i, : one.pp] = one.ranks_s
            held = forwards_done(one.schedule, one.pp, one.virtual_stages, one.num_micro_batches)
            self.held[i, : one.pp, : held.shape[1]] = held
            self.held[i, : one.pp, held.shape[1] :] = held[:, -1:]
            by_device[:, i, : len(one.floors)] = one.limit_bytes, one.forward_s, one.backward_s
        rows = np.arange(num)[:, None]
        # Stored as [columns, k, i, r]: arithmetic runs along the last dims, and instances and ranks are the most.
        numbers = np.ascontiguousarray(tables[rows, device].transpose(3, 2, 0, 1))
        self.num_modes = max(len(block.modes) for one in instances for t in one.floors for block in t.blocks)
        of_block = numbers[:FIELDS].transpose(0, 2, 3, 1)
        self.forward_s, self.more_s, self.gather_s, self.once_s, self.static_bytes, self.stepped_bytes = of_block
        modes = numbers[FIELDS:].reshape(-1, 3, *numbers.shape[1:])[: self.num_modes]
        self.backward_s, self.kept_bytes, self.passing_bytes = modes.transpose(1, 3, 4, 2, 0)
        limit, self.stage_forward_s, self.stage_backward_s = by_device[:, rows, device]
        self.has_stage = np.arange(self.v) < self.virtual[:, None]
        """Which virtual stages the ranks of an instance have [i, v]; padding repeats the last one."""
        kept_bytes = self._stage_bytes(np.array([(one.sent_bytes, one.read_bytes) for one in instances])[:, None])
        self.limit_bytes = np.where(self.active, limit * FITS, 0.0)
        self.room_bytes = np.where(self.active, limit * FITS - kept_bytes, 0.0)
        self.first_s = np.array([one.first_s for one in instances])
        self.most = np.array([one.most_blocks for one in instances])
        self.counts = np.zeros(num_kinds)
        for kind, count in self.runs:
            self.counts[kind] += count
        self.first, self.last = self.runs[0][0], self.runs[-1][0]
        self._least()

    def _least(self) -> None:
        """Compute the least of each kind of block over ranks [i, k], and the micro-batches before the first backward."""
        self.turns = np.where(self.virtual == 1.0, (self.held[:, :, 0] * self.is_last).sum(axis=1), 1.0)
        """Micro-batches whose forward the last rank has done when its first backward begins [i]; 1 with several stages a rank."""
        self.others = np.maximum(self.m[:, None, None] - self.held, 0.0) + (self.turns - 1.0)[:, None, None]
        """Forwards left to a stage at its first backward, and those of the micro-batches before the one that chain 3 follows [i, r, v]."""
        far = np.where(self.active, 0.0, np.inf)[:, :, None]
        self.least_forward_s = (self.forward_s + self.gather_s + far).min(axis=1)
        self.plain_forward_s = (self.forward_s + far).min(axis=1)
        self.least_backward_s = (self.backward_s.min(axis=3) + self.more_s + far).min(axis=1)
        self.least_s = (self.forward_s + self.backward_s.min(axis=3) + self.more_s + far).min(axis=1)

    def before(self, values: Array) -> Array:
        """Return for each rank the sum of ``values`` [i, r] over the ranks before it."""
        active = np.where(self.active, values, 0.0)
        sums: Array = np.cumsum(active, axis=1) - active
        return sums

    def total(self, values: Array) -> Array:
        """Return the sum of ``values`` [i, r] over ranks [i]."""
        sums: Array = np.where(self.active, values, 0.0).sum(axis=1)
        return sums

    def may_end(self) -> NDArray[np.bool_]:
        """Return which kinds of blocks may end each stage [i, r, v, k], as each stage before and after it has at least one block."""
        kinds = np.repeat([kind for kind, _ in self.runs], [count for _, count in self.runs])
        most, size = len(kinds) - 1, self.active.shape[1]
        up_to = np.zeros((len(kinds) + 1, len(self.counts)), dtype=np.int64)
        np.cumsum(kinds[:, None] == np.arange(len(self.counts)), axis=0, out=up_to[1:])
        stages = (self.pp * self.virtual).astype(np.int64)[:, None, None]
        stage = np.arange(size)[:, None] + np.arange(self.v) * self.pp[:, None, None]
        last = np.clip(most + 1 - stages + stage, 0, most)
        first = np.where(stage >= stages - 1, most, np.minimum(stage, last))
        may_end: NDArray[np.bool_] = up_to[last + 1] > up_to[first]
        return may_end

    # --- relaxations that ask for no table

    def work_s(self) -> Array:
        """Return the work relaxation, total work over total speed, in seconds [i]; memory and whole blocks are left out.

        Let rank r take work w_r, in seconds of a micro-batch on the device that is fastest for each block; its own device takes at least
        s_r w_r. Then, for every rank r and a step of T seconds,

            sum over q before r of s_q w_q  +  m s_r w_r  <=  T,        sum of w_r = W.

        Weights y_r >= 0 with m s_r y_r + s_r * (sum of y after r) >= 1 combine these to T * (sum of y) >= W. Any such y gives a bound, and
        it is the best one where all inequalities can be equalities. Without the first term, as with virtual stages, y_r = 1 / (m s_r). With
        virtual stages a second bound treats each stage as if it had a rank to itself; it is the larger one for few micro-batches.
        """
        work_s = self.least_s @ self.counts
        rank_s = self.forward_s + self.backward_s.min(axis=3) + self.more_s
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.least_s[:, None] > 0, rank_s / self.least_s[:, None], np.inf)
        slowness = ratio.min(axis=2)
        slowness = np.where(np.isfinite(slowness), slowness, 1.0)
        every_s = self.stage_forward_s + self.stage_backward_s
        before_s = self.before(every_s + self.sends_s + self.backs_s)
        bounds = self._weighed_s(work_s, slowness, before_s, every_s, is_chain=self.v == 1, repeats=self.virtual)
        if self.v == 1:
            return _rounded_down(bounds)
        # each stage as if it had a rank to itself
        one = np.ones(len(self.m))
        single = self._weighed_s(work_s, slowness, before_s, every_s, is_chain=True, repeats=one)
        return _rounded_down(np.maximum(bounds, single))

    def _weighed_s(
        self, work_s: Array, slowness: Array, before_s: Array, every_s: Array, *, is_chain: bool, repeats: Array,
    ) -> Array:  # fmt: skip
        """Return the bound of :meth:`work_s` with the weights y; ``is_chain``: ranks wait for those before them."""
        weights: Array
        turns = self.virtual / repeats
        each_s = before_s + self.m[:, None] * repeats[:, None] * every_s
        if not is_chain:
            weights = turns[:, None] * np.where(self.active, 1 / (slowness * self.m[:, None]), 0.0)
        elif (slowness == slowness[:, :1]).all():  # the weights of equal ranks are a geometric series
            factor = 1 - 1 / self.m[:, None]
            weights = factor ** np.where(self.active, self.pp[:, None] - 1 - np.arange(slowness.shape[1]), 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                rounds = np.where(
                    factor < 1, (1 - factor ** (self.pp * turns)[:, None]) / (1 - factor ** self.pp[:, None]), 1
                )
            weights = np.where(self.active, weights * rounds / (slowness * self.m[:, None]), 0.0)
        else:
            weights, after = np.zeros(slowness.shape), np.zeros(len(self.m))
            for turn in range(int(turns.max())):
                for rank in reversed(range(slowness.shape[1])):
                    weight = np.maximum((1 / slowness[:, rank] - after) / self.m, 0.0)
                    weight = np.where(self.active[:, rank] & (turn < turns), weight, 0.0)
                    weights[:, rank] += weight
                    after += weight
        bounds: Array = (work_s + (weights * each_s).sum(axis=1)) / weights.sum(axis=1)
        return bounds

    def _stage_bytes(self, stage_bytes: Array) -> Array:
        """Return the bytes that ranks keep besides their blocks [i, r].

        Args:
            stage_bytes: bytes of a micro-batch on each stage but the last, and on each stage but the first and the last, or the only one
                [i, 1, 2].
        """
        sending = (self.held * self.has_stage[:, None]).sum(axis=2) - self.is_last * self.held[:, :, -1]
        inner = np.where(self.is_first & self.is_last, self.held[:, :, 0], sending - self.is_first * self.held[:, :, 0])
        held_bytes: Array = sending * stage_bytes[..., 0] + inner * stage_bytes[..., 1]
        return held_bytes

    def holds(self) -> NDArray[np.bool_]:
        """Return whether all ranks together can hold all blocks [i], each block with the least that it can keep."""
        held = np.where(self.active[:, :, None], self.held, np.inf).min(axis=(1, 2))
        far = np.where(self.active, 0.0, np.inf)[:, :, None]
        least = (self.static_bytes + held[:, None, None] * self.kept_bytes.min(axis=3) + far).min(axis=1)
        fits: NDArray[np.bool_] = np.einsum("ik,k->i", least, self.counts) <= self.room_bytes.sum(axis=1)
        return fits

    # --- lines

    def prices(self) -> Array:
        """Return the prices of a byte in seconds at which memory is weighed against time [i, r, l]; the first one is zero.

        Any price gives a valid constraint. The tightest are those at which two modes of a large group of blocks cost the same.
        """
        prices = [np.zeros(self.active.shape)]
        most_and_least = [self.held.max(axis=2), self.held.min(axis=2)][: min(self.v, 2)]
        large = sorted(self.groups, key=lambda group: -self.counts[list(group)].sum())[:LARGEST]
        for group in large:
            kind = max(group, key=lambda k: self.counts[k])
            for rate in _rates(self.backward_s[:, :, kind], self.kept_bytes[:, :, kind]):
                prices += [self.m[:, None] * rate / held for held in most_and_least]
        return np.stack(prices).transpose(1, 2, 0)


def side_by_side(instances: Sequence[PipelineInstance]) -> Iterator[tuple[list[int], Columns]]:
    """Yield the instances as arrays with their positions; pipelines of about the same size are together."""
    by_size: dict[tuple[int, int], list[int]] = {}
    for i, instance in enumerate(instances):
        by_size.setdefault((min(instance.virtual_stages, 2), instance.pp.bit_length() // 4), []).append(i)
    for places in by_size.values():
        places.sort(key=lambda i: (instances[i].pp, instances[i].virtual_stages))
        for start in range(0, len(places), CHUNK):
            chunk = places[start : start + CHUNK]
            yield chunk, Columns([instances[i] for i in chunk])


def _rounded_down(values: Array) -> Array:
    """Round values down to ``BITS`` bits: the last bits of a sum depend on what else is in the array."""
    mantissa, exponent = np.frexp(values)
    rounded: Array = np.ldexp(np.floor(mantissa * 2.0**BITS) / 2.0**BITS, exponent)
    return rounded


def _tables(instances: Sequence[PipelineInstance]) -> Array:
    """Return the floors of each kind of device of each instance [i, device, k, columns]."""
    first = instances[0].floors[0].numbers
    numbers = np.zeros((len(instances), max(len(one.floors) for one in instances), *first.shape))
    for i, one in enumerate(instances):
        for d, table in enumerate(one.floors):
            numbers[i, d] = table.numbers
    return numbers


def _same_kinds(tables: Array) -> tuple[list[int], int]:
    """Numbers the kinds of blocks, equally where their floors are equal in all instances; return the numbers and how many there are."""
    numbers: list[int] = []
    firsts: list[int] = []
    for k in range(tables.shape[2]):
        same = [i for i, other in enumerate(firsts) if np.array_equal(tables[:, :, k], tables[:, :, other])]
        numbers.append(same[0] if same else len(firsts))
        if not same:
            firsts.append(k)
    return numbers, len(firsts)


def _joined(groups: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    """Merge groups of kinds that have a kind in common."""
    merged: list[set[int]] = []
    for group in groups:
        disjoint = [other for other in merged if not other & group]
        merged = [*disjoint, group.union(*(other for other in merged if other & group))]
    return tuple(tuple(sorted(group)) for group in merged)


def _rates(seconds: Array, kept: Array) -> list[Array]:
    """Return seconds per freed byte between neighbouring modes [i, r, o] on the lower hull of seconds over bytes.

    With more than three modes it returns those of all pairs.
    """
    order = np.argsort(-kept, axis=2)
    seconds, kept = np.take_along_axis(seconds, order, axis=2), np.take_along_axis(kept, order, axis=2)

    def rate(one: int, other: int) -> Array:
        more_s, freed = seconds[..., other] - seconds[..., one], kept[..., one] - kept[..., other]
        with np.errstate(divide="ignore", invalid="ignore"):
            per_byte_s: Array = np.where((freed > 0) & (more_s > 0), more_s / freed, 0.0)
        return per_byte_s

    count = seconds.shape[2]
    if count == 3:
        first, second, both = rate(0, 1), rate(1, 2), rate(0, 2)
        is_hull = first <= second
        return [np.where(is_hull, first, both), np.where(is_hull, second, both)]
    return [rate(one, other) for one, other in combinations(range(count), 2)]


CHAINS = 4
"""The chains of each rank, see :mod:`autopar.planner.bounds.feasibility`."""


def line_costs(c: Columns, prices: Array) -> tuple[list[Array], Array]:
    """Return what a block adds to each chain on a stage, its bytes priced [i, r, v, l, k], and the least that the last block's peak adds.

    At a price y of a byte a block adds the cheapest of its modes: seconds, and y times its bytes. So for any blocks on a rank and any y,
    seconds + y (bytes - room) <= T holds whatever they recompute. All chains have all backwards of the rank. With one stage a rank, chains
    3 and 4 have the least backward of every block already: it is subtracted here.
    """
    price, m = prices[:, :, None, :, None], c.m[:, None, None, None, None]
    held_price = price * c.held[..., None, None]
    best, peak = np.inf, np.inf
    for mode in range(c.num_modes):
        mode_s = m * c.backward_s[:, :, None, None, :, mode] + held_price * c.kept_bytes[:, :, None, None, :, mode]
        best = np.minimum(best, mode_s)
        peak = np.minimum(peak, mode_s + price * c.passing_bytes[:, :, None, None, :, mode])
    extra = np.asarray(peak - best)
    best = best + price * c.static_bytes[:, :, None, None]
    every, others = c.m[:, None, None, None], c.others[..., None]
    forward_s, more_s, once_s = (field[:, :, None] for field in (c.forward_s, c.more_s, c.once_s))
    whole_s = every * forward_s + every * more_s + c.gather_s[:, :, None]
    later_s = others * forward_s + np.minimum(others + 1.0, every) * more_s
    known_s = float(c.v == 1) * c.least_backward_s[:, None, None]
    chains = whole_s + once_s, whole_s, later_s - known_s, later_s + once_s - known_s
    return [best + chain[:, :, :, None] for chain in chains], extra


def lean_costs(c: Columns) -> tuple[Array, Array]:
    """Return the least bytes that a block takes on a stage [i, r, v, 1, k], and what the last block's peak adds to them."""
    held = c.held[..., None]
    kept = [held * c.kept_bytes[:, :, None, :, mode] for mode in range(c.num_modes)]
    passing = [mode_bytes + c.passing_bytes[:, :, None, :, mode] for mode, mode_bytes in enumerate(kept)]
    least = np.minimum.reduce(kept)
    lean: Array = (c.static_bytes[:, :, None] + least)[:, :, :, None]
    return lean, (np.minimum.reduce(passing) - least)[:, :, :, None]


class Constraints:
    """The linear constraints of ranks: at each price of a byte one for each of the four chains, then those of memory alone.

    A constraint is the sum of ``fixed`` and the ``costs`` of the rank's blocks. It may not exceed the step time or, if it is of memory, 0.

    Attributes:
        costs: what each block adds to each constraint [i, r, v, l, k], in seconds, or in bytes if it is one of memory.
        fixed: what each constraint has without blocks [i, r, l].
        is_timed: which constraints are of time [l]. The others are of memory when the rank's first backward begins and, where that may need
            more, during the optimizer step.
    """

    def __init__(self, c: Columns) -> None:
        self.c, v = c, c.virtual[:, None]
        m, prices = c.m[:, None], c.prices()
        room_s = prices * c.room_bytes[:, :, None]
        sends_s, backs_s = c.before(c.sends_s), c.before(c.backs_s)
        forward_s, backward_s = c.stage_forward_s, c.stage_backward_s
        num_before = np.arange(c.active.shape[1])[None]  # the ranks before each rank
        start_s = sends_s + c.before(forward_s) + num_before * c.first_s[:, None]
        end_s = backs_s + c.before(backward_s)
        own_s = v * m * (forward_s + backward_s) + v * c.first_s[:, None]
        is_first = c.turns == 1.0  # chain 3 follows the first micro-batch, which waits for the gathers of all stages
        all_s = np.where(
            is_first, c.least_forward_s @ c.counts + c.virtual * c.pp * c.first_s, c.plain_forward_s @ c.counts
        )
        all_s = all_s + c.total(c.sends_s) * c.virtual - c.total(c.sends_s * c.is_last)
        all_s = all_s + c.total(c.backs_s * ~c.is_last) + c.virtual * c.total(forward_s)
        third_s = all_s[:, None] + c.total(backward_s)[:, None] - backward_s + v * m * backward_s
        third_s = third_s + (c.others * c.has_stage[:, None]).sum(axis=2) * forward_s
        chains_s = (start_s + own_s + c.ranks_s, start_s + own_s + end_s, third_s, third_s - end_s + c.ranks_s)
        costs, peak = line_costs(c, prices)
        peaks = self._peaks(peak)
        lean, lean_peak = lean_costs(c)
        fixed = [time_s[:, :, None] - room_s + peaks for time_s in chains_s]
        memory_costs, memory_fixed = [lean], [self._peaks(lean_peak) - c.room_bytes[:, :, None]]
        stepped = np.broadcast_to(c.stepped_bytes[:, :, None, None], lean.shape)
        if (stepped > lean).any():
            memory_costs, memory_fixed = [lean, stepped], [*memory_fixed, -c.limit_bytes[:, :, None]]
        self.costs = np.concatenate([*costs, *memory_costs], axis=3)
        self.fixed = np.concatenate([*fixed, *memory_fixed], axis=2)
        self.num_prices = prices.shape[2]
        self.is_timed = np.arange(self.costs.shape[3]) < CHAINS * self.num_prices

    def _peaks(self, peaks: Array) -> Array:
        """Return what the peak of a stage's last block adds at least to each constraint [i, r, l], the most over the stages of a rank."""
        may_end = self.c.may_end()[:, :, :, None]
        by_kind = [np.where(may_end[..., k], peaks[..., k], np.inf) for k in range(peaks.shape[4])]
        least = np.minimum.reduce(by_kind)
        peak: Array = np.where(self.c.has_stage[:, None, :, None], least, -np.inf).max(axis=2)
        return peak

    def of_chain(self, chain: int) -> slice:
        """Return the positions of the constraints of a chain, which is numbered from 0: one for each price, price 0 first."""
        return slice(chain * self.num_prices, (chain + 1) * self.num_prices)

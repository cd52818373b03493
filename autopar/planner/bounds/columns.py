"""Pipeline instances of one model side by side, as arrays; what is common to the relaxations that look at many at once.

Dims are named by letters: i instances, r pipeline ranks (a pipeline with fewer has inactive ones), k kinds of blocks, o modes,
v virtual stages of a rank (likewise), l lines. A *line* is a law that is linear in what a rank holds, see :class:`Lines`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.instance import FIELDS, FITS, Array, PipelineInstance, forwards_done, runs_of

CHUNK = 128
"""Instances side by side at most, so that tables stay in the cache."""

LARGEST = 2
"""Groups of blocks whose modes say at which prices memory is weighed against time."""

BITS = 36
"""Of a bound of work that count."""


class Columns:
    """Instances side by side.

    Attributes:
        forward_s, more_s, gather_s, once_s, static_bytes, stepped_bytes: of a block [i, r, k].
        backward_s, kept_bytes, passing_bytes: in each mode [i, r, k, o].
        counts: blocks of each kind [k]; ``first``, ``last``: the kinds of the first and of the last block.
        active: ranks that a pipeline has [i, r]; ``is_last``: its last one.
        held: micro-batches whose forward a stage has done when its rank's first backward begins [i, r, v].
        room_bytes: of a rank for the blocks of its stages [i, r]; ``limit_bytes``: when no micro-batch keeps anything.
        stage_forward_s, stage_backward_s: of each stage beside its blocks [i, r].
        sends_s, backs_s: messages of a rank to the next one, and back; of the last one with the first [i, r].
    """

    def __init__(self, instances: Sequence[PipelineInstance]) -> None:
        own, tables = instances[0], _tables(instances)
        kind_of, num_kinds = same_kinds(tables)
        self.runs = runs_of([kind_of[kind] for kind in own.kind_of_block])
        self.groups = _joined([{kind_of[k] for k in group} for group in own.groups])
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
        self.sends_s, self.backs_s = np.zeros((num, ranks)), np.zeros((num, ranks))
        self.held = np.ones((self.v, num, ranks)).transpose(1, 2, 0)
        by_device = np.zeros((3, num, tables.shape[1]))
        for i, one in enumerate(instances):
            device[i, : one.pp] = one.device_of_rank
            if one.sends_s:
                self.sends_s[i, : one.pp], self.backs_s[i, : one.pp] = one.sends_s, one.sends_back_s
            held = forwards_done(one.schedule, one.pp, one.virtual_stages, one.num_micro_batches)
            self.held[i, : one.pp, : held.shape[1]] = held
            self.held[i, : one.pp, held.shape[1] :] = held[:, -1:]
            by_device[:, i, : len(one.floors)] = one.limit_bytes, one.forward_s, one.backward_s
        rows = np.arange(num)[:, None]
        # in memory [columns, k, i, r], as arithmetic runs along what stands last: instances and ranks are the most
        found = np.ascontiguousarray(tables[rows, device].transpose(3, 2, 0, 1))
        self.num_modes = max(len(block.modes) for one in instances for t in one.floors for block in t.blocks)
        of_block = found[:FIELDS].transpose(0, 2, 3, 1)
        self.forward_s, self.more_s, self.gather_s, self.once_s, self.static_bytes, self.stepped_bytes = of_block
        modes = found[FIELDS:].reshape(-1, 3, *found.shape[1:])[: self.num_modes]
        self.backward_s, self.kept_bytes, self.passing_bytes = modes.transpose(1, 3, 4, 2, 0)
        limit, self.stage_forward_s, self.stage_backward_s = by_device[:, rows, device]
        self.has_stage = np.arange(self.v) < self.virtual[:, None]
        """Virtual stages that the ranks of an instance have [i, v]; the others are as its last one."""
        kept = self._beside(np.array([(one.sent_bytes, one.read_bytes) for one in instances])[:, None])
        self.limit_bytes = np.where(self.active, limit * FITS, 0.0)
        self.room_bytes = np.where(self.active, limit * FITS - kept, 0.0)
        self.first_s = np.array([one.first_s for one in instances])
        self.tie_s = np.array([one.tie_s for one in instances])
        self.most = np.array([one.most_blocks for one in instances])
        self.counts = np.zeros(num_kinds)
        for kind, count in self.runs:
            self.counts[kind] += count
        self.first, self.last = self.runs[0][0], self.runs[-1][0]
        self._least()

    def _least(self) -> None:
        """Of each kind the least of all ranks [i, k], and the micro-batch that turns first."""
        self.turns = np.where(self.virtual == 1.0, (self.held[:, :, 0] * self.is_last).sum(axis=1), 1.0)
        """Micro-batches whose forward the only stage of the last rank has done when its first backward begins [i]; 1 with several stages a rank."""
        self.others = np.maximum(self.m[:, None, None] - self.held, 0.0) + (self.turns - 1.0)[:, None, None]
        """Forwards that a stage has not done at its first backward, and those of the micro-batches that turn before [i, r, v]."""
        far = np.where(self.active, 0.0, np.inf)[:, :, None]
        self.least_forward_s = (self.forward_s + self.gather_s + far).min(axis=1)
        self.plain_forward_s = (self.forward_s + far).min(axis=1)
        self.least_backward_s = (self.backward_s.min(axis=3) + self.more_s + far).min(axis=1)
        self.least_s = (self.forward_s + self.backward_s.min(axis=3) + self.more_s + far).min(axis=1)

    def before(self, values: Array) -> Array:
        """For each rank the sum of these [i, r] over the ranks before it."""
        own = np.where(self.active, values, 0.0)
        found: Array = np.cumsum(own, axis=1) - own
        return found

    def total(self, values: Array) -> Array:
        """Over all ranks [i]."""
        found: Array = np.where(self.active, values, 0.0).sum(axis=1)
        return found

    def may_end(self) -> NDArray[np.bool_]:
        """Of each stage which kinds its last block may have [i, r, v, k]: before and after it each stage has a block at least."""
        kinds = np.repeat([kind for kind, _ in self.runs], [count for _, count in self.runs])
        most, size = len(kinds) - 1, self.active.shape[1]
        seen = np.zeros((len(kinds) + 1, len(self.counts)), dtype=np.int64)
        np.cumsum(kinds[:, None] == np.arange(len(self.counts)), axis=0, out=seen[1:])
        stages = (self.pp * self.virtual).astype(np.int64)[:, None, None]
        stage = np.arange(size)[:, None] + np.arange(self.v) * self.pp[:, None, None]
        last = np.clip(most + 1 - stages + stage, 0, most)
        first = np.where(stage >= stages - 1, most, np.minimum(stage, last))
        found: NDArray[np.bool_] = seen[last + 1] > seen[first]
        return found

    # --- relaxations that ask for no table

    def work_s(self) -> Array:
        """Total work over total speed [i], without memory and whole blocks.

        Let w_r be the work that rank r takes, in seconds of a micro-batch on the devices that are fastest for each block;
        its own devices take at least s_r w_r. Then, for every rank r and a step of T,

            sum over q before r of s_q w_q  +  m s_r w_r  <=  T,        sum of w_r = W.

        Weights y_r >= 0 with m s_r y_r + s_r * (sum of y after r) >= 1 add these up to T * (sum of y) >= W: a bound for any
        such y, and the best one where all inequalities can be equalities. Without the first term, as with virtual stages,
        y_r = 1 / (m s_r); there the inequalities of the stages, each as if its rank had no other, give a second bound, the
        larger one of few micro-batches.
        """
        work_s = self.least_s @ self.counts
        own_s = self.forward_s + self.backward_s.min(axis=3) + self.more_s
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(self.least_s[:, None] > 0, own_s / self.least_s[:, None], np.inf)
        slowness = ratio.min(axis=2)
        slowness = np.where(np.isfinite(slowness), slowness, 1.0)
        every_s = self.stage_forward_s + self.stage_backward_s
        before_s = self.before(every_s + self.sends_s + self.backs_s)
        found = self._weighed_s(work_s, slowness, before_s, every_s, is_chain=self.v == 1, repeats=self.virtual)
        if self.v == 1:
            return _rounded_down(found)
        # as if each stage had a rank of its own, whatever stands before it
        one = np.ones(len(self.m))
        other = self._weighed_s(work_s, slowness, before_s, every_s, is_chain=True, repeats=one)
        return _rounded_down(np.maximum(found, other))

    def _weighed_s(
        self, work_s: Array, slowness: Array, before_s: Array, every_s: Array, *, is_chain: bool, repeats: Array,
    ) -> Array:  # fmt: skip
        weights: Array
        turns = self.virtual / repeats
        each_s = before_s + self.m[:, None] * repeats[:, None] * every_s
        if not is_chain:
            weights = turns[:, None] * np.where(self.active, 1 / (slowness * self.m[:, None]), 0.0)
        elif (slowness == slowness[:, :1]).all():  # of equal ranks each weight is a part of the one after it
            left = 1 - 1 / self.m[:, None]
            weights = left ** np.where(self.active, self.pp[:, None] - 1 - np.arange(slowness.shape[1]), 0)
            with np.errstate(divide="ignore", invalid="ignore"):
                rounds = np.where(
                    left < 1, (1 - left ** (self.pp * turns)[:, None]) / (1 - left ** self.pp[:, None]), 1
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
        found: Array = (work_s + (weights * each_s).sum(axis=1)) / weights.sum(axis=1)
        return found

    def _beside(self, stage_bytes: Array) -> Array:
        """What ranks keep beside their blocks [i, r]: of each stage but the last, of each but the first and the last or the only one [i, 1, 2]."""
        sending = (self.held * self.has_stage[:, None]).sum(axis=2) - self.is_last * self.held[:, :, -1]
        inner = np.where(self.is_first & self.is_last, self.held[:, :, 0], sending - self.is_first * self.held[:, :, 0])
        found: Array = sending * stage_bytes[..., 0] + inner * stage_bytes[..., 1]
        return found

    def holds(self) -> NDArray[np.bool_]:
        """Whether all ranks together can hold all blocks [i], each with the least that it can keep."""
        held = np.where(self.active[:, :, None], self.held, np.inf).min(axis=(1, 2))
        far = np.where(self.active, 0.0, np.inf)[:, :, None]
        least = (self.static_bytes + held[:, None, None] * self.kept_bytes.min(axis=3) + far).min(axis=1)
        found: NDArray[np.bool_] = np.einsum("ik,k->i", least, self.counts) <= self.room_bytes.sum(axis=1)
        return found

    # --- lines

    def prices(self) -> Array:
        """Seconds for a byte at which memory is weighed against time [i, r, l], the first one zero.

        Any price gives a law; those at which a mode of a large group costs as much as another one give the tightest.
        """
        found = [np.zeros(self.active.shape)]
        every = [self.held.max(axis=2), self.held.min(axis=2)][: min(self.v, 2)]
        large = sorted(self.groups, key=lambda group: -self.counts[list(group)].sum())[:LARGEST]
        for group in large:
            kind = max(group, key=lambda k: self.counts[k])
            for rate in _rates(self.backward_s[:, :, kind], self.kept_bytes[:, :, kind]):
                found += [self.m[:, None] * rate / held for held in every]
        return np.stack(found).transpose(1, 2, 0)


def side_by_side(instances: Sequence[PipelineInstance]) -> Iterator[tuple[list[int], Columns]]:
    """The instances by position, those of pipelines of about the same size together."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, one in enumerate(instances):
        alike.setdefault((min(one.virtual_stages, 2), one.pp.bit_length() // 4), []).append(i)
    for places in alike.values():
        places.sort(key=lambda i: (instances[i].pp, instances[i].virtual_stages))
        for start in range(0, len(places), CHUNK):
            some = places[start : start + CHUNK]
            yield some, Columns([instances[i] for i in some])


def _rounded_down(values: Array) -> Array:
    """Values without their last bits, in which sums differ with what stands beside them in an array."""
    mantissa, exponent = np.frexp(values)
    found: Array = np.ldexp(np.floor(mantissa * 2.0**BITS) / 2.0**BITS, exponent)
    return found


def _tables(instances: Sequence[PipelineInstance]) -> Array:
    """The numbers of the floors of each kind of device of each instance [i, device, k, columns]."""
    own = instances[0].floors[0].numbers
    found = np.zeros((len(instances), max(len(one.floors) for one in instances), *own.shape))
    for i, one in enumerate(instances):
        for d, table in enumerate(one.floors):
            found[i, d] = table.numbers
    return found


def same_kinds(tables: Array) -> tuple[list[int], int]:
    """Of each kind of blocks a number, equal for those whose floors are equal in all instances; and how many there are."""
    found: list[int] = []
    firsts: list[int] = []
    for k in range(tables.shape[2]):
        same = [i for i, other in enumerate(firsts) if np.array_equal(tables[:, :, k], tables[:, :, other])]
        found.append(same[0] if same else len(firsts))
        if not same:
            firsts.append(k)
    return found, len(firsts)


def _joined(groups: Sequence[set[int]]) -> tuple[tuple[int, ...], ...]:
    """Groups of kinds, those that have a kind in common as one."""
    found: list[set[int]] = []
    for group in groups:
        apart = [own for own in found if not own & group]
        found = [*apart, group.union(*(own for own in found if own & group))]
    return tuple(tuple(sorted(group)) for group in found)


def _rates(seconds: Array, kept: Array) -> list[Array]:
    """Seconds for a freed byte from each mode [i, r, o] to the next one on the lower hull of seconds against bytes, of up to three modes."""
    order = np.argsort(-kept, axis=2)
    seconds, kept = np.take_along_axis(seconds, order, axis=2), np.take_along_axis(kept, order, axis=2)

    def rate(one: int, other: int) -> Array:
        more_s, freed = seconds[..., other] - seconds[..., one], kept[..., one] - kept[..., other]
        with np.errstate(divide="ignore", invalid="ignore"):
            found: Array = np.where((freed > 0) & (more_s > 0), more_s / freed, 0.0)
        return found

    count = seconds.shape[2]
    if count == 3:
        first, second, both = rate(0, 1), rate(1, 2), rate(0, 2)
        is_hull = first <= second
        return [np.where(is_hull, first, both), np.where(is_hull, second, both)]
    return [rate(one, other) for one, other in combinations(range(count), 2)]


CHAINS = 4
"""Of each rank, see :mod:`autopar.planner.bounds.feasibility`."""


def line_costs(c: Columns, prices: Array) -> tuple[list[Array], Array]:
    """Seconds that a block adds to each chain on a stage, its bytes priced [i, r, v, l, k]; and what the last block's peak adds at least.

    At a price y for a byte a block adds what the cheapest of its modes does: seconds, and y times its bytes. So of any blocks on a
    rank, seconds + y (bytes - room) <= T is a law, for any y: what they recompute need not be known. All chains have all backwards of
    the rank. With one stage a rank the last two count the least backward of all blocks already, and it is taken off here.
    """
    price, m = prices[:, :, None, :, None], c.m[:, None, None, None, None]
    held_price = price * c.held[..., None, None]
    best, peak = np.inf, np.inf
    for mode in range(c.num_modes):
        own = m * c.backward_s[:, :, None, None, :, mode] + held_price * c.kept_bytes[:, :, None, None, :, mode]
        best = np.minimum(best, own)
        peak = np.minimum(peak, own + price * c.passing_bytes[:, :, None, None, :, mode])
    extra = np.asarray(peak - best)
    best = best + price * c.static_bytes[:, :, None, None]
    every, others = c.m[:, None, None, None], c.others[..., None]
    forward_s, more_s, once_s = (own[:, :, None] for own in (c.forward_s, c.more_s, c.once_s))
    whole_s = every * forward_s + every * more_s + c.gather_s[:, :, None]
    later_s = others * forward_s + np.minimum(others + 1.0, every) * more_s
    known_s = float(c.v == 1) * c.least_backward_s[:, None, None]
    chains = whole_s + once_s, whole_s, later_s - known_s, later_s + once_s - known_s
    return [best + own[:, :, :, None] for own in chains], extra


def lean_costs(c: Columns) -> tuple[Array, Array]:
    """Bytes that a block takes of a stage at the least [i, r, v, 1, k], and what the last block's peak adds to them."""
    held = c.held[..., None]
    kept = [held * c.kept_bytes[:, :, None, :, mode] for mode in range(c.num_modes)]
    passing = [own + c.passing_bytes[:, :, None, :, mode] for mode, own in enumerate(kept)]
    least = np.minimum.reduce(kept)
    found: Array = (c.static_bytes[:, :, None] + least)[:, :, :, None]
    return found, (np.minimum.reduce(passing) - least)[:, :, :, None]

"""Lower bounds where pipeline ranks have different devices: the step time below which no cut of the blocks exists.

As in :mod:`autopar.search.bounds` the blocks are a first one, a last one and a group of equal ones; here each rank has its
own prices, and a dynamic program over ranks and blocks left asks whether a time T is possible. For n blocks on rank r let
F, B be one micro-batch through its stage (message to the next stage, or back, included), m the micro-batches, h those
whose forward it has done when its first backward begins, and O what it does once a step. The memory of its devices says
how many of the n recompute at least. With one stage a rank

    U(r) = max( m (F + B),                                 its own work,
                F + S(r + 1) + m B + (m - h) F,            the first micro-batch there and back, S of all stages after it,
                F + U(r + 1) + B,                          what the next rank does, and the last micro-batch back
                t (F + S(r + 1) + B) + (m - 1 - (t - 1) h) B )    t = m / h, rounded up, such round trips one after the other

is the least from the first forward on rank r to its last backward, since the forward of a micro-batch waits for the
backward of the one h before it. Then

    P(r) + U(r) + O <= T                                   P: the first forwards on the stages before.

P and S are the least for so many blocks on so many ranks, each by a program of its own, and U is the least for the blocks
from some one on: what is least alone is no more than what it is in any plan.

With virtual stages a rank's blocks are anywhere. Each rank takes as many as it can under the same laws, with the least that
can stand before and after its stages: one block on each.

Without memory, total work over total speed. Let w_r be the work that rank r takes, in seconds of a micro-batch on the
devices that are fastest for each block; its own devices take at least s_r w_r. Then, for every rank r and a step of T,

    sum over q before r of s_q w_q  +  m s_r w_r  <=  T,        sum of w_r = W.

Weights y_r >= 0 with m s_r y_r + s_r * (sum of y after r) >= 1 add these up to T * (sum of y) >= W: a bound for any such y,
and the best one where all inequalities can be equalities. Without the first term, as with virtual stages, y_r = 1 / (m s_r);
there the inequalities of the stages, each as if its rank had no other, give a second bound, the larger one of few micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autopar.search.bound_rows import Array, BlockPrice, passing_bytes

STEPS = 14
"""Bisections at most."""

PRECISION = 4e-3
"""Of a bound, at which it is taken as it is: the lower end of the interval, so that it stays one."""

CHUNK = 4096
"""Rows side by side, times the blocks of a group, so that tables stay in the cache."""

_TINY = 1e-30
_PARTS = tuple(field.name for field in fields(BlockPrice))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """One candidate in one layout on one kind of devices.

    Attributes:
        first, last, group: prices of the first block, the last one, and of each of the group of equal ones.
        count: blocks of that group, the first and last of all not counted.
        least: blocks of it that each stage has for sure.
        alone: there is one block, which is both first and last.
        others: blocks that are neither in the group nor first or last.
        before_s, before_forward_s: for each pipeline rank the time of as many blocks as there are ranks before it, from the
            first on, and of their forwards.
        every_s: of each stage and micro-batch beside its blocks.
        limit_bytes: for tensors.
        schedule, virtual_stages, num_micro_batches: of the pipeline.
        waits: whether a rank's stages follow each other (every schedule but the interleaved ones).
        in_flight, most_done: micro-batches whose forward a stage of each pipeline rank has done when the rank's first
            backward begins, at least and at most.
    """

    first: BlockPrice
    last: BlockPrice
    group: BlockPrice
    count: int
    least: int
    alone: bool
    others: int
    before_s: tuple[float, ...]
    before_forward_s: tuple[float, ...]
    every_s: float
    limit_bytes: float
    schedule: str
    virtual_stages: int
    num_micro_batches: int
    waits: bool
    in_flight: tuple[int, ...]
    most_done: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRow:
    """One candidate in one layout.

    Attributes:
        ranks: for each pipeline rank the row of a pipeline of its devices alone; equal but for seconds and limits.
        work_s: of one micro-batch through all blocks, each on the devices that are fastest for it.
        slowness: of each pipeline rank: no block takes less than this times its part of ``work_s``.
        sends_s, sends_back_s: for each pipeline rank but the last, its message to the next one and the one back.
        around_s, around_back_s: of virtual stages, the last rank's message to the first one, and the one back.
        stage_bytes: what each stage but the last keeps of a micro-batch beside its blocks.
        tie_s: once a step, on the first rank and on the last one: gradients of parameters that both have.
    """

    ranks: tuple[PlaceRow, ...]
    work_s: float
    slowness: tuple[float, ...]
    sends_s: tuple[float, ...] = ()
    sends_back_s: tuple[float, ...] = ()
    around_s: float = 0.0
    around_back_s: float = 0.0
    stage_bytes: float = 0.0
    tie_s: float = 0.0

    @property
    def before_s(self) -> list[float]:
        """What stands before each rank beside blocks: messages, and what every stage repeats."""
        none = (0.0,) * (len(self.ranks) - 1)
        sends = zip(self.sends_s or none, self.sends_back_s or none, strict=True)
        every = (own.every_s + sum(both) for own, both in zip(self.ranks, sends, strict=False))
        return list(accumulate(every, initial=0.0))


def work_and_slowness(prices: Sequence[Sequence[BlockPrice]], counts: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """Of a row, from the prices of the blocks on each rank, which stand for ``counts`` ones."""
    times = np.array([[price.time_s for price in own] for own in prices])
    least = times.min(axis=0)
    some = least > 0
    slowness = (times[:, some] / least[some]).min(axis=1) if some.any() else np.ones(len(times))
    return float(least @ np.array(counts)), tuple(map(float, slowness))


def quick_bounds(rows: Sequence[MixedRow]) -> Array:
    """For each row a bound that is found at once; infinite where all ranks together have too little memory."""
    return np.array([work_bound_s(row) if _holds(row) else np.inf for row in rows])


def _holds(row: MixedRow) -> bool:
    """Whether the ranks can hold the blocks of the group, recomputed wherever they may be."""
    left = row.ranks[0].count
    for own, held in zip(row.ranks, row.ranks[0].in_flight, strict=True):
        each = own.group.static_bytes + held * min(own.group.held_bytes, own.group.held_again_bytes)
        room = own.limit_bytes * (1 + 1e-9)
        left -= left if room >= left * each else math.floor(room / each)
    return left <= 0


def work_bound_s(row: MixedRow) -> float:
    """Total work over total speed, with what each stage does beside its blocks; and as if each stage had a rank of its own."""
    own = row.ranks[0]
    found = _flow_s(row, own.waits, own.virtual_stages, 1)
    return found if own.waits else max(found, _flow_s(row, True, 1, own.virtual_stages))


def _flow_s(row: MixedRow, waits: bool, each: int, times: int) -> float:
    """The bound by weights for ranks of ``each`` stages, ``times`` as many as there are."""
    m, after, weighted_s = row.ranks[0].num_micro_batches, 0.0, 0.0
    for own, slowness, before_s in zip(
        row.ranks[::-1] * times, row.slowness[::-1] * times, row.before_s[::-1] * times, strict=True
    ):
        weight = max(1 / slowness - waits * after, 0.0) / m
        weighted_s += weight * (before_s + m * each * own.every_s)
        after += weight
    return (row.work_s + weighted_s) / after


def mixed_bounds(rows: Sequence[MixedRow], at_most_s: float = np.inf, *, only_test: bool = False) -> Array:
    """For each row the step time below which no plan exists; see :func:`autopar.search.bounds.bounds`.

    Args:
        at_most_s: what is not possible in this time is not looked at more closely: it is then the bound.
        only_test: nor is what is possible, whose bound is then a quick one; with a finite ``at_most_s`` alone.
    """
    found = np.zeros(len(rows))
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for i, row in enumerate(rows):
        own = row.ranks[0]
        alike.setdefault((len(row.ranks), own.count, own.waits), []).append(i)
    for (_, count, waits), places in alike.items():
        size = max(CHUNK // (count + 1), 1)
        for start in range(0, len(places), size):
            some = places[start : start + size]
            asked = [rows[i] for i in some]
            low = np.array([work_bound_s(row) for row in asked])
            columns = _Columns(asked)
            possible = columns.in_a_row if waits else columns.in_turns
            if only_test and np.isfinite(at_most_s):
                most = np.maximum(low, at_most_s)
                found[some] = np.where((low < at_most_s) & possible(most), low, most)
            else:
                found[some] = least_possible(low, possible, at_most_s)
    return found


def least_possible(low: Array, possible: Callable[[Array], NDArray[np.bool_]], at_most_s: float = np.inf) -> Array:
    """For each row the least time that is possible, by bisection; infinite where none is.

    Args:
        low: what is a bound already.
        possible: for each row whether a time is.
        at_most_s: what is not possible in this time is not looked at more closely: it is then the bound.
    """
    if np.isfinite(at_most_s):
        most = np.maximum(low, at_most_s)
        open_ = (low < at_most_s) & possible(most)
        found = np.where(open_, low, most)
    else:
        found = np.where(possible(np.full(len(low), np.inf)), low, np.inf)
        open_ = np.isfinite(found)
    if not open_.any():
        return found
    open_ &= ~possible(low)
    high = np.minimum(low * 2, np.where(open_, at_most_s, np.inf))
    for _ in range(40):  # to where it is possible
        short = open_ & ~possible(high)
        if not short.any():
            break
        low, high = np.where(short, high, low), np.where(short, high * 2, high)
    for _ in range(STEPS):
        if not (open_ & (high - low > PRECISION * low)).any():
            break
        middle = (low + high) / 2
        is_possible = possible(middle)
        low, high = np.where(is_possible, low, middle), np.where(is_possible, middle, high)
    return np.where(open_, low, found)


class _Columns:
    """Rows of as many ranks and blocks side by side: [rank, row], and [rank, row, blocks of the group on the rank].

    Attributes:
        own_s: of the step's micro-batches on the rank.
        forward_s, backward_s: of the first micro-batch there, and to the next rank or back from it.
        through_s, later_s: of the first micro-batch, forward and backward, and of one whose parameters are gathered already.
        steady_s: all backwards and the forwards that are left when the first of them begins.
        once_s: after the rank's last backward.
        fits: whether so many blocks fit in the rank's memory, and every stage has one.
    """

    def __init__(self, rows: Sequence[MixedRow]) -> None:
        first = [row.ranks[0] for row in rows]
        self.num_ranks, self.count, self.v = len(rows[0].ranks), first[0].count, first[0].virtual_stages
        rank, blocks = np.arange(self.num_ranks)[:, None], np.arange(self.count + 1.0)
        self.m = np.array([float(r.num_micro_batches) for r in first])
        virtual = np.array([r.virtual_stages for r in first])
        others = np.array([r.others for r in first])
        ends = (
            (rank == 0).astype(float),
            (rank + 1 == self.num_ranks) * np.array([not r.alone for r in first], dtype=float),
        )
        kinds = {id(own): own for row in rows for own in row.ranks}
        position = {key: i for i, key in enumerate(kinds)}
        which = np.array([[position[id(own)] for own in row.ranks] for row in rows]).T
        prices = np.array([_numbers(own) for own in kinds.values()]).transpose(1, 2, 0)[..., which]
        group, first_, last = (dict(zip(_PARTS, part, strict=True)) for part in prices)
        fixed = {name: ends[0] * first_[name] + ends[1] * last[name] for name in _PARTS}
        every_s, limit = np.array([(own.every_s, own.limit_bytes) for own in kinds.values()]).T[:, which]
        self.held = np.array([r.in_flight for r in first], dtype=float).T
        sending = virtual - (rank + 1 == self.num_ranks)  # stages of each rank
        limit = limit - self.held * sending * np.array([row.stage_bytes for row in rows])
        sends, back = (
            np.array([[*(getattr(row, name) or [0.0] * (self.num_ranks - 1)), 0.0] for row in rows]).T
            for name in ("sends_s", "sends_back_s")
        )
        least = np.maximum(virtual - others - ends[0] - ends[1], 0.0)
        # seconds
        again_s = self._again(group, first_, last, ends, limit, least)
        back_s, back_ends_s = (np.maximum(p["time_s"] - p["forward_s"], 0.0) for p in (group, fixed))
        m, one = self.m[None, :, None], blocks

        def line(slope: Array, start: Array) -> Array:
            return start[..., None] + slope[..., None] * one

        forward_s = line(group["forward_s"], fixed["forward_s"] + virtual * every_s)
        backward_s = line(back_s, back_ends_s) + again_s
        gathers_s = line(group["gather_s"], fixed["gather_s"])
        self.own_s = m * (line(group["time_s"], fixed["time_s"] + virtual * every_s) + again_s) + gathers_s
        self.forward_s, self.backward_s = forward_s + gathers_s + sends[..., None], backward_s + back[..., None]
        self.steady_s = m * backward_s + np.maximum(m - self.held[..., None], 0.0) * forward_s + back[..., None]
        tie_s = np.array([row.tie_s for row in rows]) * ((rank == 0) | (rank + 1 == self.num_ranks))
        self.once_s = line(group["once_s"], fixed["once_s"] + tie_s)
        self.trips = np.ceil(self.m / self.held)
        self.last_s = (self.m - 1 - (self.trips - 1) * self.held)[..., None] * backward_s
        self.through_s, self.first_s = self.forward_s + self.backward_s, self.forward_s + self.steady_s
        self.later_s = self.through_s - gathers_s
        if self.v > 1:
            self._around(rows, sends, back, every_s)
            self.group_forward_s = group["forward_s"] + group["gather_s"]
            self.ends_s = (fixed["forward_s"] + fixed["gather_s"] + virtual * every_s).sum(axis=0)
            around_s = np.array([row.around_s for row in rows])
            self.ends_s = self.ends_s + virtual * sends.sum(axis=0) + (virtual - 1) * around_s
            done = np.array([r.most_done for r in first], dtype=float).T
            self.steady_s = m * backward_s + np.maximum(self.m - done, 0.0)[..., None] * forward_s

    def _again(
        self,
        group: dict[str, Array],
        first_: dict[str, Array],
        last: dict[str, Array],
        ends: tuple[Array, Array],
        limit: Array,
        least: Array,
    ) -> Array:
        """Seconds that so many blocks recompute at least; and whether so many fit."""
        blocks = np.arange(self.count + 1.0)
        alone, beside = passing_bytes(first_, last, group, *ends)
        kept = sum(
            end * (part["static_bytes"] + self.held * np.minimum(part["held_bytes"], part["held_again_bytes"]))
            for end, part in zip(ends, (first_, last), strict=True)
        )
        room = limit * (1 + 1e-9) - kept  # what fits exactly, fits
        passing = np.where(blocks > 0, beside[..., None], alone[..., None])
        needed = (group["static_bytes"] + self.held * group["held_bytes"])[..., None] * blocks - room[..., None]
        needed += passing
        freed = np.maximum(self.held * (group["held_bytes"] - group["held_again_bytes"]), _TINY)
        again = np.maximum(np.ceil(needed / freed[..., None] - 1e-6), 0.0)
        self.fits = (again <= blocks) & (blocks >= least[..., None])
        part = np.clip(needed / freed[..., None], 0.0, blocks) * group["again_s"][..., None]
        more = np.maximum(needed, 0.0) * (group["more_byte_s"] / self.held)[..., None]
        more -= blocks * group["more_free_s"][..., None]
        found: Array = np.maximum(np.minimum(again, blocks) * group["least_again_s"][..., None], np.maximum(part, more))
        return found

    def _around(self, rows: Sequence[MixedRow], sends: Array, back: Array, every_s: Array) -> None:
        """What stands before a rank's first stage, there and back, and after its last one, at least."""
        forward = np.array([_least(row, "before_forward_s") for row in rows]).T
        both = np.array([_least(row, "before_s") for row in rows]).T
        before = np.cumsum(sends + every_s, axis=0) - sends - every_s
        self.start_s, self.end_s = forward + before, np.maximum(both - forward, 0.0) + np.cumsum(back, axis=0) - back

    # --- one stage a rank

    def in_a_row(self, time_s: Array) -> NDArray[np.bool_]:
        """For each row whether the ranks can take all blocks of the group in ``time_s``."""
        fits = self.fits & (self.own_s + self.once_s <= time_s[:, None])
        widths = [int(np.flatnonzero(own.any(axis=0)).max(initial=-1)) + 1 for own in fits]
        if not all(widths):
            return np.zeros(len(time_s), dtype=bool)
        prefix = self._prefixes(np.where(fits, self.forward_s, np.inf), widths)
        later_s = np.where(fits, self.later_s, np.inf)
        ends = np.full((2, len(time_s), self.count + max(widths)), np.inf)
        ends[0, :, self.count] = 0.0
        ends[1, :, self.count] = -1 / _TINY
        for rank in reversed(range(self.num_ranks)):
            width = widths[rank]
            own_s, first_s, last_s, once_s, through_s, stage_s = (
                values[rank, :, None, :width]
                for values in (self.own_s, self.first_s, self.last_s, self.once_s, self.through_s, later_s)
            )
            later, least = _windows(ends, self.count + 1, width)
            through = later + stage_s
            some = least + through_s
            np.maximum(some, own_s, out=some)
            np.maximum(some, later + first_s, out=some)
            np.maximum(some, self.trips[rank][:, None, None] * through + last_s, out=some)
            with np.errstate(invalid="ignore"):  # no time is too long, wherever the blocks begin
                room_s = (time_s[:, None] - prefix[rank])[..., None]
            some[(some + once_s > room_s) | ~fits[rank, :, None, :width]] = np.inf
            through.min(axis=2, out=ends[0, :, : self.count + 1])
            some.min(axis=2, out=ends[1, :, : self.count + 1])
        found: NDArray[np.bool_] = np.isfinite(ends[1, :, 0])
        return found

    def _prefixes(self, forward_s: Array, widths: Sequence[int]) -> list[Array]:
        """For each rank and number of blocks the least that the first forwards on the ranks before take with so many."""
        most = max(widths)
        done = np.full((forward_s.shape[1], most + self.count), np.inf)
        done[:, most - 1] = 0.0
        found = [done[:, most - 1 :].copy()]
        for rank in range(self.num_ranks - 1):
            width = widths[rank]
            before = _windows(done[:, most - width :].copy(), self.count + 1, width)
            (before + forward_s[rank, :, None, width - 1 :: -1][:, :, :width]).min(axis=2, out=done[:, most - 1 :])
            found.append(done[:, most - 1 :].copy())
        return found

    # --- several stages a rank

    def in_turns(self, time_s: Array) -> NDArray[np.bool_]:
        """As :meth:`in_a_row` for virtual stages."""
        alone = np.maximum(self.once_s, self.end_s[..., None]) + self.own_s + self.start_s[..., None]
        fits = self.fits & (alone <= time_s[:, None])
        most = self._most(fits)
        # the first micro-batch goes forward through all stages before any backward begins
        order = np.argsort(self.group_forward_s, axis=0)
        taken = np.take_along_axis(most, order, axis=0)
        before = np.minimum(np.cumsum(taken, axis=0), self.count)
        taken = np.diff(before, axis=0, prepend=0.0)
        forward_s = (taken * np.take_along_axis(self.group_forward_s, order, axis=0)).sum(axis=0) + self.ends_s
        steady = np.maximum(self.once_s, self.end_s[..., None]) + self.steady_s + forward_s[:, None]
        fits &= steady <= time_s[:, None]
        most = self._most(fits)
        found: NDArray[np.bool_] = fits.any(axis=2).all(axis=0) & (most.sum(axis=0) >= self.count)
        return found

    def _most(self, fits: NDArray[np.bool_]) -> Array:
        """The most blocks that each rank can take."""
        found: Array = np.where(fits, np.arange(self.count + 1.0), 0.0).max(axis=2)
        return found


def _windows(values: Array, places: int, width: int) -> Array:
    """For each row (the last dim of ``values``, contiguous) and place the values from there on, so many of them."""
    step = values.strides[-1]
    return np.ndarray((*values.shape[:-1], places, width), values.dtype, values, 0, (*values.strides, step))


def _numbers(own: PlaceRow) -> tuple[tuple[float, ...], ...]:
    """Prices of a block of the group, of the first and of the last."""
    return tuple(tuple(getattr(price, name) for name in _PARTS) for price in (own.group, own.first, own.last))


def _least(row: MixedRow, name: str) -> list[float]:
    """For each rank the least that as many blocks as there are ranks before it take, from the first on."""
    each = np.diff(np.array([getattr(own, name) for own in row.ranks]), axis=1)
    return [0.0, *np.cumsum(each.min(axis=0)).tolist()]

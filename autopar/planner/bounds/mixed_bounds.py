"""Lower bounds where pipeline ranks have different devices: the step time below which no cut of the blocks exists.

As in :mod:`autopar.planner.bounds.bounds` the blocks are a first one, a last one and a group of equal ones; here each rank has its
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

A first bound, which needs neither memory nor cuts, is that of :mod:`autopar.planner.bounds.mixed_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.bound_rows import Array, BlockPrice, passing_bytes
from autopar.planner.bounds.mixed_rows import MixedRow, PlaceRow, work_bound_s

STEPS = 14
"""Bisections at most."""

PRECISION = 4e-3
"""Of a bound, at which it is taken as it is: the lower end of the interval, so that it stays one."""

CHUNK = 4096
"""Rows side by side, times the blocks of a group, so that tables stay in the cache."""

_TINY = 1e-30
_PARTS = tuple(field.name for field in fields(BlockPrice))
_every = attrgetter(*_PARTS)


def mixed_bounds(
    rows: Sequence[MixedRow],
    at_most_s: float = np.inf,
    *,
    only_test: bool = False,
    precision: float = PRECISION,
) -> Array:
    """For each row the step time below which no plan exists; see :func:`autopar.planner.bounds.bounds.bounds`.

    Args:
        at_most_s: what is not possible in this time is not looked at more closely: it is then the bound.
        only_test: nor is what is possible, whose bound is then a quick one; with a finite ``at_most_s`` alone.
        precision: of a bound, by which it is lower at most.
    """
    found = np.array([work_bound_s(row) for row in rows])
    open_: list[int] = []
    for places, possible in _possible([i for i, low in enumerate(found) if low < at_most_s], rows):
        some = possible(np.full(len(places), at_most_s))
        found[places[~some]] = at_most_s
        open_ += places[some].tolist()
    if not (only_test and math.isfinite(at_most_s)):
        for places, possible in _possible(open_, rows):
            found[places] = least_possible(found[places], possible, at_most_s, precision)
    return found


def impossible(rows: Sequence[MixedRow], time_s: float) -> NDArray[np.bool_]:
    """For each row whether no plan takes ``time_s``, by the laws of ranks and their blocks alone.

    What costs no less than an impossible row is impossible too, and so it is in less time; of the quick bound this is not sure, which
    takes the part of all work that is quickest on a device for that of all.
    """
    found = np.zeros(len(rows), dtype=bool)
    for places, possible in _possible(range(len(rows)), rows):
        found[places] = ~possible(np.full(len(places), time_s))
    return found


def _possible(
    places: Sequence[int], rows: Sequence[MixedRow]
) -> Iterator[tuple[NDArray[np.int64], Callable[[Array], NDArray[np.bool_]]]]:
    """These rows in groups that are looked at side by side: where they stand, and whether times are possible for them."""
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for i in places:
        own = rows[i].ranks[0]
        alike.setdefault((len(rows[i].ranks), own.count, own.waits), []).append(i)
    for (_, count, waits), every in alike.items():
        size = max(CHUNK // (count + 1), 1)
        for start in range(0, len(every), size):
            some = every[start : start + size]
            columns = _Columns([rows[i] for i in some])
            yield np.array(some), columns.in_a_row if waits else columns.in_turns


def least_possible(
    low: Array, possible: Callable[[Array], NDArray[np.bool_]], most_s: float = np.inf, precision: float = PRECISION
) -> Array:
    """For each row the least time that is possible, by bisection: the lower end of the last interval, whatever the others are.

    Args:
        low: what is a bound already.
        possible: for each row whether a time is.
        most_s: what is possible for sure, where it is finite.
        precision: the width of the interval, over its lower end.
    """
    open_ = ~possible(low)
    high = np.minimum(low * 2, most_s)
    for _ in range(40):  # to where it is possible
        short = open_ & (high < most_s) & ~possible(high)
        if not short.any():
            break
        low, high = np.where(short, high, low), np.where(short, np.minimum(high * 2, most_s), high)
    for _ in range(STEPS):
        wide = open_ & (high - low > precision * low)
        if not wide.any():
            break
        middle = (low + high) / 2
        is_possible = possible(middle)
        low, high = np.where(wide & ~is_possible, middle, low), np.where(wide & is_possible, middle, high)
    return low


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
        fixed = dict(zip(_PARTS, ends[0] * prices[1] + ends[1] * prices[2], strict=True))
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
            self._around(list(kinds.values()), which, sends, back, every_s)
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

    def _around(
        self, kinds: Sequence[PlaceRow], which: NDArray[np.int64], sends: Array, back: Array, every_s: Array
    ) -> None:
        """What stands before a rank's first stage, there and back, and after its last one, at least.

        Args:
            which: of ``kinds``, of each rank and row.
        """
        forward, both = (
            _least(np.array([getattr(own, name) for own in kinds]), which) for name in ("before_forward_s", "before_s")
        )
        before = np.cumsum(sends + every_s, axis=0) - sends - every_s
        self.start_s, self.end_s = forward + before, np.maximum(both - forward, 0.0) + np.cumsum(back, axis=0) - back

    # --- one stage a rank

    def in_a_row(self, time_s: Array) -> NDArray[np.bool_]:
        """For each row whether the ranks can take all blocks of the group in ``time_s``."""
        fits = self.fits & (self.own_s + self.once_s <= time_s[:, None])
        some = fits.any(axis=1)
        if not some.any(axis=1).all():
            return np.zeros(len(time_s), dtype=bool)
        widths: list[int] = (self.count + 1 - some[:, ::-1].argmax(axis=1)).tolist()
        prefix = self._prefixes(np.where(fits, self.forward_s, np.inf), widths)
        later_s = np.where(fits, self.later_s, np.inf)
        ends = np.full((2, len(time_s), self.count + max(widths)), np.inf)
        ends[0, :, self.count] = 0.0
        ends[1, :, self.count] = -1 / _TINY
        for rank in reversed(range(self.num_ranks)):
            width = widths[rank]
            own_s, first_s, last_s, once_s, through_s, stage_s, denied = (
                values[rank, :, :width].T[..., None]
                for values in (
                    self.own_s, self.first_s, self.last_s, self.once_s, self.through_s, later_s, ~fits)
            )  # fmt: skip
            later, least = _windows(ends, self.count + 1, width).swapaxes(0, 1)
            through = later + stage_s
            some = least + through_s
            np.maximum(some, own_s, out=some)
            np.maximum(some, later + first_s, out=some)
            np.maximum(some, self.trips[rank][:, None] * through + last_s, out=some)
            with np.errstate(invalid="ignore"):  # no time is too long, wherever the blocks begin
                room_s = time_s[:, None] - prefix[rank]
            some[(some + once_s > room_s) | denied] = np.inf
            through.min(axis=0, out=ends[0, :, : self.count + 1])
            some.min(axis=0, out=ends[1, :, : self.count + 1])
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
            own_s = forward_s[rank, :, width - 1 :: -1][:, :width].T[..., None]
            (before + own_s).min(axis=0, out=done[:, most - 1 :])
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
    """For each row (the last dim of ``values``, contiguous) and place the values from there on: [width, rows, places].

    The dim over which a least one is sought stands first, which is many times quicker than last.
    """
    step = values.strides[-1]
    return np.ndarray((width, *values.shape[:-1], places), values.dtype, values, 0, (step, *values.strides[:-1], step))


def _numbers(own: PlaceRow) -> tuple[tuple[float, ...], ...]:
    """Prices of a block of the group, of the first and of the last."""
    return _every(own.group), _every(own.first), _every(own.last)


def _least(before: Array, which: NDArray[np.int64]) -> Array:
    """For each rank and row the least that as many blocks as there are ranks before it take, from the first on.

    Args:
        before: of each kind of rank, for 0, 1, ... blocks.
        which: kind of each rank and row.
    """
    each = np.diff(before, axis=1)[which].min(axis=0)
    found: Array = np.concatenate([np.zeros((1, which.shape[1])), np.cumsum(each, axis=1).T])
    return found

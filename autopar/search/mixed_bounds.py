"""Lower bounds where pipeline ranks have different devices: :mod:`autopar.search.bounds` with prices for each rank.

The laws hold for each rank, with the prices and the memory of its own devices, but what is done once a step differs too
much between devices to be added to what comes back through the ranks before. Rank r takes at least both

    (one micro-batch through the stages before it, there and back)  +  m * (its own)  +  (gathers in its first forward)
    (gathers in the first forwards before it)  +  m * (its own)  +  (its gathers)  +  (its optimizer and reductions).

What stands before a rank takes at least what it would take on the fastest of the ranks before it. The more blocks the ranks from r on take, the fewer are
left for the others, each of which is then no worse off: taking the most from the last rank on is still never wrong.

Without memory, total work over total speed. Let w_r be the work that rank r takes, in seconds of a micro-batch on the
devices that are fastest for each block; its own devices take at least s_r w_r. Then, for every rank r and a step of T,

    sum over q before r of s_q w_q  +  m s_r w_r  <=  T,        sum of w_r = W.

Weights y_r >= 0 with m s_r y_r + s_r * (sum of y after r) >= 1 add these up to T * (sum of y) >= W: a bound for any such y,
and the best one where all inequalities can be equalities. Without the first term, as with virtual stages, y_r = 1 / (m s_r).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autopar.search.bound_rows import Array, BlockPrice

STEPS = 14
_TINY = 1e-30
_PARTS = ("static_bytes", "held_bytes", "held_again_bytes", "passing_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """One candidate in one layout on one kind of devices.

    Attributes:
        first, last, group: prices of the first block, the last one, and of each of the group of equal ones.
        count: blocks of that group, the first and last of all not counted.
        alone: there is one block, which is both first and last.
        others: blocks that are neither in the group nor first or last.
        before_s: for each pipeline rank the time of as many blocks as there are ranks before it, from the first on.
        every_s: of each stage and micro-batch beside its blocks.
        limit_bytes: for tensors.
        virtual_stages, num_micro_batches: of the pipeline.
        waits: whether a rank's stages follow each other (every schedule but the interleaved ones).
        in_flight: micro-batches that each pipeline rank holds at least.
    """

    first: BlockPrice
    last: BlockPrice
    group: BlockPrice
    count: int
    alone: bool
    others: int
    before_s: tuple[float, ...]
    every_s: float
    limit_bytes: float
    virtual_stages: int
    num_micro_batches: int
    waits: bool
    in_flight: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRow:
    """One candidate in one layout.

    Attributes:
        ranks: for each pipeline rank the row of a pipeline of its devices alone; equal but for seconds and limits.
        work_s: of one micro-batch through all blocks, each on the devices that are fastest for it.
        slowness: of each pipeline rank: no block takes less than this times its part of ``work_s``.
        sends_s: of each pipeline rank but the last, its messages to the next one and back for one micro-batch.
    """

    ranks: tuple[PlaceRow, ...]
    work_s: float
    slowness: tuple[float, ...]
    sends_s: tuple[float, ...] = ()

    @property
    def before_s(self) -> list[float]:
        """What stands before each rank beside blocks: messages, and what every stage repeats."""
        sends = self.sends_s or [0.0] * (len(self.ranks) - 1)
        every = (own.every_s + send for own, send in zip(self.ranks, sends, strict=False))
        return list(accumulate(every, initial=0.0))


def mixed_row(
    ranks: Sequence[PlaceRow],
    prices: Sequence[Sequence[BlockPrice]],
    counts: Sequence[int],
    sends_s: Sequence[float] = (),
) -> MixedRow:
    """A row from those of each rank and, for each rank, the prices of the blocks, which stand for ``counts`` ones."""
    times = np.array([[price.time_s for price in own] for own in prices])
    least = times.min(axis=0)
    some = least > 0
    slowness = (times[:, some] / least[some]).min(axis=1) if some.any() else np.ones(len(times))
    return MixedRow(
        ranks=tuple(ranks),
        work_s=float(least @ np.array(counts)),
        slowness=tuple(map(float, slowness)),
        sends_s=tuple(sends_s),
    )


def work_bound_s(row: MixedRow) -> float:
    """Total work over total speed, with what each stage does beside its blocks."""
    m, waits, after = row.ranks[0].num_micro_batches, row.ranks[0].waits, 0.0
    weighted_s = 0.0
    for own, slowness, before_s in zip(row.ranks[::-1], row.slowness[::-1], row.before_s[::-1], strict=True):
        weight = max(1 / slowness - waits * after, 0.0) / m
        weighted_s += weight * (before_s + m * own.virtual_stages * own.every_s)
        after += weight
    return (row.work_s + weighted_s) / after


def mixed_bounds(rows: Sequence[MixedRow], at_most_s: float = np.inf) -> Array:
    """For each row the step time below which no plan exists; see :func:`autopar.search.bounds.bounds`."""
    if not rows:
        return np.zeros(0)
    columns = _Columns(rows)
    low = np.array([work_bound_s(row) for row in rows])
    return least_possible(low, lambda time_s: _possible(columns, time_s), at_most_s)


def least_possible(low: Array, possible: Callable[[Array], NDArray[np.bool_]], at_most_s: float = np.inf) -> Array:
    """For each row the least time that is possible, by bisection; infinite where none is.

    Args:
        low: what is a bound already.
        possible: for each row whether a time is.
        at_most_s: see :func:`autopar.search.bounds.bounds`.
    """
    found = np.where(possible(np.full(len(low), np.inf)), low, np.inf)
    open_ = np.isfinite(found) & (low < at_most_s)
    if not open_.any():
        return found
    open_ &= ~possible(low)
    if np.isfinite(at_most_s) and open_.any():
        slow = open_ & ~possible(np.full(len(low), at_most_s))
        found, open_ = np.where(slow, at_most_s, found), open_ & ~slow
    high = np.minimum(low * 2, np.where(open_, at_most_s, np.inf))
    for _ in range(40):  # to where it is possible
        short = open_ & ~possible(high)
        if not short.any():
            break
        low, high = np.where(short, high, low), np.where(short, high * 2, high)
    for _ in range(STEPS):
        if not open_.any():
            break
        middle = (low + high) / 2
        is_possible = possible(middle)
        low, high = np.where(is_possible, low, middle), np.where(is_possible, middle, high)
    return np.where(open_, low, found)


class _Columns:
    """Rows side by side; what differs by rank as [rank, row]."""

    def __init__(self, rows: Sequence[MixedRow]) -> None:
        first = [row.ranks[0] for row in rows]
        self.num_ranks = max(len(row.ranks) for row in rows)

        def column(values: Sequence[float]) -> Array:
            return np.array(values, dtype=np.float64)

        def by_rank(values: Sequence[Sequence[float]]) -> Array:
            return np.array([[*own, *[0.0] * (self.num_ranks - len(own))] for own in values], dtype=np.float64).T

        self.pp = column([len(row.ranks) for row in rows])
        self.m = column([r.num_micro_batches for r in first])
        self.virtual_stages = column([r.virtual_stages for r in first])
        self.count, self.others = column([r.count for r in first]), column([r.others for r in first])
        self.waits = np.array([r.waits for r in first])
        self.in_flight = by_rank([r.in_flight for r in first])
        self.group = {name: column([getattr(r.group, name) for r in first]) for name in _PARTS}
        self.time_s, self.again_s, self.once_s, first_s = (
            by_rank([[getattr(own.group, name) for own in row.ranks] for row in rows])
            for name in ("time_s", "again_s", "once_s", "gather_s")
        )
        self.every_s = by_rank([[own.every_s for own in row.ranks] for row in rows])
        self.limit_bytes = by_rank([[own.limit_bytes for own in row.ranks] for row in rows])
        self.first_s = first_s
        self.fastest_s = np.minimum.accumulate(self.time_s + first_s, axis=0)
        self.least_first_s = np.minimum.accumulate(first_s, axis=0)
        self.beside_s = by_rank([row.before_s for row in rows])
        self.before_s = by_rank([_before(row) for row in rows])
        names = ("time_s", "once_s", "gather_s", *_PARTS)
        self.first = {name: column([getattr(r.first, name) for r in first]) for name in names}
        self.last = {
            name: column([0.0 if row.ranks[-1].alone else getattr(row.ranks[-1].last, name) for row in rows])
            for name in names
        }


def _before(row: MixedRow) -> list[float]:
    """For each rank the least that as many blocks as there are ranks before it take, from the first on."""
    each = np.diff(np.array([own.before_s for own in row.ranks]), axis=1)
    return [0.0, *np.cumsum(each.min(axis=0)).tolist()]


def _possible(c: _Columns, time_s: Array) -> NDArray[np.bool_]:
    """Whether the ranks can take all blocks of the group in ``time_s``."""
    left, fits = c.count.copy(), np.ones(len(c.count), dtype=bool)
    for rank in reversed(range(c.num_ranks)):
        active = rank < c.pp
        budgets, room = _left_for_group(c, time_s, rank, left)
        fits &= ~active | ((budgets.min(axis=0) >= 0) & (room >= 0))
        # every stage has a block, and only so many are not of the group
        own = c.virtual_stages - c.others - (rank == 0) - (rank + 1 == c.pp)
        before = np.maximum(rank * c.virtual_stages - c.others - (rank > 0), 0)
        passing = np.maximum(float(rank == 0) * c.first["passing_bytes"], (c.pp == rank + 1) * c.last["passing_bytes"])
        room = room - np.maximum(c.group["passing_bytes"] - passing, 0.0)
        taken = np.floor(_most(c, rank, budgets, room) + 1e-6)
        taken = np.clip(taken, 0, np.maximum(left - before, 0))
        fits &= ~active | (taken >= own)
        left = np.where(active, left - taken, left)
    return fits & (left <= 0)


def _most(c: _Columns, rank: int, budgets: Array, room: Array) -> Array:
    """Blocks of the group, parts of them too, that a rank takes in so many seconds and bytes: recomputed as far as need be.

    ``budgets``: [2, row], see :func:`_left_for_group`.
    """
    held = c.in_flight[rank]
    freed = c.group["held_bytes"] - c.group["held_again_bytes"]
    own = c.m * c.time_s[rank] + c.first_s[rank]
    ways = np.stack([own - c.waits * c.fastest_s[rank], own - c.waits * c.least_first_s[rank] + c.once_s[rank]])
    slope = np.maximum(ways, _TINY)
    plain = c.group["static_bytes"] + held * c.group["held_bytes"] + _TINY
    lean = c.group["static_bytes"] + held * c.group["held_again_bytes"] + _TINY
    for_byte = c.m * c.again_s[rank] / np.maximum(held * freed, _TINY)
    unhurried = room / plain
    with np.errstate(invalid="ignore"):  # inf seconds, when only memory is asked for
        taken = budgets / slope
        both = (budgets + for_byte * room) / (slope + for_byte * plain)
    taken, both = taken.min(axis=0), np.where(np.isfinite(budgets), both, np.inf).min(axis=0)
    found: Array = np.where(taken <= unhurried, taken, np.maximum(np.minimum(both, room / lean), unhurried))
    return found


def _left_for_group(c: _Columns, time_s: Array, rank: int, left: Array) -> tuple[Array, Array]:
    """Seconds, by each of the two laws, and bytes that a rank has for blocks of the group.

    The first and last block are paid for, where they are.
    """
    m, held, is_first, is_last = c.m, c.in_flight[rank], float(rank == 0), c.pp == rank + 1
    before = np.where(
        c.waits, left * c.fastest_s[rank] + (rank > 0) * (c.first["time_s"] + c.first["gather_s"]), c.before_s[rank]
    )
    gathers = np.where(c.waits, left * c.least_first_s[rank] + (rank > 0) * c.first["gather_s"], 0.0)
    ends = [m * part["time_s"] + part["gather_s"] for part in (c.first, c.last)]
    own = is_first * ends[0] + is_last * ends[1] + m * c.virtual_stages * c.every_s[rank]
    once = is_first * c.first["once_s"] + is_last * c.last["once_s"]
    budgets = np.stack([time_s - before - c.beside_s[rank] - own, time_s - gathers - own - once])
    passing = np.maximum(is_first * c.first["passing_bytes"], is_last * c.last["passing_bytes"])
    fixed = [
        part["static_bytes"] + held * np.minimum(part["held_bytes"], part["held_again_bytes"])
        for part in (c.first, c.last)
    ]
    room = c.limit_bytes[rank] - is_first * fixed[0] - is_last * fixed[1] - passing
    return budgets, room

"""Lower bounds on the step time of candidates, for many of them at once.

A plan puts consecutive blocks on pipeline ranks. Whatever the cut and whichever blocks recompute, each rank r that
holds the blocks K_r takes at least

    before_r + m * (time of K_r, with what it recomputes) + (once a step: optimizer, exposed reductions of K_r)

where before_r is one micro-batch through the stages before it, forward and backward: no rank starts before the first
forward has come through, and its last input gradient has to go back. What K_r keeps for the micro-batches in flight,
less what it recomputes, has to fit beside its parameters. A step time T is *possible* if ranks can take all blocks under
these two laws. :func:`bounds` finds the smallest possible T by bisection, with two relaxations: only the largest group
of equal blocks is cut (the first and the last block stay where they must be, others are left out), and a block may be
recomputed in part. From the last rank to the first each takes as many blocks as it can: the fewer are left, the less
stands before the ranks that follow, so taking the most is never wrong.

A second bound has all blocks but neither memory nor whole blocks (:func:`flow_s`). The larger one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEPS = 14
"""Bisections: the interval shrinks to 1e-4 of its width. Its lower end is returned, so that the bound stays one."""

_TINY = 1e-30


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """The least that a block (or each of a group) adds to its rank.

    Attributes:
        time_s: forward and backward of one micro-batch.
        again_s: what recompute adds.
        once_s: once a step.
        first_s: what it adds to the step's first forward.
        static_bytes: parameters, gradients and optimizer states.
        held_bytes, held_again_bytes: of one micro-batch between forward and backward; the second with recompute.
        passing_bytes: at its peak inside.
    """

    time_s: float
    again_s: float
    once_s: float
    static_bytes: float
    held_bytes: float
    held_again_bytes: float
    passing_bytes: float
    first_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate in one layout.

    Attributes:
        first, last, group: prices of the first block, the last one, and of each of the group of equal ones.
        count: blocks of that group, the first and last of all not counted.
        alone: there is one block, which is both first and last.
        others: blocks that are neither in the group nor first or last.
        total_s: time of all blocks.
        before_s: for each pipeline rank the time of as many blocks as there are ranks before it, from the first on.
        once_s: of all blocks.
        every_s: of each stage and micro-batch beside its blocks.
        limit_bytes: for tensors.
        pp, virtual_stages, num_micro_batches: of the pipeline.
        waits: whether a rank's stages follow each other (every schedule but the interleaved ones).
        in_flight: micro-batches that each pipeline rank holds.
    """

    first: BlockPrice
    last: BlockPrice
    group: BlockPrice
    count: int
    alone: bool
    others: int
    total_s: float
    before_s: tuple[float, ...]
    once_s: float
    every_s: float
    limit_bytes: float
    pp: int
    virtual_stages: int
    num_micro_batches: int
    waits: bool
    in_flight: tuple[int, ...]


class _Columns:
    """Rows side by side; ``in_flight`` by rank."""

    def __init__(self, rows: Sequence[Row]) -> None:
        def column(values: list[float]) -> Array:
            return np.array(values, dtype=np.float64)

        self.first, self.last, self.group = (
            {f.name: column([getattr(getattr(r, part), f.name) for r in rows]) for f in fields(BlockPrice)}
            for part in ("first", "last", "group")
        )
        for name, values in self.last.items():  # one block alone is counted as the first
            self.last[name] = np.where([r.alone for r in rows], 0.0, values)
        self.count = column([r.count for r in rows])
        self.others = column([r.others for r in rows])
        self.every_s = column([r.every_s for r in rows])
        self.limit_bytes = column([r.limit_bytes for r in rows])
        self.pp = column([r.pp for r in rows])
        self.virtual_stages = column([r.virtual_stages for r in rows])
        self.m = column([r.num_micro_batches for r in rows])
        self.waits = np.array([r.waits for r in rows])
        ranks = max(r.pp for r in rows)
        self.in_flight, self.before_s = (
            np.array([[*getattr(r, name), *[0] * (ranks - r.pp)] for r in rows], dtype=np.float64).T
            for name in ("in_flight", "before_s")
        )


def bounds(rows: Sequence[Row], at_most_s: float = np.inf) -> Array:
    """For each row the step time, in seconds, below which no plan exists; infinite where none fits in memory.

    Args:
        at_most_s: what is not possible in this time is not looked at more closely: it is then the bound, or infinity.
    """
    if not rows:
        return np.zeros(0)
    columns = _Columns(rows)
    low = np.array([flow_s(row) for row in rows])
    return least_possible(low, lambda time_s: _possible(columns, time_s), at_most_s)


def least_possible(low: Array, possible: Callable[[Array], NDArray[np.bool_]], at_most_s: float = np.inf) -> Array:
    """For each row the least time that is possible, by bisection; infinite where none is.

    Args:
        low: what is a bound already.
        possible: for each row whether a time is.
        at_most_s: see :func:`bounds`.
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


def flow_s(row: Row) -> float:
    """The bound without memory, with blocks that can be cut anywhere.

    With one stage a rank, for some rank r the step takes at least (time of the stages before r) + m * (its own). The
    split that makes the largest of these smallest is geometric and gives total / (1 - (1 - 1/m)^p); it holds for
    virtual stages too, over all stages. A rank's own work gives (m * total + once) / p, and with virtual stages at least
    r blocks stand before rank r.
    """
    stages = row.pp * row.virtual_stages
    before = 0.0 if row.waits else sum(row.before_s)
    total_s = row.total_s + stages * row.every_s
    return least_flow_s(total_s, row.num_micro_batches, row.pp, stages, row.once_s + before)


def least_flow_s(total_s: float, num_micro_batches: int, pp: int, stages: int, once_s: float = 0.0) -> float:
    """:func:`flow_s` from the seconds of a micro-batch on all ranks together; ``once_s`` of all of them once a step."""
    latency = total_s / (1 - (1 - 1 / num_micro_batches) ** stages)
    return max(latency, (num_micro_batches * total_s + once_s) / pp)


def _possible(c: _Columns, time_s: Array) -> NDArray[np.bool_]:
    """Whether the ranks can take all blocks of the group in ``time_s``."""
    left = c.count.copy()
    fits = np.ones(len(left), dtype=bool)
    again_s, freed = c.m * c.group["again_s"], c.group["held_bytes"] - c.group["held_again_bytes"]
    for rank in reversed(range(len(c.in_flight))):
        active = rank < c.pp
        budget, room = _left_for_group(c, time_s, rank, left)
        held = c.in_flight[rank]
        slope = (c.m - c.waits) * c.group["time_s"] + c.group["once_s"] + _TINY
        plain = c.group["static_bytes"] + held * c.group["held_bytes"] + _TINY
        lean = c.group["static_bytes"] + held * c.group["held_again_bytes"] + _TINY
        for_byte = again_s / np.maximum(held * freed, _TINY)
        fits &= ~active | ((budget >= 0) & (room >= 0))
        passing = np.where(
            rank == 0, c.first["passing_bytes"], np.where(rank + 1 == c.pp, c.last["passing_bytes"], 0.0)
        )
        room = room - np.maximum(c.group["passing_bytes"] - passing, 0.0)
        unhurried = room / plain
        with np.errstate(invalid="ignore"):  # inf seconds, when only memory is asked for
            taken = budget / slope
            both = (budget + for_byte * room) / (slope + for_byte * plain)
        both = np.where(np.isfinite(budget), both, np.inf)
        taken = np.where(taken <= unhurried, taken, np.maximum(np.minimum(both, room / lean), unhurried))
        # every stage has a block, and only so many are not of the group
        own = c.virtual_stages - c.others - (rank == 0) - (rank + 1 == c.pp)
        before = np.maximum(rank * c.virtual_stages - c.others - (rank > 0), 0)
        taken = np.clip(np.floor(taken + 1e-6), 0, np.maximum(left - before, 0))
        fits &= ~active | (taken >= own)
        left = np.where(active, left - taken, left)
    return fits & (left <= 0)


def _left_for_group(c: _Columns, time_s: Array, rank: int, left: Array) -> tuple[Array, Array]:
    """Seconds and bytes that a rank has for blocks of the group, the first and last block where they are paid for."""
    m, held = c.m, c.in_flight[rank]
    is_first, is_last = float(rank == 0), c.pp == rank + 1
    first_s = c.first["time_s"]
    before = np.where(c.waits, left * c.group["time_s"] + (rank > 0) * first_s, 0.0)
    before = np.where(c.waits, before, c.before_s[rank]) + rank * c.every_s
    own = is_first * (m * first_s + c.first["once_s"]) + is_last * (m * c.last["time_s"] + c.last["once_s"])
    budget = time_s - before - own - m * c.virtual_stages * c.every_s
    passing = np.maximum(is_first * c.first["passing_bytes"], is_last * c.last["passing_bytes"])
    fixed = [
        part["static_bytes"] + held * np.minimum(part["held_bytes"], part["held_again_bytes"])
        for part in (c.first, c.last)
    ]
    room = c.limit_bytes - is_first * fixed[0] - is_last * fixed[1] - passing
    return budget, room

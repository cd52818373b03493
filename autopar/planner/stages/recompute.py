"""The activation modes of blocks, and which the blocks of a stage take so that it fits in memory in the least time.

A stage of n blocks that each run in one of a few activation modes is a multiple-choice knapsack (Sinha and Zoltners 1979): seconds are
minimised while bytes held for each micro-batch stay within what memory leaves. Equal blocks are counted. For each kind of block the modes
on the lower hull of seconds against bytes are steps of ever fewer bytes freed for a second; the steps of all kinds are taken in that order
until enough is freed, and what is then freed too much is taken back where it saves most. Between the optimum of the fractional problem and
what is found lies at most one step.

What a stage needs in passing is the most that any of its modes needs, beside what it holds: for each such number of bytes the problem is
solved with the modes that need no more. The work grows with kinds of blocks squared, not with products of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.plan.plan import Recompute

MOVED: Literal["moved"] = "moved"
"""Recomputes nothing, and keeps on the host what backward needs."""

Way = Recompute | Literal["moved"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """A block run in one way.

    Attributes:
        time_s: forward, backward and recompute of one micro-batch.
        forward_s: the forward of it, where something moves.
        down_s, up_s: copies to the host and back, beside the forwards and the backwards of the stage.
        held_bytes: of one micro-batch between forward and backward.
        transient_bytes: at its peak inside.
    """

    mode: Way
    time_s: float
    held_bytes: float
    transient_bytes: float
    forward_s: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlock:
    """A block as the cut sees it: equal ``key`` means equal in everything else.

    Attributes:
        static_bytes: parameters, gradients and optimizer states.
        once_s: the least that it adds to a step once.
        more_s: what counts beside its time where stages are balanced.
    """

    key: int
    options: tuple[BlockOption, ...]
    static_bytes: float
    once_s: float = 0.0
    more_s: float = 0.0


def useful(options: Sequence[BlockOption]) -> tuple[BlockOption, ...]:
    """Those than which no other one is as good in everything; of equal ones the first. What moves is as good as nothing else."""

    def parts(option: BlockOption) -> tuple[float, float, float]:
        return option.time_s, option.held_bytes, option.transient_bytes

    def beats(i: int, k: int) -> bool:
        a, b = parts(options[i]), parts(options[k])
        return options[i].mode != MOVED and all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or i < k)

    return tuple(o for k, o in enumerate(options) if not any(beats(i, k) for i in range(len(options)) if i != k))


def with_moved(modes: Sequence[Way]) -> tuple[Way, ...]:
    """The modes of a block that may keep on the host what it needs; which it does not where it recomputes selectively."""
    some = [mode for mode in modes if mode != "selective"]
    return tuple(way for mode in some for way in ((mode, MOVED) if mode == "none" else (mode,))) or tuple(modes)


def none_if_moved(way: Way) -> Recompute:
    """What a block recomputes."""
    return "none" if way == MOVED else way


def lower_hull(options: Sequence[BlockOption]) -> list[int]:
    """Positions of options on the lower hull of seconds against held bytes, from the quickest to the one that holds least.

    Each step from one to the next frees more bytes for a second than the step after it.
    """
    if not options:
        return []
    found = [min(range(len(options)), key=lambda i: (options[i].time_s, options[i].held_bytes, i))]
    while True:
        here = options[found[-1]]
        less = [i for i, option in enumerate(options) if option.held_bytes < here.held_bytes]
        if not less:
            return found
        found.append(max(less, key=lambda i: (_gain(here, options[i]), -options[i].held_bytes)))


def _gain(before: BlockOption, after: BlockOption) -> float:
    """Bytes that are freed for each second more."""
    more_s = after.time_s - before.time_s
    return (before.held_bytes - after.held_bytes) / more_s if more_s > 0 else float("inf")


Array = NDArray[np.float64]

ROUNDING = 1e-9
"""Part of a step's bytes up to which rounding may make them seem too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """The problem for each number of bytes in passing [levels], with its steps in order [steps, levels].

    Attributes:
        passing_bytes: what modes may need.
        first: the mode that a block of each kind has before any step [levels, kinds]; -1: no mode of this kind is allowed.
        kind, before, after: whose blocks take a step, and from which mode to which.
        previous: the step that brings a block to the mode before this one; -1: it is the first mode. Of a place without a step -2.
        following: the step that takes a block on from the mode after this one; -1: there is none.
        time_s, freed_bytes: of one block.
        most_freed: of a block of each kind by all its steps [levels, kinds].
    """

    passing_bytes: Array
    first: NDArray[np.int64]
    kind: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    previous: NDArray[np.int64]
    following: NDArray[np.int64]
    time_s: Array
    freed_bytes: Array
    most_freed: Array


class Recomputes:
    """The least recompute of stages that are made of blocks of these kinds.

    Args:
        kinds: one block of each kind.
    """

    def __init__(self, kinds: Sequence[CutBlock]) -> None:
        self.kinds = tuple(kinds)
        self.static_bytes = np.array([block.static_bytes for block in kinds])
        none = BlockOption(mode=MOVED, time_s=0.0, held_bytes=0.0, transient_bytes=0.0)
        self._may_move = np.array([any(o.mode == MOVED for o in block.options) for block in kinds])
        self._must_move = np.array([all(o.mode == MOVED for o in block.options) for block in kinds])
        self._moving = [next((o for o in block.options if o.mode == MOVED), none) for block in kinds]
        plain = [[o for o in block.options if o.mode != MOVED] for block in kinds]
        self._plain = [own or list(block.options) for own, block in zip(plain, kinds, strict=True)]
        self._levels = _levels(self._plain)
        level = self._levels
        chosen = [[self._plain[k][max(i, 0)] for k, i in enumerate(row)] for row in level.first.tolist()]
        self._time_s = np.array([[o.time_s + b.more_s for o, b in zip(row, kinds, strict=True)] for row in chosen])
        self._held_bytes = np.array([[o.held_bytes for o in row] for row in chosen])
        self._forward_s = np.array([[o.forward_s for o in row] for row in chosen])

    def times_s(self, counts: NDArray[np.int64], in_flight: Sequence[int], limit_bytes: Sequence[float]) -> Array:
        """The least seconds of a micro-batch on stages [limits, stages]; infinite where a stage does not fit.

        Args:
            counts: blocks of each kind on each stage [stages, kinds].
            in_flight, limit_bytes: micro-batches that a stage holds, and bytes that it may fill: of each limit.
        """
        held, limit = (np.array(own, dtype=float)[:, None] for own in (in_flight, limit_bytes))
        best = np.full((len(held), len(counts)), np.inf)
        for moved in self._moved(counts):
            time_s = self._solved(counts, moved, held, limit)[0]
            np.minimum(best, time_s.min(axis=0), out=best)
        return best

    def modes(
        self, counts: NDArray[np.int64], in_flight: Sequence[int], limit_bytes: Sequence[float]
    ) -> list[list[dict[Way, int]]]:
        """For each of some stages that fit, of each kind how many blocks take which mode, as :meth:`times_s` counts them.

        Args:
            counts: blocks of each kind on each stage [stages, kinds].
            in_flight, limit_bytes: of each stage.
        """
        held, limit = (np.array(own, dtype=float)[None] for own in (in_flight, limit_bytes))
        solved = [(moved, *self._solved(counts, moved, held, limit)) for moved in self._moved(counts)]
        found = []
        for s, own in enumerate(counts):
            moved, time_s, taken = min(solved, key=lambda one: float(one[1][:, 0, s].min()))
            level = int(time_s[:, 0, s].argmin())
            found.append(self._named(own, moved[s], level, taken[:, level, 0, s]))
        return found

    def _named(
        self, counts: NDArray[np.int64], moved: NDArray[np.int64], level: int, taken: Array
    ) -> list[dict[Way, int]]:
        found = []
        for k, own in enumerate(self._plain):
            modes = {o.mode: 0 for o in own}
            modes[own[int(self._levels.first[level, k])].mode] = int(counts[k] - moved[k])
            found.append(modes | ({MOVED: int(moved[k])} if moved[k] else {}))
        for c, count in enumerate(taken.astype(int).tolist()):
            if self._levels.previous[c, level] > -2:
                k = int(self._levels.kind[c, level])
                found[k][self._plain[k][int(self._levels.before[c, level])].mode] -= count
                found[k][self._plain[k][int(self._levels.after[c, level])].mode] += count
        return found

    def _moved(self, counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """How many blocks of each kind keep on the host what they need: the same part of all that may."""
        own = np.where(self._may_move, counts, 0)
        most = int(own.max(initial=0))
        fixed = np.where(self._must_move, counts, 0)
        return [np.maximum(own * part // max(most, 1), fixed) for part in range(most + 1)]

    def _solved(
        self, counts: NDArray[np.int64], moved: NDArray[np.int64], in_flight: Array, limit_bytes: Array
    ) -> tuple[Array, Array]:
        """Seconds [levels, limits, stages] and how often each step is taken [steps, levels, limits, stages].

        Args:
            in_flight, limit_bytes: of shapes that broadcast to [limits, stages].
        """
        level, plain, own = self._levels, counts - moved, self._moving
        static = counts @ self.static_bytes
        moved_bytes = ((moved > 0) * np.array([o.transient_bytes for o in own])).max(axis=1)
        passing = np.maximum(level.passing_bytes[:, None], moved_bytes[None])
        room = (limit_bytes - static - passing[:, None]) / in_flight
        more_s = np.array([o.time_s + block.more_s for o, block in zip(own, self.kinds, strict=True)])
        time_s = (plain @ self._time_s.T).T + moved @ more_s
        need = (plain @ self._held_bytes.T).T[:, None] + moved @ np.array([o.held_bytes for o in own]) - room
        allowed = ((plain > 0) @ (level.first < 0).T == 0).T
        found_s, taken = _covered(level, plain, need)
        found_s = found_s + time_s[:, None]
        if moved.any():
            forward_s = (plain @ self._forward_s.T).T + moved @ np.array([o.forward_s for o in own])
            down_s, up_s = moved @ np.array([o.down_s for o in own]), moved @ np.array([o.up_s for o in own])
            last_up_s = (moved.sum(axis=1) > 0) * min((o.up_s for o in own if o.up_s), default=0.0)
            waits = np.maximum(down_s - forward_s, 0.0)[:, None]
            waits = waits + np.maximum(up_s - (found_s - forward_s[:, None]), 0.0) + last_up_s
            found_s = found_s + waits
        return np.where(allowed[:, None], found_s, np.inf), taken


def _levels(kinds: Sequence[Sequence[BlockOption]]) -> _Levels:
    sizes = sorted({o.transient_bytes for own in kinds for o in own})
    rows: list[list[tuple[float, int, int, int, float, float]]] = []
    first = np.full((len(sizes), len(kinds)), -1)
    for r, size in enumerate(sizes):
        row = []
        for k, own in enumerate(kinds):
            allowed = [i for i, o in enumerate(own) if o.transient_bytes <= size]
            hull = lower_hull([own[i] for i in allowed])
            if hull:
                first[r, k] = allowed[hull[0]]
            for a, b in pairwise(hull):
                one, other = own[allowed[a]], own[allowed[b]]
                more_s, fewer = other.time_s - one.time_s, one.held_bytes - other.held_bytes
                row.append((more_s / fewer, k, allowed[a], allowed[b], more_s, fewer))
        rows.append(sorted(row))
    most = max(map(len, rows))
    shape = most, len(sizes)
    kind, before, after = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    previous, following = np.full(shape, -2), np.full(shape, -1)
    time_s, freed_bytes, most_freed = np.zeros(shape), np.ones(shape), np.zeros(first.shape)
    for r, row in enumerate(rows):
        place: dict[tuple[int, int], int] = {}
        for c, (_, k, a, b, more_s, fewer) in enumerate(row):
            kind[c, r], before[c, r], after[c, r], time_s[c, r], freed_bytes[c, r] = k, a, b, more_s, fewer
            most_freed[r, k] += fewer
            previous[c, r] = place.get((k, a), -1)
            if (k, a) in place:
                following[place[k, a], r] = c
            place[k, b] = c
    return _Levels(
        passing_bytes=np.array(sizes), first=first, kind=kind, before=before, after=after, previous=previous,
        following=following, time_s=time_s, freed_bytes=freed_bytes, most_freed=most_freed,
    )  # fmt: skip


def _covered(level: _Levels, counts: NDArray[np.int64], need: Array) -> tuple[Array, Array]:
    """Steps that free at least so many bytes of a micro-batch, and their seconds; infinite where all steps free less.

    Args:
        need: [levels, limits, stages].

    Returns:
        Seconds [levels, limits, stages], and how often each step is taken [steps, levels, limits, stages].
    """
    most = (counts @ level.most_freed.T).T[:, None]
    tiny = ROUNDING * np.maximum(np.abs(need), 1.0)
    time_s, taken = np.where(need > most + tiny, np.inf, 0.0), np.zeros((len(level.kind), *need.shape))
    rows, limits, stages = asked = np.nonzero((need > 0.0) & np.isfinite(time_s))
    if len(rows):
        freed = _freed(level, counts[stages], rows, need[asked], tiny[asked])
        time_s[asked], taken[:, rows, limits, stages] = freed
    return time_s, taken


def _freed(
    level: _Levels, counts: NDArray[np.int64], row: NDArray[np.intp], need: Array, tiny: Array
) -> tuple[Array, Array]:
    """Of stages one by one: seconds [stages] and counts [steps, stages] of steps in order, until enough is freed.

    Those that are not needed are taken back, first those that take longest for what they free.

    Args:
        counts: blocks of each kind [stages, kinds].
        row: the level of each.
    """
    every, taken, left = np.arange(len(row)), np.zeros((len(level.kind), len(row))), need
    for c, size in enumerate(level.freed_bytes[:, row]):
        previous = level.previous[c, row]
        may = np.where(previous == -1, counts[every, level.kind[c, row]], taken[previous, every] * (previous >= 0))
        taken[c] = np.minimum(np.maximum(np.ceil(left / size), 0.0), may)
        left = left - taken[c] * size
    for c in reversed(range(len(taken))):
        size, following = level.freed_bytes[c, row], level.following[c, row]
        onward = taken[following, every] * (following >= 0)
        back = np.clip(np.floor((tiny - left) / size), 0.0, taken[c] - onward)
        taken[c] -= back
        left = left + back * size
    return np.where(left > tiny, np.inf, (taken * level.time_s[:, row]).sum(axis=0)), taken

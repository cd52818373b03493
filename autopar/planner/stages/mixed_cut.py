"""The stage cut where pipeline ranks have different devices, one stage a rank.

:mod:`autopar.planner.stages.stage_cut` minimises the sum of the stages' times and the slowest one's, which is the step where all that
is done once a step is alike. On a slow network the reductions of a stage may take as long as its computation: fast devices
then take more blocks than their speed asks for. Here the program of :mod:`autopar.planner.bounds.mixed_bounds` runs over the blocks
themselves, every stage with its own times, memory and choices of recompute. Of the cuts that it names the quickest is taken,
and moved block by block while that makes it quicker. The program knows the least that may stand before a rank, not what does:
of few blocks with very unequal work once a step a cut may be quicker still.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.planner.stages.choices import Array

PRECISION = 1e-3
"""Of the least time, at which the search for a quicker cut ends."""

STEPS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTables:
    """A pipeline rank's stage, whichever blocks i:j it has.

    Attributes:
        time_s: forward, backward and recompute of one micro-batch [i, j]; inf where they do not fit.
        forward_s, gather_s, once_s: the forward's part of it, what the first one takes longer, what is done once a step.
        sends_s, sends_back_s: to the next rank, and back from it.
        num_done: micro-batches whose forward the rank has done when its first backward begins.
    """

    time_s: Array
    forward_s: Array
    gather_s: Array
    once_s: Array
    sends_s: float
    sends_back_s: float
    num_done: int


def spans(values: Sequence[float]) -> Array:
    """The sum of values i:j as [i, j]; of no meaning where j is not beyond i."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    found: Array = sums[None, :] - sums[:, None]
    return found


def quickest_stops(ranks: Sequence[RankTables], num_micro_batches: int) -> tuple[tuple[int, ...], float] | None:
    """Where each stage of the quickest cut ends, and the seconds that it takes at least; None where none fits."""
    program = Program(ranks, num_micro_batches)
    stops = program.stops(np.inf)
    if stops is None:
        return None
    best, high = stops, program.value_s(stops)
    least = high
    low = program.slowest_s()
    for _ in range(STEPS):
        if high - low <= PRECISION * high:
            break
        middle = (low + high) / 2
        stops = program.stops(middle)
        if stops is None:
            low = middle
            continue
        high, value = middle, program.value_s(stops)
        if value < least:
            best, least = stops, value
    return _moved(program, best, least)


def _moved(program: Program, stops: tuple[int, ...], value_s: float) -> tuple[tuple[int, ...], float]:
    """A cut from which no block can move to the stage beside its own and make it quicker."""
    while True:
        edges = (0, *stops)
        beside = [
            (*stops[:k], stop + step, *stops[k + 1 :])
            for k, stop in enumerate(stops[:-1])
            for step in (-1, 1)
            if edges[k] < stop + step < stops[k + 1]
        ]
        found, least_s = min(
            ((own, program.value_s(own)) for own in beside), key=lambda p: p[1], default=(stops, value_s)
        )
        if not least_s < value_s:
            return stops, value_s
        stops, value_s = found, least_s


class Program:
    """Cuts over blocks i:j on each rank, each with the seconds that it takes at least."""

    def __init__(self, ranks: Sequence[RankTables], num_micro_batches: int) -> None:
        self.ranks, m = ranks, num_micro_batches
        self.n = len(ranks[0].time_s) - 1
        self.own_s = [m * r.time_s + r.gather_s for r in ranks]
        self.first_s = [np.where(np.isfinite(r.time_s), r.forward_s + r.gather_s + r.sends_s, np.inf) for r in ranks]
        self.back_s = [r.time_s - r.forward_s + r.sends_back_s for r in ranks]
        self.steady_s = [
            first + m * (back - r.sends_back_s) + max(m - r.num_done, 0) * r.forward_s + r.sends_back_s
            for r, first, back in zip(ranks, self.first_s, self.back_s, strict=True)
        ]
        self.trips = [-(-m // r.num_done) for r in ranks]
        lasts = [m - 1 - (trips - 1) * r.num_done for trips, r in zip(self.trips, ranks, strict=True)]
        self.last_s = [
            last * np.where(np.isfinite(back), back - r.sends_back_s, 0.0)
            for last, r, back in zip(lasts, ranks, self.back_s, strict=True)
        ]
        self.later_s = [
            first + back - r.gather_s for first, back, r in zip(self.first_s, self.back_s, ranks, strict=True)
        ]
        self.through_s = [first + back for first, back in zip(self.first_s, self.back_s, strict=True)]

    def slowest_s(self) -> float:
        """A bound: what some rank takes, however the blocks are cut."""
        best = np.full(self.n + 1, np.inf)
        best[0] = 0.0
        for own, rank in zip(self.own_s, self.ranks, strict=True):
            best = np.maximum(best[:, None], own + rank.once_s).min(axis=0)
        return float(best[-1])

    def stops(self, time_s: float) -> tuple[int, ...] | None:
        """A cut that may take no longer; None where there is none."""
        rows, n = np.arange(self.n + 1), self.n
        allowed = [own + rank.once_s <= time_s for own, rank in zip(self.own_s, self.ranks, strict=True)]
        prefix = np.full(n + 1, np.inf)
        prefix[0] = 0.0
        before = []
        for first, fits in zip(self.first_s, allowed, strict=True):
            before.append(prefix)
            prefix = (prefix[:, None] + np.where(fits, first, np.inf)).min(axis=0)
        if not np.isfinite(prefix[-1]):
            return None
        after, least = np.full(n + 1, np.inf), np.full(n + 1, np.inf)
        after[-1], least[-1] = 0.0, -1e30
        picked = []
        for r in reversed(range(len(self.ranks))):
            found = np.maximum(self.own_s[r], self.through_s[r] + least)
            np.maximum(found, self.steady_s[r] + after, out=found)
            np.maximum(found, self.trips[r] * (self.later_s[r] + after) + self.last_s[r], out=found)
            late = before[r][:, None] + found + self.ranks[r].once_s > time_s
            found[late | ~allowed[r]] = np.inf
            after = np.where(allowed[r], self.later_s[r] + after, np.inf).min(axis=1)
            best = found.argmin(axis=1)
            least = found[rows, best]
            picked.append(best)
        if not np.isfinite(least[0]):
            return None
        stops, at = [], 0
        for best in reversed(picked):
            at = int(best[at])
            stops.append(at)
        return tuple(stops)

    def value_s(self, stops: Sequence[int]) -> float:
        """Seconds that a cut takes at least."""
        edges = list(zip((0, *stops), stops, strict=False))
        first = [float(self.first_s[r][edge]) for r, edge in enumerate(edges)]
        before = np.concatenate([[0.0], np.cumsum(first)])
        after, least, found = 0.0, -np.inf, 0.0
        for r in reversed(range(len(self.ranks))):
            edge = edges[r]
            through = float(self.through_s[r][edge])
            later = float(self.later_s[r][edge])
            trips_s = self.trips[r] * (later + after) + float(self.last_s[r][edge])
            least = max(float(self.own_s[r][edge]), through + least, float(self.steady_s[r][edge]) + after, trips_s)
            after += later
            found = max(found, float(before[r]) + least + float(self.ranks[r].once_s[edge]))
        return found

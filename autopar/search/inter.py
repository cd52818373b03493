"""The stage cut: which consecutive blocks form a pipeline stage, and which of them recompute.

For stages of f_s + b_s = t_s seconds a micro-batch and m micro-batches the step takes

    sum of t_s  +  (m - 1) * max of t_s                  (GPipe, 1F1B; Huang et al. 2019, Zheng et al. 2022, eq. 2)

which is minimised exactly under a memory limit for each stage: for every bound on the slowest stage a dynamic program
over prefixes of the blocks minimises the sum; bounds are tried from the smallest feasible one upwards until no larger
one can win. Equal blocks are counted, not told apart: which of them recompute makes no difference.

With virtual stages a rank holds several stages; each then gets an equal share of the rank's memory, and the bound on the
slowest stage stands for that on the slowest rank. That is a heuristic; the event simulation judges the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.plan import Recompute

MAX_CHOICES = 4096
"""Choices of recompute enumerated for one stage; past it they are taken in order of bytes saved for a second."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """A block run in one way.

    Attributes:
        time_s: forward, backward and recompute of one micro-batch.
        held_bytes: of one micro-batch between forward and backward.
        transient_bytes: at its peak inside.
    """

    mode: Recompute
    time_s: float
    held_bytes: float
    transient_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlock:
    """A block as the cut sees it: equal ``key`` means equal in everything else.

    ``static_bytes``: parameters, gradients and optimizer states.
    """

    key: int
    options: tuple[BlockOption, ...]
    static_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """``stops``: where each stage ends; ``modes``: for each block."""

    stops: tuple[int, ...]
    modes: tuple[Recompute, ...]
    time_s: float


@dataclass(slots=True)
class _Entries:
    """All choices of recompute of all distinct stages, one after the other; ``first``: where a stage's begin."""

    time: list[Array] = field(default_factory=list)
    held: list[Array] = field(default_factory=list)
    transient: list[Array] = field(default_factory=list)
    counts: list[NDArray[np.int64]] = field(default_factory=list)


class StageCutter:
    """Cuts of one sequence of blocks; made once, asked for many numbers of stages and limits.

    Args:
        blocks: in order.
        fixed: pinned stage by block index.
    """

    def __init__(self, blocks: Sequence[CutBlock], *, fixed: Mapping[int, int] | None = None) -> None:
        self.blocks = tuple(blocks)
        self.fixed = dict(fixed or {})
        self.keys = sorted({b.key for b in blocks})
        self.of_key = {b.key: b for b in blocks}
        n = len(self.blocks)
        counts = np.zeros((n + 1, len(self.keys)), dtype=np.int64)
        for i, block in enumerate(self.blocks):
            counts[i + 1] = counts[i]
            counts[i + 1, self.keys.index(block.key)] += 1
        self.counts = counts
        spans = (counts[None, :, :] - counts[:, None, :])[np.triu_indices(n + 1, 1)]
        self.distinct, which = np.unique(spans, axis=0, return_inverse=True)
        self.which = np.full((n + 1, n + 1), -1, dtype=np.int64)
        self.which[np.triu_indices(n + 1, 1)] = which.reshape(-1)
        self.static = self.distinct @ np.array([self.of_key[k].static_bytes for k in self.keys])
        self._enumerate()

    def _enumerate(self) -> None:
        entries = _Entries()
        first = []
        total = 0
        for row in self.distinct:
            choices = _choices([self.of_key[k] for k in self.keys], row)
            first.append(total)
            total += len(choices)
            self._price(choices, row, entries)
        self.first = np.array(first, dtype=np.int64)
        self.time = np.concatenate(entries.time)
        self.held = np.concatenate(entries.held)
        self.transient = np.concatenate(entries.transient)
        self.chosen = entries.counts
        lengths = np.diff(np.append(self.first, total))
        self.static_of = np.repeat(self.static, lengths)

    def _price(self, choices: NDArray[np.int64], row: NDArray[np.int64], entries: _Entries) -> None:
        """``choices``: for each choice and key how many blocks take the second option."""
        plain = [self.of_key[k].options[0] for k in self.keys]
        other = [self.of_key[k].options[-1] for k in self.keys]
        left = row - choices
        entries.time.append(left @ [o.time_s for o in plain] + choices @ [o.time_s for o in other])
        entries.held.append(left @ [o.held_bytes for o in plain] + choices @ [o.held_bytes for o in other])
        peak = np.maximum(
            (np.where(left > 0, [o.transient_bytes for o in plain], 0.0)).max(axis=1),
            (np.where(choices > 0, [o.transient_bytes for o in other], 0.0)).max(axis=1),
        )
        entries.transient.append(peak)
        entries.counts.append(choices)

    def stage_times(self, in_flight: int, limit_bytes: float) -> tuple[Array, NDArray[np.int64]]:
        """For each distinct stage its least time under the limit, and the position of the choice that has it."""
        memory = self.static_of + in_flight * self.held + self.transient
        time = np.where(memory <= limit_bytes, self.time, np.inf)
        best = np.minimum.reduceat(time, self.first)
        return best, np.zeros(0, dtype=np.int64)

    def cut(
        self, stages: int, *, in_flight: Sequence[int], limit_bytes: Sequence[float], num_micro_batches: int
    ) -> Cut | None:
        """The best cut; None when no cut fits.

        Args:
            stages: how many.
            in_flight: micro-batches that each stage holds at its peak.
            limit_bytes: of each stage.
            num_micro_batches: of a step.
        """
        n = len(self.blocks)
        if stages > n:
            return None
        tables = self._tables(stages, in_flight, limit_bytes)
        bottleneck = _forward(tables, n, np.maximum)[0]
        if np.isinf(bottleneck):
            return None
        least_sum, _ = _forward(tables, n, np.add)
        bounds = np.unique(np.concatenate([t[np.isfinite(t)] for t in tables]))
        best: tuple[float, list[int]] | None = None
        for bound in bounds[bounds >= bottleneck]:
            if best is not None and least_sum + (num_micro_batches - 1) * bound >= best[0]:
                break
            total, stops = _forward([np.where(t <= bound, t, np.inf) for t in tables], n, np.add)
            slowest = max(t[i, j] for t, i, j in zip(tables, [0, *stops], stops, strict=False))
            value = total + (num_micro_batches - 1) * float(slowest)
            if best is None or value < best[0]:
                best = value, stops
        assert best is not None
        modes: list[Recompute] = []
        for s, (start, stop) in enumerate(zip([0, *best[1]], best[1], strict=False)):
            modes += self._modes(start, stop, in_flight[s], limit_bytes[s])
        return Cut(stops=tuple(best[1]), modes=tuple(modes), time_s=best[0])

    def _tables(self, stages: int, in_flight: Sequence[int], limits: Sequence[float]) -> list[Array]:
        """For each stage the time of blocks i:j as it; inf where they do not fit or a pin forbids."""
        known: dict[tuple[int, float], Array] = {}
        tables = []
        for s in range(stages):
            key = (in_flight[s], limits[s])
            if key not in known:
                times, _ = self.stage_times(*key)
                known[key] = np.where(self.which >= 0, times[self.which], np.inf)
            table = known[key]
            if self.fixed:
                table = self._pinned(table, s)
            tables.append(table)
        return tables

    def _pinned(self, table: Array, stage: int) -> Array:
        """Stage ``stage`` holds every block pinned to it and none pinned elsewhere."""
        n = len(self.blocks)
        own = np.array([self.fixed.get(i, stage) == stage for i in range(n)])
        mine = [i for i, s in self.fixed.items() if s == stage]
        start, stop = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        wrong = np.concatenate([[0], np.cumsum(~own)])
        allowed = wrong[stop] == wrong[start]
        if mine:
            allowed &= (start <= min(mine)) & (stop > max(mine))
        return np.where(allowed, table, np.inf)

    def _modes(self, start: int, stop: int, in_flight: int, limit_bytes: float) -> list[Recompute]:
        kind = int(self.which[start, stop])
        first, choices = int(self.first[kind]), self.chosen[kind]
        span = slice(first, first + len(choices))
        memory = self.static_of[span] + in_flight * self.held[span] + self.transient[span]
        best = choices[int(np.argmin(np.where(memory <= limit_bytes, self.time[span], np.inf)))]
        left = dict(zip(self.keys, (int(c) for c in best), strict=True))
        modes: list[Recompute] = []
        for block in self.blocks[start:stop]:
            second = left[block.key] > 0
            left[block.key] -= second
            modes.append(block.options[-1 if second else 0].mode)
        return modes


def _choices(blocks: Sequence[CutBlock], row: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many blocks of each key recompute: every count where those are few, else a greedy order."""
    limits = [int(c) if len(b.options) > 1 else 0 for b, c in zip(blocks, row, strict=True)]
    if prod(c + 1 for c in limits) <= MAX_CHOICES:
        return np.array(list(product(*(range(c + 1) for c in limits))), dtype=np.int64)

    def gain(i: int) -> float:
        plain, other = blocks[i].options[0], blocks[i].options[-1]
        return (plain.held_bytes - other.held_bytes) / max(other.time_s - plain.time_s, 1e-12)

    taken = np.zeros(len(blocks), dtype=np.int64)
    made = [taken.copy()]
    for i in sorted(range(len(blocks)), key=gain, reverse=True):
        for _ in range(limits[i]):
            taken[i] += 1
            made.append(taken.copy())
    return np.array(made)


def _forward(tables: Sequence[Array], n: int, combine: np.ufunc) -> tuple[float, list[int]]:
    """The dynamic program: least ``combine`` of the stages' times for blocks 0:n, and where the stages stop."""
    best = np.full(n + 1, np.inf)
    best[0] = 0.0
    came: list[NDArray[np.intp]] = []
    for table in tables:
        through = combine(best[:, None], table)
        came.append(np.argmin(through, axis=0))
        best = np.min(through, axis=0)
    stops = [n]
    for back in reversed(came[1:]):
        stops.append(int(back[stops[-1]]))
    return float(best[n]), stops[::-1]

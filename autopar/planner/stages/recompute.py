"""The activation modes of blocks, and the modes with which the blocks of a stage fit in memory in the least time.

A stage whose blocks each run in one of a few activation modes is a multiple-choice knapsack (Sinha and Zoltners 1979): minimise seconds
while the bytes held for each micro-batch stay within the memory that remains. Equal blocks are counted together. For each kind of block the
modes on the lower hull of seconds against bytes give steps to leaner modes, each of which frees fewer bytes for a second than the step
before. The solver takes the steps of all kinds in that order until enough is freed. It then takes steps back where that saves most and too
much was freed. The result is at most one step away from the optimum of the fractional problem.

The transient bytes of a stage are the most that any of its modes needs in addition to what the stage holds. For each such level the problem
is solved with the modes that need no more. The work grows with the square of the number of kinds of blocks, not with products of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from autopar.plan.plan import Recompute

OFFLOADED: Literal["offloaded"] = "offloaded"
"""The mode of a block that recomputes nothing and keeps on the host what its backward needs."""

Mode = Recompute | Literal["offloaded"]
"""An activation mode of a block: what it recomputes, or :data:`OFFLOADED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOption:
    """A block in one activation mode.

    Attributes:
        mode: the activation mode.
        time_s: seconds of forward, backward and recompute of one micro-batch.
        held_bytes: bytes that a micro-batch holds between its forward and its backward.
        transient_bytes: bytes at the peak within the block, in addition to those held.
        forward_s: seconds of the forward of one micro-batch.
        down_s: seconds of the copy to the host, which overlaps with the forwards of the stage.
        up_s: seconds of the copy from the host, which overlaps with the backwards of the stage.
    """

    mode: Mode
    time_s: float
    held_bytes: float
    transient_bytes: float
    forward_s: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CutBlock:
    """A block with its options, as stage cuts use it.

    Attributes:
        key: equal for blocks that are equal in everything else.
        options: the block in each of its activation modes, in the order of the space.
        static_bytes: bytes of parameters, gradients and optimizer states.
        once_s: the least seconds that the block adds to a step once.
        more_s: seconds of a micro-batch that are added to the time of the block when stages are balanced.
    """

    key: int
    options: tuple[BlockOption, ...]
    static_bytes: float
    once_s: float = 0.0
    more_s: float = 0.0


def undominated(options: Sequence[BlockOption]) -> tuple[BlockOption, ...]:
    """Return the options that no other option dominates; of equal options the first.

    An option dominates another one if it is at least as good in time, held bytes and transient bytes. An offloaded block dominates none.
    """

    def bytes_and_time(option: BlockOption) -> tuple[float, float, float]:
        return option.time_s, option.held_bytes, option.transient_bytes

    def beats(i: int, k: int) -> bool:
        a, b = bytes_and_time(options[i]), bytes_and_time(options[k])
        return options[i].mode != OFFLOADED and all(x <= y for x, y in zip(a, b, strict=True)) and (a != b or i < k)

    return tuple(o for k, o in enumerate(options) if not any(beats(i, k) for i in range(len(options)) if i != k))


def with_offloaded(modes: Sequence[Mode]) -> tuple[Mode, ...]:
    """Return the modes of a block that may also keep on the host what it needs.

    Selective recompute drops out, unless it is the only mode.
    """
    plain = [mode for mode in modes if mode != "selective"]
    return tuple(m for mode in plain for m in ((mode, OFFLOADED) if mode == "none" else (mode,))) or tuple(modes)


def recompute_of(mode: Mode) -> Recompute:
    """Return what a block recomputes in a mode."""
    return "none" if mode == OFFLOADED else mode


def lower_hull(options: Sequence[BlockOption]) -> list[int]:
    """Return the positions of the options on the lower hull of seconds against held bytes, from the quickest to the one that holds least.

    Each step from one option to the next frees more bytes for a second than the step after it.
    """
    if not options:
        return []
    hull = [min(range(len(options)), key=lambda i: (options[i].time_s, options[i].held_bytes, i))]
    while True:
        last = options[hull[-1]]
        leaner = [i for i, option in enumerate(options) if option.held_bytes < last.held_bytes]
        if not leaner:
            return hull
        hull.append(max(leaner, key=lambda i: (_gain(last, options[i]), -options[i].held_bytes)))


def _gain(before: BlockOption, after: BlockOption) -> float:
    """Return the bytes that a step frees for each additional second."""
    more_s = after.time_s - before.time_s
    return (before.held_bytes - after.held_bytes) / more_s if more_s > 0 else float("inf")


Array = NDArray[np.float64]

ROUNDING = 1e-9
"""Tolerance on the bytes that must be freed, relative to them; it absorbs rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """The problem for each level of transient bytes, with its steps in order of bytes freed for a second.

    A step takes a block of one kind from one mode to the next leaner one. Arrays of steps have shape [steps, levels].

    Attributes:
        transient_bytes: the most transient bytes of the modes of each level [levels].
        first: the mode of a block of each kind before any step [levels, kinds]; -1 where the level allows no mode of this kind.
        kind: the kind of the blocks that take a step.
        before: their mode before the step.
        after: their mode after the step.
        previous: the step that brings a block to the mode ``before``; -1 if that is its first mode, -2 where there is no step.
        following: the step that takes a block on from the mode ``after``; -1 where there is none.
        time_s: seconds that the step adds for one block.
        freed_bytes: bytes that the step frees for one block.
        most_freed: bytes that all steps of a block of each kind free together [levels, kinds].
    """

    transient_bytes: Array
    first: NDArray[np.int64]
    kind: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    previous: NDArray[np.int64]
    following: NDArray[np.int64]
    time_s: Array
    freed_bytes: Array
    most_freed: Array


class RecomputeSolver:
    """Finds the least recompute of stages that consist of blocks of given kinds.

    Args:
        kinds: one block of each kind.
    """

    def __init__(self, kinds: Sequence[CutBlock]) -> None:
        self.kinds = tuple(kinds)
        self.static_bytes = np.array([block.static_bytes for block in kinds])
        no_offload = BlockOption(mode=OFFLOADED, time_s=0.0, held_bytes=0.0, transient_bytes=0.0)
        self._may_offload = np.array([any(o.mode == OFFLOADED for o in block.options) for block in kinds])
        self._must_offload = np.array([all(o.mode == OFFLOADED for o in block.options) for block in kinds])
        self._offloaded = [next((o for o in block.options if o.mode == OFFLOADED), no_offload) for block in kinds]
        resident = [[o for o in block.options if o.mode != OFFLOADED] for block in kinds]
        self._resident = [options or list(block.options) for options, block in zip(resident, kinds, strict=True)]
        self._levels = _levels(self._resident)
        levels = self._levels
        firsts = [[self._resident[k][max(i, 0)] for k, i in enumerate(row)] for row in levels.first.tolist()]
        self._time_s = np.array([[o.time_s + b.more_s for o, b in zip(row, kinds, strict=True)] for row in firsts])
        self._held_bytes = np.array([[o.held_bytes for o in row] for row in firsts])
        self._forward_s = np.array([[o.forward_s for o in row] for row in firsts])

    def times_s(self, counts: NDArray[np.int64], in_flight: Sequence[int], limit_bytes: Sequence[float]) -> Array:
        """Return the least seconds of a micro-batch on each stage [limits, stages]; infinite where a stage does not fit.

        Args:
            counts: blocks of each kind on each stage [stages, kinds].
            in_flight: micro-batches that a stage holds, for each limit.
            limit_bytes: bytes that a stage may fill, for each limit.
        """
        num_held, limits = (np.array(values, dtype=float)[:, None] for values in (in_flight, limit_bytes))
        best = np.full((len(num_held), len(counts)), np.inf)
        for offloaded_counts in self._offloaded_counts(counts):
            time_s = self._solve(counts, offloaded_counts, num_held, limits)[0]
            np.minimum(best, time_s.min(axis=0), out=best)
        return best

    def modes(
        self, counts: NDArray[np.int64], in_flight: Sequence[int], limit_bytes: Sequence[float]
    ) -> list[list[dict[Mode, int]]]:
        """Return for each stage and kind how many blocks run in each mode, in the choice that :meth:`times_s` prices.

        Args:
            counts: blocks of each kind on each stage [stages, kinds]; the stages must fit.
            in_flight: micro-batches that each stage holds.
            limit_bytes: bytes that each stage may fill.
        """
        num_held, limits = (np.array(values, dtype=float)[None] for values in (in_flight, limit_bytes))
        solutions = [
            (offloaded, *self._solve(counts, offloaded, num_held, limits))
            for offloaded in self._offloaded_counts(counts)
        ]
        mode_counts = []
        for s, stage_counts in enumerate(counts):
            offloaded, time_s, taken = min(solutions, key=lambda solution: float(solution[1][:, 0, s].min()))
            level = int(time_s[:, 0, s].argmin())
            mode_counts.append(self._count_modes(stage_counts, offloaded[s], level, taken[:, level, 0, s]))
        return mode_counts

    def _count_modes(
        self, counts: NDArray[np.int64], offloaded: NDArray[np.int64], level: int, taken: Array
    ) -> list[dict[Mode, int]]:
        """Return for each kind how many blocks of one stage run in each mode.

        Args:
            counts: blocks of each kind.
            offloaded: those of them that are offloaded.
            level: the level of transient bytes.
            taken: how often each step is taken.
        """
        mode_counts = []
        for k, options in enumerate(self._resident):
            modes = {o.mode: 0 for o in options}
            modes[options[int(self._levels.first[level, k])].mode] = int(counts[k] - offloaded[k])
            mode_counts.append(modes | ({OFFLOADED: int(offloaded[k])} if offloaded[k] else {}))
        for c, count in enumerate(taken.astype(int).tolist()):
            if self._levels.previous[c, level] > -2:
                k = int(self._levels.kind[c, level])
                mode_counts[k][self._resident[k][int(self._levels.before[c, level])].mode] -= count
                mode_counts[k][self._resident[k][int(self._levels.after[c, level])].mode] += count
        return mode_counts

    def _offloaded_counts(self, counts: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the choices of how many blocks of each kind keep on the host what they need [stages, kinds].

        In each choice it is the same share of all blocks that may be offloaded, but all of those that must be.
        """
        may_be_offloaded = np.where(self._may_offload, counts, 0)
        most = int(may_be_offloaded.max(initial=0))
        fixed = np.where(self._must_offload, counts, 0)
        return [np.maximum(may_be_offloaded * part // max(most, 1), fixed) for part in range(most + 1)]

    def _solve(
        self, counts: NDArray[np.int64], offloaded: NDArray[np.int64], in_flight: Array, limit_bytes: Array
    ) -> tuple[Array, Array]:
        """Return the seconds [levels, limits, stages] and how often each step is taken [steps, levels, limits, stages].

        Args:
            counts: blocks of each kind on each stage [stages, kinds].
            offloaded: those of them that are offloaded.
            in_flight: micro-batches that stages hold; its shape broadcasts to [limits, stages].
            limit_bytes: bytes that stages may fill, likewise.
        """
        levels, resident, on_host = self._levels, counts - offloaded, self._offloaded
        static_bytes = counts @ self.static_bytes
        offloaded_bytes = ((offloaded > 0) * np.array([o.transient_bytes for o in on_host])).max(axis=1)
        transient = np.maximum(levels.transient_bytes[:, None], offloaded_bytes[None])
        room = (limit_bytes - static_bytes - transient[:, None]) / in_flight
        more_s = np.array([o.time_s + block.more_s for o, block in zip(on_host, self.kinds, strict=True)])
        time_s = (resident @ self._time_s.T).T + offloaded @ more_s
        need = (resident @ self._held_bytes.T).T[:, None] + offloaded @ np.array([o.held_bytes for o in on_host]) - room
        allowed = ((resident > 0) @ (levels.first < 0).T == 0).T
        total_s, taken = _covering_steps(levels, resident, need)
        total_s = total_s + time_s[:, None]
        if offloaded.any():
            forward_s = (resident @ self._forward_s.T).T + offloaded @ np.array([o.forward_s for o in on_host])
            down_s = offloaded @ np.array([o.down_s for o in on_host])
            up_s = offloaded @ np.array([o.up_s for o in on_host])
            last_up_s = (offloaded.sum(axis=1) > 0) * min((o.up_s for o in on_host if o.up_s), default=0.0)
            wait_s = np.maximum(down_s - forward_s, 0.0)[:, None]
            wait_s = wait_s + np.maximum(up_s - (total_s - forward_s[:, None]), 0.0) + last_up_s
            total_s = total_s + wait_s
        return np.where(allowed[:, None], total_s, np.inf), taken


def _levels(kinds: Sequence[Sequence[BlockOption]]) -> _Levels:
    """Return the levels of transient bytes and the steps of each."""
    sizes = sorted({o.transient_bytes for options in kinds for o in options})
    rows: list[list[tuple[float, int, int, int, float, float]]] = []
    first = np.full((len(sizes), len(kinds)), -1)
    for r, size in enumerate(sizes):
        steps = []
        for k, options in enumerate(kinds):
            allowed = [i for i, o in enumerate(options) if o.transient_bytes <= size]
            hull = lower_hull([options[i] for i in allowed])
            if hull:
                first[r, k] = allowed[hull[0]]
            for a, b in pairwise(hull):
                option, leaner = options[allowed[a]], options[allowed[b]]
                more_s, freed = leaner.time_s - option.time_s, option.held_bytes - leaner.held_bytes
                steps.append((more_s / freed, k, allowed[a], allowed[b], more_s, freed))
        rows.append(sorted(steps))
    most = max(map(len, rows))
    shape = most, len(sizes)
    kind, before, after = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    previous, following = np.full(shape, -2), np.full(shape, -1)
    time_s, freed_bytes, most_freed = np.zeros(shape), np.ones(shape), np.zeros(first.shape)
    for r, steps in enumerate(rows):
        step_to: dict[tuple[int, int], int] = {}
        for c, (_, k, a, b, more_s, freed) in enumerate(steps):
            kind[c, r], before[c, r], after[c, r], time_s[c, r], freed_bytes[c, r] = k, a, b, more_s, freed
            most_freed[r, k] += freed
            previous[c, r] = step_to.get((k, a), -1)
            if (k, a) in step_to:
                following[step_to[k, a], r] = c
            step_to[k, b] = c
    return _Levels(
        transient_bytes=np.array(sizes), first=first, kind=kind, before=before, after=after, previous=previous,
        following=following, time_s=time_s, freed_bytes=freed_bytes, most_freed=most_freed,
    )  # fmt: skip


def _covering_steps(levels: _Levels, counts: NDArray[np.int64], need: Array) -> tuple[Array, Array]:
    """Choose steps that free at least the needed bytes of a micro-batch.

    Args:
        levels: the levels and their steps.
        counts: blocks of each kind on each stage [stages, kinds].
        need: the bytes to free [levels, limits, stages].

    Returns:
        The seconds of the steps [levels, limits, stages], infinite where all steps together free too little, and how often each step is
        taken [steps, levels, limits, stages].
    """
    most = (counts @ levels.most_freed.T).T[:, None]
    tolerance = ROUNDING * np.maximum(np.abs(need), 1.0)
    time_s, taken = np.where(need > most + tolerance, np.inf, 0.0), np.zeros((len(levels.kind), *need.shape))
    rows, limits, stages = short = np.nonzero((need > 0.0) & np.isfinite(time_s))
    if len(rows):
        solution = _greedy_steps(levels, counts[stages], rows, need[short], tolerance[short])
        time_s[short], taken[:, rows, limits, stages] = solution
    return time_s, taken


def _greedy_steps(
    levels: _Levels, counts: NDArray[np.int64], row: NDArray[np.intp], need: Array, tolerance: Array
) -> tuple[Array, Array]:
    """Take steps in order until enough is freed; then take back the steps that are not needed, in reverse order.

    Args:
        levels: the levels and their steps.
        counts: blocks of each kind of each problem [problems, kinds].
        row: the level of each problem.
        need: the bytes to free.
        tolerance: how many of these bytes may be missing.

    Returns:
        The seconds of the steps [problems], and how often each step is taken [steps, problems].
    """
    each, taken, missing = np.arange(len(row)), np.zeros((len(levels.kind), len(row))), need
    for c, size in enumerate(levels.freed_bytes[:, row]):
        previous = levels.previous[c, row]
        most = np.where(previous == -1, counts[each, levels.kind[c, row]], taken[previous, each] * (previous >= 0))
        taken[c] = np.minimum(np.maximum(np.ceil(missing / size), 0.0), most)
        missing = missing - taken[c] * size
    for c in reversed(range(len(taken))):
        size, following = levels.freed_bytes[c, row], levels.following[c, row]
        onward = taken[following, each] * (following >= 0)
        back = np.clip(np.floor((tolerance - missing) / size), 0.0, taken[c] - onward)
        taken[c] -= back
        missing = missing + back * size
    return np.where(missing > tolerance, np.inf, (taken * levels.time_s[:, row]).sum(axis=0)), taken

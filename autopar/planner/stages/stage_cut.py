"""The stage cut: which consecutive blocks form a pipeline stage, and which of them recompute.

For stages of f_s + b_s = t_s seconds a micro-batch and m micro-batches the step takes

    sum of t_s  +  (m - 1) * max of t_s                  (GPipe, 1F1B; Huang et al. 2019, Zheng et al. 2022, eq. 2)

which is minimised under a memory limit for each stage. What blocks i:j take as stage s is the least time in which they fit
(:mod:`autopar.planner.stages.recompute`), at the prices of the devices of rank s; for a bound on the slowest stage a dynamic program
over prefixes of the blocks minimises the sum. The sum falls as the bound rises, so intervals of bounds in which it cannot fall far
enough are left out unseen. Work grows with the square of the number of blocks, whatever kinds of blocks there are.

With virtual stages a rank holds several stages; each then gets an equal share of the rank's memory, and the bound on the
slowest stage stands for that on the slowest rank. That is a heuristic; the event simulation judges the result. Which
blocks may be a virtual stage at all is a law of the space (``docs/adr/0011-even-stages.md``).

The cut minimises what adds up; the step of a plan does not quite: messages between stages wait for each other, memory comes in
steps. So the plan of a small problem may have a cut that no solver names. A space says up to how many plans are all tried
(``Space.every``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from autopar.planner.stages.recompute import MOVED, Array, CutBlock, Recomputes, Way

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """``stops``: where each stage ends; ``modes``: for each block; ``time_s``: by the formula of this module."""

    stops: tuple[int, ...]
    modes: tuple[Way, ...]
    time_s: float


class StageKinds:
    """Which consecutive blocks are stages of the same blocks, whatever these cost.

    Attributes:
        keys: one of each kind of block, in order.
        counts: blocks of each kind of stages that differ [stages, kinds].
        which: the number of blocks i:j among these at [i, j]; -1 where j is not beyond i.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        n = len(keys)
        self.keys = sorted(set(keys))
        sums = np.zeros((n + 1, len(self.keys)), dtype=np.int64)
        np.cumsum(np.array(keys)[:, None] == np.array(self.keys), axis=0, out=sums[1:])
        upper = np.triu_indices(n + 1, 1)
        self.counts, which = np.unique((sums[None, :, :] - sums[:, None, :])[upper], axis=0, return_inverse=True)
        self.which = np.full((n + 1, n + 1), -1, dtype=np.int64)
        self.which[upper] = which.reshape(-1)  # numpy 2.0 gives it another dim


@lru_cache(maxsize=64)
def stage_kinds(keys: tuple[int, ...]) -> StageKinds:
    """Of blocks of these keys; layouts of one model have the same ones."""
    return StageKinds(keys)


class CutBlocks:
    """A model's blocks in order, as the devices of one pipeline rank run them.

    Args:
        blocks: equal keys mean equal blocks.
    """

    def __init__(self, blocks: Sequence[CutBlock]) -> None:
        self.blocks = tuple(blocks)
        self.kinds = stage_kinds(tuple(b.key for b in blocks))
        one_of = {b.key: b for b in blocks}
        self.recomputes = Recomputes([one_of[key] for key in self.kinds.keys])
        self._times: dict[tuple[int, float], Array] = {}

    def times_s(self, in_flight: Sequence[int], limit_bytes: Sequence[float], allowed: Mask) -> list[Array]:
        """For each number of micro-batches and its limit the least times of stages, as ``kinds`` numbers them, where blocks i:j may be one."""
        keys = list(zip(in_flight, limit_bytes, strict=True))
        rows = {key: self._times.setdefault(key, np.full(len(self.kinds.counts), np.nan)) for key in keys}
        used = np.unique(self.kinds.which[allowed])
        new = used[np.isnan([row[used] for row in rows.values()]).any(axis=0)]
        if len(new):
            held, limits = zip(*rows, strict=True)
            found = self.recomputes.times_s(self.kinds.counts[new], held, limits)
            for row, own in zip(rows.values(), found, strict=True):
                row[new] = own
        return [rows[key] for key in keys]

    def modes(
        self, spans: Sequence[tuple[int, int]], in_flight: Sequence[int], limit_bytes: Sequence[float]
    ) -> list[list[Way]]:
        """Of the blocks i:j of stages that fit, in the least time in which they do; of equal ones the first recompute the most.

        Those that keep on the host what they need stand evenly between the others.
        """
        counts = self.kinds.counts[[self.kinds.which[span] for span in spans]]
        made = self.recomputes.modes(counts, in_flight, limit_bytes)
        return [self._in_place(*span, own) for span, own in zip(spans, made, strict=True)]

    def _in_place(self, start: int, stop: int, taken: Sequence[Mapping[Way, int]]) -> list[Way]:
        left = {key: dict(own) for key, own in zip(self.kinds.keys, taken, strict=True)}
        moving = {key: (own.get(MOVED, 0), sum(own.values())) for key, own in left.items()}
        seen = dict.fromkeys(left, 0)
        modes: list[Way] = []
        for block in self.blocks[start:stop]:
            (moved, count), i, own = moving[block.key], seen[block.key], left[block.key]
            seen[block.key] += 1
            moves = (i + 1) * moved // count > i * moved // count
            mode = MOVED if moves else next(o.mode for o in reversed(block.options) if o.mode != MOVED and own[o.mode])
            own[mode] -= 1
            modes.append(mode)
        return modes

    @cached_property
    def quickest_modes(self) -> tuple[Way, ...]:
        """Of each block the mode of the least time, whatever memory it needs."""
        return tuple(min(block.options, key=lambda option: option.time_s).mode for block in self.blocks)

    @cached_property
    def quickest_s(self) -> Array:
        """Of the blocks before each one, and of all, in these modes: seconds of the forward, and of both [2, blocks + 1]."""
        quickest = [min(block.options, key=lambda option: option.time_s) for block in self.blocks]
        found: Array = np.cumsum([(0.0, 0.0), *((o.forward_s, o.time_s) for o in quickest)], axis=0).T
        return found

    @cached_property
    def time_of(self) -> Mapping[tuple[int, Way], float]:
        """Seconds of a block of a key in a mode."""
        return {(b.key, o.mode): o.time_s for b in self.blocks for o in b.options}


def cut(
    ranks: Sequence[CutBlocks],
    *,
    in_flight: Sequence[int],
    limit_bytes: Sequence[float],
    num_micro_batches: int,
    allowed: Sequence[Mask],
) -> Cut | None:
    """The best cut; None when no cut fits.

    Args:
        ranks: for each pipeline rank the blocks as its devices run them; equal devices have the same ones.
        in_flight: micro-batches that each stage holds at its peak.
        limit_bytes: that each stage may fill.
        num_micro_batches: of a step.
        allowed: for each stage whether blocks i:j may be it (:func:`stage_masks`).
    """
    stages = len(in_flight)
    own = [ranks[s % len(ranks)] for s in range(stages)]
    asked: dict[CutBlocks, list[int]] = {}
    for s, blocks in enumerate(own):
        asked.setdefault(blocks, []).append(s)
    alike: dict[tuple[CutBlocks, int, float, bytes], int] = {}
    tables: list[Array] = []
    which = [0] * stages
    for blocks, mine in asked.items():
        may = np.logical_or.reduce([allowed[s] for s in mine])
        found = blocks.times_s([in_flight[s] for s in mine], [limit_bytes[s] for s in mine], may)
        for s, times_s in zip(mine, found, strict=True):
            key = blocks, in_flight[s], limit_bytes[s], allowed[s].tobytes()
            if key not in alike:
                alike[key] = len(tables)
                tables.append(np.where(allowed[s], times_s[blocks.kinds.which], np.inf))
            which[s] = alike[key]
    best = least_sum_and_slowest(tables, which, num_micro_batches)
    if best is None:
        return None
    stops, time_s = best
    spans = list(zip((0, *stops), stops, strict=False))
    chosen: dict[int, list[Way]] = {}
    for blocks, mine in asked.items():
        found_modes = blocks.modes(
            [spans[s] for s in mine], [in_flight[s] for s in mine], [limit_bytes[s] for s in mine]
        )
        chosen.update(zip(mine, found_modes, strict=True))
    modes = [mode for s in range(stages) for mode in chosen[s]]
    return Cut(stops=stops, modes=tuple(modes), time_s=time_s)


def least_sum_and_slowest(
    tables: Sequence[Array], which: Sequence[int], num_micro_batches: int
) -> tuple[tuple[int, ...], float] | None:
    """Stops of the least sum plus (num_micro_batches - 1) times the slowest stage, and that; None where no stops fit.

    Args:
        tables: times of a stage with blocks i:j at [i, j]; infinite where it may not have them.
        which: of each stage the number of its table.
    """
    more = num_micro_batches - 1
    band = _Band(tables, which)
    slowest_s, least_s = band.least(np.maximum), band.least(np.add)
    if np.isinf(slowest_s):
        return None
    times = np.unique(band.values[np.isfinite(band.values)])
    times = times[times >= slowest_s]
    best: tuple[int, ...] = ()
    best_s = np.inf

    def tried(place: int) -> float:
        """The least sum with no slower stage; a cut that is better than the best is kept."""
        nonlocal best, best_s
        stops, sum_s, own_s = band.stops(times[place])
        value_s = sum_s + more * own_s
        if value_s < best_s:
            best, best_s = stops, value_s
        return sum_s

    waiting = [(0, len(times) - 1, tried(0), least_s)]  # intervals of bounds, with the least sums at their ends
    while waiting:
        low, high, low_s, high_s = waiting.pop()
        if high - low < 1 or high_s >= low_s or high_s + more * times[low + 1] >= best_s:
            continue
        if high - low == 1:
            if high == len(times) - 1:  # every other end was tried
                tried(high)
            continue
        middle = (low + high) // 2
        middle_s = tried(middle)
        waiting += [(middle, high, middle_s, high_s), (low, middle, low_s, middle_s)]
    return best, float(best_s)


class _Band:
    """Stages by how many blocks they have and where they stop: at [k, j] blocks j - fewest - k : j.

    Attributes:
        own: the table of each stage.
        values: of all tables [tables, k, j].
    """

    def __init__(self, tables: Sequence[Array], which: Sequence[int]) -> None:
        self.own, stack = list(which), np.array(tables)
        start, stop = np.nonzero(np.isfinite(stack).any(axis=0))
        lengths = stop - start if len(start) else np.ones(1, dtype=np.int64)
        self.fewest, most = int(lengths.min()), int(lengths.max())
        stops = np.arange(stack.shape[2])[None, :]
        starts = stops - np.arange(self.fewest, most + 1)[:, None]
        self.values = np.where(starts >= 0, stack[:, np.maximum(starts, 0), stops], np.inf)

    def least(self, combine: np.ufunc) -> float:
        """The least ``combine`` of the stages' times."""
        return float(self._prefixes(self.values, combine)[-1][-1])

    def stops(self, bound_s: float) -> tuple[tuple[int, ...], float, float]:
        """Stops of the least sum of stages none of which takes longer; that sum, and the slowest of the stages."""
        values = np.where(self.values <= bound_s, self.values, np.inf)
        prefixes = self._prefixes(values, np.add)
        stops, times = [values.shape[2] - 1], []
        for own, before in zip(reversed(self.own), reversed(prefixes[:-1]), strict=True):
            last = stops[-1]
            lengths = np.arange(self.fewest, min(self.fewest + values.shape[1] - 1, last) + 1)[::-1]
            place = lengths[np.argmin(before[last - lengths] + values[own, lengths - self.fewest, last])]
            times.append(float(values[own, place - self.fewest, last]))
            stops.append(last - int(place))
        return tuple(stops[-2::-1]), float(prefixes[-1][-1]), max(times)

    def _prefixes(self, values: Array, combine: np.ufunc) -> list[Array]:
        """Before each stage, and behind the last one, the least for blocks 0:j at [j]."""
        width, size = values.shape[1:]
        most = self.fewest + width - 1
        padded = np.full(size + most, np.inf)  # that of blocks 0:j stands at j + most
        best = padded[most:]
        best[0] = 0.0
        shifted = sliding_window_view(padded, size)[:width][::-1]  # [k, j]: that of blocks 0:j - fewest - k
        found, through = [best.copy()], np.empty((width, size))
        for own in self.own:
            combine(shifted, values[own], out=through)
            np.minimum.reduce(through, axis=0, out=best)
            found.append(best.copy())
        return found


def stage_masks(num_blocks: int, stages: int, allowed: Sequence[Mask] | None, pinned: Mapping[int, int]) -> list[Mask]:
    """For each stage whether blocks i:j may be it.

    Args:
        allowed: by what the space says; None: it says nothing.
        pinned: the stage of blocks that are pinned to one.
    """
    start, stop = np.indices((num_blocks + 1, num_blocks + 1))
    every = stop > start
    found: list[Mask] = []
    for s in range(stages):
        own = every if allowed is None else every & allowed[s]
        for block, stage in pinned.items():
            holds = (start <= block) & (block < stop)
            own = own & (holds if stage == s else ~holds)
        found.append(own)
    return found


def every_cut(blocks: Sequence[CutBlock], stages: int, fixed: Mapping[int, int]) -> Iterator[Cut]:
    """All of them; ``fixed``: pinned stage by block index. Their times are left open."""
    n = len(blocks)
    modes = list(product(*([option.mode for option in block.options] for block in blocks)))
    for inner in combinations(range(1, n), stages - 1):
        stops = (*inner, n)
        if all(sum(stop <= i for stop in stops) == stage for i, stage in fixed.items()):
            for own in modes:
                yield Cut(stops=stops, modes=own, time_s=0.0)

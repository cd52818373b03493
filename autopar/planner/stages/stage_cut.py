"""The stage cut: which consecutive blocks form each pipeline stage, and in which activation mode each block runs.

If stage s takes t_s seconds for the forward and backward of a micro-batch, a step of m micro-batches takes

    sum of t_s  +  (m - 1) * max of t_s                  (GPipe, 1F1B; Huang et al. 2019, Zheng et al. 2022, eq. 2)

Then ranks do what they do once a step, sum gradients above all. They end their last backwards one after the other, the first rank last. So
a step is longer by its *tail*: the most by which a rank's work once a step outlasts the last backwards of the ranks before it. The sum of
both is minimised under a memory limit for each stage: the first cut is the quickest whatever its tail is, and each further one the quickest
with a shorter tail (the constraint method for two objectives; Haimes et al. 1971).

The time of blocks i:j as stage s is the least time in which they fit
(:mod:`autopar.planner.stages.recompute`), at the prices of the devices that run the stage. For a bound on the slowest stage a dynamic
program over prefixes of the blocks minimises the sum. The sum falls as the bound rises, so that whole intervals of bounds are excluded
where it cannot fall far enough. The work grows with the square of the number of blocks, however many of them are equal.

With virtual stages a rank holds several stages. Each then gets an equal share of the memory of the rank, and the slowest stage stands for
the slowest rank. This is a heuristic; the event simulation judges the result. Virtual stages are cut evenly
(``docs/adr/0011-even-stages.md``). As messages wait for each other and the memory model counts more than sums over blocks, the cut of least
time by this formula need not be the best one; :func:`every_cut` lists all cuts of problems that are small enough (``Space.max_enumerated``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, product

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from autopar.planner.stages.recompute import OFFLOADED, Array, CutBlock, Mode, RecomputeSolver

Mask = NDArray[np.bool_]
"""Whether blocks i:j may form a stage, at [i, j]; i and j run from 0 to the number of blocks."""

TAIL_STEP = 0.01
"""By which fraction of a step the tail of each further cut is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tails:
    """By how much a rank's work once a step outlasts the last backwards of the ranks before it: ``fixed_s + stop_s[j] - start_s[i]``.

    Attributes:
        fixed_s: the part of each stage that its blocks do not change.
        start_s, stop_s: the part that depends on where the stage starts and stops [stages][blocks + 1].
    """

    fixed_s: tuple[float, ...]
    start_s: tuple[Array, ...]
    stop_s: tuple[Array, ...]

    def of(self, stops: Sequence[int]) -> float:
        """Return the tail of a cut, in seconds."""
        stages = zip(self.fixed_s, self.start_s, self.stop_s, (0, *stops), stops, strict=False)
        return max(0.0, *(float(fixed + stop_s[j] - start_s[i]) for fixed, start_s, stop_s, i, j in stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A cut of the blocks into stages.

    Attributes:
        stops: the stop of each stage: the index after its last block.
        modes: the activation mode of each block.
        time_s: seconds of the step by the formula of this module.
    """

    stops: tuple[int, ...]
    modes: tuple[Mode, ...]
    time_s: float


class DistinctStages:
    """The stages that blocks can form, of which those with equally many blocks of each key count as one, as they have equal costs.

    Args:
        keys: the key of each block, in order.

    Attributes:
        keys: the distinct keys of blocks, sorted.
        counts: blocks of each key in each distinct stage [distinct stages, keys].
        index: the index in ``counts`` of blocks i:j, at [i, j]; -1 where j is not greater than i.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        n = len(keys)
        self.keys = sorted(set(keys))
        sums = np.zeros((n + 1, len(self.keys)), dtype=np.int64)
        np.cumsum(np.array(keys)[:, None] == np.array(self.keys), axis=0, out=sums[1:])
        upper = np.triu_indices(n + 1, 1)
        self.counts, index = np.unique((sums[None, :, :] - sums[:, None, :])[upper], axis=0, return_inverse=True)
        self.index = np.full((n + 1, n + 1), -1, dtype=np.int64)
        self.index[upper] = index.reshape(-1)  # numpy 2.0 returns another shape


@lru_cache(maxsize=64)
def distinct_stages(keys: tuple[int, ...]) -> DistinctStages:
    """Return the distinct stages of blocks with these keys, which layouts of one model have in common."""
    return DistinctStages(keys)


class CutBlocks:
    """The blocks of a model in order, as the devices of one pipeline rank run them.

    Args:
        blocks: the blocks; equal keys mean equal blocks.

    Attributes:
        distinct: the distinct stages that they can form.
        recomputes: the solver that finds the activation modes of a stage.
    """

    def __init__(self, blocks: Sequence[CutBlock]) -> None:
        self.blocks = tuple(blocks)
        self.distinct = distinct_stages(tuple(b.key for b in blocks))
        block_of = {b.key: b for b in blocks}
        self.recomputes = RecomputeSolver([block_of[key] for key in self.distinct.keys])
        self._times: dict[
            tuple[int, float], Array
        ] = {}  # by micro-batches in flight and limit; NaN where not yet computed

    def times_s(self, in_flight: Sequence[int], limit_bytes: Sequence[float], allowed: Mask) -> list[Array]:
        """Return for each pair of micro-batches in flight and limit the least times of all stages, in the order of ``distinct.counts``.

        Args:
            in_flight: micro-batches that a stage holds.
            limit_bytes: bytes that the stage may fill, one for each entry of ``in_flight``.
            allowed: where blocks i:j may form a stage; the times of other stages may be NaN.
        """
        conditions = list(zip(in_flight, limit_bytes, strict=True))
        rows = {key: self._times.setdefault(key, np.full(len(self.distinct.counts), np.nan)) for key in conditions}
        used = np.unique(self.distinct.index[allowed])
        new = used[np.isnan([row[used] for row in rows.values()]).any(axis=0)]
        if len(new):
            num_held, limits = zip(*rows, strict=True)
            times = self.recomputes.times_s(self.distinct.counts[new], num_held, limits)
            for row, new_times in zip(rows.values(), times, strict=True):
                row[new] = new_times
        return [rows[key] for key in conditions]

    def modes(
        self, spans: Sequence[tuple[int, int]], in_flight: Sequence[int], limit_bytes: Sequence[float]
    ) -> list[list[Mode]]:
        """Return for each stage the modes of its blocks with which it fits in the least time; every stage must fit.

        Of equal blocks in a stage the first ones recompute most. Those that keep on the host what they need are spread evenly among them.

        Args:
            spans: the first block and the stop of each stage.
            in_flight: micro-batches that each stage holds.
            limit_bytes: bytes that each stage may fill.
        """
        counts = self.distinct.counts[[self.distinct.index[span] for span in spans]]
        mode_counts = self.recomputes.modes(counts, in_flight, limit_bytes)
        return [self._spread(*span, stage_counts) for span, stage_counts in zip(spans, mode_counts, strict=True)]

    def _spread(self, start: int, stop: int, mode_counts: Sequence[Mapping[Mode, int]]) -> list[Mode]:
        """Return the mode of each block of a stage, given how many of the blocks of each key run in each mode."""
        remaining = {key: dict(counts) for key, counts in zip(self.distinct.keys, mode_counts, strict=True)}
        offloaded_of_all = {key: (counts.get(OFFLOADED, 0), sum(counts.values())) for key, counts in remaining.items()}
        position = dict.fromkeys(remaining, 0)  # among the blocks of equal key
        modes: list[Mode] = []
        for block in self.blocks[start:stop]:
            (num_offloaded, count), i, left = offloaded_of_all[block.key], position[block.key], remaining[block.key]
            position[block.key] += 1
            is_offloaded = (i + 1) * num_offloaded // count > i * num_offloaded // count
            mode = (
                OFFLOADED
                if is_offloaded
                else next(o.mode for o in reversed(block.options) if o.mode != OFFLOADED and left[o.mode])
            )
            left[mode] -= 1
            modes.append(mode)
        return modes

    @cached_property
    def quickest_modes(self) -> tuple[Mode, ...]:
        """The quickest mode of each block, whatever memory it needs."""
        return tuple(min(block.options, key=lambda option: option.time_s).mode for block in self.blocks)

    @cached_property
    def quickest_prefixes_s(self) -> Array:
        """Seconds of blocks 0:j in their quickest modes, for each j from 0 to the number of blocks [2, blocks + 1].

        The first row is the forward, the second row forward and backward together.
        """
        quickest = [min(block.options, key=lambda option: option.time_s) for block in self.blocks]
        sums: Array = np.cumsum([(0.0, 0.0), *((o.forward_s, o.time_s) for o in quickest)], axis=0).T
        return sums

    @cached_property
    def time_of(self) -> Mapping[tuple[int, Mode], float]:
        """Seconds of a block by its key and mode."""
        return {(b.key, o.mode): o.time_s for b in self.blocks for o in b.options}


def cut(
    ranks: Sequence[CutBlocks],
    *,
    in_flight: Sequence[int],
    limit_bytes: Sequence[float],
    num_micro_batches: int,
    allowed: Sequence[Mask],
    tails: Tails | None = None,
) -> Cut | None:
    """Return the cut of least time by the formula of this module; None if no cut fits.

    Stage s is on rank s modulo the number of ranks.

    Args:
        ranks: the blocks as the devices of each pipeline rank run them; ranks with equal devices share one object.
        in_flight: micro-batches that each stage holds at its peak.
        limit_bytes: bytes that each stage may fill.
        num_micro_batches: micro-batches of a step.
        allowed: for each stage whether blocks i:j may form it (:func:`stage_masks`).
        tails: what ranks do once a step; None: nothing.
    """
    stages = len(in_flight)
    blocks_of = [ranks[s % len(ranks)] for s in range(stages)]
    stages_of: dict[CutBlocks, list[int]] = {}
    for s, blocks in enumerate(blocks_of):
        stages_of.setdefault(blocks, []).append(s)
    known_tables: dict[tuple[CutBlocks, int, float, bytes], int] = {}
    tables: list[Array] = []
    table_of = [0] * stages
    for blocks, indices in stages_of.items():
        any_allowed = np.logical_or.reduce([allowed[s] for s in indices])
        times = blocks.times_s([in_flight[s] for s in indices], [limit_bytes[s] for s in indices], any_allowed)
        for s, times_s in zip(indices, times, strict=True):
            key = blocks, in_flight[s], limit_bytes[s], allowed[s].tobytes()
            if key not in known_tables:
                known_tables[key] = len(tables)
                tables.append(np.where(allowed[s], times_s[blocks.distinct.index], np.inf))
            table_of[s] = known_tables[key]
    best = stops_of_least_time(tables, table_of, num_micro_batches, tails)
    if best is None:
        return None
    stops, time_s = best
    spans = list(zip((0, *stops), stops, strict=False))
    modes_of: dict[int, list[Mode]] = {}
    for blocks, indices in stages_of.items():
        stage_modes = blocks.modes(
            [spans[s] for s in indices], [in_flight[s] for s in indices], [limit_bytes[s] for s in indices]
        )
        modes_of.update(zip(indices, stage_modes, strict=True))
    modes = [mode for s in range(stages) for mode in modes_of[s]]
    return Cut(stops=stops, modes=tuple(modes), time_s=time_s)


def stops_of_least_time(
    tables: Sequence[Array], table_of: Sequence[int], num_micro_batches: int, tails: Tails | None = None
) -> tuple[tuple[int, ...], float] | None:
    """Return the stops of least time by the formula of this module, and this time; None if none fit.

    With ``tails`` the time may be longer than the least one by :data:`TAIL_STEP`.

    Args:
        tables: times of a stage of blocks i:j at [i, j]; infinite where they may not form it or do not fit.
        table_of: the index of the table of each stage.
        num_micro_batches: micro-batches of a step.
        tails: what ranks do once a step; None: nothing.
    """
    band, best, best_s = _Band(tables, table_of), None, float("inf")
    while (found := _quickest(band, num_micro_batches - 1, best_s)) is not None:
        stops, time_s = found
        tail_s = tails.of(stops) if tails else 0.0
        if time_s + tail_s < best_s:
            best, best_s = (stops, time_s + tail_s), time_s + tail_s
        limit_s = tail_s - TAIL_STEP * best_s
        if tails is None or limit_s <= 0:
            break
        band.shorten(tails, limit_s)
    return best


def _quickest(band: _Band, repeats: int, below_s: float) -> tuple[tuple[int, ...], float] | None:
    """Return the stops of least sum of times plus ``repeats`` times the slowest stage, and this value; None if it is not below ``below_s``."""
    least_slowest_s, least_sum_s = band.least(np.maximum), band.least(np.add)
    if least_sum_s + repeats * least_slowest_s >= below_s or np.isinf(least_slowest_s):
        return None
    bounds = np.unique(band.values[np.isfinite(band.values)])
    bounds = bounds[bounds >= least_slowest_s]
    best: tuple[int, ...] = ()
    best_s = below_s

    def evaluate(index: int) -> float:
        """Return the least sum of stages no slower than ``bounds[index]``, and keep the cut if it is the best so far."""
        nonlocal best, best_s
        stops, sum_s, slowest_s = band.stops(bounds[index])
        value_s = sum_s + repeats * slowest_s
        if value_s < best_s:
            best, best_s = stops, value_s
        return sum_s

    # Intervals of bounds, with the least sums at their ends. A cut whose slowest stage takes more than bounds[low] and at most bounds[high]
    # has a slowest stage of bounds[low + 1] or more and a sum of high_s or more.
    intervals = [(0, len(bounds) - 1, evaluate(0), least_sum_s)]
    while intervals:
        low, high, low_s, high_s = intervals.pop()
        if high - low < 1 or high_s >= low_s or high_s + repeats * bounds[low + 1] >= best_s:
            continue
        if high - low == 1:
            if high == len(bounds) - 1:  # the last bound; all other ends have been evaluated
                evaluate(high)
            continue
        middle = (low + high) // 2
        middle_s = evaluate(middle)
        intervals += [(middle, high, middle_s, high_s), (low, middle, low_s, middle_s)]
    return (best, float(best_s)) if best else None


class _Band:
    """The times of stages by number of blocks and stop: at [k, j] that of the stage of ``fewest + k`` blocks that stops before block j.

    This keeps only the band of each table in which some stage may be formed. Its dims are [tables, numbers of blocks, stops].

    Attributes:
        table_of: the index of the table of each stage.
        fewest: the fewest blocks of a stage that may be formed.
        values: the times of all tables [tables, k, j]; infinite where a stage may not be formed.
        excluded: for each stage where its tail would be too long [k, j]; empty without a limit on tails.
    """

    def __init__(self, tables: Sequence[Array], table_of: Sequence[int]) -> None:
        self.table_of, stack = list(table_of), np.array(tables)
        start, stop = np.nonzero(np.isfinite(stack).any(axis=0))
        lengths = stop - start if len(start) else np.ones(1, dtype=np.int64)
        self.fewest, most = int(lengths.min()), int(lengths.max())
        stops = np.arange(stack.shape[2])[None, :]
        starts = stops - np.arange(self.fewest, most + 1)[:, None]
        self._starts = np.maximum(starts, 0)
        self.values = np.where(starts >= 0, stack[:, self._starts, stops], np.inf)
        self.excluded: list[Mask] = []

    def shorten(self, tails: Tails, limit_s: float) -> None:
        """Exclude stages whose tail is longer than a limit."""
        each = zip(tails.fixed_s, tails.start_s, tails.stop_s, strict=True)
        self.excluded = [stop_s - start_s[self._starts] > limit_s - fixed_s for fixed_s, start_s, stop_s in each]

    def least(self, combine: np.ufunc) -> float:
        """Return the least value of a cut, where ``combine`` accumulates the times of its stages."""
        return float(self._prefixes(self.values, combine)[-1][-1])

    def stops(self, bound_s: float) -> tuple[tuple[int, ...], float, float]:
        """Return the stops of the least sum of stages that take at most ``bound_s`` each, this sum, and the time of the slowest of them."""
        values = np.where(self.values <= bound_s, self.values, np.inf)
        prefixes = self._prefixes(values, np.add)
        stops, times = [values.shape[2] - 1], []
        for s in reversed(range(len(self.table_of))):
            table, before, last = self.table_of[s], prefixes[s], stops[-1]
            lengths = np.arange(self.fewest, min(self.fewest + values.shape[1] - 1, last) + 1)[::-1]
            sums = before[last - lengths] + values[table, lengths - self.fewest, last]
            if self.excluded:
                sums[self.excluded[s][lengths - self.fewest, last]] = np.inf
            length = lengths[np.argmin(sums)]
            times.append(float(values[table, length - self.fewest, last]))
            stops.append(last - int(length))
        return tuple(stops[-2::-1]), float(prefixes[-1][-1]), max(times)

    def _prefixes(self, values: Array, combine: np.ufunc) -> list[Array]:
        """Return for 0, 1, 2 and more stages, up to all of them, the least value of cutting blocks 0:j into these stages, at [j]."""
        width, size = values.shape[1:]
        most = self.fewest + width - 1
        padded = np.full(size + most, np.inf)  # the value of blocks 0:j is at j + most
        best = padded[most:]
        best[0] = 0.0
        shifted = sliding_window_view(padded, size)[:width][::-1]  # [k, j]: the value of blocks 0:j - fewest - k
        prefixes, through = [best.copy()], np.empty((width, size))
        for s, table in enumerate(self.table_of):
            combine(shifted, values[table], out=through)
            if self.excluded:
                through[self.excluded[s]] = np.inf
            np.minimum.reduce(through, axis=0, out=best)
            prefixes.append(best.copy())
        return prefixes


def exactly(stops: Sequence[int], blocks: int) -> list[Mask]:
    """Return masks that allow only the stages of these stops."""
    masks = []
    for start, stop in zip((0, *stops), stops, strict=False):
        mask = np.zeros((blocks + 1, blocks + 1), dtype=bool)
        mask[start, stop] = True
        masks.append(mask)
    return masks


def stage_masks(num_blocks: int, stages: int, allowed: Sequence[Mask] | None, pinned: Mapping[int, int]) -> list[Mask]:
    """Return for each stage where blocks i:j may form it.

    Args:
        num_blocks: the number of blocks.
        stages: the number of stages.
        allowed: a mask for each stage; None allows every stage that is not empty.
        pinned: the stage of each pinned block, by index of the block.
    """
    start, stop = np.indices((num_blocks + 1, num_blocks + 1))
    nonempty = stop > start
    masks: list[Mask] = []
    for s in range(stages):
        mask = nonempty if allowed is None else nonempty & allowed[s]
        for block, stage in pinned.items():
            holds = (start <= block) & (block < stop)
            mask = mask & (holds if stage == s else ~holds)
        masks.append(mask)
    return masks


def every_cut(blocks: Sequence[CutBlock], stages: int, pinned: Mapping[int, int]) -> Iterator[Cut]:
    """Yield all cuts with every choice of modes, whether they fit or not; their ``time_s`` is not computed.

    Args:
        blocks: the blocks.
        stages: the number of stages.
        pinned: the stage of each pinned block, by index of the block.
    """
    n = len(blocks)
    all_modes = list(product(*([option.mode for option in block.options] for block in blocks)))
    for inner in combinations(range(1, n), stages - 1):
        stops = (*inner, n)
        if all(sum(stop <= i for stop in stops) == stage for i, stage in pinned.items()):
            for modes in all_modes:
                yield Cut(stops=stops, modes=modes, time_s=0.0)

"""The stage cut: which consecutive blocks form a pipeline stage, and which of them recompute.

For stages of f_s + b_s = t_s seconds a micro-batch and m micro-batches the step takes

    sum of t_s  +  (m - 1) * max of t_s                  (GPipe, 1F1B; Huang et al. 2019, Zheng et al. 2022, eq. 2)

which is minimised exactly under a memory limit for each stage: for every bound on the slowest stage a dynamic program
over prefixes of the blocks minimises the sum; bounds are tried from the smallest feasible one upwards until no larger
one can win. Equal blocks are counted, not told apart: which of them recompute makes no difference.

With virtual stages a rank holds several stages; each then gets an equal share of the rank's memory, and the bound on the
slowest stage stands for that on the slowest rank. That is a heuristic; the event simulation judges the result. Which
blocks may be a virtual stage at all is a law of the space (``docs/adr/0011-even-stages.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """``stops``: where each stage ends; ``modes``: for each block."""

    stops: tuple[int, ...]
    modes: tuple[Recompute, ...]
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """Choices of recompute of all distinct stages, one stage after the other.

    Attributes:
        plain, second: for each choice how many blocks of each key take their first and their second option.
        lengths, first: how many choices a stage has, and where they begin.
        has_plain, has_second: for each key 1 where there are such blocks.
    """

    plain: Array
    second: Array
    lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    has_plain: tuple[Array, ...]
    has_second: tuple[Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Which consecutive blocks may be stages, by how many they are and where they stop.

    Attributes:
        least: the fewest blocks of a stage.
        allowed: for each stage at [k, j] whether blocks j - least - k : j may be it.
        place: at [k, j] the number of their kind among those that may be any.
        choices: positions of the choices of recompute of these kinds, one kind after the other.
        first: where those of each kind begin among them.
    """

    least: int
    allowed: tuple[NDArray[np.bool_], ...]
    place: NDArray[np.int64]
    choices: NDArray[np.int64]
    first: NDArray[np.int64]


class CutShape:
    """Which stages and choices of recompute there are; depends on which blocks are equal, not on their prices.

    Args:
        keys: of the blocks, in order.
        choices: for each key how many options a block has.
        fixed: pinned stage by block index.
    """

    def __init__(
        self, keys: Sequence[int], choices: Mapping[int, int], *, fixed: Mapping[int, int] | None = None
    ) -> None:
        self.of_block, self.fixed = tuple(keys), dict(fixed or {})
        self.keys = sorted(set(keys))
        n = len(keys)
        counts = np.zeros((n + 1, len(self.keys)), dtype=np.int64)
        for i, key in enumerate(keys):
            counts[i + 1] = counts[i]
            counts[i + 1, self.keys.index(key)] += 1
        upper = np.triu_indices(n + 1, 1)
        spans = (counts[None, :, :] - counts[:, None, :])[upper]
        self.distinct, which = np.unique(spans, axis=0, return_inverse=True)
        self.which = np.full((n + 1, n + 1), -1, dtype=np.int64)
        self.which[upper] = which.reshape(-1)
        self.exists = self.which >= 0
        self.limits = self.distinct * np.array([choices[k] > 1 for k in self.keys])
        self.is_small = bool(np.all(np.prod(self.limits + 1.0, axis=1) <= MAX_CHOICES))

    @cached_property
    def all_choices(self) -> Choices:
        """:meth:`enumerate` where every choice is there, whatever it gains."""
        return self.enumerate([0.0] * len(self.keys))

    def enumerate(self, gains: Sequence[float]) -> Choices:
        """All choices of all distinct stages."""
        rows = [_choices(limits, gains) for limits in self.limits]
        lengths = np.array([len(r) for r in rows])
        second = np.concatenate(rows).astype(np.float64)
        plain = np.repeat(self.distinct, lengths, axis=0) - second
        return Choices(
            plain=plain,
            second=second,
            lengths=lengths,
            first=np.concatenate([[0], np.cumsum(lengths)[:-1]]),
            has_plain=tuple((plain[:, k] > 0).astype(np.float64) for k in range(len(self.keys))),
            has_second=tuple((second[:, k] > 0).astype(np.float64) for k in range(len(self.keys))),
        )


class StageCutter:
    """Cuts of one sequence of blocks on one kind of device; made once, asked for many numbers of stages and limits.

    Args:
        blocks: in order.
        shape: of these blocks' keys, where it is known already.
        fixed: pinned stage by block index.
    """

    def __init__(
        self, blocks: Sequence[CutBlock], *, shape: CutShape | None = None, fixed: Mapping[int, int] | None = None
    ) -> None:
        self.blocks = tuple(blocks)
        one_of = {b.key: b for b in blocks}
        counts = {key: len(b.options) for key, b in one_of.items()}
        self.shape = shape or CutShape([b.key for b in blocks], counts, fixed=fixed)
        ordered = [one_of[key] for key in self.shape.keys]
        plain, other = [b.options[0] for b in ordered], [b.options[-1] for b in ordered]
        choices = self.shape.all_choices if self.shape.is_small else self.shape.enumerate([_gain(b) for b in ordered])
        self.choices, self.first = choices, choices.first
        more = [b.more_s for b in ordered]
        self.time = choices.plain @ [o.time_s + m for o, m in zip(plain, more, strict=True)]
        self.time += choices.second @ [o.time_s + m for o, m in zip(other, more, strict=True)]
        self.held = choices.plain @ [o.held_bytes for o in plain] + choices.second @ [o.held_bytes for o in other]
        transient = np.zeros(len(self.time))
        for k in range(len(ordered)):
            for has, option in ((choices.has_plain[k], plain[k]), (choices.has_second[k], other[k])):
                np.maximum(transient, has * option.transient_bytes, out=transient)
        static = self.shape.distinct @ [b.static_bytes for b in ordered]
        self.resident = np.repeat(static, choices.lengths) + transient

    def _allowed_times(self, in_flight: int, limit_bytes: float, span: slice = slice(None)) -> Array:
        """The time of every stage with every choice of recompute; inf where it does not fit."""
        memory = self.held[span] * in_flight
        memory += self.resident[span]
        return np.where(memory <= limit_bytes, self.time[span], np.inf)

    def cut(
        self,
        stages: int,
        *,
        in_flight: Sequence[int],
        limit_bytes: Sequence[float],
        num_micro_batches: int,
        allowed: Sequence[NDArray[np.bool_]] | None = None,
        by_rank: Sequence[StageCutter] = (),
    ) -> Cut | None:
        """The best cut; None when no cut fits.

        Args:
            stages: how many.
            in_flight: micro-batches that each stage holds at its peak.
            limit_bytes: of each stage.
            num_micro_batches: of a step.
            allowed: for each stage whether blocks i:j may be it.
            by_rank: for each pipeline rank the same blocks as its devices run them; empty: they are alike.
        """
        n = len(self.blocks)
        if stages > n:
            return None
        cutters = [by_rank[s % len(by_rank)] if by_rank else self for s in range(stages)]
        spans = self._spans(stages, allowed)
        if spans is None:
            return None
        tables = self._tables(cutters, in_flight, limit_bytes, spans)
        bottleneck = _forward(tables, spans, np.maximum)[0]
        if np.isinf(bottleneck):
            return None
        least_sum, _ = _forward(tables, spans, np.add)
        different = list({id(t): t for t in tables}.values())
        bounds = np.unique(np.concatenate([t[np.isfinite(t)] for t in different]))
        best: tuple[float, list[int]] | None = None
        for bound in bounds[bounds >= bottleneck]:
            if best is not None and least_sum + (num_micro_batches - 1) * bound >= best[0]:
                break
            below = {id(t): np.where(t <= bound, t, np.inf) for t in different}
            bounded = [below[id(t)] for t in tables]
            total, before = _forward(bounded, spans, np.add)
            if best is not None and total + (num_micro_batches - 1) * bottleneck >= best[0]:
                continue  # no stage is quicker than the bottleneck
            stops = _stops(bounded, spans, before)
            slowest = max(t[j - i - spans.least, j] for t, i, j in zip(tables, [0, *stops], stops, strict=False))
            value = total + (num_micro_batches - 1) * float(slowest)
            if best is None or value < best[0]:
                best = value, stops
        assert best is not None
        return self.made(best[1], best[0], cutters, in_flight, limit_bytes)

    def made(
        self,
        stops: Sequence[int],
        time_s: float,
        cutters: Sequence[StageCutter],
        in_flight: Sequence[int],
        limit_bytes: Sequence[float],
    ) -> Cut:
        """The cut with these stops, each stage recomputed as it is quickest."""
        modes: list[Recompute] = []
        chosen: dict[tuple[int, int, int, float], Array] = {}
        for s, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            kind = int(self.shape.which[start, stop])
            key = (id(cutters[s]), kind, in_flight[s], limit_bytes[s])
            if key not in chosen:
                chosen[key] = cutters[s]._recomputed(kind, in_flight[s], limit_bytes[s])
            modes += self._modes(start, stop, chosen[key])
        return Cut(stops=tuple(stops), modes=tuple(modes), time_s=time_s)

    def tables(
        self,
        cutters: Sequence[StageCutter],
        in_flight: Sequence[int],
        limits: Sequence[float],
        allowed: Sequence[NDArray[np.bool_]] | None,
    ) -> list[Array]:
        """For each stage the time of blocks i:j as it at [i, j]; inf where they do not fit, or are not allowed, or a pin forbids."""
        n = len(self.blocks)
        spans = self._spans(len(cutters), allowed)
        if spans is None:
            return [np.full((n + 1, n + 1), np.inf)] * len(cutters)
        made: dict[int, Array] = {}
        bands = self._tables(cutters, in_flight, limits, spans)
        for band in bands:
            if id(band) not in made:
                length, stop = np.nonzero(np.isfinite(band))
                made[id(band)] = np.full((n + 1, n + 1), np.inf)
                made[id(band)][stop - length - spans.least, stop] = band[length, stop]
        return [made[id(band)] for band in bands]

    def _spans(self, stages: int, allowed: Sequence[NDArray[np.bool_]] | None) -> Spans | None:
        """Which blocks may be which stage; None where some stage may have none."""
        known: dict[int, NDArray[np.bool_]] = {}
        masks: list[NDArray[np.bool_]] = []
        for s in range(stages):
            own = self.shape.exists if allowed is None else allowed[s]
            if id(own) not in known:
                known[id(own)] = own & self.shape.exists
            masks.append(known[id(own)] & self._pinned(s) if self.shape.fixed else known[id(own)])
        union = np.logical_or.reduce(list({id(mask): mask for mask in masks}.values()))
        start, stop = np.nonzero(union)
        if not len(start):
            return None
        n, least, most = len(self.blocks), int((stop - start).min()), int((stop - start).max())
        stops = np.arange(n + 1)[None, :]
        starts = stops - np.arange(least, most + 1)[:, None]
        inside, starts = starts >= 0, np.maximum(starts, 0)
        banded = {id(mask): mask[starts, stops] & inside for mask in masks}
        used = np.unique(self.shape.which[start, stop])
        place = np.zeros(len(self.shape.distinct), dtype=np.int64)
        place[used] = np.arange(len(used))
        lengths = self.choices.lengths[used]
        first = np.cumsum(lengths) - lengths
        return Spans(
            least=least,
            allowed=tuple(banded[id(mask)] for mask in masks),
            place=np.where(_any_of(banded.values()), place[self.shape.which[starts, stops]], 0),
            choices=np.arange(int(lengths.sum())) + np.repeat(self.first[used] - first, lengths),
            first=first,
        )

    def _tables(
        self, cutters: Sequence[StageCutter], in_flight: Sequence[int], limits: Sequence[float], spans: Spans
    ) -> list[Array]:
        """For each stage the time of blocks j - least - k : j as it at [k, j]; inf where they do not fit or may not be it."""
        known: dict[tuple[int, int, float, int], Array] = {}
        asked = {(id(c), in_flight[s], limits[s]): c for s, c in enumerate(cutters)}
        parts: dict[int, tuple[Array, Array, Array]] = {}
        times: dict[tuple[int, int, float], Array] = {}
        for key, cutter in asked.items():
            if id(cutter) not in parts:
                parts[id(cutter)] = tuple(  # type: ignore[assignment]
                    own[spans.choices] for own in (cutter.held, cutter.resident, cutter.time)
                )
            held, resident, time = parts[id(cutter)]
            memory = held * key[1]
            memory += resident
            times[key] = np.minimum.reduceat(np.where(memory <= key[2], time, np.inf), spans.first)
        tables = []
        for s, cutter in enumerate(cutters):
            mask, own = spans.allowed[s], (id(cutter), in_flight[s], limits[s])
            both = (*own, id(mask))
            if both not in known:
                known[both] = np.where(mask, times[own][spans.place], np.inf)
            tables.append(known[both])
        return tables

    def _pinned(self, stage: int) -> NDArray[np.bool_]:
        """Whether blocks i:j hold every block pinned to stage ``stage`` and none pinned elsewhere."""
        n = len(self.blocks)
        own = np.array([self.shape.fixed.get(i, stage) == stage for i in range(n)])
        mine = [i for i, s in self.shape.fixed.items() if s == stage]
        start, stop = np.arange(n + 1)[:, None], np.arange(n + 1)[None, :]
        wrong = np.concatenate([[0], np.cumsum(~own)])
        allowed: NDArray[np.bool_] = wrong[stop] == wrong[start]
        if mine:
            allowed &= (start <= min(mine)) & (stop > max(mine))
        return allowed

    def _recomputed(self, kind: int, in_flight: int, limit_bytes: float) -> Array:
        """How many blocks of each key of a stage of this kind take their second option."""
        begin = int(self.first[kind])
        span = slice(begin, begin + int(self.choices.lengths[kind]))
        best = begin + int(np.argmin(self._allowed_times(in_flight, limit_bytes, span)))
        found: Array = self.choices.second[best]
        return found

    def _modes(self, start: int, stop: int, recomputed: Array) -> list[Recompute]:
        left = dict(zip(self.shape.keys, (int(c) for c in recomputed), strict=True))
        modes: list[Recompute] = []
        for block in self.blocks[start:stop]:
            second = left[block.key] > 0
            left[block.key] -= second
            modes.append(block.options[-1 if second else 0].mode)
        return modes


def _gain(block: CutBlock) -> float:
    """Bytes that recompute frees for each second it takes."""
    plain, other = block.options[0], block.options[-1]
    return (plain.held_bytes - other.held_bytes) / max(other.time_s - plain.time_s, 1e-12)


def _choices(limits: NDArray[np.int64], gains: Sequence[float]) -> NDArray[np.int64]:
    """How many blocks of each key recompute: every count where those are few, else one after the other by gain."""
    if np.prod(limits + 1.0) <= MAX_CHOICES:
        return np.array(list(product(*(range(int(c) + 1) for c in limits))), dtype=np.int64)
    taken = np.zeros(len(limits), dtype=np.int64)
    made = [taken.copy()]
    for i in sorted(range(len(limits)), key=lambda i: -gains[i]):
        for _ in range(int(limits[i])):
            taken[i] += 1
            made.append(taken.copy())
    return np.array(made)


def _forward(tables: Sequence[Array], spans: Spans, combine: np.ufunc) -> tuple[float, list[Array]]:
    """The dynamic program: least ``combine`` of the stages' times for blocks 0:j, and that of each prefix before each stage."""
    width, size = tables[0].shape
    most = spans.least + width - 1
    padded = np.full(size + most, np.inf)  # that of blocks 0:j stands at j + most
    best = padded[most:]
    best[0] = 0.0
    shifted = np.lib.stride_tricks.as_strided(
        padded[width - 1 :], shape=(width, size), strides=(-padded.itemsize, padded.itemsize), writeable=False
    )  # [k, j]: that of blocks 0:j - least - k
    before, through = [], np.empty((width, size))
    for table in tables:
        before.append(best.copy())
        combine(shifted, table, out=through)
        np.minimum.reduce(through, axis=0, out=best)
    return float(best[-1]), before


def _stops(tables: Sequence[Array], spans: Spans, before: Sequence[Array]) -> list[int]:
    """Where the stages of the least sum stop; of equal ones the stages at the end are the longest."""
    width, size = tables[0].shape
    stops = [size - 1]
    for table, best in zip(reversed(tables[1:]), reversed(before[1:]), strict=True):
        last = stops[-1]
        lengths = np.arange(min(spans.least + width - 1, last), spans.least - 1, -1)
        found = best[last - lengths] + table[lengths - spans.least, last]
        stops.append(last - int(lengths[np.argmin(found)]))
    return stops[::-1]


def _any_of(masks: Iterable[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Where any of them holds."""
    found: NDArray[np.bool_] = np.logical_or.reduce(list(masks))
    return found

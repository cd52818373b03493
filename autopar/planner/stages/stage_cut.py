"""The stage cut: which consecutive blocks form a pipeline stage, and which of them recompute.

For stages of f_s + b_s = t_s seconds a micro-batch and m micro-batches the step takes

    sum of t_s  +  (m - 1) * max of t_s                  (GPipe, 1F1B; Huang et al. 2019, Zheng et al. 2022, eq. 2)

which is minimised exactly under a memory limit for each stage: for every bound on the slowest stage a dynamic program
over prefixes of the blocks minimises the sum; bounds are tried from the smallest feasible one upwards until no larger
one can win. Equal blocks are counted, not told apart: which of them recompute, and in which mode, makes no difference.
Of three modes few counts have to be looked at: see :class:`autopar.planner.stages.activation_modes.Ways`.

With virtual stages a rank holds several stages; each then gets an equal share of the rank's memory, and the bound on the
slowest stage stands for that on the slowest rank. That is a heuristic; the event simulation judges the result. Which
blocks may be a virtual stage at all is a law of the space (``docs/adr/0011-even-stages.md``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopar.planner.space.distinct import distinct
from autopar.planner.stages.activation_modes import MOVED, BlockOption, Way, along, gain, lighter, ways_of
from autopar.planner.stages.choices import Array, Choices, CutShape
from autopar.planner.stages.prefixes import Spans, forward, stops_of

LONG = 2
"""Times its even share that a stage has at first; longer ones are looked at where they may be worth it."""


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
    modes: tuple[Way, ...]
    time_s: float


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
        if shape is None:
            shape = CutShape([b.key for b in blocks], {k: ways_of(b.options) for k, b in one_of.items()}, fixed=fixed)
        self.shape = shape
        self.ordered = [one_of[key] for key in self.shape.keys]
        self.kinds = 0
        self._alone: tuple[Choices, Array, Array, Array] | None = None
        self.grow(1)

    def grow(self, kinds: int) -> None:
        """Weigh the choices of recompute of the first so many distinct stages, if more than before."""
        if kinds <= self.kinds:
            return
        self.kinds = kinds
        self.choices = self.shape.choices(kinds, _steps(self.ordered))
        self.first = self.choices.first
        self.time, self.held, self.resident = self._weighed(self.choices, self.shape.distinct[:kinds])

    def _weighed(self, choices: Choices, distinct: NDArray[np.int64]) -> tuple[Array, Array, Array]:
        """Of each choice of these stages seconds, bytes of each micro-batch that is held, and bytes whatever is held."""
        options = [(b, o) for b in self.ordered for o in b.options]
        time = choices.taken @ [o.time_s + b.more_s for b, o in options]
        if any(o.down_s for _, o in options):
            time += self._waits_s(time, choices.taken, [o for _, o in options])
        held = choices.taken @ [o.held_bytes for _, o in options]
        transient = np.zeros(len(time))
        for has, (_, option) in zip(choices.has, options, strict=True):
            np.maximum(transient, has * option.transient_bytes, out=transient)
        static = distinct @ [b.static_bytes for b in self.ordered]
        return time, held, np.repeat(static, choices.lengths) + transient

    def _waits_s(self, time: Array, taken: Array, options: Sequence[BlockOption]) -> Array:
        """For copies that the forwards and the backwards of a stage are too short for; nothing is beside the last one up."""
        forward_s, down_s, up_s = (
            taken @ [getattr(o, name) for o in options] for name in ("forward_s", "down_s", "up_s")
        )
        found: Array = np.maximum(down_s - forward_s, 0.0) + np.maximum(up_s - (time - forward_s), 0.0)
        found += (up_s > 0) * min(o.up_s for o in options if o.up_s)
        return found

    @cached_property
    def least_s(self) -> Array:
        """Of each block the time in its quickest mode."""
        known = {b.key: min(o.time_s for o in b.options) + b.more_s for b in self.ordered}
        return np.array([known[b.key] for b in self.blocks])

    @cached_property
    def lighter(self) -> dict[tuple[int, Way], int]:
        """The option that a block of a key takes next as it recomputes less than in a mode; -1: there is none."""
        one_of = {b.key: b.options for b in self.blocks}
        return {(key, o.mode): lighter(options, o.mode) for key, options in one_of.items() for o in options}

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
        if stages == 1:
            may = allowed is None or bool(allowed[0][0, n])
            return cutters[0]._whole(in_flight[0], limit_bytes[0], num_micro_batches) if may else None
        short = min(n, LONG * -(-n // stages) + 2) if allowed is None else n
        for most in sorted({short, n}):
            found = self._cut(cutters, in_flight, limit_bytes, num_micro_batches, allowed, most)
            if found is not None and found.time_s <= self._least_s(cutters, most, num_micro_batches):
                break
        return found

    def _whole(self, in_flight: int, limit_bytes: float, num_micro_batches: int) -> Cut | None:
        """All blocks as one stage: the choices of no other are asked for."""
        n = len(self.blocks)
        if any(self.shape.fixed.values()):  # a block is pinned to another stage
            return None
        kind = int(self.shape.which[0, n])
        if self._alone is None:
            choices = self.shape.choices_alone(kind, _steps(self.ordered))
            self._alone = choices, *self._weighed(choices, self.shape.distinct[kind : kind + 1])
        choices, time, held, resident = self._alone
        fitting = np.where(held * in_flight + resident <= limit_bytes, time, np.inf)
        best = int(np.argmin(fitting))
        time_s = float(fitting[best])
        if np.isinf(time_s):
            return None
        modes = tuple(self._modes(0, n, choices.taken[best]))
        return Cut(stops=(n,), modes=modes, time_s=time_s + (num_micro_batches - 1) * time_s)

    def _least_s(self, cutters: Sequence[StageCutter], most: int, num_micro_batches: int) -> float:
        """What a cut with a stage of more than ``most`` blocks takes at least."""
        if most == len(self.blocks):
            return np.inf
        least = [c.least_s for c in {id(c): c for c in cutters}.values()]
        before = np.concatenate([[0.0], np.cumsum(np.min(least, axis=0))])
        return float(before[-1] + (num_micro_batches - 1) * (before[most + 1 :] - before[: -most - 1]).min())

    def _cut(
        self,
        cutters: Sequence[StageCutter],
        in_flight: Sequence[int],
        limit_bytes: Sequence[float],
        num_micro_batches: int,
        allowed: Sequence[NDArray[np.bool_]] | None,
        most: int,
    ) -> Cut | None:
        """:meth:`cut` with at most so many blocks on a stage."""
        spans = self._spans(len(cutters), allowed, most)
        if spans is None:
            return None
        tables = self._tables(cutters, in_flight, limit_bytes, spans)
        bottleneck = forward(tables, spans, np.maximum)[0]
        if np.isinf(bottleneck):
            return None
        least_sum, _ = forward(tables, spans, np.add)
        different = list({id(t): t for t in tables}.values())
        bounds = distinct(np.concatenate([t[np.isfinite(t)] for t in different]))
        best: tuple[float, list[int]] | None = None
        for bound in bounds[bounds >= bottleneck]:
            if best is not None and least_sum + (num_micro_batches - 1) * bound >= best[0]:
                break
            below = {id(t): np.where(t <= bound, t, np.inf) for t in different}
            bounded = [below[id(t)] for t in tables]
            total, before = forward(bounded, spans, np.add)
            if best is not None and total + (num_micro_batches - 1) * bottleneck >= best[0]:
                continue  # no stage is quicker than the bottleneck
            stops = stops_of(bounded, spans, before)
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
        modes: list[Way] = []
        chosen: dict[tuple[int, int, int, float], Array] = {}
        for s, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
            kind = int(self.shape.which[start, stop])
            key = (id(cutters[s]), kind, in_flight[s], limit_bytes[s])
            if key not in chosen:
                chosen[key] = cutters[s]._recomputed(kind, in_flight[s], limit_bytes[s])
            modes += cutters[s]._modes(start, stop, chosen[key])
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
        spans = self._spans(len(cutters), allowed, n)
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

    def _spans(self, stages: int, allowed: Sequence[NDArray[np.bool_]] | None, most: int) -> Spans | None:
        """Which blocks may be which stage, at most ``most``; None where some stage may have none."""
        exists = self.shape.exists if most == len(self.blocks) else self.shape.no_longer(most)
        known: dict[int, NDArray[np.bool_]] = {}
        masks: list[NDArray[np.bool_]] = []
        for s in range(stages):
            own = exists if allowed is None else allowed[s]
            if id(own) not in known:
                known[id(own)] = own & exists
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
        used = distinct(self.shape.which[start, stop])
        place = np.zeros(len(self.shape.distinct), dtype=np.int64)
        place[used] = np.arange(len(used))
        return Spans(
            least=least,
            allowed=tuple(banded[id(mask)] for mask in masks),
            place=np.where(_any_of(banded.values()), place[self.shape.which[starts, stops]], 0),
            kinds=used,
        )

    def _choices_of(self, kinds: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Positions of the choices of recompute of these kinds, one kind after the other, and where each begins among them."""
        lengths = self.choices.lengths[kinds]
        first = np.cumsum(lengths) - lengths
        return np.arange(int(lengths.sum())) + np.repeat(self.first[kinds] - first, lengths), first

    def _tables(
        self, cutters: Sequence[StageCutter], in_flight: Sequence[int], limits: Sequence[float], spans: Spans
    ) -> list[Array]:
        """For each stage the time of blocks j - least - k : j as it at [k, j]; inf where they do not fit or may not be it."""
        known: dict[tuple[int, int, float, int], Array] = {}
        asked = {(id(c), in_flight[s], limits[s]): c for s, c in enumerate(cutters)}
        parts: dict[int, tuple[Array, Array, Array, NDArray[np.int64]]] = {}
        times: dict[tuple[int, int, float], Array] = {}
        for key, cutter in asked.items():
            if id(cutter) not in parts:
                cutter.grow(int(spans.kinds[-1]) + 1)
                choices, first = cutter._choices_of(spans.kinds)
                parts[id(cutter)] = cutter.held[choices], cutter.resident[choices], cutter.time[choices], first
            held, resident, time, first = parts[id(cutter)]
            memory = held * key[1]
            memory += resident
            times[key] = np.minimum.reduceat(np.where(memory <= key[2], time, np.inf), first)
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
        """How many blocks of each key of a stage of this kind take each of their options."""
        self.grow(kind + 1)
        begin = int(self.first[kind])
        span = slice(begin, begin + int(self.choices.lengths[kind]))
        best = begin + int(np.argmin(self._allowed_times(in_flight, limit_bytes, span)))
        found: Array = self.choices.taken[best]
        return found

    def _modes(self, start: int, stop: int, recomputed: Array) -> list[Way]:
        """Of the blocks of a stage; of equal ones the first recompute the most, and those that move stand evenly between."""
        left = recomputed.astype(np.int64)
        place = {
            key: (int(i), int(k))
            for key, i, k in zip(self.shape.keys, self.shape.columns, self.shape.columns[1:], strict=False)
        }
        modes: list[Way] = []
        seen: dict[int, tuple[int, int, int]] = {}  # of a key: blocks so far, all of them, those that move
        for block in self.blocks[start:stop]:
            begin, end = place[block.key]
            moved = next((k for k in range(begin, end) if block.options[k - begin].mode == MOVED), -1)
            i, count, moving = seen.get(
                block.key, (0, int(left[begin:end].sum()), int(left[moved]) if moved >= 0 else 0)
            )
            seen[block.key] = i + 1, count, moving
            column = moved
            if (i + 1) * moving // count == i * moving // count:
                column = next(k for k in reversed(range(begin, end)) if left[k] and k != moved)
            left[column] -= 1
            modes.append(block.options[column - begin].mode)
        return modes


def _steps(blocks: Sequence[CutBlock]) -> list[tuple[int, int, int]]:
    """Keys by position, and from which option to which their blocks go, by what it frees for a second."""
    found = []
    for k, block in enumerate(blocks):
        pairs = pairwise(along(block.options))
        found += [(gain(block.options[a], block.options[b]), k, a, b) for a, b in pairs]
    return [step for _, *step in sorted(found, key=lambda step: -step[0])]  # type: ignore[misc]


def _any_of(masks: Iterable[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Where any of them holds."""
    found: NDArray[np.bool_] = np.logical_or.reduce(list(masks))
    return found

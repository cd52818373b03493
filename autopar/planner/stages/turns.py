"""Which blocks of a rank with several stages recompute: those that take the least time of all choices that fit.

A rank's stages are full at different moments, so that the same block frees more on one of them than on another. All choices
of how many blocks of each stage recompute in each mode are weighed against the rank's fullest moments, rank by rank.

Of those of equal time the ones that recompute on the same turn on all ranks are the quickest: ranks run their stages of one turn
side by side, and wait for each other. Which turn is best depends on the fill and the drain of the pipeline; each is tried. What
ranks wait for is on each turn the longest of their stages: so times of turns are tried too within which every rank has a choice that
fits, those of the least sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations_with_replacement, product
from math import comb

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.memory import StageCost
from autopar.planner.space.distinct import distinct
from autopar.planner.stages.activation_modes import BlockOption, Way, none_if_moved
from autopar.planner.stages.fitting import Fitting
from autopar.planner.stages.stage_cut import Cut, StageCutter

MAX_CHOICES = 8192
"""Choices of one rank that are weighed; where there are more, those of two modes are, and where these are too many, none is."""

MAX_TIMES = 2**22
"""Times of turns that are compared with choices of ranks, all in all; where there are more, none is tried."""

MOST = 8
"""Times of turns of the least sums that are tried."""

_TIE = 1 + 1e-9

Array = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """A stage by its choices of modes, the quickest first, none of which another one is better than in all.

    ``modes``: of its blocks; ``kept``, ``passing``, ``time_s``: bytes of a micro-batch, bytes in passing, seconds of all blocks.
    """

    modes: list[tuple[Way, ...]]
    kept: Array
    passing: Array
    time_s: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rank:
    """Choices of a rank that fit and none of whose stages may be quicker alone: which of each of its stages, and seconds [choices, turns]."""

    counts: Counts
    times_s: Array


def by_turns(
    first: Fitting,
    cutter: StageCutter,
    kept_bytes: Callable[[StageCost, int], int],
    peaks: Sequence[Counts],
    limits: Sequence[float],
) -> list[Cut]:
    """The cut with other blocks recomputed, in several ways; none where no choice fits or there are too many.

    Args:
        first: a cut that fits, with its stages and memory.
        kept_bytes: of one micro-batch on a stage, by its number.
        peaks: of each rank the micro-batches on its stages at its fullest moments [moments, stages].
        limits: bytes of tensors that fit on each rank.
    """
    pp, cut = len(limits), first.cut
    stages: list[_Stage] = []
    for is_wanted in (lambda options: options, lambda options: (options[0], options[-1])):
        stages = _stages(first, cutter, kept_bytes, is_wanted)
        if stages and max(np.prod([len(own.kept) for own in stages[rank::pp]]) for rank in range(pp)) <= MAX_CHOICES:
            break
    else:
        return []
    ranks = []
    for rank in range(pp):
        found = _choices(stages[rank::pp], first, rank, pp, peaks[rank], limits[rank])
        if not len(found.counts):
            return []
        ranks.append(found)
    turns = len(stages) // pp
    made = []
    for chosen in [*_on_turns(ranks, turns), *_within_times(ranks)]:
        modes: list[Way] = []
        for s, own in enumerate(stages):
            modes += own.modes[int(chosen[s % pp][s // pp])]
        made.append(replace(cut, modes=tuple(modes)))
    return list({one.modes: one for one in made if one.modes != cut.modes}.values())


def _stages(
    first: Fitting,
    cutter: StageCutter,
    kept_bytes: Callable[[StageCost, int], int],
    wanted: Callable[[Sequence[BlockOption]], Sequence[BlockOption]],
) -> list[_Stage]:
    """None where one of them has too many choices."""
    cut = first.cut
    edges = list(zip((0, *cut.stops), cut.stops, strict=False))
    known: dict[object, _Stage | None] = {}
    stages = []
    for s, (start, stop) in enumerate(edges):
        own = cutter.blocks[start:stop]
        key = (
            tuple(b.key for b in own),
            tuple(map(id, first.made[s].blocks)),
            cut.modes[start:stop] if any(len(b.options) == 1 for b in own) else (),
            s > 0,
            s + 1 < len(edges),
        )
        if key not in known:
            options = [wanted(block.options) for block in own]
            known[key] = _stage(first.made[s], cut.modes[start:stop], options, partial(_at, kept_bytes, s))
        found = known[key]
        if found is None:
            return []
        stages.append(found)
    return stages


def _at(kept_bytes: Callable[[StageCost, int], int], number: int, stage: StageCost) -> int:
    return kept_bytes(stage, number)


def _stage(
    made: StageCost,
    now: Sequence[Way],
    options: Sequence[Sequence[BlockOption]],
    kept_bytes: Callable[[StageCost], int],
) -> _Stage | None:
    """A stage whose equal blocks are in modes of ever less recompute; ``now``: those of blocks with one option."""
    alike: dict[tuple[int, tuple[BlockOption, ...]], list[int]] = {}
    for i, own in enumerate(options):
        useful = tuple(o for k, o in enumerate(own) if not any(_is_as_good(other, o) for other in own[:k]))
        alike.setdefault((id(made.blocks[i]), useful), []).append(i)
    if (
        np.prod([float(comb(len(own) + len(places) - 1, len(places))) for (_, own), places in alike.items()])
        > MAX_CHOICES
    ):
        return None
    every = [combinations_with_replacement(reversed(own), len(places)) for (_, own), places in alike.items()]
    found = []
    for chosen in product(*every):
        modes, time_s = [*now], 0.0
        for places, own in zip(alike.values(), chosen, strict=True):
            for i, option in zip(places, own, strict=True):
                modes[i] = option.mode if len(options[i]) > 1 else now[i]
                time_s += option.time_s
        again = tuple(map(none_if_moved, modes))
        one = StageCost(blocks=made.blocks, recompute=again)
        found.append((time_s, kept_bytes(one), _passing(one), tuple(modes)))
    found.sort(key=lambda own: own[:3])
    worth: list[tuple[float, int, int, tuple[Way, ...]]] = []
    for one_s, kept, passing, chosen_modes in found:
        if not any(kept >= other[1] and passing >= other[2] for other in worth):
            worth.append((one_s, kept, passing, chosen_modes))
    return _Stage(
        modes=[own[3] for own in worth],
        kept=np.array([own[1] for own in worth], dtype=np.float64),
        passing=np.array([own[2] for own in worth], dtype=np.float64),
        time_s=np.array([own[0] for own in worth]),
    )


def _is_as_good(one: BlockOption, other: BlockOption) -> bool:
    """Whether what recomputes less takes no longer and keeps no more."""
    return one.time_s <= other.time_s and one.held_bytes <= other.held_bytes


def _passing(stage: StageCost) -> int:
    """See ``autopar.cost.step.memory.passing_bytes``, what does not depend on recompute left out."""
    peak = later = 0
    for block, mode in zip(reversed(stage.blocks), reversed(stage.recompute), strict=True):
        peak = max(peak, block.passing_bytes(mode) - later)
        later += block.kept_bytes(mode)
    return peak


def _choices(own: Sequence[_Stage], first: Fitting, rank: int, pp: int, peaks: Counts, limit: float) -> _Rank:
    """Those of a rank that are worth it."""
    memory, now = first.memory[rank], max(_passing(stage) for stage in first.made[rank::pp])
    fixed = memory.parameters + memory.gradients + memory.optimizer + memory.transient - now
    shape = [len(stage.kept) for stage in own]
    counts = np.indices(shape).reshape(len(own), -1).T
    kept = np.stack([stage.kept[counts[:, t]] for t, stage in enumerate(own)])
    passing = np.max([stage.passing[counts[:, t]] for t, stage in enumerate(own)], axis=0)
    times_s = np.stack([stage.time_s[counts[:, t]] for t, stage in enumerate(own)], axis=1)
    fits = fixed + (peaks @ kept).max(axis=0) + passing <= limit
    least = fits & ~_after(fits.reshape(shape)).reshape(-1)
    return _Rank(counts=counts[least], times_s=times_s[least])


def _after(fits: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Of choices [choices of the first stage, of the next one, ...] whether one with the next quicker choice of a stage fits too."""
    found = np.zeros_like(fits)
    for axis in range(fits.ndim):
        np.moveaxis(found, axis, 0)[1:] |= np.moveaxis(fits, axis, 0)[:-1]
    return found


def _on_turns(ranks: Sequence[_Rank], turns: int) -> Iterator[list[Counts]]:
    """For each turn the choices of ranks, of the quickest those with most on this turn."""
    for turn in range(turns):
        chosen = []
        for own in ranks:
            time_s = own.times_s.sum(axis=1)
            best = np.flatnonzero(time_s <= time_s.min() * _TIE)
            times_s = own.times_s[best]
            after = [times_s[:, t] for t in reversed(range(turns)) if t != turn]
            chosen.append(own.counts[best[np.lexsort([*(-column for column in after), -times_s[:, turn]])[0]]])
        yield chosen


def _within_times(ranks: Sequence[_Rank]) -> Iterator[list[Counts]]:
    """For times of turns within which all ranks have a choice their quickest ones."""
    alike = {own.times_s.tobytes(): own.times_s for own in ranks}
    levels = [distinct(np.concatenate(column)) for column in zip(*(own.T for own in alike.values()), strict=True)]
    least = np.array([own.min(axis=0) for own in alike.values()]).max(axis=0)
    levels = [own[own >= most] for own, most in zip(levels, least, strict=True)]  # all ranks have to have one
    size = float(np.prod([float(len(own)) for own in levels]))
    if size * max(map(len, alike.values())) > MAX_TIMES:
        return
    times_s = np.stack(np.meshgrid(*levels, indexing="ij"), axis=-1).reshape(-1, len(levels))
    for own in alike.values():
        below = np.ones((len(times_s), len(own)), dtype=bool)
        for turn in range(len(levels)):
            below &= own[:, turn] <= times_s[:, turn, None]
        times_s = times_s[below.any(axis=1)]
    order = np.argsort(times_s.sum(axis=1), kind="stable")
    for most_s in times_s[order[:MOST]]:
        chosen = []
        for rank in ranks:
            fits = np.flatnonzero((rank.times_s <= most_s).all(axis=1))
            chosen.append(rank.counts[fits[rank.times_s[fits].sum(axis=1).argmin()]])
        yield chosen

"""Which blocks of a rank with several stages recompute: those that take the least time of all choices that fit.

A rank's stages are full at different moments, so that the same block frees more on one of them than on another. All choices
of how many blocks of each stage recompute are weighed against the rank's fullest moments, rank by rank. Of those of equal
time the ones that recompute on the same turn on all ranks are the quickest: ranks run their stages of one turn side by side,
and wait for each other. Which turn is best depends on the fill and the drain of the pipeline; each is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.cost.memory import StageCost
from autopar.search.fitting import Fitting
from autopar.search.inter import Cut, StageCutter
from autopar.search.ways import BlockOption, none_if_moved

MAX_CHOICES = 4096
"""Choices of one rank that are weighed; where there are more, none is."""

_TIE = 1 + 1e-9

Array = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Stage:
    """A stage by how many of its blocks recompute, those first that free the most for their time.

    ``order``: these blocks; ``kept``, ``passing``, ``time_s``: bytes of a micro-batch, bytes in passing, seconds of recompute.
    """

    order: list[int]
    kept: Array
    passing: Array
    time_s: Array


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
    edges = list(zip((0, *cut.stops), cut.stops, strict=False))
    known: dict[object, _Stage] = {}
    stages = []
    for s, (start, stop) in enumerate(edges):
        key = (
            tuple(b.key for b in cutter.blocks[start:stop]),
            tuple(map(id, first.made[s].blocks)),
            s > 0,
            s + 1 < len(edges),
        )
        if key not in known:
            known[key] = _stage(first.made[s], start, cutter, partial(_at, kept_bytes, s))
        stages.append((start, known[key]))
    chosen: list[list[Counts]] = []  # of each rank, by the turn that is preferred
    for rank in range(pp):
        found = list(_choices([own for _, own in stages[rank::pp]], first, rank, pp, peaks[rank], limits[rank]))
        if not found:
            return []
        chosen.append(found)
    made = []
    for turn in range(len(stages) // pp):
        modes = list(cut.modes)
        for s, (start, own) in enumerate(stages):
            count = int(chosen[s % pp][turn][s // pp])
            for place, i in enumerate(own.order):
                plain, other = _ends(cutter, start + i)
                modes[start + i] = (other if place < count else plain).mode
        made.append(replace(cut, modes=tuple(modes)))
    return list({one.modes: one for one in made if one.modes != cut.modes}.values())


def _at(kept_bytes: Callable[[StageCost, int], int], number: int, stage: StageCost) -> int:
    return kept_bytes(stage, number)


def _ends(cutter: StageCutter, block: int) -> tuple[BlockOption, BlockOption]:
    return cutter.blocks[block].options[0], cutter.blocks[block].options[-1]


def _stage(made: StageCost, start: int, cutter: StageCutter, kept_bytes: Callable[[StageCost], int]) -> _Stage:
    gains = []
    for i in range(len(made.blocks)):
        plain, other = _ends(cutter, start + i)
        more_s, freed = other.time_s - plain.time_s, plain.held_bytes - other.held_bytes
        if more_s > 0 and freed > 0:
            gains.append((-freed / more_s, i, more_s))
    gains.sort()
    order = [i for _, i, _ in gains]
    kept, passing = [], []
    for count in range(len(order) + 1):
        again = {*order[:count]}
        modes = tuple(
            none_if_moved(_ends(cutter, start + i)[i in again].mode) if i in order else mode
            for i, mode in enumerate(made.recompute)
        )
        one = StageCost(blocks=made.blocks, recompute=modes)
        kept.append(kept_bytes(one))
        passing.append(_passing(one))
    return _Stage(
        order=order,
        kept=np.array(kept, dtype=np.float64),
        passing=np.array(passing, dtype=np.float64),
        time_s=np.cumsum([0.0, *(more_s for _, _, more_s in gains)]),
    )


def _passing(stage: StageCost) -> int:
    """See ``autopar.cost.memory.passing_bytes``, what does not depend on recompute left out."""
    peak = later = 0
    for block, mode in zip(reversed(stage.blocks), reversed(stage.recompute), strict=True):
        peak = max(peak, block.passing_bytes(mode) - later)
        later += block.kept_bytes(mode)
    return peak


def _choices(
    own: Sequence[_Stage], first: Fitting, rank: int, pp: int, peaks: Counts, limit: float
) -> Iterator[Counts]:
    """For each turn the blocks of each stage that recompute, of the quickest choices those with most on this turn."""
    sizes = [len(stage.kept) for stage in own]
    if np.prod(sizes) > MAX_CHOICES:
        return
    memory, now = first.memory[rank], max(_passing(stage) for stage in first.made[rank::pp])
    fixed = memory.parameters + memory.gradients + memory.optimizer + memory.transient - now
    counts = np.array(list(product(*map(range, sizes))), dtype=np.int64)
    kept = np.stack([stage.kept[counts[:, t]] for t, stage in enumerate(own)])
    passing = np.max([stage.passing[counts[:, t]] for t, stage in enumerate(own)], axis=0)
    time_s = np.sum([stage.time_s[counts[:, t]] for t, stage in enumerate(own)], axis=0)
    fits = fixed + (peaks @ kept).max(axis=0) + passing <= limit
    if not fits.any():
        return
    best = counts[fits & (time_s <= time_s[fits].min() * _TIE)]
    for turn in range(len(own)):
        after = [best[:, t] for t in reversed(range(len(own))) if t != turn]
        yield best[np.lexsort([*(-column for column in after), -best[:, turn]])[0]]

"""Which blocks of virtual stages recompute where ranks differ, as the cut of :mod:`autopar.planner.stages.mixed_turns` counts them.

:mod:`autopar.planner.stages.stage_cut` gives each stage of a rank an equal share of its memory, so that the stages that hold most micro-batches
recompute more than their rank has to. The cut of virtual stages counts for a whole rank how many blocks have to, and in which of
its stages. Here these are taken as they are; where the memory model finds more than the row does, more of them on that rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autopar.planner.bounds.bound_rows import Array
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.bounds.mixed_stages import Stages
from autopar.planner.stages.activation_modes import BlockOption, Way
from autopar.planner.stages.fitting import MAX_CUTS, Fitting
from autopar.planner.stages.mixed_turns import recomputed
from autopar.planner.stages.stage_cut import Cut, CutBlock, StageCutter

MORE = 1.01
"""Of what a rank holds too much, by which it is given less: what its device reserves grows with it."""


def fitted(
    row: MixedRow,
    sizes: Sequence[int],
    stops: tuple[int, ...],
    cutters: Sequence[StageCutter],
    refit: Callable[[Cut], Fitting],
    limits: Sequence[int],
) -> Fitting | None:
    """A cut with recompute as its row counts it; None where none fits that way, or blocks have no such modes.

    Args:
        sizes: blocks of the group on each stage.
        stops: where each stage ends.
        cutters: for each rank what has its blocks.
        refit: a cut with its memory.
        limits: bytes that fit on each rank.
    """
    stages = Stages(row)
    for _ in range(MAX_CUTS):
        counts = recomputed(stages, np.array(sizes)[None])[0]
        if np.isnan(counts).any():
            return None
        modes = _modes(stages, counts, stops, cutters)
        if modes is None:
            return None
        found = refit(Cut(stops=stops, modes=modes, time_s=0.0))
        spare = np.array([limit - own.total for limit, own in zip(limits, found.memory, strict=True)], dtype=float)
        if spare.min() >= 0:
            return found
        held = _by_rank(stages, stages.num_bytes * np.array(sizes)) - _by_rank(stages, stages.freed_bytes * counts)
        stages.room_bytes = np.where(spare < 0, held + MORE * spare, stages.room_bytes)
    return None


def _by_rank(stages: Stages, values: Array) -> Array:
    """The sum of what the stages of each rank have, of all parts."""
    found: Array = values.reshape(-1, stages.pp).sum(axis=0)
    return found


def _modes(
    stages: Stages, counts: Array, stops: Sequence[int], cutters: Sequence[StageCutter]
) -> tuple[Way, ...] | None:
    """Of each block, those of a stage that recompute most first; None where a block has no such mode.

    The first block and the last one keep least, as the row has them.
    """
    size = len(stages.rank)
    each = np.round(counts).astype(int).reshape(-1, size)
    some, full = each[0].tolist(), each[-1].tolist()
    found: list[Way] = []
    for s, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
        for i, block in enumerate(cutters[s % stages.pp].blocks[start:stop], start):
            place = i - start - (s == 0)
            is_end = i in (0, stops[-1] - 1)
            level = 2 if is_end or place < full[s] else int(place < some[s])
            mode = _mode(block, level)
            if mode is None:
                return None
            found.append(mode)
    return tuple(found)


def _mode(block: CutBlock, level: int) -> Way | None:
    """The quickest mode (0), that which keeps least (2), or the one between these."""

    def held(option: BlockOption) -> tuple[float, float]:
        return option.held_bytes, option.time_s

    lean, quick = min(block.options, key=held), min(block.options, key=lambda o: (o.time_s, o.held_bytes))
    if level != 1:
        return (lean if level else quick).mode
    between = [option.mode for option in block.options if option not in (lean, quick)]
    return between[0] if len(between) == 1 else None

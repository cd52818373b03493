"""The group of equal blocks of a model that takes longest, and the ways to cut it into virtual stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.cost.step.step import own_times
from autopar.graph.rewrites import Compact
from autopar.plan.plan import Recompute
from autopar.planner.layouts.layout import PricedLayout

LATE = 6
"""Parts of the pipeline's ranks, of which some have short first stages."""


class EqualBlocks:
    """Blocks of one model, by kind.

    Args:
        compact: the compact graph.
        modes: of recompute that the space allows.
        pinned: modes of blocks of the original graph.
        is_pinned: pins say which stage holds some block.
        every: see ``Space.every``.
    """

    def __init__(
        self,
        compact: Compact,
        *,
        modes: Sequence[Recompute],
        pinned: Mapping[int, Recompute],
        is_pinned: bool = False,
        every: int = 0,
    ) -> None:
        self.compact, self.class_of, self.is_pinned, self.every = compact, compact.class_of, is_pinned, every
        self.moves = False
        """Whether blocks may keep on the host what their backward needs, beside their modes of recompute."""
        self.modes = [
            tuple(dict.fromkeys(m for i in members for m in ((pinned[i],) if i in pinned else modes)))
            for members in compact.members
        ]
        self.counts = [len(members) for members in compact.members]

    def largest(self, option: PricedLayout) -> tuple[int, ...]:
        """The blocks of the compact graph that are the group of equal operators that takes longest.

        The first and the last block of all are no part of it, unless they stand for others too.
        """
        groups, inner = self.groups()
        times = [sum(own_times(cost, recompute="none")) for cost in option.costs]
        return tuple(max(groups, key=lambda own: sum(inner[k] * times[k] for k in own), default=()))

    def groups(self) -> tuple[list[list[int]], list[int]]:
        """Blocks of the compact graph by equal operators; and how many each stands for, the first and last of all left out."""
        inner = [*self.counts]
        inner[0] -= 1
        inner[-1] -= 1
        found: dict[str, list[int]] = {}
        for k, block in enumerate(self.compact.graph.blocks):
            if inner[k] > 0:
                found.setdefault(block.hash, []).append(k)
        return list(found.values()), inner

    def most_blocks(self, option: PricedLayout, stages: int) -> float:
        """How many blocks of the largest group a virtual stage may hold: the model's time in whole blocks, split evenly.

        No law with one stage a rank, where pins say what stages hold, or where all cuts are tried.
        """
        places = self.largest(option)
        if self.is_pinned or not places or self.tries_all(stages):
            return math.inf
        times = [sum(own_times(cost, recompute="none")) for cost in option.costs]
        total_s = sum(n * time_s for n, time_s in zip(self.counts, times, strict=True))
        return math.ceil(math.floor(total_s / min(times[k] for k in places) + 1e-9) / stages)

    def tries_all(self, stages: int) -> bool:
        """Whether all cuts into so many stages with every choice of recompute are few enough to be priced."""
        choices = [len(self.modes[k]) + self.moves for k in self.class_of]
        return math.comb(len(self.class_of) - 1, stages - 1) * math.prod(choices) <= self.every

    def even_stages(self, option: PricedLayout, pp: int, virtual_stages: int) -> list[list[NDArray[np.bool_]]]:
        """Ways to cut virtual stages: for each stage whether blocks i:j may be one, see :meth:`most_blocks`.

        Where blocks do not divide evenly, the first ways give those that are left to the middle of a rank's stages: the
        first and the last of them stand in the fill and the drain of the pipeline. A rank's first stages hold the most
        micro-batches, and the first ranks' more than others': theirs may go to their last stages. Of two stages a rank, the
        first ranks' first ones may be those that are short.
        """
        stages = pp * virtual_stages
        most = self.most_blocks(option, stages)
        if most == math.inf:
            return []
        places = set(self.largest(option))
        counted = np.concatenate([[0], np.cumsum([k in places for k in self.class_of])])
        held = counted[None, :] - counted[:, None]
        each, rest = divmod(int(counted[-1]), stages)
        even = [held <= most] * stages
        if not rest:
            return [even]
        count, fewer, larger = -(-rest // pp), held <= each, held <= each + 1
        if virtual_stages == 2:  # the pipeline fills sooner where the first stages are short
            shares = sorted({pp * k // LATE for k in range(1, LATE)} - {0})
            return [even, *([fewer if s < late else larger for s in range(stages)] for late in shares)]
        middle = set(sorted(range(virtual_stages), key=lambda turn: (abs(2 * turn - virtual_stages + 1), turn))[:count])
        last = set(range(virtual_stages - count, virtual_stages))
        ways = [
            [larger if s // pp in (last if s % pp < late else middle) else fewer for s in range(stages)]
            for late in sorted({0, 1, pp // 4}, reverse=True)
        ]
        return [*ways, even]

    def equal_stages(self, option: PricedLayout, stages: int) -> list[list[NDArray[np.bool_]]]:
        """The way to cut stages that hold equal numbers of blocks of the largest group, or one more; as in :meth:`even_stages`."""
        places = set(self.largest(option))
        counted = np.concatenate([[0], np.cumsum([k in places for k in self.class_of])])
        each, rest = divmod(int(counted[-1]), stages)
        held = counted[None, :] - counted[:, None]
        return [[(held >= each) & (held <= each + (rest > 0))] * stages]

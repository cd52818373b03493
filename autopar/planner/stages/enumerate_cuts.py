"""All cuts into stages with every choice of recompute, where they are few.

The stage cut minimises what adds up (:mod:`autopar.planner.stages.stage_cut`); the step of a plan does not quite: messages between
stages wait for each other, memory comes in steps. So the plan of a small problem may have a cut that no solver names. A space
says up to how many plans are all tried (``Space.every``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import comb, prod

from autopar.planner.stages.activation_modes import CutBlock
from autopar.planner.stages.stage_cut import Cut


def count_plans(num_blocks: int, stages: int, choices: Sequence[int]) -> int:
    """Cuts into stages times choices of recompute; ``choices``: of each block."""
    return comb(num_blocks - 1, stages - 1) * prod(choices)


def every_cut(blocks: Sequence[CutBlock], stages: int, fixed: Mapping[int, int]) -> Iterator[Cut]:
    """All of them; ``fixed``: pinned stage by block index. Their times are left open."""
    n = len(blocks)
    modes = list(product(*([option.mode for option in block.options] for block in blocks)))
    for inner in combinations(range(1, n), stages - 1):
        stops = (*inner, n)
        if all(sum(stop <= i for stop in stops) == stage for i, stage in fixed.items()):
            for own in modes:
                yield Cut(stops=stops, modes=own, time_s=0.0)

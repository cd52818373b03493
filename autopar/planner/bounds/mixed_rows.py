"""Candidates whose pipeline ranks have different devices as rows of prices, and their first bound.

Without memory, total work over total speed. Let w_r be the work that rank r takes, in seconds of a micro-batch on the
devices that are fastest for each block; its own devices take at least s_r w_r. Then, for every rank r and a step of T,

    sum over q before r of s_q w_q  +  m s_r w_r  <=  T,        sum of w_r = W.

Weights y_r >= 0 with m s_r y_r + s_r * (sum of y after r) >= 1 add these up to T * (sum of y) >= W: a bound for any such y,
and the best one where all inequalities can be equalities. Without the first term, as with virtual stages, y_r = 1 / (m s_r);
there the inequalities of the stages, each as if its rank had no other, give a second bound, the larger one of few micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.planner.bounds.bound_rows import BlockPrice


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceRow:
    """One candidate in one layout on one kind of devices.

    Attributes:
        first, last, group: prices of the first block, the last one, and of each of the group of equal ones.
        count: blocks of that group, the first and last of all not counted.
        least: blocks of it that each stage has for sure.
        alone: there is one block, which is both first and last.
        others: blocks that are neither in the group nor first or last.
        is_one: whether all blocks of the group free the same bytes in the same time by recompute.
        before_s, before_forward_s: for each pipeline rank the time of as many blocks as there are ranks before it, from the
            first on, and of their forwards.
        every_s: of each stage and micro-batch beside its blocks.
        limit_bytes: for tensors.
        schedule, virtual_stages, num_micro_batches: of the pipeline.
        waits: whether a rank's stages follow each other (every schedule but the interleaved ones).
        in_flight, most_done: micro-batches whose forward a stage of each pipeline rank has done when the rank's first
            backward begins, at least and at most.
    """

    first: BlockPrice
    last: BlockPrice
    group: BlockPrice
    count: int
    least: int
    alone: bool
    others: int
    before_s: tuple[float, ...]
    before_forward_s: tuple[float, ...]
    every_s: float
    limit_bytes: float
    schedule: str
    virtual_stages: int
    num_micro_batches: int
    waits: bool
    in_flight: tuple[int, ...]
    most_done: tuple[int, ...]
    is_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedRow:
    """One candidate in one layout.

    Attributes:
        ranks: for each pipeline rank the row of a pipeline of its devices alone; equal but for seconds and limits.
        work_s: of one micro-batch through all blocks, each on the devices that are fastest for it.
        slowness: of each pipeline rank: no block takes less than this times its part of ``work_s``.
        sends_s, sends_back_s: for each pipeline rank but the last, its message to the next one and the one back.
        around_s, around_back_s: of virtual stages, the last rank's message to the first one, and the one back.
        stage_bytes: what each stage but the last keeps of a micro-batch beside its blocks.
        tie_s: once a step, on the first rank and on the last one: gradients of parameters that both have.
    """

    ranks: tuple[PlaceRow, ...]
    work_s: float
    slowness: tuple[float, ...]
    sends_s: tuple[float, ...] = ()
    sends_back_s: tuple[float, ...] = ()
    around_s: float = 0.0
    around_back_s: float = 0.0
    stage_bytes: float = 0.0
    tie_s: float = 0.0

    @property
    def before_s(self) -> list[float]:
        """What stands before each rank beside blocks: messages, and what every stage repeats."""
        every_s = [own.every_s for own in self.ranks[:-1]]
        if self.sends_s:
            messages = zip(every_s, self.sends_s, self.sends_back_s, strict=True)
            every_s = [own_s + (there_s + back_s) for own_s, there_s, back_s in messages]
        return [*accumulate(every_s, initial=0.0)]


def work_and_slowness(prices: Sequence[Sequence[BlockPrice]], counts: Sequence[int]) -> tuple[float, tuple[float, ...]]:
    """Of a row, from the prices of the blocks on each rank, which stand for ``counts`` ones."""
    kinds = {id(own): [price.time_s for price in own] for own in prices}  # many ranks have the same
    least = [min(times) for times in zip(*kinds.values(), strict=True)]
    some = [(k, least_s) for k, least_s in enumerate(least) if least_s > 0]
    each = {key: min((times[k] / least_s for k, least_s in some), default=1.0) for key, times in kinds.items()}
    work_s = sum(least_s * count for least_s, count in zip(least, counts, strict=True))
    return work_s, tuple(each[id(own)] for own in prices)


def holds(row: MixedRow, static_bytes: Sequence[float]) -> bool:
    """Whether the ranks can hold the blocks of the group, recomputed wherever they may be.

    Args:
        static_bytes: of each on each rank, instead of those of the row.
    """
    left = row.ranks[0].count
    for own, held, static in zip(row.ranks, row.ranks[0].in_flight, static_bytes, strict=True):
        each = static + held * min(own.group.held_bytes, own.group.held_again_bytes)
        room = own.limit_bytes * (1 + 1e-9)
        left -= left if room >= left * each else math.floor(room / each)
    return left <= 0


def work_bound_s(row: MixedRow) -> float:
    """Total work over total speed, with what each stage does beside its blocks; and as if each stage had a rank of its own."""
    own = row.ranks[0]
    ranks = [*zip(row.slowness, row.before_s, [rank.every_s for rank in row.ranks], strict=True)][::-1]
    found = _flow_s(row, ranks, own.waits, own.virtual_stages)
    return found if own.waits else max(found, _flow_s(row, ranks * own.virtual_stages, True, 1))


def _flow_s(row: MixedRow, ranks: Sequence[tuple[float, float, float]], waits: bool, each: int) -> float:
    """The bound by weights for ranks of ``each`` stages, last ones first: slowness, what stands before, what a stage repeats."""
    m, after, weighted_s = row.ranks[0].num_micro_batches, 0.0, 0.0
    for slowness, before_s, every_s in ranks:
        weight = (1 / slowness - after if waits else 1 / slowness) / m
        if weight > 0:
            weighted_s += weight * (before_s + m * each * every_s)
            after += weight
    return (row.work_s + weighted_s) / after

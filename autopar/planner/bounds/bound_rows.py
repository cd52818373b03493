"""What the lower bounds are computed from: prices of blocks, and a candidate in a layout as one row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPrice:
    """The least that a block (or each of a group) adds to its rank.

    Attributes:
        time_s: forward and backward of one micro-batch.
        forward_s: the forward's part of it.
        again_s: what recompute adds to the backward where it frees all that it can, at the least seconds for a byte.
        least_again_s: what it adds to the backward of a block that recomputes at all.
        more_byte_s, more_free_s: recompute that frees so many bytes of ``held_bytes`` adds no less than the first for each, less
            the second: another line below what modes of recompute take, beside that of ``again_s``; zeros: there is none.
        some_bytes: of one micro-batch between forward and backward, in every mode but the one that keeps the least; zero: not known.
        full_s: what the one that keeps the least adds to the backward.
        beside_s: what the second line is less by where the block stands beside those of the group.
        once_s: once a step, after the rank's last backward.
        gather_s: what the stage's first forward takes longer, beside the forward of another block.
        static_bytes: parameters, gradients and optimizer states.
        held_bytes, held_again_bytes: of one micro-batch between forward and backward; the second with the most recompute.
        passing_bytes: at its peak inside, over what it keeps.
        lean_bytes: the same over the least that it can keep.
    """

    time_s: float
    forward_s: float
    again_s: float
    least_again_s: float
    once_s: float
    gather_s: float
    static_bytes: float
    held_bytes: float
    held_again_bytes: float
    passing_bytes: float
    lean_bytes: float
    more_byte_s: float = 0.0
    more_free_s: float = 0.0
    some_bytes: float = 0.0
    full_s: float = 0.0
    beside_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate in one layout.

    Attributes:
        first, last, group: prices of the first block, the last one, and of each of the group of equal ones.
        count: blocks of that group, the first and last of all not counted.
        alone: there is one block, which is both first and last.
        others: blocks that are neither in the group nor first or last.
        total_s, forward_s: time of all blocks, and of their forwards.
        before_s, before_forward_s: for each pipeline rank the time of as many blocks as there are ranks before it, from
            the first on, and of their forwards.
        after_backward_s: for each pipeline rank the time of the backwards of as many blocks as there are ranks after it, up
            to the last one.
        once_s, gathers_s: of all blocks.
        stage_gathers_s: for 0, 1, ... all stages what their first gathers add at least, as no forward is beside them.
        every_s: of each stage and micro-batch beside its blocks, in the forward.
        send_s, send_back_s: of each message from a stage to the next, and back.
        stage_bytes: what each stage but the last keeps of a micro-batch beside its blocks.
        limit_bytes: for tensors.
        most: blocks of the group that a stage may hold.
        schedule, pp, virtual_stages, num_micro_batches: of the pipeline.
        tells_apart: False where only the sum of a forward and its backward is a bound, so that chain 3 is none.
    """

    first: BlockPrice
    last: BlockPrice
    group: BlockPrice
    count: int
    alone: bool
    others: int
    total_s: float
    forward_s: float
    before_s: tuple[float, ...]
    before_forward_s: tuple[float, ...]
    after_backward_s: tuple[float, ...]
    once_s: float
    gathers_s: float
    stage_gathers_s: tuple[float, ...]
    every_s: float
    send_s: float
    send_back_s: float
    stage_bytes: float
    limit_bytes: float
    most: float
    schedule: str
    pp: int
    virtual_stages: int
    num_micro_batches: int
    tells_apart: bool = True

    def least_on(self, stages: NDArray[np.int64]) -> NDArray[np.float64]:
        """Blocks of the group that so many stages hold at least, because the others cannot hold them."""
        if self.most >= self.count:
            return np.zeros(len(stages))
        found: Array = np.maximum(self.count - self.most * (self.pp * self.virtual_stages - stages), 0.0)
        return found

    @property
    def least_each(self) -> float:
        """Those that each stage holds at least."""
        if self.most >= self.count:
            return 0.0
        return max(self.count - self.most * (self.pp * self.virtual_stages - 1), 0.0)

    @property
    def least_once_s(self) -> float:
        """What rank 0 does at least once a step."""
        own = max(self.virtual_stages - self.others - 1 - (self.pp == 1), 0)
        return self.first.once_s + min(own, self.count) * self.group.once_s


def passing_bytes(
    first: Mapping[str, Array], last: Mapping[str, Array], group: Mapping[str, Array], is_first: Array, is_last: Array
) -> tuple[Array, Array]:
    """Bytes in passing at least, over what all blocks keep: of ranks without blocks of the group, and with some.

    The first and the last block are counted with the least that they can keep.

    While a block is at its peak, what those behind it on its stage kept of the micro-batch is gone
    (:func:`autopar.cost.step.memory.passing_bytes`): nothing is behind the last block, little behind the last of the group.
    """
    kept = np.minimum(last["held_bytes"], last["held_again_bytes"])
    of_last = is_last * last["lean_bytes"]
    alone = np.maximum(is_first * (first["lean_bytes"] - is_last * kept), of_last)
    return alone, np.maximum(group["passing_bytes"] - is_last * kept, of_last)


@lru_cache(maxsize=8192)
def forwards_done(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> NDArray[np.int64]:
    """Forwards that each pipeline rank has done when its first backward begins, by its virtual stages [pp, virtual_stages].

    None of their micro-batches is through, so that the rank holds all of them.
    """
    rank = np.arange(pp)[:, None]
    match schedule:
        case "none":
            return np.ones((pp, 1), dtype=np.int64)
        case "GPipe":
            return np.full((pp, 1), num_micro_batches)
        case "1F1B":
            return np.minimum(num_micro_batches, pp - rank)
    per_round = num_micro_batches // max(1, num_micro_batches // pp)
    warm = (virtual_stages - 1) * per_round + 2 * (pp - 1 - rank)
    cycles, rest = np.divmod(np.minimum(warm, virtual_stages * num_micro_batches - 1) + 1, per_round * virtual_stages)
    done: NDArray[np.int64] = cycles * per_round + np.clip(rest - np.arange(virtual_stages) * per_round, 0, per_round)
    return done


@lru_cache(maxsize=8192)
def least_and_most_done(
    schedule: str, pp: int, virtual_stages: int, num_micro_batches: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each pipeline rank the least and the most of :func:`forwards_done` over its virtual stages."""
    done = forwards_done(schedule, pp, virtual_stages, num_micro_batches)
    return tuple(done.min(axis=1).tolist()), tuple(done.max(axis=1).tolist())


class Counts(NamedTuple):
    """Micro-batches when each rank's first backward begins; all but ``left`` as the stage with the fewest has them.

    Attributes:
        held: of those that a stage holds.
        held_most: on the stage that holds the most.
        held_more: of all stages that have a block of the group for sure, what they hold over ``held``.
        held_over: likewise of all stages, each once.
        todo, todo_more, todo_over: likewise of forwards that are left.
        first, last: held on the rank's first and its last stage.
        left, all: forwards left, and micro-batches held, on all stages.
    """

    held: Array
    held_most: Array
    held_more: Array
    held_over: Array
    todo: Array
    todo_more: Array
    todo_over: Array
    first: Array
    last: Array
    left: Array
    all: Array


@lru_cache(maxsize=8192)
def counts_of(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int, others: int) -> Counts:
    """Of each rank; ``others``: blocks that may be all that a stage has, beside the first and the last one."""
    held = forwards_done(schedule, pp, virtual_stages, num_micro_batches).astype(np.float64)
    ends = np.zeros(pp)
    ends[0] += 1
    ends[-1] += 1
    sure = np.maximum(virtual_stages - others - ends, 0).astype(np.int64)

    def more(values: Array) -> tuple[Array, Array, Array]:
        least = values.min(axis=1)
        over = np.cumsum(np.sort(values - least[:, None], axis=1), axis=1)
        over = np.concatenate([np.zeros((pp, 1)), over], axis=1)
        return least, over[np.arange(pp), sure], over[:, -1]

    least, over, over_all = more(held)
    todo, todo_over, todo_all = more(num_micro_batches - held)
    both = held.sum(axis=1)
    left = num_micro_batches * virtual_stages - both
    return Counts(
        held=least,
        held_most=held.max(axis=1),
        held_more=over,
        held_over=over_all,
        todo=todo,
        todo_more=todo_over,
        todo_over=todo_all,
        first=held[:, 0],
        last=held[:, -1],
        left=left,
        all=both,
    )


@lru_cache(maxsize=8192)
def table_of_counts(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int, others: int) -> Array:
    """:func:`counts_of` as one table, a line for each of its fields."""
    return np.array(counts_of(schedule, pp, virtual_stages, num_micro_batches, others))

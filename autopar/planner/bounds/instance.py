"""A pipeline as the relaxations see it: floors of its blocks, sums of gradients, devices and schedule.

A *floor* is the least time and memory of a block. A relaxation reads nothing but a :class:`PipelineInstance`: its bound is a function of
that instance and of a goal, and holds for every plan whose blocks are at or above the floors.

Blocks also add sums of gradients once a step, besides FSDP's reductions:

- Gradients that FSDP does not sum are summed by all-reduces (:mod:`autopar.cost.step.gradient_buckets`). Which gradients of a rank share a
  bucket depends on its blocks. A collective of more bytes takes no less time, but less for each byte (its time is a minimum of lines with
  positive intercepts). So a rank's sums take no less than the chord from the bytes of the smallest block to those of all blocks: a time for
  each rank, and a rate for each byte.
- All-reduces that start during the last backward overlap it and slow it down by the device's interference. What a rank's backwards are
  too short to hide comes after them: at least the seconds of all-reduces less those of backwards, summed over its stages.
- Where the first and the last block of a pipeline read the same parameter, two ranks hold it and sum its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import CostModel, Step
from autopar.cost.step.data_parallel import itemsize
from autopar.cost.step.gradient_buckets import Summed, is_fsdps
from autopar.cost.step.pipeline_step import ties_s

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeFloor:
    """A block in one mode of recompute.

    Attributes:
        backward_s: the seconds of a micro-batch's backward, recompute included.
        kept_bytes: what a micro-batch keeps between its forward and its backward.
        passing_bytes: what the block's peak needs beyond the kept bytes.
    """

    backward_s: float
    kept_bytes: float
    passing_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFloor:
    """The least that a block adds to its rank.

    Attributes:
        forward_s: the seconds of a micro-batch's forward, whatever the block recomputes.
        modes: the modes of recompute that the block may have.
        more_s: by how much a forward and a backward together exceed ``forward_s`` and ``backward_s``; either may take the excess.
        gather_s: by how much the step's first forward is longer.
        once_s: seconds once a step, after the rank's last backward.
        static_bytes: parameters, gradients and optimizer states.
        stepped_bytes: the same and what an optimizer step has in passing, while no activations are held.
    """

    forward_s: float
    modes: tuple[ModeFloor, ...]
    more_s: float = 0.0
    gather_s: float = 0.0
    once_s: float = 0.0
    static_bytes: float = 0.0
    stepped_bytes: float = 0.0

    @property
    def least_s(self) -> float:
        """The least seconds of a micro-batch's forward and backward."""
        return self.forward_s + min(mode.backward_s for mode in self.modes) + self.more_s


FIELDS = 6
"""The columns of :attr:`FloorTable.numbers` before those of modes: forward_s, more_s, gather_s, once_s, static_bytes, stepped_bytes."""

FITS = 1 + 1e-9
"""The factor of a memory limit up to which bytes fit, so that rounding does not exclude an exact fit."""

MODES = 4
"""The number of modes in :attr:`FloorTable.numbers`, three columns each; a block with fewer repeats its last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorTable:
    """The floors of one model's kinds of blocks on one kind of device.

    Attributes:
        blocks: the floor of each kind.
        numbers: the same as an array [kinds, FIELDS + 3 * MODES].
    """

    blocks: tuple[BlockFloor, ...]
    numbers: Array = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        rows = []
        for block in self.blocks:
            modes = (*block.modes, *[block.modes[-1]] * MODES)[:MODES]
            row = [block.forward_s, block.more_s, block.gather_s, block.once_s, block.static_bytes, block.stepped_bytes]
            row += [x for mode in modes for x in (mode.backward_s, mode.kept_bytes, mode.passing_bytes)]
            rows.append(row)
        object.__setattr__(self, "numbers", np.array(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInstance:
    """One candidate in one layout, or with floors that hold for several layouts.

    Attributes:
        schedule, virtual_stages, num_micro_batches: of the pipeline.
        runs: the blocks of the model in order, as pairs of a kind and how many blocks of it follow each other.
        groups: kinds of blocks that count as one where a relaxation ignores the order of blocks.
        floors: the floors on each kind of device.
        device_of_rank: the kind of device of each pipeline rank.
        limit_bytes: the memory for tensors of each kind of device.
        forward_s, backward_s: the seconds of each stage for a micro-batch besides its blocks, by kind of device.
        first_s: by how much each stage's first forward is longer, whatever its blocks are.
        sends_s, sends_back_s: the least seconds of each pipeline rank's message to the next rank, and of the message back; the last rank's
            are with the first one.
        sends_more_s: by how much both messages of each pipeline rank are longer, by the kind of block that its stage ends with; empty: not
            at all.
        sent_bytes: what each stage but the last keeps of a micro-batch besides its blocks.
        read_bytes: likewise each stage but the first and the last, or the only one: inputs and prelude values that its blocks read.
        ranks_s: seconds once a step on each pipeline rank besides those of its blocks, after its last backward; empty: none.
        most_blocks: the most blocks of the largest group that a stage may have.
        ends: the least and the largest number of blocks up to the end of each stage, by pins; empty without pins.
    """

    schedule: str
    virtual_stages: int
    num_micro_batches: int
    runs: tuple[tuple[int, int], ...]
    groups: tuple[tuple[int, ...], ...]
    floors: tuple[FloorTable, ...]
    device_of_rank: tuple[int, ...]
    limit_bytes: tuple[float, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    first_s: float = 0.0
    sends_s: tuple[float, ...] = ()
    sends_back_s: tuple[float, ...] = ()
    sends_more_s: tuple[tuple[tuple[float, float], ...], ...] = ()
    sent_bytes: float = 0.0
    read_bytes: float = 0.0
    ranks_s: tuple[float, ...] = ()
    most_blocks: float = np.inf
    ends: tuple[tuple[int, int], ...] = ()

    @property
    def pp(self) -> int:
        """The number of pipeline ranks."""
        return len(self.device_of_rank)

    @property
    def kind_of_block(self) -> NDArray[np.int64]:
        """The kind of each block in order."""
        return np.repeat([kind for kind, _ in self.runs], [count for _, count in self.runs])

    def given_stops(self) -> tuple[int, ...]:
        """Return where each stage ends if there is no choice, else an empty tuple.

        There is none where pins fix all stages, where there are as many stages as blocks, and where the blocks of the only group are
        consecutive and fill every stage with as many of them as it may have.
        """
        stages, kinds = self.pp * self.virtual_stages, self.kind_of_block
        if self.ends and all(least == most for least, most in self.ends):
            return tuple(most for _, most in self.ends)
        if len(kinds) == stages:
            return tuple(range(1, stages + 1))
        blocks = (
            np.flatnonzero(np.isin(kinds, self.groups[0])) if len(self.groups) == 1 else np.array([], dtype=np.int64)
        )
        if len(blocks) != stages * self.most_blocks or blocks[-1] - blocks[0] >= len(blocks):
            return ()
        ends = blocks[0] + np.arange(1, stages) * int(self.most_blocks)
        return (*ends.tolist(), len(kinds))

    def holds_in_order(self) -> bool:
        """Return whether one rank without a pipeline can hold its blocks at the peak of each.

        At the peak of a block, the blocks before it still keep what their backward needs. So the most memory is left if each block takes
        the leanest mode whose own peak fits.
        """
        blocks, kept = self.floors[0].blocks, 0.0
        static = self.read_bytes + sum(count * blocks[kind].static_bytes for kind, count in self.runs)
        room = self.limit_bytes[0] * FITS - static
        for kind in self.kind_of_block:
            modes = [m.kept_bytes for m in blocks[kind].modes if kept + m.kept_bytes + m.passing_bytes <= room]
            if not modes:
                return False
            kept += min(modes)
        return True


@lru_cache(maxsize=8192)
def forwards_done(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> NDArray[np.int64]:
    """Return the forwards of each virtual stage before its pipeline rank's first backward [pp, virtual_stages].

    The rank holds all of these micro-batches, as none has had its backward.
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


def runs_of(kinds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the runs of equal kinds in a sequence.

    >>> runs_of([0, 1, 1, 2])
    ((0, 1), (1, 2), (2, 1))
    """
    return tuple((kind, len([*run])) for kind, run in groupby(kinds))


Sums = Counter[tuple[str, ...]]
"""Bytes of gradients by the axes over which they are summed."""


def least_sums_s(
    model: CostModel, costs: Sequence[BlockCost], counts: Sequence[int], step: Step, *, others: bool
) -> tuple[list[float], float]:
    """Return the least that sums of gradients add to a step of a rank with consecutive blocks, once: for each block, and for the rank.

    The values of a rank's blocks may be added up. A single value can be negative, where a block's backward hides sums of other blocks.

    Args:
        costs: the blocks of the compact graph, without parameters of earlier blocks.
        counts: how many blocks each of them stands for.
        others: whether a rank may have blocks that are not added up. Their backwards may hide sums, so that exposed ones do not count then.
    """
    summed, size = model.of(step).summed, itemsize(model.precision.storage)
    overlap, late = ([_bytes(cost, summed, size, late=is_late) for cost in costs] for is_late in (False, True))
    (overlap_s, rank_s), (late_s, late_rank_s) = (_seconds(model, sums, counts, step) for sums in (overlap, late))
    if not any(overlap_s):
        return late_s, late_rank_s
    interference = model.device.interference
    backward_s = [cost.backward_s + cost.communication_backward_s + cost.recompute_s("full") for cost in costs]
    bare_s = [sent - back for sent, back in zip(overlap_s, backward_s, strict=True)]
    counts_bare = not others and sum(n * s for n, s in zip(counts, bare_s, strict=True)) > 0
    share = (1 - interference) * counts_bare
    blocks_s = [
        after + interference * sent + share * bare for after, sent, bare in zip(late_s, overlap_s, bare_s, strict=True)
    ]
    return blocks_s, late_rank_s + (interference + share) * rank_s


def _bytes(cost: BlockCost, summed: Summed, size: int, *, late: bool) -> Sums:
    """Return the bytes of a block's all-reduces during the last backward, or (``late``) of those after it."""
    sums: Sums = Counter()
    for p, axes in summed.of(cost.parameters, late=late):
        sums[axes] += (p.shard_numel(summed.mesh.dp_shard) if late else p.numel) * size
    return sums


def _seconds(model: CostModel, sums: Sequence[Sums], counts: Sequence[int], step: Step) -> tuple[list[float], float]:
    """Return the seconds of each block's bytes, and those that each rank takes besides.

    A collective that is measured in pieces may take less for more bytes, from piece to piece. So there only a rate is known, the least one,
    which is that of all bytes or that at the end of a piece.
    """
    seconds, rank_s, ends = [0.0] * len(sums), 0.0, model.collectives.ends("all_reduce")
    for axes in sorted({axes for part in sums for axes, size in part.items() if size}):
        sizes = [part[axes] for part in sums]
        total = sum(size * n for size, n in zip(sizes, counts, strict=True))
        least = 0 if ends else min(sizes)
        sizes_s = {n: model.of(step).sum_s(axes, n, copied_bytes=0) for n in {total, *(n for n in ends if n < total)}}
        least_s = model.of(step).sum_s(axes, least, copied_bytes=0) if least else 0.0
        rate = min((sec - least_s) / (n - least) for n, sec in sizes_s.items() if n > least) if total > least else 0.0
        rank_s += least_s - rate * least
        seconds = [sec + rate * size for sec, size in zip(seconds, sizes, strict=True)]
    return seconds, rank_s


def at_both_ends(costs: Sequence[BlockCost]) -> tuple[ParameterCost, ...]:
    """Return the parameters that both the first and the last block read: two ranks of a pipeline or more hold them."""
    names = [{p.name for p in cost.parameters if p.shared} for cost in (costs[0], costs[-1])]
    return tuple(p for p in costs[-1].parameters if p.name in names[0] & names[1])


def are_inside(costs: Sequence[BlockCost], shared: Sequence[ParameterCost]) -> bool:
    """Return whether inner blocks read some of these parameters too: then other ranks may hold them besides the first and the last."""
    names = {p.name for p in shared}
    return any(p.name in names for cost in costs[1:-1] for p in cost.parameters if p.shared)


def tie_s(model: CostModel, shared: Sequence[ParameterCost], step: Step, *, inside: bool) -> float:
    """Return the least seconds in which the first or the last rank sums the gradients of :func:`at_both_ends`.

    The sum is over two ranks, over all ranks, or over some, which takes as long as over two. One sum of all bytes takes no longer than
    several of parts.
    """
    data, size, pp = model.of(step).data, itemsize(model.precision.storage), step.mesh.pp
    shards = [step.mesh.dp_shard if is_fsdps(p, data.uses_fsdp) else 1 for p in shared]
    num_bytes = sum(p.shard_numel(n) * size for p, n in zip(shared, shards, strict=True) if p.trained)
    groups = [(0, pp - 1), tuple(range(pp))][: 1 + inside]
    return min(ties_s(model.collectives, {ranks: num_bytes}, step, 0) for ranks in groups) if num_bytes else 0.0

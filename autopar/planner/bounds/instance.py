"""A pipeline as the relaxations see it: floors of its blocks, their sums of gradients, its devices, its schedule.

A *floor* is what a block takes and holds at the least. A relaxation reads nothing but a :class:`PipelineInstance`: what it finds is a
function of that instance and of a goal, and a bound of every plan whose blocks are above the floors.

Of what blocks add to a step once beside their optimizer step and FSDP's reductions:

- Gradients that FSDP does not sum are summed by all-reduces (:mod:`autopar.cost.step.gradient_buckets`). How a rank's gradients fall into
  them depends on its blocks. A collective of more bytes takes no less, and less for each byte (the least of straight lines
  that begin above zero): no byte of a rank takes less than one of all blocks' bytes together.
- All-reduces that leave during the last backward run beside it, which they slow by the device's interference. What the
  backwards of a rank are too short to hide stands after them: seconds of all-reduces less those of backwards, over its
  stages at least their difference.
- Where the first and the last block of a pipeline read the same parameter, two ranks have it whole, and sum its gradient.
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
    """A block in one mode of what it keeps and recomputes.

    Attributes:
        backward_s: of one micro-batch, recompute included.
        kept_bytes: of one micro-batch between its forward and its backward.
        passing_bytes: at the block's peak inside, over what it keeps.
    """

    backward_s: float
    kept_bytes: float
    passing_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFloor:
    """The least that a block adds to its rank.

    Attributes:
        forward_s: of one micro-batch, whatever it recomputes.
        modes: what it may keep and recompute.
        more_s: what a forward and a backward take together over both of them alone, at the least: it may fall on either.
        gather_s: what the step's first forward takes longer.
        once_s: once a step, after the rank's last backward.
        static_bytes: parameters, gradients and optimizer states.
        stepped_bytes: these and what an optimizer step has in passing, when no micro-batch keeps anything.
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
        """Forward and backward of one micro-batch."""
        return self.forward_s + min(mode.backward_s for mode in self.modes) + self.more_s


FIELDS = 6
"""Columns of :attr:`FloorTable.numbers` before those of modes: forward_s, more_s, gather_s, once_s, static_bytes, stepped_bytes."""

FITS = 1 + 1e-9
"""Times a limit of memory, up to which what is exactly as large fits."""

MODES = 4
"""Modes of :attr:`FloorTable.numbers`, three columns each; a block with fewer has its last one again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FloorTable:
    """The floors of the kinds of blocks of one model on one kind of device.

    ``numbers``: the same as an array [kinds, FIELDS + 3 * MODES].
    """

    blocks: tuple[BlockFloor, ...]
    numbers: Array = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        rows = []
        for own in self.blocks:
            modes = (*own.modes, *[own.modes[-1]] * MODES)[:MODES]
            row = [own.forward_s, own.more_s, own.gather_s, own.once_s, own.static_bytes, own.stepped_bytes]
            row += [x for mode in modes for x in (mode.backward_s, mode.kept_bytes, mode.passing_bytes)]
            rows.append(row)
        object.__setattr__(self, "numbers", np.array(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineInstance:
    """One candidate in one layout, or below several.

    Attributes:
        schedule, virtual_stages, num_micro_batches: of the pipeline.
        runs: the blocks of the model in order: kind of block, and how many of it follow each other.
        groups: kinds of blocks that count as one where the order of blocks is left out.
        floors: by kind of device.
        device_of_rank: the kind of device of each pipeline rank.
        limit_bytes: for tensors, by kind of device.
        forward_s, backward_s: by kind of device what each stage takes beside its blocks for each micro-batch.
        first_s: of each stage what its first forward takes longer whatever its blocks.
        sends_s, sends_back_s: of each pipeline rank its message to the next one and the one back, at the least; of the last one with the first.
        sends_more_s: of each pipeline rank, by the kind of block that its stage ends with, what both messages take longer; empty: nothing.
        sent_bytes: what each stage but the last keeps of a micro-batch beside its blocks.
        read_bytes: likewise each stage but the first and the last, or the only one: inputs and prelude values that its blocks read.
        tie_s: once a step, on the first rank and on the last one: gradients of parameters that both have.
        most_blocks: of the largest group that a stage may have.
        ends: between which numbers of blocks each stage ends, as pins say it; nothing where they say nothing.
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
    tie_s: float = 0.0
    most_blocks: float = np.inf
    ends: tuple[tuple[int, int], ...] = ()

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.device_of_rank)

    @property
    def kind_of_block(self) -> NDArray[np.int64]:
        """Of each block in order."""
        return np.repeat([kind for kind, _ in self.runs], [count for _, count in self.runs])

    def given_stops(self) -> tuple[int, ...]:
        """Where each stage ends, if that is no choice; else nothing.

        It is none where pins say it, where there are as many stages as blocks, and where the only group of equal blocks, which stand next
        to each other, fills every stage with as many of them as it may have.
        """
        stages, kinds = self.pp * self.virtual_stages, self.kind_of_block
        if self.ends and all(least == most for least, most in self.ends):
            return tuple(most for _, most in self.ends)
        if len(kinds) == stages:
            return tuple(range(1, stages + 1))
        places = (
            np.flatnonzero(np.isin(kinds, self.groups[0])) if len(self.groups) == 1 else np.array([], dtype=np.int64)
        )
        if len(places) != stages * self.most_blocks or places[-1] - places[0] >= len(places):
            return ()
        ends = places[0] + np.arange(1, stages) * int(self.most_blocks)
        return (*ends.tolist(), len(kinds))

    def holds_in_order(self) -> bool:
        """Whether one rank without a pipeline can hold its blocks at the peak of each.

        At the peak of a block those before it still keep what their backward needs. The less they keep the more is left, so that
        each takes the leanest of the modes that it has room for.
        """
        blocks, kept = self.floors[0].blocks, 0.0
        held = self.read_bytes + sum(count * blocks[kind].static_bytes for kind, count in self.runs)
        room = self.limit_bytes[0] * FITS - held
        for kind in self.kind_of_block:
            modes = [m.kept_bytes for m in blocks[kind].modes if kept + m.kept_bytes + m.passing_bytes <= room]
            if not modes:
                return False
            kept += min(modes)
        return True


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


def runs_of(kinds: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The runs of equal kinds in a sequence.

    >>> runs_of([0, 1, 1, 2])
    ((0, 1), (1, 2), (2, 1))
    """
    return tuple((kind, len([*own])) for kind, own in groupby(kinds))


Sums = Counter[tuple[str, ...]]
"""Bytes of gradients by the axes over which they are summed."""


def least_sums_s(
    model: CostModel, costs: Sequence[BlockCost], counts: Sequence[int], step: Step, *, others: bool
) -> list[float]:
    """For each block the least that the sums of its gradients add to a step of a rank with consecutive blocks, once.

    Those of a rank's blocks may be added up; single ones can be negative, where a block's backward hides what others leave.

    Args:
        costs: of the blocks of the compact graph, parameters that earlier ones have left out.
        counts: blocks that each of them stands for.
        others: some blocks may be on a rank without being counted.
    """
    if model.collectives.is_measured:  # a table of times need not be of straight lines
        return [0.0] * len(costs)
    summed, size = model.of(step).summed, itemsize(model.precision.storage)
    beside, late = ([_bytes(cost, summed, size, late=is_late) for cost in costs] for is_late in (False, True))
    beside_s, late_s = (_seconds(model, sums, counts, step) for sums in (beside, late))
    if not any(beside_s):
        return late_s
    interference = model.device.interference
    hiding = [cost.backward_s + cost.communication_backward_s + cost.recompute_s("full") for cost in costs]
    left_s = [(1 - interference) * (sent - back) for sent, back in zip(beside_s, hiding, strict=True)]
    if others or sum(n * s for n, s in zip(counts, left_s, strict=True)) <= 0:
        left_s = [0.0] * len(costs)
    return [after + interference * sent + left for after, sent, left in zip(late_s, beside_s, left_s, strict=True)]


def _bytes(cost: BlockCost, summed: Summed, size: int, *, late: bool) -> Sums:
    """Of a block's all-reduces beside the last backward, or of those after it."""
    found: Sums = Counter()
    for p, axes in summed.of(cost.parameters, late=late):
        found[axes] += (p.shard_numel(summed.mesh.dp_shard) if late else p.numel) * size
    return found


def _seconds(model: CostModel, sums: Sequence[Sums], counts: Sequence[int], step: Step) -> list[float]:
    """Of each block's bytes, each as one of those of all blocks together."""
    total: Sums = Counter()
    for own, n in zip(sums, counts, strict=True):
        for axes, size in own.items():
            total[axes] += n * size
    rate = {axes: model.of(step).sum_s(axes, size, copied_bytes=0) / size for axes, size in total.items() if size}
    return [sum(size * rate[axes] for axes, size in own.items() if size) for own in sums]


def at_both_ends(costs: Sequence[BlockCost]) -> tuple[ParameterCost, ...]:
    """Parameters that the first and the last block read, whether others do or not: in a pipeline two ranks have them at least."""
    names = [{p.name for p in cost.parameters if p.shared} for cost in (costs[0], costs[-1])]
    return tuple(p for p in costs[-1].parameters if p.name in names[0] & names[1])


def are_inside(costs: Sequence[BlockCost], shared: Sequence[ParameterCost]) -> bool:
    """Whether blocks between the first and the last one read some of these too: then any ranks may have them beside the two."""
    names = {p.name for p in shared}
    return any(p.name in names for cost in costs[1:-1] for p in cost.parameters if p.shared)


def tie_s(model: CostModel, shared: Sequence[ParameterCost], step: Step, *, inside: bool) -> float:
    """Summing the gradients of :func:`at_both_ends`, on either of the two ranks, at the least.

    Two ranks sum them, or all do, or some do as two would: of each way a sum of all bytes takes no longer than several of its parts.
    """
    data, size, pp = model.of(step).data, itemsize(model.precision.storage), step.mesh.pp
    shards = [step.mesh.dp_shard if is_fsdps(p, data.uses_fsdp) else 1 for p in shared]
    num_bytes = sum(p.shard_numel(n) * size for p, n in zip(shared, shards, strict=True) if p.trained)
    ways = [(0, pp - 1), tuple(range(pp))][: 1 + inside]
    return min(ties_s(model.collectives, {ranks: num_bytes}, step, 0) for ranks in ways) if num_bytes else 0.0

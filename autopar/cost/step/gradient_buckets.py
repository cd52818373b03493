"""Sums of gradients that FSDP does not do: which all-reduces the runtime runs, and when they can start.

Source: ``runtime/gradients.py`` and ``runtime/assemble.py``. A parameter that FSDP does not hold (without ZeRO and mixed
precision all of them, else scalars and experts over data ranks) is summed over the data axes and over those on which its
gradient is pending, in buckets that leave as soon as the last micro-batch's gradients of their members are there. What
FSDP holds is summed over pending axes after the last backward, all of one set of axes at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.step.data_parallel import DataParallel
from autopar.cost.step.data_parallel import itemsize as itemsize_of
from autopar.cost.step.step import StageCost, own_times
from autopar.plan.mesh import DATA_AXES, MESH_AXES, Mesh
from autopar.plan.plan import BUCKET_BYTES

SCALAR_BYTES = 4
"""Of a loss, a norm or a flag, which the runtime sums in fp32."""

Sum: TypeAlias = tuple[ParameterCost, tuple[str, ...]]
"""A parameter, and the axes over which its gradient is summed."""


SumSeconds: TypeAlias = Callable[[tuple[str, ...], int, int], float]
"""Seconds of one all-reduce of gradients, of axes and bytes, of which some bytes are copied into its buffer and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One all-reduce of gradients.

    Attributes:
        axes: whose ranks sum.
        num_bytes: of the gradients, local.
        stage, block: of the member whose gradient comes last: the turn of the rank's stage, and the block in it.
        num_members: parameters; the gradients of several are copied side by side, one alone is summed where it is.
    """

    axes: tuple[str, ...]
    num_bytes: int
    stage: int
    block: int
    num_members: int

    @property
    def copied_bytes(self) -> int:
        """Of the buffer that holds the gradients beside those that backward left."""
        return self.num_bytes if self.num_members > 1 else 0


def stage_parameters(
    blocks: Sequence[BlockCost],
) -> tuple[tuple[tuple[ParameterCost, ...], ...], tuple[ParameterCost, ...]]:
    """For each block of a stage the parameters that it alone reads, and those that several of its blocks read.

    Equal blocks may be one object here, so that names tell parameters apart only where they are shared.
    """
    shared = [block.shared_names for block in blocks]
    readers = Counter(name for names in shared for name in names)
    alone = tuple(
        tuple(p for p in block.parameters if not p.shared or readers[p.name] == 1) if names else block.parameters
        for block, names in zip(blocks, shared, strict=True)
    )
    several = {
        p.name: p
        for block, names in zip(blocks, shared, strict=True)
        if names
        for p in block.parameters
        if p.shared and readers[p.name] > 1
    }
    return alone, tuple(several.values())


def is_fsdps(parameter: ParameterCost, uses_fsdp: bool) -> bool:
    """Whether FSDP holds it: no experts over data ranks, and no scalars, which it does not take."""
    return uses_fsdp and not parameter.spread and bool(parameter.shape)


def sum_axes(parameter: ParameterCost, mesh: Mesh, uses_fsdp: bool) -> tuple[str, ...]:
    """The axes of more than one rank over which the gradient that backward leaves is summed."""
    pending = parameter.gradient_sum_axes
    if parameter.spread:  # the ranks of ep_data hold other experts
        wanted = ("ep_outer", *(axis for axis in pending if axis in MESH_AXES))
    else:
        data = () if is_fsdps(parameter, uses_fsdp) else ("dp_replicate", "dp_shard")
        wanted = tuple(axis for axis in MESH_AXES if axis in (*data, *pending))
    return tuple(axis for axis in wanted if mesh.size((axis,)) > 1)


def buckets(
    stages: Sequence[Sequence[BlockCost]], summed: Summed, itemsize: int, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """The all-reduces beside backward, of one rank.

    Args:
        stages: the blocks of each of the rank's stages, in order of the model.
        summed: of the data axes.
        itemsize: of a gradient's element.
        bucket_bytes: from which on a bucket is not filled further.
    """
    done: list[Bucket] = []
    filling: dict[tuple[str, ...], Bucket] = {}
    for stage, block, parameter, axes in reversed(list(_in_order(stages, summed, late=False))):
        before = filling.get(axes)
        last = (stage, block) if before is None else min((before.stage, before.block), (stage, block))
        size = parameter.numel * itemsize + (before.num_bytes if before is not None else 0)
        members = 1 + (before.num_members if before is not None else 0)
        filling[axes] = Bucket(axes=axes, num_bytes=size, stage=last[0], block=last[1], num_members=members)
        if size >= bucket_bytes:
            done.append(filling.pop(axes))
    return (*done, *filling.values())


def late_sums(stages: Sequence[Sequence[BlockCost]], summed: Summed, itemsize: int) -> dict[tuple[str, ...], int]:
    """Bytes that are summed over each set of axes after the last backward: gradients' shards of what FSDP holds."""
    found: dict[tuple[str, ...], int] = {}
    shards = summed.mesh.dp_shard
    for _, _, parameter, axes in _in_order(stages, summed, late=True):
        found[axes] = found.get(axes, 0) + parameter.shard_numel(shards) * itemsize
    return found


class Summed:
    """Which parameters are summed over which axes; worked out once for the parameters of each block, as blocks repeat.

    Args:
        mesh: its data axes, and those on which gradients are pending.
        uses_fsdp: see :attr:`DataParallel.uses_fsdp`.
    """

    def __init__(self, mesh: Mesh, uses_fsdp: bool) -> None:
        self.mesh, self.uses_fsdp = mesh, uses_fsdp
        self._known: dict[tuple[tuple[ParameterCost, ...], bool], list[Sum]] = {}

    def of(self, parameters: tuple[ParameterCost, ...], *, late: bool) -> list[Sum]:
        """Those that FSDP does not hold, with their axes, which are summed in buckets; ``late``: those that it holds."""
        key = parameters, late
        if key not in self._known:
            some = [p for p in parameters if p.trained and is_fsdps(p, self.uses_fsdp) == late]
            self._known[key] = [(p, axes) for p in some if (axes := sum_axes(p, self.mesh, self.uses_fsdp))]
        return self._known[key]


def _in_order(
    stages: Sequence[Sequence[BlockCost]], summed: Summed, *, late: bool
) -> Iterator[tuple[int, int, ParameterCost, tuple[str, ...]]]:
    """Wanted parameters in the order in which the runtime holds them; shared ones when their first reader is done."""
    for turn, blocks in enumerate(stages):
        own, shared = stage_parameters(blocks)
        for i, parameters in enumerate(own):
            for p, axes in summed.of(parameters, late=late):
                yield turn, i, p, axes
        for p, axes in summed.of(shared, late=late) if shared else ():
            yield turn, next(i for i, block in enumerate(blocks) if p.name in block.shared_names), p, axes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSums:
    """Sums of the gradients of one rank that FSDP does not do, whatever its blocks recompute.

    Attributes:
        buckets: beside backward.
        late: after it, bytes by axes.
    """

    buckets: tuple[Bucket, ...]
    late: dict[tuple[str, ...], int]

    @property
    def copied_bytes(self) -> int:
        """Gradients that lie in buckets beside themselves, all of them when the last ones are on their way."""
        return sum(bucket.copied_bytes for bucket in self.buckets)


def exposed_sums_s(
    own: Sequence[StageCost], sums: RankSums, *, sum_s: SumSeconds, late_share: float, interference: float
) -> dict[str, float]:
    """Exposed sums of gradients that FSDP does not do, on a pipeline rank with the stages ``own``.

    Args:
        sums: of their blocks.
        sum_s: seconds of one all-reduce.
        late_share: seconds that the rank waits for each second of what is left when its last backward ends.
        interference: what the rest slows the computation beside it by.

    Returns:
        Seconds by the part of the step that they belong to: "data", "tp" or "cp".
    """
    seconds = {"data": 0.0, "tp": 0.0, "cp": 0.0}
    leaving: dict[int, list[Bucket]] = {}
    for bucket in sums.buckets:
        leaving.setdefault(bucket.stage, []).append(bucket)
    for turn, some in leaving.items():
        stage = own[turn]
        times = [own_times(b, mode)[1] for b, mode in zip(stage.blocks, stage.recompute, strict=True)]
        costs = [sum_s(b.axes, b.num_bytes, b.copied_bytes) for b in some]
        total = sum(costs)
        after = beside_backward([(b.block, s) for b, s in zip(some, costs, strict=True)], times)
        rest = late_share * after + interference * (total - after)
        for bucket, cost in zip(some, costs, strict=True):
            seconds[_owner(bucket.axes)] += rest * cost / total if total else 0.0
    for axes, num_bytes in sums.late.items():
        seconds[_owner(axes)] += sum_s(axes, num_bytes, num_bytes)
    return seconds


def _owner(axes: tuple[str, ...]) -> str:
    """Which part of the breakdown a sum of gradients belongs to."""
    if any(axis in ("dp_replicate", "dp_shard", "ep_outer") for axis in axes):
        return "data"
    return "cp" if "cp" in axes else "tp"


def beside_backward(leaving: Sequence[tuple[int, float]], times: Sequence[float]) -> float:
    """Seconds of reductions that are left when the backward of a stage ends.

    Args:
        leaving: for each reduction the block after whose backward it can start, and how long it takes; in the order
            in which they run, one after the other.
        times: of each block's backward, in order of the model.
    """
    end = sum(times)
    free = 0.0
    for block, time_s in leaving:
        free = max(free, sum(times[block:])) + time_s
    return max(free - end, 0.0)


def tied(stages: Sequence[Sequence[BlockCost]], data: DataParallel) -> dict[tuple[int, ...], int]:
    """Bytes of the gradients that pipeline ranks with the same parameters sum, by the ranks.

    Args:
        stages: the blocks of each stage, in order of the model.
    """
    pp = data.mesh.pp
    holders: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for s, stage in enumerate(stages):
        for block, _ in groupby(stage):
            for p in block.parameters:
                if p.shared and p.trained:
                    holders.setdefault(p.name, set()).add(s % pp)
                    shards = data.mesh.dp_shard if is_fsdps(p, data.uses_fsdp) else 1
                    sizes[p.name] = p.shard_numel(shards) * itemsize_of(data.precision.storage)
    found: dict[tuple[int, ...], int] = {}
    for name, ranks in holders.items():
        if len(ranks) > 1:
            found[tuple(sorted(ranks))] = found.get(tuple(sorted(ranks)), 0) + sizes[name]
    return found


def scalars(data: DataParallel, totals: Sequence[int], *, clips: bool) -> list[tuple[tuple[str, ...], int]]:
    """What a step sums besides gradients: counts of the batch before it, the loss after it, the norm where asked for.

    With a scaled loss all ranks tell each other besides whether their gradients are finite.

    Args:
        totals: bytes of each count of the global batch that the loss divides by.

    Returns:
        Axes of more than one rank, and bytes, of each all-reduce.
    """
    found: list[tuple[tuple[str, ...], int]] = [(DATA_AXES, num_bytes) for num_bytes in totals]
    found += [(("pp", *DATA_AXES), SCALAR_BYTES)]
    found += [(MESH_AXES, SCALAR_BYTES)] * (clips + data.precision.scales_loss)
    return [(tuple(axis for axis in axes if data.mesh.size((axis,)) > 1), num_bytes) for axes, num_bytes in found]

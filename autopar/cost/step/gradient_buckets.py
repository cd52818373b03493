"""Sums of gradients that FSDP does not do: which all-reduces the runtime runs, and when they can start.

Source: ``runtime/step/gradients.py`` and ``runtime/assemble.py``. A parameter that FSDP does not hold (all of them without ZeRO and mixed
precision, else scalars and experts over data ranks) is summed over the data axes and over the axes on which its gradient is pending. It is
in a bucket that starts as soon as the last micro-batch's gradients of its members exist. What FSDP holds is summed over pending axes after
the last backward, all of one set of axes together.
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
"""The bytes of a loss, a norm or a flag, which the runtime sums in fp32."""

Sum: TypeAlias = tuple[ParameterCost, tuple[str, ...]]
"""A parameter, and the axes over which its gradient is summed."""


SumSeconds: TypeAlias = Callable[[tuple[str, ...], int, int], float]
"""The seconds of one all-reduce of gradients by its axes, its bytes, and the bytes that are copied into its buffer and back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One all-reduce of gradients.

    Attributes:
        axes: the axes whose ranks sum.
        num_bytes: the local bytes of the gradients.
        stage, block: the member whose gradient comes last: the index of its stage on the rank, and its block in that stage.
        num_members: the number of parameters; the gradients of several are copied into a buffer, a single one is summed in place.
    """

    axes: tuple[str, ...]
    num_bytes: int
    stage: int
    block: int
    num_members: int

    @property
    def copied_bytes(self) -> int:
        """The bytes of the buffer that holds copies of the gradients."""
        return self.num_bytes if self.num_members > 1 else 0


def stage_parameters(
    blocks: Sequence[BlockCost],
) -> tuple[tuple[tuple[ParameterCost, ...], ...], tuple[ParameterCost, ...]]:
    """Return for each block of a stage the parameters that it alone reads, and those that several of its blocks read.

    Equal blocks may be the same object, so that names identify parameters only where they are shared.
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
    """Return whether FSDP holds the parameter: not those of experts over data ranks, and no scalars, which it does not support."""
    return uses_fsdp and not parameter.spread and bool(parameter.shape)


def sum_axes(parameter: ParameterCost, mesh: Mesh, uses_fsdp: bool) -> tuple[str, ...]:
    """Return the axes of more than one rank over which the gradient that backward leaves is summed."""
    pending = parameter.gradient_sum_axes
    if parameter.spread:  # the ranks of ep_data hold different experts
        wanted = ("ep_outer", *(axis for axis in pending if axis in MESH_AXES))
    else:
        data = () if is_fsdps(parameter, uses_fsdp) else ("dp_replicate", "dp_shard")
        wanted = tuple(axis for axis in MESH_AXES if axis in (*data, *pending))
    return tuple(axis for axis in wanted if mesh.size((axis,)) > 1)


def buckets(
    stages: Sequence[Sequence[BlockCost]], summed: Summed, itemsize: int, bucket_bytes: int = BUCKET_BYTES
) -> tuple[Bucket, ...]:
    """Return the all-reduces of one rank during its backward.

    Args:
        stages: the blocks of each of the rank's stages, in the order of the model.
        summed: which parameters are summed over which axes.
        itemsize: the bytes of a gradient's element.
        bucket_bytes: the size at which a bucket is full.
    """
    full: list[Bucket] = []
    filling: dict[tuple[str, ...], Bucket] = {}
    for stage, block, parameter, axes in reversed(list(_in_order(stages, summed, late=False))):
        bucket = filling.get(axes)
        position = (stage, block) if bucket is None else min((bucket.stage, bucket.block), (stage, block))
        size = parameter.numel * itemsize + (bucket.num_bytes if bucket is not None else 0)
        members = 1 + (bucket.num_members if bucket is not None else 0)
        filling[axes] = Bucket(axes=axes, num_bytes=size, stage=position[0], block=position[1], num_members=members)
        if size >= bucket_bytes:
            full.append(filling.pop(axes))
    return (*full, *filling.values())


def late_sums(stages: Sequence[Sequence[BlockCost]], summed: Summed, itemsize: int) -> dict[tuple[str, ...], int]:
    """Return the bytes that are summed over each set of axes after the last backward: gradient shards of what FSDP holds."""
    num_bytes: dict[tuple[str, ...], int] = {}
    shards = summed.mesh.dp_shard
    for _, _, parameter, axes in _in_order(stages, summed, late=True):
        num_bytes[axes] = num_bytes.get(axes, 0) + parameter.shard_numel(shards) * itemsize
    return num_bytes


class Summed:
    """Computes which parameters are summed over which axes; cached by the parameters of a block, as blocks repeat.

    Args:
        mesh: the mesh with its data axes, and those on which gradients are pending.
        uses_fsdp: see :attr:`DataParallel.uses_fsdp`.
    """

    def __init__(self, mesh: Mesh, uses_fsdp: bool) -> None:
        self.mesh, self.uses_fsdp = mesh, uses_fsdp
        self._known: dict[tuple[tuple[ParameterCost, ...], bool], list[Sum]] = {}

    def of(self, parameters: tuple[ParameterCost, ...], *, late: bool) -> list[Sum]:
        """Return the parameters that are summed in buckets, which FSDP does not hold, with their axes; ``late``: those that it holds."""
        key = parameters, late
        if key not in self._known:
            held = [p for p in parameters if p.trained and is_fsdps(p, self.uses_fsdp) == late]
            self._known[key] = [(p, axes) for p in held if (axes := sum_axes(p, self.mesh, self.uses_fsdp))]
        return self._known[key]


def _in_order(
    stages: Sequence[Sequence[BlockCost]], summed: Summed, *, late: bool
) -> Iterator[tuple[int, int, ParameterCost, tuple[str, ...]]]:
    """Yield summed parameters in the order in which the runtime holds them; shared ones come with their first reader."""
    for index, blocks in enumerate(stages):
        alone, shared = stage_parameters(blocks)
        for i, parameters in enumerate(alone):
            for p, axes in summed.of(parameters, late=late):
                yield index, i, p, axes
        for p, axes in summed.of(shared, late=late) if shared else ():
            yield index, next(i for i, block in enumerate(blocks) if p.name in block.shared_names), p, axes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSums:
    """The sums of one rank's gradients that FSDP does not do; they do not depend on recompute.

    Attributes:
        buckets: those during backward.
        late: those after it, in bytes by axes.
    """

    buckets: tuple[Bucket, ...]
    late: dict[tuple[str, ...], int]

    @property
    def copied_bytes(self) -> int:
        """The bytes of gradients copied into buckets, all of which exist while the last sums run."""
        return sum(bucket.copied_bytes for bucket in self.buckets)


def exposed_sums_s(
    stages: Sequence[StageCost], sums: RankSums, *, sum_s: SumSeconds, late_share: float, interference: float
) -> dict[str, float]:
    """Return the exposed seconds of sums that FSDP does not do, on a pipeline rank with these stages.

    Args:
        stages: the stages of the rank, in the order of the model.
        sums: the sums of their blocks.
        sum_s: the seconds of one all-reduce.
        late_share: the fraction that the rank waits of what is left when its last backward ends.
        interference: the fraction by which hidden sums slow down the computation that they overlap.

    Returns:
        Seconds by the part of the step that they belong to: "data", "tp" or "cp".
    """
    seconds = {"data": 0.0, "tp": 0.0, "cp": 0.0}
    by_stage: dict[int, list[Bucket]] = {}
    for bucket in sums.buckets:
        by_stage.setdefault(bucket.stage, []).append(bucket)
    for index, group in by_stage.items():
        stage = stages[index]
        times = [own_times(b, mode)[1] for b, mode in zip(stage.blocks, stage.recompute, strict=True)]
        costs = [sum_s(b.axes, b.num_bytes, b.copied_bytes) for b in group]
        total = sum(costs)
        late_s = left_after_backward_s([(b.block, s) for b, s in zip(group, costs, strict=True)], times)
        exposed_s = late_share * late_s + interference * (total - late_s)
        for bucket, cost in zip(group, costs, strict=True):
            seconds[_owner(bucket.axes)] += exposed_s * cost / total if total else 0.0
    for axes, num_bytes in sums.late.items():
        seconds[_owner(axes)] += sum_s(axes, num_bytes, num_bytes)
    return seconds


def _owner(axes: tuple[str, ...]) -> str:
    """Return the part of the breakdown that a sum of gradients belongs to."""
    if any(axis in ("dp_replicate", "dp_shard", "ep_outer") for axis in axes):
        return "data"
    return "cp" if "cp" in axes else "tp"


def left_after_backward_s(leaving: Sequence[tuple[int, float]], times: Sequence[float]) -> float:
    """Return the seconds of reductions that are left when the backward of a stage ends.

    Args:
        leaving: for each reduction, in the order in which they run one after the other, the block after whose backward it can start, and
            its seconds.
        times: the backward seconds of each block, in the order of the model.
    """
    end = sum(times)
    free = 0.0
    for block, time_s in leaving:
        free = max(free, sum(times[block:])) + time_s
    return max(free - end, 0.0)


def tied(stages: Sequence[Sequence[BlockCost]], data: DataParallel) -> dict[tuple[int, ...], int]:
    """Return the bytes of gradients that pipeline ranks with the same parameters sum, by the ranks.

    Args:
        stages: the blocks of each stage, in the order of the model.
        data: how the data axes run.
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
    bytes_by_ranks: dict[tuple[int, ...], int] = {}
    for name, ranks in holders.items():
        if len(ranks) > 1:
            bytes_by_ranks[tuple(sorted(ranks))] = bytes_by_ranks.get(tuple(sorted(ranks)), 0) + sizes[name]
    return bytes_by_ranks


def scalars(data: DataParallel, totals: Sequence[int]) -> list[tuple[tuple[str, ...], int]]:
    """Return the axes of more than one rank and the bytes of each all-reduce of a step besides those of gradients.

    These are counts of the batch before the step, and the loss after it. With a scaled loss ranks also agree on whether all gradients are
    finite. The norm of all gradients is no part of a step: a separate call takes it.

    Args:
        data: how the data axes run.
        totals: the bytes of each count of the global batch that the loss divides by.
    """
    sums: list[tuple[tuple[str, ...], int]] = [(DATA_AXES, num_bytes) for num_bytes in totals]
    sums += [(("pp", *DATA_AXES), SCALAR_BYTES)]
    sums += [(MESH_AXES, SCALAR_BYTES)] * data.precision.scales_loss
    return [(tuple(axis for axis in axes if data.mesh.size((axis,)) > 1), num_bytes) for axes, num_bytes in sums]

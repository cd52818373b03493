"""Sums of gradients that FSDP does not do: which all-reduces the runtime runs, and when they can start.

Source: ``runtime/gradients.py`` and ``runtime/assemble.py``. A parameter that FSDP does not hold (without ZeRO and mixed
precision all of them, else scalars and experts over data ranks) is summed over the data axes and over those on which its
gradient is pending, in buckets that leave as soon as the last micro-batch's gradients of their members are there. What
FSDP holds is summed over pending axes after the last backward, all of one set of axes at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost.block import BlockCost, ParameterCost
from autopar.mesh import MESH_AXES, Mesh

BUCKET_BYTES = 25 * 2**20
"""That of the runtime (and of DDP); a test keeps both equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One all-reduce of gradients.

    Attributes:
        axes: whose ranks sum.
        num_bytes: of the gradients, local.
        stage, block: of the member whose gradient comes last: the turn of the rank's stage, and the block in it.
    """

    axes: tuple[str, ...]
    num_bytes: int
    stage: int
    block: int


def stage_parameters(
    blocks: Sequence[BlockCost],
) -> tuple[tuple[tuple[ParameterCost, ...], ...], tuple[ParameterCost, ...]]:
    """For each block of a stage the parameters that it alone reads, and those that several of its blocks read.

    Equal blocks may be one object here, so that names tell parameters apart only where they are shared.
    """
    readers = Counter(p.name for block in blocks for p in block.parameters if p.shared)
    own = tuple(tuple(p for p in block.parameters if not p.shared or readers[p.name] == 1) for block in blocks)
    shared = {p.name: p for block in blocks for p in block.parameters if p.shared and readers[p.name] > 1}
    return own, tuple(shared.values())


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


def buckets(stages: Sequence[Sequence[BlockCost]], mesh: Mesh, uses_fsdp: bool, itemsize: int) -> tuple[Bucket, ...]:
    """The all-reduces beside backward, of one rank.

    Args:
        stages: the blocks of each of the rank's stages, in order of the model.
        itemsize: of a gradient's element.
    """
    done: list[Bucket] = []
    filling: dict[tuple[str, ...], Bucket] = {}
    for stage, block, parameter in reversed(list(_in_order(stages))):
        axes = sum_axes(parameter, mesh, uses_fsdp)
        if is_fsdps(parameter, uses_fsdp) or not parameter.trained or not axes:
            continue
        before = filling.get(axes)
        last = (stage, block) if before is None else min((before.stage, before.block), (stage, block))
        size = parameter.numel * itemsize + (before.num_bytes if before is not None else 0)
        filling[axes] = Bucket(axes=axes, num_bytes=size, stage=last[0], block=last[1])
        if size >= BUCKET_BYTES:
            done.append(filling.pop(axes))
    return (*done, *filling.values())


def late_sums(
    stages: Sequence[Sequence[BlockCost]], mesh: Mesh, uses_fsdp: bool, shards: int, itemsize: int
) -> dict[tuple[str, ...], int]:
    """Bytes that are summed over each set of axes after the last backward: gradients' shards of what FSDP holds."""
    found: dict[tuple[str, ...], int] = {}
    for _, _, parameter in _in_order(stages):
        axes = sum_axes(parameter, mesh, uses_fsdp)
        if is_fsdps(parameter, uses_fsdp) and parameter.trained and axes:
            found[axes] = found.get(axes, 0) + parameter.shard_numel(shards) * itemsize
    return found


def _in_order(stages: Sequence[Sequence[BlockCost]]) -> Iterator[tuple[int, int, ParameterCost]]:
    """Parameters in the order in which the runtime holds them; shared ones are there when their first reader is done."""
    for turn, blocks in enumerate(stages):
        own, shared = stage_parameters(blocks)
        for i, parameters in enumerate(own):
            yield from ((turn, i, p) for p in parameters)
        for p in shared:
            first = next(
                i for i, block in enumerate(blocks) if any(q.shared and q.name == p.name for q in block.parameters)
            )
            yield turn, first, p


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

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

from autopar.cost.block import BlockCost, ParameterCost
from autopar.mesh import MESH_AXES, Mesh
from autopar.plan import BUCKET_BYTES


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
    distinct = {id(block.parameters): block.parameters for block in blocks}
    sharing = {key: [p for p in parameters if p.shared] for key, parameters in distinct.items()}
    keys = [id(block.parameters) for block in blocks]
    readers = Counter(p.name for key in keys for p in sharing[key])
    alone = {
        key: tuple(p for p in parameters if not p.shared or readers[p.name] == 1) if sharing[key] else parameters
        for key, parameters in distinct.items()
    }
    shared = {p.name: p for key in keys for p in sharing[key] if readers[p.name] > 1}
    return tuple(alone[key] for key in keys), tuple(shared.values())


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
    stages: Sequence[Sequence[BlockCost]],
    mesh: Mesh,
    uses_fsdp: bool,
    itemsize: int,
    bucket_bytes: int = BUCKET_BYTES,
) -> tuple[Bucket, ...]:
    """The all-reduces beside backward, of one rank.

    Args:
        stages: the blocks of each of the rank's stages, in order of the model.
        itemsize: of a gradient's element.
        bucket_bytes: from which on a bucket is not filled further.
    """
    done: list[Bucket] = []
    filling: dict[tuple[str, ...], Bucket] = {}
    wanted = _Summed(mesh, uses_fsdp)
    for stage, block, parameter, axes in reversed(list(_in_order(stages, wanted.in_buckets))):
        before = filling.get(axes)
        last = (stage, block) if before is None else min((before.stage, before.block), (stage, block))
        size = parameter.numel * itemsize + (before.num_bytes if before is not None else 0)
        members = 1 + (before.num_members if before is not None else 0)
        filling[axes] = Bucket(axes=axes, num_bytes=size, stage=last[0], block=last[1], num_members=members)
        if size >= bucket_bytes:
            done.append(filling.pop(axes))
    return (*done, *filling.values())


def late_sums(
    stages: Sequence[Sequence[BlockCost]], mesh: Mesh, uses_fsdp: bool, shards: int, itemsize: int
) -> dict[tuple[str, ...], int]:
    """Bytes that are summed over each set of axes after the last backward: gradients' shards of what FSDP holds."""
    found: dict[tuple[str, ...], int] = {}
    for _, _, parameter, axes in _in_order(stages, _Summed(mesh, uses_fsdp).late):
        found[axes] = found.get(axes, 0) + parameter.shard_numel(shards) * itemsize
    return found


class _Summed:
    """Which parameters are summed over which axes; worked out once for each tuple of parameters, as blocks repeat."""

    def __init__(self, mesh: Mesh, uses_fsdp: bool) -> None:
        self.mesh, self.uses_fsdp = mesh, uses_fsdp

    def in_buckets(self, parameters: Sequence[ParameterCost]) -> list[tuple[ParameterCost, tuple[str, ...]]]:
        """Those that FSDP does not hold, with their axes."""
        return self._of([p for p in parameters if not is_fsdps(p, self.uses_fsdp)])

    def late(self, parameters: Sequence[ParameterCost]) -> list[tuple[ParameterCost, tuple[str, ...]]]:
        """Those that it holds."""
        return self._of([p for p in parameters if is_fsdps(p, self.uses_fsdp)])

    def _of(self, parameters: Sequence[ParameterCost]) -> list[tuple[ParameterCost, tuple[str, ...]]]:
        found = ((p, sum_axes(p, self.mesh, self.uses_fsdp)) for p in parameters if p.trained)
        return [(p, axes) for p, axes in found if axes]


def _in_order(
    stages: Sequence[Sequence[BlockCost]],
    wanted: Callable[[Sequence[ParameterCost]], list[tuple[ParameterCost, tuple[str, ...]]]],
) -> Iterator[tuple[int, int, ParameterCost, tuple[str, ...]]]:
    """Wanted parameters in the order in which the runtime holds them; shared ones when their first reader is done."""
    for turn, blocks in enumerate(stages):
        own, shared = stage_parameters(blocks)
        known: dict[int, list[tuple[ParameterCost, tuple[str, ...]]]] = {}
        for i, parameters in enumerate(own):
            if id(parameters) not in known:
                known[id(parameters)] = wanted(parameters)
            yield from ((turn, i, p, axes) for p, axes in known[id(parameters)])
        for p, axes in wanted(shared):
            first = next(
                i for i, block in enumerate(blocks) if any(q.shared and q.name == p.name for q in block.parameters)
            )
            yield turn, first, p, axes


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

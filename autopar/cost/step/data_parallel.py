"""Data parallelism as the runtime does it: FSDP2's gathers and reductions beside the blocks' computation.

| ZeRO | gathered                                  | reduced                                             |
|------|-------------------------------------------|-----------------------------------------------------|
| 0    | never (once a step when precision is mixed) | summed in buckets beside the last backward: `gradients.py` |
| 1    | at the step's first forward               | at the last micro-batch                             |
| 2    | at the step's first forward               | at every micro-batch                                |
| 3    | at every forward and every backward       | at every micro-batch; with a pipeline after the last |

The gather of the next block and the reduction of the one before run beside a block: what is longer than the block is
exposed, what is hidden slows the block by the device's ``interference``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias

import torch

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.errors import UsageError
from autopar.hardware.device import Device
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision


@cache
def itemsize(dtype: str) -> int:
    """Bytes of an element of a dtype by torch's name.

    Raises:
        UsageError: torch has no such dtype.
    """
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise UsageError(f"Unknown dtype '{dtype}'", fix="Write one of torch's, for example bfloat16")
    return found.itemsize


def is_mixed(precision: Precision) -> bool:
    """Whether FSDP casts: its dtypes differ."""
    return len({precision.compute, precision.storage, precision.reduce}) > 1


Parts: TypeAlias = Sequence[tuple[ParameterCost, int]]
"""Parameters that are not of experts over data ranks, each with the elements of it that the fullest rank of dp_shard keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One FSDP unit (a block) on one rank.

    Attributes:
        numel, trained_numel: elements before dp_shard splits them; without experts over data ranks.
        shard_numel, trained_shard_numel: elements that the fullest rank of dp_shard keeps; with them.
        trained_shard_shapes: of each of these.
        spread_numel: trained elements of experts over data ranks, which nobody gathers or shards again.
        num_trained: parameters with a gradient.
        gather_s: making the whole parameters in the compute dtype.
        reduce_s: of gradients over dp_shard.
        replicate_s: of shards of gradients over dp_replicate, once a step.
        hooks_s: what FSDP's hooks take around every forward, and around every backward.
    """

    numel: int
    trained_numel: int
    shard_numel: int
    trained_shard_numel: int
    trained_shard_shapes: tuple[tuple[int, ...], ...]
    spread_numel: int
    num_trained: int
    gather_s: float
    reduce_s: float
    replicate_s: float
    hooks_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DataParallel:
    """One way to run the data axes.

    Args:
        mesh: its axes ``dp_shard`` and ``dp_replicate``.
        zero_stage: 0 to 3.
        precision: dtypes of parameters and reductions.
        is_pipelined: more than one pipeline rank, or sums wait for the last backward as they do there.
        reduces_last: gradients of several micro-batches are reduced at the last one, at every ZeRO stage.
    """

    mesh: Mesh
    zero_stage: int
    precision: Precision
    is_pipelined: bool
    reduces_last: bool = False

    uses_fsdp: bool = field(init=False, compare=False)
    """Whether FSDP holds the parameters: it shards or casts them."""
    gathers_always: bool = field(init=False, compare=False)
    """Whether parameters are freed between forward and backward."""
    reduces_always: bool = field(init=False, compare=False)
    """Whether FSDP reduces the gradients of every micro-batch."""
    sends_always: bool = field(init=False, compare=False)
    """Whether every micro-batch has gathers or reductions."""

    def __post_init__(self) -> None:
        uses_fsdp = self.mesh.dp_shard > 1 or is_mixed(self.precision)
        gathers = uses_fsdp and self.zero_stage == 3
        reduces = uses_fsdp and self.zero_stage >= 2 and not (self.is_pipelined or self.reduces_last)
        found = {"uses_fsdp": uses_fsdp, "gathers_always": gathers, "reduces_always": reduces}
        for name, value in (found | {"sends_always": gathers or reduces}).items():
            object.__setattr__(self, name, value)  # asked for again and again

    def accumulates(self, num_micro_batches: int) -> bool:
        """Whether whole gradients are kept from one micro-batch to the next."""
        if not self.uses_fsdp:
            return True
        return self.is_pipelined or ((self.zero_stage < 2 or self.reduces_last) and num_micro_batches > 1)

    def padded(self, parts: Parts) -> int:
        """Elements that FSDP moves: shards of equal size; scalars are not its own."""
        return self.mesh.dp_shard * sum([part for p, part in parts if p.shape])

    # --- time of a stage's blocks beside their computation; ``times`` are seconds of each block

    def hooks_s(self, held: int, device: Device) -> float:
        """Host time of FSDP around a forward or a backward of a unit of so many parameters, whatever is gathered or reduced."""
        if not self.uses_fsdp:
            return 0.0
        return device.overheads.unit_s + device.overheads.unit_parameter_s * held

    def first_forward_s(self, units: Sequence[Unit], times: Sequence[float], interference: float) -> float:
        """What the first forward of a step takes longer, where parameters then stay gathered."""
        if not self.uses_fsdp or self.gathers_always:
            return 0.0
        return _beside([unit.gather_s for unit in units], times, interference)

    def added(self, units: Sequence[Unit], num_micro_batches: int) -> tuple[int, int]:
        """Bytes and kernels of adding the gradients of a micro-batch to those before.

        The sum is read and written and the new gradient read: whole where gradients accumulate, else the rank's shard.
        """
        whole, compute = self.accumulates(num_micro_batches), itemsize(self.precision.compute)
        kept = itemsize(self.precision.reduce if self.uses_fsdp and whole else self.precision.storage)
        numel = sum(u.trained_numel + u.spread_numel if whole else u.trained_shard_numel for u in units)
        moved = numel * (2 * kept + (compute if self.uses_fsdp and whole else kept))
        return moved, sum(u.num_trained for u in units)

    def every_forward_s(self, units: Sequence[Unit], times: Sequence[float], interference: float) -> float:
        """What every forward takes longer."""
        hooks = sum(unit.hooks_s for unit in units)
        if not self.gathers_always:
            return hooks
        return hooks + _beside([unit.gather_s for unit in units], times, interference)

    def backward_s(self, units: Sequence[Unit], times: Sequence[float], interference: float, *, is_last: bool) -> float:
        """What the backward of a micro-batch takes longer; ``is_last`` of the step.

        With a pipeline under FSDP reductions wait until the schedule's end: see :meth:`tail_s`.
        """
        reduces = self.reduces_always or (self.uses_fsdp and not self.is_pipelined and is_last)
        hooks = sum(unit.hooks_s for unit in units)
        if not reduces and not self.gathers_always:
            return hooks
        # backward meets the blocks from the last to the first; FSDP2 has freed the last one's parameters too
        order, none = list(reversed(units)), [0.0] * len(units)
        gathers = [unit.gather_s for unit in order] if self.gathers_always else none
        reductions = [unit.reduce_s + (unit.replicate_s if is_last else 0.0) for unit in order] if reduces else none
        total = hooks + gathers[0]
        for i, time_s in enumerate(reversed(times)):
            beside = (gathers[i + 1] if i + 1 < len(order) else 0.0) + (reductions[i - 1] if i else 0.0)
            total += exposed_s(beside, time_s, interference)
        return total + reductions[-1]

    def inside_s(
        self,
        unit: Unit,
        backward_s: float,
        before: tuple[Unit, float] | None,
        after: tuple[Unit, float] | None,
        interference: float,
    ) -> tuple[float, float]:
        """What a block between two others adds to the forward and to the backward of each micro-batch but the last.

        Those of a stage of a pipeline, or of all blocks without one, add up to no more than what the stage takes: what would be
        beside a block that is not there is exposed.

        Args:
            unit, backward_s: the block and its backward.
            before: the block before and its forward; None: there is none.
            after: the block after and its backward.
        """
        if not self.uses_fsdp:
            return 0.0, 0.0
        extra_f = extra_b = unit.hooks_s
        if self.gathers_always:
            extra_f += exposed_s(unit.gather_s, before[1] if before else 0.0, interference)
        if self.is_pipelined:  # each gather with the block that it is for
            own = unit.gather_s if self.gathers_always else 0.0
            return extra_f, extra_b + exposed_s(own, after[1] if after else 0.0, interference)
        beside = before[0].gather_s if self.gathers_always and before else 0.0
        beside += after[0].reduce_s if self.reduces_always and after else 0.0
        return extra_f, extra_b + exposed_s(beside, backward_s, interference)

    def tail_s(self, units: Sequence[Unit]) -> float:
        """Reductions after a pipeline's last backward."""
        if not (self.is_pipelined and self.uses_fsdp):
            return 0.0
        return sum(unit.reduce_s + unit.replicate_s for unit in units)


def _beside(gathers: Sequence[float], times: Sequence[float], interference: float) -> float:
    """Each gather runs beside the block before; the first one is exposed."""
    total = gathers[0] if gathers else 0.0
    for gather_s, time_s in zip(gathers[1:], times, strict=False):
        total += exposed_s(gather_s, time_s, interference)
    return total


def exposed_s(sent_s: float, time_s: float, interference: float) -> float:
    """What collectives beside a computation of ``time_s`` add to it."""
    hidden = min(sent_s, time_s)
    return sent_s - hidden + interference * hidden


def shared_sums_s(blocks: Sequence[BlockCost], num_bytes: int, device: Device) -> float:
    """What autograd takes for each micro-batch to sum the gradients of parameters that several blocks of a stage use.

    Each further use reads two gradients and writes their sum to a tensor of its own.

    Args:
        num_bytes: of one element.
    """
    again = [
        p.numel
        for block, own in zip(blocks, own_parameters(blocks), strict=True)
        if len(own) < len(block.parameters)
        for p in block.parameters
        if p.trained and p not in own
    ]
    return sum(3 * numel * num_bytes / device.memory_bandwidth_bytes_per_s + device.launch_s for numel in again)


def own_parameters(blocks: Sequence[BlockCost]) -> Iterator[tuple[ParameterCost, ...]]:
    """For each block of a stage the parameters that no earlier block of it has."""
    seen: set[str] = set()
    for block in blocks:
        shared = block.shared_names
        if seen.isdisjoint(shared):
            yield block.parameters
        else:
            yield tuple(p for p in block.parameters if not (p.shared and p.name in seen))
        seen.update(shared)

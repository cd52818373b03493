"""Data parallelism as the runtime does it: FSDP2's gathers and reductions, which overlap the blocks' computation.

| ZeRO | gathered                                  | reduced                                             |
|------|-------------------------------------------|-----------------------------------------------------|
| 0    | never (once a step when precision is mixed) | summed in buckets during the last backward: `gradient_buckets.py` |
| 1    | at the step's first forward               | at the last micro-batch                             |
| 2    | at the step's first forward               | at every micro-batch                                |
| 3    | at every forward and every backward       | at every micro-batch; with a pipeline after the last |

The gather of the next block and the reduction of the block before overlap a block. What is longer than the block is exposed; what is hidden
slows the block down by the device's ``interference``.
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
    """Return the bytes of an element of a dtype by torch's name.

    Raises:
        UsageError: torch has no such dtype.
    """
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise UsageError(f"Unknown dtype '{dtype}'", fix="Write one of torch's, for example bfloat16")
    return torch_dtype.itemsize


def is_mixed(precision: Precision) -> bool:
    """Return whether FSDP casts, as its dtypes differ."""
    return len({precision.compute, precision.storage, precision.reduce}) > 1


Parts: TypeAlias = Sequence[tuple[ParameterCost, int]]
"""Parameters other than those of experts over data ranks, each with the elements that the fullest rank of dp_shard keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One FSDP unit (a block) on one rank.

    Attributes:
        numel, trained_numel: elements before dp_shard splits them, without experts over data ranks.
        shard_numel, trained_shard_numel: elements that the fullest rank of dp_shard keeps, with experts.
        trained_shard_shapes: the shapes of the trained shards.
        spread_numel: trained elements of experts over data ranks, which are neither gathered nor sharded further.
        num_trained: the number of parameters with a gradient.
        gather_s: the seconds to gather the full parameters in the compute dtype.
        reduce_s: the seconds to reduce gradients over dp_shard.
        replicate_s: the seconds to reduce gradient shards over dp_replicate, once a step.
        hooks_s: the seconds of FSDP's hooks around each forward, and around each backward.
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
        mesh: the mesh with its axes ``dp_shard`` and ``dp_replicate``.
        zero_stage: 0 to 3.
        precision: the dtypes of parameters and reductions.
        is_pipelined: whether there are several pipeline ranks, or sums wait for the last backward as in a pipeline.
        reduces_last: whether gradients of several micro-batches are reduced at the last one at every ZeRO stage.
    """

    mesh: Mesh
    zero_stage: int
    precision: Precision
    is_pipelined: bool
    reduces_last: bool = False

    uses_fsdp: bool = field(init=False, compare=False)
    """Whether FSDP holds the parameters, because it shards or casts them."""
    gathers_always: bool = field(init=False, compare=False)
    """Whether parameters are freed between forward and backward, and gathered again."""
    reduces_always: bool = field(init=False, compare=False)
    """Whether FSDP reduces the gradients of every micro-batch."""
    sends_always: bool = field(init=False, compare=False)
    """Whether every micro-batch has gathers or reductions."""

    def __post_init__(self) -> None:
        uses_fsdp = self.mesh.dp_shard > 1 or is_mixed(self.precision)
        gathers = uses_fsdp and self.zero_stage == 3
        reduces = uses_fsdp and self.zero_stage >= 2 and not (self.is_pipelined or self.reduces_last)
        fields = {"uses_fsdp": uses_fsdp, "gathers_always": gathers, "reduces_always": reduces}
        for name, value in (fields | {"sends_always": gathers or reduces}).items():
            object.__setattr__(self, name, value)  # cached, as they are read very often

    def accumulates(self, num_micro_batches: int) -> bool:
        """Return whether full gradients are kept from one micro-batch to the next."""
        if not self.uses_fsdp:
            return True
        return self.is_pipelined or ((self.zero_stage < 2 or self.reduces_last) and num_micro_batches > 1)

    def padded(self, parts: Parts) -> int:
        """Return the elements that FSDP moves: shards of equal size, without scalars, which it does not hold."""
        return self.mesh.dp_shard * sum([part for p, part in parts if p.shape])

    # --- what the data axes add to a stage's blocks; ``times`` are seconds of each block

    def hooks_s(self, held: int, device: Device) -> float:
        """Return the host's seconds for FSDP around a forward or a backward of a unit with so many parameters."""
        if not self.uses_fsdp:
            return 0.0
        return device.overheads.unit_s + device.overheads.unit_parameter_s * held

    def first_forward_s(self, units: Sequence[Unit], times: Sequence[float], interference: float) -> float:
        """Return by how much a step's first forward is longer, where parameters stay gathered from then on."""
        if not self.uses_fsdp or self.gathers_always:
            return 0.0
        return _exposed_gathers_s([unit.gather_s for unit in units], times, interference)

    def added(self, units: Sequence[Unit], num_micro_batches: int) -> tuple[int, int]:
        """Return the bytes and kernels to add the gradients of a micro-batch to earlier ones.

        The sum is read and written and the new gradient read: the full one where gradients accumulate, else the rank's shard.
        """
        is_full, compute = self.accumulates(num_micro_batches), itemsize(self.precision.compute)
        kept_size = itemsize(self.precision.reduce if self.uses_fsdp and is_full else self.precision.storage)
        numel = sum(u.trained_numel + u.spread_numel if is_full else u.trained_shard_numel for u in units)
        moved = numel * (2 * kept_size + (compute if self.uses_fsdp and is_full else kept_size))
        return moved, sum(u.num_trained for u in units)

    def every_forward_s(self, units: Sequence[Unit], times: Sequence[float], interference: float) -> float:
        """Return by how much every forward is longer."""
        hooks = sum(unit.hooks_s for unit in units)
        if not self.gathers_always:
            return hooks
        return hooks + _exposed_gathers_s([unit.gather_s for unit in units], times, interference)

    def backward_s(self, units: Sequence[Unit], times: Sequence[float], interference: float, *, is_last: bool) -> float:
        """Return by how much the backward of a micro-batch is longer; ``is_last``: the last micro-batch of the step.

        With a pipeline FSDP's reductions wait until the end of the schedule: see :meth:`tail_s`.
        """
        reduces = self.reduces_always or (self.uses_fsdp and not self.is_pipelined and is_last)
        hooks = sum(unit.hooks_s for unit in units)
        if not reduces and not self.gathers_always:
            return hooks
        # Backward runs from the last block to the first; FSDP2 has freed the parameters of the last one too.
        order, none = list(reversed(units)), [0.0] * len(units)
        gathers = [unit.gather_s for unit in order] if self.gathers_always else none
        reductions = [unit.reduce_s + (unit.replicate_s if is_last else 0.0) for unit in order] if reduces else none
        total = hooks + gathers[0]
        for i, time_s in enumerate(reversed(times)):
            sent_s = (gathers[i + 1] if i + 1 < len(order) else 0.0) + (reductions[i - 1] if i else 0.0)
            total += exposed_s(sent_s, time_s, interference)
        return total + reductions[-1]

    def inside_s(
        self,
        unit: Unit,
        backward_s: float,
        before: tuple[Unit, float] | None,
        after: tuple[Unit, float] | None,
        interference: float,
    ) -> tuple[float, float]:
        """Return what a block between two others adds to the forward and to the backward of each micro-batch but the last.

        These values add up to no more than the stage takes, over a pipeline stage or over all blocks without a pipeline. Collectives that
        would overlap a missing block are exposed.

        Args:
            unit, backward_s: the block and its backward seconds.
            before: the block before and its forward seconds; None: there is none.
            after: the block after and its backward seconds; None: there is none.
            interference: the interference of the device.
        """
        if not self.uses_fsdp:
            return 0.0, 0.0
        extra_f = extra_b = unit.hooks_s
        if self.gathers_always:
            extra_f += exposed_s(unit.gather_s, before[1] if before else 0.0, interference)
        if self.is_pipelined:  # each gather counts with its block
            gather_s = unit.gather_s if self.gathers_always else 0.0
            return extra_f, extra_b + exposed_s(gather_s, after[1] if after else 0.0, interference)
        sent_s = before[0].gather_s if self.gathers_always and before else 0.0
        sent_s += after[0].reduce_s if self.reduces_always and after else 0.0
        return extra_f, extra_b + exposed_s(sent_s, backward_s, interference)

    def tail_s(self, units: Sequence[Unit]) -> float:
        """Return the seconds of reductions after a pipeline's last backward."""
        if not (self.is_pipelined and self.uses_fsdp):
            return 0.0
        return sum(unit.reduce_s + unit.replicate_s for unit in units)


def _exposed_gathers_s(gathers: Sequence[float], times: Sequence[float], interference: float) -> float:
    """Return the exposed seconds of gathers, each of which overlaps the block before; the first one is fully exposed."""
    total = gathers[0] if gathers else 0.0
    for gather_s, time_s in zip(gathers[1:], times, strict=False):
        total += exposed_s(gather_s, time_s, interference)
    return total


def exposed_s(sent_s: float, time_s: float, interference: float) -> float:
    """Return what collectives add to a computation of ``time_s`` that they overlap."""
    hidden = min(sent_s, time_s)
    return sent_s - hidden + interference * hidden


def shared_sums_s(blocks: Sequence[BlockCost], num_bytes: int, device: Device) -> float:
    """Return the seconds for each micro-batch in which autograd sums gradients of parameters that several blocks of a stage use.

    Each further use reads two gradients and writes their sum to a new tensor.

    Args:
        blocks: the blocks of the stage.
        num_bytes: the bytes of one element.
        device: the device.
    """
    repeated = [
        p.numel
        for block, own in zip(blocks, new_parameters(blocks), strict=True)
        if len(own) < len(block.parameters)
        for p in block.parameters
        if p.trained and p not in own
    ]
    return sum(3 * numel * num_bytes / device.memory_bandwidth_bytes_per_s + device.launch_s for numel in repeated)


def new_parameters(blocks: Sequence[BlockCost]) -> Iterator[tuple[ParameterCost, ...]]:
    """Yield for each block of a stage the parameters that no earlier block of it has."""
    seen: set[str] = set()
    for block in blocks:
        shared = block.shared_names
        if seen.isdisjoint(shared):
            yield block.parameters
        else:
            yield tuple(p for p in block.parameters if not (p.shared and p.name in seen))
        seen.update(shared)

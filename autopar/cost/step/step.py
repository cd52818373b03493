"""What a step of a plan is: how it is run, its stages and their seconds, and what the training program decides.

:class:`Runtime` models ``autopar.runtime``: FSDP2 or buckets on the data axes, messages between stages that only the receiver waits for,
and gradients summed during the last backward. ``autopar.validate.practice`` models other programs (Megatron, DeepSpeed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

import numpy as np

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.step.data_parallel import DataParallel, Parts, Unit, itemsize
from autopar.cost.step.simulation import StageTimes
from autopar.hardware.device import Device, HostLink
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BUCKET_BYTES, Offload, Precision, Recompute
from autopar.plan.schedule import schedule_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one optimizer step is run: what a prediction needs besides the stages.

    Attributes:
        mesh: the degrees of the axes.
        schedule: the name of the pipeline schedule.
        num_micro_batches: the micro-batches of each data rank.
        zero_stage: 0 to 3.
        global_batch_size: the samples of the step.
        flops_per_sample: the model's flops, forward and backward, for the utilization.
        tokens_per_sample: for the throughput.
        prelude_s: the seconds of the operators that every stage repeats for each micro-batch.
        preludes_s: the same for each pipeline rank, where devices differ; empty where they do not.
        totals: the bytes of each count of the global batch that the loss divides by.
        adds_gradients: whether autograd's kernels that add a micro-batch's gradients to earlier ones count; autopar's runtime has them,
            Megatron's ``gradient_accumulation_fusion`` does not.
        bucket_bytes: the size of a bucket of gradients (``Plan.bucket_bytes``).
        offload: what is kept in host memory (``Plan.offload``).
    """

    mesh: Mesh
    schedule: str
    num_micro_batches: int
    zero_stage: int
    global_batch_size: int
    flops_per_sample: float
    tokens_per_sample: int
    prelude_s: float = 0.0
    preludes_s: tuple[float, ...] = ()
    adds_gradients: bool = False
    totals: tuple[int, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    offload: tuple[Offload, ...] = ()

    @property
    def offloads_optimizer(self) -> bool:
        """Whether the optimizer states are on the host."""
        return "optimizer" in self.offload


Runs: TypeAlias = tuple[tuple[tuple[BlockCost, Recompute], int], ...]
"""The blocks of a stage with their modes of recompute, and how many equal ones follow each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The blocks of one stage, in order, and the mode of recompute of each."""

    blocks: tuple[BlockCost, ...]
    recompute: tuple[Recompute, ...]
    runs: Runs = field(init=False, compare=False, repr=False)
    """Runs of equal blocks with equal modes, and their lengths: a complete and short key of the stage."""

    def __post_init__(self) -> None:
        pairs = groupby(zip(self.blocks, self.recompute, strict=True))
        object.__setattr__(self, "runs", tuple([(pair, len(list(run))) for pair, run in pairs]))


@dataclass(frozen=True, slots=True)
class StageSums:
    """The seconds of one stage and micro-batch by what they are spent on.

    Attributes:
        compute_s, recompute_s, tensor_parallel_s, context_parallel_s: computation, recompute, and exposed collectives of these axes.
        data_forward_s, data_backward_s: what the data axes add to every forward and to every backward.
        data_first_s, data_last_s: what they add further to the step's first forward and to its last backward.
        forward_s, backward_s: the totals, without ``data_first_s`` and ``data_last_s``.
        offload_s: the part of the totals that waits for copies to and from the host.
    """

    compute_s: float
    recompute_s: float
    tensor_parallel_s: float
    context_parallel_s: float
    data_forward_s: float
    data_backward_s: float
    data_first_s: float
    data_last_s: float
    forward_s: float
    backward_s: float
    offload_s: float = 0.0


def own_times(block: BlockCost, recompute: Recompute) -> tuple[float, float]:
    """Return the seconds of forward and backward, including the block's collectives but not those of the data axes."""
    forward_s = block.forward_s + block.communication_forward_s
    backward_s = block.backward_s + block.communication_backward_s
    return forward_s, backward_s + (block.recompute_s(recompute) if recompute != "none" else 0.0)


def stage_sums(
    stage: StageCost,
    units: Sequence[Unit],
    data: DataParallel,
    *,
    share: float,
    interference: float,
    prelude_s: float,
    adding_s: float = 0.0,
) -> StageSums:
    """Return what a stage spends on one micro-batch.

    Args:
        stage: the stage.
        units: the FSDP units, one for each block.
        data: how the data axes run.
        share: the fraction of forwards that gather parameters.
        interference: the interference of the device.
        prelude_s: the seconds of the operators that every stage repeats.
        adding_s: the seconds of adding gradients to those of earlier micro-batches.
    """
    forward = [block.forward_s + block.communication_forward_s for block in stage.blocks]
    backward = [own_times(block, mode)[1] for block, mode in zip(stage.blocks, stage.recompute, strict=True)]
    recomputed = [block for block, mode in zip(stage.blocks, stage.recompute, strict=True) if mode == "full"]
    remade_s = [b.remade.time_s for b, mode in zip(stage.blocks, stage.recompute, strict=True) if mode == "selective"]
    communication_s = sum(b.communication_forward_s + b.communication_backward_s for b in stage.blocks)
    communication_s += sum(b.communication_again_s for b in recomputed)
    context_s = sum(b.context_forward_s + b.context_backward_s for b in stage.blocks)
    context_s += sum(b.context_again_s for b in recomputed)
    data_forward = share * data.every_forward_s(units, forward, interference)
    data_backward = data.backward_s(units, backward, interference, is_last=False)
    return StageSums(
        compute_s=sum(b.forward_s + b.backward_s for b in stage.blocks) + prelude_s + adding_s,
        recompute_s=sum(b.forward_s for b in recomputed) + sum(remade_s),
        tensor_parallel_s=max(communication_s - context_s, 0.0),
        context_parallel_s=context_s,
        data_forward_s=data_forward,
        data_backward_s=data_backward,
        data_first_s=data.first_forward_s(units, forward, interference),
        data_last_s=data.backward_s(units, backward, interference, is_last=True) - data_backward,
        forward_s=sum(forward) + data_forward + prelude_s,
        backward_s=sum(backward) + data_backward + adding_s,
    )


def with_offload(sums: StageSums, stage: StageCost, host: HostLink) -> StageSums:
    """Add the seconds that forward and backward wait for activations on their way to and from the host.

    At the end of each block that offloads, forward waits for the copies of the offloading block before it; for the first one these are
    copies of the micro-batch before. Backward begins to copy a block back when it reaches the next block that offloads; for the last one,
    only when it is needed.
    """
    times = [own_times(block, again) for block, again in zip(stage.blocks, stage.recompute, strict=True)]
    forward, backward = [time[0] for time in times], [time[1] for time in times]
    sizes = [block.moved_bytes(again) for block, again in zip(stage.blocks, stage.recompute, strict=True)]
    places = [i for i, size in enumerate(sizes) if size]
    if not places:
        return sums
    down_s = up_s = 0.0
    for here, after in zip(places, [*places[1:], None], strict=True):
        down = host.latency_s + sizes[here] / host.to_host_bytes_per_s
        up = host.latency_s + sizes[here] / host.to_device_bytes_per_s
        hiding = (
            forward[here + 1 : after + 1] if after is not None else [*forward[here + 1 :], *forward[: places[0] + 1]]
        )
        down_s += max(down - sum(hiding), 0.0)
        up_s += max(up - sum(backward[here + 1 : after + 1]), 0.0) if after is not None else up
    return replace(sums, forward_s=sums.forward_s + down_s, backward_s=sums.backward_s + up_s, offload_s=down_s + up_s)


def gathering_share(data: DataParallel, schedule: str, num_stages: int, num_micro_batches: int, stage: int) -> float:
    """Return the fraction of a stage's forwards that gather under ZeRO 3: in a pipeline, not those right after a backward."""
    if not (data.gathers_always and data.is_pipelined):
        return 1.0
    after = _after_backwards(schedule, data.mesh.pp, num_stages // data.mesh.pp, num_micro_batches)[stage]
    return 1 - after / num_micro_batches


@lru_cache(maxsize=256)
def _after_backwards(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """Return for each stage how many of its forwards come right after one of its backwards."""
    counts = []
    rows = schedule_numbers(schedule, pp, virtual_stages, num_micro_batches) // num_micro_batches
    for stage in range(pp * virtual_stages):
        row = rows[stage % pp]  # a number is twice the stage, plus one for a backward
        is_backward = row[row // 2 == stage] % 2 == 1
        counts.append(int(np.sum(is_backward[:-1] & ~is_backward[1:])))
    return tuple(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessages:
    """What a stage and its neighbours send for one micro-batch, and the host's seconds for it.

    Attributes:
        sent_bytes, received_bytes: the bytes of its outputs and of its inputs; their gradients are as large.
        sent_s, sent_back_s: the seconds in which its outputs, and the gradients of its inputs, are sent.
        received_s: the seconds in which its inputs are sent.
        forward_host_s, backward_host_s: the host's seconds for the schedule's action and its messages.
    """

    sent_bytes: int
    received_bytes: int
    sent_s: float
    sent_back_s: float
    received_s: float
    forward_host_s: float
    backward_host_s: float


class Runtime:
    """The decisions of autopar's runtime; models of other programs override what differs."""

    @property
    def reduction(self) -> str:
        """The collective that sums gradients over dp_shard."""
        return "reduce_scatter"

    def data_parallel(self, step: Step, precision: Precision) -> DataParallel:
        """Return how the data axes run."""
        return DataParallel(step.mesh, step.zero_stage, precision, step.mesh.pp > 1)

    def unit(
        self, parameters: Sequence[ParameterCost], data: DataParallel, collectives: CollectiveModel, device: Device
    ) -> Unit:
        """Return what a block with these parameters costs on the data axes."""
        shards, trained = data.mesh.dp_shard, [p for p in parameters if p.trained]
        held = [(p, p.numel) for p in parameters if not p.spread]
        spread_numel = sum([p.numel for p in trained if p.spread])
        parts = [(p, numel if shards == 1 else p.shard_numel(shards)) for p, numel in held]
        trained_shard = sum([part for p, part in parts if p.trained])
        gather_s = reduce_s = replicate_s = 0.0
        if data.uses_fsdp:
            trained_parts, overheads = [part for part in parts if part[0].trained], device.overheads
            gather_s = self.gather_s(parts, data, collectives, device)
            gather_s += overheads.gather_s + overheads.gather_parameter_s * len(parts)
            reduce_s = self.reduce_s(trained_parts, data, collectives, device)
            reduce_s += overheads.reduce_s + overheads.reduce_parameter_s * len(trained_parts)
            shard_bytes = data.padded(trained_parts) // shards * itemsize(data.precision.reduce)
            replicate_s = collectives.time_s("all_reduce", shard_bytes, data.mesh, ("dp_replicate",))
        return Unit(
            numel=sum([numel for _, numel in held]),
            trained_numel=sum([numel for p, numel in held if p.trained]),
            shard_numel=sum([part for _, part in parts]) + sum([p.numel for p in parameters if p.spread]),
            trained_shard_numel=trained_shard + spread_numel,
            trained_shard_shapes=tuple([p.shard_shape(shards) for p in trained]),
            spread_numel=spread_numel,
            num_trained=len(trained),
            gather_s=gather_s,
            reduce_s=reduce_s,
            replicate_s=replicate_s,
            hooks_s=data.hooks_s(len(held), device),
        )

    def gather_s(self, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device) -> float:
        """Return the seconds to gather parameters over dp_shard in the compute dtype, and to copy the buffer into them."""
        num_bytes = data.padded(parts) * itemsize(data.precision.compute)
        moved_s = collectives.time_s("all_gather", num_bytes, data.mesh, ("dp_shard",))
        return moved_s + 2 * num_bytes / device.memory_bandwidth_bytes_per_s

    def reduce_s(self, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device) -> float:
        """Return the seconds to copy gradients of trained parameters into a buffer, and to sum it over dp_shard."""
        compute, reduced = itemsize(data.precision.compute), itemsize(data.precision.reduce)
        padded = data.padded(parts)
        moved_s = collectives.time_s(self.reduction, padded * reduced, data.mesh, ("dp_shard",))
        return moved_s + padded * (compute + reduced) / device.memory_bandwidth_bytes_per_s

    def adding_s(self, units: Sequence[Unit], data: DataParallel, num_micro_batches: int, device: Device) -> float:
        """Return the seconds to add the gradients of a micro-batch to earlier ones, averaged over a step; the first ones are only kept."""
        moved, launches = data.added(units, num_micro_batches)
        once = moved / device.memory_bandwidth_bytes_per_s + device.launch_s * launches
        return once * (num_micro_batches - 1) / num_micro_batches

    def message_bytes(self, num_bytes: int, mesh: Mesh) -> float:
        """Return the bytes that one rank sends of a message between stages."""
        return num_bytes

    def stage_times(
        self, sums: StageSums, messages: StageMessages, mesh: Mesh, collectives: CollectiveModel, device: Device
    ) -> StageTimes:
        """Return the times of a stage that the pipeline simulates; ranks do not wait for messages that they send."""
        return StageTimes(
            forward_s=sums.forward_s + messages.forward_host_s,
            backward_s=sums.backward_s + messages.backward_host_s,
            send_forward_s=messages.sent_s,
            send_backward_s=messages.sent_back_s,
            first_forward_s=sums.data_first_s,
            schedule_s=messages.forward_host_s + messages.backward_host_s,
        )

    def first_gathers_s(
        self, sums: Sequence[StageSums], units: Sequence[Unit], data: DataParallel, device: Device
    ) -> float:
        """Return a rank's seconds once a step for gathers of parameters that then stay gathered, in the first forward of each stage."""
        return sum(s.data_first_s for s in sums)

    def late_share(self, device: Device) -> float:
        """Return the fraction that a rank waits of the sums that are left when its last backward ends."""
        return 1.0

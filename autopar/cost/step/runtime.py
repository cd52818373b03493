"""What the program that trains decides about a step: the hook by which other programs than autopar's own are predicted.

:class:`Runtime` is ``autopar.runtime``: FSDP2 or buckets on the data axes, messages between stages that nobody waits for but their
receiver, gradients summed beside the last backward. ``autopar.validate.practice`` has what others do (Megatron, DeepSpeed).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.step.data_parallel import DataParallel, Unit, itemsize
from autopar.cost.step.simulation import StageTimes
from autopar.cost.step.step import StageSums, Step
from autopar.hardware.device import Device
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision

Parts: TypeAlias = Sequence[tuple[ParameterCost, int]]
"""Parameters that are not of experts over data ranks, each with the elements of it that the fullest rank of dp_shard keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessages:
    """What a stage and its neighbours send for one micro-batch, and what that takes of the host.

    Attributes:
        sent_bytes, received_bytes: of its outputs and of its inputs; gradients of these are as large.
        sent_s, sent_back_s: seconds that its outputs, and the gradients of its inputs, are under way.
        received_s: of its inputs.
        forward_host_s, backward_host_s: seconds of the host for the schedule's action and its messages.
    """

    sent_bytes: int
    received_bytes: int
    sent_s: float
    sent_back_s: float
    received_s: float
    forward_host_s: float
    backward_host_s: float


class Runtime:
    """autopar's own; a program that does otherwise overrides what differs."""

    def data_parallel(self, step: Step, precision: Precision) -> DataParallel:
        """How the data axes run."""
        return DataParallel(step.mesh, step.zero_stage, precision, step.mesh.pp > 1)

    def unit(
        self, parameters: Sequence[ParameterCost], data: DataParallel, collectives: CollectiveModel, device: Device
    ) -> Unit:
        """What a block with these parameters costs on the data axes."""
        shards, trained = data.mesh.dp_shard, [p for p in parameters if p.trained]
        held = [(p, p.numel) for p in parameters if not p.spread]
        spread_numel = sum([p.numel for p in trained if p.spread])
        parts = [(p, numel if shards == 1 else p.shard_numel(shards)) for p, numel in held]
        trained_shard = sum([part for p, part in parts if p.trained])
        gather_s = reduce_s = replicate_s = 0.0
        if data.uses_fsdp:
            own, around = [part for part in parts if part[0].trained], device.overheads
            gather_s = self.gather_s(parts, data, collectives, device)
            gather_s += around.gather_s + around.gather_parameter_s * len(parts)
            reduce_s = self.reduce_s(own, data, collectives, device)
            reduce_s += around.reduce_s + around.reduce_parameter_s * len(own)
            shard_bytes = data.padded(own) // shards * itemsize(data.precision.reduce)
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
        """Gathering parameters over dp_shard in the compute dtype, and copying the buffer into them."""
        whole = data.padded(parts) * itemsize(data.precision.compute)
        moved_s = collectives.time_s("all_gather", whole, data.mesh, ("dp_shard",))
        return moved_s + 2 * whole / device.memory_bandwidth_bytes_per_s

    def reduce_s(self, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device) -> float:
        """Summing the gradients of trained parameters over dp_shard, and copying them into the buffer that is reduced."""
        return self._reduced_s("reduce_scatter", parts, data, collectives, device)

    def _reduced_s(
        self, kind: str, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device
    ) -> float:
        compute, reduced = itemsize(data.precision.compute), itemsize(data.precision.reduce)
        padded = data.padded(parts)
        moved_s = collectives.time_s(kind, padded * reduced, data.mesh, ("dp_shard",))
        return moved_s + padded * (compute + reduced) / device.memory_bandwidth_bytes_per_s

    def adding_s(self, units: Sequence[Unit], data: DataParallel, num_micro_batches: int, device: Device) -> float:
        """Adding the gradients of a micro-batch to those before, on average over a step: the first ones are only kept."""
        moved, launches = data.added(units, num_micro_batches)
        once = moved / device.memory_bandwidth_bytes_per_s + device.launch_s * launches
        return once * (num_micro_batches - 1) / num_micro_batches

    def message_bytes(self, num_bytes: int, mesh: Mesh) -> float:
        """Of a message between stages what one rank sends."""
        return num_bytes

    def stage_times(
        self, sums: StageSums, messages: StageMessages, mesh: Mesh, collectives: CollectiveModel, device: Device
    ) -> StageTimes:
        """What the pipeline simulates of a stage: ranks wait for no message that they send."""
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
        """What a rank waits once a step for gathers of parameters that then stay gathered: in the first forward of each of its stages."""
        return sum(s.data_first_s for s in sums)

    def late_share(self, device: Device) -> float:
        """Seconds that a rank waits for each second of sums that are left when its last backward ends."""
        return 1.0

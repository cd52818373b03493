"""How programs whose runs were published carry out a step, where they do otherwise than autopar's runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.step.data_parallel import DataParallel, Unit, itemsize
from autopar.cost.step.runtime import Parts, Runtime, StageMessages
from autopar.cost.step.simulation import StageTimes
from autopar.cost.step.step import StageSums, Step
from autopar.hardware.device import Device
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignRuntime(Runtime):
    """A program by its practices (``profiles/sites/practices.toml``); without any of them autopar's own."""

    practices: frozenset[str] = frozenset()

    def data_parallel(self, step: Step, precision: Precision) -> DataParallel:
        """Sums that are late wait for the last backward as those of a pipeline do."""
        is_late = step.mesh.pp > 1 or "late_reductions" in self.practices
        return DataParallel(step.mesh, step.zero_stage, precision, is_late, "reduces_last" in self.practices)

    def gather_s(self, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device) -> float:
        """Each parameter by a broadcast, or all of them by one gather."""
        size = itemsize(data.precision.compute)
        if "broadcasts_parameters" in self.practices:
            sizes = [p.numel * size for p, _ in parts if p.shape]
            return sum(collectives.time_s("broadcast", own, data.mesh, ("dp_shard",)) for own in sizes)
        whole = data.padded(parts) * (1 if "quantized_gathers" in self.practices else size)
        moved_s = collectives.time_s("all_gather", whole, data.mesh, ("dp_shard",))
        return moved_s + 2 * whole / device.memory_bandwidth_bytes_per_s

    def reduce_s(self, parts: Parts, data: DataParallel, collectives: CollectiveModel, device: Device) -> float:
        """By an all-reduce or a reduce-scatter."""
        kind = "all_reduce" if "all_reduces_sums" in self.practices else "reduce_scatter"
        return self._reduced_s(kind, parts, data, collectives, device)

    def adding_s(self, units: Sequence[Unit], data: DataParallel, num_micro_batches: int, device: Device) -> float:
        """Where a kernel casts each gradient, the sums are there from the first micro-batch on, filled with zeros."""
        whole, kept = data.accumulates(num_micro_batches), itemsize(data.precision.storage)
        if data.uses_fsdp and whole:
            kept = itemsize(data.precision.reduce)
        if not ("casts_gradients" in self.practices and whole and kept > itemsize(data.precision.compute)):
            return Runtime.adding_s(self, units, data, num_micro_batches, device)
        moved, launches = data.added(units, num_micro_batches)
        moved += 2 * sum(u.trained_numel + u.spread_numel for u in units) * kept
        return moved / device.memory_bandwidth_bytes_per_s + device.launch_s * (2 * launches)

    def message_bytes(self, num_bytes: int, mesh: Mesh) -> float:
        """A rank's part of ``tp``, where messages are partitioned."""
        return num_bytes / mesh.tp if "partitioned_sends" in self.practices else num_bytes

    def stage_times(
        self, sums: StageSums, messages: StageMessages, mesh: Mesh, collectives: CollectiveModel, device: Device
    ) -> StageTimes:
        """With what a stage waits for messages that block it, gathers what arrived in parts, and copies."""

        def gather_s(size: int) -> float:
            is_gathered = "partitioned_sends" in self.practices
            return collectives.time_s("all_gather", size, mesh, ("tp",)) if is_gathered else 0.0

        forward_waits = backward_waits = 0.0
        if "blocking_sends" in self.practices:
            waits = messages.sent_s + messages.received_s
            forward_waits = waits + gather_s(messages.received_bytes)
            # DeepSpeed gathers a stage's outputs, of which it kept its part, once more beside their gradients
            backward_waits = waits + (2 if "copied_sends" in self.practices else 1) * gather_s(messages.sent_bytes)
        forward_host, backward_host = messages.forward_host_s, messages.backward_host_s
        if "copied_sends" in self.practices:
            copies = copies_s(messages.received_bytes, messages.sent_bytes, mesh.tp, device)
            forward_host, backward_host = forward_host + copies[0], backward_host + copies[1]
        is_free = "blocking_sends" not in self.practices
        return StageTimes(
            forward_s=sums.forward_s + forward_waits + forward_host,
            backward_s=sums.backward_s + backward_waits + backward_host,
            send_forward_s=messages.sent_s + gather_s(messages.sent_bytes) if is_free else 0.0,
            send_backward_s=messages.sent_back_s + gather_s(messages.received_bytes) if is_free else 0.0,
            first_forward_s=0.0 if "gathers_after_step" in self.practices else sums.data_first_s,
            schedule_s=forward_waits + backward_waits + forward_host + backward_host,
        )

    def first_gathers_s(
        self, sums: Sequence[StageSums], units: Sequence[Unit], data: DataParallel, device: Device
    ) -> float:
        """Where they follow the optimizer nothing runs beside them."""
        if "gathers_after_step" not in self.practices:
            return Runtime.first_gathers_s(self, sums, units, data, device)
        if not data.uses_fsdp or data.gathers_always:
            return 0.0
        return sum(unit.gather_s for unit in units) * self.late_share(device)

    def late_share(self, device: Device) -> float:
        """What they slow the computation beside them by, where there is any."""
        return device.interference if "overlapped_reductions" in self.practices else 1.0


def copies_s(received: int, sent: int, ranks: int, device: Device) -> tuple[float, float]:
    """What DeepSpeed's pipeline copies for one forward and one backward of a stage besides its messages, with their kernels.

    By deepspeed/runtime/pipe/engine.py and ``PartitionedTensor`` of deepspeed/runtime/utils.py (0.5 to 0.9): what arrives, a tensor
    and a small one that describes it, is copied when it is received and once more before forward; the part that is sent is a
    copy. A gather fills its output with zeros, copies the rank's part into it, gathers into a list, which c10d copies out of a
    flat buffer one by one, and copies the whole; forward gathers the input, backward the output and its gradient. Nothing
    is cut where ``ranks``, those of ``tp``, are one.

    Args:
        received, sent: bytes of the whole input and the whole output; 0 where the stage has none.
        ranks: of ``tp``.
        device: whose memory copies.
    """

    def gathered(size: int) -> tuple[float, int]:
        return (5 * size + 2 * size / ranks, ranks + 3) if ranks > 1 and size else (0.0, 0)

    def cut(size: int) -> tuple[float, int]:
        return (2 * size / ranks, 1) if ranks > 1 and size else (0.0, 0)

    def seconds(moved: float, launches: int) -> float:
        return moved / device.memory_bandwidth_bytes_per_s + launches * device.launch_s

    # what describes a part travels beside it
    tensors = 2 if ranks > 1 else 1
    arrivals, leavings = tensors * (received > 0), tensors * (sent > 0)
    (bytes_in, launches_in), (bytes_out, launches_out) = gathered(received), gathered(sent)
    cut_out, cut_back = cut(sent), cut(received)
    forward_s = seconds(
        bytes_in + 4 * received / ranks + cut_out[0], launches_in + cut_out[1] + 3 * arrivals + leavings
    )
    backward_s = seconds(2 * bytes_out + cut_back[0], 2 * launches_out + cut_back[1] + arrivals + leavings)
    return forward_s, backward_s

"""One step of a whole plan: its stages on the pipeline ranks, simulated, and the breakdown of its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.step.gradient_buckets import tied
from autopar.cost.step.memory import rank_memory
from autopar.cost.step.simulation import PipelineTimes, StageTimes, simulate
from autopar.cost.step.step import StageCost, StageMessages, StageSums, Step, gathering_share
from autopar.cost.step.step_model import StepModel
from autopar.errors import UsageError
from autopar.hardware.device import Overheads
from autopar.plan.prediction import Breakdown, Memory
from autopar.plan.schedule import check_schedule


class PipelineStep:
    """The stages of one plan in one step.

    Args:
        stages: the stages in the order of the model; stage ``s`` runs on pipeline rank ``s % pp``.
        parts: for each pipeline rank the step on its devices.
        collectives: the collectives of the cluster.
        by_hop: price a message on the link between its two pipeline ranks, not on the slowest of all such links.

    Raises:
        UsageError: the schedule cannot serve these stages and micro-batches.
    """

    def __init__(
        self, stages: Sequence[StageCost], parts: Sequence[StepModel], collectives: CollectiveModel, *, by_hop: bool
    ) -> None:
        self.stages, self.parts, self.collectives, self.by_hop = stages, parts, collectives, by_hop
        self.step, self.data = parts[0].step, parts[0].data
        pp = self.step.mesh.pp
        if not stages or len(stages) % pp:
            raise UsageError(
                f"A pipeline of {pp} ranks cannot have {len(stages)} stages", fix=f"Give a multiple of {pp} stages"
            )
        check_schedule(self.step.schedule, pp, len(stages) // pp, self.step.num_micro_batches)

    def memory(self, ranks: Sequence[int] | None = None) -> tuple[Memory, ...]:
        """Return the peak memory of each pipeline rank, or of the given ranks."""
        step, memory = self.step, []
        for rank in range(step.mesh.pp) if ranks is None else ranks:
            part = self.parts[rank]
            stages = self.stages[rank :: step.mesh.pp]
            memory.append(
                rank_memory(
                    [part.stage_memory(stage) for stage in stages],
                    self.data,
                    copied_bytes=part.copied_bytes(stages),
                    optimizer=part.ranks.optimizer,
                    device=part.ranks.device,
                    step=step,
                    pp_rank=rank,
                )
            )
        return tuple(memory)

    @cached_property
    def sums(self) -> list[StageSums]:
        """What each stage spends on one micro-batch."""
        step, sums = self.step, []
        for s, stage in enumerate(self.stages):
            share = gathering_share(self.data, step.schedule, len(self.stages), step.num_micro_batches, s)
            prelude_s = step.preludes_s[s % step.mesh.pp] if step.preludes_s else step.prelude_s
            part = self.parts[s % step.mesh.pp]
            sums.append(part.stage_sums(stage, share=share, prelude_s=prelude_s))
        return sums

    @cached_property
    def times(self) -> list[StageTimes]:
        """The times of each stage that the pipeline simulates; they depend on the stage, its position and the block before it alone."""
        stages, mesh, times, received_s = self.stages, self.step.mesh, [], 0.0
        for s, sums in enumerate(self.sums):
            ranks = self.parts[s % mesh.pp].ranks
            before = stages[s - 1].blocks[-1] if s and stages[s - 1].blocks else None
            sent = stages[s].blocks[-1].send_bytes if stages[s].blocks and s < len(stages) - 1 else 0
            received = before.send_gradient_bytes if before is not None else 0
            host_s = self._host_s(s, ranks.device.overheads)
            messages = StageMessages(
                sent_bytes=sent,
                received_bytes=received,
                sent_s=self._send_s(sent, s),
                sent_back_s=self._send_s(received, s - 1),
                received_s=received_s,
                forward_host_s=host_s[0],
                backward_host_s=host_s[1],
            )
            received_s = messages.sent_s
            times.append(ranks.runtime.stage_times(sums, messages, mesh, self.collectives, ranks.device))
        return times

    def breakdown(self, simulated: PipelineTimes | None = None) -> Breakdown:
        """Return the breakdown of the step on the rank that finishes last, idle time included.

        Args:
            simulated: the times of the pipeline, if it is simulated already.
        """
        step, ties = self.step, tied([stage.blocks for stage in self.stages], self.data)
        pipeline = simulated or simulate(step.schedule, step.mesh.pp, step.num_micro_batches, self.times)
        breakdowns = [self._of_rank(rank, pipeline, ties) for rank in range(step.mesh.pp)]
        return max(breakdowns, key=lambda breakdown: breakdown.total_s)

    def _send_s(self, num_bytes: int, sender: int) -> float:
        """Return the seconds of a message to or from the stage after ``sender``."""
        mesh = self.step.mesh
        size = self.parts[0].ranks.runtime.message_bytes(num_bytes, mesh)
        return self.collectives.send_time_s(size, mesh, sender % mesh.pp if self.by_hop and mesh.pp > 1 else None)

    def _host_s(self, s: int, overheads: Overheads) -> tuple[float, float]:
        """Return the host's seconds for the schedule and its messages in one forward and in one backward of a stage."""
        stages, pp = self.stages, self.step.mesh.pp
        if pp == 1:
            return 0.0, 0.0
        action_s, message_s = overheads.of_actions(len(stages) // pp)
        neighbours = [stages[j].blocks[-1] for j in (s - 1, s) if 0 <= j < len(stages) - 1 and stages[j].blocks]
        tensors = sum(len(block.sends) for block in neighbours)
        gradients = sum(len(block.send_gradients) for block in neighbours)
        return action_s + message_s * tensors, action_s + message_s * gradients

    def _of_rank(self, rank: int, pipeline: PipelineTimes, ties: Mapping[tuple[int, ...], int]) -> Breakdown:
        """Return the breakdown of the step as if this rank finished last."""
        pp, count, part, data = self.step.mesh.pp, self.step.num_micro_batches, self.parts[rank], self.data
        stages, sums = self.stages[rank::pp], self.sums[rank::pp]
        units = [part.units(stage) for stage in stages]
        flat = [unit for stage in units for unit in stage]
        device, runtime = part.ranks.device, part.ranks.runtime
        sent = part.gradients_s(stages)
        tail = sum(data.tail_s(stage) for stage in units) + sum(s.data_last_s for s in sums)
        tail *= runtime.late_share(device)
        tail += sent["data"] + ties_s(self.collectives, ties, self.step, rank) + part.scalars_s
        first = runtime.first_gathers_s(sums, flat, data, device)
        always = sum(s.data_forward_s + s.data_backward_s for s in sums)
        optimizer_s, offload_s = part.stepped_s(flat)
        exposed_s = pipeline.exposed_send_s[rank]
        return Breakdown(
            compute_s=count * sum(s.compute_s for s in sums),
            recompute_s=count * sum(s.recompute_s for s in sums),
            tensor_parallel_s=count * sum(s.tensor_parallel_s for s in sums) + sent["tp"],
            context_parallel_s=count * sum(s.context_parallel_s for s in sums) + sent["cp"],
            data_parallel_s=count * always + first + tail,
            pipeline_s=exposed_s + count * sum(stage.schedule_s for stage in self.times[rank::pp]),
            bubble_s=max(pipeline.finish_s[rank] - pipeline.busy_s[rank] - exposed_s, 0.0),
            optimizer_s=optimizer_s + part.launched_s(flat),
            offload_s=offload_s + count * sum(s.offload_s for s in sums),
        )


def ties_s(collectives: CollectiveModel, ties: Mapping[tuple[int, ...], int], step: Step, rank: int) -> float:
    """Return the seconds of summing gradients of parameters on several ranks (:func:`autopar.cost.step.gradient_buckets.tied`)."""
    seconds = 0.0
    for ranks, num_bytes in ties.items():
        if rank in ranks:
            if len(ranks) == step.mesh.pp:
                seconds += collectives.time_s("all_reduce", num_bytes, step.mesh, ("pp",))
            else:
                seconds += collectives.pair_time_s("all_reduce", num_bytes, step.mesh)
    return seconds

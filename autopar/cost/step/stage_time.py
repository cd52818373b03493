"""Times of one stage for one micro-batch: what they are made of, and what the simulation of the pipeline takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.step.data_parallel import DataParallel, Unit
from autopar.cost.step.memory import StageCost
from autopar.cost.step.simulation import StageTimes
from autopar.cost.step.step import Step
from autopar.device import Device, Overheads
from autopar.host import HostLink
from autopar.plan import Recompute

StageKey: TypeAlias = tuple[tuple[int, ...], tuple[Recompute, ...]]


def stage_key(stage: StageCost) -> StageKey:
    """Equal for stages of the same blocks that recompute alike, for as long as the blocks are there."""
    return tuple(map(id, stage.blocks)), stage.recompute


@dataclass(frozen=True, slots=True)
class StageSums:
    """Seconds of one stage and micro-batch by what they are spent on."""

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
    """Forward and backward with the block's own collectives."""
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
    """What a stage spends on one micro-batch.

    Args:
        stage: its blocks.
        units: of FSDP, one for each block.
        data: how the data axes run.
        share: of the forwards that gather parameters anew.
        interference: of the device.
        prelude_s: of the operators that every stage repeats.
        adding_s: of gradients to those of the micro-batches before.
    """
    forward = [block.forward_s + block.communication_forward_s for block in stage.blocks]
    backward = [own_times(block, mode)[1] for block, mode in zip(stage.blocks, stage.recompute, strict=True)]
    again = [block for block, mode in zip(stage.blocks, stage.recompute, strict=True) if mode == "full"]
    remade_s = [b.remade.time_s for b, mode in zip(stage.blocks, stage.recompute, strict=True) if mode == "selective"]
    sent = sum(b.communication_forward_s + b.communication_backward_s for b in stage.blocks)
    sent += sum(b.communication_again_s for b in again)
    context = sum(b.context_forward_s + b.context_backward_s for b in stage.blocks)
    context += sum(b.context_again_s for b in again)
    data_forward = share * data.every_forward_s(units, forward, interference)
    data_backward = data.backward_s(units, backward, interference, is_last=False)
    return StageSums(
        compute_s=sum(b.forward_s + b.backward_s for b in stage.blocks) + prelude_s + adding_s,
        recompute_s=sum(b.forward_s for b in again) + sum(remade_s),
        tensor_parallel_s=max(sent - context, 0.0),
        context_parallel_s=context,
        data_forward_s=data_forward,
        data_backward_s=data_backward,
        data_first_s=data.first_forward_s(units, forward, interference),
        data_last_s=data.backward_s(units, backward, interference, is_last=True) - data_backward,
        forward_s=sum(forward) + data_forward + prelude_s,
        backward_s=sum(backward) + data_backward + adding_s,
    )


def moving(sums: StageSums, stage: StageCost, host: HostLink) -> StageSums:
    """With the seconds that forward and backward wait for what blocks keep on its way to and from the host.

    Forward waits, at the end of each block that moves, for the copies of the one before, of the micro-batch before where it is
    the first. Backward begins to bring a block back when it reaches the next one that moves; the last one is only then asked for.
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
        beside = (
            forward[here + 1 : after + 1] if after is not None else [*forward[here + 1 :], *forward[: places[0] + 1]]
        )
        down_s += max(down - sum(beside), 0.0)
        up_s += max(up - sum(backward[here + 1 : after + 1]), 0.0) if after is not None else up
    return replace(sums, forward_s=sums.forward_s + down_s, backward_s=sums.backward_s + up_s, offload_s=down_s + up_s)


def stage_times(
    stages: Sequence[StageCost],
    sums: Sequence[StageSums],
    step: Step,
    collectives: CollectiveModel,
    devices: Sequence[Device],
    *,
    by_hop: bool = False,
) -> list[StageTimes]:
    """What the pipeline simulates of each stage, in order of the model.

    Args:
        devices: of each pipeline rank.
        by_hop: messages are priced on the link between the two pipeline ranks, not on the slowest of all such links.
    """
    times = []
    received, pp = 0.0, step.mesh.pp
    known: dict[tuple[int, int | None], float] = {}

    def send_s(size: int, sender: int) -> float:
        hop = sender % pp if by_hop and pp > 1 else None
        if (size, hop) not in known:
            known[size, hop] = _send_s(size, step, collectives, hop)
        return known[size, hop]

    def gather_s(size: int) -> float:
        return collectives.time_s("all_gather", size, step.mesh, ("tp",)) if step.partitioned_sends else 0.0

    for i, (stage, own) in enumerate(zip(stages, sums, strict=True)):
        forward_send = stage.blocks[-1].send_bytes if stage.blocks and i < len(stages) - 1 else 0
        before = stages[i - 1].blocks[-1] if i and stages[i - 1].blocks else None
        backward_send = before.send_gradient_bytes if before is not None else 0
        sent, sent_back = send_s(forward_send, i), send_s(backward_send, i - 1)
        forward_waits = backward_waits = 0.0
        if step.blocking_sends:
            forward_waits = sent + received + gather_s(backward_send)
            # DeepSpeed gathers a stage's outputs, of which it kept its part, once more beside their gradients
            backward_waits = sent + received + (1 + step.copied_sends) * gather_s(forward_send)
        received = sent
        forward_host, backward_host = _host_s(stages, i, pp, devices[i % pp].overheads)
        if step.copied_sends:
            copies = copies_s(backward_send, forward_send, step.mesh.tp, devices[i % pp])
            forward_host, backward_host = forward_host + copies[0], backward_host + copies[1]
        times.append(
            StageTimes(
                forward_s=own.forward_s + forward_waits + forward_host,
                backward_s=own.backward_s + backward_waits + backward_host,
                send_forward_s=0.0 if step.blocking_sends else sent + gather_s(forward_send),
                send_backward_s=0.0 if step.blocking_sends else sent_back + gather_s(backward_send),
                first_forward_s=0.0 if step.gathers_after_step else own.data_first_s,
                schedule_s=forward_waits + backward_waits + forward_host + backward_host,
            )
        )
    return times


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


def _host_s(stages: Sequence[StageCost], i: int, pp: int, overheads: Overheads) -> tuple[float, float]:
    """What the schedule and its messages take of the cores for one forward and one backward of stage ``i``."""
    if pp == 1:
        return 0.0, 0.0
    action_s, message_s = overheads.of_actions(len(stages) // pp)
    neighbours = [stages[j].blocks[-1] for j in (i - 1, i) if 0 <= j < len(stages) - 1 and stages[j].blocks]
    tensors = sum(len(block.sends) for block in neighbours)
    gradients = sum(len(block.send_gradients) for block in neighbours)
    return action_s + message_s * tensors, action_s + message_s * gradients


def _send_s(num_bytes: int, step: Step, collectives: CollectiveModel, hop: int | None) -> float:
    """``hop``: the pipeline rank before the link; None: the slowest link of all."""

    def alone(size: float) -> float:
        return collectives.send_time_s(size, step.mesh) if hop is None else collectives.hop_time_s(size, step.mesh, hop)

    return alone(num_bytes / step.mesh.tp if step.partitioned_sends else num_bytes)

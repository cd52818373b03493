"""Seconds of one stage for one micro-batch, by what they are spent on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.step.data_parallel import DataParallel, Unit
from autopar.cost.step.step import StageCost
from autopar.host import HostLink
from autopar.plan import Recompute
from autopar.schedule import schedule_actions


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


def gathering_share(data: DataParallel, schedule: str, num_stages: int, num_micro_batches: int, stage: int) -> float:
    """Of a stage's forwards under ZeRO 3 those that gather: in a pipeline not those right after a backward."""
    if not (data.gathers_always and data.is_pipelined):
        return 1.0
    return (
        1
        - _after_backwards(schedule, data.mesh.pp, num_stages // data.mesh.pp, num_micro_batches)[stage]
        / num_micro_batches
    )


@lru_cache(maxsize=256)
def _after_backwards(schedule: str, pp: int, virtual_stages: int, num_micro_batches: int) -> tuple[int, ...]:
    """For each stage how many of its forwards come right after a backward of its own."""
    found = [0] * (pp * virtual_stages)
    for actions in schedule_actions(schedule, pp, virtual_stages, num_micro_batches):
        before: dict[int, str] = {}
        for action in actions:
            found[action.stage] += action.kind == "F" and before.get(action.stage) == "B"
            before[action.stage] = action.kind
    return tuple(found)

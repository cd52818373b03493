"""The price of what a block does: its operators on a device, its collectives on the links."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost.blocks.block_collectives import Message
from autopar.cost.blocks.block_cost import BlockCost
from autopar.cost.blocks.block_work import BlockWork
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.operators.roofline import OperatorTimes, OpTime, time_of_work
from autopar.device import Device
from autopar.mesh import Mesh


def price_block(
    done: BlockWork,
    mesh: Mesh,
    device: Device,
    collectives: CollectiveModel,
    *,
    quantized: str | None = None,
    exposed: Callable[[Message], float] | None = None,
    measured: OperatorTimes | None = None,
) -> BlockCost:
    """The cost of a block's work on a device and its links.

    Args:
        quantized: see :func:`time_of_work`.
        exposed: seconds that the block waits for each second of a collective; None: all of it, as the runtime does.
        measured: times of operators that go before the roofline, unless they are fused or quantized.
    """
    times: list[OpTime] = []
    for i, first in enumerate(done.same or range(len(done.ops))):
        own = times[first] if first < i else time_of_work(done.works[i], done.ops[i], device, quantized=quantized)
        times.append(own)
    if measured is not None and quantized is None and done.operands:
        times = [measured.time(op, own, t) for op, own, t in zip(done.ops, done.operands, times, strict=True)]
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    fan_in_s = sum(size / bandwidth + device.launch_s for size in done.fan_in)
    calls = [device.overheads.collective_s * (mesh.size((m.axis,)) > 1) for m in done.shape.messages]
    seconds, context = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    again_s = context_again_s = 0.0
    for message, call_s in zip(done.shape.messages, calls, strict=True):
        share = 1.0 if exposed is None else exposed(message)
        time_s = share * collectives.time_s(message.kind, message.num_bytes, mesh, (message.axis,)) + call_s
        in_context = time_s if message.axis == "cp" else 0.0
        seconds[message.backward] += time_s
        context[message.backward] += in_context
        if message.repeated and not message.backward:
            again_s += time_s
            context_again_s += in_context
    selective = done.shape.selective
    if selective is not None:
        selective = replace(selective, time_s=sum(times[i].forward_s for i in done.remade))
    return replace(
        done.shape,
        selective=selective,
        forward_s=sum([time.forward_s for time in times]),
        backward_s=sum([time.backward_s for time in times]) + fan_in_s + sum([times[i].forward_s for i in done.again]),
        communication_forward_s=seconds[False],
        communication_backward_s=seconds[True],
        context_forward_s=context[False],
        context_backward_s=context[True],
        communication_again_s=again_s,
        context_again_s=context_again_s,
    )

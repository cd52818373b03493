"""Time of one operator on one device: the roofline of its profile."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.work import Specs, Work, work
from autopar.device import Device
from autopar.graph.ir import Op


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one operator on one rank."""

    forward_s: float
    backward_s: float


def op_time(op: Op, operands: Specs, device: Device) -> OpTime:
    """``max(flops / rate, bytes / bandwidth) + launches``, forward and backward.

    Args:
        op: with local output specs.
        operands: local specs of its operands.
        device: whose profile gives rate, bandwidth and launch time.

    Raises:
        UsageError: the profile has no matmul rate for the dtype.
    """
    return time_of_work(work(op, operands, device.kind), op, device)


def time_of_work(done: Work, op: Op, device: Device) -> OpTime:
    """The time of work that is known already."""
    forward = done.num_bytes / device.memory_bandwidth_bytes_per_s
    backward = done.backward_bytes / device.memory_bandwidth_bytes_per_s
    if done.flops:
        matmul = device.rate(str(op.spec.dtype).removeprefix("torch."))
        rate = matmul.flops_per_s(done.smallest_dim)
        if done.is_attention:
            rate = matmul.ceiling_flops_per_s * matmul.attention_fraction
        forward = max(forward, done.flops / rate)
        backward = max(backward, done.backward_flops / rate)
    return OpTime(forward + done.launches * device.launch_s, backward + done.backward_launches * device.launch_s)

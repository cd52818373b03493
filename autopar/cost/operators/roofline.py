"""Time of one operator on one device: the roofline of its profile.

Mixtures of experts (``autopar.ops.experts``) run in grouped products or in a loop, and the host waits for their routing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from autopar.cost.operators.work import LINEAR, VIEWS, Product, Specs, work
from autopar.cost.operators.work_record import Work
from autopar.graph.graph import Op
from autopar.hardware.device import Device
from autopar.hardware.device_rates import MatmulRate

ONE_RANK = "autopar.experts"
EXPERT_TARGETS = frozenset((ONE_RANK, *(f"{ONE_RANK}_{name}" for name in ("split", "dispatch", "dispatch_split"))))

_GROUPED = re.compile(r"(?<![a-z0-9])(g?h(20|100|200|800)|g?b(100|200|300))(?![a-z0-9])")
"""Names of GPUs of compute capability 9 and 10; any other one is priced as reading and looping, which all can do."""

_ALIGNMENT = 8  # elements of bfloat16 in 16 bytes


@dataclass(frozen=True, slots=True)
class OpTime:
    """Seconds of one operator on one rank."""

    forward_s: float
    backward_s: float


class OperatorTimes(Protocol):
    """Times that go before the roofline; see :class:`autopar.cost.operators.measured.Measured`."""

    def time(self, op: Op, operands: Specs, roofline: OpTime) -> OpTime:
        """Seconds of an operator; ``roofline`` where nothing else is known."""


def op_time(
    op: Op, operands: Specs, device: Device, measured: OperatorTimes | None = None, *, quantized: str | None = None
) -> OpTime:
    """``max(flops / rate, bytes / bandwidth) + launches``, forward and backward, unless it was measured.

    Args:
        op: with local output specs.
        operands: local specs of its operands.
        device: whose profile gives rate, bandwidth and launch time.
        measured: times of the device's operators, where there are any; they are of no quantized products.
        quantized: see :func:`time_of_work`.

    Raises:
        UsageError: the profile has no matmul rate for the dtype.
    """
    roofline = time_of_work(work(op, operands, device.kernel_kind), op, device, quantized=quantized)
    return roofline if measured is None or quantized is not None else measured.time(op, operands, roofline)


def time_of_work(done: Work, op: Op, device: Device, *, quantized: str | None = None) -> OpTime:
    """The time of work that is known already.

    Args:
        quantized: dtype in which products of activations and weights multiply where it is not the operator's own
            (fp8 recipes); each of their operands is then cast once more.
    """
    has_experts = op.target in EXPERT_TARGETS
    done = experts_as_run(done, op, device) if has_experts else done
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    forward, backward = done.num_bytes / bandwidth, done.backward_bytes / bandwidth
    function = device.function(done.function) if done.function else None
    if function is not None:
        forward = max(forward, done.elements * function.forward_s)
        backward = max(backward, done.elements * function.backward_s * bool(done.backward_launches))
    if done.flops:
        dtype = op.spec.dtype
        own = done.dtype or str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")
        is_weighted = quantized is not None and op.target in LINEAR
        rate = device.rate(quantized if is_weighted and quantized else own)
        forward = max(forward, _products_s(done.flops, done.products, done, rate, backward=False))
        backward = max(backward, _products_s(done.backward_flops, done.backward_products, done, rate, backward=True))
        if is_weighted:  # read, and written at one byte an element in both orders
            forward += 2 * done.num_bytes / bandwidth
            backward += done.num_bytes / bandwidth
    backward += done.beside_bytes / bandwidth
    if op.target in VIEWS:
        forward += device.overheads.view_s
        backward += device.overheads.view_s * op.spec.requires_grad
    forward += done.launches * device.launch_s + done.matmuls * device.overheads.product_s
    backward += done.backward_launches * device.gradient_s + done.backward_matmuls * device.overheads.product_gradient_s
    forward += experts_wait_s(op, device) if has_experts else 0.0
    return OpTime(forward, backward)


def _products_s(flops: float, products: tuple[Product, ...], done: Work, rate: MatmulRate, *, backward: bool) -> float:
    if done.is_attention:
        return flops / rate.attention_flops_per_s(done.smallest_dim, backward=backward)
    if not products or not rate.num_units:
        return flops / rate.flops_per_s(done.smallest_dim, backward=backward)
    return sum([p.flops / rate.product_flops_per_s(p.count, p.rows, p.columns, p.depth) for p in products])


# --- mixtures of experts


def experts_as_run(done: Work, op: Op, device: Device) -> Work:
    """The work with the launches of grouped products, where these are used: one for all experts instead of one each."""
    if not _is_grouped(op, device):
        return done
    held = 3 if op.args[3] is not None else 2
    spared = done.matmuls // held - 1
    return replace(
        done,
        launches=done.launches - (held + 2) * spared,
        backward_launches=max(done.backward_launches - (2 * held + 2) * spared, 0),
    )


def experts_wait_s(op: Op, device: Device) -> float:
    """Seconds of a forward, in backward too where that recomputes it, in which the host waits: ``reads * time_of_one``.

    ``reads`` is 1, or 0 on a CPU and for all experts of one rank in grouped products. A read drains the queue, so what
    is launched next is exposed; ``time_of_one`` is the profile's time of a launch that the host waits for
    (``blocking_launch_s``, with the provenance of its launches; where it has none, that of a launch).
    """
    if device.kind == "cpu" or (op.target == ONE_RANK and _is_grouped(op, device)):
        return 0.0
    return device.blocking_launch_s or device.launch_s


def _is_grouped(op: Op, device: Device) -> bool:
    is_fitting = op.spec.dtype == torch.bfloat16 and op.spec.shape[-1] % _ALIGNMENT == 0
    return device.kind == "cuda" and is_fitting and _GROUPED.search(device.name.lower()) is not None

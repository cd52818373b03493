"""Time of one operator on one device: the roofline of its profile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from autopar.cost.operators import experts
from autopar.cost.operators.work import LINEAR, VIEWS, Product, Specs, Work, work
from autopar.device import Device
from autopar.graph.ir import Op
from autopar.rates import MatmulRate


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
    op: Op,
    operands: Specs,
    device: Device,
    measured: OperatorTimes | None = None,
    *,
    quantized: str | None = None,
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
    has_experts = op.target in experts.TARGETS
    done = experts.as_run(done, op, device) if has_experts else done
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
    forward += experts.waiting_s(op, device) if has_experts else 0.0
    return OpTime(forward, backward)


def _products_s(flops: float, products: tuple[Product, ...], done: Work, rate: MatmulRate, *, backward: bool) -> float:
    if done.is_attention:
        return flops / rate.attention_flops_per_s(done.smallest_dim, backward=backward)
    if not products or not rate.num_units:
        return flops / rate.flops_per_s(done.smallest_dim, backward=backward)
    return sum([p.flops / rate.product_flops_per_s(p.count, p.rows, p.columns, p.depth) for p in products])

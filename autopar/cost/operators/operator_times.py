"""Time of one operator on one device: as measured, or by the roofline of the device's profile.

Measured operators are looked up by their exact shapes, and otherwise interpolated between sizes of their kind. The *size* of an operator is
its roofline time on the device, so that one number orders shapes of any rank. Between two measured sizes of a kind the time is interpolated
in log space. Beyond them the roofline is scaled by its ratio at the nearest measured size. Kinds without a measurement have the roofline.

Mixtures of experts (``autopar.ops.experts``) run in grouped products or in a loop, and the host waits for their routing.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch

from autopar.cost.operators.work import COLLECTIVES, LINEAR, VIEWS, Product, Specs, work
from autopar.cost.operators.work_record import Work
from autopar.errors import UsageError
from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.hardware.device import Device, MatmulRate
from autopar.hardware.link import OperatorTable
from autopar.rules.apply import OVER_DATA
from autopar.rules.other_kernels import EXPERT_TARGETS as SPLIT_EXPERTS
from autopar.rules.strategy import FORM_AT

ONE_RANK = "autopar.experts"
EXPERT_TARGETS = SPLIT_EXPERTS | {ONE_RANK}

_GROUPED = re.compile(r"(?<![a-z0-9])(g?h(20|100|200|800)|g?b(100|200|300))(?![a-z0-9])")
"""Names of GPUs of compute capability 9 and 10, which have grouped products; any other is priced as reading the routing and looping."""

_ALIGNMENT = 8  # elements of bfloat16 in 16 bytes


@dataclass(frozen=True, slots=True)
class OpTime:
    """The seconds of one operator on one rank."""

    forward_s: float
    backward_s: float


class OperatorTimes(Protocol):
    """Times that replace the roofline; see :class:`autopar.cost.operators.operator_times.Measured`."""

    def time(self, op: Op, operands: Specs, roofline: OpTime) -> OpTime:
        """Return the seconds of an operator; ``roofline`` where nothing else is known."""


def op_time(
    op: Op, operands: Specs, device: Device, measured: OperatorTimes | None = None, *, quantized: str | None = None
) -> OpTime:
    """Return ``max(flops / rate, bytes / bandwidth) + launches``, forward and backward, or the measured time.

    Args:
        op: the operator, with local output specs.
        operands: the local specs of its operands.
        device: the device, whose profile gives rate, bandwidth and launch time.
        measured: the times of the device's operators, if any; they do not hold for quantized products.
        quantized: see :func:`time_of_work`.

    Raises:
        UsageError: the profile has no matmul rate for the dtype.
    """
    roofline = time_of_work(work(op, operands, device.kernel_kind), op, device, quantized=quantized)
    return roofline if measured is None or quantized is not None else measured.time(op, operands, roofline)


def time_of_work(op_work: Work, op: Op, device: Device, *, quantized: str | None = None) -> OpTime:
    """Return the time of work that is already counted.

    Args:
        op_work: the work.
        op: the operator.
        device: the device.
        quantized: the dtype of products of activations and weights where it is not the operator's (fp8 recipes); each of their operands is
            then cast once more.
    """
    has_experts = op.target in EXPERT_TARGETS
    op_work = experts_as_run(op_work, op, device) if has_experts else op_work
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernel_fraction
    forward, backward = op_work.num_bytes / bandwidth, op_work.backward_bytes / bandwidth
    function = device.function(op_work.function) if op_work.function else None
    if function is not None:
        forward = max(forward, op_work.elements * function.forward_s)
        backward = max(backward, op_work.elements * function.backward_s * bool(op_work.backward_launches))
    if op_work.flops:
        dtype = op.spec.dtype
        product_dtype = op_work.dtype or str(dtype.to_real() if dtype.is_complex else dtype).removeprefix("torch.")
        is_weighted = quantized is not None and op.target in LINEAR
        rate = device.rate(quantized if is_weighted and quantized else product_dtype)
        forward = max(forward, _products_s(op_work.flops, op_work.products, op_work, rate, backward=False))
        backward = max(
            backward, _products_s(op_work.backward_flops, op_work.backward_products, op_work, rate, backward=True)
        )
        if is_weighted:  # each operand is read, and written at one byte an element in both orders
            forward += 2 * op_work.num_bytes / bandwidth
            backward += op_work.num_bytes / bandwidth
    backward += op_work.backward_extra_bytes / bandwidth
    if op.target in VIEWS:
        forward += device.overheads.view_s
        backward += device.overheads.view_s * op.spec.requires_grad
    forward += op_work.launches * device.launch_s + op_work.matmuls * device.overheads.product_s
    backward += (
        op_work.backward_launches * device.gradient_s + op_work.backward_matmuls * device.overheads.product_gradient_s
    )
    forward += experts_wait_s(op, device) if has_experts else 0.0
    return OpTime(forward, backward)


def _products_s(
    flops: float, products: tuple[Product, ...], op_work: Work, rate: MatmulRate, *, backward: bool
) -> float:
    if op_work.is_attention:
        return flops / rate.attention_flops_per_s(op_work.smallest_dim, backward=backward)
    if not products or not rate.num_units:
        return flops / rate.flops_per_s(op_work.smallest_dim, backward=backward)
    return sum([p.flops / rate.product_flops_per_s(p.count, p.rows, p.columns, p.depth) for p in products])


# --- mixtures of experts


def experts_as_run(op_work: Work, op: Op, device: Device) -> Work:
    """Return the work with one launch for all experts where grouped products are used, instead of one for each expert."""
    if not _is_grouped(op, device):
        return op_work
    num_matrices = 3 if op.args[3] is not None else 2
    biases = sum(arg is not None for arg in op.args[6:FORM_AT])
    num_spared = op_work.matmuls // num_matrices - 1
    return replace(
        op_work,
        launches=op_work.launches - (num_matrices + 2) * num_spared,
        backward_launches=max(op_work.backward_launches - (2 * num_matrices + 2 + biases) * num_spared, 0),
    )


def experts_wait_s(op: Op, device: Device) -> float:
    """Return the seconds that the host waits in a forward, and in backward where that recomputes it: ``reads * time_of_one``.

    ``reads`` is 1, or 0 on a CPU and for all experts of one rank in grouped products. A read drains the queue, so that the next launch is
    exposed. ``time_of_one`` is the profile's time of a launch that the host waits for (``blocking_launch_s``, with the provenance of its
    launches), or that of a launch where the profile has none.
    """
    if device.kind == "cpu" or (op.target == ONE_RANK and _is_grouped(op, device)):
        return 0.0
    return device.blocking_launch_s or device.launch_s


def _is_grouped(op: Op, device: Device) -> bool:
    is_fitting = op.spec.dtype == torch.bfloat16 and op.spec.shape[-1] % _ALIGNMENT == 0
    return device.kind == "cuda" and is_fitting and _GROUPED.search(device.name.lower()) is not None


Source = Literal["measured", "interpolated", "scaled", "roofline"]
Key = tuple[object, ...]

NOT_ALONE = SPLIT_EXPERTS | {"autopar.opaque", OVER_DATA, "autopar.attention_ring", "autopar.attention_gathered"}
"""Operators that one process cannot run at the shapes of one rank."""


def is_measurable(op: Op) -> bool:
    """Return whether one process can time the operator alone; views and changes of type have no work to time."""
    return op.target not in VIEWS and op.target not in COLLECTIVES and op.target not in NOT_ALONE


def key_of(op: Op, operands: Specs) -> Key:
    """Return a key that is equal for operators of equal time: target, literals, specs; of a float only whether it is zero."""
    specs = iter(operands)
    args = tuple(_exact(argument, specs) for argument in op.args)
    kwargs = tuple((name, _exact(value, specs)) for name, value in op.kwargs)
    return op.target, args, kwargs, any(spec.requires_grad for spec in op.outputs)


def kind_of(op: Op, operands: Specs) -> Key:
    """Return a key that is equal for operators that differ only in sizes.

    Integers and shapes do not count; the number of dims and dtypes do.
    """
    literals = (*op.args, *(value for _, value in op.kwargs))
    tensors = tuple((spec.dtype, len(spec.shape), spec.requires_grad) for spec in operands)
    return op.target, tuple(_coarse(literal) for literal in literals), tensors


def _exact(argument: Argument, specs: Iterator[TensorSpec]) -> object:
    if isinstance(argument, Ref):
        return next(specs)
    if isinstance(argument, tuple):
        return tuple(_exact(item, specs) for item in argument)
    return argument != 0.0 if isinstance(argument, float) else argument


def _coarse(argument: Argument) -> object:
    if isinstance(argument, tuple):
        return "list"
    if isinstance(argument, float):
        return argument != 0.0
    return type(argument) if isinstance(argument, Ref | int) and not isinstance(argument, bool) else argument


# --- as text


def encode(op: Op, operands: Specs) -> str:
    """Return the call as :class:`autopar.hardware.link.OperatorTime` stores it."""
    specs = iter(operands)
    args = [_plain(argument, specs) for argument in op.args]
    kwargs = {name: _plain(value, specs) for name, value in op.kwargs}
    return json.dumps([op.target, args, kwargs, [_tensor(spec) for spec in op.outputs]], separators=(",", ":"))


def _plain(argument: Argument, specs: Iterator[TensorSpec]) -> object:
    if isinstance(argument, Ref):
        return _tensor(next(specs))
    if isinstance(argument, tuple):
        return [_plain(item, specs) for item in argument]
    for kind in ("dtype", "device", "memory_format", "layout"):
        if isinstance(argument, getattr(torch, kind)):
            return {kind: str(argument).removeprefix("torch.")}
    return argument


def _tensor(spec: TensorSpec) -> dict[str, object]:
    return {"tensor": [str(spec.dtype).removeprefix("torch."), list(spec.shape), spec.requires_grad]}


def decode(text: str) -> tuple[Op, tuple[TensorSpec, ...]]:
    """Return what :func:`encode` wrote; operands are named by their position.

    Raises:
        UsageError: the text is no call.
    """
    operands: list[TensorSpec] = []

    def read(value: Any) -> Argument:
        if isinstance(value, list):
            return tuple(read(item) for item in value)
        if not isinstance(value, dict):
            found: Argument = value
            return found
        ((kind, inner),) = value.items()
        if kind == "tensor":
            operands.append(_spec(inner))
            return Ref(f"x{len(operands) - 1}")
        return torch.device(inner) if kind == "device" else getattr(torch, inner)

    try:
        target, args, kwargs, outputs = json.loads(text)
        op = Op(
            name="y",
            target=target,
            args=tuple(read(argument) for argument in args),
            kwargs=tuple((name, read(value)) for name, value in kwargs.items()),
            outputs=tuple(_spec(output["tensor"]) for output in outputs),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(
            f"The measured time of '{text[:200]}' names no call of an operator",
            fix="Measure the operators again with 'autopar profile ops'",
        ) from error
    return op, tuple(operands)


def _spec(value: Any) -> TensorSpec:
    dtype, shape, requires_grad = value
    return TensorSpec(shape=tuple(shape), dtype=getattr(torch, dtype), requires_grad=bool(requires_grad))


# --- looking up


class _Curve:
    """Seconds by size of one kind of operator in one direction."""

    def __init__(self, points: list[tuple[float, float]]) -> None:
        by_size: dict[float, list[float]] = {}
        for size, time_s in points:
            by_size.setdefault(math.log(size), []).append(math.log(time_s))
        self.sizes = sorted(by_size)
        self.times = [sum(by_size[size]) / len(by_size[size]) for size in self.sizes]

    def time_s(self, size: float) -> tuple[float, bool]:
        """Return the seconds, and whether the size lies between measured ones."""
        at = math.log(size)
        if self.sizes[0] <= at <= self.sizes[-1]:
            return math.exp(np.interp(at, self.sizes, self.times)), True
        nearest = 0 if at < self.sizes[0] else -1
        return size * math.exp(self.times[nearest] - self.sizes[nearest]), False


class Measured:
    """Times of a device's operators by its measured table.

    Args:
        table: the measured times.
        device: the device whose roofline orders the sizes.

    Raises:
        UsageError: an entry of the table is no call, or the device has no rate for its dtype.
    """

    def __init__(self, table: OperatorTable, device: Device) -> None:
        self._exact: dict[Key, OpTime] = {}
        points: dict[tuple[Key, bool], list[tuple[float, float]]] = {}
        for entry in table.times:
            op, operands = decode(entry.call)
            time = OpTime(entry.forward_s * table.scale, entry.backward_s * table.scale)
            self._exact[key_of(op, operands)] = time
            size, kind = op_time(op, operands, device), kind_of(op, operands)
            pairs = ((False, size.forward_s, time.forward_s), (True, size.backward_s, time.backward_s))
            for backward, size_s, time_s in pairs:
                if size_s > 0 and time_s > 0:
                    points.setdefault((kind, backward), []).append((size_s, time_s))
        self._curves = {key: _Curve(curve_points) for key, curve_points in points.items()}

    def time(self, op: Op, operands: Specs, roofline: OpTime) -> OpTime:
        """Return the seconds of an operator; ``roofline`` is its time without a measurement."""
        return self.find(op, operands, roofline)[0]

    def find(self, op: Op, operands: Specs, roofline: OpTime) -> tuple[OpTime, Source]:
        """Return the seconds of an operator and their source."""
        if not is_measurable(op):
            return roofline, "roofline"
        exact = self._exact.get(key_of(op, operands))
        if exact is not None:
            return exact, "measured"
        kind = kind_of(op, operands)
        seconds, is_between, has_curve = [roofline.forward_s, roofline.backward_s], True, False
        for i, size in enumerate(seconds):
            curve = self._curves.get((kind, i == 1)) if size > 0 else None
            if curve is not None:
                seconds[i], is_inside = curve.time_s(size)
                has_curve, is_between = True, is_between and is_inside
        if not has_curve:
            return roofline, "roofline"
        return OpTime(*seconds), "interpolated" if is_between else "scaled"


class Recorder:
    """Takes the place of :class:`Measured` and records the calls that are asked for; every time is the roofline's."""

    def __init__(self) -> None:
        self.calls: dict[Key, str] = {}

    def time(self, op: Op, operands: Specs, roofline: OpTime) -> OpTime:
        """Return ``roofline`` and records the call; see :class:`Measured`."""
        if is_measurable(op) and roofline.forward_s + roofline.backward_s > 0:
            key = key_of(op, operands)
            if key not in self.calls:
                self.calls[key] = encode(op.with_operands(tuple(Ref("x") for _ in operands)), operands)
        return roofline


def measurement_note(counts: Counter[Source]) -> str:
    """Return a plan's note on the sources of its operators' times."""
    total = counts.total()
    parts = [f"{counts['measured']} of {total} operators at their measured time"]
    parts += [f"{counts['interpolated']} interpolated between measured sizes"] if counts["interpolated"] else []
    parts += [f"{counts['scaled']} scaled from the nearest measured size"] if counts["scaled"] else []
    parts += [f"{counts['roofline']} by roofline"] if counts["roofline"] else []
    return "computation is predicted with " + ", ".join(parts)

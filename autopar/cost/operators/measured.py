"""Operators whose time was measured: looked up by their exact shapes, else interpolated between sizes of their kind.

The *size* of an operator is the time that the device's roofline gives it, so that one number orders shapes of any rank.
Between two measured sizes of a kind the time is interpolated in log space; beyond them the roofline is scaled by what
the nearest measured size took of it. Kinds without a measurement keep the roofline.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal

import torch

from autopar.cost.operators.roofline import OpTime, op_time
from autopar.cost.operators.work import COLLECTIVES, VIEWS, Specs
from autopar.errors import UsageError
from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.hardware.device import Device
from autopar.hardware.link import OperatorTable

Source = Literal["measured", "interpolated", "scaled", "roofline"]
Key = tuple[object, ...]

NOT_ALONE = frozenset(
    ("autopar.opaque", "autopar.change_over_data", "autopar.attention_ring", "autopar.attention_gathered")
) | frozenset(f"autopar.experts_{name}" for name in ("split", "dispatch", "dispatch_split"))
"""Operators that cannot be run by one process at one rank's shapes."""


def is_measurable(op: Op) -> bool:
    """Whether one process can time the operator alone; views and changes of type are no work of their own."""
    return op.target not in VIEWS and op.target not in COLLECTIVES and op.target not in NOT_ALONE


def key_of(op: Op, operands: Specs) -> Key:
    """Equal for operators that take equally long: target, literals, specs; of a float only whether it is zero."""
    rest = iter(operands)
    args = tuple(_exact(argument, rest) for argument in op.args)
    kwargs = tuple((name, _exact(value, rest)) for name, value in op.kwargs)
    return op.target, args, kwargs, any(spec.requires_grad for spec in op.outputs)


def kind_of(op: Op, operands: Specs) -> Key:
    """Equal for operators that differ in sizes alone: whole numbers and shapes do not count, ranks and dtypes do."""
    literals = (*op.args, *(value for _, value in op.kwargs))
    tensors = tuple((spec.dtype, len(spec.shape), spec.requires_grad) for spec in operands)
    return op.target, tuple(_coarse(literal) for literal in literals), tensors


def _exact(argument: Argument, rest: Iterator[TensorSpec]) -> object:
    if isinstance(argument, Ref):
        return next(rest)
    if isinstance(argument, tuple):
        return tuple(_exact(item, rest) for item in argument)
    return argument != 0.0 if isinstance(argument, float) else argument


def _coarse(argument: Argument) -> object:
    if isinstance(argument, tuple):
        return "list"
    if isinstance(argument, float):
        return argument != 0.0
    return type(argument) if isinstance(argument, Ref | int) and not isinstance(argument, bool) else argument


# --- as text


def encode(op: Op, operands: Specs) -> str:
    """The call as :class:`autopar.hardware.link.OperatorTime` has it."""
    rest = iter(operands)
    args = [_plain(argument, rest) for argument in op.args]
    kwargs = {name: _plain(value, rest) for name, value in op.kwargs}
    return json.dumps([op.target, args, kwargs, [_tensor(spec) for spec in op.outputs]], separators=(",", ":"))


def _plain(argument: Argument, rest: Iterator[TensorSpec]) -> object:
    if isinstance(argument, Ref):
        return _tensor(next(rest))
    if isinstance(argument, tuple):
        return [_plain(item, rest) for item in argument]
    for kind in ("dtype", "device", "memory_format", "layout"):
        if isinstance(argument, getattr(torch, kind)):
            return {kind: str(argument).removeprefix("torch.")}
    return argument


def _tensor(spec: TensorSpec) -> dict[str, object]:
    return {"tensor": [str(spec.dtype).removeprefix("torch."), list(spec.shape), spec.requires_grad]}


def decode(text: str) -> tuple[Op, tuple[TensorSpec, ...]]:
    """What :func:`encode` wrote; operands are named by their position.

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
        """Seconds, and whether the size lies between measured ones."""
        at = math.log(size)
        i = bisect_left(self.sizes, at)
        if i < len(self.sizes) and self.sizes[i] == at:
            return math.exp(self.times[i]), True
        if i in (0, len(self.sizes)):
            nearest = min(i, len(self.sizes) - 1)
            return size * math.exp(self.times[nearest] - self.sizes[nearest]), False
        share = (at - self.sizes[i - 1]) / (self.sizes[i] - self.sizes[i - 1])
        return math.exp(self.times[i - 1] + share * (self.times[i] - self.times[i - 1])), True


class Measured:
    """Times of a device's measured operators.

    Args:
        table: what was measured.
        device: whose roofline orders the sizes.

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
        self._curves = {key: _Curve(found) for key, found in points.items()}

    def time(self, op: Op, operands: Specs, roofline: OpTime) -> OpTime:
        """Seconds of an operator; ``roofline``: what they are without a measurement."""
        return self.find(op, operands, roofline)[0]

    def find(self, op: Op, operands: Specs, roofline: OpTime) -> tuple[OpTime, Source]:
        """Seconds of an operator, and where they come from."""
        if not is_measurable(op):
            return roofline, "roofline"
        exact = self._exact.get(key_of(op, operands))
        if exact is not None:
            return exact, "measured"
        kind = kind_of(op, operands)
        seconds, inside, found = [roofline.forward_s, roofline.backward_s], True, False
        for i, size in enumerate(seconds):
            curve = self._curves.get((kind, i == 1)) if size > 0 else None
            if curve is not None:
                seconds[i], between = curve.time_s(size)
                found, inside = True, inside and between
        if not found:
            return roofline, "roofline"
        return OpTime(*seconds), "interpolated" if inside else "scaled"


class Recorder:
    """Stands where :class:`Measured` does and keeps the calls that are asked for; every time is the roofline's."""

    def __init__(self) -> None:
        self.calls: dict[Key, str] = {}

    def time(self, op: Op, operands: Specs, roofline: OpTime) -> OpTime:
        """See :class:`Measured`."""
        if is_measurable(op) and roofline.forward_s + roofline.backward_s > 0:
            key = key_of(op, operands)
            if key not in self.calls:
                self.calls[key] = encode(op.with_operands(tuple(Ref("x") for _ in operands)), operands)
        return roofline


def measurement_note(counts: Counter[Source]) -> str:
    """What a plan says of where its operators' times come from."""
    total = counts.total()
    parts = [f"{counts['measured']} of {total} operators at their measured time"]
    parts += [f"{counts['interpolated']} interpolated between measured sizes"] if counts["interpolated"] else []
    parts += [f"{counts['scaled']} scaled from the nearest measured size"] if counts["scaled"] else []
    parts += [f"{counts['roofline']} by roofline"] if counts["roofline"] else []
    return "computation is predicted with " + ", ".join(parts)

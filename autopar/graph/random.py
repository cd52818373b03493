"""Random operators: whatever draws numbers draws them from streams that all ranks agree on.

A number that is drawn from torch's own generator would differ between ranks that must hold the same tensor, and between
a forward pass and its recomputation. So each such call becomes ``autopar.noise(shape, kind, salt)`` and arithmetic; what
has no such form is refused.
"""

from __future__ import annotations

import torch

from autopar.errors import TraceError
from autopar.graph.builder import Builder, Call, Value
from autopar.graph.canonical import Handler
from autopar.graph.ir import Argument, Ref, TensorSpec

TARGETS = frozenset({"autopar.dropout", "autopar.noise"})
"""Random operators of a graph; scaled dot product attention with dropout is one more."""


def _noise(builder: Builder, call: Call, kind: str, dtype: torch.dtype, name: str = "noise") -> Ref:
    args: tuple[Argument, ...] = (call.spec.shape, kind, builder.salts)
    builder.salts += 1
    spec = TensorSpec(shape=call.spec.shape, dtype=dtype)
    return builder.emit(call, "autopar.noise", args, spec, kwargs={"dtype": dtype}, name=name)


def _uniform(builder: Builder, call: Call) -> Value:
    return _noise(builder, call, "uniform", call.spec.dtype)


def _normal(builder: Builder, call: Call) -> Value:
    return _noise(builder, call, "normal", call.spec.dtype)


def _between(builder: Builder, call: Call) -> Value:
    """uniform(x, from, to), which reads of ``x`` its shape."""
    given = call.bound()
    low, high = given["from"], given["to"]
    assert isinstance(low, int | float) and isinstance(high, int | float)
    noise: Ref = _noise(builder, call, "uniform", call.spec.dtype)
    scaled = builder.emit(call, "aten.mul.Tensor", (noise, high - low), call.spec, name="scaled")
    return builder.emit(call, "aten.add.Tensor", (scaled, low), call.spec)


def _bernoulli(builder: Builder, call: Call) -> Value:
    """bernoulli(x) of probabilities, and bernoulli(x, p), which reads of ``x`` its shape."""
    given = call.bound()
    probability = given["p"] if "p" in given else given["self"]
    dtype = call.spec.dtype if call.spec.dtype.is_floating_point else torch.float32
    noise = _noise(builder, call, "uniform", dtype)
    yes = TensorSpec(shape=call.spec.shape, dtype=torch.bool)
    target = "aten.lt.Tensor" if isinstance(probability, Ref) else "aten.lt.Scalar"
    chosen = builder.emit(call, target, (noise, probability), yes, name="chosen")
    return builder.emit(call, "aten.to.dtype", (chosen, call.spec.dtype), call.spec)


def _refused(builder: Builder, call: Call) -> Value:
    raise TraceError(
        "random numbers come from streams that all ranks agree on",
        value=call.target,
        place=call.source or call.module or call.name,
        remedy="draw them with dropout, rand, randn, rand_like, randn_like, uniform_ or bernoulli, or pass them as inputs",
    )


RANDOM: dict[str, Handler] = {
    "aten.rand.default": _uniform,
    "aten.rand_like.default": _uniform,
    "aten.randn.default": _normal,
    "aten.randn_like.default": _normal,
    "aten.uniform.default": _between,
    "aten.bernoulli.default": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.Tensor": _refused,
}


def handler_of(call: Call) -> Handler | None:
    """How a random operator is converted; None for one that is not random, or that knows its stream."""
    if call.target in RANDOM:
        return RANDOM[call.target]
    return _refused if torch.Tag.nondeterministic_seeded in call.overload.tags else None

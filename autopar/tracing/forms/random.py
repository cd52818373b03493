"""Calls that draw random numbers, without a gradient where they have none."""

from __future__ import annotations

from dataclasses import replace

from autopar.graph.graph import Ref
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import generic

_SAMPLERS = frozenset(
    ["bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal_functional",
     "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform"]
)  # fmt: skip
"""Operators that draw from a distribution whose gradient torch takes as zero; others (rrelu) pass gradients on."""


def random_call(builder: Builder, call: Call) -> Value:
    """The call as it is, cut off from the gradient of its operands where its own is zero."""
    if call.target.split(".")[1].rstrip("_") not in _SAMPLERS:
        return generic(builder, call)
    args = tuple(_detached(builder, call, arg) if isinstance(arg, Ref) else arg for arg in call.args)
    kwargs = {key: value for key, value in call.kwargs.items() if key != "generator"}
    return generic(builder, replace(call, args=args, kwargs=kwargs, grad=False))


def _detached(builder: Builder, call: Call, ref: Ref) -> Ref:
    spec = builder.specs[ref]
    if not spec.requires_grad:
        return ref
    return builder.emit(replace(call, grad=False), "aten.detach.default", (ref,), replace(spec, requires_grad=False))

"""Operators that draw random numbers: never constant, never shared, and without a gradient where they have none."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from autopar.errors import RuleError
from autopar.graph.graph import Ref
from autopar.ops.collectives import resolve
from autopar.tracing.builder import Builder, Call, Value
from autopar.tracing.forms.basic import generic

_BY_ARGUMENT = "aten.scaled_dot_product_attention.default"
"""Random where an argument says so: the pass that emits code looks at it."""

_TAKEN_APART = frozenset(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Recurrent networks: in a graph the dropout between their layers is an operator of its own."""

_SAMPLERS = frozenset(
    ["bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal_functional",
     "poisson", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm", "uniform"]
)  # fmt: skip
"""Operators that draw from a distribution whose gradient torch takes as zero; others (rrelu) pass gradients on."""


@cache
def draws_random(target: str) -> bool:
    """Whether an operator draws random numbers at every call.

    >>> draws_random("aten.bernoulli.p"), draws_random("autopar.dropout"), draws_random("aten.add.Tensor")
    (True, True, False)
    """
    if target in _TAKEN_APART:
        return False
    if target in ("autopar.dropout", _BY_ARGUMENT):
        return target != _BY_ARGUMENT
    try:
        found = resolve(target)
    except RuleError:  # no operator of torch's: it has no tags
        return False
    return torch.Tag.nondeterministic_seeded in getattr(found, "tags", ())


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

"""Operators that draw random numbers: never constant, never shared, and without a gradient where they have none."""

from __future__ import annotations

from functools import cache

import torch

from autopar.errors import RuleError
from autopar.ops.kernels import resolve

_BY_ARGUMENT = "aten.scaled_dot_product_attention.default"
"""Random where an argument says so: the pass that emits code looks at it."""

_TAKEN_APART = frozenset(f"aten.{name}.input" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Recurrent networks: in a graph the dropout between their layers is an operator of its own."""


@cache
def draws_random(target: str) -> bool:
    """Whether an operator draws random numbers at every call.

    >>> draws_random("aten.bernoulli.p"), draws_random("autopar.dropout"), draws_random("aten.add.Tensor")
    (True, True, False)
    """
    if target in _TAKEN_APART:
        return False
    if target == _BY_ARGUMENT:
        return False
    if target.startswith("autopar."):  # its kernels need not be loaded to say so
        return target == "autopar.dropout"
    try:
        found = resolve(target)
    except RuleError:  # no operator of torch's: it has no tags
        return False
    return torch.Tag.nondeterministic_seeded in getattr(found, "tags", ())

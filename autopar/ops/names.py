"""The functions that a graph's targets name. It loads the kernels of autopar when one of them is asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch

from autopar.errors import RuleError

KERNELS = ("collectives", "plain", "seeded", "sharded", "experts", "sequence", "opaque")
"""The modules beside this one whose functions graphs name, and emitted code calls."""


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The function that a graph's target names: ``aten.linear.default`` or ``autopar.NAME``.

    Raises:
        RuleError: nothing of that name exists in this torch or this autopar.
    """
    namespace, _, rest = target.partition(".")
    found: Any = None
    if namespace == "autopar":
        homes = (import_module(f"autopar.ops.{kernels}") for kernels in KERNELS)
        found = next((getattr(home, rest) for home in homes if hasattr(home, rest)), None)
    elif rest:
        found = getattr(torch.ops, namespace)
        for part in rest.split("."):
            found = getattr(found, part, None)
    if target == "aten.view.default":  # a graph's view has no strides to keep: it copies where it must
        return cast("Callable[..., Any]", torch.ops.aten.reshape.default)
    if found is None:
        raise RuleError(
            f"No operator '{target}' in torch or autopar",
            fix="Import the module that registers it, or search again with this version",
        )
    return cast("Callable[..., Any]", found)

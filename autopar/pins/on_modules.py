"""Pins in code: a module carries what the plan must hold for it, whoever searches for the model that it is a part of.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    >>> _ = pin(model[0], recompute="full", parameters={"weight": "tp:S(0)"})
    >>> pins_of(model)
    ('recompute=full@0', '0.weight=tp:S(0)')

A trace reads them, and the search treats them as the pins that it is given (:mod:`autopar.planner.space.pins`); the plan lists
both alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import SupportsIndex, TypeVar

import torch

from autopar.errors import UsageError
from autopar.plan.plan import RECOMPUTES, Recompute

_ATTRIBUTE = "_autopar_pins"
Module = TypeVar("Module", bound=torch.nn.Module)


def pin(
    module: Module,
    *,
    recompute: Recompute | None = None,
    stage: int | None = None,
    opaque: bool = False,
    parameters: Mapping[str, str] | None = None,
) -> Module:
    """Pins a part of the plan at a module of the model; a second call adds to the first, and the later one wins.

    Args:
        module: a block, for ``recompute`` and ``stage``; any module for the others. A copy of it is pinned as well.
        recompute: which of the block's activations backward computes again: ``none``, ``selective`` or ``full``.
        stage: the pipeline stage of the block, from 0.
        opaque: the module runs as it is written.
        parameters: types at rest by the parameter's name in the module, or a pattern: ``{"*.weight": "tp:S(0)"}``.

    Returns:
        The module.

    Raises:
        UsageError: it is no module, nothing is pinned, a value is not one, or a pattern fits no parameter of the module.
    """
    if not isinstance(module, torch.nn.Module):
        raise _bad(f"{module!r} is no module", "Give the module itself, as model.layers[0], and not its path", module)
    given: dict[str, str] = {}
    if recompute is not None:
        if recompute not in RECOMPUTES:
            raise _bad(f"Unknown recompute {recompute!r}", "Choose 'none', 'selective' or 'full'", module)
        given["recompute"] = recompute
    if stage is not None:
        if isinstance(stage, bool) or not isinstance(stage, SupportsIndex) or stage < 0:
            raise _bad(f"The stage is {stage!r}", "Give a whole number, counted from 0", module)
        given["stage"] = str(int(stage))
    if opaque:
        given["opaque"] = ""
    names = [name for name, _ in module.named_parameters()]
    for pattern, kind in (parameters or {}).items():
        if not any(fnmatchcase(name, pattern) for name in names):
            fix = (
                f"Name one of the module's parameters: {', '.join(names[:4])}"
                if names
                else "Pin a module that has some"
            )
            raise _bad(f"No parameter of this module matches '{pattern}'", fix, module)
        given[f"parameter {pattern}"] = kind
    if not given:
        raise _bad("Nothing is pinned", "Give recompute=, stage=, opaque=True or parameters=", module)
    object.__setattr__(module, _ATTRIBUTE, {**getattr(module, _ATTRIBUTE, {}), **given})
    return module


def pins_of(model: torch.nn.Module) -> tuple[str, ...]:
    """The pins of the modules of ``model``, as texts with the modules' paths, outer modules first.

    Raises:
        UsageError: the complete model is pinned to a stage, or as opaque.
    """
    return tuple(
        _text(kind, value, path, module)
        for path, module in model.named_modules()
        for kind, value in getattr(module, _ATTRIBUTE, {}).items()
    )


def _text(kind: str, value: str, path: str, module: torch.nn.Module) -> str:
    if kind == "recompute":
        return f"recompute={value}" + (f"@{path}" if path else "")
    if not kind.startswith("parameter ") and not path:
        raise _bad(f"The complete model cannot be pinned with {kind}", "Pin one of its modules", module)
    if kind == "stage":
        return f"stage@{path}={value}"
    if kind == "opaque":
        return f"opaque={path}"
    name = kind.removeprefix("parameter ")
    return (f"{path}.{name}" if path else name) + f"={value}"


def _bad(problem: str, fix: str, module: torch.nn.Module) -> UsageError:
    return UsageError(problem, where=f"autopar.pin({type(module).__name__})", fix=fix)

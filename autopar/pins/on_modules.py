"""Attaches pins to modules. They hold in every search for a model that contains the module.

    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8))
    >>> _ = pin(model[0], recompute="full", parameters={"weight": "tp:S(0)"})
    >>> pins_of(model)
    ('recompute=full@0', '0.weight=tp:S(0)')

Tracing collects the pins into the graph. The search treats them like the pins of the request (:mod:`autopar.planner.space.pins`), and
the plan lists both.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import SupportsIndex, TypeVar

import torch

from autopar.errors import UsageError, check_flags
from autopar.plan.mesh import type_at_rest
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
    """Pin a part of the plan at a module of the model. A second call adds pins, and replaces those of the same kind.

    Args:
        module: a block for ``recompute`` and ``stage``, any module for the others. Copies of the module carry the pins too.
        recompute: which activations of the block are recomputed in backward: ``none``, ``selective`` or ``full``.
        stage: the pipeline stage of the block, counted from 0.
        opaque: whether the module runs as it is written, untraced.
        parameters: types of parameters at rest, by name in the module or by pattern: ``{"*.weight": "tp:S(0)"}``.

    Returns:
        The module itself.

    Raises:
        UsageError: ``module`` is not a module, nothing is pinned, a value is invalid, or a pattern matches no parameter of the module.
    """
    if not isinstance(module, torch.nn.Module):
        raise _bad(f"{module!r} is no module", "Give the module itself, as model.layers[0], and not its path", module)
    pins: dict[str, str] = {}
    if recompute is not None:
        if recompute not in RECOMPUTES:
            raise _bad(f"Unknown recompute {recompute!r}", "Choose 'none', 'selective' or 'full'", module)
        pins["recompute"] = recompute
    if stage is not None:
        if isinstance(stage, bool) or not isinstance(stage, SupportsIndex) or stage < 0:
            raise _bad(f"The stage is {stage!r}", "Give a whole number, counted from 0", module)
        pins["stage"] = str(int(stage))
    check_flags(opaque=opaque)
    if opaque:
        pins["opaque"] = ""
    if not isinstance(parameters, Mapping | None) or not all(
        isinstance(text, str) for pair in (parameters or {}).items() for text in pair
    ):
        raise _bad(
            f"The parameters are {parameters!r:.60}", "Write for example parameters={'weight': 'tp:S(0)'}", module
        )
    names = [name for name, _ in module.named_parameters()]
    for pattern, kind in (parameters or {}).items():
        if not any(fnmatchcase(name, pattern) for name in names):
            fix = (
                f"Name one of the module's parameters: {', '.join(names[:4])}"
                if names
                else "Pin a module that has some"
            )
            raise _bad(f"No parameter of this module matches '{pattern}'", fix, module)
        type_at_rest(kind, where=_place(module))
        pins[f"parameter {pattern}"] = kind
    if not pins:
        raise _bad("Nothing is pinned", "Give recompute=, stage=, opaque=True or parameters=", module)
    object.__setattr__(module, _ATTRIBUTE, {**getattr(module, _ATTRIBUTE, {}), **pins})
    return module


def pins_of(model: torch.nn.Module) -> tuple[str, ...]:
    """Return the pins of the modules of ``model`` as text, with the paths of the modules; outer modules come first.

    Raises:
        UsageError: the complete model is pinned to a stage or as opaque.
    """
    return tuple(
        _text(kind, value, path, module)
        for path, module in model.named_modules()
        for kind, value in getattr(module, _ATTRIBUTE, {}).items()
    )


def _text(kind: str, value: str, path: str, module: torch.nn.Module) -> str:
    """Return one pin in the syntax of requests; ``path`` is the module's path in the model, empty for the model itself."""
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
    """Return the error of :func:`pin` for a module."""
    return UsageError(problem, where=_place(module), fix=fix)


def _place(module: torch.nn.Module) -> str:
    return f"autopar.pin({type(module).__name__})"

"""Which modules of a model train: those that would on one device.

A model in ``train()`` may hold modules in ``eval()``: batch norms that are frozen, encoders without dropout. They stay so. A model
that is in ``eval()`` itself, as ``from_pretrained`` returns it, trains whole.
"""

from __future__ import annotations

from torch import nn


def as_trained(copied: nn.Module, model: nn.Module) -> nn.Module:
    """``copied``, a copy of ``model`` or of a module in it, in the modes that a step of training has."""
    return copied if model.training else copied.train()


def notes_of(model: nn.Module) -> tuple[str, ...]:
    """Which modules stay in ``eval()``, the outermost ones, in a sentence."""
    found: list[str] = []
    for path, module in model.named_modules() if model.training else ():
        if not module.training and not any(path.startswith(f"{outer}.") for outer in found):
            found.append(path)
    said = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return (f"modules in eval() stay so while the others train: {said}",) if found else ()


def modes(module: nn.Module) -> tuple[bool, ...]:
    """Of a module and those in it; for :func:`restore`."""
    return tuple(inner.training for inner in module.modules())


def restore(module: nn.Module, known: tuple[bool, ...]) -> None:
    """Back to what :func:`modes` gave."""
    for inner, training in zip(module.modules(), known, strict=True):
        inner.training = training

"""A model's outputs in the classes that the model returns, which are looked up where they were imported: no file names code to run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

from autopar.graph.elements import Structure, number_at


def rebuilt(structure: Structure, loss: Any, leaf: Callable[[int], Any], more: Fraction) -> Any:
    """The outputs.

    Args:
        loss: what stands for the loss; None: nothing.
        leaf: gives a tensor by its index.
        more: by how many batches of the traced size the batch is larger than one.
    """
    match structure.kind:
        case "loss":
            return loss
        case "tensor":
            return leaf(structure.index)
        case "value":
            one, two = structure.value, structure.twice
            is_count = type(one) in (int, float) and type(two) is type(one)
            return number_at(one, two, more) if is_count else one  # type: ignore[arg-type]
    items = [rebuilt(item, loss, leaf, more) for item in structure.items]
    if structure.kind == "list":
        return items
    if structure.kind == "tuple":
        return tuple(items)
    named = dict(zip(structure.names, items, strict=True))
    return named if structure.type == ("", "") else _made(structure, named)


def _made(structure: Structure, named: dict[Any, Any]) -> Any:
    kind = _class_of(structure.type)
    if structure.kind == "fields":
        return SimpleNamespace(**named) if kind is None else _with_fields(kind, named)
    if kind is None:
        return named
    try:
        made = kind()
        for key, value in named.items():
            made[key] = value
    except TypeError:  # one that is made in a way of its own
        return named
    return made


def _with_fields(kind: type[Any], named: dict[str, Any]) -> Any:
    try:
        return kind(**named)
    except TypeError:  # it is made in a way of its own, which its fields do not tell
        made = object.__new__(kind)
        for name, value in named.items():
            object.__setattr__(made, name, value)
        return made


def _class_of(place: tuple[str, str]) -> type[Any] | None:
    """A class of a module that is imported; None for one that stands inside of a function."""
    found: Any = sys.modules.get(place[0])
    for name in place[1].split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) and (is_dataclass(found) or issubclass(found, tuple | Mapping)) else None

"""What a model returns, taken apart: a structure of plain data, and its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from autopar.graph.elements import Structure

_DROPPED = frozenset({"past_key_values", "cross_attention_cache", "cache_params", "mems"})
"""Names of what a model keeps for the next token: nothing that a plan of training has."""
_DEPTH = 16


class Kept:
    """What the last forward pass has returned; held by the module that is traced, which may set no attributes."""

    def __init__(self) -> None:
        self.structure, self.names = Structure(kind="value"), list[str]()

    def take(self, output: Any, loss: torch.Tensor) -> list[torch.Tensor]:
        """Its tensors but the loss, in order, each once."""
        found: dict[int, tuple[int, str, torch.Tensor]] = {}
        self.structure = _taken(output, loss, found, "", 0)
        self.names = [name for _, name, _ in found.values()]
        return [tensor for _, _, tensor in found.values()]


def _taken(
    value: Any, loss: torch.Tensor, found: dict[int, tuple[int, str, torch.Tensor]], name: str, depth: int
) -> Structure:
    if value is loss:
        return Structure(kind="loss")
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
        index, _, _ = found.setdefault(id(value), (len(found), name, value))
        return Structure(kind="tensor", index=index)
    if value is None or isinstance(value, bool | int | float | str) or depth == _DEPTH:
        is_plain = isinstance(value, bool | int | float | str)
        return Structure(kind="value", value=value if is_plain else None)

    def inside(items: Iterable[tuple[Any, Any]]) -> tuple[Structure, ...]:
        return tuple(
            Structure(kind="value")
            if key in _DROPPED
            else _taken(item, loss, found, f"{name}.{key}" if name else str(key), depth + 1)
            for key, item in items
        )

    place = (type(value).__module__, type(value).__qualname__)
    if dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
        return Structure(
            kind="fields", type=place, names=names, items=inside((n, getattr(value, n, None)) for n in names)
        )
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return Structure(
            kind="fields", type=place, names=value._fields, items=inside(zip(value._fields, value, strict=True))
        )
    if isinstance(value, list | tuple):
        items = inside(enumerate(value))
        return Structure(kind="list" if isinstance(value, list) else "tuple", items=items)
    if isinstance(value, Mapping):
        known = {key: item for key, item in value.items() if isinstance(key, str | int | bool | float)}
        own = ("", "") if type(value) is dict else place
        return Structure(kind="mapping", type=own, names=tuple(known), items=inside(known.items()))
    return Structure(kind="value")


def with_twice(one: Structure, two: Structure) -> Structure:
    """``one`` with the values of ``two``, the same at twice the batch size."""
    if (one.kind, one.names, len(one.items)) != (two.kind, two.names, len(two.items)):
        return one
    items = tuple(with_twice(a, b) for a, b in zip(one.items, two.items, strict=True))
    return dataclasses.replace(one, items=items, twice=two.value)

"""States of schedulers, loaders and generators as JSON, and tensors beside it: a closed list of kinds, none of which is looked up by name.

What JSON has is written as it is. The other kinds are dicts of one entry, whose key begins with ``$``.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.errors import UsageError

Tensors = dict[str, Tensor]


def encode(value: Any, tensors: Tensors, prefix: str, *, where: str) -> Any:
    """``value`` as JSON; its tensors are put into ``tensors`` under names that begin with ``prefix``.

    Args:
        where: what to call it in an error.

    Raises:
        UsageError: it holds something else than numbers, texts, tensors and containers of them.

    >>> tensors = {}
    >>> encode({"a": (1, 2.5), 3: None, "best": math.inf, "w": torch.ones(2)}, tensors, "x", where="")
    {'$items': [['a', {'$tuple': [1, 2.5]}], [3, None], ['best', {'$float': 'inf'}], ['w', {'$tensor': 'x.0'}]]}
    >>> decode(encode(Counter({30: 2}), tensors, "x", where=""), tensors.__getitem__)
    Counter({30: 2})
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int | float):
        return _plain(value)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor | np.ndarray):
        name = f"{prefix}.{len(tensors)}"
        tensors[name] = _tensor(value, where)
        return {"$array" if isinstance(value, np.ndarray) else "$tensor": name}
    if isinstance(value, Mapping):
        return _mapping(value, lambda inner, place: encode(inner, tensors, prefix, where=f"{where}{place}"))
    if isinstance(value, list | tuple | set | frozenset):
        inside = [encode(inner, tensors, prefix, where=f"{where}[{i}]") for i, inner in enumerate(value)]
        if isinstance(value, set | frozenset):
            return {"$set": sorted(inside, key=repr)}
        return inside if isinstance(value, list) else {"$tuple": inside}
    raise UsageError(
        f"A checkpoint cannot hold the {type(value).__name__} in {where}",
        fix="Let state_dict() give numbers, texts, tensors, and lists and dicts of them",
    )


def _plain(value: bool | str | float | None) -> Any:
    """As the very classes of JSON: an enumeration's text is a text, a number of a kind derived from float is one."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else {"$float": str(float(value))}


def _mapping(value: Mapping[Any, Any], of: Callable[[Any, str], Any]) -> Any:
    items = [[of(key, ""), of(inner, f".{key}")] for key, inner in value.items()]
    if isinstance(value, Counter):
        return {"$counter": items}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {"$items": items}


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """What :func:`encode` was given.

    Args:
        tensor: gives the tensor of a name.

    Raises:
        ValueError: it is nothing that :func:`encode` gave.
    """
    if isinstance(value, list):
        return [decode(inner, tensor) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode(inner, tensor) for key, inner in value.items()}
    make = _KINDS.get(kind)
    if make is None:
        raise ValueError(f"'{kind}' is no kind of value")
    given = value[kind]
    if kind in {"$tensor", "$array"}:
        return make(tensor(given))
    return make(decode(given, tensor) if isinstance(given, list) else given)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$tensor": lambda value: value,
    "$array": lambda value: value.numpy(),
    "$tuple": tuple,
    "$set": set,
    "$items": dict,
    "$counter": lambda items: Counter(dict(items)),
}


def _tensor(value: Any, where: str) -> Tensor:
    """A copy on the host.

    Raises:
        UsageError: an array of objects or texts.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except TypeError as error:
        raise UsageError(
            f"A checkpoint cannot hold the array of {value.dtype} in {where}",
            fix="Let state_dict() give arrays of numbers",
        ) from error

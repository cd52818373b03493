"""What a graph knows of a region of unknown code, as plain data; :mod:`autopar.ops.opaque` runs it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

MODULE, FUNCTION = "module", "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What a graph knows of a region; plain data.

    Attributes:
        kind: ``module`` or ``function``.
        name: the module's path in the model, or ``package.module:Class`` of the function.
        tree: of the arguments, as torch's pytree writes it.
        constants: arguments that are no tensors, by their position among the leaves.
        parameters, buffers: names in the module, in the order in which they are passed.
        outputs: shape, dtype (torch's name) and whether a gradient flows, of each tensor that it returns.
        splits: dims of inputs (None: whole) and of outputs along which samples lie, when halves of a batch give the
            halves of the result and of every gradient; None when they do not, and ``why`` says so.
        is_linear_backward: gradients of a sum of losses are the sums of their gradients.
        flops, backward_flops, saved_bytes: measured once, at ``numel`` elements of input; 0 where not known.
    """

    kind: str
    name: str
    tree: str
    constants: tuple[tuple[int, Any], ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    outputs: tuple[tuple[tuple[int, ...], str, bool], ...]
    splits: tuple[tuple[int | None, ...], tuple[int, ...]] | None
    why: str
    is_linear_backward: bool
    flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: int = 0
    numel: int = 1

    def dumps(self) -> str:
        """As a literal of the graph."""
        return json.dumps(asdict(self), default=_encoded)


def _encoded(value: object) -> object:
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise TypeError(f"{type(value).__name__} among the arguments")


def _decoded(value: object) -> object:
    if isinstance(value, Mapping):
        return getattr(torch, value["dtype"]) if "dtype" in value else torch.device(value["device"])
    return value


@cache
def region_of(text: str) -> Region:
    """What :meth:`Region.dumps` wrote."""
    data = json.loads(text)
    splits = data["splits"] and (tuple(data["splits"][0]), tuple(data["splits"][1]))
    return Region(
        **{
            **data,
            "constants": tuple((place, _decoded(value)) for place, value in data["constants"]),
            "parameters": tuple(data["parameters"]),
            "buffers": tuple(data["buffers"]),
            "outputs": tuple((tuple(shape), dtype, bool(grad)) for shape, dtype, grad in data["outputs"]),
            "splits": splits,
        }
    )

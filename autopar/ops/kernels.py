"""What is known of kernels before one is loaded: which functions targets name, which shapes have fused attention, what a region is."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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


_ON_CUDA = (torch.float16, torch.bfloat16)


_WIDEST, _MULTIPLE = 256, 8
"""Of heads: what the flash kernel in torch takes."""


def takes_shapes(kind: str, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Whether there is a fused kernel for an ``autopar.hardware.device.KernelKind``, whatever the make of the device."""
    if width != value_width or not dtype.is_floating_point:
        return False
    if kind != "cuda":
        return kind == "cpu"
    return dtype in _ON_CUDA and width <= _WIDEST and width % _MULTIPLE == 0


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

"""What is known of kernels before one is loaded: functions that targets name, shapes of fused attention, regions, what experts compute."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import RuleError, UsageError

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


def aten_targets(names: str) -> frozenset[str]:
    """Operators of torch by their names, between spaces."""
    return frozenset(f"aten.{name}" for name in names.split())


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


def _decoded(item: dict[str, Any]) -> object:
    """What :func:`_encoded` wrote; any other object as it is."""
    if item.keys() == {"dtype"}:
        return getattr(torch, item["dtype"])
    return torch.device(item["device"]) if item.keys() == {"device"} else item


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def region_of(text: str) -> Region:
    """What :meth:`Region.dumps` wrote."""
    return Region(**{name: _tuples(value) for name, value in json.loads(text, object_hook=_decoded).items()})


# --- mixtures of experts

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
ACTIVATIONS = tuple(_ACTIVATIONS)
"""Names of the functions that an expert may apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What experts do between their products, and how their weights lie.

    Attributes:
        activation: one of :data:`ACTIVATIONS`.
        alpha: of ``silu``: ``x * sigmoid(alpha * x)``.
        limit: what gate gives is cut off above it, what up gives on both sides; of gated experts.
        shift: added to what up gives, after that; of gated experts.
        is_transposed: gate and up are [E, h, f], down is [E, f, h].
        is_interleaved: ``gate`` is None, and ``up`` gives both in turn: f counts the pairs.
    """

    activation: str
    alpha: float = 1.0
    limit: float = math.inf
    shift: float = 0.0
    is_transposed: bool = False
    is_interleaved: bool = False

    @classmethod
    @cache
    def parse(cls, text: str) -> Form:
        """What :meth:`__str__` writes.

        >>> str(Form.parse("silu limit=7.0 is_transposed"))
        'silu limit=7.0 is_transposed'

        Raises:
            UsageError: an unknown activation, or what is no option of it.
        """
        activation, *options = text.split() or [""]
        if activation not in _ACTIVATIONS:
            raise UsageError.unknown("activation", activation, ACTIVATIONS)
        given: dict[str, Any] = {}
        for option in options:
            name, _, value = option.partition("=")
            if name not in {f.name for f in fields(cls)[1:]}:
                raise UsageError.unknown(
                    f"option of the activation {activation}", name, [f.name for f in fields(cls)[1:]]
                )
            try:
                given[name] = float(value) if value else True
            except ValueError:
                raise UsageError(
                    f"The {name} of the activation is {value!r}", fix=f"Give a number: {name}=7.0"
                ) from None
        return cls(activation=activation, **given)

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.activation, *(name if value is True else f"{name}={value}" for name, value in changed)])

    def between(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """What goes into down, of what gate and up give; ``gate`` None: there is none, or it stands in ``up``."""
        if self.is_interleaved:
            gate, up = up[..., ::2], up[..., 1::2]
        if gate is None:
            return self._activated(up)
        if self.limit < math.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self._activated(gate) * (up + self.shift if self.shift else up)

    def _activated(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.alpha * x) if self.alpha != 1 else _ACTIVATIONS[self.activation](x)

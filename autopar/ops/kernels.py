"""What other packages need to know of kernels without loading them: functions by target, fused attention, regions, and forms of experts."""

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
"""The modules of this package whose functions graphs name and emitted code calls."""


@cache
def resolve(target: str) -> Callable[..., Any]:
    """Return the function that a graph's target names: ``aten.linear.default`` or ``autopar.NAME``.

    Raises:
        RuleError: this torch or this autopar has nothing of that name.
    """
    namespace, _, name = target.partition(".")
    function: Any = None
    if namespace == "autopar":
        modules = (import_module(f"autopar.ops.{kernels}") for kernels in KERNELS)
        function = next((getattr(module, name) for module in modules if hasattr(module, name)), None)
    elif name:
        function = getattr(torch.ops, namespace)
        for part in name.split("."):
            function = getattr(function, part, None)
    if target == "aten.view.default":  # a graph's view has no strides to keep: it copies where it must
        return cast("Callable[..., Any]", torch.ops.aten.reshape.default)
    if function is None:
        raise RuleError(
            f"No operator '{target}' in torch or autopar",
            fix="Import the module that registers it, or search again with this version",
        )
    return cast("Callable[..., Any]", function)


def aten_targets(names: str) -> frozenset[str]:
    """Return the targets of torch's operators from their names, which spaces separate."""
    return frozenset(f"aten.{name}" for name in names.split())


_ON_CUDA = (torch.float16, torch.bfloat16)
"""The dtypes that torch's flash kernel for CUDA accepts."""


_WIDEST, _MULTIPLE = 256, 8
"""The largest width of a head that the flash kernel in torch accepts, and the number that must divide it."""


def takes_shapes(kind: str, dtype: torch.dtype, width: int, value_width: int) -> bool:
    """Return whether torch has a fused attention kernel for a kind of device, whatever the model of the device is.

    Args:
        kind: an ``autopar.hardware.device.KernelKind``.
        dtype: the dtype of queries, keys and values.
        width, value_width: the widths of the heads of keys and values.
    """
    if width != value_width or not dtype.is_floating_point:
        return False
    if kind != "cuda":
        return kind == "cpu"
    return dtype in _ON_CUDA and width <= _WIDEST and width % _MULTIPLE == 0


MODULE, FUNCTION = "module", "function"
"""The kinds of regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What a graph records of a region of untraced code, as plain data.

    Attributes:
        kind: ``module`` or ``function``.
        name: the path of the module in the model, or ``package.module:Class`` of the function.
        tree: the structure of the arguments, as torch's pytree writes it.
        constants: the arguments that are not tensors, with their positions among the leaves.
        parameters, buffers: names in the module, in the order in which they are passed.
        outputs: shape, dtype (torch's name) and whether there is a gradient, for each tensor that it returns.
        splits: the dims of inputs (None: not split) and of outputs that count samples. None if the halves of a batch do not give the halves
            of the result and of every gradient; ``why`` has the reason.
        is_linear_backward: whether the gradients of a sum of losses are the sums of their gradients.
        is_loss: whether it is a whole model, of which the graph has the scalar loss alone. If :attr:`splits` is not None the region
            returns the loss once for each of its samples, and the loss of a batch is the mean of these by the samples' weights.
        weight: the weight of a sample in that mean, if they are not equal: how many elements of input ``weight[0]``, from position
            ``weight[2]`` of dim 1 on, differ from the number ``weight[1]``.
        flops, backward_flops, saved_bytes: measured once, for ``numel`` elements of input; 0 if they are not known.
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
    is_loss: bool = False
    weight: tuple[int, int, int] | None = None
    flops: float = 0.0
    backward_flops: float = 0.0
    saved_bytes: int = 0
    numel: int = 1

    def dumps(self) -> str:
        """Return the region as text, which is a literal of the graph."""
        return json.dumps(asdict(self), default=_encoded)


def _encoded(value: object) -> object:
    """Return a JSON object for a dtype or a device."""
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise TypeError(f"{type(value).__name__} among the arguments")


def _decoded(item: dict[str, Any]) -> object:
    """Return the dtype or device that :func:`_encoded` wrote; any other object is returned as it is."""
    if item.keys() == {"dtype"}:
        return getattr(torch, item["dtype"])
    return torch.device(item["device"]) if item.keys() == {"device"} else item


def _tuples(value: Any) -> Any:
    """Return nested lists as nested tuples."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


@cache
def region_of(text: str) -> Region:
    """Return the region that :meth:`Region.dumps` wrote."""
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
"""The functions that an expert may apply, by name."""
ACTIVATIONS = tuple(_ACTIVATIONS)
"""The names of the functions that an expert may apply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What experts compute between their products, and the layout of their weights.

    Attributes:
        activation: one of :data:`ACTIVATIONS`.
        alpha: a factor in ``silu``: ``x * sigmoid(alpha * x)``.
        limit: the output of gate is clamped from above, that of up on both sides; for gated experts.
        shift: is added to the clamped output of up; for gated experts.
        is_transposed: whether gate and up are [E, h, f] and down is [E, f, h].
        is_interleaved: whether ``gate`` is None and ``up`` gives the outputs of gate and up alternately; f then counts the pairs.
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
        """Parse the text that :meth:`__str__` writes.

        >>> str(Form.parse("silu limit=7.0 is_transposed"))
        'silu limit=7.0 is_transposed'

        Raises:
            UsageError: the activation or an option is unknown, or an option is not a number.
        """
        activation, *options = text.split() or [""]
        if activation not in _ACTIVATIONS:
            raise UsageError.unknown("activation", activation, ACTIVATIONS)
        values: dict[str, Any] = {}
        names = [f.name for f in fields(cls)[1:]]
        for option in options:
            name, _, value = option.partition("=")
            if name not in names:
                raise UsageError.unknown(f"option of the activation {activation}", name, names)
            try:
                values[name] = float(value) if value else True
            except ValueError:
                raise UsageError(
                    f"The {name} of the activation is {value!r}", fix=f"Give a number: {name}=7.0"
                ) from None
        return cls(activation=activation, **values)

    def __str__(self) -> str:
        changed = [(f.name, getattr(self, f.name)) for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return " ".join([self.activation, *(name if value is True else f"{name}={value}" for name, value in changed)])

    def between(self, gate: Tensor | None, up: Tensor) -> Tensor:
        """Return the input of down from the outputs of gate and up.

        Args:
            gate: the output of gate; None if there is none or ``up`` contains it.
            up: the output of up.
        """
        if self.is_interleaved:
            gate, up = up[..., ::2], up[..., 1::2]
        if gate is None:
            return self._activated(up)
        if self.limit < math.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self._activated(gate) * (up + self.shift if self.shift else up)

    def _activated(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.alpha * x) if self.alpha != 1 else _ACTIVATIONS[self.activation](x)

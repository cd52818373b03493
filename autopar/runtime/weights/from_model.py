"""Gives parameters and buffers their values: from the user's model, from files, or initialised in place.

Nothing is ever made whole on one rank that is not needed there: a model on meta is initialised one
module at a time, and files are read slice by slice (:mod:`autopar.runtime.weights.from_files`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn

from autopar.errors import RuntimeMismatchError, UsageError
from autopar.graph.graph import Parameter, digest

Index = tuple[slice, ...]

_CPU = torch.device("cpu")
_SHARE = 4
"""A module whose own tensors take more than this part of a device's memory is initialised on the host."""


class Weights(Protocol):
    """Where values come from."""

    def shape(self, fqn: str) -> torch.Size:
        """Of the model's parameter, whole."""

    def parameter(self, parameter: Parameter, index: Index) -> Tensor:
        """The elements ``index`` of the model's parameter."""

    def buffer(self, fqn: str, traced: Tensor | None = None) -> Tensor:
        """A buffer, whole; ``traced`` is what it held when the model was traced, where that is known."""

    @property
    def model(self) -> nn.Module:
        """The user's model, for the code of its opaque modules."""


def local_index(parameter: Parameter, shape: torch.Size, mesh: Mapping[str, int], here: Mapping[str, int]) -> Index:
    """Which elements of a model parameter of ``shape`` one rank holds, padding left out.

    Args:
        mesh: degree of each axis.
        here: the rank's coordinate.

    Raises:
        RuntimeMismatchError: the model's parameter has another shape than the plan's.
    """
    start, size = [0] * len(shape), list(shape)
    if parameter.part is not None:
        start[parameter.part.dim] = parameter.part.start
        size[parameter.part.dim] = parameter.part.stop - parameter.part.start
    padding = parameter.padding
    if padding is not None and size[padding.dim] == padding.length:
        divided = prod(mesh[axis] for axis, kind in parameter.layout if kind.is_split and kind.dim == padding.dim)
        size[padding.dim] = parameter.spec.shape[padding.dim] * divided
    for axis, kind in parameter.layout:
        if kind.is_split and axis in mesh:
            size[kind.dim] //= mesh[axis]
            start[kind.dim] += here[axis] * size[kind.dim]
    if tuple(size) != parameter.spec.shape:
        raise RuntimeMismatchError(
            f"A rank's part of a parameter of shape {tuple(shape)} does not match the plan",
            where=parameter.fqn,
            expected=str(parameter.spec.shape),
            got=tuple(size),
            fix="Search a plan for this model",
        )
    stop = [first + count for first, count in zip(start, size, strict=True)]
    if padding is not None:
        stop[padding.dim] = min(stop[padding.dim], padding.length)
    return tuple(slice(first, last) for first, last in zip(start, stop, strict=True))


class ModelWeights(Weights):
    """The user's model: real weights are sliced, those on meta initialised module by module.

    Args:
        device: on which they are initialised; the same kind on all ranks, as what is drawn depends on it.
    """

    def __init__(self, model: nn.Module, seed: int, device: torch.device = _CPU) -> None:
        self._model, self._seed, self._device = model, seed, device
        self._last: tuple[str, nn.Module] | None = None

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._model

    def shape(self, fqn: str) -> torch.Size:
        """Of the model's parameter, whole."""
        return self._model.get_parameter(fqn).shape

    def parameter(self, parameter: Parameter, index: Index) -> Tensor:
        """The elements ``index`` of the model's parameter."""
        value = self._model.get_parameter(parameter.fqn)
        if value.is_meta:
            path, _, name = parameter.fqn.rpartition(".")
            value = self._initialised(path)._parameters[name]  # type: ignore[assignment]
        return value.detach()[index]

    def buffer(self, fqn: str, traced: Tensor | None = None) -> Tensor:
        """A buffer, whole: ``traced`` where it is given, as rank 0 traced the model of which all take the values."""
        if traced is not None:
            return traced
        value = self._model.get_buffer(fqn)
        if value.is_meta:
            path, _, name = fqn.rpartition(".")
            value = self._initialised(path)._buffers[name]  # type: ignore[assignment]
        return value.detach()

    def _initialised(self, path: str) -> nn.Module:
        if self._last is None or self._last[0] != path:
            self._last = None  # one module at a time
            self._last = (path, initialise(self._model, path, self._seed, self._device))
        return self._last[1]


def initialise(model: nn.Module, path: str, seed: int, device: torch.device = _CPU) -> nn.Module:
    """A copy on ``device`` of one submodule of a model on meta, its own tensors initialised.

    The same everywhere for the same seed and kind of device. Submodules keep their meta tensors, on which initialisers
    do nothing. Initialisers are those of Hugging Face (``_init_weights`` of the models around it)
    or of torch (``reset_parameters``).

    Raises:
        UsageError: there is no initialiser, or it leaves elements out.
    """
    device = _with_room(device, _own_tensors(model.get_submodule(path)).values())
    target = _initialised(model, path, seed, 0, device)
    own = _own_tensors(target)
    # no number of theirs says that it was left out: what is not written differs between two fillings
    others = {} if all(map(_has_nan, own.values())) else _own_tensors(_initialised(model, path, seed, 1, device))
    left_out = [value.isnan().any() if _has_nan(value) else (value != others[n]).any() for n, value in own.items()]
    for name, is_left_out in zip(own, torch.stack(left_out).tolist() if left_out else (), strict=True):
        if is_left_out:
            raise UsageError(
                f"A {type(target).__name__} on meta has no initialiser (reset_parameters, or _init_weights of its model)",
                where=f"{path}.{name}" if path else name,
                fix="Give it one, pass weights=, or build the model on a real device",
            )
    return target


def _with_room(device: torch.device, tensors: Iterable[Tensor]) -> torch.device:
    """The device, or the host for a module that is large beside it; the same for all ranks on devices of one kind."""
    if device.type != "cuda":
        return _CPU
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return _CPU if num_bytes * _SHARE > torch.cuda.get_device_properties(device).total_memory else device


def _initialised(model: nn.Module, path: str, seed: int, fill: int, device: torch.device) -> nn.Module:
    """See :func:`initialise`; what is not written is nan, and ``fill`` where a dtype has none."""
    chain = [model]
    for name in path.split(".") if path else ():
        chain.append(chain[-1].get_submodule(name))
    skeleton = [_shallow(module) for module in chain]
    for parent, child, name in zip(skeleton, skeleton[1:], path.split("."), strict=False):
        parent._modules[name] = child
    target = skeleton[-1]
    for name, parameter in target._parameters.items():
        if parameter is not None:
            unset = _unset_like(parameter, fill, device)
            target._parameters[name] = nn.Parameter(unset, parameter.requires_grad)
    for name, buffer in target._buffers.items():
        target._buffers[name] = None if buffer is None else _unset_like(buffer, fill, device)
    with _seeded(int(digest(f"{seed} {path}"), 16) % 2**63, device), torch.no_grad():
        reset = getattr(target, "reset_parameters", None)
        if callable(reset):
            reset()
        for depth in reversed(range(len(skeleton))):
            owner = next((m for m in reversed(skeleton[: depth + 1]) if hasattr(m, "_init_weights")), None)
            if owner is not None:
                owner._init_weights(skeleton[depth])  # type: ignore[operator]
    return target


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Draws of the host and of this device begin at ``seed``; after it they go on as before."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


def _own_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _shallow(module: nn.Module) -> nn.Module:
    clone = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        clone.__dict__[table] = dict(clone.__dict__[table])
    return clone


def _has_nan(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _unset_like(value: Tensor, fill: int, device: torch.device) -> Tensor:
    """A tensor that shows (by nan, or by ``fill``) what an initialiser leaves out."""
    return torch.full_like(value, float("nan") if _has_nan(value) else fill, device=device)

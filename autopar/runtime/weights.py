"""Values of parameters and buffers: from the user's model, from safetensors files, or from initialisers.

No rank ever holds a complete tensor that it does not need: a model on meta is initialised one module at a time, and files are read by
slices.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from autopar.errors import RuntimeMismatchError, UsageError, first_line
from autopar.graph.graph import Parameter, digest

Index = tuple[slice, ...]

_CPU = torch.device("cpu")
_SHARE = 4
"""A module whose direct tensors take more than one part in so many of a device's memory is initialised on the host."""


def local_index(parameter: Parameter, shape: torch.Size, mesh: Mapping[str, int], here: Mapping[str, int]) -> Index:
    """Return the slices of a model parameter of ``shape`` that one rank holds, without padding.

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


class ModelWeights:
    """Values from the user's model: real weights are sliced, those on meta are initialised module by module.

    Args:
        device: the device of initialisation; of the same kind on all ranks, as random numbers depend on it.

    Attributes:
        model: the user's model, which also has the code of opaque modules.
    """

    def __init__(self, model: nn.Module, seed: int, device: torch.device = _CPU) -> None:
        self.model, self._seed, self._device = model, seed, device
        self._last: tuple[str, nn.Module] | None = None

    def parameter(self, parameter: Parameter, index: Index = ()) -> Tensor:
        """Return the elements ``index`` of the model's parameter, by default all."""
        return self._value(parameter.fqn, self.model.get_parameter(parameter.fqn))[index]

    def buffer(self, fqn: str, traced: Tensor | None = None) -> Tensor:
        """Return the complete buffer: ``traced`` if given, the value when rank 0 traced the model, which all ranks use."""
        if traced is not None:
            return traced
        return self._value(fqn, self.model.get_buffer(fqn))

    def _value(self, fqn: str, value: Tensor) -> Tensor:
        """Return the model's value, or that of an initialiser."""
        if value.is_meta:
            path, _, name = fqn.rpartition(".")
            if self._last is None or self._last[0] != path:
                self._last = None  # one module at a time
                self._last = (path, initialise(self.model, path, self._seed, self._device))
            value = _own_tensors(self._last[1])[name]
        return value.detach()


def initialise(model: nn.Module, path: str, seed: int, device: torch.device = _CPU) -> nn.Module:
    """Return a copy on ``device`` of one submodule of a model on meta, with its direct tensors initialised.

    It is the same everywhere for the same seed and kind of device. Submodules keep their meta tensors, on which initialisers have no
    effect. Initialisers are those of Hugging Face (``_init_weights`` of enclosing models) or of torch (``reset_parameters``).

    Raises:
        UsageError: there is no initialiser, or it leaves elements out.
    """
    device = _with_room(device, _own_tensors(model.get_submodule(path)).values())
    target = _initialised(model, path, seed, 0, device)
    tensors = _own_tensors(target)
    # dtypes without NaN cannot mark elements left out: these differ between two initialisations with different fill
    others = {} if all(map(_has_nan, tensors.values())) else _own_tensors(_initialised(model, path, seed, 1, device))
    left_out = [value.isnan().any() if _has_nan(value) else (value != others[n]).any() for n, value in tensors.items()]
    for name, is_left_out in zip(tensors, torch.stack(left_out).tolist() if left_out else (), strict=True):
        if is_left_out:
            raise UsageError(
                f"A {type(target).__name__} on meta has no initialiser (reset_parameters, or _init_weights of its model)",
                where=f"{path}.{name}" if path else name,
                fix="Give it one, pass weights=, or build the model on a real device",
            )
    return target


def _with_room(device: torch.device, tensors: Iterable[Tensor]) -> torch.device:
    """Return the device, or the host if the module is large compared with its memory; the same for all ranks on devices of one kind."""
    if device.type != "cuda":
        return _CPU
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    return _CPU if num_bytes * _SHARE > torch.cuda.get_device_properties(device).total_memory else device


def _initialised(model: nn.Module, path: str, seed: int, fill: int, device: torch.device) -> nn.Module:
    """Implement :func:`initialise`; elements that are not written are NaN, or ``fill`` if the dtype has none."""
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
    """Set the seed of the host's and this device's generators, and restore them afterwards."""
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
    """Return a tensor whose values (NaN, or ``fill``) show what an initialiser leaves out."""
    return torch.full_like(value, float("nan") if _has_nan(value) else fill, device=device)


_LOGGER = logging.getLogger("autopar")

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class FileWeights(ModelWeights):
    """Parameters, and buffers of the model's ``state_dict()``, from files; other buffers come from the model.

    Names in a model with a head may have one common prefix that the files lack (if they were saved without the head).

    Raises:
        UsageError: there are no such files, or they cannot be read.
    """

    def __init__(self, folder: str | Path, model: nn.Module, seed: int, device: torch.device = _CPU) -> None:
        super().__init__(model, seed, device)
        self._folder = Path(folder)
        self._files = _names(self._folder)
        parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
        self._persistent = buffers & set(model.state_dict(keep_vars=True))
        self._prefix = _prefix(parameters, self._files)
        unknown = sorted(set(self._files) - {self._find((name,)) for name in parameters | buffers})
        if unknown:
            text, named = "%s holds tensors that the model has not, %d of %d: %s", ", ".join(unknown[:3])
            _LOGGER.warning(text, self._folder, len(unknown), len(self._files), named)

    def parameter(self, parameter: Parameter, index: Index = ()) -> Tensor:
        """Return the elements ``index`` of the model's parameter, by default all.

        Raises:
            UsageError: it is in no file, or has another shape or kind of numbers there.
        """
        name = self._find((parameter.fqn, *parameter.aliases))
        if not name:
            raise UsageError(
                f"No parameter '{parameter.fqn}' in the files",
                where=str(self._folder),
                fix="Save the complete model, or load what there is into the model and leave weights= out",
            )
        return self._read(name, parameter.fqn, self.model.get_parameter(parameter.fqn), index)

    def buffer(self, fqn: str, traced: Tensor | None = None) -> Tensor:
        """Return the complete buffer, from the files if it is in the model's ``state_dict()`` and in them."""
        name = self._find((fqn,)) if fqn in self._persistent else ""
        if not name:
            return super().buffer(fqn, traced)
        return self._read(name, fqn, self.model.get_buffer(fqn), ())

    def _find(self, names: tuple[str, ...]) -> str:
        """Return the name of a tensor in the files; empty if they do not have it."""
        short = (name.removeprefix(self._prefix) for name in names)
        return next((name for name in (*names, *short) if name in self._files), "")

    def _read(self, name: str, fqn: str, like: Tensor, index: Index) -> Tensor:
        """Return elements of the tensor ``name`` in the files, which must have the shape and the kind of numbers of the model's tensor ``like``."""
        path, shape = self._folder / self._files[name], tuple(like.shape)
        with _readable(path), safe_open(path, framework="pt") as file:
            stored = file.get_slice(name)
            file_shape = tuple(stored.get_shape())
            value: Tensor = file.get_tensor(name) if not index or file_shape != shape else stored[index]
        if file_shape != shape or not _fits(value.dtype, like.dtype):
            raise UsageError(
                f"'{name}' of the file does not fit the model's parameter {fqn}",
                where=str(path),
                expected=_text(shape, like.dtype),
                got=_text(file_shape, value.dtype),
                fix="Name the folder of this model, or build the model for these files",
            )
        return value


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a file's numbers fit a model's dtype, up to rounding; 8-bit floats do not, as they have separate scales."""
    if wanted.is_floating_point:
        return stored.is_floating_point and stored.itemsize > 1
    return stored == wanted or torch.promote_types(stored, wanted) == wanted


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} of {str(dtype).removeprefix('torch.')}"


def _names(folder: Path) -> dict[str, str]:
    """Return the file of each tensor."""
    index, single = folder / _INDEX, folder / _SINGLE
    if index.exists():
        with _readable(index):
            data: Any = json.loads(index.read_text(encoding="utf-8"))
            return {str(name): str(file) for name, file in data["weight_map"].items()}
    if not single.exists():
        raise UsageError(
            f"No {_SINGLE} or {_INDEX} in the folder {folder}",
            fix="Write one with model.save_pretrained(DIR), or safetensors.torch.save_model(model, DIR/model.safetensors)",
        )
    with _readable(single), safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)


def _prefix(names: set[str], files: dict[str, str]) -> str:
    """Return the common prefix of the model's names that the files lack; empty if there is none, or several."""
    prefixes = {name.partition(".")[0] for name in names if name not in files and name.partition(".")[2] in files}
    prefix = f"{prefixes.pop()}." if len(prefixes) == 1 else ""
    return "" if any(name.startswith(prefix) for name in files) else prefix


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert errors of reading to one that names the file.

    Raises:
        UsageError: in their place.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError, SafetensorError) as error:
        raise UsageError(
            f"Cannot read the weights {path}",
            got=f"{type(error).__name__}: {first_line(error)}",
            fix="Write or download them again",
        ) from error

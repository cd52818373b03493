"""Values from a folder of safetensors files, as ``save_pretrained`` writes them, read slice by slice."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from autopar.errors import UsageError, first_line
from autopar.graph.graph import Parameter
from autopar.runtime.weights.from_model import Index, Weights

_LOGGER = logging.getLogger("autopar")

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class FileWeights(Weights):
    """Parameters, and buffers that are in the model's ``state_dict()``; other buffers come from ``rest``.

    A head's names may have a prefix that the files lack (saved without the head): one, and the same for all.

    Raises:
        UsageError: there are no such files, or they cannot be read.
    """

    def __init__(self, folder: str | Path, rest: Weights) -> None:
        self._folder, self._rest = Path(folder), rest
        self._files = _names(self._folder)
        model = rest.model
        own = {name: p.dtype for name, p in model.named_parameters(remove_duplicate=False)}
        buffers = {name: b.dtype for name, b in model.named_buffers(remove_duplicate=False)}
        self._dtypes = own | buffers
        self._persistent = set(buffers) & set(model.state_dict(keep_vars=True))
        self._prefix = _prefix(set(own), self._files)
        unknown = sorted(set(self._files) - {self._find((name,)) for name in self._dtypes})
        if unknown:
            _LOGGER.warning(
                "%s holds tensors that the model has not, %d of %d: %s",
                self._folder,
                len(unknown),
                len(self._files),
                ", ".join(unknown[:3]),
            )

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self._rest.model

    def shape(self, fqn: str) -> torch.Size:
        """Of the model's parameter, whole."""
        return self._rest.shape(fqn)

    def parameter(self, parameter: Parameter, index: Index) -> Tensor:
        """The elements ``index`` of the model's parameter.

        Raises:
            UsageError: it is in no file, or has another shape or kind of numbers there.
        """
        found = self._find((parameter.fqn, *parameter.aliases))
        if not found:
            raise UsageError(
                f"No parameter '{parameter.fqn}' in the files",
                where=str(self._folder),
                fix="Save the complete model, or load what there is into the model and leave weights= out",
            )
        return self._read(found, parameter.fqn, tuple(self.shape(parameter.fqn)), index)

    def buffer(self, fqn: str, traced: Tensor | None = None) -> Tensor:
        """A buffer, whole: that of the files, if the model's ``state_dict()`` has it and they do."""
        found = self._find((fqn,)) if fqn in self._persistent else ""
        if not found:
            return self._rest.buffer(fqn, traced)
        shape = tuple(self.model.get_buffer(fqn).shape)
        return self._read(found, fqn, shape, tuple(slice(0, size) for size in shape))

    def _find(self, names: tuple[str, ...]) -> str:
        """What the files call it; empty when they have it not."""
        short = (name.removeprefix(self._prefix) for name in names)
        return next((name for name in (*names, *short) if name in self._files), "")

    def _read(self, name: str, fqn: str, shape: tuple[int, ...], index: Index) -> Tensor:
        path = self._folder / self._files[name]
        with _readable(path), safe_open(path, framework="pt") as file:
            stored = file.get_slice(name)
            found = tuple(stored.get_shape())
            value: Tensor = file.get_tensor(name) if not shape or found != shape else stored[index]
        wanted = self._dtypes[fqn]
        if found != shape or not _fits(value.dtype, wanted):
            raise UsageError(
                f"'{name}' of the file does not fit the model's parameter {fqn}",
                where=str(path),
                expected=_text(shape, wanted),
                got=_text(found, value.dtype),
                fix="Name the folder of this model, or build the model for these files",
            )
        return value


def _fits(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether numbers of a file are those of a model but for rounding; numbers of 8 bits have scales beside them."""
    if wanted.is_floating_point:
        return stored.is_floating_point and stored.itemsize > 1
    return stored == wanted or torch.promote_types(stored, wanted) == wanted


def _text(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{shape} of {str(dtype).removeprefix('torch.')}"


def _names(folder: Path) -> dict[str, str]:
    """The file of each tensor."""
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


def _prefix(own: set[str], files: dict[str, str]) -> str:
    """The one prefix of the model's names without which the files have them; empty when there is none, or are several."""
    found = {name.partition(".")[0] for name in own if name not in files and name.partition(".")[2] in files}
    prefix = f"{found.pop()}." if len(found) == 1 else ""
    return "" if any(name.startswith(prefix) for name in files) else prefix


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Errors of reading as one that names the file.

    Raises:
        UsageError: instead of them.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, AttributeError, TypeError, SafetensorError) as error:
        raise UsageError(
            f"Cannot read the weights {path}",
            got=f"{type(error).__name__}: {first_line(error)}",
            fix="Write or download them again",
        ) from error

"""Checkpoints before version 1, as ``torch.distributed.checkpoint`` writes them: pickles without checksums.

A pickle may call any function. These are read only if the caller allows it, and even then a file is refused unless it names only the
classes of such checkpoints. This reduces the risk but does not exclude it; newer checkpoints have no pickles.
"""

from __future__ import annotations

import io
import pickle
from collections import defaultdict
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from autopar.errors import CheckpointError, reason
from autopar.runtime.checkpoint import checkpoint_index
from autopar.runtime.checkpoint.checkpoint_index import AGAIN, Entry, Piece
from autopar.runtime.checkpoint.chunk_files import OLD_INDEX
from autopar.runtime.step.global_loss import SCALER_NUMBERS

_CLASSES = {
    (metadata.__name__, name): getattr(metadata, name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""The classes in metadata that torch 2.11 to 2.13 writes; dtypes of torch are allowed too."""

_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})


class _Metadata(pickle.Unpickler):
    """Reads the metadata of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the object that a file names, if it is one of the classes above under its own name.

        Raises:
            UnpicklingError: it is not.
        """
        found = _CLASSES.get((module, name))
        if found is not None:
            return found
        if (
            module in {"pathlib", "pathlib._local"} and name in _PATHS
        ):  # where it was saved; that machine may have had other ones
            return PurePosixPath if "Posix" in name else PurePath
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise pickle.UnpicklingError(
            f"its metadata names {module}.{name}, which no checkpoint is made of: it may be forged, and nothing of it was run"
        )

    def persistent_load(self, pid: Any) -> Any:
        """Refuse references to other objects, which metadata does not have.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError("its metadata refers to something outside of it: it may be forged")


def read_metadata(path: Path) -> Metadata:
    """Return the contents of the file ``.metadata``.

    Raises:
        UnpicklingError: it is not the metadata of a checkpoint, or names files elsewhere.
        OSError: it cannot be read.
    """
    with (path / OLD_INDEX).open("rb") as file:
        try:
            return _checked(_Metadata(file).load())
        except (pickle.UnpicklingError, EOFError, OSError):
            raise
        except Exception as error:  # what a spoilt or forged file makes of the classes above may be of any kind
            raise pickle.UnpicklingError(f"its metadata cannot be read: {type(error).__name__}: {error}") from error


def _checked(found: Any) -> Metadata:
    """Return the object, if it is the metadata of a folder.

    Raises:
        UnpicklingError: it is not, or names files outside the folder.
    """
    if not isinstance(found, Metadata) or not isinstance(found.state_dict_metadata, dict):
        raise pickle.UnpicklingError(f"its metadata is {type(found).__name__}, none of a checkpoint")
    for stored in dict(found.storage_data).values():
        name = str(stored.relative_path)
        if PurePath(name).name != name or name in {"", "..", "."}:
            raise pickle.UnpicklingError(f"its metadata names a file outside of the folder ({name})")
        if stored.offset < 0 or stored.length < 0:
            raise pickle.UnpicklingError(f"its metadata names a part of {name} that no file has")
    return found


class OlderFolder:
    """Reads such a folder with the interface of :class:`~autopar.runtime.checkpoint.chunk_files.Folder`.

    Raises:
        CheckpointError: a file cannot be read, is truncated, or names what no checkpoint contains, of which nothing is executed.
    """

    is_complete = False

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._metadata = read_metadata(path)
            self.digest = sha256((path / OLD_INDEX).read_bytes()).hexdigest()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise self._damaged(OLD_INDEX, reason(error)) from error
        self._storage = {
            (index.fqn, tuple(index.offset or ())): stored for index, stored in self._metadata.storage_data.items()
        }
        self.tensors = {
            name: self._entry(name, stored)
            for name, stored in self._metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        self.values = self._values()

    def check_files(self) -> None:
        """Check that no file is shorter than it was written."""
        ends: defaultdict[str, int] = defaultdict(int)
        for stored in self._metadata.storage_data.values():
            ends[stored.relative_path] = max(ends[stored.relative_path], stored.offset + stored.length)
        for name, end in ends.items():
            try:
                is_short = (self.path / name).stat().st_size < end
            except OSError as error:
                raise self._damaged(name, reason(error)) from error
            if is_short:
                raise self._damaged(name, "it is cut off")

    def rows(self, name: str, piece: Piece, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """As in ``Folder``; the complete piece is read."""
        value = self._loaded(name, piece.offset)
        if not isinstance(value, Tensor) or tuple(value.shape) != piece.shape:
            raise self._damaged(piece.file, f"{name} is no tensor of shape {piece.shape}")
        yield first, value.reshape(piece.shape or (1,))[first:stop]

    def _entry(self, name: str, stored: TensorStorageMetadata) -> Entry:
        pieces = [
            Piece(
                file=str(self._storage[name, tuple(chunk.offsets)].relative_path),
                start=self._storage[name, tuple(chunk.offsets)].offset,
                offset=tuple(chunk.offsets),
                shape=tuple(chunk.sizes),
                sums=(),
            )
            for chunk in stored.chunks
            if (name, tuple(chunk.offsets)) in self._storage
        ]
        return Entry(dtype=stored.properties.dtype, shape=tuple(stored.size), pieces=tuple(pieces))

    def _values(self) -> dict[str, Any]:
        """Return the values in the form of an index."""
        progress: dict[str, Any] = {}
        for name in ("seed", "step", "scaler"):
            if f"progress.{name}" in self.tensors:
                found = self._loaded(f"progress.{name}", (0,) if name == "scaler" else ()).tolist()
                progress[name] = dict(zip(SCALER_NUMBERS, found, strict=True)) if name == "scaler" else found
        settings: list[Any] = []
        of: dict[str, int] = {}
        for name in self._metadata.state_dict_metadata:
            if name.startswith("optimizer.") and name.endswith(".group"):
                of[name.removeprefix("optimizer.").removesuffix(".group")] = len(settings)
                settings.append(checkpoint_index.encode_state(dict(self._loaded(name, ())), {}, "", where=name))
        return {
            "progress": progress,
            "optimizer": {"settings": settings, "of": of, "numbers": {}},
            "states": {},
        }

    def _loaded(self, name: str, offset: tuple[int, ...]) -> Any:
        """Return a value. Its file is a zip of torch's, from which only tensors, numbers and texts are read."""
        stored = self._storage.get((name, offset)) or self._storage.get((name, ()))
        if stored is None:
            raise self._damaged(OLD_INDEX, f"it lacks a part of {name}")
        file = str(stored.relative_path)
        try:
            with (self.path / file).open("rb") as opened:
                opened.seek(stored.offset)
                return torch.load(io.BytesIO(opened.read(stored.length)), map_location="cpu", weights_only=True)
        except OSError as error:
            raise self._damaged(file, reason(error)) from error
        except pickle.UnpicklingError as error:
            raise self._damaged(
                file, f"{name} names what is no number or text: it may be forged, and nothing of it was run"
            ) from error
        except Exception as error:  # what a spoilt zip makes of torch's reader may be of any kind
            raise self._damaged(file, f"{name} cannot be read: {type(error).__name__}") from error

    def _damaged(self, file: str, why: str) -> CheckpointError:
        return CheckpointError("The older checkpoint cannot be read", where=str(self.path / file), got=why, fix=AGAIN)

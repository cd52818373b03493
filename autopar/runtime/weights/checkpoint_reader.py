"""Where checkpoints are read: nothing that stands in their files is run.

Torch keeps the metadata of a checkpoint as a pickle, and values that are no tensors as pickles, too. A pickle may name any function
and have it called; whoever can write the file could run what he likes in the job that loads it. Here a file may name the classes
that a checkpoint is made of, and is refused where it names another.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePath, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

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
"""What torch writes into metadata, from 2.11 to 2.13; a dtype of torch is known besides."""

_PATHS = frozenset({"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"})


class _Metadata(pickle.Unpickler):
    """Reads the metadata of a checkpoint, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """What a file names: the very classes above, by no other way to them.

        Raises:
            UnpicklingError: it names something else.
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
        """Metadata refers to nothing outside of it.

        Raises:
            UnpicklingError: always.
        """
        raise pickle.UnpicklingError("its metadata refers to something outside of it: it may be forged")


class Reader(FileSystemReader):
    """Reads a folder; see the module."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """As torch's.

        Raises:
            UnpicklingError: the file is no metadata of a checkpoint, or names files elsewhere.
        """
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as file:
            try:
                found = _checked(_Metadata(file).load())
            except (pickle.UnpicklingError, EOFError, OSError):
                raise
            except Exception as error:  # what a spoilt or forged file makes of the classes above may be of any kind
                raise pickle.UnpicklingError(f"its metadata cannot be read: {type(error).__name__}: {error}") from error
        if found.storage_meta is None:
            found.storage_meta = StorageMeta()
        found.storage_meta.load_id = self.load_id
        return found


class Planner(DefaultLoadPlanner):
    """Puts what is read into the state; of values that are no tensors it takes numbers, texts and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As torch's.

        Raises:
            UnpicklingError: the value names a function or class.
        """
        try:
            plain = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            value.seek(0)
            names = torch.serialization.get_unsafe_globals_in_checkpoint(value)
            raise pickle.UnpicklingError(
                f"{read_item.dest_index.fqn} names {', '.join(names) or 'something'}, which is no number or text: it may be forged, "
                "and nothing of it was run"
            ) from error
        checked = io.BytesIO()
        torch.save(plain, checked)  # torch's own method reads it again, and that is free to call what it names
        checked.seek(0)
        super().load_bytes(read_item, checked)


def _checked(found: Any) -> Metadata:
    """What is found, where that is the metadata of a folder.

    Raises:
        UnpicklingError: it is something else, or names files that are not in the folder.
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

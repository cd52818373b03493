"""Where tensors and values of a checkpoint come from: a folder of this format, or of the one before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from autopar.errors import CheckpointError
from autopar.runtime.checkpoint.checkpoint_index import NAME, Entry, Piece, read
from autopar.runtime.checkpoint.chunk_files import Reader

OLD_INDEX = ".metadata"
"""Of folders before version 1: a pickle of torch's."""


class Source(Protocol):
    """A checkpoint that can be read; every method raises ``CheckpointError`` where it is damaged.

    Attributes:
        digest: tells it from others.
        tensors: all that it has, by name.
        values: all that is no tensor.
        is_complete: has what no step changes, too.
    """

    digest: str
    tensors: Mapping[str, Entry]
    values: Mapping[str, Any]
    is_complete: bool

    def check_files(self) -> None:
        """All files are there and as long as they were."""

    def rows(self, name: str, piece: Piece, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Rows of a piece, verified, in chunks; each with the number of its first row in the piece."""

    def close(self) -> None:
        """Closes its files."""


class Folder(Source):
    """A folder that :mod:`autopar.runtime.checkpoint.write` wrote."""

    def __init__(self, path: Path) -> None:
        index, self.digest = read(path)
        self.tensors, self.values, self.is_complete = index.tensors, index.values, True
        self._reader = Reader(path, index.files)

    def check_files(self) -> None:
        """See the protocol."""
        self._reader.check_files()

    def rows(self, name: str, piece: Piece, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """See the protocol."""
        return self._reader.rows(name, piece, self.tensors[name].dtype, first, stop)

    def close(self) -> None:
        """See the protocol."""
        self._reader.close()


def open_folder(path: Path, *, allow_pickle: bool = False) -> Source:
    """The checkpoint in a folder.

    Raises:
        CheckpointError: there is none, it is damaged, or of the older kind, and that is not allowed.
    """
    if (path / NAME).exists() or not (path / OLD_INDEX).exists():
        return Folder(path)
    if not allow_pickle:
        raise CheckpointError(
            "The checkpoint was written by an older autopar: its index is a pickle, which may run code, and has no checksums",
            where=str(path),
            fix="If you trust who wrote it, call par.load(DIR, optimizer, allow_pickle=True) once, and par.save(DIR, optimizer)",
        )
    from autopar.runtime.checkpoint.older import OlderFolder

    return OlderFolder(path)

"""The data files of a checkpoint: safetensors, written and read chunk by chunk with checksums.

The checksum is a CRC-32. It finds every change of up to 32 consecutive bits and of up to three bits anywhere, and misses one in 2**32 of
other damages. It is as fast as reading memory. It does not protect from forgery, as a forger can write the checksums too; but nothing in a
checkpoint is executed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import torch
from torch import Tensor

from autopar.errors import CheckpointError, reason
from autopar.runtime.checkpoint.checkpoint_index import AGAIN, Entry, File, Piece, as_bytes, chunk_rows, read

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names of dtypes in safetensors. Other dtypes are stored as bytes, and only the index knows them."""

_ALIGNED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor to write or read: ``value`` has the elements from ``offset`` on of the tensor ``name`` of shape ``whole``."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(self.value.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """The slices that cut the box out of the complete tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


def header(named: Sequence[tuple[str, torch.dtype, tuple[int, ...]]], about: Mapping[str, str]) -> bytes:
    """Return the header of a safetensors file with these tensors in this order."""
    entries: dict[str, object] = {"__metadata__": dict(about)}
    end = 0
    for name, dtype, shape in named:
        start, end = end, end + prod(shape) * dtype.itemsize
        kind, num_bytes = _NAMES.get(dtype), end - start
        entries[name] = {"dtype": kind or "U8", "shape": shape if kind else [num_bytes], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(8, "little") + text


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Enter the context of a new file, which is synced to disk at the end.

    Raises:
        OSError: it exists, or cannot be written.
    """
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write(path: Path, parts: Sequence[Part], about: Mapping[str, str]) -> tuple[File, dict[str, Entry]]:
    """Write a new file and sync it to disk; return the file, and each part's tensor with this one piece.

    Raises:
        OSError: it cannot be written.
    """
    # large element sizes first, so that all are aligned
    parts = sorted(parts, key=lambda part: (-part.value.element_size(), part.name))
    head = header([(part.name, part.value.dtype, part.shape) for part in parts], about)
    entries: dict[str, Entry] = {}
    with new_file(path) as file:
        file.write(head)
        start = len(head)
        for part in parts:
            sums = []
            for data in _chunks(part.value):
                sums.append(crc32(data))
                file.write(data)
            piece = Piece(file=path.name, start=start, offset=part.offset, shape=part.shape, sums=tuple(sums))
            entries[part.name] = Entry(dtype=part.value.dtype, shape=part.whole, pieces=(piece,))
            start += part.value.numel() * part.value.element_size()
    return File(name=path.name, num_bytes=start, header_bytes=len(head), header_sum=crc32(head)), entries


def _chunks(value: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of each chunk, on the host."""
    value = value.detach().resolve_conj().resolve_neg()
    if not value.numel():
        return
    rows = value.reshape(1) if value.ndim == 0 else value
    each = chunk_rows(tuple(value.shape), value.element_size())
    for first in range(0, rows.shape[0], each):
        yield as_bytes(rows[first : first + each].cpu().contiguous())


class Folder:
    """A folder that :mod:`autopar.runtime.checkpoint.write` wrote; each chunk is verified when it is read.

    Attributes:
        path: the folder.
        digest: the digest of its index.
        tensors: all its tensors, by name.
        values: everything else.

    Raises:
        CheckpointError: a file cannot be read, or has changed since it was written; names file and tensor. All methods raise it.
    """

    def __init__(self, path: Path) -> None:
        index, self.digest = read(path)
        self.tensors, self.values = index.tensors, index.values
        self.path, self._files = path, index.files
        self._verified: set[str] = set()

    def check_files(self) -> None:
        """Check that all files exist, and that their lengths and headers are as written."""
        for name in self._files:
            with self._opened(name):
                pass

    def rows(self, name: str, piece: Piece, first: int, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield rows ``first`` to ``stop - 1`` of a piece of the tensor ``name``, chunk by chunk, each with the number of its first row."""
        dtype, shape = self.tensors[name].dtype, piece.shape or (1,)
        each, row = chunk_rows(piece.shape, dtype.itemsize), prod(shape[1:])
        with self._opened(piece.file) as file:
            for chunk in range(first // each, (stop + each - 1) // each):
                begin, end = chunk * each, min(chunk * each + each, shape[0])
                data = torch.empty((end - begin) * row * dtype.itemsize, dtype=torch.uint8)
                file.seek(piece.start + begin * row * dtype.itemsize)
                count = file.readinto(as_bytes(data))
                if count != data.numel() or crc32(as_bytes(data)) != piece.sums[chunk]:
                    raise self._damaged(
                        piece.file, f"{name} is not what was written (rows {begin} to {end - 1} of a part)"
                    )
                low, high = max(first, begin), min(stop, end)
                values = data.view(dtype).view(end - begin, *shape[1:])
                yield low, values[low - begin : high - begin]

    @contextmanager
    def _opened(self, name: str) -> Iterator[BufferedReader]:
        """Enter the context of a data file; its length and header are verified when it is first opened."""
        try:
            with (self.path / name).open("rb") as file:
                if name not in self._verified:
                    self._check(name, file)
                    self._verified.add(name)
                yield file
        except OSError as error:
            raise self._damaged(name, "a file cannot be read", reason(error)) from error

    def _check(self, name: str, file: BufferedReader) -> None:
        wanted = self._files[name]
        length, begins = os.fstat(file.fileno()).st_size, crc32(file.read(wanted.header_bytes))
        if length != wanted.num_bytes:
            raise self._damaged(name, f"the file has {length} bytes of {wanted.num_bytes}")
        if begins != wanted.header_sum:
            raise self._damaged(name, "the file is another one, or its header has changed")

    def _damaged(self, name: str, problem: str, got: str | None = None) -> CheckpointError:
        where = str(self.path / name)
        return CheckpointError(f"The checkpoint is damaged: {problem}", where=where, got=got, fix=AGAIN)

"""Writes a checkpoint: every rank a share of its tensors, rank 0 the index. The folder becomes a checkpoint in one step, or not at all.

A save writes into a new folder: next to the target, and then renamed, if the target does not exist; inside it otherwise. In that case the
data files, whose names no earlier save has had, are moved first; then a rename replaces the index. So at every moment there is an index,
and its files exist. The next save removes what a killed one has left.

Data files are safetensors, written chunk by chunk with checksums. The checksum is a CRC-32. It finds every change of up to 32 consecutive
bits and of up to three bits anywhere, and misses one in 2**32 of other damages. It is as fast as reading memory. It does not protect from
forgery, as a forger can write the checksums too; but nothing in a checkpoint is executed.

Elements that several ranks have are written by one of them (:attr:`RankParameter.is_sent`). The index is a deterministic function of its
contents: two saves of the same state by the same job have the same bytes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias
from zlib import crc32

import torch
from torch import Tensor

from autopar.errors import UsageError, reason
from autopar.runtime.checkpoint import checkpoint_index
from autopar.runtime.checkpoint.checkpoint_index import Entry, File, Index, Piece, as_bytes, chunk_rows, encode
from autopar.runtime.checkpoint.contents import Part, RankContents, with_elements
from autopar.runtime.world import Peers
from autopar.util.files import dumps

_INSIDE = ".saving"

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
"""The names of dtypes in safetensors. Other dtypes are stored as bytes, and only the index knows them."""

_ALIGNED = 8


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


class Staging:
    """The new files of a folder, which are written to a place of their own and then take the place of older ones. All ranks make one.

    Args:
        folder: an empty one counts as missing.
        what: the contents, in errors.
        more: what errors say besides.

    Attributes:
        place: the folder in which files are written first.
        is_there: whether ``folder`` exists and is not empty.
        generation: part of the names of its data files.

    Raises:
        UsageError: the folder cannot be written; raised on all ranks.
    """

    def __init__(self, folder: Path, what: str, peers: Peers, *, more: str = "") -> None:
        self.folder, self._what, self._more = folder, what, more
        self._is_first = peers.rank == 0
        self.is_there, self.generation = peers.from_first_rank(self._begin)
        self.place = self._places[self.is_there]

    @property
    def _places(self) -> tuple[Path, Path]:
        """The places next to a folder that is missing, and in one that is there."""
        return self.folder.with_name(f".{self.folder.name}{_INSIDE}"), self.folder / _INSIDE

    def _begin(self) -> tuple[bool, int]:
        """Make the place, and remove what a killed save has left; called by rank 0."""
        with self.errors():
            for path in self._places:
                if path.is_dir():
                    shutil.rmtree(path)
            names = [path.name for path in self.folder.iterdir()] if self.folder.is_dir() else []
            generations = [int(match[1]) for match in map(checkpoint_index.FILE.fullmatch, names) if match is not None]
            is_there = bool(names) or os.path.ismount(self.folder)
            self._places[is_there].mkdir(parents=True)
            return is_there, max(generations, default=-1) + 1

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Enter the context of writing.

        Raises:
            UsageError: in place of an error of the file system; says what to do.
        """
        try:
            yield
        except OSError as error:
            fix = "Name the same folder on all ranks, on a file system that all nodes share"
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                fix = "Make room there, or name another folder on all ranks"
            raise UsageError(f"Cannot write {self._what}", got=reason(error), fix=fix + self._more) from error

    @contextmanager
    def complete_or_not(self, name: str) -> Iterator[None]:
        """Enter the context of all writing; if it fails this rank's file ``name`` is removed, and on the first rank all files.

        So they do not fill up the disk.
        """
        try:
            yield
        except UsageError:
            with suppress(OSError):
                (self.place / name).unlink()
            if self._is_first:
                shutil.rmtree(self.place, ignore_errors=True)
            with suppress(OSError):  # of a rank that was given another folder than the first
                self.place.rmdir()
            raise


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it to disk.

    Raises:
        OSError: it cannot be written.
    """
    with new_file(path) as file:
        file.write(data)


def commit(staging: Staging, last: Sequence[str], ours: re.Pattern[str]) -> None:
    """Make the written files the contents of the folder; called by rank 0 after all ranks have written.

    Args:
        last: names of files that are moved after all others, in this order: an index comes after what it names.
        ours: names of the files of earlier saves, which are removed.

    Raises:
        OSError: it cannot; what the index in the folder names is unchanged.
    """
    place, folder = staging.place, staging.folder
    _sync(place)
    if not staging.is_there:
        place.rename(folder)
        _sync(folder.parent)
        return
    names = {path.name for path in place.iterdir()}
    for name in (*sorted(names.difference(last)), *(name for name in last if name in names)):
        if name in last:
            _sync(folder)
        (place / name).replace(folder / name)
    _sync(folder)
    with suppress(OSError):  # it is complete without that
        for path in folder.iterdir():
            if ours.fullmatch(path.name) and path.name not in names:
                path.unlink()
        place.rmdir()


def _sync(folder: Path) -> None:
    """Sync the entries of a folder to disk, if the system supports it."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_parts(path: Path, parts: Sequence[Part], about: Mapping[str, str]) -> tuple[File, dict[str, Entry]]:
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


_Written: TypeAlias = tuple[File | None, dict[str, Entry], RankContents]
"""A rank's file, its pieces of tensors, and its other contents."""


class Save:
    """A save in progress. All ranks make one, then call the same methods.

    Args:
        contents: this rank's part.
        values: the values of the index, the same on all ranks.

    Raises:
        UsageError: the folder cannot be written; raised on all ranks.
    """

    def __init__(self, path: str | Path, contents: RankContents, values: Mapping[str, Any], peers: Peers) -> None:
        self.folder = Path(path).absolute()
        self._values, self._contents = dict(values), replace(contents, parts=[])
        self.parts = with_elements(contents.parts)
        more = ". A checkpoint that was there is unchanged"
        self._staging = Staging(self.folder, f"the checkpoint {self.folder}", peers, more=more)
        self._name = f"data-{self._staging.generation}-{peers.rank:05d}.safetensors"

    def write(self, peers: Peers) -> None:
        """Write and commit.

        Raises:
            UsageError: it cannot be written, or the contents of ranks do not fit together; raised on all ranks. The previous checkpoint is
                unchanged.
        """
        with self._staging.complete_or_not(self._name):
            with peers.failing_together():
                written = (*self._write_file(peers.rank), self._contents)
            of_ranks = peers.all_gather(written)
            peers.from_first_rank(lambda: self._commit(of_ranks))

    def _write_file(self, rank: int) -> tuple[File | None, dict[str, Entry]]:
        """Write this rank's file; None where it has no tensor to write."""
        if not self.parts:
            return None, {}
        with self._staging.errors():
            self._staging.place.mkdir(parents=True, exist_ok=True)
            return write_parts(self._staging.place / self._name, self.parts, {"format": "pt", "rank": str(rank)})

    def _commit(self, written: Sequence[_Written]) -> None:
        """Write the index and commit, on rank 0, after all ranks have written."""
        place, contents = self._staging.place, [of_rank for _, _, of_rank in written]
        tensors = _joined(pieces for _, pieces, _ in written)
        optimizer = self._values["optimizer"] | _optimizer(contents)
        values = {**self._values, "optimizer": optimizer, "states": _states(contents)}
        files = {file.name: file for file, _, _ in written if file is not None}
        with self._staging.errors():
            for rank, (file, _, _) in enumerate(written):
                if file is not None and not (place / file.name).exists():
                    raise FileNotFoundError(f"what rank {rank} wrote is not in the folder that rank 0 sees")
            write_synced(place / checkpoint_index.PLAN, (dumps(values["plan"]) + "\n").encode())
            write_synced(place / checkpoint_index.NAME, encode(Index(files=files, tensors=tensors, values=values)))
            commit(self._staging, (checkpoint_index.NAME, checkpoint_index.PLAN), checkpoint_index.FILE)


def copied_to_host(parts: Sequence[Part], buffers: dict[str, Tensor]) -> list[Part]:
    """Copy the parts to memory of the host that nothing else writes; ``buffers`` keeps that memory for the next save."""
    copies = []
    for part in parts:
        kept = buffers.get(part.name)
        if kept is None or kept.shape != part.value.shape or kept.dtype != part.value.dtype:
            kept = _host_memory(part.value)
            buffers[part.name] = kept
        kept.copy_(part.value, non_blocking=part.value.is_cuda)
        copies.append(replace(part, value=kept))
    for name in buffers.keys() - {part.name for part in parts}:
        del buffers[name]
    if any(part.value.is_cuda for part in parts):
        torch.cuda.synchronize()
    return copies


def _host_memory(like: Tensor) -> Tensor:
    with suppress(RuntimeError):  # the host may have no more memory that can be locked
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
    return torch.empty(like.shape, dtype=like.dtype)


def _joined(of_ranks: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Return the tensors with the pieces of all ranks, in the order of their names; a box that several ranks have written has one piece.

    Raises:
        UsageError: the ranks' boxes of a tensor do not make up the tensor.
    """
    entries: dict[str, Entry] = {}
    pieces: defaultdict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Piece]] = defaultdict(dict)
    for of_rank in of_ranks:
        for name, entry in of_rank.items():
            entries.setdefault(name, entry)
            for piece in entry.pieces:
                pieces[name].setdefault((piece.offset, piece.shape), piece)
    for name, entry in entries.items():
        count = sum(prod(piece.shape) for piece in pieces[name].values())
        if count != prod(entry.shape):
            raise UsageError(
                f"Ranks have {count} elements of {name}, which has {prod(entry.shape)}",
                fix="Use an optimizer whose states are as long as its parameters, or save without it",
            )
    return {
        name: replace(entries[name], pieces=tuple(of_tensor[box] for box in sorted(of_tensor)))
        for name, of_tensor in sorted(pieces.items())
    }


def _optimizer(contents: Sequence[RankContents]) -> dict[str, Any]:
    """Return the hyperparameters of all ranks, each distinct set once, and the states that are not tensors."""
    merged = {key: value for of_rank in contents for key, value in of_rank.settings.items()}
    sets: dict[str, int] = {}
    of = {}
    for key in sorted(merged):
        of[key] = sets.setdefault(json.dumps(merged[key]), len(sets))
    numbers = {key: value for of_rank in contents for key, value in of_rank.numbers.items()}
    return {"settings": [json.loads(text) for text in sets], "of": of, "numbers": dict(sorted(numbers.items()))}


def _states(contents: Sequence[RankContents]) -> dict[str, Any]:
    """Return the states by kind and owner; one, with a count of 0, if all owners have equal states."""
    states: dict[str, Any] = {}
    for kind in sorted({kind for of_rank in contents for kind in of_rank.states}):
        of_owner = dict(of_rank.states[kind] for of_rank in contents if kind in of_rank.states)
        first, count = min(of_owner), len(of_owner)
        if len({json.dumps(value) for value in of_owner.values()}) == 1:
            of_owner, count = {first: of_owner[first]}, 0
        states[kind] = {"count": count, "of": {str(owner): value for owner, value in sorted(of_owner.items())}}
    return states

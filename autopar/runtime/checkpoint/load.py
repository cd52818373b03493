"""Loads a checkpoint into a job with any plan: each rank reads what it needs, and verifies it before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from autopar.errors import CheckpointError, PlanError, reason
from autopar.runtime.checkpoint.checkpoint_index import AGAIN, Piece, as_bytes, chunk_rows, read
from autopar.runtime.checkpoint.contents import Part
from autopar.runtime.world import Peers

OTHER = "The checkpoint is of another model or optimizer"
_TAKE_SAME = "Load it with the model and the kind of optimizer that were saved"


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


class Loading:
    """A checkpoint that is being loaded; all ranks begin one and call the same methods: first ``verify``, then ``put`` with the same parts.

    Attributes:
        peers: all ranks of the job.
        source: the checkpoint.

    Raises:
        CheckpointError: it is damaged; raised on all ranks.
        PlanError: it does not fit, or ranks load different ones; raised on all ranks.
    """

    def __init__(self, path: Path, peers: Peers) -> None:
        """Open the folder on every rank, and check that it is the same one."""
        self.peers = peers
        with peers.failing_together():
            self.source = Folder(path)
            if peers.rank == 0:
                self.source.check_files()
        digests = peers.all_gather(self.source.digest)
        other_rank = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), 0)
        if other_rank:
            raise PlanError(
                f"Rank {other_rank} loads another checkpoint than rank 0",
                where=str(path),
                fix="Choose the folder on one rank, and send its name to the others",
            )

    def check_holds(self, names: Sequence[str], missing_settings: Sequence[str] = ()) -> None:
        """Check that the checkpoint has what all ranks need.

        Args:
            names: the tensors that this rank needs.
            missing_settings: settings of the optimizer that this rank needs and has not found.
        """
        missing = sorted(name for name in set(names) if name not in self.source.tensors)
        lacking = sorted({name for names in self.peers.all_gather([*missing, *missing_settings]) for name in names})
        if lacking:
            is_optimizers = all(name.startswith("optimizer.") for name in lacking)
            raise PlanError(
                OTHER,
                where=str(self.source.path),
                got=f"it lacks {lacking[0]}" + (f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""),
                fix="Give the kind of optimizer that was saved, or load without one" if is_optimizers else _TAKE_SAME,
            )

    def verify(self, parts: Sequence[Part]) -> None:
        """Read and verify all that the parts need; no part is changed yet."""
        with self.peers.failing_together():
            for part in parts:
                entry = self.source.tensors[part.name]
                if entry.shape != part.whole:
                    raise PlanError(
                        OTHER,
                        where=str(self.source.path),
                        got=f"{part.name} has shape {entry.shape} there and {part.whole} here",
                        fix=_TAKE_SAME,
                    )
                read_box(self.source, part, None)

    def put(self, parts: Sequence[Part]) -> None:
        """Read into the parts what :meth:`verify` has verified for them. It is read and verified again, and not kept in between."""
        with self.peers.failing_together(), torch.no_grad():
            for part in parts:
                try:
                    read_box(self.source, part, part.value)
                except CheckpointError as error:
                    again = f"Load it again: half of it is loaded. {error.fix}"
                    raise error.becoming(CheckpointError, fix=again) from error


def read_box(source: Folder, part: Part, into: Tensor | None) -> None:
    """Read a box of a tensor from the pieces that overlap it.

    Boxes are pairs of first and end index, one for each dim of the tensor. The rows of the first dim are read chunk by chunk.

    Args:
        source: the checkpoint.
        part: the box; its value only says the shape.
        into: receives the elements; None only verifies them.

    Raises:
        CheckpointError: something is damaged, or the pieces do not cover the box exactly once.
    """
    offset, shape, num_elements = part.offset or (0,), part.shape or (1,), 0  # a scalar is a row
    for piece in sorted(source.tensors[part.name].pieces, key=lambda piece: (piece.file, piece.start)):
        piece_offset = piece.offset or (0,)
        dims = zip(offset, shape, piece_offset, piece.shape or (1,), strict=True)
        (top, bottom), *inner = ((max(a, b), min(a + m, b + n)) for a, m, b, n in dims)  # what both have
        count = prod(max(high - low, 0) for low, high in ((top, bottom), *inner))
        num_elements += count
        rows = source.rows(part.name, piece, top - piece_offset[0], bottom - piece_offset[0]) if count else ()
        for first, values in rows:
            if into is not None:
                low = piece_offset[0] + first
                chunk = ((low, low + values.shape[0]), *inner)
                target = into.view(shape)[_slices(chunk, offset)]
                target.copy_(values[_slices(chunk, (low, *piece_offset[1:]))])
    if num_elements != part.value.numel():
        raise CheckpointError(
            f"The index of the checkpoint lacks elements of {part.name}, or has some twice",
            where=str(source.path),
            fix=AGAIN,
        )


def _slices(box: Iterable[tuple[int, int]], offset: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices that cut a box out of a tensor whose first element is at ``offset``."""
    return tuple(slice(low - first, high - first) for (low, high), first in zip(box, offset, strict=True))


def whole(source: Folder, name: str) -> Tensor:
    """Return a complete tensor of a checkpoint.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if name not in source.tensors:
        raise CheckpointError(f"The index of the checkpoint lacks {name}", where=str(source.path), fix=AGAIN)
    entry = source.tensors[name]
    value = torch.empty(entry.shape, dtype=entry.dtype)
    read_box(source, Part(name=name, whole=entry.shape, offset=(0,) * value.ndim, value=value), value)
    return value


def saved_state(values: Mapping[str, Any], kind: str, owner: int, count: int) -> Any:
    """Return the saved state of a kind, encoded; None if there is none.

    Args:
        values: everything in the checkpoint that is not a tensor.
        kind: the kind of state, such as the scheduler or the generators of random numbers.
        owner: the number of this rank among those that each have a state of this kind.
        count: how many of them this job has.

    Raises:
        PlanError: ranks had different states, and their number was another.
    """
    saved = values["states"].get(kind)
    if saved is None:
        return None
    if not saved["count"]:
        return next(iter(saved["of"].values()))
    if saved["count"] != count or str(owner) not in saved["of"]:
        raise PlanError(
            f"The state of the {kind} was saved for {saved['count']} ranks, each of which had another one",
            expected=f"a plan with {saved['count']} of them",
            got=count,
            fix=f"Load without {kind}=, and begin it anew, or use the plan.json of the checkpoint",
        )
    return saved["of"][str(owner)]

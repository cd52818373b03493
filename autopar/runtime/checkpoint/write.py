"""Writes a checkpoint: every rank a share of its tensors, rank 0 the index. The folder becomes a checkpoint in one step, or not at all.

A save writes into a new folder: next to the target, and then renamed, if the target does not exist; inside it otherwise. In that case the
data files, whose names no earlier save has had, are moved first; then a rename replaces the index. So at every moment there is an index,
and its files exist. The next save removes what a killed one has left.

Boxes that several ranks have are written by one of them, which rank 0 chooses so that ranks write about equally much. The index is a
deterministic function of its contents: two saves of the same state by the same job have the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopar.errors import UsageError, reason
from autopar.runtime.checkpoint.checkpoint_index import FILE, NAME, PLAN, Entry, File, Index, Piece, encode
from autopar.runtime.checkpoint.chunk_files import Part, new_file, write
from autopar.runtime.checkpoint.contents import RankContents, State, each_once
from autopar.runtime.world import Meeting
from autopar.util.files import dumps

_INSIDE = ".saving"
_OLD = re.compile(r"\.metadata|\.metadata\.tmp|__\d+_.*\.distcp")
"""Files of checkpoints before version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a save goes; rank 0 decides, and informs the others.

    Attributes:
        is_there: whether the folder exists and is not empty.
        generation: part of the names of its data files.
    """

    is_there: bool = False
    generation: int = 0


def target_of(folder: Path) -> Target:
    """Return the target for a folder; an empty folder counts as missing."""
    if not folder.is_dir():
        return Target()
    names = [path.name for path in folder.iterdir() if path.name != _INSIDE]
    generations = [int(match[1]) for match in map(FILE.fullmatch, names) if match is not None]
    return Target(is_there=bool(names) or os.path.ismount(folder), generation=max(generations, default=-1) + 1)


def staging_folder(folder: Path, target: Target) -> Path:
    """Return the folder in which the files of a save are written first."""
    return folder / _INSIDE if target.is_there else folder.with_name(f".{folder.name}{_INSIDE}")


def begin_save(folder: Path) -> Target:
    """Make the folder of a save, and remove what a killed one has left; called by rank 0.

    Raises:
        OSError: it cannot.
    """
    target = target_of(folder)
    for path in (folder / _INSIDE, folder.with_name(f".{folder.name}{_INSIDE}")):
        if path.is_dir():
            shutil.rmtree(path)
    staging_folder(folder, target).mkdir(parents=True)
    return target


@contextmanager
def as_usage_errors(what: str, more: str = "") -> Iterator[None]:
    """Enter the context of writing ``what``, on all ranks.

    Raises:
        UsageError: in place of an error of the file system; says what to do, and ``more``.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"Cannot write {what}",
            got=reason(error),
            fix=f"Name the same folder on all ranks, on a file system that all nodes share{more}",
        ) from error


def remove_failed(folder: Path, target: Target, *, name: str, is_first: bool) -> None:
    """Remove the files of a failed save, so that they do not fill up the disk: this rank's file ``name``, and all files on the first rank."""
    place = staging_folder(folder, target)
    with suppress(OSError):
        (place / name).unlink()
    if is_first:
        shutil.rmtree(place, ignore_errors=True)
    with suppress(OSError):  # of a rank that was given another folder than the first
        place.rmdir()


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it to disk.

    Raises:
        OSError: it cannot be written.
    """
    with new_file(path) as file:
        file.write(data)


def commit(folder: Path, target: Target) -> None:
    """Make the written files the checkpoint of the folder; called by rank 0 after all ranks have written.

    Raises:
        OSError: it cannot; the previous checkpoint is unchanged.
    """
    place = staging_folder(folder, target)
    _sync(place)
    if not target.is_there:
        place.rename(folder)
        _sync(folder.parent)
        return
    names = {path.name for path in place.iterdir()}
    for name in sorted(names - {NAME, PLAN}):
        (place / name).rename(folder / name)
    _sync(folder)
    (place / NAME).replace(folder / NAME)
    _sync(folder)
    with suppress(OSError):  # the checkpoint is complete without that: its index has the plan, too
        (place / PLAN).replace(folder / PLAN)
        for path in folder.iterdir():
            if (FILE.fullmatch(path.name) or _OLD.fullmatch(path.name)) and path.name not in names:
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


Box = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], torch.dtype]
"""Name, complete shape, offset, shape, dtype."""


def box_of(part: Part) -> Box:
    """Return the box of a part."""
    return part.name, part.whole, part.offset, part.shape, part.value.dtype


_Gathered: TypeAlias = tuple[tuple[Box, ...], RankContents]
"""What a rank sends to rank 0 before anything is written: the boxes of its tensors, and its other contents."""

_Written: TypeAlias = tuple[File | None, dict[str, Piece]]
"""A rank's file, and the pieces in it."""


class Save:
    """A save in progress. All ranks make one, then call the same methods.

    Args:
        contents: this rank's part.
        values: the values of the index, the same on all ranks.

    Raises:
        UsageError: the folder cannot be written; raised on all ranks.
    """

    def __init__(self, path: str | Path, contents: RankContents, values: Mapping[str, Any], meeting: Meeting) -> None:
        self.folder = Path(path).absolute()
        self._values, self._shapes, parts = dict(values), dict[str, Box](), each_once(contents.parts)
        gathered = meeting.gather((tuple(map(box_of, parts)), replace(contents, parts=[])))
        shares, self._target = meeting.from_first_rank(lambda: self._assign(gathered))
        self.parts = [part for part in parts if part.name in shares[meeting.rank]]
        self._name = f"data-{self._target.generation}-{meeting.rank:05d}.safetensors"

    def write(self, meeting: Meeting) -> None:
        """Write and commit.

        Raises:
            UsageError: it cannot be written; raised on all ranks. The previous checkpoint is unchanged.
        """
        try:
            with meeting.failing_together():
                file = self._write_file(meeting.rank)
            files = meeting.gather(file)
            meeting.from_first_rank(lambda: self._commit(files))
        except UsageError:
            remove_failed(self.folder, self._target, name=self._name, is_first=meeting.rank == 0)
            raise

    def _assign(self, gathered: Sequence[_Gathered]) -> tuple[list[set[str]], Target]:
        """On rank 0: the names of the tensors that each rank writes, and the target, whose folder is made.

        Raises:
            UsageError: the contents of ranks do not fit together, or the folder cannot be made.
        """
        contents = [of_rank for _, of_rank in gathered]
        states, dropped = _states(contents)
        shares = _shares([boxes for boxes, _ in gathered], dropped)
        self._shapes = {box[0]: box for boxes, _ in gathered for box in boxes}
        self._values["optimizer"] |= _optimizer(contents)
        self._values["states"] = states
        with self._as_usage_errors():
            return shares, begin_save(self.folder)

    def _write_file(self, rank: int) -> _Written:
        """Write this rank's file; None where it has no tensor to write."""
        if not self.parts:
            return None, {}
        with self._as_usage_errors():
            place = staging_folder(self.folder, self._target)
            place.mkdir(parents=True, exist_ok=True)
            return write(place / self._name, self.parts, {"format": "pt", "rank": str(rank)})

    def _commit(self, written: Sequence[_Written]) -> None:
        """Write the index and commit, on rank 0, after all ranks have written."""
        place, pieces = staging_folder(self.folder, self._target), defaultdict[str, list[Piece]](list)
        for _, rank_pieces in written:
            for name, piece in rank_pieces.items():
                pieces[name].append(piece)
        tensors = {
            name: Entry(
                dtype=self._shapes[name][4],
                shape=self._shapes[name][1],
                pieces=tuple(sorted(pieces[name], key=lambda piece: piece.offset)),
            )
            for name in sorted(pieces)
        }
        files = {file.name: file for file, _ in written if file is not None}
        with self._as_usage_errors():
            for rank, (file, _) in enumerate(written):
                if file is not None and not (place / file.name).exists():
                    raise FileNotFoundError(f"what rank {rank} wrote is not in the folder that rank 0 sees")
            write_synced(place / PLAN, (dumps(self._values["plan"]) + "\n").encode())
            write_synced(place / NAME, encode(Index(files=files, tensors=tensors, values=self._values)))
            commit(self.folder, self._target)

    def _as_usage_errors(self) -> AbstractContextManager[None]:
        return as_usage_errors(f"the checkpoint {self.folder}", ". A checkpoint that was there is unchanged")


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


def source_ranks(boxes: Sequence[Sequence[Box]]) -> dict[Box, int]:
    """Return for each box the rank that writes or sends it, chosen so that all ranks have about equally many bytes.

    Args:
        boxes: the boxes of each rank.
    """
    holders: defaultdict[Box, list[int]] = defaultdict(list)
    for rank, rank_boxes in enumerate(boxes):
        for box in rank_boxes:
            holders[box].append(rank)
    load, sources = [0] * len(boxes), dict[Box, int]()
    size = {box: prod(box[3]) * box[4].itemsize for box in holders}
    for box in sorted(holders, key=lambda box: (-size[box], box[0], box[2])):
        sources[box] = min(holders[box], key=lambda rank: (load[rank], rank))
        load[sources[box]] += size[box]
    return sources


def _shares(boxes: Sequence[Sequence[Box]], dropped: frozenset[str]) -> list[set[str]]:
    """Return the names of the tensors that each rank writes: every box once, about equally many bytes on each rank.

    Raises:
        UsageError: the ranks' boxes of a tensor do not make up the tensor.
    """
    chosen = source_ranks([[box for box in rank_boxes if box[0] not in dropped] for rank_boxes in boxes])
    elements: defaultdict[str, int] = defaultdict(int)
    for box in chosen:
        elements[box[0]] += prod(box[3])
    for name, whole, _, _, _ in chosen:
        if elements[name] != prod(whole):
            raise UsageError(
                f"Ranks have {elements[name]} elements of {name}, which has {prod(whole)}",
                fix="Use an optimizer whose states are as long as its parameters, or save without it",
            )
    shares: list[set[str]] = [set() for _ in boxes]
    for box, rank in chosen.items():
        shares[rank].add(box[0])
    return shares


def _optimizer(contents: Sequence[RankContents]) -> dict[str, Any]:
    """Return the hyperparameters of all ranks, each distinct set once, and the states that are not tensors."""
    merged = {key: value for of_rank in contents for key, value in of_rank.settings.items()}
    sets: dict[str, int] = {}
    of = {}
    for key in sorted(merged):
        of[key] = sets.setdefault(json.dumps(merged[key]), len(sets))
    numbers = {key: value for of_rank in contents for key, value in of_rank.numbers.items()}
    return {"settings": [json.loads(text) for text in sets], "of": of, "numbers": dict(sorted(numbers.items()))}


def _states(contents: Sequence[RankContents]) -> tuple[dict[str, Any], frozenset[str]]:
    """Return the states by kind and owner, one if all owners have equal states, and the names of the tensors that are not saved then."""
    states: dict[str, Any] = {}
    kept: set[str] = set()
    for kind in sorted({kind for of_rank in contents for kind in of_rank.states}):
        of_owner: dict[int, State] = {}
        for of_rank in contents:
            if kind in of_rank.states:
                of_owner.setdefault(of_rank.states[kind].owner, of_rank.states[kind])
        is_shared = len({state.digest for state in of_owner.values()}) == 1
        first = of_owner[min(of_owner)]
        wanted = {first.owner: first} if is_shared else of_owner
        count = 0 if is_shared else len(of_owner)
        states[kind] = {"count": count, "of": {str(owner): state.value for owner, state in sorted(wanted.items())}}
        kept |= {name for state in wanted.values() for name in state.tensors}
    every = {name for of_rank in contents for state in of_rank.states.values() for name in state.tensors}
    return states, frozenset(every - kept)

"""The index of a checkpoint, ``checkpoint.json``: the places and checksums of tensors, and everything else as JSON.

It begins with the SHA-256 of the rest, so that a change of any byte is found. Tensors are in safetensors files, one for each rank that
wrote; the index has their places itself. No part of a checkpoint is a pickle.

**States.** JSON values are written unchanged. Values of other kinds are dicts with one entry, whose key begins with ``$``.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autopar.errors import CheckpointError, UsageError, reason

NAME = "checkpoint.json"
_TORCH_INDEX = ".metadata"
"""The index of a checkpoint of ``torch.distributed.checkpoint``: a pickle, which is not read."""
PLAN = "plan.json"
FORMAT, VERSION = "autopar checkpoint", 1

CHUNK_BYTES = 16 * 2**20
"""Size of a chunk, about, which is read at once and has its own checksum: a rank that needs a few rows reads little more."""

FILE = re.compile(r"data-(\d+)-(\d{5,})\.safetensors")
"""Names of data files: ``data-GENERATION-RANK.safetensors``. Each save into a folder has a new generation."""

_HEAD = b'{"sha256": "%s",\n'
_HEAD_BYTES = len(_HEAD) - 2 + 64

AGAIN = "Copy the folder again from where it is undamaged, or load an earlier checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A data file: its length, and the length and checksum of its safetensors header."""

    name: str
    num_bytes: int
    header_bytes: int
    header_sum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor's elements, stored row by row in a file.

    Attributes:
        start: its first byte in the file.
        offset, shape: of the box in the tensor.
        sums: a checksum of each chunk of :func:`chunk_rows` rows.
    """

    file: str
    start: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    sums: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A complete tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """The contents of a checkpoint.

    Attributes:
        values: everything that is not a tensor, as JSON.
    """

    files: Mapping[str, File]
    tensors: Mapping[str, Entry]
    values: Mapping[str, Any]


def chunk_rows(shape: Sequence[int], itemsize: int) -> int:
    """Return how many rows (elements of the first dim) of a box are one chunk.

    >>> chunk_rows((1024, 8192), 4), chunk_rows((3, 2**28), 4), chunk_rows((), 8)
    (512, 1, 1)
    """
    row = max(prod(shape[1:]) * itemsize, 1)
    rows = shape[0] if shape else 1
    return max(min(rows, CHUNK_BYTES // row), 1)


def encode(index: Index) -> bytes:
    """Return the bytes of ``checkpoint.json``."""
    names = {name: number for number, name in enumerate(index.files)}
    body = {
        "format": FORMAT,
        "version": VERSION,
        "files": [[f.name, f.num_bytes, f.header_bytes, f.header_sum] for f in index.files.values()],
        "tensors": {
            name: [
                dtype_name(entry.dtype),
                entry.shape,
                [[names[p.file], p.start, p.offset, p.shape, p.sums] for p in entry.pieces],
            ]
            for name, entry in index.tensors.items()
        },
        "values": index.values,
    }
    text = json.dumps(body, allow_nan=False, separators=(",", ":")).encode()[1:]
    return _HEAD % hashlib.sha256(text).hexdigest().encode() + text


def read(folder: Path) -> tuple[Index, str]:
    """Return the index of a folder, and its digest.

    Raises:
        CheckpointError: there is none, it is damaged, or of a later version.
    """
    path = folder / NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        got = f"{NAME}: {reason(error)}"
        fix = "Name a folder that par.save(...) wrote, on a file system that all nodes share"
        if (folder / _TORCH_INDEX).exists():
            got = f"{_TORCH_INDEX}, which torch.distributed.checkpoint writes"
            fix = 'Read it by torch.distributed.checkpoint.load({"model": par}, checkpoint_id=DIR), then call par.save(...)'
        raise CheckpointError(f"Cannot read the checkpoint {folder}", got=got, fix=fix) from error
    head, text = data[:_HEAD_BYTES], data[_HEAD_BYTES:]
    digest = hashlib.sha256(text).hexdigest()
    if head != _HEAD % digest.encode():
        raise CheckpointError(
            "The index of the checkpoint is damaged: its checksum differs", where=str(path), fix=AGAIN
        )
    return decode(b"{" + text, path), digest


def decode(text: bytes, path: Path) -> Index:
    """Return the index from its JSON.

    Raises:
        CheckpointError: it is of a later version, or was not written by :func:`encode`.
    """
    try:
        body = json.loads(text)
        version = body["version"] if body["format"] == FORMAT else None
        if version == VERSION:
            return _decoded(body)
        problem = f"a checkpoint of version {version}, which this autopar does not know"
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        problem = f"no index of a checkpoint ({type(error).__name__}: {error})"
    raise CheckpointError(
        f"Cannot read the checkpoint {path.parent}",
        got=problem,
        fix="Use the autopar that wrote it, or load an earlier checkpoint",
    )


def _decoded(body: Any) -> Index:
    files = [File(name=str(n), num_bytes=b, header_bytes=h, header_sum=c) for n, b, h, c in body["files"]]
    for file in files:
        _check(FILE.fullmatch(file.name) is not None, f"a file named {file.name}")
        _check_counts(file.name, file.num_bytes, file.header_bytes, file.header_sum)
    tensors = {}
    by_name = {file.name: file for file in files}
    for name, (dtype, shape, pieces) in body["tensors"].items():
        entry_pieces = [
            Piece(file=files[number].name, start=start, offset=tuple(offset), shape=tuple(size), sums=tuple(sums))
            for number, start, offset, size, sums in pieces
        ]
        _check_counts(name, *shape)
        tensors[name] = Entry(dtype=dtype_of(dtype), shape=tuple(shape), pieces=tuple(entry_pieces))
        for piece in entry_pieces:
            _check_piece(name, tensors[name], piece, by_name)
    values = body["values"]
    _check_values(values)
    return Index(files=by_name, tensors=tensors, values=values)


def _check_piece(name: str, entry: Entry, piece: Piece, files: Mapping[str, File]) -> None:
    """Check that a piece lies in its tensor and its file.

    Raises:
        ValueError: it does not.
    """
    offset, shape, itemsize = piece.offset, piece.shape, entry.dtype.itemsize
    _check_counts(name, piece.start, *offset, *shape, *piece.sums)
    _check(all(o + s <= whole for o, s, whole in zip(offset, shape, entry.shape, strict=True)), name)
    num_chunks = -(-(shape or (1,))[0] // chunk_rows(shape, itemsize)) if prod(shape) else 0
    _check(len(piece.sums) == num_chunks, name)
    _check(piece.start + prod(shape) * itemsize <= files[piece.file].num_bytes, name)


def _check_values(values: Any) -> None:
    """Check that the values have the entries that every checkpoint has.

    Raises:
        ValueError: one is missing, or of another kind.
    """
    progress, optimizer = values["progress"], values["optimizer"]
    _check_counts("progress", progress["step"])
    _check(isinstance(progress["seed"], int), "progress")
    _check(progress.get("scaler") is None or isinstance(progress["scaler"], dict), "the scaler's state")
    _check(
        all(isinstance(one, dict) for one in (*optimizer["settings"], optimizer["numbers"])), "the optimizer's groups"
    )
    _check_counts("a group", *optimizer["of"].values())
    _check(all(n < len(optimizer["settings"]) for n in optimizer["of"].values()), "a group")
    for kind, state in values["states"].items():
        _check_counts(f"the state of the {kind}", state["count"])
        _check(bool(state["of"]) and isinstance(state["of"], dict), f"the state of the {kind}")


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} cannot be")


def _check_counts(what: str, *values: object) -> None:
    _check(all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in values), what)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the index, without the module."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name.

    Raises:
        ValueError: there is none.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if isinstance(dtype, torch.dtype):
        return dtype
    raise ValueError(f"{name!r} is no dtype")


def as_bytes(value: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the host."""
    array: Any = value.reshape(-1).view(torch.uint8).numpy()  # numpy knows fewer dtypes than torch
    return memoryview(array)


Tensors = dict[str, Tensor]


def encode_state(value: Any, tensors: Tensors, prefix: str, *, where: str) -> Any:
    """``value`` as JSON; its tensors are put into ``tensors`` under ``prefix`` and a hash of each, so that equal values are encoded alike.

    Args:
        where: the name of the value in errors.

    Raises:
        UsageError: it holds anything but numbers, texts, tensors and containers of them.

    >>> tensors = {}
    >>> encode_state({"a": (1, 2.5), 3: None, "best": math.inf}, tensors, "x", where="")
    {'$items': [['a', {'$tuple': [1, 2.5]}], [3, None], ['best', {'$float': 'inf'}]]}
    >>> encode_state(torch.ones(2), tensors, "x", where="")
    {'$tensor': 'x.99748111b98573905cc1256b5995b879'}
    >>> decode_state(encode_state(Counter({30: 2}), tensors, "x", where=""), tensors.__getitem__)
    Counter({30: 2})
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str | int | float):
        return _plain(value)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor | np.ndarray):
        copy = _tensor(value, where)
        content = f"{copy.dtype} {tuple(copy.shape)} ".encode() + bytes(as_bytes(copy))
        name = f"{prefix}.{hashlib.sha256(content).hexdigest()[:32]}"
        tensors[name] = copy
        return {"$array" if isinstance(value, np.ndarray) else "$tensor": name}
    if isinstance(value, Mapping):
        return _mapping(value, lambda inner, place: encode_state(inner, tensors, prefix, where=f"{where}{place}"))
    if isinstance(value, list | tuple | set | frozenset):
        inside = [encode_state(inner, tensors, prefix, where=f"{where}[{i}]") for i, inner in enumerate(value)]
        if isinstance(value, set | frozenset):
            return {"$set": sorted(inside, key=repr)}
        return inside if isinstance(value, list) else {"$tuple": inside}
    raise UsageError(
        f"A checkpoint cannot hold the {type(value).__name__} in {where}",
        fix="Let state_dict() give numbers, texts, tensors, and lists and dicts of them",
    )


def _plain(value: bool | str | float | None) -> Any:
    """Return the value in the exact classes of JSON: enumerations of texts become texts, subclasses of float become floats."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    return float(value) if math.isfinite(value) else {"$float": str(float(value))}


def _mapping(value: Mapping[Any, Any], of: Callable[[Any, str], Any]) -> Any:
    items = [[of(key, ""), of(inner, f".{key}")] for key, inner in value.items()]
    if isinstance(value, Counter):
        return {"$counter": items}
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {"$items": items}


def decode_state(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that was given to :func:`encode_state`.

    Args:
        tensor: returns the tensor of a name.

    Raises:
        ValueError: it is not a result of :func:`encode_state`.
    """
    if isinstance(value, list):
        return [decode_state(inner, tensor) for inner in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    if not kind.startswith("$"):
        return {key: decode_state(inner, tensor) for key, inner in value.items()}
    make = _KINDS.get(kind)
    if make is None:
        raise ValueError(f"'{kind}' is no kind of value")
    given = value[kind]
    if kind in {"$tensor", "$array"}:
        return make(tensor(given))
    return make(decode_state(given, tensor) if isinstance(given, list) else given)


_KINDS: dict[str, Callable[[Any], Any]] = {
    "$float": float,
    "$bytes": base64.b64decode,
    "$tensor": lambda value: value,
    "$array": lambda value: value.numpy(),
    "$tuple": tuple,
    "$set": set,
    "$items": dict,
    "$counter": lambda items: Counter(dict(items)),
}


def _tensor(value: Any, where: str) -> Tensor:
    """Return a copy on the host.

    Raises:
        UsageError: it is an array of objects or texts.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True).contiguous()
    try:
        return torch.from_numpy(np.array(value, order="C"))
    except TypeError as error:
        raise UsageError(
            f"A checkpoint cannot hold the array of {value.dtype} in {where}",
            fix="Let state_dict() give arrays of numbers",
        ) from error

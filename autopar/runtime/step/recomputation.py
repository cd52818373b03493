"""Selective recompute of one block: what its cheap operators make is not kept for backward but made again.

While the block runs forward, autograd hands over every tensor that it keeps. One that lies in the memory of what a cheap operator
made, or that such an operator made inside of itself (statistics, masks), is replaced by a note of where it comes from. The
calls behind these notes are remembered with what they read, which is kept. When backward asks for the first of them, these calls
run once more, in order, each on its own, and nothing else of the block does: no product, no collective. Random
operators draw from the streams that their arguments name, so that they repeat themselves.

Which operators are cheap the program says (``BlockProgram.again``, :mod:`autopar.graph.operator_kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

_Key: TypeAlias = tuple[int, str, int]
"""A call, ``output`` or ``inner``, and which one."""

Function: TypeAlias = Callable[..., Any]
Meshes: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Part:
    """A tensor in the memory of output ``output`` of call ``call``."""

    call: int
    output: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that a call reads and that is kept, without its history."""

    tensor: Tensor
    requires_grad: bool


@dataclass(slots=True)
class _Call:
    """A cheap operator: what it reads, as :class:`_Part` or :class:`_Kept`, and what of it backward will ask for.

    Attributes:
        packed: tensors that autograd has asked to keep while it ran.
        inner: positions among these that it made inside of itself.
        wanted: of its outputs those that backward will ask for.
        read: those that other calls read.
        last: outputs of calls that no later call reads, nor backward.
    """

    function: Function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    packed: int = 0
    inner: set[int] = field(default_factory=set)
    wanted: set[int] = field(default_factory=set)
    read: set[int] = field(default_factory=set)
    last: list[_Key] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Note:
    """Stands for a tensor that is made again: output or inner tensor of a call of ``tape``."""

    tape: Tape
    key: _Key
    part: _Part | None = None


class Tape:
    """One forward run of a block; ``meshes``: what sets the meshes whose axes operators name."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._calls: dict[int, _Call] = {}
        self._running: tuple[int, _Call, set[int]] | None = None
        self._made: dict[int, tuple[StorageWeakRef, int, int, torch.dtype]] = {}
        self._again: dict[_Key, Tensor] = {}

    # --- forward

    @contextmanager
    def record(self) -> Iterator[None]:
        """The block runs inside of it."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._made.clear()
        self._prune()

    def call(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a cheap operator."""
        number, read = len(self._calls), set[int]()

        def taken(x: object) -> object:
            if not isinstance(x, Tensor):
                return x
            read.add(_storage(x))
            return self._part(x, x.requires_grad) or _Kept(x.detach(), x.requires_grad)

        call = _Call(function, _mapped(taken, args), _mapped(taken, kwargs))
        self._calls[number], self._running = call, (number, call, read)
        try:
            result = function(*args, **kwargs)
        finally:
            self._running = None
        for k, made in enumerate(_several(result)):
            if isinstance(made, Tensor) and _storage(made) not in read and _is_plain(made):
                alive = StorageWeakRef(made.untyped_storage())  # type: ignore[no-untyped-call]  # no other takes its place
                self._made[_storage(made)] = (alive, number, k, made.dtype)
        return result

    def _part(self, tensor: Tensor, requires_grad: bool = False) -> _Part | None:
        """Where a tensor comes from, if a call made it."""
        if not _is_plain(tensor):
            return None
        found = self._made.get(_storage(tensor))
        if found is None or found[3] != tensor.dtype:
            return None
        _, call, output, _ = found
        place = tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        return _Part(call, output, *place, requires_grad)

    def _pack(self, tensor: Tensor) -> Tensor | _Note:
        position = 0
        if self._running is not None:
            position = self._running[1].packed
            self._running[1].packed += 1
        part = self._part(tensor)
        if part is not None:
            self._calls[part.call].wanted.add(part.output)
            return _Note(self, (part.call, "output", part.output), part)
        if self._running is None or _storage(tensor) in self._running[2]:
            return tensor
        number, call, _ = self._running
        call.inner.add(position)
        return _Note(self, (number, "inner", position))

    def _prune(self) -> None:
        """Forgets the calls that nothing asks for."""
        for number in reversed(list(self._calls)):
            call = self._calls[number]
            if not call.inner and not call.wanted and not call.read:
                del self._calls[number]
                continue
            for part in _parts(call):
                maker = self._calls[part.call]
                if part.output not in maker.wanted and part.output not in maker.read:
                    call.last.append((part.call, "output", part.output))
                maker.read.add(part.output)

    # --- backward

    def tensor(self, note: _Note) -> Tensor:
        """What a note stands for; asked for an inner tensor once more, all is made once more."""
        if note.key not in self._again:
            self._replay()
        return self._again.pop(note.key) if note.part is None else _placed(self._again[note.key], note.part)

    def _replay(self) -> None:
        for number, call in self._calls.items():
            kept: list[Tensor] = []
            args, kwargs = _mapped(self._value, call.args), _mapped(self._value, call.kwargs)
            with torch.enable_grad(), self._meshes(), saved_tensors_hooks(kept.append, _unpack):
                made = _several(call.function(*args, **kwargs))
            self._again |= {(number, "output", k): made[k].detach() for k in call.wanted | call.read}
            self._again |= {(number, "inner", k): kept[k] for k in call.inner}
            for key in call.last:
                del self._again[key]

    def _value(self, read: object) -> object:
        if isinstance(read, _Kept):
            return read.tensor.detach().requires_grad_(read.requires_grad)
        if isinstance(read, _Part):
            whole = self._again[read.call, "output", read.output]
            return _placed(whole, read).detach().requires_grad_(read.requires_grad)
        return read


def with_tape(body: fx.GraphModule, again: Sequence[str], tape: Callable[[], Tape | None]) -> fx.GraphModule:
    """A block's code whose operators of these names run on the tape that there is, if there is one."""
    graph, names = fx.Graph(), frozenset(again)
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, values))
    for node in graph.nodes:
        if node.op == "call_function" and node.meta.get("op") in names:
            node.target = _on_tape(cast("Function", node.target), node.name, tape)
    return fx.GraphModule(body, graph, class_name=type(body).__name__)


def _on_tape(function: Function, name: str, tape: Callable[[], Tape | None]) -> Function:
    def again(*args: Any, **kwargs: Any) -> Any:
        now = tape()
        return function(*args, **kwargs) if now is None else now.call(function, args, kwargs)

    again.__name__ = f"again_{name}"
    return again


def _mapped(change: Callable[[object], object], value: Any) -> Any:
    """Arguments with each leaf changed."""
    if isinstance(value, tuple | list):
        return type(value)(_mapped(change, item) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    return change(value)


def _parts(call: _Call) -> list[_Part]:
    found: list[_Part] = []
    _mapped(lambda x: found.append(x) if isinstance(x, _Part) else None, (call.args, call.kwargs))
    return found


def _several(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple | list) else (result,)


def _unpack(kept: Tensor | _Note) -> Tensor:
    return kept.tape.tensor(kept) if isinstance(kept, _Note) else kept


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is told by its memory, shape and strides."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _placed(whole: Tensor, part: _Part) -> Tensor:
    if tuple(whole.shape) == part.size and whole.stride() == part.stride and whole.storage_offset() == part.offset:
        return whole
    return whole.as_strided(part.size, part.stride, part.offset)

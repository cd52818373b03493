"""What blocks keep for backward: on the host in the meantime, or not at all but made again (selective recompute).

**On the host.** A storage that autograd saves in a block goes down once, when the block's forward is done, and comes back when backward
reaches the block after it, or the block itself. On a GPU both run on a stream of their own; forward waits for the copies of
the block before last, so that what two blocks keep is on the device at most. On CPU ranks both are copies.

**Made again.** While the block runs forward, autograd hands over every tensor that it keeps. One that lies in the memory of what a cheap operator
made, or that such an operator made inside of itself (statistics, masks), is replaced by a note of where it comes from. The
calls behind these notes are remembered with what they read, which is kept. When backward asks for the first of them, these calls
run once more, in order, each on its own, and nothing else of the block does: no product, no collective. Random
operators draw from the streams that their arguments name, so that they repeat themselves.

Which operators are cheap the program says (``BlockProgram.again``, :mod:`autopar.graph.operator_kinds`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A tensor that autograd saved, as a view of a storage that moves."""

    slot: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Mover:
    """Moves what the blocks of one stage keep.

    Attributes:
        down_bytes, up_bytes: moved so far.
    """

    def __init__(self) -> None:
        self.down_bytes = self.up_bytes = 0
        self.stream: Any = None
        self._resident: frozenset[int] = frozenset()
        self._before: weakref.ref[_Saved] | None = None  # what autograd has dropped is gone from here, too
        self._under_way: weakref.ref[_Saved] | None = None

    def begin(self, resident: Iterable[object]) -> None:
        """A micro-batch's forward; ``resident``: what stays on the device whatever blocks keep."""
        self._resident = _storages(resident)
        self._before = None

    @contextmanager
    def block(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """A block's forward."""
        saved = _Saved(self, self._resident | _storages(parameters), self._before)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            yield
        under_way = None if self._under_way is None else self._under_way()
        if under_way is not None:
            under_way.release()
        saved.go_down()
        self._before = self._under_way = weakref.ref(saved)


class _Saved:
    """What one block keeps of one micro-batch."""

    def __init__(self, mover: Mover, resident: frozenset[int], before: weakref.ref[_Saved] | None) -> None:
        self._mover, self._resident, self._before = mover, resident, before
        self._slots: dict[int, int] = {}
        self._here: list[Tensor] = []  # each storage as bytes; kept until it is down, so that its address stays its own
        self._there: list[Tensor] = []
        self._devices: list[torch.device] = []
        # the GPU of those that have one: an operator may keep a tensor of the host too
        self._device: torch.device | None = None
        self._down: Any = None
        self._up: Any = None

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        if isinstance(tensor, DTensor):  # a shared parameter, as recompute is given it
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._resident or not storage.nbytes():
            return tensor
        slot = self._slots.setdefault(storage.data_ptr(), len(self._here))
        if slot == len(self._here):
            self._here.append(_as_bytes(storage, tensor.device))
            self._devices.append(tensor.device)
        return _Packed(slot, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.come_up()
        before = None if self._before is None else self._before()
        if before is not None:
            before.come_up()
        self._before = None
        here = self._arrived(packed.slot)
        found = torch.empty(0, dtype=packed.dtype, device=here.device)
        return found.set_(here.untyped_storage(), packed.offset, packed.size, packed.stride)

    def go_down(self) -> None:
        """Begins to copy; on a CPU, copies."""
        self._slots.clear()
        self._mover.down_bytes += sum(tensor.numel() for tensor in self._here)
        cuda = [tensor for tensor in self._here if tensor.is_cuda]
        if not cuda:
            self._there = [tensor.clone() for tensor in self._here]
            self._here = []
            return
        self._device = cuda[0].device
        if self._mover.stream is None:
            self._mover.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._mover.stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for tensor in self._here:
                there = torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
                self._there.append(there.copy_(tensor, non_blocking=True))
            self._down = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._down.record(stream)

    def release(self) -> None:
        """Gives the device's memory back once the copies are down; the computation that follows waits for them."""
        if self._down is not None and self._here:
            torch.cuda.current_stream(self._device).wait_event(self._down)
            self._here = []

    def come_up(self) -> None:
        """Begins to copy back what is not on the device."""
        if self._here or not self._there:
            return
        there, self._there = self._there, []
        self._mover.up_bytes += sum(tensor.numel() for tensor in there)
        stream = self._mover.stream
        if self._device is None:
            self._here = [tensor.clone() for tensor in there]
            return
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(stream):
            for tensor, device in zip(there, self._devices, strict=True):
                here = torch.empty(tensor.shape, dtype=torch.uint8, device=device)
                self._here.append(here.copy_(tensor, non_blocking=True))
                if here.is_cuda:
                    here.record_stream(current)
            self._up = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._up.record(stream)

    def _arrived(self, slot: int) -> Tensor:
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_event(self._up)
            self._up = None
        return self._here[slot]


def _storages(values: Iterable[object]) -> frozenset[int]:
    plain = (value._local_tensor if isinstance(value, DTensor) else value for value in values)
    return frozenset(value.untyped_storage().data_ptr() for value in plain if isinstance(value, Tensor))


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


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

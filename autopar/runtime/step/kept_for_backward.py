"""What blocks keep for backward: moved to the host (offload), or dropped and recomputed (selective recompute).

**Offload.** A storage that autograd saves in a block is copied to the host once, when the forward of the block ends. It is copied back when
backward reaches the next block, or the block itself. On a GPU the copies run on a stream of their own. Forward waits for the copies of the
block before last, so that the device holds at most what two blocks keep. On CPU ranks the copies are synchronous.

**Selective recompute.** While the block runs forward, autograd passes every tensor that it saves to a hook. A tensor that shares memory
with the output of a cheap operator, or that such an operator made internally (statistics, masks), is replaced by a note of its origin. The
calls behind the notes are recorded, with their operands. When backward unpacks the first note, these calls run once more, in order; nothing
else of the block does: no product, no collective. Random operators draw from streams that their arguments name, so they repeat themselves.

The program says which operators are cheap (``BlockProgram.again``, :mod:`autopar.graph.operator_kinds`).
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
from torch.fx.node import map_aggregate
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A tensor that autograd saved, as a view of an offloaded storage."""

    slot: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class Mover:
    """Offloads what the blocks of one stage keep on devices of a type (``cuda``; ``cpu`` for ranks on CPUs).

    Attributes:
        offloaded_bytes, reloaded_bytes: bytes copied to the host and back so far.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.offloaded_bytes = self.reloaded_bytes = 0
        self.stream: Any = None
        self._resident: frozenset[int] = frozenset()
        self._previous: weakref.ref[_Saved] | None = None  # weak: freed when autograd drops it
        self._copying: weakref.ref[_Saved] | None = None

    def begin(self, resident: Iterable[object]) -> None:
        """Begin the forward of a micro-batch; storages of ``resident`` stay on the device whatever blocks keep."""
        self._resident = _storages(resident)
        self._previous = None

    @contextmanager
    def block(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Enter the context of the forward of one block."""
        saved = _Saved(self, self._resident | _storages(parameters), self._previous)
        with saved_tensors_hooks(saved.pack, saved.unpack):
            yield
        under_way = None if self._copying is None else self._copying()
        if under_way is not None:
            under_way.release()
        saved.offload()
        self._previous = self._copying = weakref.ref(saved)


class _Saved:
    """What one block keeps of one micro-batch.

    Attributes:
        _slots: position of each storage, by its address.
        _on_device, _on_host: the storages as bytes, on the device and on the host.
    """

    def __init__(self, mover: Mover, resident: frozenset[int], previous: weakref.ref[_Saved] | None) -> None:
        self._mover, self._resident, self._previous = mover, resident, previous
        self._slots: dict[int, int] = {}
        self._on_device: list[Tensor] = []  # kept until it is copied, so that no other storage gets its address
        self._on_host: list[Tensor] = []
        self._offloaded: Any = None
        self._reloaded: Any = None

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        # a DTensor is a shared parameter, which recompute passes as an input; beside a GPU operators may also keep tensors of the host
        if isinstance(tensor, DTensor) or tensor.device.type != self._mover.device_type:
            return tensor
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._resident or not storage.nbytes():
            return tensor
        slot = self._slots.setdefault(storage.data_ptr(), len(self._on_device))
        if slot == len(self._on_device):
            self._on_device.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return _Packed(slot, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.reload()
        previous = None if self._previous is None else self._previous()
        if previous is not None:
            previous.reload()
        self._previous = None
        on_device = self._arrived(packed.slot)
        view = torch.empty(0, dtype=packed.dtype, device=on_device.device)
        return view.set_(on_device.untyped_storage(), packed.offset, packed.size, packed.stride)

    def offload(self) -> None:
        """Start the copies to the host; on a CPU, copies."""
        self._slots.clear()
        self._mover.offloaded_bytes += sum(tensor.numel() for tensor in self._on_device)
        if self._mover.device_type == "cpu":
            self._on_host = [tensor.clone() for tensor in self._on_device]
            self._on_device = []
            return
        if self._mover.stream is None:
            self._mover.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream = self._mover.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for tensor in self._on_device:
                on_host = torch.empty(tensor.shape, dtype=torch.uint8, pin_memory=True)
                self._on_host.append(on_host.copy_(tensor, non_blocking=True))
            self._offloaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._offloaded.record(stream)

    def release(self) -> None:
        """Free the device memory of what is copied; the computation that follows waits for the copies."""
        if self._offloaded is not None and self._on_device:
            torch.cuda.current_stream().wait_event(self._offloaded)
            self._on_device = []

    def reload(self) -> None:
        """Start the copies back of what is not on the device."""
        if self._on_device or not self._on_host:
            return
        on_host, self._on_host = self._on_host, []
        self._mover.reloaded_bytes += sum(tensor.numel() for tensor in on_host)
        stream = self._mover.stream
        if stream is None:
            self._on_device = [tensor.clone() for tensor in on_host]
            return
        current = torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            for tensor in on_host:
                on_device = torch.empty(tensor.shape, dtype=torch.uint8, device="cuda")
                self._on_device.append(on_device.copy_(tensor, non_blocking=True))
                on_device.record_stream(current)
            self._reloaded = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._reloaded.record(stream)

    def _arrived(self, slot: int) -> Tensor:
        if self._reloaded is not None:
            torch.cuda.current_stream().wait_event(self._reloaded)
            self._reloaded = None
        return self._on_device[slot]


def _storages(values: Iterable[object]) -> frozenset[int]:
    plain = (value._local_tensor if isinstance(value, DTensor) else value for value in values)
    return frozenset(value.untyped_storage().data_ptr() for value in plain if isinstance(value, Tensor))


_Key: TypeAlias = tuple[int, str, int]
"""A tensor of a call: the call's number, ``output`` or ``inner``, and the position."""

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


@dataclass(slots=True)
class _Call:
    """A cheap operator: its operands, as :class:`_Part` or kept without autograd history, and which of its tensors backward will need.

    Attributes:
        packed: number of tensors that autograd has saved while it ran.
        inner: positions among these of tensors that it made internally.
        wanted: positions of the outputs that backward will need.
        read: positions of the outputs that other calls read.
        last: outputs of calls that neither later calls nor backward read.
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
    """Stands for a tensor that is recomputed: an output or an inner tensor of a call of ``tape``."""

    tape: Tape
    key: _Key
    part: _Part | None = None


class Tape:
    """The record of one forward run of a block; ``meshes`` is the context of the meshes whose axes operators name."""

    def __init__(self, meshes: Meshes) -> None:
        self._meshes = meshes
        self._calls: dict[int, _Call] = {}
        self._running: tuple[int, _Call, set[int]] | None = None
        self._origins: dict[int, tuple[StorageWeakRef, int, int, torch.dtype]] = {}
        self._recomputed: dict[_Key, Tensor] = {}

    # --- forward

    @contextmanager
    def record(self) -> Iterator[None]:
        """Enter the context in which the block runs."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._origins.clear()
        self._prune()

    def call(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a cheap operator and record it."""
        number, read = len(self._calls), set[int]()

        def operand(x: object) -> Any:
            if not isinstance(x, Tensor):
                return x
            read.add(_storage(x))
            return self._part(x, x.requires_grad) or x.detach().requires_grad_(x.requires_grad)

        call = _Call(function, map_aggregate(args, operand), map_aggregate(kwargs, operand))
        self._calls[number], self._running = call, (number, call, read)
        try:
            result = function(*args, **kwargs)
        finally:
            self._running = None
        for k, output in enumerate(_as_sequence(result)):
            if isinstance(output, Tensor) and _storage(output) not in read and _is_plain(output):
                alive = StorageWeakRef(output.untyped_storage())  # type: ignore[no-untyped-call]  # no other takes its place
                self._origins[_storage(output)] = (alive, number, k, output.dtype)
        return result

    def _part(self, tensor: Tensor, requires_grad: bool = False) -> _Part | None:
        """Return the origin of a tensor, if a recorded call made it."""
        if not _is_plain(tensor):
            return None
        origin = self._origins.get(_storage(tensor))
        if origin is None or origin[3] != tensor.dtype:
            return None
        _, call, output, _ = origin
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
        """Drop the calls that nothing needs."""
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
        """Return the tensor of a note. If an inner tensor is requested a second time, all calls run again."""
        if note.key not in self._recomputed:
            self._replay()
        return self._recomputed.pop(note.key) if note.part is None else _view(self._recomputed[note.key], note.part)

    def _replay(self) -> None:
        for number, call in self._calls.items():
            saved: list[Tensor] = []
            args, kwargs = map_aggregate(call.args, self._value), map_aggregate(call.kwargs, self._value)
            with torch.enable_grad(), self._meshes(), saved_tensors_hooks(saved.append, _unpack):
                outputs = _as_sequence(call.function(*args, **kwargs))
            self._recomputed |= {(number, "output", k): outputs[k].detach() for k in call.wanted | call.read}
            self._recomputed |= {(number, "inner", k): saved[k] for k in call.inner}
            for key in call.last:
                del self._recomputed[key]

    def _value(self, operand: object) -> Any:
        if isinstance(operand, Tensor):
            return operand.detach().requires_grad_(operand.requires_grad)
        if isinstance(operand, _Part):
            output = self._recomputed[operand.call, "output", operand.output]
            return _view(output, operand).detach().requires_grad_(operand.requires_grad)
        return operand


def with_tape(body: fx.GraphModule, again: Sequence[str], tape: Callable[[], Tape | None]) -> fx.GraphModule:
    """Return a copy of a block's code in which the operators of these names run on the current tape, if there is one."""
    graph, names = fx.Graph(), frozenset(again)
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(body.graph, values))
    for node in graph.nodes:
        if node.op == "call_function" and node.meta.get("op") in names:
            node.target = _on_tape(cast("Function", node.target), node.name, tape)
    return fx.GraphModule(body, graph, class_name=type(body).__name__)


def _on_tape(function: Function, name: str, tape: Callable[[], Tape | None]) -> Function:
    def call(*args: Any, **kwargs: Any) -> Any:
        current = tape()
        return function(*args, **kwargs) if current is None else current.call(function, args, kwargs)

    call.__name__ = f"again_{name}"
    return call


def _parts(call: _Call) -> list[_Part]:
    leaves: list[Any] = []
    map_aggregate((call.args, call.kwargs), leaves.append)
    return [leaf for leaf in leaves if isinstance(leaf, _Part)]


def _as_sequence(result: Any) -> Sequence[Any]:
    return result if isinstance(result, tuple | list) else (result,)


def _unpack(kept: Tensor | _Note) -> Tensor:
    return kept.tape.tensor(kept) if isinstance(kept, _Note) else kept


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor is determined by its memory, shape and strides."""
    return tensor.layout == torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _view(whole: Tensor, part: _Part) -> Tensor:
    if tuple(whole.shape) == part.size and whole.stride() == part.stride and whole.storage_offset() == part.offset:
        return whole
    return whole.as_strided(part.size, part.stride, part.offset)

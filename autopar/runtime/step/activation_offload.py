"""What blocks keep for backward, on the host in the meantime.

A storage that autograd saves in a block goes down once, when the block's forward is done, and comes back when backward
reaches the block after it, or the block itself. On a GPU both run on a stream of their own; forward waits for the copies of
the block before last, so that what two blocks keep is on the device at most. On CPU ranks both are copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """A tensor that autograd saved, as a view of a storage that moves."""

    owner: _Saved
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
        return _Packed(self, slot, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def unpack(self, packed: Tensor | _Packed) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        owner = packed.owner
        owner.come_up()
        before = None if owner._before is None else owner._before()
        if before is not None:
            before.come_up()
        owner._before = None
        here = owner._arrived(packed.slot)
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

"""Copies of parameters on the host, on which an optimizer steps whose states live there.

After ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840). The device keeps the parameter that forward and backward read, and
that FSDP gathers from. Before a step gradients go down, after it parameters come up. A parameter goes down only where somebody
else has written it since it came up: no counter notices all of that (``.data``), a checksum made on the device does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from autopar.runtime.optimizer.checksum import checksums


class HostCopy:
    """A parameter on the host, page-locked where its device is a GPU, and its gradient.

    Attributes:
        parameter: what the optimizer steps on.
        came_up: checksum of what came up; None before the first step.
    """

    def __init__(self, local: Tensor) -> None:
        self.parameter = nn.Parameter(_on_host(local), requires_grad=True)
        self.came_up: int | None = None
        self._gradient: Tensor | None = None

    def lend(self, gradient: Tensor | None) -> None:
        """Begins to copy the gradient; without one there is no step."""
        if gradient is None:
            self.parameter.grad = None
            return
        if self._gradient is None:  # as the parameter lies: kernels for all elements at once take one by one from both
            self._gradient = _on_host(self.parameter.detach(), is_pinned=gradient.is_cuda)
        self._gradient.copy_(gradient, non_blocking=True)
        self.parameter.grad = self._gradient

    @property
    def is_stepped(self) -> bool:
        """Whether it has a gradient."""
        return self.parameter.grad is not None


class HostCopies:
    """What is in flight between the host and the device of one optimizer's parameters."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._up: tuple[list[HostCopy], Tensor] | None = None

    def down(self, stepped: Sequence[tuple[HostCopy, Tensor]]) -> None:
        """Waits for the gradients, and copies those parameters that were written since they came up.

        Args:
            stepped: copies with a gradient, and the parameter on the device of each.
        """
        if not stepped:
            return
        found = _to_host(checksums([local for _, local in stepped]))
        self._mark(local for _, local in stepped)
        self.wait()
        numbers = zip(stepped, _read(found), strict=True)
        written = [(host, local) for (host, local), now in numbers if host.came_up != now]
        with torch.no_grad():
            for host, local in written:
                host.parameter.copy_(local, non_blocking=True)
        self._mark(local for _, local in written)
        self.wait()

    def up(self, stepped: Sequence[tuple[HostCopy, Tensor]]) -> None:
        """Begins to copy the parameters to the device, ahead of all that its current stream does from now on."""
        if not stepped:
            return
        with torch.no_grad():
            for host, local in stepped:
                local.copy_(host.parameter, non_blocking=True)
        self._up = [host for host, _ in stepped], _to_host(checksums([local for _, local in stepped]))
        self._mark(local for _, local in stepped)

    def wait(self) -> None:
        """Until all that was begun is done: before the host reads what came down, or writes what goes up."""
        for event in self._events:
            event.synchronize()
        self._events.clear()
        if self._up is not None:
            for host, number in zip(self._up[0], _read(self._up[1]), strict=True):
                host.came_up = number
            self._up = None

    def _mark(self, tensors: Iterable[Tensor]) -> None:
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)


def host_state(value: Tensor) -> Tensor:
    """A state of an optimizer on the host; states that were loaded from elsewhere may lie on the device."""
    return value if value.device.type == "cpu" else _on_host(value).copy_(value)


def _read(numbers: Tensor) -> list[int]:
    """Numbers on the host."""
    found: list[int] = numbers.tolist()
    return found


def _to_host(value: Tensor) -> Tensor:
    return _on_host(value).copy_(value, non_blocking=True)


def _on_host(like: Tensor, *, is_pinned: bool = False) -> Tensor:
    return torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=like.is_cuda or is_pinned)

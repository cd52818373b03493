"""Copies of parameters on the host, on which an optimizer steps whose states live there.

After ZeRO-Offload (Ren et al. 2021, arXiv 2101.06840). The device keeps the parameter that forward and backward read, and
that FSDP gathers from. Before a step parameter and gradient go down: whatever has written the parameter since the last
step, and no counter notices all of it (``.data``), the step begins from it. After the step the parameter comes up.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class HostCopy:
    """A parameter on the host, page-locked where its device is a GPU, and its gradient.

    Attributes:
        parameter: what the optimizer steps on.
    """

    def __init__(self, local: Tensor) -> None:
        self.parameter = nn.Parameter(_on_host(local), requires_grad=True)
        self._gradient: Tensor | None = None

    def down(self, local: Tensor, gradient: Tensor | None) -> None:
        """Begins to copy parameter and gradient; without a gradient there is no step, and nothing is copied."""
        if gradient is None:
            self.parameter.grad = None
            return
        with torch.no_grad():
            self.parameter.copy_(local, non_blocking=True)
            if self._gradient is None:
                self._gradient = _on_host(gradient)
            self._gradient.copy_(gradient, non_blocking=True)
        self.parameter.grad = self._gradient

    def up(self, local: Tensor) -> None:
        """Begins to copy the parameter to the device, ahead of all that its current stream does from now on."""
        if self.parameter.grad is None:
            return
        self.parameter.grad = None
        with torch.no_grad():
            local.copy_(self.parameter, non_blocking=True)


class Copies:
    """The copies in flight of one step."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self, tensors: Iterable[Tensor]) -> None:
        """Remembers the copies that were begun to and from these tensors' devices."""
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def wait(self) -> None:
        """Until all that were marked are done: before the host reads what came down, or writes what goes up."""
        for event in self._events:
            event.synchronize()
        self._events.clear()


def host_state(value: Tensor) -> Tensor:
    """A state of an optimizer on the host; states that were loaded from elsewhere may lie on the device."""
    return value if value.device.type == "cpu" else _on_host(value).copy_(value)


def _on_host(like: Tensor) -> Tensor:
    return torch.empty_like(like, device="cpu", requires_grad=False, pin_memory=like.is_cuda)

"""The loss of the global batch, of which each rank has a part or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.plan.mesh import DATA_AXES
from autopar.plan.plan import Plan
from autopar.plan.run_log import DATA, PIPELINE
from autopar.runtime.monitor import Monitor
from autopar.runtime.world import World


class GlobalLoss:
    """Sums the parts of all ranks; all of them make one and call the same methods."""

    def __init__(self, plan: Plan, world: World, monitor: Monitor) -> None:
        self._device, self._monitor = world.device, monitor
        self._part = PIPELINE if plan.mesh.pp > 1 else DATA
        self._group = world.axis_group(("pp", *DATA_AXES))
        self.dtype = torch.float64 if plan.precision.compute == "float64" else torch.float32

    def of(self, part: Tensor | None) -> Tensor:
        """The sum, from this rank's part if it has one: a scalar without a gradient, the same on every rank."""
        none = torch.zeros((), device=self._device, dtype=self.dtype)
        return self.summed(none if part is None else part.to(self.dtype))

    def called(
        self, part: Tensor, begin: Callable[[], None], finish: Callable[[], None], parameters: Iterable[Tensor]
    ) -> Tensor:
        """The sum, whose ``backward()`` is that of the part; it calls ``begin`` before it and ``finish`` after it.

        Args:
            parameters: for which nobody may ask by ``torch.autograd.grad``.
        """
        start = torch.zeros((), device=self._device, requires_grad=part.requires_grad)
        return cast("Tensor", _Called.apply(start, part, self, begin, finish, *parameters))  # type: ignore[no-untyped-call]

    def summed(self, loss: Tensor) -> Tensor:
        """In place."""
        if self._group is not None:
            # the ranks of a pipeline end at different times, and wait for the last one here
            with self._monitor.part(self._part):
                dist.all_reduce(loss, group=self._group)
        return loss


def plain_gradient(node: Any, gradient: Tensor) -> Tensor:
    """What the ``backward`` of a loss was given.

    Args:
        node: of the loss in the graph of autograd; its first input is a leaf that nobody else has.

    Raises:
        UsageError: gradients are asked for in a way by which they would not be those of all ranks.
    """
    if torch.is_grad_enabled():
        raise UsageError.unsupported(
            "A gradient of gradients (create_graph=True)",
            instead="Leave it out: a plan has no backward of its backward pass. A penalty of the weights or outputs themselves "
            "goes into the loss, in the model's forward or in loss_fn",
        )
    if not torch._C._will_engine_execute_node(node.next_functions[0][0]):
        raise UsageError.unsupported(
            "A gradient by torch.autograd.grad or backward(inputs=...) of a loss of a parallel model",
            instead="Call loss.backward() and read p.grad of par.parameters(), or par.full_gradients()",
        )
    if isinstance(gradient, DTensor):  # torch adds the loss to the parts of a sum, as if it were one of them
        raise UsageError(
            "The loss was added to a DTensor, as a penalty of par.parameters() is",
            fix="Compute the penalty in the model's forward or in loss_fn, as a part of the loss, or add its .full_tensor()",
        )
    return gradient


class _Called(torch.autograd.Function):
    """Forward: the sum of the ranks' parts. Backward: passes on, and has the gradient sums done at its end."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        loss: Tensor,
        whole: GlobalLoss,
        begin: Callable[[], None],
        finish: Callable[[], None],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.begin, ctx.finish, ctx.count = begin, finish, len(parameters)
        return whole.summed(loss.detach().clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient = plain_gradient(ctx, gradients[0])
        ctx.begin()
        engine = torch.autograd.Variable._execution_engine
        # Twice, so that it comes after the callback that FSDP queues in the course of this backward.
        engine.queue_callback(lambda: engine.queue_callback(ctx.finish))
        return None, gradient, *[None] * (3 + ctx.count)

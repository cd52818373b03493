"""A loss whose ``backward()`` is called as of any module, under any plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.global_loss import plain_gradient
from autopar.runtime.step.gradients import local_part


def loss_of(outputs: Any) -> Tensor:
    """Of what a model returns: the entry ``loss``, the first one, or all of it."""
    if isinstance(outputs, Tensor):
        return outputs
    return cast("Tensor", outputs["loss"] if isinstance(outputs, Mapping) else outputs[0])


def step_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """The loss of a global batch, as ``par.train_step(batch)`` takes it; its ``backward()`` adds to the parameters' gradients.

    Of a model that is not parallel it is the one that it returns, so that one loop is for both.

    Forward and backward of all micro-batches have run when this returns, as pipeline stages run them together. What is computed
    from the loss before ``backward()`` (a division by the number of accumulated batches, a weight) counts: backward multiplies the
    gradients by the derivative. Gradients that are there, or set to None, between this and ``backward()`` are as for any module.

    Raises:
        UsageError: as ``train_step``; the plan is in float16, whose loss ``train_step`` scales by itself.
    """
    if not isinstance(model, ParallelModel):
        return loss_of(model(**batch))
    par = model
    if par.plan.precision.scales_loss:
        raise UsageError.unsupported(
            "A plan in fp16 in another library's training loop",
            instead='Make the plan with precision="bf16", or write the loop with par.train_step(batch) and par.grad_scaler()',
        )
    parameters = [p for p in par.parameters() if p.requires_grad]
    earlier = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        loss = par.train_step(batch).as_subclass(Tensor)
        made = [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, earlier, strict=True):
            p.grad = grad
    pairs = [(p, grad) for p, grad in zip(parameters, made, strict=True) if grad is not None]
    start = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    return cast("Tensor", _Ready.apply(start, loss, pairs, *parameters))  # type: ignore[no-untyped-call]


class _Ready(torch.autograd.Function):
    """Forward: the loss that is known. Backward: gradients that are known, times that of the loss."""

    @staticmethod
    def forward(
        ctx: Any, start: Tensor, loss: Tensor, pairs: list[tuple[nn.Parameter, Tensor]], *parameters: Tensor
    ) -> Tensor:
        ctx.pairs, ctx.count = pairs, len(parameters)
        return start + loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        gradient = plain_gradient(ctx, gradients[0])
        pairs, ctx.pairs = ctx.pairs, None
        if pairs is None:
            raise UsageError(
                "A second backward() was called on the loss of one step",
                fix="Add losses up before backward(), or compute the step again",
            )
        with torch.no_grad():
            if pairs:
                torch._foreach_mul_([local_part(grad) for _, grad in pairs], gradient)
            for p, grad in pairs:
                if p.grad is None:
                    p.grad = grad
                else:
                    local_part(p.grad).add_(local_part(grad))
        return (None,) * (3 + ctx.count)

"""A loss with a ``backward()`` as that of any module, under any plan, and what the integrations share: scalers, precisions, errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from autopar.errors import UsageError
from autopar.plan.plan import PRECISIONS
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.global_loss import with_backward
from autopar.runtime.step.gradients import local_part


def loss_of(outputs: Any) -> Tensor:
    """Return the loss in a model's output: the entry ``loss``, the first entry, or the output itself."""
    if isinstance(outputs, Tensor):
        return outputs
    return cast("Tensor", outputs["loss"] if isinstance(outputs, Mapping) else outputs[0])


def step_loss(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """Return the loss of a global batch, as ``par.train_step(batch)`` takes it; its ``backward()`` adds to the parameters' gradients.

    For a model that is not parallel it is the loss that the model returns, so that one loop serves both.

    Forward and backward of all micro-batches have run when this returns, since pipeline stages interleave them. Backward then multiplies
    the gradients by the derivative of what was computed from the loss (a division by the number of accumulated batches, a weight).
    Gradients that exist before, or are set to None in between, are treated as for any module. Under a plan in fp16, scale it by ``scaler =
    par.grad_scaler()``: ``scaler.scale(loss).backward()``.

    Raises:
        UsageError: as ``train_step``; or ``backward()`` is called twice.
    """
    if not isinstance(model, ParallelModel):
        return loss_of(model(**batch))
    parameters = [p for p in model.parameters() if p.requires_grad]
    previous = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        loss = model.train_step(batch).as_subclass(Tensor)
        gradients = [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, previous, strict=True):
            p.grad = grad
    scaler, factor = model._scaler, model._scaler.factor
    pending = [[(p, grad) for p, grad in zip(parameters, gradients, strict=True) if grad is not None]]

    def add(gradient: Tensor) -> None:
        if not pending:
            raise UsageError(
                "A second backward() was called on the loss of one step",
                fix="Add losses up before backward(), or compute the step again",
            )
        pairs = pending.pop()
        scaler.check_called()
        with torch.no_grad():
            if factor is not None:  # the step and the loop's scaler have both multiplied by it
                gradient = gradient / factor
            if pairs:
                torch._foreach_mul_([local_part(grad) for _, grad in pairs], gradient)
            for p, grad in pairs:
                if p.grad is None:
                    p.grad = grad
                else:
                    local_part(p.grad).add_(local_part(grad))

    return with_backward(loss, add, parameters)


def scaler_of(par: ParallelModel, **options: Any) -> GradScaler | None:
    """Return the scaler by which a loop scales losses; None if the plan is not in fp16.

    Args:
        par: the parallel model.
        options: options of the scaler, if it has to be made.
    """
    if not par.plan.precision.scales_loss:
        return None
    return par._scaler if par._scaler.is_made else par.grad_scaler(**options)


def check_precision(par: ParallelModel, asked: str) -> None:
    """Check that a library is configured with the precision of the plan, or with none.

    Args:
        par: the parallel model.
        asked: ``no`` or the name of a precision (``bf16``, ``fp16``).

    Raises:
        UsageError: it is another precision.
    """
    if asked not in ("no", par.plan.precision.name):
        fits = "" if asked not in PRECISIONS else f'Call autopar.parallelize(model, precision="{asked}"), or leave '
        raise UsageError.mismatch(
            "The precision that the training loop asks for and that of the plan",
            expected=par.plan.precision.name,
            got=asked,
            fix=f"{fits or 'Leave '}the precision out of the loop: all of it is the plan's",
        )


@contextmanager
def parts_are_explained() -> Iterator[None]:
    """Explain torch's error when a training step of a loop computes with DTensors that a parallel model returned.

    Raises:
        UsageError: DTensors were combined with ordinary tensors.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise UsageError(
            "Outputs of the parallel model in training are parts of the global batch (DTensors), and cannot be computed with ordinary "
            "tensors, as a loss that the loop makes of them does",
            fix="Give the loss to the plan: autopar.parallelize(model, loss_fn=lambda output, batch: ...). Metrics are computed from "
            "par.predict(batch)",
        ) from error


def only_model(models: Sequence[ParallelModel], owner: str, fix: str) -> ParallelModel:
    """Return the parallel model of a loop.

    Raises:
        UsageError: there is none, or there are several.
    """
    if len(models) != 1:
        raise UsageError(f"{owner} has {len(models) or 'no'} parallel model{'s' * (len(models) > 1)}", fix=fix)
    return models[0]

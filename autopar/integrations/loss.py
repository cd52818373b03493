"""A loss whose ``backward()`` is called as of any module, under any plan."""

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
    Under a plan in fp16 it is a loss for ``scaler.scale(loss).backward()``, where ``scaler = par.grad_scaler()``.

    Raises:
        UsageError: as ``train_step``.
    """
    if not isinstance(model, ParallelModel):
        return loss_of(model(**batch))
    parameters = [p for p in model.parameters() if p.requires_grad]
    earlier = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        loss = model.train_step(batch).as_subclass(Tensor)
        made = [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, earlier, strict=True):
            p.grad = grad
    scaler, factor = model._scaler, model._scaler.factor
    ready = [[(p, grad) for p, grad in zip(parameters, made, strict=True) if grad is not None]]

    def add(gradient: Tensor) -> None:
        if not ready:
            raise UsageError(
                "A second backward() was called on the loss of one step",
                fix="Add losses up before backward(), or compute the step again",
            )
        pairs = ready.pop()
        scaler.check_called()
        with torch.no_grad():
            if factor is not None:  # by which the step and the scaler of the loop have both multiplied
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
    """The one by which a loop scales losses; None where the plan is not in fp16.

    Args:
        options: of one that is not made yet.
    """
    if not par.plan.precision.scales_loss:
        return None
    return par._scaler if par._scaler.is_made else par.grad_scaler(**options)


def check_precision(par: ParallelModel, asked: str) -> None:
    """Nothing, where a library was asked for the precision that the plan has, or for none.

    Args:
        asked: ``no`` or the name of a precision (``bf16``, ``fp16``).

    Raises:
        UsageError: it is another one.
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
    """Around a step of a loop, where DTensors that a training call gave are computed with: torch says what it lacks, not why.

    Raises:
        UsageError: they met ordinary tensors.
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


def only_model(found: Sequence[ParallelModel], owner: str, fix: str) -> ParallelModel:
    """The parallel model of a loop.

    Raises:
        UsageError: there is none, or there are several.
    """
    if len(found) != 1:
        raise UsageError(f"{owner} has {len(found) or 'no'} parallel model{'s' * (len(found) > 1)}", fix=fix)
    return found[0]

"""What a plan and one device are compared by: a few steps of AdamW, and how far apart two such runs are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, first_line
from autopar.plan.plan import FP32, Precision
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.failures import FAILURES, explained
from autopar.tracing.trace import pick_loss
from autopar.verification.results import RankErrors

LEARNING_RATE = 1e-3
ADAM_EPSILON = 1e-5
"""Larger than rounding noise: a gradient that is zero but for rounding (of a key's bias) must not become a step."""


def adamw(parameters: Any) -> torch.optim.AdamW:
    """The optimizer of both sides."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)


def loss_of(output: Any) -> Tensor:
    """The loss in what a model returns: itself, its ``loss``, or its first scalar, as a trace takes it."""
    return pick_loss(output, "verify")


class Trained(TypedDict):
    """What a run leaves to compare."""

    losses: tuple[float, ...]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def trained_alone(
    model: nn.Module, batches: Sequence[Mapping[str, Tensor]], problem: str, error: type[AutoparError] = AutoparError
) -> Trained:
    """As :func:`trained`, for models of users.

    Raises:
        AutoparError: of that type, with that problem: the model cannot make these steps; names its line.
    """
    try:
        return trained(model, batches)
    except FAILURES as failure:
        raise error(
            problem,
            where=explained(failure, model).where,
            got=f"{type(failure).__name__}: {first_line(failure)}",
            fix="Correct that line, or give inputs and settings that fit the model",
        ) from failure


def trained(model: nn.Module, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    """One device's run."""
    optimizer = adamw(model.parameters())
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = loss_of(model(**batch))
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in _named(model) if p.grad is not None}
        optimizer.step()
    parameters = {name: p.detach() for name, p in _named(model) if p.grad is not None}
    parameters |= {name: new for name, new in model.named_buffers() if not torch.equal(new, buffers[name])}
    return {"losses": tuple(losses), "gradients": gradients, "parameters": parameters}


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def trained_in_parallel(parallel: ParallelModel, batches: Sequence[Mapping[str, Tensor]]) -> Trained:
    """One rank's run."""
    optimizer = adamw(parallel.parameters())
    found: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        found.append(parallel.train_step(batch).item())
        if step == 0:
            gradients = parallel.full_gradients()
        optimizer.step()
    return {"losses": tuple(found), "gradients": gradients, "parameters": parallel.full_state_dict()}


def errors(rank: int, found: Trained, reference: Trained, precision: Precision = FP32) -> RankErrors:
    """How far one rank's run is from one device's."""
    gradient_name, gradient = worst(found["gradients"], reference["gradients"])
    parameter_name, parameter = worst(found["parameters"], reference["parameters"])
    return RankErrors(
        rank=rank,
        losses=found["losses"],
        loss=max(_relative(abs(a - b), abs(b)) for a, b in zip(found["losses"], reference["losses"], strict=True)),
        gradient=gradient,
        gradient_name=gradient_name,
        parameter=parameter,
        parameter_name=parameter_name,
        precision=precision.name,
    )


def worst(found: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[str, float]:
    """The tensor with the largest relative error; one that is missing counts as infinitely wrong.

    A tensor that is nothing but rounding beside the others (1e-6 of the largest) is measured against that.
    """
    floor = 1e-6 * max((float(tensor.abs().max()) for tensor in reference.values()), default=0.0)
    off = {
        name: _relative(float((found[name] - tensor).abs().max()), max(float(tensor.abs().max()), floor))
        if name in found
        else float("inf")
        for name, tensor in reference.items()
    }
    name = max(off, key=lambda name: off[name])
    return name, off[name]


def _relative(difference: float, size: float) -> float:
    """Their ratio; infinity for what is not a number."""
    if difference == 0.0:
        return 0.0
    ratio = difference / size if size else float("inf")
    return float("inf") if math.isnan(ratio) else ratio

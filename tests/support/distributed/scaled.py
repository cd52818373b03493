"""What tests of float16 run on every rank, and on one device alone: float32 parameters, float16 products, a scaled loss."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.func import functional_call

from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.global_loss import ParallelScaler
from autopar.verification.reference import loss_of
from tests.support.parallel import clip, gradients, halve, state

Batch = Mapping[str, Tensor]


def sgd(parameters: Any, *, fused: bool = False) -> torch.optim.Optimizer:
    """Steps are linear in gradients, so that errors of parameters are those of gradients."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=fused)


def steps(
    model: nn.Module, batches: Sequence[Batch], *, scaling: Mapping[str, Any], called: bool = False,
    fused: bool = False, infinite: tuple[int, int] | None = None,
) -> dict[str, list[Any]]:  # fmt: skip
    """Of each step, by ranks or by one device, the loss, gradients and their norm after they are unscaled, parameters and the
    state of the scaler.

    ``called``: not by ``train_step``; ``fused``: the optimizer unscales, and gradients are not looked at; ``infinite``: step and
    rank in which one element of a gradient is made infinite.
    """
    is_parallel = isinstance(model, ParallelModel)
    scaler = model.grad_scaler(**scaling) if is_parallel else GradScaler("cpu", **scaling)
    optimizer = sgd(model.parameters(), fused=fused)
    found: dict[str, list[Any]] = {"losses": [], "norms": [], "gradients": [], "parameters": [], "states": []}
    for number, batch in enumerate(batches):
        loss = loss_of(model(**batch)) if called else model.train_step(batch)
        if called:
            scaler.scale(loss).backward()
        if infinite is not None and infinite == (number, dist.get_rank()):
            first = next(p.grad for p in model.parameters() if p.grad is not None)
            getattr(first, "_local_tensor", first).view(-1)[0] = torch.inf
        if not fused:
            scaler.unscale_(optimizer)
            found["gradients"].append(gradients(model))
            found["norms"].append(clip(model, torch.inf))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
        found["parameters"].append(state(model))
        found["states"].append(scaler.state_dict())
    return found


def alone(model: nn.Module, batches: Sequence[Batch], *, scaling: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The same of one device, by torch alone: the model in float16 with copies of parameters that are kept in float32."""
    half = copy.deepcopy(model).half()

    def forward(**batch: Tensor) -> Any:
        copies = {name: master.half() for name, master in model.named_parameters()}
        return functional_call(half, copies, (), batch)

    model.forward = forward
    return steps(model, batches, scaling=scaling, called=True)


def _trained(parallel: ParallelModel, scaler: ParallelScaler, batch: Batch) -> float:
    optimizer = sgd(parallel.parameters())
    loss = parallel.train_step(batch).item()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss


def save(parallel: ParallelModel, batch: Batch, folder: str) -> tuple[dict[str, Any], float]:
    """Saves after a step; the scaler's state, and the loss of the next step."""
    scaler = parallel.grad_scaler(init_scale=1024.0, growth_interval=3)
    _trained(parallel, scaler, batch)
    parallel.save(Path(folder))
    return scaler.state_dict(), _trained(parallel, scaler, batch)


def load(parallel: ParallelModel, batch: Batch, folder: str, *, late: bool) -> tuple[dict[str, Any], float]:
    """Loads into other weights, before (``late``) or after the scaler is made; its state, and the loss of a step."""
    parallel.seed = 3
    halve(parallel)
    if late:
        parallel.load(Path(folder))
    scaler = parallel.grad_scaler()
    if not late:
        parallel.load(Path(folder))
    return scaler.state_dict(), _trained(parallel, scaler, batch)

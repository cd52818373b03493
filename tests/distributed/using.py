"""What people try around a parallel model in their first hour; run on every rank, by name."""

from __future__ import annotations

import torch
from torch import nn

from autopar.graph.ir import Graph
from autopar.plan import Plan
from autopar.runtime.launch import launch
from autopar.runtime.verify import adamw
from tests.distributed.jobs import Batch
from tests.distributed.subjects import HfSubject


def in_inference_mode(
    subject: HfSubject, plan: Plan, graph: Graph, batch: Batch, folder: str
) -> tuple[list[float], bool]:
    """Losses of steps between what was made, evaluated, clipped, saved and loaded in inference mode; whether states are of it."""
    model: nn.Module = subject.build()
    with torch.inference_mode():
        parallel = launch(model, lambda: (plan, graph), device_type="cpu")
        losses = [parallel.evaluate(batch).item()]
    optimizer = adamw(parallel.parameters())
    losses.append(parallel.train_step(batch).item())
    with torch.inference_mode():
        whole = parallel.full_gradients()
        parallel.clip_grad_norm_(1e6)
    optimizer.step()
    with torch.inference_mode():
        whole |= parallel.full_state_dict()
        parallel.save(folder, optimizer)
        parallel.load(folder, optimizer)
        losses.append(parallel.evaluate(batch).item())
    losses.append(parallel.train_step(batch).item())
    return losses, any(tensor.is_inference() for tensor in whole.values())

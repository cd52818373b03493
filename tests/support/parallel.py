"""Parallel models, as a rank of the process group that is there makes them, and what they and ordinary models are asked alike."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.verification.reference import loss_of
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject, graph_of

SMALL = HfSubject("gpt2", depth=1)


def on_rank(model: nn.Module, plan: Plan, graph: Graph, *, seed: int = 0, **options: Any) -> ParallelModel:
    world = World(plan.mesh, "cpu")
    program = lower(plan, graph, rank=world.rank)
    return ParallelModel(program, world, ModelWeights(model, seed), seed=seed, **options)


def halve(parallel: ParallelModel) -> None:
    """Other weights, as a model has before a checkpoint is loaded into it."""
    with torch.no_grad():
        for parameter in parallel.parameters():
            parameter.mul_(0.5)


def alone(model: nn.Module, graph: Graph, *, batch: int = 4, micro: int = 0, **options: Any) -> ParallelModel:
    """In a job of one rank; ``options``: of the plan."""
    plan = make_plan(graph, Mesh(), global_batch_size=batch, micro_batch_size=micro or batch, **options)
    return on_rank(model, plan, graph)


def small(model: nn.Module | None = None, **options: Any) -> ParallelModel:
    """A job of one rank whose steps have four micro-batches of two samples."""
    return alone(model or SMALL.build(), graph_of(SMALL), batch=8, micro=2, **options)


def train_step(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    if isinstance(model, ParallelModel):
        return model.train_step(batch)
    device = next(model.parameters()).device
    loss = loss_of(model(**{name: value.to(device) for name, value in batch.items()}))
    loss.backward()
    return loss


def clip(model: nn.Module, max_norm: float) -> float:
    if isinstance(model, ParallelModel):
        return model.clip_grad_norm_(max_norm).item()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    if isinstance(model, ParallelModel):
        return model.full_gradients()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def state(model: nn.Module) -> dict[str, Tensor]:
    found = model.full_state_dict() if isinstance(model, ParallelModel) else model.state_dict()
    return {name: value.clone() for name, value in found.items()}

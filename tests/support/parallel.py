"""Parallel models, as a rank of the process group that is there makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from tests.support.distributed.plans import make_plan


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

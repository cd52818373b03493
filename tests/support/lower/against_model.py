"""Test help: a planned program on ranks that are threads, held against the user's own model."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar import api
from autopar.graph.graph import Graph, Parameter
from autopar.graph.interpreter import part_of
from autopar.lower.program import Program, lower
from autopar.ops.opaque import Holder
from autopar.plan.plan import Plan, PrecisionName
from autopar.verification.reference import loss_of
from tests.support.close import ROUNDING, assert_close
from tests.support.lower.ranks import run_ranks, slice_of
from tests.support.small_models import in_double
from tools.campaigns.program_types import typecheck
from tools.campaigns.ranks import run_rank


def check(
    model: nn.Module,
    batch: dict[str, Tensor],
    pins: Sequence[str],
    *,
    opaque: Sequence[str] = (),
    graph: Graph | None = None,
    precision: PrecisionName = "fp64",
) -> Plan:
    """Plan for the batch on as many ranks as the pins say, run it, and compare loss and every gradient with the model's; ``graph``:
    its trace in this precision. In float64 sums that nearly cancel leave more than rounding; not every kernel has it."""
    degrees = (pin.split("=") for pin in pins if pin.startswith(("tp=", "cp=", "pp=", "dp_shard=", "dp_replicate=")))
    world_size = prod(int(degree) for _, degree in degrees)
    size = next(iter(batch.values())).shape[0]
    if precision == "fp64":
        batch = in_double(model, batch)
    options: dict[str, Any] = {"global_batch_size": size, "opaque": opaque, "precision": precision}
    graph = graph or api.trace(model, example_inputs=batch, **options)
    plan = autopar.search(graph, cluster=f"cpu:1x{world_size}", pins=pins, **options)
    program = lower(plan, graph)
    before = {b.name: model.get_buffer(b.fqn).clone() for b in program.state}
    typecheck(program)
    modules = (b.module for s in program.stages for b in s.blocks)
    for holder in (m for module in modules for m in module.modules() if isinstance(m, Holder)):
        holder.bind(model)
    model.train().zero_grad()
    given = {name: value.clone() for name, value in batch.items()}
    loss = loss_of(model(**given))
    loss.backward()
    whole = dict(model.named_parameters())
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in whole.items()}
    wholes = {p.name: _padded(program, p, whole[p.fqn].detach()) for p in program.graph.parameters}
    values = {**batch, **before, **wholes}
    expected = {p.name: _padded(program, p, gradients[p.fqn]) for p in program.graph.parameters}
    ranks = run_ranks(plan.mesh, lambda rank: run_rank(program, values, rank))
    for rank, found in enumerate(ranks):
        if found.loss is not None:
            assert_close(found.loss.to(loss.dtype), loss.detach(), place=f"rank {rank}")
        stages = [ranks[other].gradients for other in plan.mesh.group(rank, ("pp",))]
        own = {name: sum(part[name] for part in stages if name in part) for name in expected}
        wanted = {p.name: slice_of(expected[p.name], p.layout, plan.mesh, rank) for p in program.graph.parameters}
        assert_close(own, wanted, 10 * ROUNDING[loss.dtype], f"rank {rank}")
    return plan


def check_each(model: nn.Module, batch: dict[str, Tensor], *plans: Sequence[str]) -> list[Plan]:
    """:func:`check` in float64 under the pins of each plan; all are for one trace."""
    batch = in_double(model, batch)
    size = next(iter(batch.values())).shape[0]
    graph = api.trace(model, example_inputs=batch, global_batch_size=size, precision="fp64")
    return [check(model, batch, pins, graph=graph) for pins in plans]


def _padded(program: Program, parameter: Parameter, whole: Tensor) -> Tensor:
    """A tensor of the model as the plan lengthens it."""
    value = part_of(parameter, whole)
    lengths = {entry.parameter: entry.length for entry in program.plan.padding}
    if parameter.key in lengths:
        value = torch.cat((value, value.new_zeros(lengths[parameter.key] - value.shape[0], *value.shape[1:])))
    return value

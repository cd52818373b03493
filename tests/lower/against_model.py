"""Test help: a planned program on ranks that are threads, held against the user's own model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar
from autopar import ops
from autopar.api import trace_model
from autopar.graph.evaluate import part_of
from autopar.graph.trace import pick_loss
from autopar.lower.check import typecheck
from autopar.lower.program import Program, lower
from autopar.mesh import DATA_AXES
from autopar.opaque_ops import Holder
from autopar.plan import FP32, Plan
from tests.lower.ranks import run_program, run_ranks, run_sums, slice_of


def check(
    model: nn.Module, batch: dict[str, Tensor], pins: Sequence[str], *, ranks: int = 4, opaque: Sequence[str] = ()
) -> Plan:
    """Plan for the batch under the pins, run it, and compare loss and every gradient with the model's."""
    size = next(iter(batch.values())).shape[0]
    graph = trace_model(model, batch, FP32, opaque=opaque, global_batch_size=size)
    plan = autopar.search(graph, cluster=f"cpu:1x{ranks}", global_batch_size=size, pins=pins, opaque=opaque)
    program = lower(plan, graph)
    typecheck(program)
    modules = (b.module for s in program.stages for b in s.blocks)
    for holder in (m for module in modules for m in module.modules() if isinstance(m, Holder)):
        holder.bind(model)
    model.train().zero_grad()
    loss = pick_loss(model(**{name: value.clone() for name, value in batch.items()}), "test")
    loss.backward()
    whole = dict(model.named_parameters())
    for rank, (found, gradients) in enumerate(run_ranks(plan.mesh, lambda rank: _rank(program, whole, batch, rank))):
        torch.testing.assert_close(
            found, loss.detach(), rtol=1e-5, atol=1e-6, msg=lambda m, rank=rank: f"rank {rank}: {m}"
        )
        for parameter in program.graph.parameters:
            dense = whole[parameter.fqn].grad
            dense = torch.zeros_like(whole[parameter.fqn]) if dense is None else dense
            expected = slice_of(part_of(parameter, dense), parameter.layout, plan.mesh, rank)
            place = f"rank {rank}, {parameter.fqn}"
            torch.testing.assert_close(
                gradients[parameter.name], expected, rtol=1e-4, atol=1e-6, msg=lambda m, place=place: f"{place}: {m}"
            )
    return plan


def _rank(program: Program, whole: Mapping[str, nn.Parameter], batch: Mapping[str, Tensor], rank: int) -> Any:
    """Loss and gradients of the global batch on one rank."""
    graph, mesh = program.graph, program.mesh
    size, count = program.plan.micro_batch_size, program.plan.num_micro_batches
    first = mesh.data_index(rank) * count
    batches = [
        {i.name: batch[i.name][(first + m) * size : (first + m + 1) * size] for i in graph.inputs} for m in range(count)
    ]
    totals = run_sums(program, batches)
    for value in totals.values():
        _sum(value)
    leaves = {
        p.name: slice_of(part_of(p, whole[p.fqn].detach()), p.layout, mesh, rank)
        .clone()
        .requires_grad_(p.spec.requires_grad)
        for p in graph.parameters
    }
    loss = torch.zeros(())
    for part in batches:
        made = run_program(program, leaves, part, totals)
        made.backward()
        loss += made.detach()
    _sum(loss)
    gradients = {}
    for parameter in graph.parameters:
        leaf = leaves[parameter.name]
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()
        for axis in (*DATA_AXES, *parameter.gradient_sum_axes):
            dist.all_reduce(gradient, group=ops.group(axis))
        gradients[parameter.name] = gradient
    return loss, gradients


def _sum(value: Tensor) -> None:
    for axis in DATA_AXES:
        dist.all_reduce(value, group=ops.group(axis))

"""Plans for small models, layouts solved with simple prices: what runs is tested apart from what is cheap."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any

import torch

from autopar import api
from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph, Op, Ref, TensorSpec
from autopar.graph.rewrites import compact
from autopar.plan import plan as plans
from autopar.plan.mesh import I, Mesh, Type
from autopar.plan.plan import FP32, BlockLayout, Plan, Precision, Recompute, ScheduleName, StagePlan
from autopar.planner.sharding.block_chain import AxisSolver, owners_of
from autopar.planner.sharding.block_table import AxisCosts
from autopar.planner.sharding.energy import Cost, Weights
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules.apply import shard
from autopar.rules.strategy import Typing
from tests.support.example_plans import single_plan


def estimated(model: Graph | torch.nn.Module, *, pins: Sequence[str] = (), **options: Any) -> Plan:
    """A plan by its pins, in micro-batches of one sample where they do not say which: so that a step has several of them."""
    if not any("micro_batch" in pin or "data_shares" in pin for pin in pins):
        with suppress(InfeasibleError):  # of samples that meet
            return api.estimate(model, pins=[*pins, "micro_batch=1"], **options)
    return api.estimate(model, pins=pins, **options)


def micro_batch_size(mesh: Mesh, global_batch_size: int) -> int:
    """Of which a rank takes four in a step where stages pass them on, and else two, over which gradients add up as well."""
    return global_batch_size // ((4 if mesh.pp > 1 else 2) * mesh.data)


class SimplePrices:
    """Seconds: an element read or made costs 1, a byte moved ``byte_price``, a launch of a collective 10."""

    prices_by_bytes = False

    def __init__(self, byte_price: float) -> None:
        self.byte_price = byte_price

    def op_cost(self, op: Op, operands: Sequence[TensorSpec]) -> Cost:
        return Cost(time_s=float(sum(prod(spec.shape) for spec in (*operands, *op.outputs))))

    def collective_time_s(self, kind: str, num_bytes: int, axis: str | None = None) -> float:
        return 10.0 + self.byte_price * num_bytes

    def saves(self, op: Op, operands: Sequence[TensorSpec]) -> Sequence[Ref]:
        return op.operands

    def gradient_bytes(self, spec: TensorSpec) -> int:
        return spec.num_bytes

    def state_bytes(self, spec: TensorSpec) -> float:
        return 4.0 * spec.num_bytes


def make_plan(
    graph: Graph, mesh: Mesh, *, global_batch_size: int, micro_batch_size: int, zero_stage: int = 0,
    schedule: ScheduleName = "1F1B", virtual_stages: int = 1, recompute: Recompute = "none",
    precision: Precision = FP32, memory_price: float = 10.0, byte_price: float = 0.1,
    rests: Mapping[str, Sequence[Type]] | None = None,
) -> Plan:  # fmt: skip
    """A plan with everything given but the layouts; ``memory_price``: of a byte at rest, so that parameters split; ``rests``: their types."""
    small = compact(graph)
    batch = solve_batch(small)
    batch = replace(batch, size=batch.size / micro_batch_size)
    local = shard(small.graph, batch, global_batch_size=global_batch_size, micro_batch_size=micro_batch_size)
    typings = [[names_of(small.graph, batch, block.index)] for block in small.graph.blocks]
    if mesh.tp > 1:
        split = replace(small, graph=local)
        costs = AxisCosts(
            graph=local, axis="tp", size=mesh.tp, pricing=SimplePrices(byte_price), owners=owners_of(split), rests=rests or {}
        )  # fmt: skip
        solution = AxisSolver(split, costs).solve(Weights(per_step_s=1.0, saved_byte=0.1, state_byte=memory_price))
        for own, found in zip(typings, solution.blocks, strict=True):
            own.append(found)
    stages = mesh.pp * virtual_stages
    layouts = [
        BlockLayout(block_hash=block.hash, typings=tuple(t))
        for block, t in zip(small.graph.blocks, typings, strict=True)
    ]
    plan = unpriced(
        graph, mesh, layouts, cuts=[round(i * len(graph.blocks) / stages) for i in range(1, stages)],
        global_batch_size=global_batch_size, micro_batch_size=micro_batch_size, virtual_stages=virtual_stages,
        schedule=schedule if stages > 1 else "none", zero_stage=zero_stage, precision=precision,
        prelude=tuple(batch.strategies[op.name].name for op in graph.prelude),
    )  # fmt: skip
    own = (replace(b, layout=small.class_of[b.index], recompute=recompute) for b in plan.blocks)
    return replace(plan, blocks=tuple(own))


def unpriced(
    graph: Graph, mesh: Mesh, layouts: Sequence[BlockLayout], *, cuts: Sequence[int] = (), pp: int = 0, **fields: Any
) -> Plan:
    """A plan with a layout for each block, cut into stages that take turns on ``pp`` ranks, or on those of the mesh."""
    base, ends = single_plan(), pairwise((0, *cuts, len(graph.blocks)))
    model = replace(
        base.model, name=graph.name, fingerprint=graph.fingerprint, num_parameters=graph.num_parameters,
        tokens_per_sample=1,
    )  # fmt: skip
    return replace(
        base, model=model, cluster=f"cpu:1x{mesh.world_size}", mesh=mesh, layouts=tuple(layouts),
        blocks=tuple(plans.BlockPlan(index=b.index, label=b.label, layout=b.index) for b in graph.blocks),
        stages=tuple(StagePlan(index=i, start=a, stop=b, pp_rank=i % (pp or mesh.pp)) for i, (a, b) in enumerate(ends)),
        predicted=replace(base.predicted, memory=()), **fields,
    )  # fmt: skip


def names_of(graph: Graph, typing: Typing, index: int) -> plans.AxisTyping:
    """The part of a typing that is of one block."""
    block = graph.blocks[index]
    return plans.AxisTyping(
        axis=typing.axis,
        strategies=tuple(typing.strategies[op.name].name for op in graph.block_ops(block)),
        parameters=tuple(typing.parameters.get(p.name, I) for p in graph.block_parameters(block)),
    )

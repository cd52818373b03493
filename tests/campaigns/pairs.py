"""Random plans for a model, and one (model, plan) pair executed: every rank against one device, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor

from autopar import ops, rules
from autopar.errors import RuleError
from autopar.graph.evaluate import evaluate
from autopar.graph.ir import Graph, Op, Ref
from autopar.layout import I, P, R, S, Type
from autopar.lower.check import typecheck
from autopar.lower.program import Program, lower
from autopar.lower.typings import SHARDED_AXES
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.rules import apply
from autopar.rules.conversions import conversion
from autopar.rules.types import Strategy, Typing
from autopar.search.batch import solve_batch
from autopar.search.classes import compact
from tests.campaigns.catalogue import UnfitError
from tests.campaigns.draw import Choose, draw_model, value_of
from tests.lower.models import plan_of
from tests.lower.ranks import run_program, run_ranks, run_sums, slice_of

TOLERANCE = 1e-8
BATCHES = (4, 8)
DEGREES = (
    (1, 1, 2), (2, 1, 1), (2, 1, 2), (1, 1, 4), (1, 1, 3), (2, 1, 4), (4, 1, 2), (1, 1, 8), (2, 1, 3), (8, 1, 1), (1, 2, 1),
    (2, 2, 1), (1, 2, 2), (1, 2, 3), (2, 2, 2), (1, 4, 2),
)  # fmt: skip
"""Ranks that split samples, and those of ``cp`` and ``tp``, on which everything may be split."""


def meshes() -> list[Mesh]:
    """Two axes of operators at once only where there are rules for the changes of type on one of them."""
    both = rules.has_rule("autopar.all_gather")
    return [Mesh(dp_replicate=dp, cp=cp, tp=tp) for dp, cp, tp in DEGREES if both or 1 in (cp, tp)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """``whole`` computes the global batch on one device; ``traced`` is the same model, for which the plan is."""

    whole: Graph
    traced: Graph
    plan: Plan


def draw_pair(choose: Choose) -> Pair:
    """A model and a plan.

    Raises:
        UnfitError: nothing came of what was drawn.
        RuleError: the model has no such plan; the message says why.
    """
    known = meshes()
    mesh = known[choose(len(known))]
    batches = [n for n in BATCHES if n >= mesh.data]
    batch = batches[choose(len(batches))]
    whole, traced = draw_model(choose, batch)
    each = batch // mesh.data
    sizes = [n for n in (1, 2, 4, 8) if n <= each]
    micro = sizes[choose(len(sizes))]
    typings = [replace(solve_batch(compact(traced)), size=Fraction(traced.batch_size, micro))]
    local = apply.shard(traced, typings[0], global_batch_size=batch, micro_batch_size=micro)
    for axis in SHARDED_AXES:
        if getattr(mesh, axis) > 1:
            typings.append(draw_typing(choose, local, axis, getattr(mesh, axis)))
            local = apply.shard(local, typings[-1])
    cuts = tuple(i for i in range(1, len(traced.blocks)) if choose(3) == 2)
    plan = plan_of(traced, mesh, micro, tuple(typings), cuts)
    return Pair(
        whole=whole, traced=traced, plan=replace(plan, global_batch_size=batch, cluster=f"cpu:1x{mesh.world_size}")
    )


def draw_typing(choose: Choose, graph: Graph, axis: str, size: int) -> Typing:
    """Any strategy of every operator for which the changes of type exist, and types of parameters at rest."""
    types: dict[Ref, Type] = {Ref(leaf.name): R for leaf in (*graph.inputs, *graph.buffers)}
    types |= {Ref(op.name, i): R for op in graph.prelude for i in range(len(op.outputs))}
    rests: dict[str, Type] = {}
    chosen: dict[str, Strategy] = {}
    for op in graph.ops:
        specs = tuple(graph.spec(ref) for ref in op.operands)
        offered = rules.strategies(op, specs, axis=axis, size=Fraction(size))
        fitting = [s for s in offered if _fits(graph, op, s, types, rests)]
        if not fitting:
            raise UnfitError(f"{op.target} takes none of {[types.get(r) for r in op.operands]}")
        fitting.sort(key=lambda s: (s.name != "invariant", s.name))
        splits = [s for s in fitting if any(t.is_split for t in (*s.inputs, *s.outputs))]
        calm = [s for s in fitting if R not in s.outputs]  # an R with a gradient has no way back to I
        pool = (calm or fitting, splits or fitting, fitting)[(0, 1, 1, 1, 0, 2)[choose(6)]]
        chosen[op.name] = strategy = pool[choose(len(pool))]
        for ref, wanted in zip(op.operands, strategy.inputs, strict=True):
            if graph.is_parameter(ref) and ref.name not in rests:
                rests[ref.name] = types[ref] = _rest(choose, graph, ref, wanted, size)
        types |= {Ref(op.name, i): t for i, t in enumerate(strategy.outputs)}
    return Typing(axis=axis, size=Fraction(size), strategies=chosen, parameters=rests)


def _rest(choose: Choose, graph: Graph, ref: Ref, wanted: Type, size: int) -> Type:
    spec = graph.spec(ref)
    if choose(4) == 3 and wanted != P:
        options = [I, *(S(d) for d, n in enumerate(spec.shape) if n % size == 0)]
        return options[choose(len(options))]
    return wanted if wanted.is_split else I


def _fits(graph: Graph, op: Op, strategy: Strategy, types: Mapping[Ref, Type], rests: Mapping[str, Type]) -> bool:
    if op.name == graph.loss.name and strategy.outputs[0] not in (I, P):
        return False
    if R in strategy.outputs and op.spec.requires_grad and op.spec.numel == 1:
        return False  # nothing splits it, and R has no way back to I, which the loss is
    for ref, wanted in zip(op.operands, strategy.inputs, strict=True):
        spec = graph.spec(ref)
        found = types.get(ref, wanted if wanted.is_split else I)
        if conversion(found, wanted, requires_grad=spec.requires_grad) is None:
            return False
    return True


def check_pair(pair: Pair, *, checked: bool = False) -> str:
    """What is wrong with a pair, or nothing; ``checked``: the program's types are checked as well."""
    program = lower(pair.plan, pair.traced)
    if checked:
        typecheck(program)
    leaves = (*pair.whole.inputs, *pair.whole.parameters)
    values = {leaf.name: value_of(leaf.name, leaf.spec.shape) for leaf in leaves}
    loss, gradients = _dense(pair.whole, values)
    floor = 1e-6 * max((float(g.abs().max()) for g in gradients.values()), default=0.0)
    mesh = pair.plan.mesh
    for rank, (got, found) in enumerate(run_ranks(mesh, lambda rank: _one_rank(program, values, rank))):
        if not _close(got, loss, 0.0):
            return f"rank {rank}: loss {got.item()!r} for {loss.item()!r}"
        for parameter in program.graph.parameters:
            expected = slice_of(gradients[parameter.name], parameter.layout, mesh, rank)
            if not _close(found[parameter.name], expected, floor):
                return f"rank {rank}: gradient of {parameter.name} {parameter.layout}: {found[parameter.name]} for {expected}"
    return ""


def _close(found: Tensor, expected: Tensor, floor: float) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.numel():
        return True
    bound = TOLERANCE * max(float(expected.abs().max()), floor)
    return bool((found - expected).abs().max() <= bound)


def _dense(graph: Graph, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    parameters = {p.fqn: values[p.name].clone().requires_grad_() for p in graph.parameters}
    loss = evaluate(graph, {i.name: values[i.name] for i in graph.inputs}, parameters)
    loss.backward()
    return loss.detach(), {p.name: _gradient(parameters[p.fqn]) for p in graph.parameters}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _one_rank(program: Program, values: Mapping[str, Tensor], rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the global batch, micro-batch by micro-batch, data ranks included."""
    graph, mesh, plan = program.graph, program.mesh, program.plan
    size, count = plan.micro_batch_size, plan.num_micro_batches
    first = mesh.data_index(rank) * count
    batches: list[Mapping[str, Tensor]] = [
        {i.name: values[i.name][(first + m) * size : (first + m + 1) * size] for i in graph.inputs}
        for m in range(count)
    ]
    data = ops.group("dp_replicate")
    totals = run_sums(program, batches)
    for value in totals.values():
        dist.all_reduce(value, group=data)
    leaves = {p.name: slice_of(values[p.name], p.layout, mesh, rank).clone().requires_grad_() for p in graph.parameters}
    loss = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        part = run_program(program, leaves, batch, totals)
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()
    dist.all_reduce(loss, group=data)
    gradients = {}
    for parameter in graph.parameters:
        gradient = _gradient(leaves[parameter.name]).contiguous()
        for axis in ("dp_replicate", *parameter.gradient_sum_axes):
            dist.all_reduce(gradient, group=ops.group(axis))
        gradients[parameter.name] = gradient
    return loss, gradients


def strategies_of(pair: Pair) -> set[tuple[str, str]]:
    """(target, strategy) of every live operator on sharded axes."""
    found: set[tuple[str, str]] = set()
    for block, layout in zip(pair.traced.blocks, pair.plan.layouts, strict=True):
        for typing in layout.typings[1:]:
            found |= {
                (op.target, name) for op, name in zip(pair.traced.block_ops(block), typing.strategies, strict=True)
            }
    return found


__all__ = ["Pair", "RuleError", "UnfitError", "check_pair", "draw_pair"]

"""Random plans for a model, and one (model, plan) pair executed: every rank against one device, in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise

import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.graph.graph import Buffer, Graph, Input, Op, Parameter, Ref
from autopar.graph.operator_kinds import draws_random
from autopar.graph.rewrites import compact
from autopar.lower.program import lower
from autopar.lower.read_plan import SHARDED_AXES
from autopar.plan.mesh import I, Mesh, P, R, S, Type, conversion
from autopar.plan.plan import RECOMPUTES, Plan, StagePlan
from autopar.plan.schedule import ScheduleName
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules import apply, local_calls
from autopar.rules import table as rules
from autopar.rules.missing import complete
from autopar.rules.strategy import Strategy, Typing
from tests.support.lower.models import plan_of
from tests.support.lower.ranks import interpret, run_ranks, slice_of
from tools.campaigns.catalogue import UnfitError
from tools.campaigns.draw import Choose, draw_model, value_of
from tools.campaigns.modules import draw_traced
from tools.campaigns.program_types import typecheck
from tools.campaigns.ranks import Drawn, Result, run_rank

TOLERANCE = 1e-8
BATCHES = (4, 8)
TRACED_ONE_IN = 40
"""Models that are modules, traced: each takes as long as many that are graphs."""
DEGREES = (
    (1, 1, 1, 2), (1, 2, 1, 1), (1, 2, 1, 2), (1, 1, 1, 4), (1, 1, 1, 3), (1, 2, 1, 4), (1, 4, 1, 2), (1, 1, 1, 8),
    (1, 2, 1, 3), (1, 8, 1, 1), (1, 1, 2, 1), (1, 2, 2, 1), (1, 1, 2, 2), (1, 1, 2, 3), (1, 2, 2, 2), (1, 1, 4, 2),
    (2, 1, 1, 1), (2, 2, 1, 1), (2, 1, 1, 2), (2, 1, 2, 1), (2, 1, 2, 2), (2, 2, 1, 2), (4, 1, 1, 1), (4, 2, 1, 1),
)  # fmt: skip
"""Ranks of the pipeline, ranks that split samples, and those of ``cp`` and ``tp``, on which everything may be split."""
MESHES = [Mesh(pp=pp, dp_replicate=dp, cp=cp, tp=tp) for pp, dp, cp, tp in DEGREES]


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
    mesh = _sharded_data(choose, MESHES[choose(len(MESHES))])
    batches = [n for n in BATCHES if n >= mesh.data]
    batch = batches[choose(len(batches))]
    whole, traced = (
        draw_traced(choose, batch) if choose(TRACED_ONE_IN) == TRACED_ONE_IN - 1 else draw_model(choose, batch)
    )
    each = batch // mesh.data
    sizes = [n for n in (1, 2, 4, 8) if n <= each]
    micro = sizes[choose(len(sizes))]
    complete(traced)
    samples = solve_batch(compact(traced))
    if any(s.name.startswith("statistics") for s in samples.strategies.values()):
        micro = each
    typings = [replace(samples, size=Fraction(traced.batch_size, micro))]
    graphs = [traced]
    local = apply.shard(traced, typings[0], global_batch_size=batch, micro_batch_size=micro)
    typing = draw_spread(choose, local, mesh.data)
    if typing is not None:
        graphs.append(local)
        typings.append(typing)
        mesh = replace(mesh, ep=int(typing.size), ep_data=int(typing.size))
        local = local_calls.spread(local, mesh.ep_data, spread_names(typing))
    for axis in SHARDED_AXES:
        if getattr(mesh, axis) > 1:
            graphs.append(local)
            typings.append(draw_typing(choose, local, axis, getattr(mesh, axis)))
            local = apply.shard(local, typings[-1])
    if mesh.ep_data > 1 and any("ep" in op.args or "tp" in op.args for op in local.ops if "dispatch" in op.target):
        mesh = replace(mesh, ep=mesh.ep_data * mesh.tp)
    plan = plan_of(traced, mesh, micro, tuple(typings), graphs=tuple(graphs))
    stages = (1, 2, 3) if mesh.pp == 1 else (1, 3)
    zero = stages[choose(len(stages))] if mesh.dp_shard > 1 else 0
    plan = replace(plan, global_batch_size=batch, zero_stage=zero, cluster=f"cpu:1x{mesh.world_size}")
    return Pair(whole=whole, traced=traced, plan=_in_stages(choose, plan))


def _in_stages(choose: Choose, plan: Plan) -> Plan:
    """The plan with recompute, and with stages: those of its pipeline, or some that one process runs in turn."""
    count, pp = len(plan.blocks), plan.mesh.pp
    schedule: ScheduleName = "none"
    virtual = 1
    if pp == 1:
        stages = 1 + (choose(min(count, 3)) if choose(2) else 0)
    else:
        most = count // pp  # virtual stages of a block each
        rounds = max(1, plan.num_micro_batches // pp)
        has_equal_rounds = plan.num_micro_batches % rounds == 0
        known: list[ScheduleName] = ["GPipe"]
        known += ["1F1B"] * (plan.num_micro_batches >= pp)
        known += ["Interleaved1F1B"] * (most >= 2 and has_equal_rounds)
        schedule = known[choose(len(known))]
        virtual = 2 + choose(min(most, 3) - 1) if schedule == "Interleaved1F1B" else 1
        stages = pp * virtual
    if stages > count:
        raise UnfitError("fewer blocks than stages")
    cuts = [0]
    for left in range(stages - 1, 0, -1):
        cuts.append(cuts[-1] + 1 + choose(count - cuts[-1] - left))
    cuts.append(count)
    return replace(
        plan,
        schedule=schedule,
        virtual_stages=virtual,
        blocks=tuple(replace(b, recompute=RECOMPUTES[choose(3)]) for b in plan.blocks),
        stages=tuple(StagePlan(index=i, start=a, stop=b, pp_rank=i % pp) for i, (a, b) in enumerate(pairwise(cuts))),
    )


def _sharded_data(choose: Choose, mesh: Mesh) -> Mesh:
    """The data ranks cut into two axes in any way."""
    shards = [n for n in (1, 2, 4, 8) if mesh.data % n == 0]
    shard = shards[choose(len(shards))]
    return replace(mesh, dp_replicate=mesh.data // shard, dp_shard=shard)


def draw_spread(choose: Choose, graph: Graph, data: int) -> Typing | None:
    """Mixtures whose experts are spread over data ranks, any of those that can be; None: none is."""
    able = [op for op in graph.ops if local_calls.can_spread(graph, op)]
    counts = {op.name: graph.spec(op.operands[-1]).shape[0] for op in able}
    sizes = [n for n in (2, 4, 8) if data % n == 0 and any(count % n == 0 for count in counts.values())]
    if not sizes or choose(4) == 3:
        return None
    size = sizes[choose(len(sizes))]
    fitting = [op for op in able if counts[op.name] % size == 0]
    chosen = [op for op in fitting if len(fitting) == 1 or choose(4) < 3] or fitting[:1]
    held = {ref.name for op in chosen for ref in op.operands[3:]}
    names = {op.name for op in chosen}
    return Typing(
        axis=local_calls.SPREAD,
        size=Fraction(size),
        strategies={
            op.name: Strategy(
                name=local_calls.DISPATCH if op.name in names else local_calls.SAMPLES, inputs=(), outputs=()
            )
            for op in graph.ops
        },
        parameters=dict.fromkeys(held, S(0)),
    )


def spread_names(typing: Typing) -> frozenset[str]:
    """The mixtures that it spreads."""
    return frozenset(name for name, strategy in typing.strategies.items() if strategy.name == local_calls.DISPATCH)


def draw_typing(choose: Choose, graph: Graph, axis: str, size: int) -> Typing:
    """Any strategy of every operator for which the changes of type exist, and types of parameters at rest."""
    leaves: list[Input | Buffer] = [*graph.inputs, *graph.buffers]
    types: dict[Ref, Type] = {Ref(leaf.name): R for leaf in leaves}
    types |= {Ref(op.name, i): R for op in graph.prelude for i in range(len(op.outputs))}
    rests: dict[str, Type] = {}
    chosen: dict[str, Strategy] = {}
    for op in graph.ops:
        specs = tuple(graph.spec(ref) for ref in op.operands)
        offered = rules.default_table().strategies(op, specs, axis=axis, size=Fraction(size), fallback=True)
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
    leaves: list[Input | Parameter] = [*pair.whole.inputs, *pair.whole.parameters]
    values = {leaf.name: value_of(leaf.name, leaf.spec.shape) for leaf in leaves}
    mesh = pair.plan.mesh
    results: list[Result] = run_ranks(mesh, lambda rank: run_rank(program, values, rank))
    drawn = Drawn(program)
    for rank, result in enumerate(results):
        if problem := drawn.add(rank, result.draws):
            return problem
    loss, gradients = _dense(drawn.fixed(pair.whole), values)
    # parameters are of order one, whose rounding is 1e-16: what is below 1e-6 of the largest gradient, or of one, is judged by that
    floor = 1e-6 * max(1.0, *(float(x.abs().max()) for x in (loss, *gradients.values()) if x.numel()))
    for rank, result in enumerate(results):
        if result.loss is not None and not _close(result.loss, loss, floor):
            return f"rank {rank}: loss {result.loss.item()!r} for {loss.item()!r}"
        chain = [results[other].gradients for other in mesh.group(rank, ("pp",))]
        for parameter in program.graph.parameters:
            copies = [found[parameter.name] for found in chain if parameter.name in found]
            expected = slice_of(gradients[parameter.name], parameter.layout, mesh, rank)
            if not copies or not _close(sum(copies[1:], copies[0]), expected, floor):
                return f"rank {rank}: gradient of {parameter.name} {parameter.layout}: {copies} for {expected}"
    return ""


def _close(found: Tensor, expected: Tensor, floor: float) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.numel():
        return True
    bound = TOLERANCE * max(float(expected.abs().max()), floor)
    return bool((found - expected).abs().max() <= bound)


def _dense(graph: Graph, values: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    leaves = {p.name: values[p.name].clone().requires_grad_() for p in graph.parameters}
    loss = interpret(graph, {**values, **leaves})
    loss.backward()
    return loss.detach(), {name: _gradient(leaf) for name, leaf in leaves.items()}


def _gradient(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def strategies_of(pair: Pair) -> set[tuple[str, str]]:
    """(target, strategy) of every live operator on the first sharded axis: on a second one changes of type stand between."""
    found: set[tuple[str, str]] = set()
    for block, layout in zip(pair.traced.blocks, pair.plan.layouts, strict=True):
        for typing in [t for t in layout.typings[1:] if t.axis != local_calls.SPREAD][:1]:
            found |= {
                (op.target, name) for op, name in zip(pair.traced.block_ops(block), typing.strategies, strict=True)
            }
    return found


def features_of(pair: Pair) -> set[str]:
    """What of the breadth of plans and models a pair has."""
    plan, mesh, ops = pair.plan, pair.plan.mesh, (*pair.traced.prelude, *pair.traced.ops)
    targets = {op.target for op in ops}
    uses = Counter(ref.name for op in ops for ref in set(op.operands) if pair.traced.is_parameter(ref))
    found = {
        "data ranks": mesh.data > 1,
        "cp": mesh.cp > 1,
        "tp": mesh.tp > 1,
        "cp and tp": mesh.cp > 1 and mesh.tp > 1,
        "pp": mesh.pp > 1,
        "virtual stages": plan.virtual_stages > 1,
        "several micro-batches": plan.num_micro_batches > 1,
        "pp and several micro-batches": mesh.pp > 1 and plan.num_micro_batches > 1,
        "recompute": any(b.recompute == "full" for b in plan.blocks),
        "selective recompute": any(b.recompute == "selective" for b in plan.blocks),
        "random operators": any(map(draws_random, targets)),
        "random operators recomputed": any(
            draws_random(op.target)
            for block, planned in zip(pair.traced.blocks, plan.blocks, strict=True)
            for op in pair.traced.block_ops(block)
            if planned.recompute != "none"
        ),
        "experts": "autopar.experts" in targets,
        "experts over data ranks": mesh.ep_data > 1,
        "experts over data ranks and tp": mesh.ep_data > 1 and mesh.ep > mesh.ep_data,
        "FSDP": mesh.dp_shard > 1,
        "FSDP and dp_replicate": mesh.dp_replicate > 1 and mesh.dp_shard > 1,
        "FSDP and tp": mesh.dp_shard > 1 and mesh.tp > 1,
        "FSDP and pp": mesh.dp_shard > 1 and mesh.pp > 1,
        "FSDP and experts over data ranks": mesh.dp_shard > 1 and mesh.ep_data > 1,
        "batch norm": "autopar.batch_norm" in targets,
        "group norm": "aten.group_norm.default" in targets,
        "parameter used several times": any(count > 1 for count in uses.values()),
        "traced module": pair.traced.name != "fuzz",
    }
    return {name for name, has in found.items() if has}


__all__ = ["Pair", "RuleError", "UnfitError", "check_pair", "draw_pair", "features_of", "strategies_of"]

"""What a search answers: its plan as others read it, with choices, costs and notes; or why there is none.

There is none where constraints conflict (the smallest set of them is named), where memory is too small, or where a limit stopped the
search.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autopar.cost.model import CostModel
from autopar.cost.operators.work import operand_specs, work
from autopar.errors import InfeasibleError
from autopar.graph.graph import Block, Graph, Op
from autopar.plan.mesh import I, S, Type
from autopar.plan.plan import AxisTyping, BlockLayout, BlockPlan, ModelInfo, Plan, SearchRecord, StagePlan
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.explain.reasons import (
    calls,
    certificate_note,
    host_note,
    interrupted_note,
    measured_note,
    mixed_note,
    mixing_note,
    precision_note,
    range_note,
    recompute_note,
    unaligned_note,
)
from autopar.planner.layouts.catalogue import TP, Layouts
from autopar.planner.layouts.layout import PricedLayout, expert_degree
from autopar.planner.layouts.rank_graphs import padding_notes
from autopar.planner.search import Evaluation, Limits, Misfit, Outcome, Task, memory_of_devices, readable
from autopar.planner.sharding.input_axes import BATCH, CP
from autopar.planner.space.candidates import Candidate, conflict, remedies
from autopar.planner.space.constraints import Problem
from autopar.planner.space.pin_syntax import ParameterPin, StagePin
from autopar.planner.space.pins import Pins
from autopar.planner.space.variants import against, offloaded, rank_groups
from autopar.planner.stages.recompute import MOVED, none_if_moved
from autopar.rules.local_graphs import AXIS as SPREAD
from autopar.rules.local_graphs import DISPATCH, EXPERTS, spread_parameters, strategy_names
from autopar.rules.missing import Found, key_of
from autopar.rules.strategy import Strategy

LEAST_REPEATED = 0.1
"""Part of the FLOPs that a plan says it repeats; below lie routers and small heads."""
MIXTURE_NOTE = "mixtures of experts ("
"""Begins the notes that say which strategy the solver chose for them."""


def plan_of(task: Task, evaluator: Evaluator, best: Evaluation, record: SearchRecord, notes: Sequence[str]) -> Plan:
    """The plan of an evaluation, which is polished; ``record``: of the search."""
    graph, candidate = task.graph, best.candidate
    layouts, of_block = block_layouts(evaluator.layouts, best.option)
    return Plan(
        model=ModelInfo(
            name=graph.name,
            fingerprint=graph.fingerprint,
            num_parameters=graph.num_parameters,
            flops_per_sample=evaluator.context.flops_per_sample,
            tokens_per_sample=evaluator.context.tokens_per_sample,
        ),
        cluster=task.cluster.name,
        mesh=replace(candidate.mesh, ep=expert_degree(best.option, candidate.mesh.tp)),
        global_batch_size=task.global_batch_size,
        micro_batch_size=candidate.micro_batch_size,
        schedule=candidate.schedule,
        virtual_stages=candidate.virtual_stages,
        zero_stage=candidate.zero_stage,
        precision=task.precision,
        optimizer=task.optimizer,
        prelude=evaluator.layouts.prelude,
        layouts=layouts,
        blocks=_blocks(graph, evaluator, best, of_block),
        stages=_stages(best),
        predicted=best.prediction,
        search=record,
        padding=best.option.padding,
        pins=task.pins.texts,
        opaque=task.opaque,
        groups=rank_groups(candidate, task.cluster),
        bucket_bytes=best.bucket_bytes,
        offload=candidate.offload,
        data_shares=candidate.shares,
        vocab_multiple=candidate.vocab_multiple,
        notes=tuple(notes),
    )


def record_of(best: Evaluation, outcome: Outcome, reasons: tuple[str, ...], wall_time_s: float) -> SearchRecord:
    """What is said of the search; ``best``: polished."""
    # a layout's bound is by the sum of its parts; what rounding leaves must not make the gap negative
    lower = min(outcome.lower_bound_s, best.prediction.step_time_s)
    return SearchRecord(
        wall_time_s=wall_time_s,
        candidates=outcome.candidates,
        evaluated=outcome.evaluated,
        lower_bound_s=lower,
        gap=best.prediction.step_time_s / lower - 1.0 if lower else 0.0,
        reasons=reasons,
    )


def notes_of(
    task: Task, evaluator: Evaluator, best: Evaluation, outcome: Outcome, found: Sequence[Found], mixing: Sequence[Op]
) -> tuple[str, ...]:
    """What a reader of the plan should know.

    Args:
        found: calls that had no declared rule.
        mixing: operators by which samples meet.
    """
    graph, candidate = task.graph, best.candidate
    return (
        *certificate_note(best, outcome),
        *graph.notes,
        *padding_notes(graph, best.option.padding, candidate.mesh.tp, candidate.vocab_multiple),
        *unaligned_note(evaluator, best),
        *operators_without_rule(graph, found, evaluator.model),
        *mixing_note(mixing),
        *mixtures(evaluator.layouts, best.option),
        *repeated(evaluator.layouts, best.option),
        *precision_note(task),
        *range_note(task),
        *recompute_note(task, best),
        *measured_note(evaluator, best),
        *mixed_note(candidate, task.cluster),
        *host_note(best),
        *interrupted_note(outcome),
    )


def _blocks(graph: Graph, evaluator: Evaluator, best: Evaluation, of_block: Sequence[int]) -> tuple[BlockPlan, ...]:
    return tuple(
        BlockPlan(
            index=block.index,
            label=block.label,
            layout=layout,
            recompute=none_if_moved(mode),
            offload=block.index in evaluator.context.moved or mode == MOVED,
        )
        for block, layout, mode in zip(graph.blocks, of_block, best.modes, strict=True)
    )


def _stages(best: Evaluation) -> tuple[StagePlan, ...]:
    pp = best.candidate.mesh.pp
    return tuple(
        StagePlan(index=i, start=start, stop=stop, pp_rank=i % pp)
        for i, (start, stop) in enumerate(zip((0, *best.stops), best.stops, strict=False))
    )


# --- layouts


def block_layouts(layouts: Layouts, option: PricedLayout) -> tuple[tuple[BlockLayout, ...], tuple[int, ...]]:
    """The distinct layouts of the plan, and for each original block which of them it has."""
    graph, made = layouts.compact.graph, dict[BlockLayout, int]()
    mine = []
    for i, block in enumerate(graph.blocks):
        typings = [_batch_layout(graph, block, layouts.batch.strategies)]
        if option.key.ep_data > 1:
            typings.append(_spread_layout(graph, block))
        for found in (option.sequence, option.solution):
            if found is not None:
                boundary = _boundary(graph, block, found.typing.strategies)
                typings.append(replace(found.blocks[i], parameter_names=_names(graph, block), boundary=boundary))
        layout = BlockLayout(block_hash=block.hash, typings=tuple(typings))
        mine.append(made.setdefault(layout, len(made)))
    return tuple(made), tuple(mine[k] for k in layouts.compact.class_of)


def mixtures(layouts: Layouts, option: PricedLayout) -> tuple[str, ...]:
    """A note for each way in which mixtures of experts are run, beginning with :data:`MIXTURE_NOTE`."""
    graph, ways = layouts.compact.graph, Counter[str]()
    for op, count in calls(graph, layouts):
        if op.target != EXPERTS:
            continue
        spread_here = option.key.ep_data > 1 and DISPATCH in strategy_names(graph, (op,))
        parts = [f"experts spread and tokens sent over {option.key.ep_data} data ranks"] if spread_here else []
        for axis, found in ((CP, option.sequence), (TP, option.solution)):
            if found is not None:
                parts.append(f"{axis}={found.typing.size} '{found.typing.strategies[op.name].name}'")
        ways[", ".join(parts) or "whole, on each rank's samples"] += count
    return tuple(f"{MIXTURE_NOTE}{count}): {way}" for way, count in ways.items())


def repeated(layouts: Layouts, option: PricedLayout) -> tuple[str, ...]:
    """A note for each axis whose ranks all do a good part of the products of matrices over again, whole."""
    graph, notes = layouts.compact.graph, []
    for axis, found in ((CP, option.sequence), (TP, option.solution)):
        if found is None or found.typing.size == 1:
            continue
        whole, everything = dict[str, float](), 0.0
        for op, count in calls(graph, layouts):
            flops = work(op, operand_specs(op, graph.spec)).flops * count
            everything += flops
            if found.typing.strategies[op.name].work == 1:
                name = op.module or op.source or op.name
                whole[name] = whole.get(name, 0.0) + flops
        share = sum(whole.values()) / everything if everything else 0.0
        if share >= LEAST_REPEATED:
            names = sorted((name for name, flops in whole.items() if flops), key=lambda name: -whole[name])
            named, more = ", ".join(names[:3]), " ..." * (len(names) > 3)
            notes.append(
                f"{share:.0%} of the FLOPs are repeated on each of the {found.typing.size} ranks of {axis} ({named}{more}): "
                "splitting them is not possible there, or is predicted to take longer"
            )
    return tuple(notes)


def _batch_layout(graph: Graph, block: Block, made: Mapping[str, Strategy]) -> AxisTyping:
    return AxisTyping(
        axis=BATCH,
        strategies=tuple(made[op.name].name for op in graph.block_ops(block)),
        parameters=tuple(I for _ in graph.block_parameters(block)),
        parameter_names=_names(graph, block),
        boundary=_boundary(graph, block, made),
    )


def _spread_layout(graph: Graph, block: Block) -> AxisTyping:
    """On ``ep_data`` experts are split, everything else goes on with its rank's samples."""
    ops = graph.block_ops(block)
    split = spread_parameters(graph, ops)
    return AxisTyping(
        axis=SPREAD,
        strategies=tuple(strategy_names(graph, ops)),
        parameters=tuple(S(0) if p.name in split else I for p in graph.block_parameters(block)),
        parameter_names=_names(graph, block),
    )


def _boundary(graph: Graph, block: Block, made: Mapping[str, Strategy]) -> tuple[Type, ...]:
    return tuple(made[ref.name].outputs[ref.index] for ref in graph.block_outputs(block))


def _names(graph: Graph, block: Block) -> tuple[str, ...]:
    return tuple(p.key.removeprefix(f"{block.label}.") for p in graph.block_parameters(block))


def operators_without_rule(graph: Graph, found: Sequence[Found], model: CostModel) -> tuple[str, ...]:
    """A note for each kind of call without a declared rule: what was found by execution, or what repeating it costs."""
    notes = []
    for one in found:
        calls = [op for op in (*graph.prelude, *graph.ops) if op.target == one.target]
        calls = [op for op in calls if key_of(op, tuple(graph.spec(r) for r in op.operands)) == one.key]
        if one.line:
            notes.append(f"{one.target} has no declared rule: found by execution '{one.line}' ({len(calls)} calls)")
            continue
        times = [model.op_time_s(op, [graph.spec(ref) for ref in op.operands]) for op in calls]
        cost_s = sum(time.forward_s + time.backward_s for time in times)
        notes.append(
            f"{one.target} has no rule and none was found ({one.why}): its {len(calls)} calls are repeated on every "
            f"rank of an axis that splits the work inside a sample, {1e3 * cost_s:.3g} ms for {graph.batch_size} samples"
        )
    return tuple(notes)


MAX_CONFLICT_TRIALS = 24
"""Candidates tried, leanest first, before a set of pins counts as too large for the memory."""

MAX_EVALUATED = 24
"""Candidates that a bound excluded of which it is worked out what memory they would need, where no plan fits."""

MayFit = Callable[[Pins, Problem], bool]
"""Whether something fits under these pins, for this problem."""


def conflicting(problem: Problem, pins: Pins) -> InfeasibleError:
    """Constraints leave no candidate: the smallest set of them that conflicts, with what resolves it."""
    unequal_shares = against(problem, pins)
    if unequal_shares is not None:
        return unequal_shares
    names = conflict(problem, pins)
    return InfeasibleError(
        "These constraints conflict",
        got="; ".join(names or pins.texts),
        fix=", or ".join(("Drop one of the pins named", *remedies(problem, pins, names))),
    )


def unfound(
    task: Task, problem: Problem, pool: Sequence[Candidate], evaluator: Evaluator, outcome: Outcome, limits: Limits,
    may_fit: MayFit,
) -> InfeasibleError:  # fmt: skip
    """A search ended without a plan."""
    if not outcome.finished:
        return InfeasibleError(
            f"No plan was found within the given trials and time: none of {outcome.evaluated} of {outcome.candidates} candidates fits",
            fix="Raise trials (--trials) or search_timeout_s (--timeout)",
        )
    if limits.max_step_time_s is not None:
        return _too_slow(outcome, limits.max_step_time_s)
    misfits = (*outcome.misfits, *_excluded_misfits(pool, evaluator, outcome))
    return too_large(task, problem, pool, evaluator, misfits, may_fit)


def _too_slow(outcome: Outcome, most_s: float) -> InfeasibleError:
    bound_s = outcome.lower_bound_s
    found = f"none in {bound_s:.4g} s or less" if bound_s < float("inf") else "none fits in memory in any layout"
    return InfeasibleError(
        f"No plan takes at most {most_s:g} s a step",
        got=found if bound_s > most_s else f"none of {outcome.candidates} candidates does",
        fix="Allow more time, or take more devices",
    )


def _excluded_misfits(pool: Sequence[Candidate], evaluator: Evaluator, outcome: Outcome) -> list[Misfit]:
    """What candidates would need that a bound excluded for their memory."""
    evaluated = {misfit.candidate for misfit in outcome.misfits}
    rest = [candidate for candidate in pool if candidate not in evaluated]
    hopeless = [evaluator.hopeless(candidate) for candidate in rest]
    others = [candidate for candidate, misfit in zip(rest, hopeless, strict=True) if misfit is None]
    found = [evaluator.evaluate(candidate) for candidate in others[:MAX_EVALUATED]]
    return [misfit for misfit in (*hopeless, *found) if isinstance(misfit, Misfit)]


def too_large(
    task: Task, problem: Problem, pool: Sequence[Candidate], evaluator: Evaluator, misfits: Sequence[Misfit],
    may_fit: MayFit,
) -> InfeasibleError:  # fmt: skip
    """Nothing fits in memory: the pins, the memory, the devices and the batch that conflict.

    Found by deletion: a pin is named unless without it, and those already found needless, still nothing fits.

    Args:
        pool: the candidates.
        misfits: why they do not fit.
    """
    needs = [misfit.needs_bytes for misfit in misfits if misfit.needs_bytes]
    if not needs:
        reasons = sorted({misfit.reason for misfit in misfits})
        pins = ", ".join(pin.text for pin in task.pins.pins if isinstance(pin, StagePin | ParameterPin))
        return InfeasibleError(
            "These constraints conflict",
            got="; ".join((*([pins] if pins else ()), *reasons[:3])),
            fix="Drop one of the pins" if pins else "Take more or larger devices",
        )
    left = task.pins
    for pin in task.pins.pins:
        without = left.without(pin.text)
        if not may_fit(without, problem):
            left = without
    needed = readable(min(needs) * evaluator.model.memory_spread)
    memory = f"{memory_of_devices(evaluator.model)} of memory a device (the leanest plan needs {needed})"
    world = f"{problem.world_size} device{'s' * (problem.world_size > 1)}"
    larger = replace(problem, global_batch_size=task.global_batch_size * problem.world_size)
    batch = (f"a global batch of {task.global_batch_size}",) if may_fit(left, larger) else ()
    fix = "Drop one of the pins named, or take more devices" if left.texts else "Take more or larger devices"
    return InfeasibleError(
        "These constraints conflict",
        got="; ".join((*left.texts, memory, world, *batch)),
        fix=fix + ", or search --space wide, where optimizers may live on the host" * _may_offload(task, pool),
    )


def _may_offload(task: Task, pool: Sequence[Candidate]) -> bool:
    """Whether optimizers could live on the host, but the space has none there."""
    if task.space.offload or not task.pins.allows("offload", "optimizer"):
        return False
    return len(offloaded(pool[:1], task.cluster, task.pins, ("optimizer",), task.optimizer)) > 1

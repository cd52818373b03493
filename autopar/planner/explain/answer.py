"""The answer of a search: its plan as data, with the search record and notes, or the error that says why there is no plan.

There is no plan if constraints conflict (the error names a minimal set of them), if memory is too small, or if a limit stopped the search.
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
from autopar.planner.search import Evaluation, Limits, Misfit, Outcome, Task, memory_of_devices
from autopar.planner.sharding.input_axes import BATCH, CP
from autopar.planner.space.candidates import Candidate, conflict, remedies
from autopar.planner.space.constraints import Problem
from autopar.planner.space.pin_syntax import ParameterPin, StagePin
from autopar.planner.space.pins import Pins
from autopar.planner.space.preferences import leanness
from autopar.planner.space.variants import against, offloaded, rank_groups
from autopar.planner.stages.recompute import OFFLOADED, recompute_of
from autopar.rules.local_calls import DISPATCH, EXPERTS, SAMPLES, SPREAD, can_spread
from autopar.rules.missing import Found, key_of
from autopar.rules.strategy import Strategy
from autopar.util.formatting import num_bytes, seconds

LEAST_REPEATED = 0.1
"""The part of the FLOPs from which on a note says that they are repeated; routers and small heads lie below."""

MIXTURE_NOTE = "mixtures of experts ("
"""The beginning of the notes on the strategies of mixtures of experts."""


def plan_of(task: Task, evaluator: Evaluator, best: Evaluation, record: SearchRecord, notes: Sequence[str]) -> Plan:
    """Return the plan of an evaluation that was improved, with the record of its search."""
    graph, candidate = task.graph, best.candidate
    layouts, of_block = block_layouts(evaluator.layouts, best.layout)
    return Plan(
        model=ModelInfo(
            name=graph.name,
            fingerprint=graph.fingerprint,
            num_parameters=graph.num_parameters,
            flops_per_sample=evaluator.context.flops_per_sample,
            tokens_per_sample=evaluator.context.tokens_per_sample,
        ),
        cluster=task.cluster.name,
        mesh=replace(candidate.mesh, ep=expert_degree(best.layout, candidate.mesh.tp)),
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
        padding=best.layout.padding,
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
    """Return the record of a search for an evaluation that was improved."""
    # A layout's bound is the sum of its parts: rounding must not make the gap negative.
    lower_s = min(outcome.lower_bound_s, best.prediction.step_time_s)
    return SearchRecord(
        wall_time_s=wall_time_s,
        candidates=outcome.candidates,
        evaluated=outcome.evaluated,
        lower_bound_s=lower_s,
        gap=best.prediction.step_time_s / lower_s - 1.0 if lower_s else 0.0,
        reasons=reasons,
    )


def notes_of(
    task: Task, evaluator: Evaluator, best: Evaluation, outcome: Outcome, found: Sequence[Found], mixing: Sequence[Op]
) -> tuple[str, ...]:
    """Return the notes for a reader of the plan.

    Args:
        found: the calls that had no declared rule, with the rules that were found for them.
        mixing: the operators that mix samples.
    """
    graph, candidate = task.graph, best.candidate
    return (
        *certificate_note(best, outcome),
        *graph.notes,
        *padding_notes(graph, best.layout.padding, candidate.mesh.tp, candidate.vocab_multiple),
        *unaligned_note(evaluator, best),
        *operators_without_rule(graph, found, evaluator.model),
        *mixing_note(mixing),
        *mixtures(evaluator.layouts, best.layout),
        *repeated(evaluator.layouts, best.layout),
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
            recompute=recompute_of(mode),
            offload=block.index in evaluator.context.offloaded or mode == OFFLOADED,
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


def block_layouts(layouts: Layouts, priced: PricedLayout) -> tuple[tuple[BlockLayout, ...], tuple[int, ...]]:
    """Return the distinct layouts of the plan's blocks, and the index of its layout for each block of the model."""
    graph, index_of = layouts.compact.graph, dict[BlockLayout, int]()
    of_class = []
    for i, block in enumerate(graph.blocks):
        typings = [_batch_layout(graph, block, layouts.batch.strategies)]
        if priced.key.ep_data > 1:
            typings.append(_spread_layout(graph, block))
        for solution in (priced.sequence, priced.solution):
            if solution is not None:
                boundary = _boundary(graph, block, solution.typing.strategies)
                typings.append(replace(solution.blocks[i], parameter_names=_names(graph, block), boundary=boundary))
        layout = BlockLayout(block_hash=block.hash, typings=tuple(typings))
        of_class.append(index_of.setdefault(layout, len(index_of)))
    return tuple(index_of), tuple(of_class[k] for k in layouts.compact.class_of)


def mixtures(layouts: Layouts, layout: PricedLayout) -> tuple[str, ...]:
    """Return a note for each strategy of mixtures of experts, beginning with :data:`MIXTURE_NOTE`."""
    graph, strategies = layouts.compact.graph, Counter[str]()
    for op, count in calls(graph, layouts):
        if op.target != EXPERTS:
            continue
        is_spread = layout.key.ep_data > 1 and can_spread(graph, op)
        parts = [f"experts spread and tokens sent over {layout.key.ep_data} data ranks"] if is_spread else []
        for axis, solution in ((CP, layout.sequence), (TP, layout.solution)):
            if solution is not None:
                parts.append(f"{axis}={solution.typing.size} '{solution.typing.strategies[op.name].name}'")
        strategies[", ".join(parts) or "whole, on each rank's samples"] += count
    return tuple(f"{MIXTURE_NOTE}{count}): {name}" for name, count in strategies.items())


def repeated(layouts: Layouts, layout: PricedLayout) -> tuple[str, ...]:
    """Return a note for each axis on which a large part of the matrix products is repeated by every rank."""
    graph, notes = layouts.compact.graph, []
    for axis, solution in ((CP, layout.sequence), (TP, layout.solution)):
        if solution is None or solution.typing.size == 1:
            continue
        by_module, total = dict[str, float](), 0.0
        for op, count in calls(graph, layouts):
            flops = work(op, operand_specs(op, graph.spec)).flops * count
            total += flops
            if solution.typing.strategies[op.name].work == 1:
                name = op.module or op.source or op.name
                by_module[name] = by_module.get(name, 0.0) + flops
        share = sum(by_module.values()) / total if total else 0.0
        if share >= LEAST_REPEATED:
            names = sorted((name for name, flops in by_module.items() if flops), key=lambda name: -by_module[name])
            named, more = ", ".join(names[:3]), " ..." * (len(names) > 3)
            notes.append(
                f"{share:.0%} of the FLOPs are repeated on each of the {solution.typing.size} ranks of {axis} ({named}{more}): "
                "splitting them is not possible there, or is predicted to take longer"
            )
    return tuple(notes)


def _batch_layout(graph: Graph, block: Block, strategies: Mapping[str, Strategy]) -> AxisTyping:
    return AxisTyping(
        axis=BATCH,
        strategies=tuple(strategies[op.name].name for op in graph.block_ops(block)),
        parameters=tuple(I for _ in graph.block_parameters(block)),
        parameter_names=_names(graph, block),
        boundary=_boundary(graph, block, strategies),
    )


def _spread_layout(graph: Graph, block: Block) -> AxisTyping:
    """Return the typing on ``ep_data``: experts are split, all other operators run on the rank's samples."""
    ops = graph.block_ops(block)
    split = {ref.name for op in ops if can_spread(graph, op) for ref in op.operands[3:]}
    return AxisTyping(
        axis=SPREAD,
        strategies=tuple(DISPATCH if can_spread(graph, op) else SAMPLES for op in ops),
        parameters=tuple(S(0) if p.name in split else I for p in graph.block_parameters(block)),
        parameter_names=_names(graph, block),
    )


def _boundary(graph: Graph, block: Block, strategies: Mapping[str, Strategy]) -> tuple[Type, ...]:
    return tuple(strategies[ref.name].outputs[ref.index] for ref in graph.block_outputs(block))


def _names(graph: Graph, block: Block) -> tuple[str, ...]:
    return tuple(p.key.removeprefix(f"{block.label}.") for p in graph.block_parameters(block))


def operators_without_rule(graph: Graph, undeclared: Sequence[Found], model: CostModel) -> tuple[str, ...]:
    """Return a note for each kind of call without a declared rule: the rule found by execution, or the time of repeating the calls."""
    notes = []
    for kind in undeclared:
        calls = [op for op in (*graph.prelude, *graph.ops) if op.target == kind.target]
        calls = [op for op in calls if key_of(op, tuple(graph.spec(r) for r in op.operands)) == kind.key]
        if kind.line:
            notes.append(f"{kind.target} has no declared rule: found by execution '{kind.line}' ({len(calls)} calls)")
            continue
        times = [model.op_time_s(op, [graph.spec(ref) for ref in op.operands]) for op in calls]
        cost_s = sum(time.forward_s + time.backward_s for time in times)
        notes.append(
            f"{kind.target} has no rule and none was found ({kind.why}): its {len(calls)} calls are repeated on every "
            f"rank of an axis that splits the work inside a sample, {1e3 * cost_s:.3g} ms for {graph.batch_size} samples"
        )
    return tuple(notes)


MAX_CONFLICT_TRIALS = 24
"""The number of candidates, the leanest first, that are evaluated before a set of pins counts as too large for the memory."""

MAX_EVALUATED = 24
"""The number of candidates excluded by a bound, the leanest first, that are evaluated for the memory that they need, where no plan fits."""

MayFit = Callable[[Pins, Problem], bool]
"""Returns whether some candidate fits in memory under these pins, for this problem."""


def conflicting(problem: Problem, pins: Pins) -> InfeasibleError:
    """Return the error of constraints that leave no candidate; it names a minimal set of them and remedies."""
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
    """Return the error of a search that ended without a plan."""
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
    found = f"none in {seconds(bound_s)} or less" if bound_s < float("inf") else "none fits in memory in any layout"
    return InfeasibleError(
        f"No plan takes at most {seconds(most_s)} a step",
        got=found if bound_s > most_s else f"none of {outcome.candidates} candidates does",
        fix="Allow more time, or take more devices",
    )


def _excluded_misfits(pool: Sequence[Candidate], evaluator: Evaluator, outcome: Outcome) -> list[Misfit]:
    """Return why the leanest candidates that a bound excluded do not fit, with the memory that they need."""
    evaluated = {misfit.candidate for misfit in outcome.misfits}
    excluded = sorted((candidate for candidate in pool if candidate not in evaluated), key=leanness)
    results = map(evaluator.evaluate, excluded[:MAX_EVALUATED])
    return [misfit for misfit in results if isinstance(misfit, Misfit)]


def too_large(
    task: Task, problem: Problem, pool: Sequence[Candidate], evaluator: Evaluator, misfits: Sequence[Misfit],
    may_fit: MayFit,
) -> InfeasibleError:  # fmt: skip
    """Return the error of a task for which nothing fits in memory; it names the conflicting pins, the memory, the devices and the batch.

    The pins are found by the deletion filter: a pin is dropped if nothing fits without it either.

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
    remaining = task.pins
    for pin in task.pins.pins:
        without = remaining.without(pin.text)
        if not may_fit(without, problem):
            remaining = without
    needed = num_bytes(min(needs) * evaluator.model.memory_spread)
    memory = f"{memory_of_devices(evaluator.model)} of memory a device (the leanest plan needs {needed})"
    world = f"{problem.world_size} device{'s' * (problem.world_size > 1)}"
    larger = replace(problem, global_batch_size=task.global_batch_size * problem.world_size)
    batch = (f"a global batch of {task.global_batch_size}",) if may_fit(remaining, larger) else ()
    fix = "Drop one of the pins named, or take more devices" if remaining.texts else "Take more or larger devices"
    meeting: tuple[str, ...] = ()
    if problem.mixes_samples and may_fit(remaining, replace(problem, mixes_samples=False)):
        place = task.graph.mixing or "statistics over the batch"
        meeting = (f"samples that meet in {place}, for which a data rank takes all its samples in one micro-batch",)
        fix = f"Keep samples apart there, or {fix[0].lower()}{fix[1:]}"
    return InfeasibleError(
        "These constraints conflict",
        got="; ".join((*remaining.texts, memory, world, *batch, *meeting)),
        fix=fix + ", or search --space wide, where optimizers may live on the host" * _may_offload(task, pool),
    )


def _may_offload(task: Task, pool: Sequence[Candidate]) -> bool:
    """Return whether the optimizer could live on the host, but the space does not try that."""
    if task.space.offload or not task.pins.allows("offload", "optimizer"):
        return False
    return len(offloaded(pool[:1], task.cluster, task.pins, ("optimizer",), task.optimizer)) > 1

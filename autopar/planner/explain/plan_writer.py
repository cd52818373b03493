"""The plan that a search found, as others read it: its choices, what they cost, and what a reader should know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.graph.ir import Graph, Op
from autopar.plan import BlockPlan, ModelInfo, Plan, SearchRecord, StagePlan
from autopar.planner.evaluate.evaluation import Evaluation
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.explain.layout_writer import block_layouts, mixtures, operators_without_rule, repeated
from autopar.planner.explain.notes import (
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
from autopar.planner.layouts.padding import padding_notes
from autopar.planner.layouts.types import expert_degree
from autopar.planner.outcome import Outcome
from autopar.planner.space.rank_orders import rank_groups
from autopar.planner.stages.activation_modes import MOVED, none_if_moved
from autopar.planner.task import Task
from autopar.rules.missing import Found


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

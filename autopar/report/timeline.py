"""The predicted step as spans on a clock, from the plan's schedule and stage times: what the pictures draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import PlanError
from autopar.plan.schedule import Action, dependencies, schedule_actions

if TYPE_CHECKING:
    from autopar.plan.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One piece of work of one pipeline rank; ``kind`` is ``F``, ``B``, ``data parallel`` or ``optimizer``."""

    pp_rank: int
    kind: str
    name: str
    start_s: float
    end_s: float
    stage: int = -1
    micro_batch: int = -1


def timeline(plan: Plan) -> list[Span]:
    """Spans in order of their start. Sends take no time here: their exposed part stands in the breakdown.

    Raises:
        PlanError: the plan does not hold the times of its stages.
    """
    if not plan.predicted.stage_times:
        raise PlanError.missing(
            "predicted times of the stages, which a timeline needs",
            where="predicted.stage_times",
            fix="Make the plan again with 'autopar search' or 'autopar estimate'",
        )
    spans = _pipeline(plan)
    breakdown = plan.predicted.breakdown
    for rank in range(plan.mesh.pp):
        clock_s = max((span.end_s for span in spans if span.pp_rank == rank), default=0.0)
        for name, part_s in (("data parallel", breakdown.data_parallel_s), ("optimizer", breakdown.optimizer_s)):
            if part_s > 0:
                spans.append(Span(pp_rank=rank, kind=name, name=name, start_s=clock_s, end_s=clock_s + part_s))
                clock_s += part_s
    return sorted(spans, key=lambda span: (span.start_s, span.pp_rank))


def _pipeline(plan: Plan) -> list[Span]:
    """Each action starts when its rank is free and what it depends on has ended."""
    pp, last_stage = plan.mesh.pp, len(plan.stages) - 1
    queues = schedule_actions(plan.schedule, pp, plan.virtual_stages, plan.num_micro_batches)
    ends: dict[Action, float] = {}
    at, free_s = [0] * pp, [0.0] * pp
    spans: list[Span] = []
    total = sum(map(len, queues))
    while len(spans) < total:
        before = len(spans)
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                action = queue[at[rank]]
                needs = dependencies(action, last_stage)
                if any(need not in ends for need in needs):
                    break
                start_s = max([free_s[rank], *(ends[need] for need in needs)])
                ends[action] = free_s[rank] = start_s + plan.predicted.stage_times[action.stage][action.kind == "B"]
                spans.append(
                    Span(
                        pp_rank=rank,
                        kind=action.kind,
                        name=str(action),
                        start_s=start_s,
                        end_s=ends[action],
                        stage=action.stage,
                        micro_batch=action.micro_batch,
                    )
                )
                at[rank] += 1
        assert len(spans) > before, "a schedule never waits for itself"
    return spans


# --- The predicted step as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

_CATEGORY = {"F": "forward", "B": "backward"}


def perfetto_trace(plan: Plan) -> dict[str, Any]:
    """The trace as JSON values: one thread for each pipeline rank, times in microseconds.

    Raises:
        PlanError: the plan does not hold the times of its stages.
    """
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": f"predicted step of {plan.model.name}"}}
    ]
    events += [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(plan.mesh.pp)
    ]
    for span in timeline(plan):
        args = {"stage": span.stage, "micro_batch": span.micro_batch} if span.stage >= 0 else {}
        events.append(
            {
                "name": span.name,
                "cat": _CATEGORY.get(span.kind, span.kind),
                "ph": "X",
                "pid": 0,
                "tid": span.pp_rank,
                "ts": span.start_s * 1e6,
                "dur": (span.end_s - span.start_s) * 1e6,
                "args": args,
            }
        )
    return {"displayTimeUnit": "ms", "traceEvents": events}

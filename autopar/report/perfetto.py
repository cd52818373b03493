"""The predicted step as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.report.timeline import timeline

if TYPE_CHECKING:
    from autopar.plan.plan import Plan

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

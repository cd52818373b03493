"""Answers to questions of this package, as text and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from autopar.plan.plan import Plan
from autopar.plan.text import diff_plans, render_plan, short_text
from autopar.questions.comparisons import Point, Study, StudyResult, Swept
from autopar.questions.sizing import Answer, Trial
from autopar.report.summaries import plan_summary, render_comparison
from autopar.util.formatting import num_bytes, percent, plain_table, seconds

_HEAD = ("step\ntime", "peak\nmemory", "plan")
_WIDTH = 80
"""Columns of the tables, those of a plain terminal."""


def render_answer(answer: Answer) -> str:
    """Return the answer, a table of the sizes that were tried, and the plan."""
    priced = answer.cost is not None
    head = ("tried", *(("cost of\na step",) if priced else ()), *_HEAD)
    rows = [
        (trial.value, *((_cost(trial),) if priced else ()), *_cells(trial.plan, trial.missing))
        for trial in answer.trials
    ]
    table = plain_table(head, rows, left=("tried", "plan"), width=_WIDTH)
    cost = f", {answer.cost:.4g} a step" if answer.cost is not None else ""
    limit = f" ({answer.limit})" if answer.limit else ""
    return f"{answer.value}{cost}{limit}\n\n{table}\n\n{render_plan(answer.plan)}"


def answer_summary(answer: Answer) -> dict[str, Any]:
    """Return an answer as JSON values."""
    return {
        "answer": answer.value,
        "cost": answer.cost,
        "limit": answer.limit or None,
        "plan": plan_summary(answer.plan),
        "tried": [
            {
                "value": trial.value,
                "num_devices": trial.num_devices,
                "step_time_s": trial.plan.predicted.step_time_s if trial.plan else None,
                "cost": trial.cost,
                "missing": trial.missing or None,
            }
            for trial in answer.trials
        ],
    }


def render_sweep(name: str, swept: Sequence[Swept]) -> str:
    """Return a table with a row for each factor. Changes are relative to the factor 1, or to the first factor with a plan."""
    base = _base(swept)
    rows = [(f"{factor:g}", _change(plan, base), *_cells(plan)) for factor, plan in swept]
    return plain_table((name, "change", *_HEAD), rows, left=("plan",), width=_WIDTH, indent=0)


def sweep_summary(name: str, swept: Sequence[Swept]) -> dict[str, Any]:
    """Return a sweep as JSON values, with the choices in which plans differ."""
    base = _base(swept)
    plans = []
    for factor, plan in swept:
        changed = diff_plans(base, plan) if plan and base else []
        ratio = plan.predicted.step_time_s / base.predicted.step_time_s if plan and base else None
        plans.append(
            {
                "factor": factor,
                "step_time_ratio": ratio,
                "changes": [asdict(change) for change in changed if _is_choice(change.path)],
                "plan": plan_summary(plan) if plan else None,
            }
        )
    return {"sweep": name, "plans": plans}


def render_front(points: Sequence[Point]) -> str:
    """Return a table with a row for each plan, the fastest first."""
    priced = any(point.cost is not None for point in points)
    head = ("cluster", "devices", *(("cost of\na step",) if priced else ()), "memory\nleft", *_HEAD)
    rows = [
        (
            point.cluster,
            f"{point.num_devices:,}",
            *((f"{point.cost:.4g}",) if point.cost is not None else ()),
            percent(point.head_room),
            *_cells(point.plan),
        )
        for point in points
    ]
    return plain_table(head, rows, left=("plan",), width=_WIDTH, indent=0)


def front_summary(points: Sequence[Point]) -> dict[str, Any]:
    """Return a front as JSON values."""
    names = ("cluster", "num_devices", "head_room", "cost")
    rows = [{name: getattr(point, name) for name in names} | {"plan": plan_summary(point.plan)} for point in points]
    return {"front": rows}


def _is_choice(path: str) -> bool:
    return not path.startswith(("predicted", "search", "cluster", "notes"))


def _base(swept: Sequence[Swept]) -> Plan | None:
    """Return the plan that changes are relative to."""
    plans = [(factor, plan) for factor, plan in swept if plan]
    return next((plan for factor, plan in plans if factor == 1), plans[0][1] if plans else None)


def _change(plan: Plan | None, base: Plan | None) -> str:
    return percent(plan.predicted.step_time_s / base.predicted.step_time_s - 1 if plan and base else None, sign=True)


def _cost(trial: Trial) -> str:
    return "-" if trial.cost is None else f"{trial.cost:.4g}"


def _cells(plan: Plan | None, missing: str = "none within the limits") -> tuple[str, ...]:
    """Return a plan as cells of a table, or the reason why there is none."""
    if plan is None:
        return ("-", "-", missing)
    predicted = plan.predicted
    return seconds(predicted.step_time_s), num_bytes(predicted.peak_memory_bytes), short_text(plan)


# --- studies: autopar's plan next to the published layout


def render_list(studies: list[Study]) -> str:
    """Return a table of studies with their titles."""
    rows = [(study.name, study.title) for study in studies]
    return plain_table(("name", "what it is"), rows, left=("name", "what it is"), width=120, indent=0)


def list_summary(studies: list[Study]) -> dict[str, Any]:
    """Return studies as JSON values."""
    return {study.name: {"title": study.title, "source": study.source, "cluster": study.cluster} for study in studies}


def render_result(result: StudyResult) -> str:
    """Return both plans side by side, the ratio of their step times, and what the study had to assume."""
    study, ours, published = result.study, result.ours, result.published
    plans = render_comparison(ours, published, names=("autopar", "published")) if published else render_plan(ours)
    lines = [study.title, f"  source      {study.source}"]
    lines += [f"  measured    {study.measured}"] if study.measured else []
    lines += [f"  not sure    {text}" for text in study.unsure]
    lines += ["", plans, "", _verdict(result)]
    lines.append(f"traced in {result.trace_s:.1f} s, searched in {ours.search.wall_time_s:.1f} s")
    return "\n".join(lines)


def study_summary(result: StudyResult) -> dict[str, Any]:
    """Return a study's result as JSON values."""
    study = result.study
    return {
        "study": study.name,
        "title": study.title,
        "source": study.source,
        "measured": study.measured,
        "unsure": list(study.unsure),
        "published_pins": list(study.pins),
        "autopar": plan_summary(result.ours),
        "published": plan_summary(result.published) if result.published else None,
        "published_misfit": result.reason or None,
        "published_over_autopar": result.ratio,
        "trace_s": result.trace_s,
    }


def _verdict(result: StudyResult) -> str:
    """Return which plan is faster, and by how much."""
    ratio = result.ratio
    if ratio is None:
        return f"the published layout has no plan under this cost model: {result.reason}"
    if ratio >= 1:
        return f"autopar's plan is {100 * (ratio - 1):.1f} % faster than the published layout, by the same cost model"
    return f"autopar's plan is {100 * (1 / ratio - 1):.1f} % SLOWER than the published layout: please report this"

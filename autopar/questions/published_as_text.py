"""A study's result for people and for programs: our plan beside the published layout."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.plan.words import batch_text, schedule_text, zero_text
from autopar.util.text_table import plain_table
from autopar.util.units import num_bytes, seconds, share

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.questions.published_layouts import Study, StudyResult


def render_list(studies: list[Study]) -> str:
    """Names and titles."""
    rows = [(study.name, study.title) for study in studies]
    return plain_table(("name", "what it is"), rows, left=("name", "what it is"), width=120, indent=0)


def list_summary(studies: list[Study]) -> dict[str, Any]:
    """The same as JSON values."""
    return {study.name: {"title": study.title, "source": study.source, "cluster": study.cluster} for study in studies}


def render_result(result: StudyResult) -> str:
    """Both plans in a table, which is better by how much, and what the study is unsure of."""
    study, ours, published = result.study, result.ours, result.published
    cells = [_cells(ours), _cells(published) if published else {}]
    rows = [(key, cells[0][key], cells[1].get(key, "-")) for key in cells[0]]
    lines = [study.title, f"  source      {study.source}"]
    lines += [f"  measured    {study.measured}"] if study.measured else []
    lines += [f"  not sure    {text}" for text in study.unsure]
    lines += ["", plain_table(("", "autopar", "published"), rows, left=("", "autopar", "published"), width=120), ""]
    lines.append(_verdict(result))
    lines.append(f"traced in {result.trace_s:.1f} s, searched in {ours.search.wall_time_s:.1f} s")
    return "\n".join(lines)


def study_summary(result: StudyResult) -> dict[str, Any]:
    """The same as JSON values."""
    from autopar.report.json_summary import plan_summary

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
    ratio = result.ratio
    if ratio is None:
        return f"the published layout has no plan under this cost model: {result.reason}"
    if ratio >= 1:
        return f"autopar's plan is {100 * (ratio - 1):.1f} % faster than the published layout, by the same cost model"
    return f"autopar's plan is {100 * (1 / ratio - 1):.1f} % SLOWER than the published layout: please report this"


def _cells(plan: Plan) -> dict[str, str]:
    predicted = plan.predicted
    return {
        "mesh": str(plan.mesh),
        "batch": batch_text(plan),
        "schedule": schedule_text(plan),
        "ZeRO": zero_text(plan),
        "recompute": plan.recompute,
        "step time": seconds(predicted.step_time_s),
        "peak memory": f"{num_bytes(predicted.peak_memory_bytes)} of {num_bytes(predicted.memory_limit_bytes)}",
        "MFU": share(predicted.mfu, 1),
        "gap at most": share(plan.search.gap, 1),
    }

"""The predicted step as a timeline, for Perfetto, and a plan as one HTML page without scripts, fonts or network access."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from typing import Any

from autopar.cost.step.simulation import compiled
from autopar.errors import PlanError
from autopar.plan.file import plan_to_dict
from autopar.plan.plan import Plan
from autopar.plan.text import memory_parts, render_plan, time_parts
from autopar.util.files import dumps
from autopar.util.formatting import num_bytes, seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One action of one pipeline rank.

    Attributes:
        pp_rank: the pipeline rank.
        kind: ``F``, ``B``, ``data parallel`` or ``optimizer``.
        start_s, end_s: its time in the step.
        stage, micro_batch: of ``F`` and ``B``; otherwise -1.
    """

    pp_rank: int
    kind: str
    start_s: float
    end_s: float
    stage: int = -1
    micro_batch: int = -1

    @property
    def name(self) -> str:
        """The name in pictures."""
        return self.kind if self.stage < 0 else f"{self.stage}{self.kind}{self.micro_batch}"


def timeline(plan: Plan) -> list[Span]:
    """Return the actions of the predicted step by their start. Sends take no time in it; their exposed part is in the breakdown.

    Raises:
        PlanError: the plan has no times of its stages.
    """
    if not plan.predicted.stage_times:
        raise PlanError.missing(
            "predicted times of the stages, which a timeline needs",
            where="predicted.stage_times",
            fix="Make the plan again with 'autopar search' or 'autopar estimate'",
        )
    spans = _spans_of_pipeline(plan)
    breakdown = plan.predicted.breakdown
    for rank in range(plan.mesh.pp):
        clock_s = max((span.end_s for span in spans if span.pp_rank == rank), default=0.0)
        for name, part_s in (("data parallel", breakdown.data_parallel_s), ("optimizer", breakdown.optimizer_s)):
            if part_s > 0:
                spans.append(Span(pp_rank=rank, kind=name, start_s=clock_s, end_s=clock_s + part_s))
                clock_s += part_s
    return sorted(spans, key=lambda span: (span.start_s, span.pp_rank))


def _spans_of_pipeline(plan: Plan) -> list[Span]:
    """Return the forward and backward actions; each starts when its rank is free and what it depends on has ended."""
    actions = compiled(plan.schedule, plan.mesh.pp, plan.virtual_stages, plan.num_micro_batches)
    ends = [0.0] * (len(actions.rank) + 1)  # the last one is for actions that depend on nothing
    numbers: dict[tuple[int, str], Iterator[int]] = defaultdict(count)  # a stage runs micro-batches in order
    spans: list[Span] = []
    columns = zip(actions.rank, actions.before, actions.need, actions.duration, strict=True)
    for i, (rank, before, need, duration) in enumerate(columns):
        stage, kind = duration // 3, "FBF"[duration % 3]
        start_s, number = max(ends[before], ends[need]), next(numbers[stage, kind])
        ends[i] = start_s + plan.predicted.stage_times[stage][kind == "B"]
        span = Span(pp_rank=rank, kind=kind, start_s=start_s, end_s=ends[i], stage=stage, micro_batch=number)
        spans.append(span)
    return spans


# --- the predicted step as a Chrome trace, for ui.perfetto.dev or chrome://tracing

_CATEGORY = {"F": "forward", "B": "backward"}


def perfetto_trace(plan: Plan) -> dict[str, Any]:
    """Return the trace as JSON values: one thread for each pipeline rank, times in microseconds.

    Raises:
        PlanError: the plan has no times of its stages.
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


# --- the HTML page

_MAX_SPANS = 4000
"""Most actions that are drawn."""
_COLOURS = ("#4269d0", "#97bbf5", "#efb118", "#ff725c", "#6cc5b0", "#c9c9c9", "#9c6b4e", "#3ca951", "#a463f2")
"""One for each part of a step."""
_SPAN_COLOURS = {"F": "#97bbf5", "B": "#4269d0", "data parallel": "#ff725c", "optimizer": "#9c6b4e"}
_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.4rem;overflow-wrap:anywhere}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.bar{display:flex;height:1.6rem;border-radius:3px;overflow:hidden;background:#eee;margin:.3rem 0}
.key{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.4rem}
.no{color:#b00020;font-weight:600}svg{width:100%;display:block}pre{overflow:auto;background:#f6f6f6;padding:1rem}
"""


def render_html(plan: Plan) -> str:
    """Return the page: pictures of time, memory and the pipeline, the text of the plan, and its file. Every text of the plan is escaped."""
    sections = (
        ("Where the step time goes", _time(plan)),
        ("Memory of the largest rank of each pipeline rank", _memory(plan)),
        ("Pipeline", _pipeline(plan)),
        ("The plan", f"<pre>{escape(render_plan(plan))}</pre>"),
        ("The plan file", f"<details><summary>JSON</summary><pre>{escape(dumps(plan_to_dict(plan)))}</pre></details>"),
    )
    title = escape(f"{plan.model.name} on {plan.cluster}")
    body = "\n".join(f"<h2>{escape(name)}</h2>\n{content}" for name, content in sections if content)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n</body>\n</html>\n"
    )


def _time(plan: Plan) -> str:
    parts = [(name, part_s, seconds(part_s)) for name, part_s in time_parts(plan.predicted.breakdown)]
    return _bar(parts, plan.predicted.breakdown.total_s)


def _memory(plan: Plan) -> str:
    """Return a bar of memory for each pipeline rank, or each group of ranks with unequal shares."""
    text = ""
    for memory in plan.predicted.memory:
        limit = plan.predicted.limit_of(memory)
        parts = [(name, value, num_bytes(value)) for name, value in memory_parts(memory)]
        verdict = "" if plan.predicted.rank_fits(memory) else ' <span class="no">does not fit</span>'
        who, devices = f"pipeline rank {memory.pp_rank}", " + ".join(plan.devices_of(memory.pp_rank))
        if plan.data_shares:
            group = plan.groups[memory.group]
            who, devices = f"ranks {group.start}-{group.stop - 1}", group.device
        where = f" ({escape(devices)})" if plan.groups else ""
        text += f"<div>{who}{where}: {num_bytes(memory.total)} of {num_bytes(limit)}{verdict}"
        text += _bar(parts, max(limit, memory.total)) + "</div>"
    return text


def _pipeline(plan: Plan) -> str:
    """Return the timeline as SVG."""
    if not plan.predicted.stage_times:
        return ""
    spans = timeline(plan)
    if len(spans) > _MAX_SPANS:
        return f"<p>{len(spans):,} pieces of work are too many to draw here: use <code>--perfetto</code>.</p>"
    end_s = max(span.end_s for span in spans) or 1.0
    row, width = 24, 1000.0
    rects = []
    for span in spans:
        x, w = width * span.start_s / end_s, width * (span.end_s - span.start_s) / end_s
        rects.append(
            f'<rect x="{x:.2f}" y="{span.pp_rank * row + 2}" width="{w:.2f}" height="{row - 4}" stroke="#fff"'
            f' stroke-width="0.5" fill="{_SPAN_COLOURS[span.kind]}"><title>{escape(span.name)}: '
            f"{seconds(span.start_s)} to {seconds(span.end_s)}</title></rect>"
        )
    height = row * plan.mesh.pp
    keys = "".join(
        f'<span class="key" style="background:{colour}"></span>{_CATEGORY.get(kind, kind)}&ensp;'
        for kind, colour in _SPAN_COLOURS.items()
    )
    return (
        f'<svg viewBox="0 0 {width:.0f} {height}" height="{height}" preserveAspectRatio="none" role="img"'
        f' aria-label="work of each pipeline rank over time">{"".join(rects)}</svg>\n<p>{keys}</p>'
    )


def _bar(parts: Sequence[tuple[str, float, str]], total: float) -> str:
    """Return parts of a total as a horizontal bar, with the colours, names and values below it."""
    pieces, items = [], []
    for (name, part, text), colour in zip(parts, _COLOURS, strict=False):
        if part > 0:
            title, width = escape(name), 100 * part / total
            pieces.append(f'<div style="width:{width:.3f}%;background:{colour}" title="{title}: {text}"></div>')
            items.append(f'<span class="key" style="background:{colour}"></span>{title} {text}')
    return f'<div class="bar">{"".join(pieces)}</div><p>{"&ensp; ".join(items)}</p>'

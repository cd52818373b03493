"""Formats plans and the differences of two plans as plain text of at most 100 columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from autopar.plan.file import short
from autopar.plan.plan import BUCKET_BYTES, Plan, recompute_text
from autopar.util.formatting import count, num_bytes, percent, plain_table, printable, ranges, seconds
from autopar.util.toml import as_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autopar.plan.plan import AxisTyping
    from autopar.plan.prediction import Breakdown, Memory


WIDTH = 100
"""Columns of the text."""
_BAR = 30
"""Columns of the bar of a complete step."""


def render_plan(plan: Plan) -> str:
    """Return a plan as text, with mesh, schedule, prediction, stages, memory, layouts and reasons; without colours and trailing blanks."""
    parts = [
        _head(plan),
        _prediction(plan),
        _time(plan),
        _stages(plan),
        _memory(plan),
        _layouts(plan),
        _search(plan),
    ]
    if plan.notes:
        parts.append("Notes\n" + _bullets(plan.notes))
    return "\n\n".join(parts)


def layout_lines(typing: AxisTyping) -> list[tuple[str, str]]:
    """Return each type at rest with the parameters that have it; split types come first."""
    names = typing.parameter_names
    by_type: dict[str, list[str]] = {}
    for index, kind in enumerate(typing.parameters):
        by_type.setdefault(str(kind), []).append(names[index] if names else "")
    split_first = sorted(by_type, key=lambda kind: (kind == "I", kind))
    return [(kind, ranges(by_type[kind]) if names else f"{len(by_type[kind])} parameters") for kind in split_first]


def _head(plan: Plan) -> str:
    precision = plan.precision
    dtypes = f"compute {precision.compute}, storage {precision.storage}, reduce {precision.reduce}"
    buckets = f"gradients are summed from {num_bytes(plan.bucket_bytes)} on"
    padded = f"padded: each rank's rows of it are a multiple of {plan.vocab_multiple}"
    groups = ", ".join(f"ranks {g.start}-{g.stop - 1} on {g.device}" for g in plan.groups)
    rows = [
        ("model", f"{count(plan.model.num_parameters)} parameters, {plan.model.tokens_per_sample:,} tokens a sample"),
        ("mesh", f"{plan.mesh} ({plan.mesh.world_size} ranks)" if plan.mesh.world_size > 1 else "one rank"),
        ("devices", f"{groups}: number the nodes in this order" if groups else ""),
        *choices(plan),
        ("buckets", buckets if plan.bucket_bytes != BUCKET_BYTES else ""),
        ("vocabulary", padded if plan.vocab_multiple > 1 else ""),
        ("precision", f"{precision.name} ({dtypes})"),
        ("optimizer", plan.optimizer),
        ("offload", _offload(plan) if plan.offload or any(block.offload for block in plan.blocks) else ""),
        ("pins", ", ".join(plan.pins) or "none"),
    ]
    head = _wrap(f"Plan for {plan.model.name} on {plan.cluster}", "")
    return "\n".join([*head, _fields([row for row in rows if row[1]])])


def _offload(plan: Plan) -> str:
    """Return what is in host memory, and how much of it, in words."""
    host_bytes = max((memory.host for memory in plan.predicted.memory), default=0)
    num_blocks = sum(block.offload for block in plan.blocks)
    parts = ["the optimizer steps on the host"] if plan.offload else []
    parts += [f"what {num_blocks} of {len(plan.blocks)} blocks keep for backward lives there"] if num_blocks else []
    return f"{' and '.join(parts)}, with {num_bytes(host_bytes)} of the host's memory for each device"


def _prediction(plan: Plan) -> str:
    predicted = plan.predicted
    low, high = predicted.step_time_interval_s
    verdict = "fits" if plan.predicted.fits else "does not fit"
    rows = [
        ("step time", f"{seconds(predicted.step_time_s)} (between {seconds(low)} and {seconds(high)})"),
        ("throughput", f"{predicted.tokens_per_s:,.0f} tokens/s, MFU {percent(predicted.mfu)}"),
        ("peak memory", f"{memory_text(plan)} on the largest rank: {verdict}"),
    ]
    return "Predicted\n" + _fields(rows)


def _time(plan: Plan) -> str:
    total_s = plan.predicted.breakdown.total_s
    rows = [
        (name, seconds(part_s), percent(part_s / total_s), "#" * round(_BAR * part_s / total_s))
        for name, part_s in time_parts(plan.predicted.breakdown)
        if part_s
    ]
    table = plain_table(("part", "time", "share", ""), rows, left=("part", ""))
    return f"Where the step time goes (critical pipeline rank)\n{table}"


def _stages(plan: Plan) -> str:
    times = plan.predicted.stage_times
    head = ["stage", "pp rank", *(("devices",) if plan.groups else ()), "blocks", "layers", "recompute"]
    head += ("forward", "backward") if times else ()
    rows = []
    for stage in plan.stages:
        blocks = plan.blocks[stage.start : stage.stop]
        cells = [str(stage.index), str(stage.pp_rank)]
        cells += [" + ".join(plan.devices_of(stage.pp_rank))] if plan.groups else []
        cells += [_span(stage.start, stage.stop), ranges(block.label for block in blocks), recompute_text(blocks)]
        rows.append([*cells, *(map(seconds, times[stage.index]) if times else ())])
    table = plain_table(head, rows, left=("devices", "layers", "recompute"), width=WIDTH)
    whose = " on the slowest devices" if plan.data_shares else ""
    return f"Stages{f' (times of one micro-batch{whose})' if times else ''}\n{table}"


def _memory(plan: Plan) -> str:
    rows = [
        (
            str(memory.group if plan.data_shares else memory.pp_rank),
            *(num_bytes(part) for _, part in memory_parts(memory)),
            num_bytes(memory.total),
            *((num_bytes(plan.predicted.limit_of(memory)),) if plan.groups else ()),
            "yes" if plan.predicted.rank_fits(memory) else "no",
        )
        for memory in plan.predicted.memory
    ]
    # the table has to fit the page
    rank = "kind" if plan.data_shares else "rank"
    head = (rank, *MEMORY_PARTS, "total", "limit") if plan.groups else ("pp rank", *MEMORY_PARTS, "total")
    table = plain_table((*head, "fits"), rows, left=("fits",), width=WIDTH)
    of = "a rank of each kind (node group, from 0)" if plan.data_shares else "the largest rank of each pipeline rank"
    return f"Memory of {of}, at its peak\n{table}"


def _layouts(plan: Plan) -> str:
    """Return the blocks with equal layouts, each group with the types at rest on axes of several ranks."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for block in plan.blocks:
        rows: list[tuple[str, str]] = []
        for typing in plan.layouts[block.layout].typings:
            if typing.axis != "batch" and getattr(plan.mesh, typing.axis, 1) > 1:
                rows += [(f"{typing.axis} {kind}", names) for kind, names in layout_lines(typing)]
                if typing.boundary:
                    kinds = ", ".join(map(str, typing.boundary))
                    rows.append((f"{typing.axis} ", f"type of what the block hands on: {kinds}"))
        if rows:
            groups.setdefault(tuple(rows), []).append(block.label)
    lines = ["Layouts of parameters (S(d): dim d is split; I: whole on each rank of the axis)"]
    for group_rows, labels in groups.items():
        lines += _wrap(f"{ranges(labels)} ({len(labels)} block{'s' if len(labels) > 1 else ''})", "  ")
        for name, names in group_rows:
            lines += _wrap(names, f"    {name:<9} ", " " * 14)
    if not groups:
        lines += _wrap("nothing is split inside the model: every rank of a stage computes with whole parameters", "  ")
    return "\n".join(lines)


def _search(plan: Plan) -> str:
    search = plan.search
    effort = f"{search.evaluated:,} of {search.candidates:,} candidates evaluated in {seconds(search.wall_time_s)}"
    bound = f"no plan of the space is faster than {seconds(search.lower_bound_s)} (gap {percent(search.gap)})"
    head = "Why this plan" + " (one choice changed, and as little else as that needs)" * bool(search.reasons)
    return f"{head}\n" + _bullets((*search.reasons, f"{effort}; by the same cost model {bound}"))


def _fields(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(line for name, text in rows for line in _wrap(text, f"  {name:<11} ", " " * 14))


def _bullets(items: Sequence[str]) -> str:
    return "\n".join(line for item in items for line in _wrap(item, "  - ", "    "))


def _wrap(text: str, first: str, rest: str | None = None) -> list[str]:
    """Return lines of at most ``WIDTH`` columns of a terminal, on which a character takes no, one or two columns.

    Args:
        first: the start of the first line.
        rest: the start of further lines; None for ``first``.
    """
    rest = first if rest is None else rest
    width = WIDTH - max(cell_len(first), cell_len(rest))
    lines = [line.plain.rstrip() for line in Text(printable(text)).wrap(Console(width=WIDTH), width)]
    return [f"{rest if index else first}{line}".rstrip() for index, line in enumerate(lines)] or [first.rstrip()]


def _span(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}-{stop - 1}"


# --- texts and parts of a plan that the text, the HTML page and comparisons share

TIME_PARTS = (
    ("compute", "compute_s"),
    ("recompute", "recompute_s"),
    ("tensor parallel", "tensor_parallel_s"),
    ("context parallel", "context_parallel_s"),
    ("data parallel, exposed", "data_parallel_s"),
    ("pipeline sends, exposed", "pipeline_s"),
    ("pipeline bubble", "bubble_s"),
    ("optimizer", "optimizer_s"),
    ("copies to and from the host", "offload_s"),
)
"""The name of each part of a step, with its field in :class:`autopar.plan.prediction.Breakdown`."""

MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "transient", "reserved")
"""The fields of :class:`autopar.plan.prediction.Memory` that add up to its total."""


def time_parts(breakdown: Breakdown) -> list[tuple[str, float]]:
    """Return the name and the seconds of each part of a step."""
    return [(name, getattr(breakdown, field)) for name, field in TIME_PARTS]


def memory_parts(memory: Memory) -> list[tuple[str, int]]:
    """Return the name and the bytes of each part of a rank's peak memory."""
    return [(name, getattr(memory, name)) for name in MEMORY_PARTS]


def choices(plan: Plan) -> list[tuple[str, str]]:
    """Return the names and texts of the main choices of a plan, except for the mesh."""
    return [
        ("batch", batch_text(plan)),
        ("schedule", schedule_text(plan)),
        ("ZeRO", zero_text(plan)),
        ("recompute", plan.recompute),
    ]


def zero_text(plan: Plan) -> str:
    """Return what ZeRO splits, in words."""
    split = {
        0: "nothing split",
        1: "optimizer states split",
        2: "optimizer states and gradients split",
        3: "optimizer states, gradients and parameters split",
    }[plan.zero_stage]
    over = f" over dp_shard={plan.mesh.dp_shard}" if plan.zero_stage else ""
    return f"stage {plan.zero_stage}: {split}{over}"


def batch_text(plan: Plan) -> str:
    """Return how the global batch is divided, as a product."""
    count = f"{plan.num_micro_batches} micro-batch{'es' if plan.num_micro_batches > 1 else ''}"
    if plan.data_shares:
        groups = zip(plan.groups, plan.data_shares, strict=True)
        shares = " + ".join(f"{group.num_ranks} x {share} on {group.device}" for group, share in groups)
        return f"{plan.global_batch_size} = {count} x ({shares}) samples"
    parts = [
        count,
        f"{plan.micro_batch_size} sample{'s' if plan.micro_batch_size > 1 else ''}",
        f"{plan.mesh.data} data rank{'s' if plan.mesh.data > 1 else ''}",
    ]
    return f"{plan.global_batch_size} = {' x '.join(parts)}"


def short_text(plan: Plan) -> str:
    """Return the choices of a plan on one line, in the words of pins."""
    parts = [str(plan.mesh), f"zero={plan.zero_stage}", f"micro_batch={micro_batch_text(plan)}"]
    if plan.mesh.pp > 1:
        parts.append(plan.schedule + (f" v={plan.virtual_stages}" if plan.virtual_stages > 1 else ""))
    if plan.recompute != "none":
        parts.append(f"recompute={plan.recompute}")
    return " ".join(parts)


def micro_batch_text(plan: Plan) -> str:
    """Return the samples of a micro-batch, or those of each node group if they differ (``3-1``)."""
    return "-".join(map(str, plan.data_shares)) or str(plan.micro_batch_size)


def schedule_text(plan: Plan) -> str:
    """Return the schedule and the number of stages in words."""
    if plan.schedule == "none":
        return "none (one stage, micro-batches one after the other)"
    virtual = f" ({plan.virtual_stages} on each pipeline rank)" if plan.virtual_stages > 1 else ""
    return f"{plan.schedule}, {len(plan.stages)} stages{virtual}"


def memory_text(plan: Plan) -> str:
    """Return the peak memory with its interval, and the limit."""
    predicted = plan.predicted
    of = f"of {num_bytes(predicted.memory_limit_bytes)}"
    if not predicted.peak_memory_interval_bytes:
        return f"{num_bytes(predicted.peak_memory_bytes)} {of}"
    low, high = map(num_bytes, predicted.peak_memory_interval_bytes)
    return f"{num_bytes(predicted.peak_memory_bytes)} (between {low} and {high}) {of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference between two plans; a side without the value is None."""

    path: str
    before: object
    after: object

    def __str__(self) -> str:
        return f"{self.path}: {short(self.before)} -> {short(self.after)}"


def diff_plans(before: Plan, after: Plan) -> list[Change]:
    """Return the differences in the order of the document, except for the record of the search and the format version."""
    left, right = as_table(before, rare=True), as_table(after, rare=True)
    for data in (left, right):
        del data["search"], data["version"]
    return list(_differences(left, right, ""))


def _differences(before: Any, after: Any, path: str) -> Iterator[Change]:
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before:
            yield from _differences(before[key], after[key], f"{path}.{key}" if path else key)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (left, right) in enumerate(zip(before, after, strict=True)):
            yield from _differences(left, right, f"{path}[{index}]")
    elif before != after or type(before) is not type(after):
        yield Change(path=path, before=before, after=after)

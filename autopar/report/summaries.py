"""Plans, comparisons, runs and traced models as text and as JSON values.

:func:`plan_summary` is the JSON object of a plan that ``--json`` prints. Two plans are compared with each other, or a plan with the
measurements of its run. A traced model is described by its parameters, FLOPs, repeated blocks, operators, and the operators without a rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from autopar.cost.model import flops_of_block
from autopar.graph.graph import Block, Graph
from autopar.plan.plan import Plan
from autopar.plan.run_log import RunRecord
from autopar.plan.text import choices, diff_plans, time_parts
from autopar.rules.table import has_rule
from autopar.util.formatting import flops, num_bytes, percent, plain_table, ranges, seconds
from autopar.util.toml import as_table


def plan_summary(plan: Plan) -> dict[str, Any]:
    """Return the JSON values that ``search --json``, ``estimate --json`` and ``show --json`` print, in seconds and bytes."""
    values = as_table(plan, rare=True)
    for stage in values["stages"]:
        stage["devices"] = list(plan.devices_of(stage["pp_rank"]))
        stage["blocks"] = [block.label for block in plan.blocks[stage["start"] : stage["stop"]]]
    del values["mesh"]["ep_data"]
    derived = {
        "num_micro_batches": plan.num_micro_batches,
        "recompute": plan.recompute,
        "precision": plan.precision.name,
        "predicted": {**values["predicted"], "fits": plan.predicted.fits},
    }
    return {name: value for name, value in (values | derived).items() if name not in _IN_FILE}


_IN_FILE = ("prelude", "layouts", "blocks", "padding", "opaque", "offload", "bucket_bytes", "vocab_multiple", "version")
"""Fields of a plan that only its file has."""

_MAX_CHANGES = 40


def render_comparison(before: Plan, after: Plan, *, names: tuple[str, str]) -> str:
    """Return a table of the main figures of two plans with changes in percent, and a list of the choices that differ."""
    lines = plain_table(
        ("", *names, "change"), _rows(before, after), left=("", *names), width=120, indent=0
    ).splitlines()
    changes = [str(change) for change in diff_plans(before, after) if not change.path.startswith("predicted.")]
    lines += ["", "Differences of the plans" if changes else "The plans make the same choices."]
    lines += [f"  {change}" for change in changes[:_MAX_CHANGES]]
    if len(changes) > _MAX_CHANGES:
        lines.append(f"  and {len(changes) - _MAX_CHANGES} more: see --json")
    return "\n".join(lines)


def comparison(before: Plan, after: Plan) -> dict[str, Any]:
    """Return a comparison as JSON values: all changes, and the ratio of step times."""
    before_s, after_s = before.predicted.step_time_s, after.predicted.step_time_s
    return {
        "step_time_s": [before_s, after_s],
        "peak_memory_bytes": [before.predicted.peak_memory_bytes, after.predicted.peak_memory_bytes],
        "step_time_ratio": after_s / before_s if before_s else None,
        "changes": [asdict(change) for change in diff_plans(before, after)],
    }


def _rows(before: Plan, after: Plan) -> list[tuple[str, str, str, str]]:
    """Return the rows of a comparison: name, both values, and the change."""
    old, new = before.predicted, after.predicted
    rows = [
        ("model", before.model.name, after.model.name, ""),
        ("cluster", before.cluster, after.cluster, ""),
        ("mesh", str(before.mesh), str(after.mesh), ""),
        *((name, left, right, "") for (name, left), (_, right) in zip(choices(before), choices(after), strict=True)),
        _row("step time", old.step_time_s, new.step_time_s),
    ]
    for (name, left_s), (_, right_s) in zip(time_parts(old.breakdown), time_parts(new.breakdown), strict=True):
        if left_s or right_s:
            rows.append(_row(f"  {name}", left_s, right_s))
    rows += [
        _row("peak memory", old.peak_memory_bytes, new.peak_memory_bytes, num_bytes),
        ("MFU", percent(old.mfu), percent(new.mfu), ""),
        _row("tokens/s", old.tokens_per_s, new.tokens_per_s, "{:,.0f}".format),
    ]
    return rows


def _row(
    name: str, before: float, after: float, shown: Callable[[float], str] = seconds, *, digits: int = 1
) -> tuple[str, str, str, str]:
    return name, shown(before), shown(after), _change(before, after, digits)


def _change(before: float, after: float, digits: int = 1) -> str:
    return percent(after / before - 1, digits=digits, sign=True) if before else "-" if not after else "new"


# --- measurements of a run against its plan's prediction, for `autopar validate --from-run`


def render_run(record: RunRecord) -> str:
    """Return a table of predicted and measured times by category, and the verdict."""
    times = [("step", record.predicted_s, record.measured_s)]
    times += [(f"  {part.name}", part.predicted_s, part.measured_s) for part in record.parts]
    rows = [_row(*time, digits=0) for time in times if any(time[1:])]
    peak = "not measured" if record.measured_bytes is None else num_bytes(record.measured_bytes)
    change = "" if record.measured_bytes is None else _change(record.predicted_bytes, record.measured_bytes, 0)
    rows.append((f"peak memory ({record.memory_kind})", num_bytes(record.predicted_bytes), peak, change))
    low, high = record.interval_s
    lines = [
        f"{record.model} on {record.cluster}, {record.mesh}; medians of {record.num_steps} steps of {record.num_ranks} ranks",
        plain_table(("", "predicted", "measured", "change"), rows, left=("",)),
        f"interval of the step: {seconds(low)} to {seconds(high)}; between steps: {seconds(record.between_s)}",
        record.warning() or "the measured step lies inside the predicted interval",
    ]
    return "\n".join(lines)


def run_summary(record: RunRecord) -> dict[str, Any]:
    """Return the same as JSON values."""
    verdict = {"is_outside": record.is_outside, "worst": record.worst.name, "is_over_memory": record.is_over_memory}
    return asdict(record) | verdict


# --- traced models

_SHOWN_OPERATORS = 40


def graph_summary(graph: Graph) -> dict[str, Any]:
    """Return the figures of a graph as JSON values. FLOPs are those of one sample, forward and backward, as in plans."""
    histogram = Counter(op.target for op in graph.ops)
    classes: dict[str, list[Block]] = {}
    for block in graph.blocks:
        classes.setdefault(block.hash, []).append(block)
    return {
        "model": graph.name,
        "fingerprint": graph.fingerprint,
        "batch_size": graph.batch_size,
        "parameters": graph.num_parameters,
        "parameter_bytes": sum(parameter.spec.num_bytes for parameter in graph.parameters),
        "tied": {p.fqn: list(p.aliases) for p in graph.parameters if p.aliases},
        "flops_per_sample": sum(flops_of_block(graph, block) for block in graph.blocks),
        "inputs": {
            leaf.name: {"shape": list(leaf.spec.shape), "dtype": _dtype(leaf.spec.dtype), "batch_dim": leaf.batch_dim}
            for leaf in graph.inputs
        },
        "blocks": [
            {
                "count": len(blocks),
                "labels": [block.label for block in blocks],
                "hash": hash_,
                "operators": blocks[0].stop - blocks[0].start,
                "parameters": sum(p.spec.numel for p in graph.block_parameters(blocks[0])),
                "flops_per_sample": flops_of_block(graph, blocks[0]),
            }
            for hash_, blocks in classes.items()
        ],
        "operators": dict(histogram.most_common()),
        "prelude_operators": len(graph.prelude),
        "operators_without_rule": sorted(target for target in histogram if not has_rule(target)),
        "notes": list(graph.notes),
    }


def render_graph(graph: Graph) -> str:
    """Return the figures of a graph as text."""
    summary = graph_summary(graph)
    head = [
        f"{graph.name} (fingerprint {graph.fingerprint})",
        f"  parameters  {summary['parameters']:,} ({num_bytes(summary['parameter_bytes'])})",
        f"  FLOPs       {flops(summary['flops_per_sample'])} a sample, forward and backward",
        f"  operators   {len(graph.ops)}, and {len(graph.prelude)} that depend on inputs and constants alone",
    ]
    head += [f"  tied        {name} = {', '.join(aliases)}" for name, aliases in summary["tied"].items()]
    head += [f"  input       {n} {tuple(i['shape'])} {i['dtype']}" for n, i in summary["inputs"].items()]
    rows = []
    for block in summary["blocks"]:
        counts = str(block["count"]), str(block["operators"]), f"{block['parameters']:,}"
        rows.append((ranges(block["labels"]), *counts, flops(block["flops_per_sample"])))
    blocks = plain_table(("blocks", "count", "operators", "parameters", "FLOPs a sample"), rows, left=("blocks",))
    shown = list(summary["operators"].items())
    kinds = [(target, str(number), "yes" if has_rule(target) else "no") for target, number in shown[:_SHOWN_OPERATORS]]
    operators = plain_table(("operator", "count", "rule"), kinds, left=("operator", "rule"))
    if len(shown) > _SHOWN_OPERATORS:
        operators += f"\n  and {len(shown) - _SHOWN_OPERATORS} more kinds: see --json"
    rules = "Every operator has a rule."
    if missing := summary["operators_without_rule"]:
        rules = "Operators without a rule (replicated; add one with autopar.register_rule)"
        rules += "".join(f"\n  {target}" for target in missing)
    parts = ["\n".join(head), f"Blocks\n{blocks}", f"Operators\n{operators}", rules]
    if graph.notes:
        parts.append("Notes\n" + "\n".join(f"  - {note}" for note in graph.notes))
    return "\n\n".join(parts)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")

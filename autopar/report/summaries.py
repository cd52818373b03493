"""Plans and traced models as people and programs read them.

A plan is one flat JSON object (the contract of ``--json``), stands beside another plan, or beside what its run measured. A traced
model is its parameters, FLOPs, repeated blocks and operators, and what has no rule.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.graph.graph import Graph
from autopar.plan.run_log import RunRecord
from autopar.plan.text import choices, diff_plans, time_parts
from autopar.planner.search import flops_of_block
from autopar.rules.table import has_rule
from autopar.util.formatting import flops, num_bytes, percent, plain_table, ranges, seconds, share

if TYPE_CHECKING:
    from autopar.graph.graph import Block
    from autopar.plan.plan import Plan


def plan_summary(plan: Plan) -> dict[str, Any]:
    """What ``search --json``, ``estimate --json`` and ``show --json`` print; seconds and bytes."""
    predicted = plan.predicted
    return {
        "model": asdict(plan.model),
        "cluster": plan.cluster,
        "mesh": {axis: getattr(plan.mesh, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")},
        "groups": [asdict(group) for group in plan.groups],
        "global_batch_size": plan.global_batch_size,
        "micro_batch_size": plan.micro_batch_size,
        "num_micro_batches": plan.num_micro_batches,
        "data_shares": list(plan.data_shares),
        "schedule": plan.schedule,
        "virtual_stages": plan.virtual_stages,
        "zero_stage": plan.zero_stage,
        "recompute": plan.recompute,
        "precision": plan.precision.name,
        "optimizer": plan.optimizer,
        "stages": [
            {
                "index": stage.index,
                "pp_rank": stage.pp_rank,
                "devices": list(plan.devices_of(stage.pp_rank)),
                "start": stage.start,
                "stop": stage.stop,
                "blocks": [block.label for block in plan.blocks[stage.start : stage.stop]],
            }
            for stage in plan.stages
        ],
        "predicted": {
            "step_time_s": predicted.step_time_s,
            "step_time_interval_s": list(predicted.step_time_interval_s),
            "peak_memory_bytes": predicted.peak_memory_bytes,
            "peak_memory_interval_bytes": list(predicted.peak_memory_interval_bytes),
            "memory_limit_bytes": predicted.memory_limit_bytes,
            "memory_limits_bytes": list(predicted.memory_limits_bytes),
            "fits": predicted.fits,
            "mfu": predicted.mfu,
            "tokens_per_s": predicted.tokens_per_s,
            "breakdown": asdict(predicted.breakdown),
            "memory": [asdict(memory) for memory in predicted.memory],
        },
        "search": asdict(plan.search),
        "pins": list(plan.pins),
        "notes": list(plan.notes),
    }


_MAX_CHANGES = 40


def render_comparison(before: Plan, after: Plan, *, names: tuple[str, str]) -> str:
    """A table of what people compare, with the change in percent, and the list of differing choices."""
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
    """The same as JSON values: all changes, and the ratio of the step times."""
    before_s, after_s = before.predicted.step_time_s, after.predicted.step_time_s
    return {
        "step_time_s": [before_s, after_s],
        "peak_memory_bytes": [before.predicted.peak_memory_bytes, after.predicted.peak_memory_bytes],
        "step_time_ratio": after_s / before_s if before_s else None,
        "changes": [asdict(change) for change in diff_plans(before, after)],
    }


def _rows(before: Plan, after: Plan) -> list[tuple[str, str, str, str]]:
    one, two = before.predicted, after.predicted
    rows = [
        ("model", before.model.name, after.model.name, ""),
        ("cluster", before.cluster, after.cluster, ""),
        ("mesh", str(before.mesh), str(after.mesh), ""),
        *((name, left, right, "") for (name, left), (_, right) in zip(choices(before), choices(after), strict=True)),
        ("step time", seconds(one.step_time_s), seconds(two.step_time_s), _change(one.step_time_s, two.step_time_s)),
    ]
    for (name, left_s), (_, right_s) in zip(time_parts(one.breakdown), time_parts(two.breakdown), strict=True):
        if left_s or right_s:
            rows.append((f"  {name}", seconds(left_s), seconds(right_s), _change(left_s, right_s)))
    left, right = one.peak_memory_bytes, two.peak_memory_bytes
    rows += [
        ("peak memory", num_bytes(left), num_bytes(right), _change(left, right)),
        ("MFU", share(one.mfu, 1), share(two.mfu, 1), ""),
        (
            "tokens/s",
            f"{one.tokens_per_s:,.0f}",
            f"{two.tokens_per_s:,.0f}",
            _change(one.tokens_per_s, two.tokens_per_s),
        ),
    ]
    return rows


def _change(before: float, after: float, digits: int = 1) -> str:
    return percent(after / before - 1, digits=digits, sign=True) if before else "-" if not after else "new"


# --- What a run measured beside what its plan predicted, for `autopar validate --from-run`.


def render_run(record: RunRecord) -> str:
    """A table by category, and the verdict."""
    rows = [_row("step", record.predicted_s, record.measured_s)]
    rows += [
        _row(f"  {part.name}", part.predicted_s, part.measured_s)
        for part in record.parts
        if part.predicted_s or part.measured_s
    ]
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
    """The same as JSON values."""
    return {
        **asdict(record),
        "is_outside": record.is_outside,
        "worst": record.worst.name,
        "is_over_memory": record.is_over_memory,
    }


def _row(name: str, predicted_s: float, measured_s: float) -> tuple[str, str, str, str]:
    return name, seconds(predicted_s), seconds(measured_s), _change(predicted_s, measured_s, 0)


_SHOWN_OPERATORS = 40


def graph_summary(graph: Graph) -> dict[str, Any]:
    """The graph's figures as JSON values; FLOPs are those of one sample, forward and backward, as plans count them."""
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
            one.name: {"shape": list(one.spec.shape), "dtype": _dtype(one.spec.dtype), "batch_dim": one.batch_dim}
            for one in graph.inputs
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
    """The same as text."""
    found = graph_summary(graph)
    head = [
        f"{graph.name} (fingerprint {graph.fingerprint})",
        f"  parameters  {found['parameters']:,} ({num_bytes(found['parameter_bytes'])})",
        f"  FLOPs       {flops(found['flops_per_sample'])} a sample, forward and backward",
        f"  operators   {len(graph.ops)}, and {len(graph.prelude)} that depend on inputs and constants alone",
    ]
    head += [f"  tied        {name} = {', '.join(aliases)}" for name, aliases in found["tied"].items()]
    head += [f"  input       {n} {tuple(i['shape'])} {i['dtype']}" for n, i in found["inputs"].items()]
    blocks = plain_table(
        ("blocks", "count", "operators", "parameters", "FLOPs a sample"),
        [
            (
                ranges(block["labels"]),
                str(block["count"]),
                str(block["operators"]),
                f"{block['parameters']:,}",
                flops(block["flops_per_sample"]),
            )
            for block in found["blocks"]
        ],
        left=("blocks",),
    )
    shown = list(found["operators"].items())
    operators = plain_table(
        ("operator", "count", "rule"),
        [(target, str(number), "yes" if has_rule(target) else "no") for target, number in shown[:_SHOWN_OPERATORS]],
        left=("operator", "rule"),
    )
    if len(shown) > _SHOWN_OPERATORS:
        operators += f"\n  and {len(shown) - _SHOWN_OPERATORS} more kinds: see --json"
    missing = found["operators_without_rule"]
    rules = (
        "Operators without a rule (replicated; add one with autopar.register_rule)\n"
        + "\n".join(f"  {t}" for t in missing)
        if missing
        else "Every operator has a rule."
    )
    parts = ["\n".join(head), f"Blocks\n{blocks}", f"Operators\n{operators}", rules]
    if graph.notes:
        parts.append("Notes\n" + "\n".join(f"  - {note}" for note in graph.notes))
    return "\n\n".join(parts)


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")

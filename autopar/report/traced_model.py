"""A traced model as a person reads it: parameters, FLOPs, repeated blocks, operators, and what has no rule."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from autopar.graph.flops import backward_flops, op_flops
from autopar.rules.registry import has_rule
from autopar.util.text_table import plain_table
from autopar.util.units import flops, num_bytes, ranges

if TYPE_CHECKING:
    from autopar.graph.graph import Block, Graph

_SHOWN_OPERATORS = 40


def graph_summary(graph: Graph) -> dict[str, Any]:
    """The graph's figures as JSON values; FLOPs are those of one sample, forward and backward."""
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
        "flops_per_sample": _flops(graph, range(len(graph.ops))) / graph.batch_size,
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
                "flops_per_sample": _flops(graph, range(blocks[0].start, blocks[0].stop)) / graph.batch_size,
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


def _flops(graph: Graph, positions: range) -> float:
    ops = [graph.ops[position] for position in positions]
    return float(sum(op_flops(graph, op) + backward_flops(graph, op) for op in ops))


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")

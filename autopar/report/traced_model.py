"""A traced model as a person reads it: parameters, FLOPs, repeated blocks, operators, and what has no rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from autopar.graph.graph import Graph, Op, TensorSpec
from autopar.rules.table import has_rule
from autopar.util.formatting import flops, num_bytes, plain_table, ranges

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
        "flops_per_sample": _block_flops(graph, range(len(graph.ops))) / graph.batch_size,
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
                "flops_per_sample": _block_flops(graph, range(blocks[0].start, blocks[0].stop)) / graph.batch_size,
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


def _block_flops(graph: Graph, positions: range) -> float:
    ops = [graph.ops[position] for position in positions]
    return float(sum(op_flops(graph, op) + backward_flops(graph, op) for op in ops))


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# --- FLOPs of operators, counted as `torch.utils.flop_counter.FlopCounterMode` counts them.
#
# Products of matrices, convolutions and attention count, two for each multiply-add; a causal mask
# halves nothing; everything else is free. The planner's own count is cost/work.py.


def op_flops(graph: Graph, op: Op) -> int:
    """Forward FLOPs of one operator at the shapes of ``graph``; 0 for what holds no product.

    >>> import torch
    >>> from autopar.tracing.trace import trace
    >>> model = torch.nn.Linear(8, 4)
    >>> graph = trace(model, (torch.empty(2, 8),), loss_fn=lambda output, batch: output.sum())
    >>> [op_flops(graph, op) for op in graph.ops]
    [128, 0]
    """
    return _flops(op, graph)[0]


def backward_flops(graph: Graph, op: Op) -> int:
    """FLOPs of one operator's backward: a product for each operand with a gradient; attention five for two."""
    return _flops(op, graph)[1]


def _flops(op: Op, graph: Graph) -> tuple[int, int]:
    counter = _COUNTERS.get(op.target)
    if counter is None:
        return 0, 0
    operands = tuple(graph.spec(ref) for ref in op.operands)
    forward, first = counter(op, operands)
    if not op.spec.requires_grad:
        return forward, 0
    if op.target in _ATTENTION:
        return forward, forward * 5 // 2
    return forward, forward * sum(spec.requires_grad for spec in operands[first : first + 2])


_Counter = Callable[[Op, tuple[TensorSpec, ...]], tuple[int, int]]
"""FLOPs and the position of the first of the two operands that are multiplied."""


def _linear(op: Op, operands: tuple[TensorSpec, ...]) -> tuple[int, int]:
    return 2 * op.spec.numel * operands[0].shape[-1], 0


def _added(op: Op, operands: tuple[TensorSpec, ...]) -> tuple[int, int]:
    return 2 * op.spec.numel * operands[1].shape[-1], 1


def _convolution(op: Op, operands: tuple[TensorSpec, ...]) -> tuple[int, int]:
    return 2 * op.spec.numel * prod(operands[1].shape[1:]), 0


def _transposed(op: Op, operands: tuple[TensorSpec, ...]) -> tuple[int, int]:
    """Every element of the input meets a window of the weight."""
    return 2 * operands[0].numel * prod(operands[1].shape[1:]), 0


def _attention(op: Op, operands: tuple[TensorSpec, ...]) -> tuple[int, int]:
    query, key, value = (spec.shape for spec in operands[:3])
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1]), 0


_ATTENTION = ("aten.scaled_dot_product_attention.default", "autopar.attention")
_COUNTERS: Mapping[str, _Counter] = {
    **dict.fromkeys(("aten.linear.default", "autopar.linear_t"), _linear),
    **dict.fromkeys(("aten.matmul.default", "aten.mm.default", "aten.bmm.default"), _linear),
    **dict.fromkeys(("aten.addmm.default", "aten.baddbmm.default"), _added),
    **dict.fromkeys((f"aten.conv{n}d.{form}" for n in (1, 2, 3) for form in ("default", "padding")), _convolution),
    "aten.conv_transpose1d.default": _transposed,
    **dict.fromkeys(("aten.conv_transpose2d.input", "aten.conv_transpose3d.input"), _transposed),
    "aten.convolution.default": _convolution,
    **dict.fromkeys(_ATTENTION, _attention),
}

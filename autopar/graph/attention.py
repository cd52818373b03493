"""The attentions of a graph, as one operator or written out: which they are, their heads and their lengths."""

from __future__ import annotations

from autopar.graph.graph import Graph, Op


def is_attention(op: Op) -> bool:
    """Whether an operator is fused attention."""
    return op.target in ("aten.scaled_dot_product_attention.default", "autopar.attention")


def is_scores(op: Op) -> bool:
    """Whether an operator is the softmax over [samples, heads, rows, columns] of attention that is written out."""
    return op.target == "aten.softmax.int" and len(op.spec.shape) == 4 and op.args[1] in (-1, 3)


def has_written_attention(graph: Graph) -> bool:
    """Whether some attention is no operator of its own, so that a ring cannot run it."""
    return any(is_scores(op) for op in graph.ops)


def attention_heads(graph: Graph, operand: int = 0) -> tuple[int, ...]:
    """Head counts of the model's fused attentions: of the queries (``operand`` 0), of keys and values (1)."""
    found = set()
    for op in graph.ops:
        if "scaled_dot_product_attention" in op.target or op.target == "autopar.attention":
            shape = graph.spec(op.operands[operand]).shape
            if len(shape) == 4:
                found.add(shape[1])
    return tuple(sorted(found))


def attention_sequences(graph: Graph) -> tuple[int, ...]:
    """Lengths that are split: of the queries and keys of the model's attentions, of the rows alone where it is written out.

    There keys are whole when scores are made, which may have columns besides (sinks).
    """
    found = {graph.spec(ref).shape[-2] for op in graph.ops if is_attention(op) for ref in op.operands[:2]}
    found |= {op.spec.shape[-2] for op in graph.ops if is_scores(op)}
    return tuple(sorted(found))

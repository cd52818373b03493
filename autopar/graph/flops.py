"""FLOPs of operators, counted as ``torch.utils.flop_counter.FlopCounterMode`` counts them.

Products of matrices, convolutions and attention count, two for each multiply-add; a causal mask
halves nothing; everything else is free. The planner's own count is cost/work.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from autopar.graph.graph import Graph, Op, TensorSpec


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

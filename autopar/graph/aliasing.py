"""Finds out which tensors share memory: views and their bases, by their strides.

A ``view`` of a graph copies if the strides of its operand do not allow a view, as for the expanded keys of grouped-query attention before
they are flattened into heads. Its result then has a new storage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import TypeAlias

import torch

from autopar.graph.graph import Argument, Op, Ref, TensorSpec
from autopar.ops.kernels import aten_targets, resolve

Strides: TypeAlias = tuple[int, ...]

_RESTRIDED = aten_targets(
    "view.default transpose.int permute.default unsqueeze.default expand.default slice.Tensor select.int detach.default"
)
"""Operators whose output can be in the storage of their operand."""

_BY_TOKEN = ("aten.scaled_dot_product_attention.default", "autopar.attention")
"""Fused attention, whose output [batch, heads, tokens, width] is stored token by token, with the heads of a token together."""


def storage_roots(ops: Sequence[Op], spec_of: Callable[[Ref], TensorSpec]) -> dict[Ref, Ref]:
    """Return for every output of ``ops`` the value in whose storage it is: itself unless it is a view.

    Args:
        ops: operators in order. Values that they read and do not produce are taken as contiguous.
        spec_of: returns the specs of these other values.
    """
    number: dict[Ref, int] = {}
    makes = [[number.setdefault(ref, len(number)) for ref in op.refs] for op in ops]
    num_outputs = len(number)
    reads = [[number.setdefault(ref, len(number)) for ref in op.operands] for op in ops]
    values = list(number)
    specs = [spec for op in ops for spec in op.outputs] + [spec_of(ref) for ref in values[num_outputs:]]
    roots = numbered_roots(ops, reads, makes, specs)
    return {values[v]: values[roots[v]] for v in range(num_outputs)}


def numbered_roots(
    ops: Sequence[Op], reads: Sequence[Sequence[int]], makes: Sequence[Sequence[int]], specs: Sequence[TensorSpec]
) -> list[int]:
    """Return the result of :func:`storage_roots` for values that are given by number; a value that ``ops`` do not produce is its own root.

    Args:
        reads: the operands of each operator.
        makes: the outputs of each operator.
        specs: the spec of each value.
    """
    roots = list(range(len(specs)))
    strides: dict[int, Strides] = {}  # of values that are not contiguous
    for op, operands, outputs in zip(ops, reads, makes, strict=True):
        if op.target in _RESTRIDED:
            source, shape = operands[0], specs[operands[0]].shape
            source_strides = strides.get(source) or contiguous(shape)
            view_strides = _strides(op.target, op.args[1:], specs[outputs[0]].shape, shape, source_strides)
            if view_strides is not None:
                roots[outputs[0]], strides[outputs[0]] = roots[source], view_strides
            continue
        dense = _dense_as(op, operands, specs, strides)
        if dense is not None:
            strides[outputs[0]] = dense
    return roots


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major strides of a shape.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def _dense_as(
    op: Op, reads: Sequence[int], specs: Sequence[TensorSpec], strides: Mapping[int, Strides]
) -> Strides | None:
    """Return the strides of the output of an operator that is not a view; None if it is contiguous.

    An elementwise output has the strides of its first operand if that has the same shape and is dense.
    """
    if op.target in _BY_TOKEN and len(op.spec.shape) == 4:
        _, h, s, e = op.spec.shape
        return (s * h * e, e, h * e, 1)
    if op.target not in _KEEPS_ORDER or not reads:
        return None
    operand_strides, shape = strides.get(reads[0]), op.spec.shape
    if operand_strides is None or specs[reads[0]].shape != shape:
        return None
    by_stride = sorted(zip(operand_strides, shape, strict=True), reverse=True)
    sizes = [n for _, n in by_stride]
    return operand_strides if tuple(s for s, _ in by_stride) == contiguous(tuple(sizes)) else None


_KEEPS_ORDER = aten_targets(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default pow.Tensor_Scalar silu.default gelu.default relu.default"
    " tanh.default sigmoid.default exp.default to.dtype masked_fill.Scalar"
) | {"autopar.dropout"}
"""Elementwise operators, whose outputs have the strides of their operand."""


@lru_cache(maxsize=4096)
def _strides(
    target: str,
    args: tuple[Argument, ...],
    view_shape: tuple[int, ...],
    shape: tuple[int, ...],
    strides: Strides,
) -> Strides | None:
    """Return the strides of a view of a tensor of ``shape`` and ``strides``; None if there is no such view, so that the operator copies."""
    source = torch.empty_strided(shape, strides, device="meta")
    if target == "aten.view.default":
        try:
            return tuple(source.view(view_shape).stride())
        except RuntimeError:  # these strides have no such view
            return None
    return tuple(resolve(target)(source, *args).stride())


def dim_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Return the smallest runs of dims of both shapes that have equal products; trailing dims without a counterpart are left out.

    >>> dim_groups((4, 6, 5), (24, 5))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 2))]
    """
    groups = []
    i = j = 0
    while i < len(before) and j < len(after):
        start_i, start_j = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups.append((range(start_i, i), range(start_j, j)))
    return groups

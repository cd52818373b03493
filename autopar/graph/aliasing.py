"""Which tensors share memory: views and their bases, told by strides.

A graph's view copies where strides do not allow a view (the expanded keys of grouped-query
attention before they are flattened into heads): what it makes is a storage of its own then.
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
"""Operators whose output can lie in the storage of their operand."""

_BY_TOKEN = ("aten.scaled_dot_product_attention.default", "autopar.attention")
"""Fused attention lays its output [batch, heads, tokens, width] out token by token, heads inside."""


def storage_roots(ops: Sequence[Op], spec_of: Callable[[Ref], TensorSpec]) -> dict[Ref, Ref]:
    """For every value that ``ops`` make, the value whose storage it lies in: itself unless it is a view.

    Args:
        ops: in order, the makers of all values that they read except leaves, which are contiguous.
        spec_of: of leaves and of what ``ops`` read.
    """
    number: dict[Ref, int] = {}
    makes = [[number.setdefault(Ref(op.name, k), len(number)) for k in range(len(op.outputs))] for op in ops]
    made = len(number)
    reads = [[number.setdefault(ref, len(number)) for ref in op.operands] for op in ops]
    values = list(number)
    specs = [spec for op in ops for spec in op.outputs] + [spec_of(ref) for ref in values[made:]]
    roots = numbered_roots(ops, reads, makes, specs)
    return {values[v]: values[roots[v]] for v in range(made)}


def numbered_roots(
    ops: Sequence[Op], reads: Sequence[Sequence[int]], makes: Sequence[Sequence[int]], specs: Sequence[TensorSpec]
) -> list[int]:
    """As :func:`storage_roots`, of values by number; those that ``ops`` do not make are their own.

    Args:
        reads, makes: of each operator its operands and outputs.
        specs: of the values.
    """
    roots = list(range(len(specs)))
    strides: dict[int, Strides] = {}
    """Of what ``ops`` make and look at, where it is not contiguous."""
    for op, own, made in zip(ops, reads, makes, strict=True):
        if op.target in _RESTRIDED:
            source, shape = own[0], specs[own[0]].shape
            before = strides.get(source) or contiguous(shape)
            found = _strides(op.target, op.args[1:], specs[made[0]].shape, shape, before)
            if found is not None:
                roots[made[0]], strides[made[0]] = roots[source], found
            continue
        dense = _dense_as(op, own, specs, strides)
        if dense is not None:
            strides[made[0]] = dense
    return roots


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides.

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
    """Strides of an elementwise output: those of the operand of the same shape, where that is dense; None: contiguous."""
    if op.target in _BY_TOKEN and len(op.spec.shape) == 4:
        _, h, s, e = op.spec.shape
        return (s * h * e, e, h * e, 1)
    if op.target not in _KEEPS_ORDER or not reads:
        return None
    own, shape = strides.get(reads[0]), op.spec.shape
    if own is None or specs[reads[0]].shape != shape:
        return None
    dense = sorted(zip(own, shape, strict=True), reverse=True)
    sizes = [n for _, n in dense]
    return own if tuple(s for s, _ in dense) == contiguous(tuple(sizes)) else None


_KEEPS_ORDER = aten_targets(
    "add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default pow.Tensor_Scalar silu.default gelu.default relu.default"
    " tanh.default sigmoid.default exp.default to.dtype masked_fill.Scalar"
) | {"autopar.dropout"}
"""Elementwise operators, whose outputs are laid out as their operand."""


@lru_cache(maxsize=4096)
def _strides(
    target: str,
    args: tuple[Argument, ...],
    made: tuple[int, ...],
    shape: tuple[int, ...],
    strides: Strides,
) -> Strides | None:
    """Strides of a view of shape ``made``; None where these strides have no such view, so that it copies."""
    source = torch.empty_strided(shape, strides, device="meta")
    if target == "aten.view.default":
        try:
            return tuple(source.view(made).stride())
        except RuntimeError:  # torch's way to say so
            return None
    return tuple(resolve(target)(source, *args).stride())


def dim_groups(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[range, range]]:
    """Smallest runs of dims of both shapes with equal products; trailing ones are left out.

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

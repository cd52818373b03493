"""Which tensors share memory: views and their bases, told by strides.

A graph's view copies where strides do not allow a view (the expanded keys of grouped-query
attention before they are flattened into heads): what it makes is a storage of its own then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from autopar.graph.ir import Argument, Op, Ref, TensorSpec

_RESTRIDED = frozenset(
    {
        "aten.view.default",
        "aten.transpose.int",
        "aten.permute.default",
        "aten.unsqueeze.default",
        "aten.expand.default",
        "aten.slice.Tensor",
        "aten.select.int",
        "aten.detach.default",
    }
)
"""Operators whose output can lie in the storage of their operand."""

_BY_TOKEN = ("aten.scaled_dot_product_attention.default", "autopar.attention")
"""Fused attention lays its output [batch, heads, tokens, width] out token by token, heads inside."""


@dataclass(frozen=True, slots=True)
class _Place:
    root: Ref
    strides: tuple[int, ...]


def storage_roots(ops: Iterable[Op], specs: Mapping[Ref, TensorSpec]) -> dict[Ref, Ref]:
    """For every value that ``ops`` make, the value whose storage it lies in: itself unless it is a view.

    Args:
        ops: in order, the makers of all values that they read except leaves, which are contiguous.
        specs: of leaves and of what ``ops`` read.
    """
    places: dict[Ref, _Place] = {}
    for op in ops:
        if op.target in _RESTRIDED:
            source = op.operands[0]
            place = places.get(source) or _Place(source, contiguous(specs[source].shape))
            places[Ref(op.name)] = _viewed(op, specs[source].shape, place)
            continue
        strides = _dense_as(op, specs, places)
        for i, spec in enumerate(op.outputs):
            ref = Ref(op.name, i)
            places[ref] = _Place(ref, strides if i == 0 and strides else contiguous(spec.shape))
    return {ref: place.root for ref, place in places.items()}


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides.

    >>> contiguous((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * max(shape[d + 1], 1)
    return tuple(strides)


def _dense_as(op: Op, specs: Mapping[Ref, TensorSpec], places: Mapping[Ref, _Place]) -> tuple[int, ...] | None:
    """Strides of an elementwise output: those of the operand of the same shape, where that is dense."""
    shape = op.spec.shape
    if op.target in _BY_TOKEN and len(shape) == 4:
        _, h, s, e = shape
        return (s * h * e, e, h * e, 1)
    if not op.operands or op.target.startswith("aten.clone"):
        return None
    first = op.operands[0]
    place = places.get(first)
    if place is None or specs[first].shape != shape or op.target not in _KEEPS_ORDER:
        return None
    dense = sorted(zip(place.strides, shape, strict=True), reverse=True)
    sizes = [n for _, n in dense]
    return place.strides if tuple(s for s, _ in dense) == contiguous(tuple(sizes)) else None


_KEEPS_ORDER = frozenset(
    f"aten.{name}"
    for name in [
        "add.Tensor",
        "sub.Tensor",
        "mul.Tensor",
        "div.Tensor",
        "neg.default",
        "pow.Tensor_Scalar",
        "silu.default",
        "gelu.default",
        "relu.default",
        "tanh.default",
        "sigmoid.default",
        "exp.default",
        "to.dtype",
        "masked_fill.Scalar",
    ]
) | {"autopar.dropout"}
"""Elementwise operators, whose outputs are laid out as their operand."""


def _viewed(op: Op, shape: tuple[int, ...], place: _Place) -> _Place:
    strides = _strides(op.target, op.args[1:], op.spec.shape, shape, place.strides)
    if strides is None:
        return _Place(Ref(op.name), contiguous(op.spec.shape))
    return _Place(place.root, strides)


@lru_cache(maxsize=4096)
def _strides(
    target: str,
    args: tuple[Argument, ...],
    made: tuple[int, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
) -> tuple[int, ...] | None:
    """Strides of a view of shape ``made``; None where these strides have no such view, so that it copies."""
    source = torch.empty_strided(shape, strides, device="meta")
    if target == "aten.view.default":
        try:
            return tuple(source.view(made).stride())
        except RuntimeError:  # torch's way to say so
            return None
    return tuple(_APPLY[target](source, *args).stride())


_APPLY = {
    "aten.transpose.int": torch.ops.aten.transpose.int,
    "aten.permute.default": torch.ops.aten.permute.default,
    "aten.unsqueeze.default": torch.ops.aten.unsqueeze.default,
    "aten.expand.default": torch.ops.aten.expand.default,
    "aten.slice.Tensor": torch.ops.aten.slice.Tensor,
    "aten.select.int": torch.ops.aten.select.int,
    "aten.detach.default": torch.ops.aten.detach.default,
}

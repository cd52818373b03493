"""Pending sums in the type check: what the checker does not know to be linear, and what it does under another name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import spmd_types
import torch
from spmd_types import _checker

from autopar.lower.emit import TARGETS
from autopar.ops import collectives, seeded
from autopar.ops import sequence as sequence_ops
from autopar.ops import sharded as sharded_ops

CHANGES = frozenset(
    (
        collectives.all_gather,
        collectives.all_reduce,
        collectives.all_to_all,
        collectives.invariant_to_replicate,
        collectives.keep_on_first,
        collectives.reduce_scatter,
        collectives.shard,
    )
)
"""Changes of type on one axis: linear, so that a pending sum on another one may pass; the checker does not know it."""

_LINEAR = frozenset(
    (
        seeded.dropout,  # all summands lose the same elements
        sequence_ops.attention_gathered,  # in the values
        sequence_ops.attention_ring,
        sharded_ops.change_over_data,
        sharded_ops.total,
    )
)
"""Operators of our own, besides, that are linear in what may be a pending sum on another axis."""

_CHOOSE = frozenset((torch.gather, torch.index_select, torch.repeat_interleave))
"""Linear in what is chosen from; the checker would have the indices be summands too."""


def passes_by(target: Any, call: Callable[..., Any]) -> bool:
    """Whether the checker cannot follow a pending sum through an operator that the program states to be linear in it."""
    return not _is_known(call) or target in _LINEAR or target in CHANGES


def _is_known(call: Callable[..., Any]) -> bool:
    """Whether the checker can tell that a pending sum may pass."""
    return call in _checker._OP_REGISTRY or call.__module__ in (
        "autopar.ops.collectives",
        "autopar.ops.plain",
        "autopar.ops.seeded",
        "autopar.ops.sharded",
        "autopar.ops.sequence",
        __name__,
    )


def linear_call(target: Any) -> Callable[..., Any]:
    """What the checker knows as linear in place of ``target``: it knows functions of torch, not overloads."""
    name = target_name(target)
    if name in ("aten.linear.default", "autopar.linear_t"):
        return _product_t if name == "autopar.linear_t" else _product
    if target is sharded_ops.embedding_vocabulary:
        return _looked_up
    if isinstance(target, torch._ops.OpOverload):
        public = getattr(torch, target._schema.name.partition("::")[2], None)
        if public in _checker._OP_REGISTRY and public not in _CHOOSE:
            return cast("Callable[..., Any]", public)
    return cast("Callable[..., Any]", target)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return _product_t(x, torch.t(weight), bias)


def _product_t(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """A product, and the addition of a bias of which each rank has a summand."""
    y = torch.matmul(x, weight)
    if bias is None:
        return y
    for axis, kind in spmd_types.get_local_type(bias).items():
        if kind is spmd_types.P and spmd_types.get_axis_local_type(y, axis) is spmd_types.V:
            spmd_types.mutate_type(y, axis, src=spmd_types.V, dst=spmd_types.P)
    return torch.add(y, bias)


def _looked_up(weight: torch.Tensor, ids: torch.Tensor, axis: str, padding_idx: int = -1) -> torch.Tensor:
    """A look-up as the product of who is chosen and the table, of which each rank of another axis may have a summand."""
    chosen = ids.unsqueeze(-1).expand(*ids.shape, weight.shape[0]).to(weight.dtype)
    return sharded_ops._pending(torch.matmul(chosen, weight), collectives.group(axis))


def target_name(target: Any) -> str:
    """What graphs call the function of a node."""
    if target in TARGETS:
        return TARGETS[target]
    if isinstance(target, torch._ops.OpOverload):
        return str(target)  # as graphs name it
    return f"autopar.{target.__name__}" if callable(target) else str(target)

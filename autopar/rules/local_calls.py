"""What one rank has and calls: its part of a tensor, changes of a tensor's type, literals rewritten for local shapes.

Source of the table of changes: ``spmd-types`` and Megatron's f and g; see docs/adr/0001-types.md. A tensor without gradient moves
nothing backward, and I and R are the same for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import cast

import torch

from autopar.errors import InternalError, RuleError
from autopar.graph.graph import Argument, Graph, Layout, Op, Ref, TensorSpec
from autopar.ops.kernels import aten_targets
from autopar.plan.mesh import DATA_AXES, EXPERT_AXIS, I, R, S, Type
from autopar.rules.moving_patterns import argument, dims_of
from autopar.rules.strategy import AXIS_AT, COUNT_AT, GATHERED, RING, Local, Strategy

Localizer = Callable[[Op, Strategy, Local], Op]
"""Writes the call; ``outputs`` are set by the caller."""


def localize(op: Op, strategy: Strategy, local: Local) -> Op:
    """The call that one rank makes under ``strategy``.

    Args:
        op: the call before the axis is applied; its operands are kept.
        strategy: one of those that a table gave for it.
        local: local specs of operands and outputs.

    Returns:
        The operator with the strategy's target, literals for local shapes, and ``local.outputs``. ``layouts`` is left to the caller.
    """
    write = _BY_KERNEL.get(strategy.target) if strategy.target else _BY_LITERAL.get(op.target)
    if write is not None:
        op = write(op, strategy, local)
    elif strategy.target:
        op = replace(op, target=strategy.target)
    return replace(op, outputs=local.outputs)


def _shape_at(position: int, name: str) -> Localizer:
    def write(op: Op, strategy: Strategy, local: Local) -> Op:
        shape = local.outputs[0].shape
        if position < len(op.args):
            return replace(op, args=(*op.args[:position], shape, *op.args[position + 1 :]))
        return replace(op, kwargs=tuple((key, shape if key == name else value) for key, value in op.kwargs))

    return write


def _slice(op: Op, strategy: Strategy, local: Local) -> Op:
    """A slice along a split dim is the whole of it (no other is allowed): its end moves."""
    dim = cast("int", argument(op, 1, "dim", 0)) % len(local.operands[0].shape)
    before, after = op.spec.shape[dim], local.outputs[0].shape[dim]
    if before == after:
        return op
    return replace(op, args=(op.args[0], dim, 0, after, 1), kwargs=())


def _as_view(op: Op, strategy: Strategy, local: Local) -> Op:
    """A dim that is one only here must stay, a size that is given counts here: say the shape instead."""
    return replace(op, target="aten.view.default", args=(op.args[0], local.outputs[0].shape), kwargs=())


def _embedding_vocabulary(op: Op, strategy: Strategy, local: Local) -> Op:
    padding = argument(op, 2, "padding_idx", -1)
    return replace(op, target=strategy.target, args=(op.args[0], op.args[1], local.axis, padding), kwargs=())


def _bag_vocabulary(op: Op, strategy: Strategy, local: Local) -> Op:
    weight, ids, weights, mode, padding = op.args[:5]
    return replace(op, target=strategy.target, args=(weight, ids, local.axis, weights, mode, padding), kwargs=())


def _cross_entropy_vocabulary(op: Op, strategy: Strategy, local: Local) -> Op:
    ignore, smoothing = argument(op, 2, "ignore_index", -100), argument(op, 3, "label_smoothing", 0.0)
    args = (op.args[0], op.args[1], local.axis, ignore, smoothing, *op.args[4:])
    return replace(op, target=strategy.target, args=args, kwargs=())


def _split_experts(op: Op, strategy: Strategy, local: Local) -> Op:
    """Where the own experts stand among all; those that an earlier axis has split stay as they are."""
    if op.target == "autopar.experts_dispatch":  # over data ranks: tokens travel over both axes, or over these alone
        joined = strategy.target == op.target
        args = (
            (*op.args[:AXIS_AT], EXPERT_AXIS, op.args[COUNT_AT]) if joined else (*op.args, local.axis, int(local.size))
        )
        return replace(op, target=strategy.target, args=args, kwargs=())
    down = local.operands[-1]
    num_experts = down.shape[0] * local.size
    args = (*op.args[:AXIS_AT], local.axis, int(num_experts))
    return replace(op, target=strategy.target, args=args, kwargs=())


def _partial_mean(op: Op, strategy: Strategy, local: Local) -> Op:
    """The count is that of the whole tensor; a partial mean that is split again keeps its count."""
    shape = local.operands[0].shape
    dims = tuple(range(len(shape))) if op.target == "aten.mean.default" else dims_of(op, 1, "dim", len(shape))
    keepdim = False if op.target == "aten.mean.default" else argument(op, 2, "keepdim", False)
    count = prod(shape[dim] for dim in dims) * local.size * local.count_scale
    if count.denominator != 1:
        raise InternalError(f"A mean is over {count} elements, which is no whole number", where=op.name)
    dtype = argument(op, 1 if op.target == "aten.mean.default" else 3, "dtype")
    kwargs: tuple[tuple[str, Argument], ...] = (("dtype", dtype),) if isinstance(dtype, torch.dtype) else ()
    return replace(op, target=strategy.target, args=(op.args[0], dims, keepdim, int(count)), kwargs=kwargs)


def _attention(op: Op, strategy: Strategy, local: Local) -> Op:
    """The axis over which the sequence is split, and of a ring its degree."""
    ranks: tuple[tuple[str, Argument], ...] = (("ranks", int(local.size)),) if strategy.target == RING else ()
    return replace(op, target=strategy.target, kwargs=(*op.kwargs, ("axis", local.axis), *ranks))


def _batch_norm(op: Op, strategy: Strategy, local: Local) -> Op:
    """Statistics are those of all ranks of the axis; samples are spread over both data axes."""
    axes = DATA_AXES if local.axis == "batch" else (local.axis,)
    return replace(op, args=(*op.args, *axes))


_BY_LITERAL: dict[str, Localizer] = {
    **dict.fromkeys(
        aten_targets(
            "view.default _unsafe_view.default reshape.default expand.default new_zeros.default new_ones.default"
            " new_full.default new_empty.default randint.default"
        ),
        _shape_at(1, "size"),
    ),
    **dict.fromkeys(
        aten_targets("full.default zeros.default ones.default empty.memory_format rand.default randn.default"),
        _shape_at(0, "size"),
    ),
    **dict.fromkeys(aten_targets("randint.low normal.float_float"), _shape_at(2, "size")),
    **dict.fromkeys(
        aten_targets("squeeze.default squeeze.dim squeeze.dims flatten.using_ints unflatten.int"), _as_view
    ),
    "autopar.scatter_sum": _shape_at(3, "shape"),
    "aten.slice.Tensor": _slice,
}
"""By the operator's own target."""
_BY_KERNEL: dict[str, Localizer] = {
    "autopar.embedding_vocabulary": _embedding_vocabulary,
    "autopar.embedding_bag_vocabulary": _bag_vocabulary,
    "autopar.cross_entropy_vocabulary": _cross_entropy_vocabulary,
    "autopar.partial_mean": _partial_mean,
    GATHERED: _attention,
    RING: _attention,
    "autopar.batch_norm": _batch_norm,
    "autopar.batch_norm_running": _batch_norm,
    "autopar.total": _batch_norm,
    "autopar.experts_split": _split_experts,
    "autopar.experts_dispatch": _split_experts,
    "autopar.experts_dispatch_split": _split_experts,
}
"""By the target of a strategy."""


BATCH = "batch"
"""The axis of samples: micro-batches and data ranks together."""

_OTHER = "Choose another degree, or another strategy here"


def layout_before(graph: Graph, ref: Ref) -> Layout:
    """Types on the axes applied before, where the value is used: R of parameters whose gradient is summed later."""
    producer = graph.producer(ref)
    if producer is not None:
        return producer.layouts[ref.index] if producer.layouts else ()
    if graph.is_parameter(ref):
        parameter = graph.parameter(ref.name)
        pending = (*parameter.gradient_sum_axes, BATCH)
        return tuple((a, R if a in pending and kind == I else kind) for a, kind in parameter.layout)
    by_samples = any(axis == BATCH for p in graph.parameters[:1] for axis, _ in p.layout)
    leaf = next((leaf for leaf in graph.inputs if leaf.name == ref.name), None)
    return ((BATCH, S(leaf.batch_dim)),) if by_samples and leaf and leaf.batch_dim is not None else ()


def part_of(spec: TensorSpec, kind: Type, size: Fraction, place: str, *, axis: str) -> TensorSpec:
    """What one rank of an axis has of a tensor of a type.

    Raises:
        RuleError: the dim does not exist or does not divide.
    """
    if not kind.is_split:
        return spec
    if kind.dim >= len(spec.shape):
        raise RuleError(
            f"A tensor of shape {spec.shape} has no dim {kind.dim} to split ({kind})", where=place, fix=_OTHER
        )
    part, rest = divmod(spec.shape[kind.dim] * size.denominator, size.numerator)
    if rest:
        raise RuleError(
            f"A tensor of shape {spec.shape} cannot be split as {kind}: the dim does not divide by {axis}={size}",
            where=place,
            fix=_OTHER,
        )
    shape = (*spec.shape[: kind.dim], part, *spec.shape[kind.dim + 1 :])
    return TensorSpec(shape=shape, dtype=spec.dtype, requires_grad=spec.requires_grad)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """How one type becomes another on one axis.

    Attributes:
        target: the operator in emitted code, ``autopar.NAME``; empty when nothing is emitted.
        forward: the collective it runs forward, or None.
        backward: likewise for the gradient.
    """

    target: str
    forward: str | None
    backward: str | None


UNCHANGED = Conversion(target="", forward=None, backward=None)
"""The conversion between equal types, and between I and R without a gradient."""

_TABLE: dict[tuple[str, str], Conversion] = {
    ("I", "R"): Conversion(target="autopar.invariant_to_replicate", forward=None, backward="all_reduce"),
    ("I", "S"): Conversion(target="autopar.shard", forward=None, backward="all_gather"),
    ("I", "P"): Conversion(target="autopar.keep_on_first", forward=None, backward=None),
    ("R", "S"): Conversion(target="autopar.shard", forward=None, backward=None),
    ("R", "P"): Conversion(target="autopar.keep_on_first", forward=None, backward=None),
    ("S", "R"): Conversion(target="autopar.all_gather", forward="all_gather", backward="reduce_scatter"),
    ("S", "I"): Conversion(target="autopar.all_gather", forward="all_gather", backward=None),
    ("S", "S"): Conversion(target="autopar.all_to_all", forward="all_to_all", backward="all_to_all"),
    ("P", "I"): Conversion(target="autopar.all_reduce", forward="all_reduce", backward=None),
    ("P", "R"): Conversion(target="autopar.all_reduce", forward="all_reduce", backward="all_reduce"),
    ("P", "S"): Conversion(target="autopar.reduce_scatter", forward="reduce_scatter", backward="all_gather"),
}


def conversion(source: Type, target: Type, *, requires_grad: bool) -> Conversion | None:
    """The change from ``source`` to ``target``; None when there is none (R to I with a gradient, S to P).

    Equal types give a conversion that does nothing.

    >>> from autopar.plan.mesh import I, R, S
    >>> conversion(S(1), R, requires_grad=True).backward
    'reduce_scatter'
    >>> conversion(R, I, requires_grad=True) is None
    True
    """
    if source == target or (not requires_grad and {source.kind, target.kind} <= {"I", "R"}):
        return UNCHANGED
    found = _TABLE.get((source.kind, target.kind))
    return found if found is None or requires_grad else replace(found, backward=None)


def emitted_arguments(axis: str, source: Type, target: Type) -> tuple[str | int, ...]:
    """Arguments after the tensor in emitted code: the axis, then dims, then the type at the end where it matters.

    shard(x, axis, dim, from), all_gather(x, axis, dim, to), reduce_scatter(x, axis, dim),
    all_to_all(x, axis, split_dim_after, gathered_dim), all_reduce(x, axis, to),
    invariant_to_replicate(x, axis), keep_on_first(x, axis, from).
    """
    match source.kind, target.kind:
        case (("I" | "R"), "S"):
            return (axis, target.dim, source.kind)
        case (("I" | "R"), "P"):
            return (axis, source.kind)
        case "S", "S":
            return (axis, target.dim, source.dim)
        case "S", _:
            return (axis, source.dim, target.kind)
        case "P", "S":
            return (axis, target.dim)
        case "P", _:
            return (axis, target.kind)
        case _:
            return (axis,)

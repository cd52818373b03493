"""What one rank calls: its part of a tensor, literals rewritten for local shapes, and its share of experts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import cast

import torch

from autopar.errors import InternalError, RuleError
from autopar.graph.graph import Argument, Graph, Layout, Op, Parameter, Ref, TensorSpec, digest
from autopar.graph.rewrites import signature
from autopar.ops.kernels import aten_targets
from autopar.plan.mesh import DATA_AXES, EXPERT_AXIS, I, R, S, Type
from autopar.rules.moving_patterns import argument, dims_of
from autopar.rules.strategy import AXIS_AT, COUNT_AT, GATHERED, RING, Local, Strategy

Localizer = Callable[[Op, Strategy, Local], Op]
"""Writes the arguments of one rank's call; :func:`localize` sets the target of the strategy and ``outputs``."""


def localize(op: Op, strategy: Strategy, local: Local, layouts: tuple[Layout, ...] = ()) -> Op:
    """Return the call that one rank makes under ``strategy``.

    Args:
        op: the call before the axis is applied; its operands are kept.
        strategy: one of the strategies that a table gave for it.
        local: the local specs of operands and outputs.
        layouts: the types of its outputs on the axes up to this one, if they are recorded.

    Returns:
        The operator with the strategy's target, literals for local shapes, ``local.outputs`` and ``layouts``.
    """
    write = _BY_KERNEL.get(strategy.target) if strategy.target else _BY_LITERAL.get(op.target)
    call = op if write is None else write(op, strategy, local)
    return replace(call, target=strategy.target or call.target, outputs=local.outputs, layouts=layouts)


def _shape_at(position: int, name: str) -> Localizer:
    """Return a localizer for calls that give the shape of the output as a literal, by position or by name."""
    return lambda op, strategy, local: op.with_argument(position, name, local.outputs[0].shape)


def _slice(op: Op, strategy: Strategy, local: Local) -> Op:
    """Move the end of a slice along a split dim. Such a slice takes the complete dim, as no other one may be split."""
    dim = cast("int", argument(op, 1, "dim", 0)) % len(local.operands[0].shape)
    before, after = op.spec.shape[dim], local.outputs[0].shape[dim]
    if before == after:
        return op
    return replace(op, args=(op.args[0], dim, 0, after, 1), kwargs=())


def _embedding_vocabulary(op: Op, strategy: Strategy, local: Local) -> Op:
    """Pass the axis over which the rows of the table are split."""
    padding = argument(op, 2, "padding_idx", -1)
    return replace(op, args=(op.args[0], op.args[1], local.axis, padding), kwargs=())


def _vocabulary(op: Op, strategy: Strategy, local: Local) -> Op:
    """Pass the axis over which the rows of the table, or the classes, are split, behind the first two operands."""
    return replace(op, args=(*op.args[:2], local.axis, *op.args[2:5]), kwargs=())


def _split_experts(op: Op, strategy: Strategy, local: Local) -> Op:
    """Pass the axis over which experts are split, and their number over all ranks.

    Experts that an earlier axis split over data ranks (``experts_dispatch``) are split again: their tokens travel over both axes at once
    (:data:`autopar.plan.mesh.EXPERT_AXIS`), or over the earlier one only.
    """
    tail: tuple[Argument, ...]
    if op.target != "autopar.experts_dispatch":
        tail = (local.axis, int(local.operands[-1].shape[0] * local.size))
    elif strategy.target == op.target:  # over both axes
        tail = (EXPERT_AXIS, op.args[COUNT_AT])
    else:
        tail = (*op.args[AXIS_AT:], local.axis, int(local.size))
    return replace(op, args=(*op.args[:AXIS_AT], *tail), kwargs=())


def _partial_mean(op: Op, strategy: Strategy, local: Local) -> Op:
    """Pass the number of elements of the full tensor. A partial mean that is split again keeps its count."""
    shape = local.operands[0].shape
    dims, keepdim = dims_of(op, 1, "dim", len(shape)), argument(op, 2, "keepdim", False)
    count = prod(shape[dim] for dim in dims) * local.size * local.count_scale
    if count.denominator != 1:
        raise InternalError(f"A mean is over {count} elements, which is no whole number", where=op.name)
    dtype = argument(op, 3, "dtype")
    kwargs: tuple[tuple[str, Argument], ...] = (("dtype", dtype),) if isinstance(dtype, torch.dtype) else ()
    return replace(op, args=(op.args[0], dims, keepdim, int(count)), kwargs=kwargs)


def _attention(op: Op, strategy: Strategy, local: Local) -> Op:
    """Pass the axis over which the sequence is split, and the number of its ranks to a ring."""
    ranks: tuple[tuple[str, Argument], ...] = (("ranks", int(local.size)),) if strategy.target == RING else ()
    return replace(op, kwargs=(*op.kwargs, ("axis", local.axis), *ranks))


def _batch_norm(op: Op, strategy: Strategy, local: Local) -> Op:
    """Pass the axes whose ranks share the statistics. On axis ``batch`` these are both data axes."""
    axes = DATA_AXES if local.axis == BATCH else (local.axis,)
    return replace(op, args=(*op.args, *axes))


def _convolution(op: Op, strategy: Strategy, local: Local) -> Op:
    """Pass the number of groups that the rank has."""
    images, weight = local.outputs[0] if "transpose" in op.target else local.operands[0], local.operands[1]
    return op.with_argument(6, "groups", images.shape[len(images.shape) - len(weight.shape) + 1] // weight.shape[1])


CONVOLUTIONS = aten_targets(
    "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding"
    " conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
)
"""The convolutions and their transposes."""

_BY_LITERAL: dict[str, Localizer] = {
    **dict.fromkeys(
        aten_targets(
            "view.default expand.default new_zeros.default new_ones.default"
            " new_full.default new_empty.default randint.default"
        ),
        _shape_at(1, "size"),
    ),
    **dict.fromkeys(
        aten_targets("full.default zeros.default ones.default empty.memory_format rand.default randn.default"),
        _shape_at(0, "size"),
    ),
    **dict.fromkeys(aten_targets("randint.low normal.float_float"), _shape_at(2, "size")),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    "autopar.scatter_sum": _shape_at(3, "shape"),
    "aten.slice.Tensor": _slice,
}
"""Localizers by the target of the original operator, for strategies without a target of their own."""
_BY_KERNEL: dict[str, Localizer] = {
    "autopar.embedding_vocabulary": _embedding_vocabulary,
    "autopar.embedding_bag_vocabulary": _vocabulary,
    "autopar.cross_entropy_vocabulary": _vocabulary,
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
"""Localizers by the target of the strategy."""


BATCH = "batch"
"""The axis of samples: micro-batches and data ranks together."""

_CHOOSE_ANOTHER = "Choose another degree, or another strategy here"


def use_layout(parameter: Parameter) -> Layout:
    """Return the types of a parameter where it is read: R over samples and on axes on which its gradient is left as a pending sum."""
    pending = (*parameter.gradient_sum_axes, BATCH)
    return tuple((axis, R if axis in pending and kind == I else kind) for axis, kind in parameter.layout)


def layout_of(graph: Graph, ref: Ref) -> Layout:
    """Return the types of a tensor on the axes that are applied already, as operators read it; it is R on axes that are left out."""
    producer = graph.producer(ref)
    if producer is not None:
        return producer.layouts[ref.index] if producer.layouts else ()
    if graph.is_parameter(ref):
        return use_layout(graph.parameter(ref.name))
    by_samples = any(axis == BATCH for p in graph.parameters[:1] for axis, _ in p.layout)
    leaf = next((leaf for leaf in graph.inputs if leaf.name == ref.name), None)
    return ((BATCH, S(leaf.batch_dim)),) if by_samples and leaf and leaf.batch_dim is not None else ()


def part_of(spec: TensorSpec, kind: Type, size: Fraction, place: str, *, axis: str) -> TensorSpec:
    """Return the spec of the part of a tensor that one rank of an axis has.

    Args:
        spec: the spec of the full tensor.
        kind: its type.
        size: the number of ranks, or of parts of the batch.
        place: what the tensor belongs to, for messages.
        axis: the name of the axis, for messages.

    Raises:
        RuleError: the dim does not exist, or ``size`` does not divide it.
    """
    if not kind.is_split:
        return spec
    if kind.dim >= len(spec.shape):
        raise RuleError(
            f"A tensor of shape {spec.shape} has no dim {kind.dim} to split ({kind})", where=place, fix=_CHOOSE_ANOTHER
        )
    part, remainder = divmod(spec.shape[kind.dim] * size.denominator, size.numerator)
    if remainder:
        raise RuleError(
            f"A tensor of shape {spec.shape} cannot be split as {kind}: the dim does not divide by {axis}={size}",
            where=place,
            fix=_CHOOSE_ANOTHER,
        )
    shape = (*spec.shape[: kind.dim], part, *spec.shape[kind.dim + 1 :])
    return TensorSpec(shape=shape, dtype=spec.dtype, requires_grad=spec.requires_grad)


# --- experts of mixtures over data ranks ----------------------------------------------------------
# The axis ``ep_data`` is a factor of the data ranks and is applied after ``batch``. Every tensor with samples is split by then, so that the
# mixture is the only operator that changes, and the type of its weights, S(0), is the only new one. The gradients of these weights are
# complete for the tokens of the ranks of ``ep_data``. They are pending sums only over the data ranks that hold the same experts (``ep_outer``).

SPREAD = "ep_data"
"""The axis of the data ranks that experts are spread over."""
EXPERTS = "autopar.experts"
"""The operator of a mixture of experts."""
DISPATCH = "dispatch"
"""The name of the strategy of a mixture whose experts are spread."""
SAMPLES = "samples"
"""The name of the strategy of every other operator, which works on the samples of its rank."""


def expert_counts(graph: Graph) -> tuple[int, ...]:
    """Return the number of experts of each mixture that can be spread."""
    return tuple(graph.spec(op.operands[-1]).shape[0] for op in graph.ops if can_spread(graph, op))


def can_spread(graph: Graph, op: Op) -> bool:
    """Return whether ``op`` is a mixture of experts whose weights are parameters that nothing else reads."""
    weights = op.operands[3:]
    return op.target == EXPERTS and all(graph.is_parameter(ref) and len(graph.users(ref)) == 1 for ref in weights)


def spread(graph: Graph, size: int, only: Collection[str] | None = None) -> Graph:
    """Return the graph of one data rank with the experts of mixtures split over ``size`` data ranks.

    Args:
        graph: the graph of one micro-batch on one data rank (axis ``batch`` applied, and no other).
        size: the number of data ranks.
        only: the names of the mixtures that are spread; None spreads all that can be.

    Raises:
        RuleError: a mixture of ``only`` cannot be spread, or ``size`` does not divide the number of its experts.
    """
    mixtures = [op for op in graph.ops if (can_spread(graph, op) if only is None else op.name in only)]
    split_names: set[str] = set()
    for op in mixtures:
        num_experts = graph.spec(op.operands[-1]).shape[0]
        if num_experts % size or not can_spread(graph, op):
            raise RuleError(
                f"{num_experts} experts cannot be spread over {size} data ranks",
                where=f"{op.name}, {op.module or 'no module'}",
                fix="Pin an ep that divides the experts (which share no weights), or ep=1",
            )
        split_names |= {ref.name for ref in op.operands[3:]}
    names = {op.name for op in mixtures}

    def local(op: Op) -> Op:
        if op.name not in names:
            return op
        args = (*op.args, SPREAD, graph.spec(op.operands[-1]).shape[0])
        return replace(op, target="autopar.experts_dispatch", args=args)

    def part(parameter: Parameter) -> Parameter:
        if parameter.name not in split_names:
            return parameter
        spec = part_of(parameter.spec, S(0), Fraction(size), parameter.fqn, axis=SPREAD)
        return replace(parameter, spec=spec, layout=(*parameter.layout, (SPREAD, S(0))))

    local_graph = replace(graph, parameters=tuple(map(part, graph.parameters)), ops=tuple(map(local, graph.ops)))
    blocks = tuple(
        replace(b, hash=digest(f"{b.hash}|{SPREAD}|{signature(local_graph.block_ops(b), local_graph.spec)}"))
        if any(op.name in names for op in graph.block_ops(b))
        else b
        for b in graph.blocks
    )
    return replace(local_graph, blocks=blocks)

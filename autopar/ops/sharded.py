"""Operators that run on the part of one rank and communicate over an axis, or know which part it is; emitted code calls them.

An axis is the name of a mesh axis, as in :mod:`autopar.ops.collectives`. The types of operands and results are those of the strategies
in ``autopar.rules.other_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, cast

import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar.ops import collectives
from autopar.ops.collectives import group
from autopar.ops.plain import fixed_batch_norm, wide
from autopar.plan.mesh import DATA_AXES, Type, conversion


def embedding_vocabulary(weight: Tensor, ids: Tensor, axis: str, padding_idx: int = -1) -> Tensor:
    """Look up ids in a table whose rows are split over ``axis``; rows of other ranks give zeros.

    Args:
        weight: the rows of this rank, [rows, width], S(0).
        ids: row numbers of the complete table, any shape, equal on all ranks.
        axis: the mesh axis.
        padding_idx: the row of the complete table that gets no gradient; -1: none.

    Returns:
        [*ids.shape, width], P: a pending sum.
    """
    pg = group(axis)
    rows = weight.shape[0]
    start = pg.rank() * rows
    is_local = (ids >= start) & (ids < start + rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    local_rows = F.embedding(torch.where(is_local, ids - start, 0), weight, padding)
    return _pending(torch.where(is_local.unsqueeze(-1), local_rows, 0.0), pg)


def embedding_bag(
    weight: Tensor,
    ids: Tensor,
    weights: Tensor | None = None,
    mode: str = "sum",
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Compute the sum, mean or maximum of the rows of a table for each bag, in one kernel.

    Args:
        weight: [rows, width].
        ids: row numbers, [bags, length].
        weights: factors of the rows under ``sum``, [bags, length].
        mode: ``sum``, ``mean``, ``max``.
        padding_idx: the row number of ids that are not counted; -1: none.
        scale_grad_by_freq: whether the gradient of a row is divided by how often it occurs in ``ids``.

    Returns:
        [bags, width].
    """
    return embedding_bag_ragged(weight, ids, None, weights, mode, padding_idx, scale_grad_by_freq)


def embedding_bag_ragged(
    weight: Tensor,
    ids: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None = None,
    mode: str = "sum",
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    include_last_offset: bool = False,
) -> Tensor:
    """Do what :func:`embedding_bag` does for bags of different lengths: ids and weights are [count], bags begin at ``offsets``."""
    padding = None if padding_idx < 0 else padding_idx
    factors = None if weights is None else weights.to(weight.dtype)
    return F.embedding_bag(
        ids, weight, offsets, None, 2.0, scale_grad_by_freq, mode, False, factors, include_last_offset, padding
    )


def embedding_bag_vocabulary(
    weight: Tensor,
    ids: Tensor,
    axis: str,
    weights: Tensor | None = None,
    mode: str = "sum",
    padding_idx: int = -1,
) -> Tensor:
    """:func:`embedding_bag` of a table whose rows are split over ``axis``; rows of other ranks are not counted.

    Args:
        weight: the rows of this rank, S(0).
        ids: row numbers of the complete table, [bags, length], equal on all ranks.
        axis: the mesh axis.
        weights: factors of the rows, equal on all ranks.
        mode: ``sum``, or ``mean``, which divides by the number of ids of the complete bag.
        padding_idx: the row number of ids that are not counted; -1: none.

    Returns:
        [bags, width], P: a pending sum.
    """
    pg = group(axis)
    rows = weight.shape[0]
    start = pg.rank() * rows
    is_counted = ids != padding_idx
    is_local = (ids >= start) & (ids < start + rows) & is_counted
    factors = is_local.to(weight.dtype) if weights is None else torch.where(is_local, weights.to(weight.dtype), 0.0)
    bags = F.embedding_bag(torch.where(is_local, ids - start, 0), weight, mode="sum", per_sample_weights=factors)
    if mode == "mean":
        bags = bags / is_counted.sum(-1, keepdim=True).clamp(min=1).to(bags.dtype)
    return _pending(bags, pg)


def cross_entropy_vocabulary(
    logits: Tensor,
    target: Tensor,
    axis: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_classes: int = 0,
) -> Tensor:
    """Return summed cross entropy of logits whose classes are split over ``axis`` (the vocabulary-parallel loss of Megatron).

    Forward has two all-reduces, for each token: the maximum; then the sum of exponentials, the logit of the target and, under label
    smoothing, the sum of logits. Backward sends nothing.

    Args:
        logits: [..., classes of this rank], S(last); half precision is computed in fp32.
        target: class ids [...], equal on all ranks.
        axis: the mesh axis.
        ignore_index: tokens with this target are not counted.
        label_smoothing: the weight of the uniform distribution.
        num_classes: the number of classes over all ranks, the first ones of all logits; the others are padding, fewer than the logits of a
            rank. 0: all are classes.

    Returns:
        A scalar, I: equal on all ranks.
    """
    pg = group(axis)
    classes = logits.shape[-1]
    local_target = target - pg.rank() * classes
    if num_classes and (pg.rank() + 1) * classes > num_classes:
        logits = logits[..., : num_classes - pg.rank() * classes]
    largest = wide(logits.detach().amax(dim=-1, keepdim=True))
    parts = _ExponentialSums.apply(logits, _maximum(largest, pg), local_target, label_smoothing > 0)  # type: ignore[no-untyped-call]
    sums = collectives.all_reduce(_pending(parts, pg), axis, "I")
    normalizer = sums[0].log()
    losses = normalizer - sums[1]
    if label_smoothing:
        uniform = normalizer - sums[2] / (num_classes or classes * pg.size())
        losses = (1.0 - label_smoothing) * losses + label_smoothing * uniform
    return torch.where(target != ignore_index, losses, 0.0).sum()


class _ExponentialSums(torch.autograd.Function):
    """Sums over the classes of one rank, with the gradient in one pass; only the exponentials are kept.

    Inputs: x [..., classes]; largest [..., 1]; target [...], class ids counted from the first class of this rank; total. The result is
    [2 or 3, ...]: the sum of exp(x - largest), x - largest of the target (0 if another rank has it), and with ``total`` the sum of
    x - largest.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor, target: Tensor, total: bool) -> Tensor:
        shifted = torch.sub(x, largest)
        is_local = (target >= 0) & (target < x.shape[-1])
        index = torch.where(is_local, target, 0).unsqueeze(-1)
        picked = torch.where(is_local, shifted.gather(-1, index).squeeze(-1), 0.0)
        sums = [shifted.sum(dim=-1)] if total else []
        exponentials = shifted.exp_()
        ctx.save_for_backward(exponentials, is_local, index)
        ctx.dtype = x.dtype
        return torch.stack([exponentials.sum(dim=-1), picked, *sums])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, is_local, index = ctx.saved_tensors
        of_sum, of_picked, *of_total = gradients[0].unsqueeze(-1)
        gradient = exponentials * of_sum
        if of_total:
            gradient += of_total[0]
        gradient.scatter_add_(-1, index, of_picked * is_local.unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None


spmd_types.register_local_autograd_function(_ExponentialSums)


def _pending(x: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """Return a value of this rank as one summand of a pending sum."""
    return cast("Tensor", spmd_types.reinterpret(x, pg, src=spmd_types.V, dst=spmd_types.P))


def _maximum(local: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """Return the maximum over the group, without gradient, R."""
    result = _pending(local.contiguous(), pg)
    dist.all_reduce(result, op=dist.ReduceOp.MAX, group=pg)
    return result


def partial_mean(
    x: Tensor,
    dims: Sequence[int],
    keepdim: bool,
    count: int,
    dtype: torch.dtype | None = None,
    *,
    share: float = 1.0,
) -> Tensor:
    """Return one rank's summand of a mean over dims of which some are split: the local sum over the global count.

    Args:
        x: the part of this rank.
        dims: the dims that are reduced.
        keepdim: whether they are kept with size 1.
        count: the number of elements of each mean, over all ranks.
        dtype: the dtype of the sum; None for that of x.
        share: the fraction of these elements that the batch of this step has.

    Returns:
        P: a pending sum.
    """
    if share != 1.0:
        count = round(count * share)
    if x.dtype == torch.float16 and dtype in (None, torch.float16):  # the sum may overflow where the mean does not
        num_local = prod(x.shape[dim] for dim in dims)
        return x.mean(dim=tuple(dims), keepdim=keepdim) * (num_local / count)
    return x.sum(dim=tuple(dims), keepdim=keepdim, dtype=dtype) / count


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *axes: str,
    share: float = 1.0,
    micro_batch_weight: float = 1.0,
) -> Tensor:
    """Normalise every channel by its mean and variance over all samples and all space, on all ranks of ``axes``.

    Args:
        x: [samples, channels, *space]; samples or space are split evenly over one axis of ``axes`` after the other.
        weight, bias: [channels], equal on all ranks.
        eps: is added to the variance.
        axes: mesh axes; without any, the statistics are those of x.
        share: the fraction of all elements that the batch of this step has.
        micro_batch_weight: the weight of each element of x in the statistics.

    Returns:
        A tensor like x.
    """
    if not axes:
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=eps)
    return _normalised(x, weight, bias, eps, axes, share, micro_batch_weight)[0]


def batch_norm_running(  # noqa: PLR0913  operands and numbers of emitted code
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    *axes: str,
    share: float = 1.0,
    micro_batch_weight: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Do what :func:`batch_norm` does, and return the new running mean and (unbiased) variance too: [channels], equal on all ranks."""
    if not axes:
        mean, variance = running_mean.clone(), running_var.clone()
        return F.batch_norm(x, mean, variance, weight, bias, True, momentum, eps), mean, variance
    y, mean, variance, count = _normalised(x, weight, bias, eps, axes, share, micro_batch_weight)
    with torch.no_grad():
        unbiased = variance * (count / max(count - 1, 1))
        new_mean, new_variance = (
            (1 - momentum) * old + momentum * seen.flatten().to(old.dtype)
            for old, seen in ((running_mean, mean), (running_var, unbiased))
        )
    return y, new_mean, new_variance


def batch_norm_at_rest(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    *axes: str,
    **of_batch: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`batch_norm_running` in ``eval()``: it normalises by the running statistics and returns them unchanged.

    Samples are independent, so that it does not communicate.
    """
    y = fixed_batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    return y, running_mean, running_var


def _normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    axes: Sequence[str],
    share: float,
    micro_batch_weight: float,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the normalised x, mean and variance [1, channels, ...] over all ranks of ``axes``, and the number of elements of each."""
    dims = [d for d in range(x.dim()) if d != 1]
    count = round(x.numel() // x.shape[1] * prod(group(axis).size() for axis in axes) * share)
    mean = _total(wide(x).sum(dims, keepdim=True), axes, micro_batch_weight) / count
    centred = wide(x) - mean
    variance = _total((centred * centred).sum(dims, keepdim=True), axes, micro_batch_weight) / count
    y = centred * torch.rsqrt(variance + eps)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    if weight is not None:
        y = y * weight.view(shape)
    if bias is not None:
        y = y + bias.view(shape)
    return y.to(x.dtype), mean, variance, count


def total(x: Tensor, *axes: str, micro_batch_weight: float = 1.0) -> Tensor:
    """Return the sum over all ranks of ``axes`` of a tensor without gradient (P to R); without axes the tensor itself."""
    x = _counted(x, micro_batch_weight)
    for axis in axes:
        x = collectives.all_reduce(x, axis, "R") if group(axis).size() > 1 else x
    return x


def _counted(part: Tensor, micro_batch_weight: float) -> Tensor:
    """Return a sum over a micro-batch in which each sample may occur several times, as if each occurred once."""
    return part if micro_batch_weight == 1.0 else part * micro_batch_weight


def _total(part: Tensor, axes: Sequence[str], micro_batch_weight: float) -> Tensor:
    """Return the weighted sum over all axes, one after the other, R on each: its gradient is a pending sum."""
    result = _counted(part, micro_batch_weight)
    for axis in axes:
        result = collectives.all_reduce(_pending(result, group(axis)), axis, "R")
    return result


def change_over_data(x: Tensor, source: str, target: str, *, micro_batch_weight: float = 1.0) -> Tensor:
    """Change a type over both data axes; samples are in the order of the ranks, with the inner axis last.

    Args:
        x: the part of this rank.
        source, target: types, such as ``S(0)`` and ``R``.
        micro_batch_weight: the weight of the samples of this rank in sums. If x is P it is multiplied by the weight. If the result is P
            it is divided by it, as a later sum multiplies it. The weight of the first rank is not zero. Where it is zero, no gradient of
            what was added up matters.

    Returns:
        x in type ``target``.
    """
    source_type, target_type = Type.from_text(source), Type.from_text(target)
    change = conversion(source_type, target_type, requires_grad=True)
    assert change is not None, (source, target)
    emitted, arguments = (
        getattr(collectives, change.target.removeprefix("autopar.")),
        change.arguments(source_type, target_type),
    )
    if source_type.kind == "P":
        x = _counted(x, micro_batch_weight)
    axes = [axis for axis in DATA_AXES if group(axis).size() > 1]
    for axis in reversed(axes) if source_type.is_split else axes:
        x = emitted(x, axis, *arguments)
    return _counted(x, 1 / micro_batch_weight) if target_type.kind == "P" and micro_batch_weight else x

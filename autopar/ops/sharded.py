"""Operators that run on one rank's part and know it: called by emitted code, next to :mod:`autopar.ops.collectives`.

An axis is a mesh axis by name, as in :mod:`autopar.ops.collectives`. Types of operands and results are those of
the strategies in ``autopar.rules.other_kernels``.
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
from autopar.plan.mesh import DATA_AXES, parse_type


def embedding_vocabulary(weight: Tensor, ids: Tensor, axis: str, padding_idx: int = -1) -> Tensor:
    """Rows of a table that is split over ``axis`` by rows; rows of other ranks give zeros.

    Args:
        weight: this rank's rows, [rows, width], S(0).
        ids: row numbers of the whole table, any shape, the same on all ranks.
        axis: mesh axis.
        padding_idx: row of the whole table that gets no gradient; -1: none.

    Returns:
        [*ids.shape, width], P: a pending sum.
    """
    pg = group(axis)
    rows = weight.shape[0]
    start = pg.rank() * rows
    mine = (ids >= start) & (ids < start + rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    found = F.embedding(torch.where(mine, ids - start, 0), weight, padding)
    return _pending(torch.where(mine.unsqueeze(-1), found, 0.0), pg)


def embedding_bag(
    weight: Tensor,
    ids: Tensor,
    weights: Tensor | None = None,
    mode: str = "sum",
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """The sum, mean or maximum of a table's rows for each bag, in one kernel.

    Args:
        weight: [rows, width].
        ids: [bags, length], row numbers.
        weights: [bags, length]: factors of the rows, under ``sum``.
        mode: ``sum``, ``mean``, ``max``.
        padding_idx: ids that count nothing, from the table's start; -1: none.
        scale_grad_by_freq: divides a row's gradient by how often it stands in ``ids``.

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
    """As :func:`embedding_bag` for bags of different lengths: ``ids`` and ``weights`` are [count], bags begin at ``offsets``."""
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
    """:func:`embedding_bag` of a table that is split over ``axis`` by rows; rows of other ranks count nothing.

    Args:
        weight: this rank's rows, S(0).
        ids: row numbers of the whole table, [bags, length], the same on all ranks; so ``weights``.
        mode: ``sum`` or ``mean``, which divides by the ids of the whole bag.

    Returns:
        [bags, width], P: a pending sum.
    """
    pg = group(axis)
    rows = weight.shape[0]
    start = pg.rank() * rows
    counted = ids != padding_idx
    mine = (ids >= start) & (ids < start + rows) & counted
    factors = mine.to(weight.dtype) if weights is None else torch.where(mine, weights.to(weight.dtype), 0.0)
    found = F.embedding_bag(torch.where(mine, ids - start, 0), weight, mode="sum", per_sample_weights=factors)
    if mode == "mean":
        found = found / counted.sum(-1, keepdim=True).clamp(min=1).to(found.dtype)
    return _pending(found, pg)


def cross_entropy_vocabulary(
    logits: Tensor,
    target: Tensor,
    axis: str,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    num_classes: int = 0,
) -> Tensor:
    """Summed cross entropy of logits whose classes are split over ``axis`` (Megatron's vocabulary-parallel loss).

    Per token, two all-reduces forward: the maximum; the sum of exponentials, the target's logit and,
    under label smoothing, the sum of logits. Backward moves nothing.

    Args:
        logits: [..., classes of this rank], S(last); half precision is computed in fp32.
        target: class ids [...], the same on all ranks.
        axis: mesh axis.
        ignore_index: tokens with this target count nothing.
        label_smoothing: weight of the uniform distribution.
        num_classes: over all ranks, the first ones of all logits; the rest is padding, shorter than what a rank has.
            0: all are classes.

    Returns:
        A scalar, I: the same on all ranks.
    """
    pg = group(axis)
    classes = logits.shape[-1]
    wanted = target - pg.rank() * classes
    if num_classes and (pg.rank() + 1) * classes > num_classes:
        logits = logits[..., : num_classes - pg.rank() * classes]
    largest = wide(logits.detach().amax(dim=-1, keepdim=True))
    parts = _ExponentialSums.apply(logits, _maximum(largest, pg), wanted, label_smoothing > 0)  # type: ignore[no-untyped-call]
    sums = collectives.all_reduce(_pending(parts, pg), axis, "I")
    normalizer = sums[0].log()
    losses = normalizer - sums[1]
    if label_smoothing:
        uniform = normalizer - sums[2] / (num_classes or classes * pg.size())
        losses = (1.0 - label_smoothing) * losses + label_smoothing * uniform
    return torch.where(target != ignore_index, losses, 0.0).sum()


class _ExponentialSums(torch.autograd.Function):
    """Sums over one rank's classes, with the gradient in one pass; keeps the exponentials alone.

    x [..., classes], largest [..., 1], wanted [...] (class ids counted from this rank's first) give
    [2 or 3, ...]: the sum of exp(x - largest), x - largest of the wanted class (0 where another rank
    has it), and, if ``total``, the sum of x - largest.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, largest: Tensor, wanted: Tensor, total: bool) -> Tensor:
        shifted = torch.sub(x, largest)
        mine = (wanted >= 0) & (wanted < x.shape[-1])
        place = torch.where(mine, wanted, 0).unsqueeze(-1)
        picked = torch.where(mine, shifted.gather(-1, place).squeeze(-1), 0.0)
        sums = [shifted.sum(dim=-1)] if total else []
        exponentials = shifted.exp_()
        ctx.save_for_backward(exponentials, mine, place)
        ctx.dtype = x.dtype
        return torch.stack([exponentials.sum(dim=-1), picked, *sums])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        exponentials, mine, place = ctx.saved_tensors
        of_sum, of_picked, *of_total = gradients[0].unsqueeze(-1)
        gradient = exponentials * of_sum
        if of_total:
            gradient += of_total[0]
        gradient.scatter_add_(-1, place, of_picked * mine.unsqueeze(-1))
        return gradient.to(ctx.dtype), None, None, None


spmd_types.register_local_autograd_function(_ExponentialSums)


def _pending(x: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """One summand of a pending sum, from a value of this rank alone."""
    return cast("Tensor", spmd_types.reinterpret(x, pg, src=spmd_types.V, dst=spmd_types.P))


def _maximum(local: Tensor, pg: dist.ProcessGroup) -> Tensor:
    """The largest over the group, without gradient, R."""
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
    """One rank's share of a mean over dims of which some are split: the local sum over the global count.

    Args:
        x: this rank's part.
        dims: dims that are reduced.
        keepdim: keep them with size 1.
        count: elements in each mean, over all ranks.
        dtype: of the sum; default that of x.
        share: part of these elements that the batch of this step has.

    Returns:
        P: a pending sum.
    """
    if share != 1.0:
        count = round(count * share)
    if x.dtype == torch.float16 and dtype in (None, torch.float16):  # a sum may lie beyond its range, and no mean
        here = prod(x.shape[dim] for dim in dims)
        return x.mean(dim=tuple(dims), keepdim=keepdim) * (here / count)
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
    """Normalises every channel by its mean and variance over all samples and all space, of all ranks of ``axes``.

    Args:
        x: [samples, channels, *space], samples or space split evenly over ``axes``, one after the other.
        weight, bias: [channels], the same on all ranks.
        eps: added to the variance.
        axes: mesh axes; none: the statistics of x alone.
        share: part of all elements that the batch of this step has.
        micro_batch_weight: by what each element here counts.

    Returns:
        As x.
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
    """As :func:`batch_norm`, and the new running mean and (unbiased) variance, [channels], the same on all ranks."""
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
    """What :func:`batch_norm_running` is in ``eval()``: it reads the running statistics and leaves them, and no sample knows of another."""
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
    """The normalised x, mean and variance [1, channels, ...] over all ranks of ``axes``, and of how many elements."""
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
    """The tensor itself, or the sum over all ranks of ``axes`` of what is a part of it here (P), R; without gradient."""
    return _total(x, axes, micro_batch_weight)


def _counted(part: Tensor, micro_batch_weight: float) -> Tensor:
    """A sum over the samples of a micro-batch that stand in it several times: each counted once."""
    return part if micro_batch_weight == 1.0 else part * micro_batch_weight


def _total(part: Tensor, axes: Sequence[str], micro_batch_weight: float) -> Tensor:
    """The weighted sum over all axes, one after the other, R on each: its gradient is a pending sum."""
    result = _counted(part, micro_batch_weight)
    for axis in axes:
        result = collectives.all_reduce(_pending(result, group(axis)), axis, "R")
    return result


def change_over_data(x: Tensor, source: str, target: str, *, micro_batch_weight: float = 1.0) -> Tensor:
    """A change of type over both data axes, whose ranks in order (the inner axis last) have the samples in order.

    Args:
        x: this rank's part.
        source, target: types, as ``S(0)`` and ``R``.
        micro_batch_weight: by what sums over samples here count, x too where it is P. The result does later, where it becomes one. That
            of the first rank is not zero; where it is zero no gradient of what was added up matters.

    Returns:
        x in type ``target``.
    """
    before, after = parse_type(source), parse_type(target)
    if before.kind == "P":
        x = _counted(x, micro_batch_weight)
    axes = [axis for axis in DATA_AXES if group(axis).size() > 1]
    for axis in reversed(axes) if before.is_split else axes:
        match before.kind, after.kind:
            case "S", end:
                x = collectives.all_gather(x, axis, before.dim, end)
            case "P", "S":
                x = collectives.reduce_scatter(x, axis, after.dim)
            case "P", end:
                x = collectives.all_reduce(x, axis, end)
            case begin, "S":
                x = collectives.shard(x, axis, after.dim, begin)
            case begin, "P":
                x = collectives.keep_on_first(x, axis, begin)
            case _:
                x = collectives.invariant_to_replicate(x, axis)
    return _counted(x, 1 / micro_batch_weight) if after.kind == "P" and micro_batch_weight else x

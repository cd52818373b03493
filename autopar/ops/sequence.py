"""Attention over a sequence that is split over a mesh axis, and the zig-zag order in which ring attention splits it.

Emitted code calls these functions; an axis is the name of a mesh axis. Shapes: q is [batch, heads, rows, width]; k and v are
[batch, key heads, columns, width], and fewer key heads than heads are repeated (``enable_gqa``). A mask broadcasts to
[batch, heads, rows, columns]; it is bool (True: attended) or added to the scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ops import collectives, flash, seeded
from autopar.ops.plain import unknown
from autopar.ops.ring import FlashRing, Ring, RingWork


def attention_gathered(  # noqa: PLR0913  the signature of scaled_dot_product_attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = True,
    *,
    axis: str,
    scale: float | None = None,
    enable_gqa: bool = False,
    salt: seeded.Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
) -> Tensor:
    """Causal attention of the queries of this rank over all keys and values.

    Args:
        query: S(rows): rank r has the r-th part of the sequence.
        key, value: complete, R: the gradient on each rank is a summand.
        attn_mask: None; ``is_causal`` is the mask.
        dropout_p: the probability of dropout.
        is_causal: True.
        axis: the axis over which the queries are split.
        scale, enable_gqa: as in ``scaled_dot_product_attention``.
        salt, seed, axes: for dropout; see :func:`autopar.ops.seeded.dropout`.

    Returns:
        [batch, heads, rows, width], S(rows).
    """
    assert attn_mask is None
    assert is_causal
    rows = query.shape[-2]
    first_row = collectives.group(axis).rank() * rows
    num_seen = first_row + rows  # no row of this rank attends to later keys
    k, v = key.narrow(-2, 0, num_seen), value.narrow(-2, 0, num_seen)
    if query.is_cuda and flash.takes(query, value, drops=dropout_p > 0.0):
        with seeded.drawing(query.device, salt, seed, axes) if dropout_p else nullcontext():
            return flash.rows_after(query, k, v, query.shape[-1] ** -0.5 if scale is None else scale, dropout_p)
    if enable_gqa:  # with a mask, the only kernel that shares heads keeps all scores
        repeats = query.shape[1] // key.shape[1]
        k, v, enable_gqa = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1), False
    mask = torch.ones(rows, num_seen, dtype=torch.bool, device=query.device).tril(first_row)
    return seeded.attention(
        query, k, v, mask, dropout_p, scale=scale, enable_gqa=enable_gqa, salt=salt, seed=seed, axes=axes
    )


# --- zig-zag order -------------------------------------------------------------------------------
#
# The dim has 2 n chunks of equal length on n ranks. Rank r has chunks r and 2 n - 1 - r, so that under a causal mask
# all ranks have the same work.


def zigzag(x: Tensor, dim: int, ranks: int, *, back: bool = False) -> Tensor:
    """Reorders a tensor that is complete along ``dim`` so that its n parts are those of the ranks; ``back`` restores the order.

    >>> zigzag(torch.arange(8), 0, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    order = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
    if back:
        order = [order.index(chunk) for chunk in range(2 * ranks)]
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for i in order], dim)


def zigzag_shard(x: Tensor, axis: str, dim: int, source: str) -> Tensor:
    """:func:`autopar.ops.collectives.shard` to zig-zag order."""
    return collectives.shard(zigzag(x, dim, _ranks(axis)), axis, dim, source)


def zigzag_all_gather(x: Tensor, axis: str, dim: int, to: str) -> Tensor:
    """:func:`autopar.ops.collectives.all_gather` from zig-zag order."""
    return zigzag(collectives.all_gather(x, axis, dim, to), dim, _ranks(axis), back=True)


def zigzag_reduce_scatter(x: Tensor, axis: str, dim: int) -> Tensor:
    """:func:`autopar.ops.collectives.reduce_scatter` to zig-zag order."""
    return collectives.reduce_scatter(zigzag(x, dim, _ranks(axis)), axis, dim)


def zigzag_all_to_all(x: Tensor, axis: str, split_dim: int, gathered_dim: int) -> Tensor:
    """:func:`autopar.ops.collectives.all_to_all` between two dims in zig-zag order."""
    ranks = _ranks(axis)
    y = collectives.all_to_all(zigzag(x, split_dim, ranks), axis, split_dim, gathered_dim)
    return zigzag(y, gathered_dim, ranks, back=True)


def _ranks(axis: str) -> int:
    """Return the number of ranks on an axis."""
    return dist.get_world_size(collectives.group(axis))


# --- ring attention ------------------------------------------------------------------------------


def attention_ring(  # noqa: PLR0913  the signature of scaled_dot_product_attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    axis: str,
    ranks: int,
    scale: float | None = None,
    enable_gqa: bool = False,
    salt: seeded.Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
) -> Tensor:
    """Attention of the queries of this rank over keys and values that go round the ranks (Liu et al. 2023, Ring Attention).

    Partial results are merged by their log-sum-exps. In backward keys and values go round again with their gradients, which are summed in
    fp32 or better. Blocks are computed by fused kernels where possible (:mod:`autopar.ops.flash`). Otherwise (masks, dropout, values of
    another width, fp32 on GPUs) scores are computed in fp32 or better, for one rank's block of columns at a time.

    Args:
        query, key, value: S(rows), S(columns) in zig-zag order.
        attn_mask: the rows of this rank in zig-zag order, or one row, whose gradient is then a summand; all columns, in their original
            order.
        dropout_p: the probability of dropout.
        is_causal: whether the attention is causal.
        axis: the axis over which rows and columns are split.
        ranks: the number of its ranks.
        scale, enable_gqa: as in ``scaled_dot_product_attention``.
        salt, seed, axes: for dropout; see :func:`autopar.ops.seeded.dropout`.

    Returns:
        [batch, heads, rows, width], S(rows) in zig-zag order.
    """
    if query.device.type == "meta":  # in a check of types there is nothing to send to
        return unknown((*query.shape[:-1], value.shape[-1]), query, key, value, attn_mask)
    pg = collectives.group(axis)
    work = RingWork(
        group=pg,
        rank=pg.rank(),
        ranks=ranks,
        is_causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        seed=seeded.stream_seed(salt, seed, axes) if dropout_p else 0,
    )
    if attn_mask is None and not dropout_p and flash.takes(query, value):
        return FlashRing.apply(query, key, value, work)  # type: ignore[no-untyped-call, no-any-return]
    return Ring.apply(query, key, value, attn_mask, work)  # type: ignore[no-untyped-call, no-any-return]

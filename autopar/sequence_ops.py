"""Attention over a sequence that is split over a mesh axis, and the zig-zag order in which ring attention splits it.

Called by emitted code, next to :mod:`autopar.sharded_ops`; an axis is a mesh axis by name. Shapes: q is
[batch, heads, rows, width], k and v [batch, key heads, columns, width], of which fewer heads than those of q are
repeated (``enable_gqa``); a mask broadcasts to [batch, heads, rows, columns], bool (True: attended) or added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from autopar import ops


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
    salt: ops.Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
) -> Tensor:
    """Causal attention of this rank's queries over all keys and values.

    Args:
        query: S(rows): rank r has the r-th part of the sequence.
        key, value: whole, R: the gradient of each rank is a summand.
        attn_mask: None; ``is_causal`` stands for the mask.
        axis: over which the queries are split.
        salt, seed, axes: of dropout, see :func:`autopar.ops.dropout`.

    Returns:
        [batch, heads, rows, width], S(rows).
    """
    assert attn_mask is None
    assert is_causal
    rows = query.shape[-2]
    first = ops.group(axis).rank() * rows
    seen = first + rows  # later keys are not attended by any row here
    mask = torch.ones(rows, seen, dtype=torch.bool, device=query.device).tril(first)
    k, v = key.narrow(-2, 0, seen), value.narrow(-2, 0, seen)
    if dropout_p:
        return ops.attention(
            query, k, v, mask, dropout_p, scale=scale, enable_gqa=enable_gqa, salt=salt, seed=seed, axes=axes
        )
    return F.scaled_dot_product_attention(query, k, v, mask, scale=scale, enable_gqa=enable_gqa)


# --- zig-zag order -------------------------------------------------------------------------------
#
# 2 n chunks of equal length on n ranks: rank r has chunks r and 2 n - 1 - r, so that under a causal mask every rank
# has the same work.


def zigzag(x: Tensor, dim: int, ranks: int, *, back: bool = False) -> Tensor:
    """``x``, whole along ``dim``, in the order in which its parts go to ranks; with ``back`` from there.

    >>> zigzag(torch.arange(8), 0, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    order = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
    if back:
        order = [order.index(chunk) for chunk in range(2 * ranks)]
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat([chunks[i] for i in order], dim)


def zigzag_shard(x: Tensor, axis: str, dim: int, source: str) -> Tensor:
    """:func:`autopar.ops.shard` in zig-zag order."""
    return ops.shard(zigzag(x, dim, _ranks(axis)), axis, dim, source)


def zigzag_all_gather(x: Tensor, axis: str, dim: int, to: str) -> Tensor:
    """:func:`autopar.ops.all_gather` from zig-zag order."""
    return zigzag(ops.all_gather(x, axis, dim, to), dim, _ranks(axis), back=True)


def zigzag_reduce_scatter(x: Tensor, axis: str, dim: int) -> Tensor:
    """:func:`autopar.ops.reduce_scatter` to zig-zag order."""
    return ops.reduce_scatter(zigzag(x, dim, _ranks(axis)), axis, dim)


def zigzag_all_to_all(x: Tensor, axis: str, split_dim: int, gathered_dim: int) -> Tensor:
    """:func:`autopar.ops.all_to_all` between two dims in zig-zag order."""
    ranks = _ranks(axis)
    y = ops.all_to_all(zigzag(x, split_dim, ranks), axis, split_dim, gathered_dim)
    return zigzag(y, gathered_dim, ranks, back=True)


def _ranks(axis: str) -> int:
    return dist.get_world_size(ops.group(axis))


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
    salt: ops.Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
) -> Tensor:
    """Attention of this rank's queries over keys and values that go round (Liu et al. 2023, Ring Attention).

    Partial results are merged by their log-sum-exp; backward goes round again with the gradients of keys and values.
    Scores are computed in fp32 or better, one rank's block of columns at a time.

    Args:
        query, key, value: S(rows), S(columns) in zig-zag order.
        attn_mask: rows of this rank in zig-zag order (or one row, whose gradient is then a summand), all columns in
            their own order.
        axis: over which rows and columns are split.
        ranks: its degree.
        salt, seed, axes: of dropout, see :func:`autopar.ops.dropout`.

    Returns:
        [batch, heads, rows, width], S(rows) in zig-zag order.
    """
    if query.device.type == "meta":  # a check of types: what is sent has no place there
        return _Ring.apply(query, key, value, attn_mask, None)  # type: ignore[no-untyped-call, no-any-return]
    pg = ops.group(axis)
    work = _RingWork(
        group=pg,
        rank=pg.rank(),
        ranks=ranks,
        is_causal=is_causal,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        dropout_p=dropout_p,
        seed=ops.stream_seed(salt, seed, axes) if dropout_p else 0,
    )
    return _Ring.apply(query, key, value, attn_mask, work)  # type: ignore[no-untyped-call, no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class _RingWork:
    """What one rank does with one block of keys and values.

    Tensors of a block: q [batch, key heads, repeats, rows, width], k and v [batch, key heads, 1, columns, width], all
    in the dtype of the computation.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    is_causal: bool
    scale: float
    dropout_p: float
    seed: int

    def visible(self, owner: int, rows: int, columns: int) -> tuple[slice, slice] | None:
        """The rows and columns of a block with anything in them under the mask; None: nothing.

        Of a block of an earlier rank all rows see its first half alone, of a later rank's the second half sees all.
        """
        if not self.is_causal or owner == self.rank:
            return slice(0, rows), slice(0, columns)
        if owner < self.rank:
            return slice(0, rows), slice(0, columns // 2)
        return slice(rows // 2, rows), slice(0, columns)

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, owner: int, rows: slice, columns: slice) -> Tensor:
        """Scores of the visible part of a block: [batch, key heads, repeats, rows, columns]."""
        found = torch.matmul(q[..., rows, :], k[..., columns, :].transpose(-1, -2)) * self.scale
        if self.is_causal and owner == self.rank:
            n = found.shape[-1]  # zig-zag order is ascending on one rank
            found = found.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=q.device).tril(), -math.inf)
        if mask is None:
            return found
        mask = self.columns(mask, owner)
        mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
        mask = mask[..., columns]
        return found.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else found + mask

    def add_to_mask(self, gradient: Tensor, found: Tensor, owner: int, rows: slice, columns: slice) -> None:
        """Adds what a block's scores say to the gradient of the mask, summed where the mask is repeated."""
        size = gradient.shape[-1] // (2 * self.ranks)
        whole = torch.arange(gradient.shape[-1], device=gradient.device)
        index = torch.cat([whole[size * i : size * (i + 1)] for i in (owner, 2 * self.ranks - 1 - owner)])[columns]
        target = gradient if gradient.shape[-2] == 1 else gradient[..., rows, :]
        target.index_add_(-1, index, found.sum_to_size((*target.shape[:-1], len(index))))

    def columns(self, mask: Tensor, owner: int) -> Tensor:
        """The columns of a block, as its owner has them."""
        chunks = mask.chunk(2 * self.ranks, -1)
        return torch.cat([chunks[owner], chunks[2 * self.ranks - 1 - owner]], -1)

    def kept(self, like: Tensor, owner: int) -> Tensor:
        """What dropout multiplies the probabilities of a block with; the same again in backward."""
        generator = torch.Generator(like.device)
        generator.manual_seed((self.seed + owner * 0x9E3779B97F4A7C15) % (1 << 63))
        mask = torch.empty_like(like).bernoulli_(1.0 - self.dropout_p, generator=generator)
        return mask / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else mask

    def pass_on(self, x: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Starts to send to the next rank and to receive from the one before."""
        received = torch.empty_like(x)
        before, after = [0] * self.ranks, [0] * self.ranks
        before[(self.rank - 1) % self.ranks] = after[(self.rank + 1) % self.ranks] = x.numel()
        work = dist.all_to_all_single(received.view(-1), x.view(-1), before, after, group=self.group, async_op=True)
        return received, work


class _Ring(torch.autograd.Function):
    """See :func:`attention_ring`. Keeps the inputs, the output and a row statistic."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, work: _RingWork | None
    ) -> Tensor:
        ctx.work = work
        if work is None:
            ctx.save_for_backward(query, key, value, mask)
            return query.new_empty((*query.shape[:-1], value.shape[-1]))
        q, pair, masks = _prepared(query, key, value, mask)
        rows = q.shape[-2]
        out = q.new_zeros((*q.shape[:-1], value.shape[-1]))
        total = q.new_full((*q.shape[:-1], 1), -math.inf)
        for step in range(work.ranks):
            owner = (work.rank - step) % work.ranks
            last = step == work.ranks - 1
            coming, sent = (pair, None) if last else work.pass_on(pair)
            k, v = _unpacked(pair, key, value, q.dtype)
            part = work.visible(owner, rows, k.shape[-2])
            if part is not None:
                scores = work.scores(q, k, masks, owner, *part)
                largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).min)
                weights = (scores - largest).exp_()
                sums = weights.sum(-1, keepdim=True)
                if work.dropout_p:
                    weights = weights * work.kept(weights, owner)
                found = torch.matmul(weights, v[..., part[1], :])
                _merge(
                    out[..., part[0], :], total[..., part[0], :], found / sums.clamp_min(_TINY), largest + sums.log()
                )
            if sent is not None:
                sent.wait()
            pair = coming
        result = out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        work: _RingWork | None = ctx.work
        if work is None:
            saved = tuple(torch.empty_like(x) for x in ctx.saved_tensors[:3])
            like = ctx.saved_tensors[3] if ctx.needs_input_grad[3] else None
            return (*saved, None if like is None else torch.empty_like(like), None)
        query, key, value, mask, result, total = ctx.saved_tensors
        q, pair, masks = _prepared(query, key, value, mask)
        rows = q.shape[-2]
        grad = gradients[0].to(q.dtype).reshape(*q.shape[:-1], value.shape[-1])
        inner = (grad * result.to(q.dtype).view_as(grad)).sum(-1, keepdim=True)
        finite = torch.where(total == -math.inf, 0.0, total)
        dq, dpair = torch.zeros_like(q), torch.zeros_like(pair, dtype=q.dtype)
        dmask = torch.zeros_like(masks) if masks is not None and ctx.needs_input_grad[3] else None
        for step in range(work.ranks):
            owner = (work.rank - step) % work.ranks
            last = step == work.ranks - 1
            coming, sent = (pair, None) if last else work.pass_on(pair)
            k, v = _unpacked(pair, key, value, q.dtype)
            part = work.visible(owner, rows, k.shape[-2])
            if part is not None:
                here, there = part
                weights = (work.scores(q, k, masks, owner, here, there) - finite[..., here, :]).exp_()
                g = grad[..., here, :]
                dweights = torch.matmul(g, v[..., there, :].transpose(-1, -2))
                dropped = weights
                if work.dropout_p:
                    kept = work.kept(weights, owner)
                    dropped, dweights = weights * kept, dweights * kept
                dscores = weights * (dweights - inner[..., here, :])
                if dmask is not None:
                    work.add_to_mask(dmask, dscores, owner, here, there)
                dscores = dscores * work.scale
                dq[..., here, :] += torch.matmul(dscores, k[..., there, :])
                dk, dv = _unpacked(dpair, key, value, q.dtype)
                dk[..., there, :] += torch.matmul(dscores.transpose(-1, -2), q[..., here, :]).sum(2, keepdim=True)
                dv[..., there, :] += torch.matmul(dropped.transpose(-1, -2), g).sum(2, keepdim=True)
            if sent is not None:
                sent.wait()
            pair = coming
            dpair, moved = work.pass_on(dpair)  # after the last step it is home
            if moved is not None:
                moved.wait()
        dk, dv = _unpacked(dpair, key, value, q.dtype)
        return (
            dq.reshape(query.shape).to(query.dtype),
            dk.reshape(key.shape).to(key.dtype),
            dv.reshape(value.shape).to(value.dtype),
            None if dmask is None else dmask.reshape(mask.shape).to(mask.dtype),
            None,
        )


spmd_types.register_local_autograd_function(_Ring)

_TINY = 1e-30


def _merge(out: Tensor, total: Tensor, found: Tensor, statistic: Tensor) -> None:
    """Adds normalised partial results to ``out`` in place; statistics are log-sum-exps, -inf where nothing is seen."""
    new = torch.logaddexp(total, statistic)
    safe = torch.where(new == -math.inf, 0.0, new)
    out.mul_((total - safe).exp()).add_(found * (statistic - safe).exp())
    total.copy_(new)


def _prepared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Q by groups of heads in the dtype of the computation; k and v in one piece, as they are sent; the mask likewise."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    heads, groups = query.shape[1], key.shape[1]
    q = query.to(dtype).reshape(query.shape[0], groups, heads // groups, *query.shape[2:])
    pair = torch.cat([key.reshape(-1), value.reshape(-1)])
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        mask = mask.to(dtype) if mask.dtype != torch.bool else mask
        by_head = (groups, heads // groups) if mask.shape[1] > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *by_head, *mask.shape[2:])
    return q, pair, mask


def _unpacked(pair: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and v of what was sent, with a dim for the heads that share them; views where the dtype is the same."""
    k, v = pair[: key.numel()].view(key.shape), pair[key.numel() :].view(value.shape)
    return k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)

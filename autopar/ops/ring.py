"""Ring attention: keys and values of a split sequence go round the ranks; blocks are computed by fused kernels or matrix products.

It implements :func:`autopar.ops.sequence.attention_ring`, which describes the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import spmd_types
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.ops import flash
from autopar.ops.plain import wide


@dataclass(frozen=True, slots=True, kw_only=True)
class RingWork:
    """What one rank computes with one block of keys and values.

    Tensors of a block: q [batch, key heads, repeats, rows, width]; k and v [batch, key heads, 1, columns, width]; all in the dtype of the
    computation.

    Attributes:
        group: the ranks of the ring.
        rank, ranks: the number of this rank, and of all.
        is_causal: whether the attention is causal.
        scale: the factor on scores.
        dropout_p: the probability of dropout.
        seed: its seed.
    """

    group: dist.ProcessGroup
    rank: int
    ranks: int
    is_causal: bool
    scale: float
    dropout_p: float
    seed: int

    def visible(self, owner: int, rows: int, columns: int) -> tuple[slice, slice]:
        """Return the rows and columns of a block that a causal mask does not hide completely.

        All rows see the first half of a block of an earlier rank. The second half of the rows sees all of a block of a later rank.
        """
        if not self.is_causal or owner == self.rank:
            return slice(0, rows), slice(0, columns)
        if owner < self.rank:
            return slice(0, rows), slice(0, columns // 2)
        return slice(rows // 2, rows), slice(0, columns)

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, owner: int, rows: slice, columns: slice) -> Tensor:
        """Return the scores of the visible part of a block: [batch, key heads, repeats, rows, columns]."""
        scores = torch.matmul(q[..., rows, :], k[..., columns, :].transpose(-1, -2)) * self.scale
        if self.is_causal and owner == self.rank:
            n = scores.shape[-1]  # the chunks of one rank are in ascending order
            scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool, device=q.device).tril(), -math.inf)
        if mask is None:
            return scores
        mask = self.columns(mask, owner)
        mask = mask if mask.shape[-2] == 1 else mask[..., rows, :]
        mask = mask[..., columns]
        return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask

    def add_to_mask(self, gradient: Tensor, score_gradient: Tensor, owner: int, rows: slice, columns: slice) -> None:
        """Add the gradients of the scores of a block to the gradient of the mask, summed where the mask broadcasts."""
        index = self.columns(torch.arange(gradient.shape[-1], device=gradient.device), owner)[columns]
        target = gradient if gradient.shape[-2] == 1 else gradient[..., rows, :]
        target.index_add_(-1, index, score_gradient.sum_to_size((*target.shape[:-1], len(index))))

    def columns(self, mask: Tensor, owner: int) -> Tensor:
        """Return the columns of a mask that belong to the block of ``owner``, in the order in which that rank has them."""
        chunks = mask.chunk(2 * self.ranks, -1)
        return torch.cat([chunks[owner], chunks[2 * self.ranks - 1 - owner]], -1)

    def dropout_factors(self, like: Tensor, owner: int) -> Tensor:
        """Return the factors by which dropout multiplies the probabilities of a block; they are equal in forward and backward."""
        generator = torch.Generator(like.device)
        generator.manual_seed((self.seed + owner * 0x9E3779B97F4A7C15) % (1 << 63))
        mask = torch.empty_like(like).bernoulli_(1.0 - self.dropout_p, generator=generator)
        return mask / (1.0 - self.dropout_p) if self.dropout_p < 1.0 else mask

    def rounds(self, pair: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the blocks of all ranks with their owners, first that of this rank. A block is sent on while it is computed with."""
        for step in range(self.ranks):
            next_pair, sent = self.pass_on(pair) if step < self.ranks - 1 else (pair, None)
            yield (self.rank - step) % self.ranks, pair
            if sent is not None:
                sent.wait()
            pair = next_pair

    def pass_on(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """Begin to send a tensor to the next rank and to receive one from the previous rank; return the latter and the handle."""
        received = torch.empty_like(x)
        counts_in, counts_out = [0] * self.ranks, [0] * self.ranks
        counts_in[(self.rank - 1) % self.ranks] = counts_out[(self.rank + 1) % self.ranks] = x.numel()
        work = dist.all_to_all_single(received.view(-1), x.view(-1), counts_in, counts_out, self.group, async_op=True)
        assert work is not None  # this rank is in the group
        return received, work


class FlashRing(torch.autograd.Function):
    """Ring attention by fused kernels; see :func:`autopar.ops.sequence.attention_ring`.

    It keeps the inputs, the output and the log-sum-exp of its rows.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: RingWork) -> Tensor:
        pair, num_rows = torch.cat([key.reshape(-1), value.reshape(-1)]), query.shape[-2]
        for owner, block in work.rounds(pair):
            k, v = _views(block, key, value)
            if owner == work.rank:
                part, lse, rng_state = flash.forward(query, k, v, work.scale, is_causal=work.is_causal)
                out, lse = wide(part), lse.clone()
                continue
            rows, cols = work.visible(owner, num_rows, k.shape[-2])
            part, block_lse, _ = flash.forward(
                query[..., rows, :], k[..., cols, :], v[..., cols, :], work.scale, is_causal=False
            )
            flash.merge(out[..., rows, :], lse[..., rows], part, block_lse)
        result = out.to(query.dtype)
        ctx.work = work
        ctx.save_for_backward(query, key, value, result, lse, *rng_state)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, result, lse, *rng_state = ctx.saved_tensors
        work: RingWork = ctx.work
        grad, num_rows = gradients[0], query.shape[-2]
        pair = torch.cat([key.reshape(-1), value.reshape(-1)])
        dq = torch.zeros_like(wide(query))
        dpair = torch.zeros_like(wide(pair))
        for owner, block in work.rounds(pair):
            k, v = _views(block, key, value)
            rows, cols = work.visible(owner, num_rows, k.shape[-2])
            gradient = flash.backward(
                grad[..., rows, :], query[..., rows, :], k[..., cols, :], v[..., cols, :], result[..., rows, :], lse[..., rows],
                tuple(rng_state), work.scale, is_causal=work.is_causal and owner == work.rank,
            )  # fmt: skip
            dk, dv = _views(dpair, key, value)
            for total, part in zip((dq[..., rows, :], dk[..., cols, :], dv[..., cols, :]), gradient, strict=True):
                total.add_(part)
            dpair, moved = work.pass_on(dpair)  # after the last step it is with its owner
            moved.wait()
        dk, dv = _views(dpair, key, value)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None


spmd_types.register_local_autograd_function(FlashRing)


def _views(pair: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v from the tensor that is sent, in the shapes that their owner has."""
    return pair[: key.numel()].view(key.shape), pair[key.numel() :].view(value.shape)


class Ring(torch.autograd.Function):
    """Ring attention by matrix products; see :func:`autopar.ops.sequence.attention_ring`.

    It keeps the inputs, the output and the log-sum-exp of its rows.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, work: RingWork) -> Tensor:
        ctx.work = work
        q, pair, masks = _prepared(query, key, value, mask)
        num_rows = q.shape[-2]
        out = q.new_zeros((*q.shape[:-1], value.shape[-1]))
        lse = q.new_full(q.shape[:-1], -math.inf)
        for owner, block in work.rounds(pair):
            k, v = _unpacked(block, key, value, q.dtype)
            rows, cols = work.visible(owner, num_rows, k.shape[-2])
            scores = work.scores(q, k, masks, owner, rows, cols)
            largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).min)
            weights = (scores - largest).exp_()
            sums = weights.sum(-1, keepdim=True)
            if work.dropout_p:
                weights = weights * work.dropout_factors(weights, owner)
            part = torch.matmul(weights, v[..., cols, :]) / sums.clamp_min(_TINY)
            flash.merge(out[..., rows, :], lse[..., rows], part, (largest + sums.log()).squeeze(-1))
        result = out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        work: RingWork = ctx.work
        query, key, value, mask, result, lse = ctx.saved_tensors
        q, pair, masks = _prepared(query, key, value, mask)
        num_rows = q.shape[-2]
        grad = gradients[0].to(q.dtype).reshape(*q.shape[:-1], value.shape[-1])
        inner = (grad * result.to(q.dtype).view_as(grad)).sum(-1, keepdim=True)
        finite = torch.where(lse == -math.inf, 0.0, lse).unsqueeze(-1)
        dq, dpair = torch.zeros_like(q), torch.zeros_like(pair, dtype=q.dtype)
        dmask = torch.zeros_like(masks) if masks is not None and ctx.needs_input_grad[3] else None
        for owner, block in work.rounds(pair):
            k, v = _unpacked(block, key, value, q.dtype)
            rows, cols = work.visible(owner, num_rows, k.shape[-2])
            weights = (work.scores(q, k, masks, owner, rows, cols) - finite[..., rows, :]).exp_()
            g = grad[..., rows, :]
            dweights = torch.matmul(g, v[..., cols, :].transpose(-1, -2))
            dropped = weights
            if work.dropout_p:
                factors = work.dropout_factors(weights, owner)
                dropped, dweights = weights * factors, dweights * factors
            dscores = weights * (dweights - inner[..., rows, :])
            if dmask is not None:
                work.add_to_mask(dmask, dscores, owner, rows, cols)
            dscores = dscores * work.scale
            dq[..., rows, :] += torch.matmul(dscores, k[..., cols, :])
            dk, dv = _unpacked(dpair, key, value, q.dtype)
            dk[..., cols, :] += torch.matmul(dscores.transpose(-1, -2), q[..., rows, :]).sum(2, keepdim=True)
            dv[..., cols, :] += torch.matmul(dropped.transpose(-1, -2), g).sum(2, keepdim=True)
            dpair, moved = work.pass_on(dpair)  # after the last step it is with its owner
            moved.wait()
        dk, dv = _unpacked(dpair, key, value, q.dtype)
        return (
            dq.reshape(query.shape).to(query.dtype),
            dk.reshape(key.shape).to(key.dtype),
            dv.reshape(value.shape).to(value.dtype),
            None if dmask is None else dmask.reshape(mask.shape).to(mask.dtype),
            None,
        )


spmd_types.register_local_autograd_function(Ring)

_TINY = 1e-30
"""The smallest divisor of a row: a row that sees nothing has a sum of zero, and its output is zero."""


def _prepared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return q by groups of heads in the dtype of the computation, k and v as one tensor to send, and the mask by groups of heads."""
    heads, groups = query.shape[1], key.shape[1]
    q = wide(query).reshape(query.shape[0], groups, heads // groups, *query.shape[2:])
    pair = torch.cat([key.reshape(-1), value.reshape(-1)])
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        mask = mask.to(q.dtype) if mask.dtype != torch.bool else mask
        by_head = (groups, heads // groups) if mask.shape[1] > 1 else (1, 1)
        mask = mask.reshape(mask.shape[0], *by_head, *mask.shape[2:])
    return q, pair, mask


def _unpacked(pair: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return k and v with a dim for the heads that share them; they are views if the dtype is the same."""
    k, v = _views(pair, key, value)
    return k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)

"""Keys and values of a sequence that is split over ranks go round them: blocks by fused kernels, or by products of matrices.

What :func:`autopar.ops.sequence.attention_ring` does, whose shapes these are.
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

    def visible(self, owner: int, rows: int, columns: int) -> tuple[slice, slice]:
        """The rows and columns of a block with anything in them under the mask: each has something for some rows.

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
        index = self.columns(torch.arange(gradient.shape[-1], device=gradient.device), owner)[columns]
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

    def rounds(self, pair: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The blocks of all ranks with their owners, the own one first; each is sent on while it is worked on."""
        for step in range(self.ranks):
            coming, sent = self.pass_on(pair) if step < self.ranks - 1 else (pair, None)
            yield (self.rank - step) % self.ranks, pair
            if sent is not None:
                sent.wait()
            pair = coming

    def pass_on(self, x: Tensor) -> tuple[Tensor, dist.Work]:
        """Starts to send to the next rank and to receive from the one before."""
        received = torch.empty_like(x)
        before, after = [0] * self.ranks, [0] * self.ranks
        before[(self.rank - 1) % self.ranks] = after[(self.rank + 1) % self.ranks] = x.numel()
        work = dist.all_to_all_single(received.view(-1), x.view(-1), before, after, group=self.group, async_op=True)
        assert work is not None  # this rank is in the group
        return received, work


class FlashRing(torch.autograd.Function):
    """See :func:`autopar.ops.sequence.attention_ring`. Keeps the inputs, the output and the log-sum-exp of its rows."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, work: RingWork) -> Tensor:
        pair, rows = torch.cat([key.reshape(-1), value.reshape(-1)]), query.shape[-2]
        for owner, block in work.rounds(pair):
            k, v = _views(block, key, value)
            if owner == work.rank:
                found, total, kept = flash.forward(query, k, v, work.scale, is_causal=work.is_causal)
                out, total = wide(found), total.clone()
                continue
            here, there = work.visible(owner, rows, k.shape[-2])
            found, statistic, _ = flash.forward(
                query[..., here, :], k[..., there, :], v[..., there, :], work.scale, is_causal=False
            )
            flash.merge(out[..., here, :], total[..., here], found, statistic)
        result = out.to(query.dtype)
        ctx.work = work
        ctx.save_for_backward(query, key, value, result, total, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, result, total, *kept = ctx.saved_tensors
        work: RingWork = ctx.work
        grad, rows = gradients[0], query.shape[-2]
        pair = torch.cat([key.reshape(-1), value.reshape(-1)])
        dq = torch.zeros_like(wide(query))
        dpair = torch.zeros_like(wide(pair))
        for owner, block in work.rounds(pair):
            k, v = _views(block, key, value)
            here, there = work.visible(owner, rows, k.shape[-2])
            gradient = flash.backward(
                grad[..., here, :], query[..., here, :], k[..., there, :], v[..., there, :], result[..., here, :], total[..., here],
                tuple(kept), work.scale, is_causal=work.is_causal and owner == work.rank,
            )  # fmt: skip
            dk, dv = _views(dpair, key, value)
            for target, found in zip((dq[..., here, :], dk[..., there, :], dv[..., there, :]), gradient, strict=True):
                target.add_(found)
            dpair, moved = work.pass_on(dpair)  # after the last step it is home
            moved.wait()
        dk, dv = _views(dpair, key, value)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None


spmd_types.register_local_autograd_function(FlashRing)


def _views(pair: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """K and v of what is sent, as their owner has them."""
    return pair[: key.numel()].view(key.shape), pair[key.numel() :].view(value.shape)


class Ring(torch.autograd.Function):
    """See :func:`autopar.ops.sequence.attention_ring`. Keeps the inputs, the output and a row statistic."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, work: RingWork) -> Tensor:
        ctx.work = work
        q, pair, masks = _prepared(query, key, value, mask)
        rows = q.shape[-2]
        out = q.new_zeros((*q.shape[:-1], value.shape[-1]))
        total = q.new_full((*q.shape[:-1], 1), -math.inf)
        for owner, block in work.rounds(pair):
            k, v = _unpacked(block, key, value, q.dtype)
            here, there = work.visible(owner, rows, k.shape[-2])
            scores = work.scores(q, k, masks, owner, here, there)
            largest = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).min)
            weights = (scores - largest).exp_()
            sums = weights.sum(-1, keepdim=True)
            if work.dropout_p:
                weights = weights * work.kept(weights, owner)
            found = torch.matmul(weights, v[..., there, :])
            _merge(out[..., here, :], total[..., here, :], found / sums.clamp_min(_TINY), largest + sums.log())
        result = out.reshape(*query.shape[:-1], value.shape[-1]).to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, result, total)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        work: RingWork = ctx.work
        query, key, value, mask, result, total = ctx.saved_tensors
        q, pair, masks = _prepared(query, key, value, mask)
        rows = q.shape[-2]
        grad = gradients[0].to(q.dtype).reshape(*q.shape[:-1], value.shape[-1])
        inner = (grad * result.to(q.dtype).view_as(grad)).sum(-1, keepdim=True)
        finite = torch.where(total == -math.inf, 0.0, total)
        dq, dpair = torch.zeros_like(q), torch.zeros_like(pair, dtype=q.dtype)
        dmask = torch.zeros_like(masks) if masks is not None and ctx.needs_input_grad[3] else None
        for owner, block in work.rounds(pair):
            k, v = _unpacked(block, key, value, q.dtype)
            here, there = work.visible(owner, rows, k.shape[-2])
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
            dpair, moved = work.pass_on(dpair)  # after the last step it is home
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


def _merge(out: Tensor, total: Tensor, found: Tensor, statistic: Tensor) -> None:
    """Adds normalised partial results to ``out`` in place; statistics are log-sum-exps, -inf where nothing is seen."""
    new = torch.logaddexp(total, statistic)
    safe = torch.where(new == -math.inf, 0.0, new)
    out.mul_((total - safe).exp()).add_(found * (statistic - safe).exp())
    total.copy_(new)


def _prepared(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Q by groups of heads in the dtype of the computation; k and v in one piece, as they are sent; the mask likewise."""
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
    """K and v of what was sent, with a dim for the heads that share them; views where the dtype is the same."""
    k, v = _views(pair, key, value)
    return k.to(dtype).unsqueeze(2), v.to(dtype).unsqueeze(2)

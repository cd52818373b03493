"""Fused attention on a block of keys and values, with its log-sum-exp, and the merging of blocks.

Attention over several blocks of columns is the average of that over each, weighted by the exponentials of their log-sum-exps (Liu
et al. 2023, Ring Attention, arXiv 2310.01889); the gradient of a block is what the kernel's backward gives for the output and the
log-sum-exp of all blocks (Dao et al. 2022, FlashAttention, arXiv 2205.14135, algorithm 4). No scores are kept.

Shapes: q [batch, heads, rows, width]; k and v [batch, key heads, columns, width], whose heads divide those of q; a log-sum-exp is
[batch, heads, rows] in float32, or in float64 for float64.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import spmd_types
import torch
from torch import Tensor

from autopar.ops.kernels import takes_shapes
from autopar.ops.plain import wide

Kept: TypeAlias = tuple[Tensor, ...]
"""What a kernel's backward asks for besides: the state of a generator that nothing was drawn from."""


_FIRST_MAJOR = 8
"""Of compute capability: what the flash kernel in torch takes."""

_SMALL = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
_WIDEST_ON_SMALL, _WIDEST_BUT_DROPPED = 192, 224
"""Compute capabilities whose multiprocessors have too little memory for backward of heads wider than 192, but those wider than 224
without dropout (``sdp_utils.cpp`` of torch)."""


def takes(q: Tensor, v: Tensor, *, drops: bool = False) -> bool:
    """Whether there is a fused kernel for these on their device, with dropout (on GPUs alone) or without."""
    width = q.shape[-1]
    if q.ndim != 4 or not takes_shapes(q.device.type, q.dtype, width, v.shape[-1]):
        return False
    if q.device.type == "cpu":
        return not drops
    capability = torch.cuda.get_device_capability(q.device)
    is_small = capability in _SMALL and width > _WIDEST_ON_SMALL and (width <= _WIDEST_BUT_DROPPED or drops)
    return capability[0] >= _FIRST_MAJOR and not is_small


def rows_after(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float) -> Tensor:
    """Attention of rows that are the last of the columns, on GPUs; dropout draws from torch's own generator.

    Of fewer rows than columns this kernel takes "causal" for the lower right triangle (as ``torch.nn.attention.bias`` has it call it).
    """
    _check(q, k, v, is_causal=False)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, True, False, scale=scale)[0]
    return out


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor, Kept]:
    """Output, log-sum-exp, and what backward asks for; ``is_causal``: of as many rows as columns.

    Raises:
        ValueError: the shapes are not those of one attention.
    """
    _check(q, k, v, is_causal=is_causal)
    if q.device.type == "cpu":
        out, statistic = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return out, statistic, ()
    out, statistic, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, False, scale=scale
    )
    return out, statistic, (seed, offset)


def backward(  # noqa: PLR0913  what the kernels take
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    statistic: Tensor,
    kept: Kept,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one block, from the output and the log-sum-exp of all."""
    if q.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, statistic, 0.0, is_causal, scale=scale
        )
    else:
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            statistic.contiguous(),
            None,
            None,
            q.shape[-2],
            k.shape[-2],
            0.0,
            is_causal,
            *kept,
            scale=scale,
        )
    dq, dk, dv = found
    return dq, dk, dv


def _check(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> None:
    """The kernels do not compare shapes: they would read and write memory that is not theirs."""
    (batch, heads, rows, width), (key_batch, key_heads, columns, _) = q.shape, k.shape
    fits = k.shape == v.shape and batch == key_batch and width == k.shape[-1] and not heads % max(key_heads, 1)
    if not fits or (is_causal and rows != columns):
        said = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"The shapes of queries, keys and values of one attention disagree: {said}")


def merge(out: Tensor, total: Tensor, found: Tensor, statistic: Tensor) -> None:
    """Adds the output of one more block, of the same rows, to ``out`` and ``total`` in place."""
    out.lerp_(found.to(out.dtype), torch.sigmoid(statistic - total).unsqueeze(-1))
    total.copy_(torch.logaddexp(total, statistic))


class RowsAfter(torch.autograd.Function):
    """:func:`rows_after` on CPUs: attention to all columns before the rows and, under a causal mask, to their own.

    The kernel there takes "causal" for the upper left triangle.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        ctx.scale, first = scale, key.shape[-2] - query.shape[-2]
        out, total, kept = forward(query, key[..., first:, :], value[..., first:, :], scale, is_causal=True)
        if first:
            found, statistic, _ = forward(query, key[..., :first, :], value[..., :first, :], scale, is_causal=False)
            merged, total = wide(out), total.clone()
            merge(merged, total, found, statistic)
            out = merged.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, total, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, out, total, *kept = ctx.saved_tensors
        first = key.shape[-2] - query.shape[-2]
        blocks = [(slice(first, None), True)] + ([(slice(0, first), False)] if first else [])
        dq, dk, dv = torch.zeros_like(wide(query)), torch.empty_like(key), torch.empty_like(value)
        for part, is_causal in blocks:
            there = (key[..., part, :], value[..., part, :])
            gq, dk[..., part, :], dv[..., part, :] = backward(
                gradients[0], query, *there, out, total, tuple(kept), ctx.scale, is_causal=is_causal
            )
            dq.add_(gq)
        return dq.to(query.dtype), dk, dv, None


spmd_types.register_local_autograd_function(RowsAfter)

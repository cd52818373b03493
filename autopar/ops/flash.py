"""Fused attention on a block of keys and values with its log-sum-exp, and the merge of blocks.

Attention over several blocks of columns is the average of the attention over each block, weighted by the exponentials of their
log-sum-exps (Liu et al. 2023, Ring Attention, arXiv 2310.01889). The gradient of a block is what the backward of the kernel returns for
the output and the log-sum-exp of all blocks (Dao et al. 2022, FlashAttention, arXiv 2205.14135, algorithm 4). No scores are kept.

Shapes: q [batch, heads, rows, width]; k and v [batch, key heads, columns, width], where key heads divide heads; a log-sum-exp is
[batch, heads, rows] in float32, or in float64 for float64.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from autopar.ops.kernels import takes_shapes

RngState: TypeAlias = tuple[Tensor, ...]
"""The state of a generator, which the backward of the kernels for GPUs requires, although nothing was drawn from it."""


_FIRST_MAJOR = 8
"""The smallest major compute capability that the flash kernel in torch supports."""

_SMALL = ((8, 6), (8, 7), (8, 9), (12, 0), (12, 1))
_WIDEST_ON_SMALL, _WIDEST_BUT_DROPPED = 192, 224
"""Limits of backward on the compute capabilities ``_SMALL``, whose multiprocessors have little memory (``sdp_utils.cpp`` of torch).

Heads wider than the first number are refused, except those wider than the second one without dropout.
"""


def takes(q: Tensor, v: Tensor, *, drops: bool = False) -> bool:
    """Return whether there is a fused kernel for these tensors on their device; ``drops``: they have dropout, which GPUs only take here."""
    width = q.shape[-1]
    if q.ndim != 4 or not takes_shapes(q.device.type, q.dtype, width, v.shape[-1]):
        return False
    if q.device.type == "cpu":
        return True
    capability = torch.cuda.get_device_capability(q.device)
    is_small = capability in _SMALL and width > _WIDEST_ON_SMALL and (width <= _WIDEST_BUT_DROPPED or drops)
    return capability[0] >= _FIRST_MAJOR and not is_small


def rows_after(q: Tensor, k: Tensor, v: Tensor, scale: float, dropout_p: float) -> Tensor:
    """Return the attention of queries that are the last rows of all columns, on GPUs; dropout draws from torch's default generator.

    If there are fewer rows than columns, "causal" means the lower right triangle to this kernel (``torch.nn.attention.bias`` relies on it).
    """
    _check(q, k, v, is_causal=False)
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, True, False, scale=scale)[0]
    return out


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool) -> tuple[Tensor, Tensor, RngState]:
    """Return the output, the log-sum-exp, and the state of a generator that :func:`backward` requires.

    Args:
        q, k, v: one block.
        scale: the factor on scores.
        is_causal: whether the attention is causal; there are then as many rows as columns.

    Raises:
        ValueError: the shapes are not those of one attention.
    """
    _check(q, k, v, is_causal=is_causal)
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
        return out, lse, ()
    out, lse, _, _, _, _, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, is_causal, False, scale=scale
    )
    return out, lse, (seed, offset)


def backward(  # noqa: PLR0913  what the kernels take
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    rng_state: RngState,
    scale: float,
    *,
    is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one block, from the output and the log-sum-exp of all blocks."""
    if q.device.type == "cpu":
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
    else:
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse.contiguous(),
            None,
            None,
            q.shape[-2],
            k.shape[-2],
            0.0,
            is_causal,
            *rng_state,
            scale=scale,
        )
    dq, dk, dv = gradients
    return dq, dk, dv


def _check(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> None:
    """Check shapes, which the kernels do not: they would access memory out of bounds."""
    (batch, heads, rows, width), (key_batch, key_heads, columns, _) = q.shape, k.shape
    fits = k.shape == v.shape and batch == key_batch and width == k.shape[-1] and not heads % max(key_heads, 1)
    if not fits or (is_causal and rows != columns):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"The shapes of queries, keys and values of one attention disagree: {shapes}")


def merge(out: Tensor, lse: Tensor, part: Tensor, block_lse: Tensor) -> None:
    """Merge one more block of the same rows into ``out`` and the log-sum-exp ``lse``, in place; -inf is that of a row that sees nothing."""
    # nan is the share of a row that saw nothing so far, and sees nothing in this block
    share = torch.sigmoid(block_lse - lse).nan_to_num(0.0)
    out.lerp_(part.to(out.dtype), share.unsqueeze(-1))
    lse.copy_(torch.logaddexp(lse, block_lse))

"""Operators of autopar that ask nothing of other ranks, and a rank's part of a parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import spmd_types
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part of a parameter. Its gradient is stored as it comes: pending sums stay pending.

    ``dtype``: in which it is used, where no one else casts what is at rest.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=parameter.placements)
    return parameter if dtype is None else parameter.to(dtype)


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or in float64 if it has that dtype: so that sums lose no precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Unknown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], *operands: Tensor | None) -> Tensor:
        ctx.specs = [None if x is None else (x.shape, x.dtype) for x in operands]
        assert operands[0] is not None
        return operands[0].new_empty(tuple(shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if s is None else gradients[0].new_empty(s[0], dtype=s[1]) for s in ctx.specs)


spmd_types.register_local_autograd_function(_Unknown)


def unknown(shape: Sequence[int], *operands: Tensor | None) -> Tensor:
    """What an operator gives on meta tensors whose values alone say what it does: of the shape, in the dtype of the first operand."""
    return cast("Tensor", _Unknown.apply(shape, *operands))  # type: ignore[no-untyped-call]


def linear_t(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight + bias``: x [..., in], weight [in, out], bias [out]; the result is [..., out]."""
    return F.linear(x, weight.t(), bias)


def fixed_batch_norm(  # noqa: PLR0913, PLR0917  arguments of torch's operator
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    variance: Tensor,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """``aten.batch_norm`` by statistics that are known: ``training`` is False.

    Kernels for x in half precision want weight and bias in the dtype of the statistics, which stay in that of the model.
    """
    weight, bias = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
    return torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled)


class _RealClasses(torch.autograd.Function):
    """The first ``classes`` of padded logits in a dtype: one pass each way, where a slice and a cast are two and four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
        ctx.like, ctx.classes = (logits.shape, logits.dtype), classes
        return logits[..., :classes].to(dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shape, dtype = ctx.like
        whole = grad.new_empty(shape, dtype=dtype)
        whole[..., : ctx.classes].copy_(grad)
        whole[..., ctx.classes :].zero_()
        return whole, None, None


spmd_types.register_local_autograd_function(_RealClasses)


def cross_entropy_sum(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, classes: int = 0
) -> Tensor:
    """Summed cross entropy, a scalar in fp32 or better: logits [..., classes], target [...] of class ids.

    ``classes``: how many of the logits are real, the first ones; 0: all.
    """
    if classes:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        logits = cast("Tensor", _RealClasses.apply(logits, classes, dtype))  # type: ignore[no-untyped-call]
    return F.cross_entropy(
        wide(logits).reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """Connectionist temporal classification, the loss of each sample [N]: log_probs [T, N, C], targets [N, S], lengths [N].

    Torch's kernels read memory that is not theirs where a target is no class; here the loss of such a sample is nan.
    """
    known = targets.clamp(0, log_probs.shape[-1] - 1)
    counts = torch.arange(targets.shape[-1], device=targets.device) < target_lengths.to(targets.device)[:, None]
    losses = F.ctc_loss(log_probs, known, input_lengths, target_lengths, blank, "none", zero_infinity)
    return losses.masked_fill(((known != targets) & counts).any(1), torch.nan)


def scatter_sum(index: Tensor, source: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Zeros of ``shape`` with ``source`` added where ``index`` says, along ``dim``."""
    return source.new_zeros(tuple(shape)).scatter_add(dim, index, source)

"""Operators of autopar that do not communicate, and the part of a parameter that a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import spmd_types
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError


def local(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the part of a parameter that this rank holds. Its gradient is stored as it arrives: pending sums remain pending.

    Args:
        parameter: the parameter, a DTensor or a plain tensor.
        dtype: the dtype in which it is used, if nothing else casts the parameter at rest; None does not cast.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=parameter.placements)
    return parameter if dtype is None else parameter.to(dtype)


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or in float64 if that is its dtype, so that sums lose no precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _Unknown(torch.autograd.Function):
    """An empty result on meta tensors, whose gradients are empty tensors of the shapes and dtypes of the operands."""

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
    """Return an empty tensor for an operator on meta tensors that reads values, such as indices, to do its work.

    Args:
        shape: the shape of the result.
        operands: the operands that may have a gradient; the first one has the dtype of the result.
    """
    return cast("Tensor", _Unknown.apply(shape, *operands))  # type: ignore[no-untyped-call]


def linear_t(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight + bias``: x [..., in], weight [in, out], bias [out]; the result is [..., out]."""
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
    """``aten.batch_norm`` with known statistics: ``training`` is False.

    For x in half precision the kernels require weight and bias in the dtype of the statistics, which keep the dtype of the model.
    """
    weight, bias = (None if value is None else value.to(mean.dtype) for value in (weight, bias))
    return torch.batch_norm(x, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled)


class _RealClasses(torch.autograd.Function):
    """Returns the first ``classes`` of padded logits in a dtype, in one pass each way; a slice and a cast are two and four."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: int, dtype: torch.dtype) -> Tensor:
        ctx.like, ctx.classes = (logits.shape, logits.dtype), classes
        return logits[..., :classes].to(dtype, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        shape, dtype = ctx.like
        padded = grad.new_empty(shape, dtype=dtype)
        padded[..., : ctx.classes].copy_(grad)
        padded[..., ctx.classes :].zero_()
        return padded, None, None


spmd_types.register_local_autograd_function(_RealClasses)


def cross_entropy_sum(
    logits: Tensor, target: Tensor, ignore_index: int = -100, label_smoothing: float = 0.0, classes: int = 0
) -> Tensor:
    """Return the summed cross entropy, a scalar in fp32 or better.

    Args:
        logits: [..., classes].
        target: class ids, [...].
        ignore_index: tokens with this target are not counted.
        label_smoothing: the weight of the uniform distribution.
        classes: the number of logits that are classes, the first ones; the others are padding. 0: all of them.
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
    """Return the loss of connectionist temporal classification of each sample, [N]: log_probs [T, N, C], targets [N, S], lengths [N].

    If a target is not a class, torch's kernels read memory out of bounds; here the loss of such a sample is nan.
    """
    valid_targets = targets.clamp(0, log_probs.shape[-1] - 1)
    is_counted = torch.arange(targets.shape[-1], device=targets.device) < target_lengths.to(targets.device)[:, None]
    losses = F.ctc_loss(log_probs, valid_targets, input_lengths, target_lengths, blank, "none", zero_infinity)
    return losses.masked_fill(((valid_targets != targets) & is_counted).any(1), torch.nan)


def masked_scatter_by_sample(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    """Return ``x`` with the values of each sample of ``source`` at the places where ``mask`` is true in the same sample.

    With as many places as values in every sample this is ``x.masked_scatter(mask, source)``, whichever samples a rank has.

    Args:
        x: [samples, ...].
        mask: of the shape of ``x``.
        source: [samples, ...], with fewer values than ``x`` has.

    Raises:
        UsageError: a sample has another number of places than of values. On a GPU the kernel fails instead.
    """
    values, places = source.shape[1:].numel(), mask.flatten(1).sum(1)
    try:  # it does not make the host wait for a GPU
        torch._assert_async((places == values).all(), "Give each sample as many places (image tokens) as it has values")
    except RuntimeError:
        raise UsageError(
            "A sample takes values of another sample, which data parallelism separates",
            got=f"{values} values for each sample, and {places.tolist()} places",
            fix="Give each sample as many places, such as image tokens, as its images have values",
        ) from None
    return x.masked_scatter(mask, source)


def scatter_sum(index: Tensor, source: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Return zeros of ``shape``, to which ``source`` is added along ``dim`` at the positions in ``index``."""
    return source.new_zeros(tuple(shape)).scatter_add(dim, index, source)

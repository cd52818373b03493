"""Gradient sums that FSDP does not do, the norm over a mesh, and torch's clipping where a rank has only some gradients.

What must be summed, once a step: over ``dp_replicate`` without FSDP, over the axes on which a
parameter's gradient is left pending (``Parameter.gradient_sum_axes``), and over the pipeline
stages that hold the same (tied) parameter.

``torch.nn.utils.clip_grad_norm_`` asks the ranks of a parameter's mesh for their parts. Of the parameters of other pipeline stages, and of
other ranks' experts, it knows nothing, so that each rank would scale by a norm of its own, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from autopar.errors import UsageError
from autopar.graph.graph import Padding
from autopar.plan.plan import BUCKET_BYTES

Group: TypeAlias = dist.ProcessGroup


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A parameter on this rank.

    Attributes:
        name, key: of the graph, of checkpoints.
        parameter: what users and optimizers see: a DTensor.
        leaf: what emitted code reads instead, on the same memory; None under FSDP, which lends its own.
        group: over which the gradient that backward leaves is summed.
        tie_group: over which it is summed after that: stages with the same parameter.
        copies: ranks that hold the same elements.
        replicated: the axes along which they do, stages left out.
        padding: zeros that the model's parameter does not have.
    """

    name: str
    key: str
    parameter: nn.Parameter
    leaf: nn.Parameter | None = None
    group: Group | None = None
    tie_group: Group | None = None
    copies: int = 1
    replicated: tuple[str, ...] = ()
    padding: Padding | None = None

    @property
    def gradient(self) -> Tensor | None:
        """This rank's elements of the parameter's gradient."""
        grad = self.parameter.grad
        return grad._local_tensor if isinstance(grad, DTensor) else grad


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that are summed together."""

    group: Group
    leaves: list[nn.Parameter]
    arrived: int = 0
    flat: Tensor | None = None
    work: dist.Work | None = None


class BucketedSums:
    """Sums the leaves' gradients while backward still runs, and hands them to the parameters.

    A bucket leaves as soon as the last micro-batch's gradients of all its members are there. Every
    rank of a group runs the same code, so the order of the sums is the same everywhere.
    """

    def __init__(self, held: Sequence[Held], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        own = [(h, h.leaf) for h in held if h.leaf is not None and h.leaf.requires_grad]
        self._leaves = [(leaf, h.parameter) for h, leaf in own]
        self._buckets = _fill([(leaf, h.group) for h, leaf in own if h.group is not None], bucket_bytes)
        self._expected = 0
        for bucket in self._buckets:
            for leaf in bucket.leaves:
                leaf.register_post_accumulate_grad_hook(self._hook(bucket))  # type: ignore[no-untyped-call]

    def begin(self, num_backwards: int) -> None:
        """Before the first of ``num_backwards`` backward passes, whose gradients are summed as one."""
        for leaf, _ in self._leaves:
            leaf.grad = None
        self._expected = num_backwards
        for bucket in self._buckets:
            bucket.arrived, bucket.flat, bucket.work = 0, None, None

    def finish(self) -> None:
        """After the last backward: waits for the sums; parameters have their gradients then."""
        for bucket in self._buckets:
            if bucket.work is None:
                _launch(bucket)
        for bucket in self._buckets:
            _land(bucket)
        for leaf, parameter in self._leaves:
            if leaf.grad is not None:
                if parameter.requires_grad:  # it may have been frozen since
                    hand_over(parameter, leaf.grad)
                leaf.grad = None

    def _hook(self, bucket: _Bucket) -> Callable[[Tensor], None]:
        def arrive(_: Tensor) -> None:
            bucket.arrived += 1
            if bucket.arrived == len(bucket.leaves) * self._expected:
                _launch(bucket)

        return arrive


def _fill(leaves: Sequence[tuple[nn.Parameter, Group]], bucket_bytes: int) -> list[_Bucket]:
    """Buckets by group and dtype, in the order in which backward is likely to come by."""
    done: list[_Bucket] = []
    filling: dict[tuple[Group, torch.dtype], tuple[_Bucket, int]] = {}
    for leaf, group in reversed(leaves):
        place = (group, leaf.dtype)
        bucket, size = filling.get(place, (_Bucket(group, []), 0))
        bucket.leaves.append(leaf)
        size += leaf.numel() * leaf.element_size()
        filling[place] = (bucket, size)
        if size >= bucket_bytes:
            done.append(filling.pop(place)[0])
    return done + [bucket for bucket, _ in filling.values()]


def _launch(bucket: _Bucket) -> None:
    grads = []
    for leaf in bucket.leaves:
        if leaf.grad is None:  # unused on this rank, yet the others count on its part
            leaf.grad = torch.zeros_like(leaf)
        grads.append(leaf.grad)
    bucket.flat = grads[0].view(-1) if _is_dense(grads) else torch.cat([grad.reshape(-1) for grad in grads])
    bucket.work = dist.all_reduce(bucket.flat, group=bucket.group, async_op=True)


def _is_dense(grads: Sequence[Tensor]) -> bool:
    return len(grads) == 1 and grads[0].is_contiguous()


def _land(bucket: _Bucket) -> None:
    """Gradients become views of the summed bucket: no copy back."""
    assert bucket.work is not None
    assert bucket.flat is not None
    bucket.work.wait()
    parts = torch.split(bucket.flat, [leaf.numel() for leaf in bucket.leaves])
    for leaf, part in zip(bucket.leaves, parts, strict=True):
        leaf.grad = part.view(leaf.shape)
    bucket.flat, bucket.work = None, None


def hand_over(parameter: nn.Parameter, grad: Tensor) -> None:
    """Adds a local gradient to the parameter's own."""
    if not isinstance(parameter, DTensor):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    elif isinstance(parameter.grad, DTensor):
        parameter.grad._local_tensor.add_(grad)
    else:
        parameter.grad = DTensor(grad, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def sum_in_place(held: Sequence[Held], group_of: Callable[[Held], Group | None]) -> None:
    """Sums the parameters' gradients over each one's group; one all-reduce for each group and dtype.

    By name: two stages may hold what they share in another order, and all ranks must send the same gradient in the
    same place and meet group after group.
    """
    buckets: dict[tuple[Group, torch.dtype], list[Tensor]] = {}
    for h in sorted(held, key=lambda h: h.name):
        group, grad = group_of(h), h.gradient
        if group is not None and h.parameter.requires_grad:
            if grad is None:
                hand_over(h.parameter, torch.zeros_like(local_part(h.parameter)))
                grad = h.gradient
            assert grad is not None
            buckets.setdefault((group, grad.dtype), []).append(grad)
    for (group, _), grads in buckets.items():
        if _is_dense(grads):
            dist.all_reduce(grads[0], group=group)
            continue
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view(g.shape) for part, g in zip(parts, grads, strict=True)])


def local_part(tensor: Tensor) -> Tensor:
    """This rank's elements of a tensor, without gradient."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


@dataclass(slots=True)
class Norm:
    """The 2-norm of all gradients of the model, each element counted once.

    Every rank adds the squares of what it holds, divided by the number of ranks that hold the same.
    """

    held: Sequence[Held]
    group: Group | None
    device: torch.device
    dtype: torch.dtype = torch.float32

    def __call__(self) -> Tensor:
        """The norm, a scalar in fp32, or in fp64 where parameters are, the same on every rank; all ranks call it."""
        by_copies: dict[int, list[Tensor]] = {}
        for h in self.held:
            if (grad := h.gradient) is not None:
                by_copies.setdefault(h.copies, []).append(grad)
        square = torch.zeros((), device=self.device, dtype=self.dtype)
        for copies, grads in by_copies.items():
            # one by one: a tensor of weights would be made on the host, which then waits for the device
            norms = torch.stack([n.to(self.dtype) for n in torch._foreach_norm(grads)])
            square += norms.square().sum() / copies
        if self.group is not None:
            dist.all_reduce(square, group=self.group)
        return square.sqrt()


def lengthened(value: Tensor, dim: int, length: int) -> Tensor:
    """``value`` with zeros behind it along ``dim``."""
    missing = list(value.shape)
    missing[dim] = length - value.shape[dim]
    return torch.cat([value, value.new_zeros(missing)], dim) if missing[dim] else value


def clip(held: Sequence[Held], norm: Tensor, max_norm: float) -> None:
    """Scales all gradients so that their norm is at most ``max_norm``; as ``torch.nn.utils`` does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [grad for h in held if (grad := h.gradient) is not None]
    if grads:
        torch._foreach_mul_(grads, scale)


_MARK = "is_of_some_ranks"
_NAME = "_clip_grads_with_norm_"
_scale = getattr(clip_grad, _NAME)


def refuse_clipping(parameters: Iterable[Tensor]) -> None:
    """Torch's function raises an error from now on where it is given one of these, whatever name it was imported by."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)
    setattr(clip_grad, _NAME, _checked)


def _checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
    """In place of torch's, which scales gradients once their norm is known."""
    if not isinstance(parameters, Tensor) and any(hasattr(p, _MARK) for p in parameters):
        raise UsageError(
            "A norm by torch.nn.utils.clip_grad_norm_ would be that of this rank's pipeline stages or experts alone",
            fix="Call par.clip_grad_norm_(max_norm), which returns the norm of all parameters",
        )
    _scale(parameters, *args, **kwargs)

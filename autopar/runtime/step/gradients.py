"""Gradient sums that FSDP does not do, the norm of all gradients, and a check of torch's clipping.

Once a step gradients are summed over ``dp_replicate`` without FSDP, over the axes on which the gradient of a parameter is left as a pending
sum (``Parameter.gradient_sum_axes``), and over the pipeline stages that hold the same (tied) parameter.

``torch.nn.utils.clip_grad_norm_`` reduces over the mesh of each parameter. It misses the parameters of other pipeline stages and the
experts of other ranks, so each rank would silently scale by a different norm.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad

from autopar.errors import UsageError
from autopar.graph.graph import Padding
from autopar.graph.operator_kinds import RegionGradients
from autopar.ops.opaque import Holder
from autopar.plan.plan import BUCKET_BYTES
from autopar.runtime.job import FAKE

Group: TypeAlias = dist.ProcessGroup


@dataclass(slots=True, kw_only=True, eq=False)
class RankParameter:
    """A parameter on this rank.

    Attributes:
        name, key: its name in the graph, and in checkpoints.
        parameter: the DTensor that users and optimizers see.
        leaf: the tensor on the same memory that emitted code reads instead; None under FSDP, which passes its own.
        group: the group over which the gradient that backward leaves is summed.
        tie_group: the group over which it is summed after that: stages with the same parameter.
        copies, copy: number of ranks that hold the same elements, and which of these this one is.
        replicated: mesh axes along which ranks hold the same elements, stages left out.
        padding: the zeros by which the plan has lengthened the model's parameter.
    """

    name: str
    key: str
    parameter: nn.Parameter
    leaf: nn.Parameter | None = None
    group: Group | None = None
    tie_group: Group | None = None
    copies: int = 1
    copy: int = 0
    replicated: tuple[str, ...] = ()
    padding: Padding | None = None

    @property
    def is_sent(self) -> bool:
        """Whether this rank is the one that writes or sends these elements: copies take turns by the parameter's key."""
        return crc32(self.key.encode()) % self.copies == self.copy

    @property
    def gradient(self) -> Tensor | None:
        """This rank's elements of the parameter's gradient."""
        grad = self.parameter.grad
        return grad._local_tensor if isinstance(grad, DTensor) else grad


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that are summed in one collective.

    Attributes:
        arrived: number of gradients that backward has left so far, over all micro-batches.
        under_way: the gradients, flattened, while they are summed, and what to wait for.
    """

    group: Group
    leaves: list[nn.Parameter]
    arrived: int = 0
    under_way: tuple[Tensor, dist.Work] | None = None


class BucketedSums:
    """Sums the gradients of leaves while backward still runs, and hands them to the parameters.

    A bucket is reduced as soon as backward of the last micro-batch has left the gradients of all its members. Every rank of a group runs
    the same code, so the sums have the same order everywhere.
    """

    def __init__(self, held: Sequence[RankParameter], *, bucket_bytes: int = BUCKET_BYTES) -> None:
        leaves = [(h, h.leaf) for h in held if h.leaf is not None and h.leaf.requires_grad]
        self._leaves = [(leaf, h.parameter) for h, leaf in leaves]
        self._buckets = _fill([(leaf, h.group) for h, leaf in leaves if h.group is not None], bucket_bytes)
        self._expected = 0
        for number, bucket in enumerate(self._buckets):
            for leaf in bucket.leaves:
                leaf.register_post_accumulate_grad_hook(self._hook(number))  # type: ignore[no-untyped-call]

    def begin(self, num_backwards: int) -> None:
        """Prepare for ``num_backwards`` backward passes, whose gradients are summed together."""
        for leaf, _ in self._leaves:
            leaf.grad = None
        self._expected = num_backwards
        for bucket in self._buckets:
            bucket.arrived, bucket.under_way = 0, None

    def finish(self) -> None:
        """Wait for the sums after the last backward, and give them to the parameters."""
        for bucket in self._buckets:
            if bucket.under_way is None:
                _launch(bucket)
        for bucket in self._buckets:
            _wait_for(bucket)
        for leaf, parameter in self._leaves:
            if leaf.grad is not None:
                if parameter.requires_grad:  # it may have been frozen since
                    hand_over(parameter, leaf.grad)
                leaf.grad = None

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        """Return the hook of the leaves of one bucket. It does not hold them: Python's collector does not see what torch's hooks hold."""
        sums = weakref.ref(self)

        def arrive(_: Tensor) -> None:
            if (own := sums()) is not None:
                own._arrive(own._buckets[number])

        return arrive

    def _arrive(self, bucket: _Bucket) -> None:
        bucket.arrived += 1
        if bucket.arrived == len(bucket.leaves) * self._expected:
            _launch(bucket)


def _fill(leaves: Sequence[tuple[nn.Parameter, Group]], bucket_bytes: int) -> list[_Bucket]:
    """Buckets by group and dtype, in the reverse order of the leaves, in which backward is likely to reach them."""
    full: list[_Bucket] = []
    open_buckets: dict[tuple[Group, torch.dtype], tuple[_Bucket, int]] = {}
    for leaf, group in reversed(leaves):
        key = (group, leaf.dtype)
        bucket, size = open_buckets.get(key, (_Bucket(group, []), 0))
        bucket.leaves.append(leaf)
        size += leaf.numel() * leaf.element_size()
        open_buckets[key] = (bucket, size)
        if size >= bucket_bytes:
            full.append(open_buckets.pop(key)[0])
    return full + [bucket for bucket, _ in open_buckets.values()]


def _launch(bucket: _Bucket) -> None:
    grads = []
    for leaf in bucket.leaves:
        if leaf.grad is None:  # unused on this rank, but the collective needs its part
            leaf.grad = torch.zeros_like(leaf)
        grads.append(leaf.grad)
    flat = grads[0].view(-1) if _fills_its_memory(grads) else torch.cat([grad.reshape(-1) for grad in grads])
    bucket.under_way = flat, dist.all_reduce(flat, group=bucket.group, async_op=True)


def _fills_its_memory(grads: Sequence[Tensor]) -> bool:
    """Return whether this is one gradient that fills memory of its own, which may be summed in place.

    What else is on that memory may not be a gradient yet: backwards of two views of one shape leave both on what their sum has passed back.
    """
    if len(grads) != 1 or not grads[0].is_contiguous():
        return False
    memory = grads[0].untyped_storage()
    is_shared = torch._C._storage_Use_Count(memory._cdata) > 2  # by others than this gradient and ``memory``
    return memory.nbytes() == grads[0].nbytes and not is_shared


def _wait_for(bucket: _Bucket) -> None:
    """Wait for the sum; the gradients become views of the bucket, without a copy."""
    assert bucket.under_way is not None
    flat, work = bucket.under_way
    work.wait()
    parts = torch.split(flat, [leaf.numel() for leaf in bucket.leaves])
    for leaf, part in zip(bucket.leaves, parts, strict=True):
        leaf.grad = part.view(leaf.shape)
    bucket.under_way = None


def hand_over(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add a local gradient to the gradient of the parameter."""
    if not isinstance(parameter, DTensor):
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad
    elif isinstance(parameter.grad, DTensor):
        parameter.grad._local_tensor.add_(grad)
    else:
        parameter.grad = DTensor(grad, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def sum_in_place(held: Sequence[RankParameter], group_of: Callable[[RankParameter], Group | None]) -> None:
    """Sum the gradients of parameters over the group of each, by one all-reduce for each group and dtype.

    Parameters are sorted by name, as two stages may hold shared parameters in different order: all ranks must send the same gradient at the
    same place, and enter the groups in the same order.
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
        if _fills_its_memory(grads):
            dist.all_reduce(grads[0], group=group)
            continue
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [grad.numel() for grad in grads])
        torch._foreach_copy_(grads, [part.view(g.shape) for part, g in zip(parts, grads, strict=True)])


def unshare_gradients(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Give gradients that share memory memory of their own, before others are added to them or a norm scales them.

    Autograd keeps the first gradient of a parameter without a copy unless others hold the same tensor. It does not see who holds what a DTensor
    wraps, nor other views: ``torch.cat([a, b]) + c`` passes one tensor back to all three, which ``c.view(...)`` hides in torch itself. FSDP's
    gradients are parts of one tensor that do not overlap; they stay.

    Returns:
        The parameters that have no gradient yet. After a later backward of the step these alone need another look: to the gradients of the
        others it only adds.
    """
    without, spans = list[nn.Parameter](), list[tuple[tuple[int, int], nn.Parameter, Tensor]]()
    for parameter in parameters:
        if (grad := parameter.grad) is not None:
            spans.append((_span(grad), parameter, grad))
        elif parameter.requires_grad:
            without.append(parameter)
    end = 0
    for (start, stop), parameter, grad in sorted(spans, key=lambda one: one[0]):
        if start < end:
            parameter.grad = grad.clone()
        else:
            end = stop
    return without


class Branches:
    """Takes the gradients off those parameters that regions have given none in a step on any rank, as a branch was not taken.

    Each rank gets zeros for what the code of a region does not use (:mod:`autopar.ops.opaque`), so that all sum the same gradients. On one
    device such a parameter has no gradient: an optimizer leaves it, where zeros would have it decay and move by its momentum.

    Args:
        stages: the stages of this rank.
        held: its parameters.
        gradients: what regions of the whole model bring, the same on all ranks.
        group: all ranks, on the host; None if there is one.
    """

    def __init__(
        self,
        stages: Iterable[nn.Module],
        held: Iterable[RankParameter],
        gradients: RegionGradients,
        group: Group | None,
    ) -> None:
        self._regions = [module for stage in stages for module in stage.modules() if isinstance(module, Holder)]
        self._gradients, self._passed = gradients, gradients.passed
        self._group = None if group is None or dist.get_backend(group) == FAKE else group
        self._held = [h for h in held if h.name in gradients.parameters]
        self._without: list[RankParameter] = []  # those that had no gradient before the step

    def begin(self) -> None:
        """Begin a step."""
        self._without = [h for h in self._held if h.parameter.grad is None]
        for region in self._regions:
            region.reached.clear()

    def finish(self) -> None:
        """End a step whose gradients are summed. All ranks call this."""
        if not self._gradients.parameters:
            return
        noted = {(region.op, place) for region in self._regions for place in region.reached}
        if self._group is not None:
            is_noted = torch.tensor([passed in noted for passed in self._passed], dtype=torch.int32)
            dist.all_reduce(is_noted, dist.ReduceOp.MAX, self._group)
            noted = {passed for passed, is_one in zip(self._passed, is_noted.tolist(), strict=True) if is_one}
        unreached = self._gradients.unreached(noted)
        for held in self._without:
            if held.name in unreached:
                held.parameter.grad = None


def _span(grad: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a gradient and of the one after its last."""
    local = grad._local_tensor if isinstance(grad, DTensor) else grad
    start = local.data_ptr()
    if local.is_contiguous():
        return start, start + local.nbytes
    last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
    return start, start + (last + 1) * local.element_size()


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's elements of a tensor, without gradient."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()


@dataclass(slots=True)
class Norm:
    """The 2-norm of all gradients of the model, each element counted once.

    Every rank adds the squares of its elements, divided by the number of ranks that hold the same ones.
    """

    held: Sequence[RankParameter]
    group: Group | None
    device: torch.device
    dtype: torch.dtype = torch.float32

    def __call__(self) -> Tensor:
        """Return the norm, a scalar in fp32 (fp64 if parameters are in fp64), the same on every rank; all ranks call it."""
        by_copies: dict[int, list[Tensor]] = {}
        for h in self.held:
            if (grad := h.gradient) is not None:
                by_copies.setdefault(h.copies, []).append(grad)
        square = torch.zeros((), device=self.device, dtype=self.dtype)
        for copies, grads in by_copies.items():
            # group by group: a tensor of weights would come from the host, which then waits for the device
            norms = torch.stack([n.to(self.dtype) for n in torch._foreach_norm(grads)])
            square += norms.square().sum() / copies
        if self.group is not None:
            dist.all_reduce(square, group=self.group)
        return square.sqrt()


def lengthened(value: Tensor, dim: int, length: int) -> Tensor:
    """``value`` with zeros appended along ``dim``, up to ``length``."""
    missing = list(value.shape)
    missing[dim] = length - value.shape[dim]
    return torch.cat([value, value.new_zeros(missing)], dim) if missing[dim] else value


def clip(held: Sequence[RankParameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most ``max_norm``, as ``torch.nn.utils`` does."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    grads = [grad for h in held if (grad := h.gradient) is not None]
    if grads:
        torch._foreach_mul_(grads, scale)


_MARK = "is_of_some_ranks"
_NAME = "_clip_grads_with_norm_"
_scale = getattr(clip_grad, _NAME)


def refuse_clipping(parameters: Iterable[Tensor]) -> None:
    """Make torch's clipping raise an error if it is given one of these parameters, under whatever name it was imported."""
    for parameter in parameters:
        setattr(parameter, _MARK, True)
    setattr(clip_grad, _NAME, _scale_or_refuse)


def _scale_or_refuse(parameters: Any, *args: Any, **kwargs: Any) -> None:
    """Replace torch's private function that scales gradients once their norm is known."""
    if not isinstance(parameters, Tensor) and any(hasattr(p, _MARK) for p in parameters):
        raise UsageError(
            "A norm by torch.nn.utils.clip_grad_norm_ would be that of this rank's pipeline stages or experts alone",
            fix="Call par.clip_grad_norm_(max_norm), which returns the norm of all parameters",
        )
    _scale(parameters, *args, **kwargs)

"""What emitted code calls: typed collectives over a mesh axis by name, and a few functions of our own.

The collectives are those of ``spmd-types``: each is a pair of a forward and the backward that the
types ask for (see layout.py). An axis is a name, looked up in the mesh that
``spmd_types.set_current_mesh(device_mesh)`` set on the calling thread; the process group is found
in the forward pass, so that backward runs on any thread. Whoever recomputes a block in backward
sets the mesh again around it. Tensors without gradient, integers and booleans pass as well.

Shapes: collectives keep every dim except the one they name; x is one rank's tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib import import_module
from threading import Lock
from typing import Any, cast

import spmd_types
import torch
import torch.distributed as dist
import torch.nn.functional as F
from spmd_types import _state
from spmd_types._mesh import _pg_for_axis  # the only look-up of a name's group in spmd-types 0.3
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.errors import RuleError

Salt = int | tuple[int, ...]
"""Tells the random operators of a program apart."""

_HOMES = (
    "autopar.ops.collectives",
    "autopar.ops.sharded",
    "autopar.ops.experts",
    "autopar.ops.sequence",
    "autopar.ops.opaque",
)
_MASK64 = (1 << 64) - 1


@cache
def resolve(target: str) -> Callable[..., Any]:
    """The function that a graph's target names: ``aten.linear.default`` or ``autopar.NAME``.

    Raises:
        RuleError: nothing of that name exists in this torch or this autopar.
    """
    namespace, _, rest = target.partition(".")
    found: Any = None
    if namespace == "autopar":
        homes = (import_module(home) for home in _HOMES if home == __name__ or _exists(home))
        found = next((getattr(home, rest) for home in homes if hasattr(home, rest)), None)
    elif rest:
        found = getattr(torch.ops, namespace)
        for part in rest.split("."):
            found = getattr(found, part, None)
    if target == "aten.view.default":  # a graph's view has no strides to keep: it copies where it must
        return cast("Callable[..., Any]", torch.ops.aten.reshape.default)
    if found is None:
        raise RuleError("every operator of a graph exists in torch or in autopar", value=target)
    return cast("Callable[..., Any]", found)


def _exists(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


# --- collectives ---------------------------------------------------------------------------------


class _ContiguousGradient(torch.autograd.Function):
    """Identity; its gradient is laid out densely, which collectives ask of what they send."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


spmd_types.register_local_autograd_function(_ContiguousGradient)


@contextmanager
def on_meshes(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """Sets the meshes whose axes emitted code names: the job's mesh last, before it other ways to cut the same ranks."""
    with ExitStack() as stack:
        for mesh in meshes:
            stack.enter_context(spmd_types.set_current_mesh(mesh))
        yield


def group(axis: str) -> dist.ProcessGroup:
    """This rank's process group on an axis of the current mesh; axes of experts are those of a mesh set before it.

    Raises:
        RuntimeError: no mesh is set on this thread, or it has no such axis.
    """
    if axis in ("ep", "ep_data"):
        for entry in reversed(getattr(_state._tls, "mesh_stack", [])):
            if axis in entry.all_names:
                return cast("dist.ProcessGroup", entry.pgs[entry.all_names[axis]])
    return cast("dist.ProcessGroup", _pg_for_axis(axis))


def all_reduce(x: Tensor, axis: str, to: str) -> Tensor:
    """P to ``to`` (``I`` or ``R``): the sum over the axis. Backward: nothing for I, an all-reduce for R."""
    y: Tensor = spmd_types.all_reduce(
        _dense(x), group(axis), src=spmd_types.P, dst=_TYPES[to], backward_options=_backward(x)
    )
    return _dense_gradient(y) if to == "R" else y


def all_gather(x: Tensor, axis: str, dim: int, to: str) -> Tensor:
    """S(dim) to ``to`` (``I`` or ``R``): all parts. Backward: the own slice for I, a reduce-scatter for R."""
    flat = x.view(torch.uint8) if x.dtype == torch.bool else x
    y: Tensor = spmd_types.all_gather(
        flat, group(axis), src=spmd_types.S(dim), dst=_TYPES[to], backward_options=_backward(x)
    )
    return y.view(torch.bool) if x.dtype == torch.bool else y


def reduce_scatter(x: Tensor, axis: str, dim: int) -> Tensor:
    """P to S(dim): this rank's part of the sum. Backward: an all-gather."""
    y: Tensor = spmd_types.reduce_scatter(
        x, group(axis), src=spmd_types.P, dst=spmd_types.S(dim), backward_options=_backward(x)
    )
    return y


def all_to_all(x: Tensor, axis: str, split_dim: int, gathered_dim: int) -> Tensor:
    """S(gathered_dim) to S(split_dim). Backward: the reverse."""
    pg = group(axis)
    if dist.get_backend(pg) == "gloo" and torch.__version__ < "2.13":  # gloo had no all-to-all of lists before
        return shard(all_gather(x, axis, gathered_dim, "R"), axis, split_dim, "R")
    y: Tensor = spmd_types.all_to_all(
        x,
        pg,
        src=spmd_types.S(gathered_dim),
        dst=spmd_types.S(split_dim),
        backward_options=_backward(x),
    )
    return y


def shard(x: Tensor, axis: str, dim: int, source: str) -> Tensor:
    """``source`` (``I`` or ``R``) to S(dim): the own slice. Backward: an all-gather for I, zeros around it for R."""
    pg = group(axis)
    size = dist.get_world_size(pg)
    if x.shape[dim] % size:
        raise RuleError("a split dim divides by the axis", value=f"{x.shape[dim]} over {axis}={size}")
    y: Tensor = spmd_types.shard(x, pg, src=_TYPES[source], dst=spmd_types.S(dim), backward_options=_backward(x))
    return y


def keep_on_first(x: Tensor, axis: str, source: str) -> Tensor:
    """``source`` (``I`` or ``R``) to P: the tensor on the axis' first rank, zeros on the others."""
    y: Tensor = spmd_types.convert(
        x, group(axis), src=_TYPES[source], dst=spmd_types.P, expert_mode=True, backward_options=_backward(x)
    )
    return y


def invariant_to_replicate(x: Tensor, axis: str) -> Tensor:
    """I to R: the same tensor. Backward: an all-reduce of the pending sum."""
    return _dense_gradient(spmd_types.invariant_to_replicate(x, group(axis), backward_options=_backward(x)))


_TYPES = {"I": spmd_types.I, "R": spmd_types.R}


def _backward(x: Tensor) -> dict[str, torch.dtype] | None:
    """Gradients are summed in the dtype in which they arrive; spmd-types wants that said."""
    return {"op_dtype": x.dtype} if x.requires_grad else None


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _dense_gradient(x: Tensor) -> Tensor:
    return cast("Tensor", _ContiguousGradient.apply(x)) if x.requires_grad else x  # type: ignore[no-untyped-call]


# --- parameters ----------------------------------------------------------------------------------


def local(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """This rank's part of a parameter. Its gradient is stored as it comes: pending sums stay pending.

    ``dtype``: in which it is used, where no one else casts what is at rest.
    """
    if isinstance(parameter, DTensor):
        parameter = parameter.to_local(grad_placements=parameter.placements)
    return parameter if dtype is None else parameter.to(dtype)


# --- operators of autopar on one device ----------------------------------------------------------


def linear_t(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight + bias``: x [..., in], weight [in, out], bias [out]; the result is [..., out]."""
    return F.linear(x, weight.t(), bias)


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
    wide = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    if classes:
        logits = cast("Tensor", _RealClasses.apply(logits, classes, wide))  # type: ignore[no-untyped-call]
    return F.cross_entropy(
        logits.to(wide).reshape(-1, logits.shape[-1]),
        target.reshape(-1),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="sum",
    )


def scatter_sum(index: Tensor, source: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    """Zeros of ``shape`` with ``source`` added where ``index`` says, along ``dim``."""
    return source.new_zeros(tuple(shape)).scatter_add(dim, index, source)


# --- random operators ----------------------------------------------------------------------------


def dropout(x: Tensor, p: float, salt: Salt = 0, seed: int = 0, axes: Sequence[str] = ()) -> Tensor:
    """Zeroes elements with probability ``p`` and scales the rest by 1 / (1 - p).

    The random stream is a function of ``seed`` (of a step and micro-batch), ``salt`` (of the
    operator) and this rank's coordinate on ``axes`` (those on which ``x`` is split): ranks that
    hold the same data drop the same elements, shards differ, and a recomputation repeats itself.
    """
    if p == 0.0:
        return x
    x = x.contiguous()  # numbers are drawn in memory order
    with drawing(x.device, salt, seed, axes):
        return torch.native_dropout(x, p, True)[0]


def attention(  # noqa: PLR0913  the signature of scaled_dot_product_attention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    salt: Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
) -> Tensor:
    """``scaled_dot_product_attention`` whose dropout draws from the stream that :func:`dropout` describes."""
    with drawing(query.device, salt, seed, axes) if dropout_p else nullcontext():
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def draw(
    target: str,
    *args: object,
    salt: Salt = 0,
    seed: int = 0,
    axes: Sequence[str] = (),
    device: torch.device | None = None,
    **kwargs: object,
) -> Any:
    """Calls a random operator of torch by name on the stream that :func:`dropout` describes.

    Args:
        device: where an operator without a tensor makes its result; None: it has tensors.
    """
    where = device or next(x.device for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
    args = tuple(x.contiguous() if isinstance(x, Tensor) else x for x in args)  # numbers are drawn in memory order
    named = kwargs if device is None else {**kwargs, "device": device}
    with drawing(where, salt, seed, axes):
        return resolve(target)(*args, **named)


_DEFAULT_GENERATOR = Lock()
"""Held by who seeds torch's own generators, which all threads share."""


@contextmanager
def drawing(device: torch.device, salt: Salt, seed: int, axes: Sequence[str]) -> Iterator[None]:
    """Around one operator that draws from torch's own generator of ``device``: see :func:`seeded`; other threads wait."""
    with _DEFAULT_GENERATOR, seeded((device,), salt, seed, axes):
        yield


@contextmanager
def seeded(devices: Sequence[torch.device], salt: Salt, seed: int, axes: Sequence[str]) -> Iterator[None]:
    """Torch's own generators of ``devices`` are on the stream that :func:`dropout` describes, and then as they were.

    No other device's generator is touched. States lie in host memory: nothing waits for a device.
    """
    kept = []
    for device in devices:
        if device.type == "meta":
            continue
        generator = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
        kept.append((generator, generator.get_state()))
        generator.manual_seed(stream_seed(salt, seed, axes))
    try:
        yield
    finally:
        for generator, state in kept:
            generator.set_state(state)


def stream_seed(salt: Salt, seed: int, axes: Sequence[str]) -> int:
    """A seed in [0, 2**63) that differs, as good as surely, for different arguments and coordinates."""
    words = (seed, *((salt,) if isinstance(salt, int) else salt), *(dist.get_rank(group(a)) for a in axes))
    state = 0x9E3779B97F4A7C15
    for word in words:  # splitmix64's finaliser, once for each word
        state = (state + (word & _MASK64) * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state >> 1

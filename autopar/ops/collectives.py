"""Typed collectives over a mesh axis, which is given by name: the functions that emitted code calls most.

The collectives are those of ``spmd-types``: each is a pair of a forward and the backward that its types require
(:mod:`autopar.plan.mesh`). The name of an axis is looked up in the mesh that ``spmd_types.set_current_mesh(device_mesh)`` set on the
calling thread. The process group is found in forward, so that backward may run on any thread. Code that recomputes a block in backward
must set the mesh again around it. Tensors without gradient, integers and booleans are accepted as well.

Shapes: x is the tensor of one rank; a collective keeps every dim except the one that it names.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import spmd_types
import torch
import torch.distributed as dist
from spmd_types import _state
from spmd_types._mesh import _pg_for_axis  # the only look-up of a name's group in spmd-types 0.3
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from autopar.errors import InternalError


class _ContiguousGradient(torch.autograd.Function):
    """The identity. Its gradient is made contiguous, as collectives require of what they send."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


spmd_types.register_local_autograd_function(_ContiguousGradient)


@contextmanager
def on_meshes(meshes: Sequence[DeviceMesh]) -> Iterator[None]:
    """Set the meshes whose axes emitted code names.

    Args:
        meshes: the mesh of the job is the last one; the others divide the same ranks in other ways.
    """
    with ExitStack() as stack:
        for mesh in meshes:
            stack.enter_context(spmd_types.set_current_mesh(mesh))
        yield


def group(axis: str) -> dist.ProcessGroup:
    """Return the process group of this rank on an axis of the current mesh. Axes of experts are found in a mesh that was set before it.

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
        x.contiguous(), group(axis), src=spmd_types.P, dst=_TYPES[to], backward_options=_backward(x)
    )
    return _dense_gradient(y) if to == "R" else y


def all_gather(x: Tensor, axis: str, dim: int, to: str) -> Tensor:
    """S(dim) to ``to`` (``I`` or ``R``): all parts. Backward: the slice of this rank for I, a reduce-scatter for R."""
    flat = x.view(torch.uint8) if x.dtype == torch.bool else x
    y: Tensor = spmd_types.all_gather(
        flat, group(axis), src=spmd_types.S(dim), dst=_TYPES[to], backward_options=_backward(x)
    )
    return y.view(torch.bool) if x.dtype == torch.bool else y


def reduce_scatter(x: Tensor, axis: str, dim: int) -> Tensor:
    """P to S(dim): the part of this rank of the sum. Backward: an all-gather."""
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
    """``source`` (``I`` or ``R``) to S(dim): the slice of this rank. Backward: an all-gather for I, the slice among zeros for R.

    Raises:
        InternalError: the number of ranks does not divide the dim.
    """
    pg = group(axis)
    size = dist.get_world_size(pg)
    if x.shape[dim] % size:
        raise InternalError(f"A dim of {x.shape[dim]} does not divide by {axis}={size}")
    y: Tensor = spmd_types.shard(x, pg, src=_TYPES[source], dst=spmd_types.S(dim), backward_options=_backward(x))
    return y


def keep_on_first(x: Tensor, axis: str, source: str) -> Tensor:
    """``source`` (``I`` or ``R``) to P: the tensor on the first rank of the axis, zeros on the others."""
    y: Tensor = spmd_types.convert(
        x, group(axis), src=_TYPES[source], dst=spmd_types.P, expert_mode=True, backward_options=_backward(x)
    )
    return y


def invariant_to_replicate(x: Tensor, axis: str) -> Tensor:
    """I to R: the same tensor. Backward: an all-reduce of the pending sum."""
    return _dense_gradient(spmd_types.invariant_to_replicate(x, group(axis), backward_options=_backward(x)))


_TYPES = {"I": spmd_types.I, "R": spmd_types.R}


def _backward(x: Tensor) -> dict[str, torch.dtype] | None:
    """Return the options of a backward that sums gradients in the dtype in which they arrive; spmd-types requires a dtype."""
    return {"op_dtype": x.dtype} if x.requires_grad else None


def _dense_gradient(x: Tensor) -> Tensor:
    """Return ``x`` with a contiguous gradient, if it has one."""
    return cast("Tensor", _ContiguousGradient.apply(x)) if x.requires_grad else x  # type: ignore[no-untyped-call]

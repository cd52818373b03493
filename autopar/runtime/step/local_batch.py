"""One rank's samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.errors import UsageError
from autopar.graph.graph import Input
from autopar.plan.plan import Plan
from autopar.runtime.step.runner import Batch
from autopar.tracing.batch import named_inputs


def local_batch(
    batch: Batch, inputs: Sequence[Input], plan: Plan, data_rank: int, device: torch.device
) -> dict[str, Tensor]:
    """What the data rank takes of a batch, on its device, in the dtypes of ``inputs``; the batch may hold its samples alone.

    Page-locked memory is read after this returns; what lies on the device already in the dtype is taken as it is, not copied.

    Raises:
        UsageError: the batch is no mapping, has other inputs, shapes or sizes than the plan, or inputs that need gradients
            where these are on.
    """
    expected = [leaf.name for leaf in inputs]
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"a batch has its inputs by name ({', '.join(expected)})",
            value=type(batch).__name__,
            remedy=f"give a dict: {{{', '.join(f'{name!r}: ...' for name in expected[:3])}}}",
        )
    batch = named_inputs(batch)
    if set(batch) != set(expected):
        unknown = [name for name in batch if name not in expected]
        raise UsageError(
            f"the batch has the inputs that the model was traced with ({', '.join(expected)})",
            value=", ".join(batch) or "none",
            remedy=f"leave out {', '.join(unknown)}: what was no tensor in the example inputs is a constant of the plan"
            if unknown and not any(isinstance(batch[name], Tensor) for name in unknown)
            else "",
        )
    whole, own = plan.global_batch_size, plan.samples_of(data_rank)
    part = len(own)
    local: dict[str, Tensor] = {}
    for leaf in inputs:
        value, dim = _without_history(batch[leaf.name], leaf.name), leaf.batch_dim
        rest = [size for d, size in enumerate(value.shape) if d != dim]
        if rest != [size for d, size in enumerate(leaf.spec.shape) if d != dim]:
            raise UsageError(
                "inputs have the shape that the plan was made for, the number of samples aside",
                value=tuple(value.shape),
                place=leaf.name,
                remedy=f"pad to {leaf.spec.shape} or search a plan for the new shape",
            )
        if dim is not None:
            if value.shape[dim] not in (whole, part):
                raise UsageError(
                    f"a batch has {whole} samples (the global batch) or {part} (this rank's)",
                    value=value.shape[dim],
                    place=leaf.name,
                )
            if value.shape[dim] != part:
                value = value.narrow(dim, own.start, part)
        local[leaf.name] = value.to(device, _dtype_for(leaf, value.dtype), non_blocking=True)
    return local


def _dtype_for(leaf: Input, given: torch.dtype) -> torch.dtype:
    """The plan's dtype, where a batch has floating numbers for floating ones, or integers that fit for integers.

    Raises:
        UsageError: it has others: the plan has what forward did with the dtype of the example.
    """
    wanted = leaf.spec.dtype
    is_floating = given.is_floating_point and wanted.is_floating_point
    fits = _is_integer(given) and _is_integer(wanted) and torch.promote_types(given, wanted) == wanted
    if not (given == wanted or is_floating or fits):
        raise UsageError(
            f"an input has the dtype of the example inputs ({_name(wanted)})",
            value=_name(given),
            place=leaf.name,
            remedy=f"cast it, or give example inputs with {_name(given)}",
        )
    return wanted


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _without_history(value: object, name: str) -> Tensor:
    """An input as a step takes it.

    Raises:
        UsageError: it is no tensor, or needs a gradient: each rank would leave that of its own samples alone.
    """
    if not isinstance(value, Tensor):
        raise UsageError(
            "what was a tensor in the example inputs is one in a batch", value=type(value).__name__, place=name
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "gradients of a step go to the parameters of the model, not through its inputs",
            value="an input with requires_grad",
            place=name,
            remedy="detach() it, or make what computes it a part of the model that is given to autopar.parallelize",
        )
    # autograd may not keep what inference mode has made; a copy it may
    return value.clone() if value.is_inference() and not torch.is_inference_mode_enabled() else value

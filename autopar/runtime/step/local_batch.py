"""One rank's samples of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from autopar.errors import UsageError
from autopar.graph.graph import Input
from autopar.plan.plan import Plan
from autopar.runtime.step.partial_batch import PartialBatch
from autopar.runtime.step.runner import Batch
from autopar.tracing.batch import named_inputs


def num_samples(batch: object, inputs: Sequence[Input]) -> int | None:
    """Samples of a batch; None where inputs have none, or differ in how many."""
    if not isinstance(batch, Mapping):
        return None
    batch = named_inputs(batch)
    found = {batch[leaf.name].shape[leaf.batch_dim] for leaf in inputs if _has_samples(batch.get(leaf.name), leaf)}
    return found.pop() if len(found) == 1 else None


def _has_samples(value: object, leaf: Input) -> TypeGuard[Tensor]:
    return leaf.batch_dim is not None and isinstance(value, Tensor) and value.dim() > leaf.batch_dim


def local_batch(
    batch: Batch,
    inputs: Sequence[Input],
    plan: Plan,
    data_rank: int,
    device: torch.device,
    partial: PartialBatch | None = None,
) -> dict[str, Tensor]:
    """What the data rank takes of a batch, on its device, in the dtypes of ``inputs``; the batch may hold its samples alone.

    Args:
        partial: how it computes a batch of fewer samples, where this is one.

    Page-locked memory is read after this returns; what lies on the device already in the dtype is taken as it is, not copied.

    Raises:
        UsageError: the batch is no mapping, has other inputs, shapes or sizes than the plan, or inputs that need gradients
            where these are on.
    """
    expected = [leaf.name for leaf in inputs]
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"The batch is a {type(batch).__name__}, not a dict",
            fix=f"Give its inputs by name: {{{', '.join(f'{name!r}: ...' for name in expected[:3])}}}",
        )
    batch = named_inputs(batch)
    if set(batch) != set(expected):
        unknown = [name for name in batch if name not in expected]
        raise UsageError(
            "The inputs of the batch are not those of the plan",
            expected=", ".join(expected),
            got=", ".join(batch) or "none",
            fix=f"Leave out {', '.join(unknown)}: what was no tensor in the example inputs is a constant of the plan"
            if unknown and not any(isinstance(batch[name], Tensor) for name in unknown)
            else f"Leave out {', '.join(unknown)}"
            if unknown
            else f"Add {', '.join(name for name in expected if name not in batch)}",
        )
    counts = {
        leaf.name: batch[leaf.name].shape[leaf.batch_dim] for leaf in inputs if _has_samples(batch[leaf.name], leaf)
    }
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"The inputs of the batch have different numbers of samples: {', '.join(f'{n} of {name}' for name, n in counts.items())}",
            fix="Pass inputs of the same samples",
        )
    whole, own = plan.global_batch_size, plan.samples_of(data_rank)
    part = len(own)
    local: dict[str, Tensor] = {}
    for leaf in inputs:
        value, dim = _without_history(batch[leaf.name], leaf.name), leaf.batch_dim
        rest = [size for d, size in enumerate(value.shape) if d != dim]
        if rest != [size for d, size in enumerate(leaf.spec.shape) if d != dim]:
            sizes = ("samples" if d == dim else str(size) for d, size in enumerate(leaf.spec.shape))
            raise UsageError(
                f"{leaf.name} has shape {tuple(value.shape)}, but the plan takes ({', '.join(sizes)})",
                fix="Pad the input to that shape, or search a plan for the new one",
            )
        if dim is not None and partial is not None:
            value = partial.taken(value, dim)
        elif dim is not None:
            if value.shape[dim] not in (whole, part):
                raise UsageError(
                    f"{leaf.name} has {value.shape[dim]} samples",
                    fix=f"Pass {whole} (the complete global batch) or fewer"
                    + ("" if part == whole else f", or {part} (this rank's part: par.samples)"),
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
        raise UsageError.mismatch(
            f"The dtype of {leaf.name}",
            expected=_name(wanted),
            got=_name(given),
            fix=f"Cast it, or search a plan with example inputs in {_name(given)}",
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
            f"{name} is a {type(value).__name__}, but a tensor in the example inputs", fix="Pass torch.as_tensor(...)"
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{name} requires a gradient, but gradients of a step go to parameters alone",
            fix="Call detach() on it, or make what computes it a part of the model that is given to autopar.parallelize",
        )
    # autograd may not keep what inference mode has made; a copy it may
    return value.clone() if value.is_inference() and not torch.is_inference_mode_enabled() else value

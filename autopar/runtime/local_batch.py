"""One rank's samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.errors import UsageError
from autopar.graph.batch import named_inputs
from autopar.graph.ir import Input
from autopar.plan import Plan
from autopar.runtime.pipeline import Batch


def local_batch(
    batch: Batch, inputs: Sequence[Input], plan: Plan, data_rank: int, device: torch.device
) -> dict[str, Tensor]:
    """What the data rank takes of a batch, on its device, in the dtypes of ``inputs``; the batch may hold its samples alone.

    Raises:
        UsageError: the batch has other inputs, shapes or sizes than the plan.
    """
    batch = named_inputs(batch)
    expected = [leaf.name for leaf in inputs]
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
        value, dim = batch[leaf.name], leaf.batch_dim
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
        dtype = leaf.spec.dtype if value.is_floating_point() and leaf.spec.dtype.is_floating_point else value.dtype
        local[leaf.name] = value.to(device, dtype, non_blocking=True)
    return local

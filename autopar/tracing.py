"""From a model and a batch to the graph that plans of a precision and a global batch are for."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.graph.ir import Graph
from autopar.graph.trace import LossFunction, trace
from autopar.plan import Precision
from autopar.search.batch import for_batch


def samples_of(example_inputs: Mapping[str, Any] | Sequence[Any] | None) -> int | None:
    """Samples in example inputs: the size of dim 0 that most tensors share."""
    if example_inputs is None:
        return None
    values = example_inputs.values() if isinstance(example_inputs, Mapping) else example_inputs
    sizes = [value.shape[0] for value in values if isinstance(value, torch.Tensor) and value.dim() > 0]
    return max(sizes, key=sizes.count) if sizes else None


def _with_samples(inputs: Mapping[str, Any] | Sequence[Any], samples: int | None) -> Mapping[str, Any] | Sequence[Any]:
    """Two samples of a batch (graphs, and so plans, do not depend on the size of the example), or so many, on meta."""
    size = samples_of(inputs)

    def cut(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size):
            return value
        if samples is None:
            return value[:2]
        return torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")

    if isinstance(inputs, Mapping):
        return {key: cut(value) for key, value in inputs.items()}
    return [cut(value) for value in inputs]


def trace_model(
    model: torch.nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None,
    precision: Precision,
    *,
    global_batch_size: int | None = None,
    name: str = "",
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
) -> Graph:
    """The graph that plans of this model, precision and global batch are for; ``model`` itself stays as it is.

    Without a global batch its samples must be apart.

    Raises:
        UsageError: no example inputs, and none can be made.
        TraceError: the model cannot be traced.
    """
    if example_inputs is None:
        from autopar.models import example_batch_for

        example_inputs = example_batch_for(model)
    given = example_inputs
    dtype = getattr(torch, precision.compute)
    if precision.compute != "float32":
        model = on_meta(model, dtype)

    def trace_at(samples: int | None) -> Graph:
        inputs = _with_samples(given, samples)
        if precision.compute != "float32":
            inputs = (
                {key: _cast(value, dtype) for key, value in inputs.items()}
                if isinstance(inputs, Mapping)
                else [_cast(value, dtype) for value in inputs]
            )
        options: dict[str, Any] = {"name": name, "loss_fn": loss_fn, "opaque": opaque, "exact": samples is not None}
        if isinstance(inputs, Mapping):
            return trace(model, (), inputs, **options)
        return trace(model, tuple(inputs), {}, **options)

    return trace_at(None) if global_batch_size is None else for_batch(trace_at, global_batch_size)


def on_meta(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """A copy on meta whose floating parameters have ``dtype``; nothing of their size is allocated."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, dtype=kind, device="meta")
        memo[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

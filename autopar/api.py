"""The verbs of autopar, where its wings are put together: search and estimate."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from autopar.cluster import Cluster
from autopar.errors import UsageError
from autopar.graph.ir import Graph
from autopar.plan import BF16, FP32, Plan, Precision
from autopar.search.outer import Limits, Progress
from autopar.search.pins import Pins
from autopar.search.planner import Planner, Task
from autopar.search.space import load_space
from autopar.table import closest

PRECISIONS = {"fp32": FP32, "bf16": BF16}


def search(
    model: torch.nn.Module | Graph,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    cluster: Cluster | str,
    global_batch_size: int,
    pins: Sequence[str] = (),
    precision: Literal["fp32", "bf16"] = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    trials: int | None = None,
    timeout_s: float | None = None,
    storage: str | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    name: str = "",
) -> Plan:
    """The fastest plan that fits.

    Args:
        model: on any device, meta included; or its graph, traced in the dtype of ``precision``.
        example_inputs: a batch, by name or in order; made from its config for a Hugging Face model.
        cluster: a :class:`Cluster` or what :meth:`Cluster.parse` reads (``h100-sxm5-80gb:4x8``).
        global_batch_size: samples of one optimizer step.
        pins: constraints, as ``tp<=4`` (see ``autopar.search.pins``).
        precision: ``bf16``: computation in bfloat16, parameters at rest and sums in float32.
        optimizer: ``adamw``, ``adam``, ``momentum`` or ``sgd``.
        space: what may be chosen: a name or a TOML file.
        trials, timeout_s: stop after so many evaluations or seconds.
        storage: an Optuna URL, in which every trial is recorded.
        seed: of the sampler of spaces too large for an exhaustive search.
        progress: called with (what, done, total).
        name: of the model in the plan.

    Raises:
        UsageError: malformed pins, cluster, space or batch.
        TraceError: the model cannot be traced.
        InfeasibleError: no plan satisfies the constraints; names the smallest set that conflicts.
    """
    planner = _planner(
        model, example_inputs, cluster, global_batch_size, pins, precision, optimizer, space, name, progress
    )
    limits = Limits(trials=trials, timeout_s=timeout_s)
    return planner.search(limits=limits, seed=seed, storage=storage, progress=progress)


def estimate(
    model: torch.nn.Module | Graph,
    *,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None = None,
    cluster: Cluster | str,
    global_batch_size: int,
    pins: Sequence[str] = (),
    precision: Literal["fp32", "bf16"] = "fp32",
    optimizer: str = "adamw",
    space: str = "default",
    progress: Progress | None = None,
    name: str = "",
) -> Plan:
    """The plan that the pins describe, without a search over what they leave open; arguments as in :func:`search`.

    Raises:
        InfeasibleError: it does not exist or does not fit.
    """
    planner = _planner(
        model, example_inputs, cluster, global_batch_size, pins, precision, optimizer, space, name, progress
    )
    return planner.estimate()


def trace_model(
    model: torch.nn.Module,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None,
    precision: Precision,
    *,
    name: str = "",
) -> Graph:
    """The graph that plans of this model and precision are for; ``model`` itself stays as it is.

    Raises:
        UsageError: no example inputs, and none can be made.
        TraceError: the model cannot be traced.
    """
    from autopar.graph.trace import trace

    if example_inputs is None:
        from autopar.models import example_batch_for

        example_inputs = example_batch_for(model)
    inputs: Mapping[str, Any] | Sequence[Any] = example_inputs
    if precision.compute != "float32":
        dtype = getattr(torch, precision.compute)
        model = on_meta(model, dtype)
        inputs = (
            {key: _cast(value, dtype) for key, value in inputs.items()}
            if isinstance(inputs, Mapping)
            else [_cast(value, dtype) for value in inputs]
        )
    if isinstance(inputs, Mapping):
        return trace(model, (), inputs, name=name)
    return trace(model, tuple(inputs), {}, name=name)


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


def _planner(
    model: torch.nn.Module | Graph,
    example_inputs: Mapping[str, Any] | Sequence[Any] | None,
    cluster: Cluster | str,
    global_batch_size: int,
    pins: Sequence[str],
    precision: str,
    optimizer: str,
    space: str,
    name: str,
    progress: Progress | None,
) -> Planner:
    if precision not in PRECISIONS:
        raise UsageError("the precision is known", value=repr(precision), remedy=closest(precision, PRECISIONS))
    parsed, found = Pins.parse(pins), load_space(space)
    where = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    recipe = PRECISIONS[precision]
    if not isinstance(model, Graph):
        if progress is not None:
            progress("tracing the model", 0, 0)
        model = trace_model(model, example_inputs, recipe, name=name)
    if progress is not None:
        progress("laying out blocks", 0, 0)
    return Planner(
        Task(
            graph=model,
            cluster=where,
            global_batch_size=global_batch_size,
            precision=recipe,
            optimizer=optimizer,
            pins=parsed,
            space=found,
        )
    )

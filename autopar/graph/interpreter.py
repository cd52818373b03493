"""Runs operators of a graph on one device. This is the reference for every other way to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.graph.graph import Argument, Graph, Op, Parameter, Ref, map_refs
from autopar.graph.operator_kinds import draws_random
from autopar.ops.kernels import region_of, resolve
from autopar.ops.opaque import Holder
from autopar.ops.seeded import draw


def leaves(
    graph: Graph,
    batch: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
) -> dict[Ref, torch.Tensor]:
    """Return the values of inputs, parameters and buffers.

    Args:
        batch: tensors by the names of ``graph.inputs``, in the shapes of the graph.
        parameters: the complete parameters of the model by name (``fqn``); parts are cut from them.
        buffers: the buffers of the model by name (``fqn``); those whose value the graph holds may be missing.

    Raises:
        AutoparError: an input of the batch or the value of a buffer is missing.
    """
    device = next(iter(batch.values())).device
    env: dict[Ref, torch.Tensor] = {}
    for entry in graph.inputs:
        if entry.name not in batch:
            raise AutoparError.missing(f"input '{entry.name}' of the batch", fix="Give all inputs of the graph by name")
        env[Ref(entry.name)] = batch[entry.name]
    for parameter in graph.parameters:
        env[Ref(parameter.name)] = part_of(parameter, parameters[parameter.fqn])
    for buffer in graph.buffers:
        value = buffers.get(buffer.fqn, buffer.value)
        if value is None:
            raise AutoparError.missing(f"value of buffer '{buffer.fqn or buffer.name}'", fix="Pass it in buffers=")
        env[Ref(buffer.name)] = value.to(device)
    return env


def part_of(parameter: Parameter, whole: torch.Tensor) -> torch.Tensor:
    """Return the part of the model's tensor ``whole`` that ``parameter`` is."""
    part = parameter.part
    return whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start)


def function_of(op: Op, model: torch.nn.Module | None) -> Callable[..., Any]:
    """Return the function that computes ``op``; the code of an opaque region is taken from ``model``."""
    if op.target != "autopar.opaque":
        return resolve(op.target)
    holder = Holder(region_of(str(op.args[0])))
    if model is not None:
        holder.bind(model)
    return partial(resolve(op.target), holder)


def run(ops: Iterable[Op], env: dict[Ref, torch.Tensor], model: torch.nn.Module | None = None) -> None:
    """Execute ``ops`` in order and add their outputs to ``env``. Random numbers are the same in every run.

    Args:
        model: the model, which holds the code of opaque regions.
    """

    def value_of(argument: Argument) -> Any:
        return map_refs(argument, env.__getitem__)  # type: ignore[arg-type]

    for position, op in enumerate(ops):
        args, kwargs = map(value_of, op.args), {key: value_of(argument) for key, argument in op.kwargs}
        if op.target.startswith("aten.") and draws_random(op.target):
            device = None if op.operands else next(iter(env.values())).device
            result = partial(draw, salt=position, device=device)(op.target, *args, **kwargs)
        else:
            result = function_of(op, model)(*args, **kwargs)
        for i, value in enumerate(result if isinstance(result, tuple | list) else (result,)):
            env[Ref(op.name, i)] = value

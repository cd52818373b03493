"""All parameters of a model complete on every rank, of the parts that each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.lower.program import Program
from autopar.runtime.step.gradients import Held
from autopar.runtime.world import World

Values = Mapping[str, Tensor]


def full_state_dict(
    program: Program,
    world: World,
    held: Sequence[Held],
    buffers: Values = MappingProxyType({}),
    *,
    gradients: bool = False,
) -> dict[str, Tensor]:
    """All parameters (or gradients) of the model whole, parts merged, on every rank. All ranks call it.

    ``buffers``: those that this rank's stages make, by name; they are added as they are.
    """
    parts: dict[str, Tensor] = {}
    for h in held:
        value = h.parameter.grad if gradients else h.parameter.detach()
        if value is None:
            continue
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        whole = whole if h.padding is None else whole.narrow(h.padding.dim, 0, h.padding.length)
        parts[h.name] = whole.detach().to("cpu", copy=True)
    whole_buffers = {name: value.to("cpu", copy=True) for name, value in buffers.items()}
    group = world.axis_group(("pp",))
    if group is not None:
        gathered: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(gathered, (parts, whole_buffers), group=group)
        parts = {name: value for part, _ in gathered for name, value in part.items()}
        whole_buffers = {name: value for _, part in gathered for name, value in part.items()}
    return _merge(program, parts) | whole_buffers


def _merge(program: Program, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parts of one model parameter side by side, under all of its names."""
    by_fqn: dict[str, list[Any]] = {}
    for parameter in program.graph.parameters:
        if parameter.name in parts:
            by_fqn.setdefault(parameter.fqn, []).append(parameter)
    merged: dict[str, Tensor] = {}
    for fqn, parameters in by_fqn.items():
        first = parameters[0]
        if first.part is None:
            value = parts[first.name]
        else:
            ordered = sorted(parameters, key=lambda p: p.part.start)
            value = torch.cat([parts[p.name] for p in ordered], dim=first.part.dim)
        for name in (fqn, *first.aliases):
            merged[name] = value
    return merged

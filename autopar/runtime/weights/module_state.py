"""The entries of a parallel model's ``state_dict``: this rank's DTensors by key, put back in place from any form.

Parameters that a plan has lengthened (vocabularies) are in it as the model has them, whole and on the host: the length differs from
plan to plan, and a file has one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from autopar.graph.graph import Padding, Parameter
from autopar.runtime.step.gradients import Held, lengthened

EXTRA_STATE = "_extra_state"
"""The entry of a ``state_dict`` that has what a module gives by ``get_extra_state``."""


def names_of(model: nn.Module) -> tuple[str, ...]:
    """All names of parameters and buffers of a model: those that steps leave alone, too."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return tuple(name for name, _ in named)


def shortened(value: Tensor, padding: Padding) -> Tensor:
    """A lengthened tensor whole and as the model has it, on every rank's host; ranks that hold parts of it call together."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.narrow(padding.dim, 0, padding.length).to("cpu", copy=True).contiguous()


def _put(target: Tensor, padding: Padding | None, value: Tensor) -> str:
    """Writes into ``target`` its part of ``value``: a DTensor as ``target``, or the whole tensor. Says why not, where it does not fit."""
    with torch.no_grad():
        if isinstance(value, DTensor):
            if not isinstance(target, DTensor) or value.shape != target.shape:
                return f"it has shape {tuple(value.shape)}, not {tuple(target.shape)}"
            if value.device_mesh != target.device_mesh or value.placements != target.placements:
                return "it is a DTensor on another mesh or with other placements: give it whole (full_tensor())"
            target._local_tensor.copy_(value._local_tensor)
            return ""
        wanted = list(target.shape)
        if padding is not None:
            wanted[padding.dim] = padding.length
        if list(value.shape) != wanted:
            return f"it has shape {tuple(value.shape)}, not {tuple(wanted)}"
        if padding is not None:
            value = lengthened(value, padding.dim, target.shape[padding.dim])
        if not isinstance(target, DTensor):
            target.copy_(value)
            return ""
        shape, offset = compute_local_shape_and_global_offset(target.shape, target.device_mesh, target.placements)
        local = value[tuple(slice(first, first + count) for first, count in zip(offset, shape, strict=True))]
        target._local_tensor.copy_(local)
    return ""


class ModuleState:
    """The entries of one rank's ``state_dict``.

    Parameters are found by their keys, or by the names of the model itself, of which parts are cut.

    Args:
        parameters: of the program.
        others: names that a ``state_dict`` of the model has besides.
        held: this rank's parameters.

    Attributes:
        is_lengthened: the plan has lengthened a vocabulary.
    """

    def __init__(self, parameters: Sequence[Parameter], others: Sequence[str], held: Sequence[Held]) -> None:
        self._held = held
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._known = {name for p in parameters for name in (p.key, p.fqn, *p.aliases)} | {EXTRA_STATE, *others}
        self.is_lengthened = any(parameter.padding is not None for parameter in parameters)

    def complete(self, state: dict[str, Any], prefix: str, shown: Collection[str]) -> None:
        """Takes out what stands for others (``shown``: names of all), and has lengthened parameters as the model has them."""
        for name in set(shown) - {held.key for held in self._held}:
            state.pop(prefix + name, None)  # further copies, and what stands for none
        for held in self._held:
            if held.padding is not None:
                state[prefix + held.key] = shortened(held.parameter.detach(), held.padding)

    def put(self, state: Mapping[str, Any], prefix: str, buffers: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Writes parameters and ``buffers`` in place: which are missing, and why some do not fit."""
        targets = [(h.key, h.parameter.detach(), h.padding, self._find(h, state, prefix)) for h in self._held]
        targets += [(name, value, None, state.get(prefix + name)) for name, value in buffers.items()]
        missing, problems = list[str](), list[str]()
        for name, target, padding, value in targets:
            if value is None:
                missing.append(prefix + name)
            elif problem := _put(target, padding, value):
                problems.append(f"{prefix}{name}: {problem}")
        return missing, problems

    def unexpected(self, state: Mapping[str, Any], prefix: str) -> list[str]:
        """Names behind ``prefix`` that no rank of the model knows."""
        return [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in self._known]

    def _find(self, held: Held, state: Mapping[str, Any], prefix: str) -> Tensor | None:
        """What ``state`` has for a parameter."""
        if prefix + held.key in state:
            found: Tensor = state[prefix + held.key]
            return found
        parameter = self._parameters[held.name]
        name = next((n for n in (parameter.fqn, *parameter.aliases) if prefix + n in state), None)
        if name is None:
            return None
        whole: Tensor = state[prefix + name]
        part = parameter.part
        return whole if part is None else whole.narrow(part.dim, part.start, part.stop - part.start)

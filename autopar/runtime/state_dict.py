"""The state of a model on its ranks: trained parameters, untrained tensors, and buffers that steps change.

**Trained parameters.** Vocabularies that a plan has lengthened are in the state at the model's length, complete and on the host: the
lengths of plans differ, and a file has one.

**Untrained tensors.** A plan's programs hold no parameters that the loss does not use, and only copies of the buffers that no step changes.
For complete checkpoints and state dicts each of these is also kept on the host of one rank.

**Changed buffers.** New values replace old ones and are never written into them, so that what a step keeps for backward, recompute
included, is unchanged. The stage that computes a value broadcasts it to the stages that read it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.graph.graph import Padding, Parameter, TensorSpec
from autopar.graph.interpreter import part_of
from autopar.lower.program import Program
from autopar.runtime.checkpoint import contents
from autopar.runtime.checkpoint.contents import WholeTensors
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.step.stage import StageModule
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World

Values = Mapping[str, Tensor]


EXTRA_STATE = "_extra_state"
"""The entry of a ``state_dict`` for the result of a module's ``get_extra_state``."""


def _put(target: Tensor, padding: Padding | None, value: Tensor) -> str:
    """Write into ``target`` its part of ``value``, a DTensor like ``target`` or the complete tensor; return why it does not fit."""
    with torch.no_grad():
        if isinstance(value, DTensor):
            if not isinstance(target, DTensor) or value.shape != target.shape:
                return f"it has shape {tuple(value.shape)}, not {tuple(target.shape)}"
            if value.device_mesh != target.device_mesh or value.placements != target.placements:
                return "it is a DTensor on another mesh or with other placements: give it whole (full_tensor())"
            target._local_tensor.copy_(value._local_tensor)
            return ""
        part = contents.part_of("", target, padding)
        if tuple(value.shape) != part.whole:
            return f"it has shape {tuple(value.shape)}, not {part.whole}"
        part.value.copy_(value[part.box])
        if padding is not None:
            contents.padding_of(target, padding).zero_()
    return ""


class ModuleState:
    """The entries of one rank's ``state_dict``.

    Parameters are found by their keys, or by the names of the model, from whose tensors parts are cut.

    Args:
        parameters: parameters of the program.
        others: the names in a ``state_dict`` of the model, and of the buffers that steps change.
        held: this rank's parameters.

    Attributes:
        is_lengthened: whether the plan has lengthened a vocabulary.
    """

    def __init__(self, parameters: Sequence[Parameter], others: Iterable[str], held: Sequence[RankParameter]) -> None:
        self._held = held
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._known = {p.key for p in parameters} | {EXTRA_STATE, *others}
        self.is_lengthened = any(parameter.padding is not None for parameter in parameters)

    def complete(self, state: dict[str, Any], prefix: str, shown: Collection[str]) -> None:
        """Remove placeholders and further copies among the registered names ``shown``; cuts parameters to the model's length."""
        for name in set(shown) - {held.key for held in self._held}:
            state.pop(prefix + name, None)  # further copies, and what stands for none
        for held in self._held:
            if held.padding is not None:
                dim, length = held.padding.dim, held.padding.length
                value: Any = held.parameter.detach()
                state[prefix + held.key] = value.full_tensor().narrow(dim, 0, length).to("cpu", copy=True).contiguous()

    def put(self, state: Mapping[str, Any], prefix: str, buffers: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
        """Write parameters and ``buffers`` in place; return the names of missing ones, and the reasons why some do not fit."""
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
        """Name with ``prefix`` that no rank of the model knows."""
        return [name for name in state if name.startswith(prefix) and name.removeprefix(prefix) not in self._known]

    def _find(self, held: RankParameter, state: Values, prefix: str) -> Tensor | None:
        """Return the entry of ``state`` for a parameter."""
        if prefix + held.key in state:
            return state[prefix + held.key]
        parameter = self._parameters[held.name]
        name = next((n for n in (parameter.fqn, *parameter.aliases) if prefix + n in state), None)
        return None if name is None else part_of(parameter, state[prefix + name])


_LOGGER = logging.getLogger("autopar")


class Untrained:
    """The untrained tensors of a model, and all names of its state dict.

    Attributes:
        names: the names of the state dict, in order. Each has the first name of its tensor, by which the plan or this class knows it (tied
            tensors have several names).
        dtypes: by first name, as in the model.
        kept: values that this rank keeps, writes and sends, by first name.
        is_parameter: whether it is a parameter, by first name.
    """

    def __init__(self, program: Program, world: World, weights: ModelWeights) -> None:
        self.names, tensors = _state_names(program, weights.model)
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        trained = {p.fqn for p in program.graph.parameters} | {b.fqn for b in program.state}
        left = [name for name in tensors if name not in trained]
        self._shapes = {name: tensors[name].shape for name in left}
        self._valued = [name for name in left if not tensors[name].is_meta]  # others may have no value anywhere
        traced = {b.fqn: b.value for b in program.graph.buffers if b.fqn and b.value is not None}
        self.is_parameter = {name: isinstance(tensor, nn.Parameter) for name, tensor in tensors.items()}
        kept_here = left[world.rank :: world.mesh.world_size]
        values = {name: _value(weights, name, tensors[name], traced) for name in kept_here}
        self.kept = {name: value for name, value in values.items() if value is not None}
        self._copies = _copies(program, world, frozenset(left))

    def targets(self) -> list[tuple[str, Tensor]]:
        """Return the tensors into which values are loaded: those that this rank keeps, and those that its programs read."""
        return [*self.kept.items(), *((name, module.get_buffer(buffer)) for module, buffer, name in self._copies)]

    def named(self, tensors: WholeTensors) -> dict[str, Tensor]:
        """Return complete tensors, which are known by first names, under all names of the state dict; all ranks call it."""
        firsts = (first for first in dict.fromkeys(self.names.values()) if first in tensors.shapes)
        values = {first: tensors.complete(first) for first in firsts}
        return {name: value for name, first in self.names.items() if (value := values.get(first)) is not None}

    def take(self, state: Mapping[str, Tensor], prefix: str = "") -> tuple[list[str], list[str]]:
        """Copy what a state dict has, under any of the model's names with ``prefix``; return missing names, and the reasons why some do not fit.

        All ranks return the same. A state that has none of these tensors lacks none, as that of a parallel model is one.
        """
        given = {first: state[prefix + name] for name, first in self.names.items() if prefix + name in state}
        given = {first: value for first, value in given.items() if first in self._shapes}
        missing = [prefix + name for name in self._valued if given and name not in given]
        problems = [
            f"{prefix}{name}: it has shape {tuple(value.shape)}, not {tuple(self._shapes[name])}"
            for name, value in given.items()
            if value.shape != self._shapes[name]
        ]
        with torch.no_grad():
            for name, value in self.targets():
                if name in given and given[name].shape == value.shape:
                    value.copy_(given[name])
        return missing, problems

    def key(self, name: str) -> str:
        """Return the key in checkpoints of a first name."""
        return f"{'model' if self.is_parameter[name] else 'buffer'}.{name}"


def _state_names(program: Program, model: nn.Module) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return all names of the state dict, each with the first name of its tensor; and the tensors by first name."""
    fixed = {alias: p.fqn for p in program.graph.parameters for alias in (p.fqn, *p.aliases)}
    named: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                named[f"{path}.{name}" if path else name] = tensor
    known = {b.fqn for b in program.graph.buffers if b.fqn}
    firsts: dict[Tensor, str] = {}
    for name, tensor in named.items():  # the name that the plan knows, where it knows one
        if tensor not in firsts or name in known:
            firsts[tensor] = fixed.get(name, name)
    names = {name: fixed.get(name, firsts[tensor]) for name, tensor in named.items()}
    return names, {names[name]: tensor for name, tensor in named.items()}


def _value(weights: ModelWeights, name: str, tensor: Tensor, traced: Mapping[str, Tensor]) -> Tensor | None:
    """Return a copy on the host; None, with a warning, if the tensor has no value."""
    try:
        if isinstance(tensor, nn.Parameter):
            spec = TensorSpec.of(tensor, requires_grad=tensor.requires_grad)
            value = weights.parameter(Parameter(name=name, fqn=name, spec=spec))
        else:
            value = weights.buffer(name, traced.get(name))
    except UsageError as error:
        _LOGGER.warning(
            "checkpoints and full_state_dict() do not have %s, which the loss does not use: %s", name, error
        )
        return None
    return value.detach().to("cpu", tensor.dtype, copy=True).contiguous()


def _copies(program: Program, world: World, names: frozenset[str]) -> list[tuple[nn.Module, str, str]]:
    """Return the places of such buffers in programs of this rank: the module, the name in it, and the model's name."""
    fqns = {b.name: b.fqn for b in program.graph.buffers if b.fqn in names}
    here = [s.prelude for s in program.stages if s.pp_rank == world.coordinate["pp"] and s.prelude is not None]
    preludes = (*here, *program.sums)
    return [(prelude.module, name, fqns[name]) for prelude in preludes for name in prelude.buffers if name in fqns]


class State:
    """The buffers that steps change, on this rank.

    Attributes:
        values: by the graph's names; those that the rank's stages, or the sums before a step, read or compute.
    """

    def __init__(self, program: Program, world: World, weights: ModelWeights, stages: Sequence[StageModule]) -> None:
        here = [stage for stage in program.stages if stage.pp_rank == world.coordinate["pp"]]
        sums = frozenset(name for sums in program.sums for name in sums.inputs)
        makers = {name: stage.pp_rank for stage in program.stages for name, _ in stage.mutations}
        made_here = [name for stage in here for name, _ in stage.mutations]
        is_first = not any(index for axis, index in world.coordinate.items() if axis != "pp")
        self._sent = made_here if is_first else []
        wanted = {*made_here, *sums, *(name for stage in here for name in stage.state)}
        self._stages, self._world = stages, world
        self._known = {buffer.name: buffer for buffer in program.state}
        self.values = {
            buffer.name: weights.buffer(buffer.fqn, buffer.value).to(world.device, buffer.spec.dtype, copy=True)
            for buffer in program.state
            if buffer.name in wanted
        }
        elsewhere = {name for s in program.stages for name in s.state if s.pp_rank != makers[name]}
        self._broadcast = tuple((b.name, makers[b.name]) for b in program.state if b.name in elsewhere | sums)
        self._group = world.axis_group(("pp",)) if self._broadcast else None
        self._pass_to_stages()

    def commit(self) -> None:
        """Replace the values after a step by those from its last micro-batch. All ranks call it."""
        new_values = {name: value for stage in self._stages for name, value in stage.new_state.items()}
        if self._group is not None:
            for name, maker in self._broadcast:
                spec = self._known[name].spec
                sent = torch.empty(spec.shape, dtype=spec.dtype, device=self._world.device)
                if name in new_values:
                    sent.copy_(new_values[name])
                dist.broadcast(sent, group_src=maker, group=self._group)
                new_values[name] = sent
        self.values |= {name: value.clone() for name, value in new_values.items() if name in self.values}
        self._pass_to_stages()

    def named(self) -> dict[str, Tensor]:
        """Return the values of this rank by the model's names."""
        return {self._known[name].fqn: value for name, value in self.values.items()}

    def sent(self) -> dict[str, Tensor]:
        """Return the values that this rank writes and sends: of the ranks whose stage computes one it is the first."""
        return {self._known[name].fqn: self.values[name] for name in self._sent}

    def _pass_to_stages(self) -> None:
        for stage in self._stages:
            stage.state = self.values

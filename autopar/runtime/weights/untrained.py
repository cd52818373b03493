"""What a model's state dict has beside what trains: parameters that the loss does not use, buffers that no step changes.

A plan's programs hold none of the first and, on the ranks that read them, copies of the second. So that checkpoints and state dicts are
complete all of them are kept besides, each on one rank's host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.graph.graph import Parameter, TensorSpec
from autopar.lower.program import PreludeProgram, Program
from autopar.runtime.weights.from_model import Weights
from autopar.runtime.world import World

_LOGGER = logging.getLogger("autopar")


class Untrained:
    """The values of one model's, and all names of its state dict.

    Attributes:
        names: of the state dict, in its order, each with the one under which a plan or this knows the tensor (tied ones have several).
        dtypes, shapes: by the first name, as the model has them.
        own: values that this rank keeps, by the first name.
        owners: which rank keeps each.
        is_parameter: of each first name.
    """

    def __init__(self, program: Program, world: World, weights: Weights) -> None:
        self.names, tensors = _state_names(program, weights.model)
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        trained = {p.fqn for p in program.graph.parameters} | {b.fqn for b in program.state}
        left = [name for name in tensors if name not in trained]
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        traced = {b.fqn: b.value for b in program.graph.buffers if b.fqn and b.value is not None}
        self.owners = {name: i % world.mesh.world_size for i, name in enumerate(left)}
        self.is_parameter = {name: isinstance(tensor, nn.Parameter) for name, tensor in tensors.items()}
        self.own: dict[str, Tensor] = {}
        for name in left:
            if self.owners[name] == world.rank:
                value = _value(weights, name, tensors[name], traced)
                if value is not None:
                    self.own[name] = value
        self._copies = list(_copies(program, world, frozenset(left)))

    def targets(self) -> list[tuple[str, Tensor]]:
        """What a checkpoint is read into: the values here, and those that programs of this rank read (:meth:`put` gives them these)."""
        return [*((name, torch.empty_like(value)) for name, value in self.own.items()), *self._read()]

    def put(self, values: list[tuple[str, Tensor]]) -> None:
        """Takes what :meth:`targets` gave and a checkpoint has filled; tensors of the user's model stay as they are."""
        own, read = values[: len(self.own)], values[len(self.own) :]
        self.own = dict(own)
        for (module, buffer, _), (_, value) in zip(self._copies, read, strict=True):
            module._buffers[buffer] = value

    def completed(
        self, trained: Mapping[str, Tensor], gather: Callable[[dict[str, Tensor]], list[dict[str, Tensor]]]
    ) -> dict[str, Tensor]:
        """The state dict: what trains, by the names of the plan, and the rest, which ``gather`` gives of all ranks."""
        values = dict(trained)
        for own in gather(self.own):
            values |= {name: value.clone() for name, value in own.items()}
        return {name: values[first] for name, first in self.names.items() if first in values}

    def take(self, state: Mapping[str, Tensor], prefix: str = "") -> None:
        """The values of a state dict that has them, by any of the model's names behind ``prefix``."""
        given = {first: state[prefix + name] for name, first in self.names.items() if prefix + name in state}
        targets = [
            (name, value) for name, value in self.targets() if name in given and given[name].shape == value.shape
        ]
        if len(targets) == len(self.own) + len(self._copies):
            with torch.no_grad():
                for name, value in targets:
                    value.copy_(given[name])
            self.put(targets)

    def key(self, name: str) -> str:
        """Of a first name, in checkpoints."""
        return f"{'model' if self.is_parameter[name] else 'buffer'}.{name}"

    def _read(self) -> Iterator[tuple[str, Tensor]]:
        for module, buffer, name in self._copies:
            value = module._buffers[buffer]
            assert value is not None
            yield name, torch.empty_like(value)


def _state_names(program: Program, model: nn.Module) -> tuple[dict[str, str], dict[str, Tensor]]:
    """All names of the state dict, each with its tensor's first one; the tensors by that."""
    fixed = {alias: p.fqn for p in program.graph.parameters for alias in (p.fqn, *p.aliases)}
    named: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                named[f"{path}.{name}" if path else name] = tensor
    known = {b.fqn for b in program.graph.buffers if b.fqn}
    firsts: dict[Tensor, str] = {}
    for name, tensor in named.items():  # the name that the plan knows, where it knows one
        if tensor not in firsts or name in known:
            firsts[tensor] = fixed.get(name, name)
    names = {name: fixed.get(name, firsts[tensor]) for name, tensor in named.items()}
    return names, {names[name]: tensor for name, tensor in named.items()}


def _value(weights: Weights, name: str, tensor: Tensor, traced: Mapping[str, Tensor]) -> Tensor | None:
    """A copy on the host; None, with a warning, where it has none."""
    try:
        if isinstance(tensor, nn.Parameter):
            spec = TensorSpec(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)
            whole = tuple(slice(0, size) for size in tensor.shape)
            value = weights.parameter(Parameter(name=name, fqn=name, spec=spec), whole)
        else:
            value = weights.buffer(name, traced.get(name))
    except UsageError as error:
        _LOGGER.warning(
            "checkpoints and full_state_dict() do not have %s, which the loss does not use: %s", name, error
        )
        return None
    return value.detach().to("cpu", tensor.dtype, copy=True).contiguous()


def _copies(program: Program, world: World, names: frozenset[str]) -> Iterator[tuple[nn.Module, str, str]]:
    """Where programs of this rank have such buffers: the module, the name in it, and the model's."""
    fqns = MappingProxyType({b.name: b.fqn for b in program.graph.buffers if b.fqn in names})
    here = [s.prelude for s in program.stages if s.pp_rank == world.coordinate["pp"]]
    for prelude in (*here, program.sums):
        if isinstance(prelude, PreludeProgram):
            yield from ((prelude.module, buffer, fqns[buffer]) for buffer in prelude.buffers if buffer in fqns)

"""A rank's part of a checkpoint: boxes of tensors, states of optimizers, schedulers, loaders and generators.

Tensors are named ``model.KEY`` with ``Parameter.key``, which is the same in all plans, ``optimizer.KEY.STATE``, ``buffer.FQN``, and
``state.KIND.OWNER.NUMBER`` for those of schedulers, loaders and generators. They do not include padding of a plan.
"""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeGuard
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from autopar.errors import PlanError, UsageError
from autopar.graph.graph import Padding
from autopar.runtime.checkpoint.checkpoint_index import encode_state
from autopar.runtime.checkpoint.chunk_files import Part, as_bytes
from autopar.runtime.step.gradients import Held
from autopar.runtime.world import Meeting

Settings = dict[str, Any]

WAYS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Hyperparameters of how, not where to, an optimizer steps; a load leaves those of the job unchanged."""


def groups(held: Sequence[Held], optimizer: Optimizer) -> list[tuple[Held, int]]:
    """Each parameter that the optimizer steps, with the index of its group."""
    of = {p: place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [(h, of[h.parameter]) for h in held if h.parameter in of]


def settings(group: Mapping[str, Any]) -> Settings:
    """The hyperparameters of a group by name: numbers, switches and tuples of them."""
    plain = {name: _plain(value) for name, value in group.items()}
    return {name: value for name, value in plain.items() if isinstance(value, float | int | bool | tuple)}


def _plain(value: object) -> object:
    """The value as a Python number, also if it is a number of torch or numpy."""
    if _is_number(value):
        return value.item()
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    return float(value) if isinstance(value, float) else value


def _is_number(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def check_groups(
    place: str, held: Sequence[Held], optimizer: Optimizer, saved: Mapping[str, Settings], meeting: Meeting
) -> None:
    """Checks that the parameters of each group were saved with equal hyperparameters; all ranks call it.

    Raises:
        PlanError: they were not; names two parameters; raised on all ranks, before a group is changed.
    """
    firsts: dict[int, tuple[str, Settings]] = {}
    with meeting.alike():
        for h, group in groups(held, optimizer):
            own = {name: value for name, value in saved[h.key].items() if name not in WAYS}
            key, first = firsts.setdefault(group, (h.key, own))
            name = next((name for name in sorted(first.keys() | own) if first.get(name) != own.get(name)), "")
            if name:
                raise PlanError(
                    "The parameters of a group of the optimizer were saved with different hyperparameters",
                    where=place,
                    got=f"{name} {first.get(name)} of {key} and {own.get(name)} of {h.key} in one group",
                    fix="Make the groups of the optimizer that was saved, or load without one",
                )


def put_groups(held: Sequence[Held], optimizer: Optimizer, saved: Mapping[str, Settings], meeting: Meeting) -> None:
    """Sets the hyperparameters of groups in place; a learning rate in a tensor stays in it. All ranks call it.

    Names that the group does not have yet are set too, as a scheduler that is made later continues from them (``initial_lr``). A group
    without a parameter of this rank, as on pipeline ranks, takes the values of another rank's group with the same index.
    """
    own: list[Settings | None] = [None] * len(optimizer.param_groups)
    for h, place in groups(held, optimizer):
        own[place] = saved[h.key]
        _put(optimizer.param_groups[place], saved[h.key].items())
    said = meeting.all(own)
    if len({len(lists) for lists in said}) > 1:
        return  # ranks have groups of their own: none is the other's at the same place
    for place, group in enumerate(optimizer.param_groups):
        if own[place] is None:
            found = next((lists[place] for lists in said if lists[place] is not None), {})
            _put(group, (found or {}).items())


def _put(group: dict[str, Any], values: Iterable[tuple[str, Any]]) -> None:
    for name, value in values:
        old = group.get(name)
        if name in WAYS:
            continue
        if _is_number(old):
            old.fill_(value)
        else:
            group[name] = value


def make_state(optimizer: Optimizer) -> list[Tensor]:
    """Makes an optimizer create the state tensors that it lacks, by a step that changes nothing; returns the parameters they are of."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    made = [p for p in parameters if p not in optimizer.state]
    if not made:
        return []
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for p, _ in gradients:
            p.grad = None
        for p in made:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:  # the step may be refused
        for group, rate in rates:
            group["lr"] = rate
        for p, gradient in gradients:
            p.grad = gradient
    return made


@dataclass(slots=True, kw_only=True)
class Own:
    """This rank's part of a checkpoint.

    Attributes:
        parts: boxes, in the memory of the job; those that several ranks have are the same on each.
        settings: hyperparameters of each parameter's group, by its key.
        numbers: states of the optimizer that are not tensors, by parameter and name.
        states: of schedulers, loaders and generators, by kind.
    """

    parts: list[Part] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """An encoded state of this rank.

    Attributes:
        owner: the rank, or the data rank, that it belongs to.
        tensors: names of its tensors.
        digest: equal for equal states.
    """

    owner: int
    value: Any
    tensors: tuple[str, ...]
    digest: int


def box(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """The complete shape, the offset of this rank's elements in it, and the elements."""
    if not isinstance(value, DTensor):
        return tuple(value.shape), (0,) * value.ndim, value.detach()
    local = value._local_tensor.detach()
    shape, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    if tuple(shape) != tuple(local.shape):
        raise UsageError(
            f"A tensor on the mesh has {tuple(local.shape)} here instead of {tuple(shape)}",
            fix="Make optimizer states of the parameters that par.parameters() gives",
        )
    return tuple(value.shape), tuple(offset), local


def part_of(name: str, value: Tensor, padding: Padding | None = None) -> Part:
    """This rank's elements of a tensor, without padding."""
    whole, offset, local = box(value)
    if padding is not None:
        dim, length = padding.dim, padding.length
        count = min(max(length - offset[dim], 0), local.shape[dim])
        local = local.narrow(dim, 0, count)
        offset = (*offset[:dim], min(offset[dim], length), *offset[dim + 1 :])
        whole = (*whole[:dim], length, *whole[dim + 1 :])
    return Part(name=name, whole=whole, offset=offset, value=local)


def padding_of(value: Tensor, padding: Padding) -> Tensor:
    """This rank's elements of the padding, which are zeros."""
    _, offset, local = box(value)
    first = min(max(padding.length - offset[padding.dim], 0), local.shape[padding.dim])
    return local.narrow(padding.dim, first, local.shape[padding.dim] - first)


def tensors_of(
    held: Sequence[Held], optimizer: Optimizer | None, fresh: Collection[str] = ()
) -> Iterator[tuple[str, Tensor, Padding | None]]:
    """Parameters and states of the optimizer by name, each with its padding; without the states of ``fresh`` parameters."""
    for h in held:
        yield f"model.{h.key}", h.parameter.detach(), h.padding
    for h in held:
        states = {} if optimizer is None or h.key in fresh else optimizer.state.get(h.parameter, {})
        for name, value in states.items():
            if isinstance(value, Tensor):
                is_long = value.shape == h.parameter.shape
                yield f"optimizer.{h.key}.{name}", value, h.padding if is_long else None


def of_optimizer(own: Own, held: Sequence[Held], optimizer: Optimizer) -> None:
    """Adds hyperparameters and states that are not tensors.

    Raises:
        UsageError: a state is neither a tensor nor a number or text.
    """
    for h, group in groups(held, optimizer):
        plain = settings(optimizer.param_groups[group])
        own.settings[h.key] = encode_state(plain, {}, "", where="the optimizer's groups")
    for h in held:
        for name, value in optimizer.state.get(h.parameter, {}).items():
            if not isinstance(value, Tensor):
                beside: dict[str, Tensor] = {}
                encoded = encode_state(value, beside, "", where=f"the optimizer's state {name} of {h.key}")
                if beside:
                    raise UsageError(
                        f"A checkpoint cannot hold the tensors inside of the optimizer's state {name} of {h.key}",
                        fix="Use an optimizer whose states are tensors and numbers, one by one",
                    )
                own.numbers.setdefault(h.key, {})[name] = encoded


def of_state(own: Own, kind: str, owner: int, given: Any) -> None:
    """Adds a state of a scheduler, a loader, or generators.

    Raises:
        UsageError: it has something that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    value = encode_state(given, tensors, f"state.{kind}.{owner}", where=f"the state of the {kind}")
    own.parts += [part_of(name, tensor) for name, tensor in tensors.items()]
    digest = crc32(json.dumps(encode_state(given, {}, "", where="")).encode())
    for tensor in tensors.values():
        digest = crc32(as_bytes(tensor), digest)
    own.states[kind] = State(owner=owner, value=value, tensors=tuple(tensors), digest=digest)


def state_dicts(given: Any, what: str) -> Any:
    """The ``state_dict()`` of an object, or of each in a list.

    Raises:
        UsageError: it has no such method.
    """
    if isinstance(given, list | tuple):
        return [state_dicts(one, what) for one in given]
    if not callable(getattr(given, "state_dict", None)) or not callable(getattr(given, "load_state_dict", None)):
        raise UsageError(
            f"The {what} is a {type(given).__name__}, which has no state_dict() and load_state_dict()",
            fix="Pass what has both, or a list of such, or keep its numbers in extra=",
        )
    return given.state_dict()


def put_state_dicts(given: Any, state: Any) -> None:
    """Gives each object its state back."""
    if isinstance(given, list | tuple):
        for one, own in zip(given, state, strict=True):
            put_state_dicts(one, own)
        return
    given.load_state_dict(state)


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of the generators of Python, numpy and torch in this process."""
    version, words, gauss = random.getstate()
    found = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def put_random_states(found: Mapping[str, Any], device: torch.device) -> None:
    """Restores the states of generators."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


def once(parts: Iterable[Part]) -> list[Part]:
    """Each name once, as a rank may have a parameter twice; without boxes that have no elements of a tensor that has some."""
    return list({part.name: part for part in parts if part.value.numel() or not prod(part.whole)}.values())

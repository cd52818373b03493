"""What one rank has for a checkpoint: boxes of tensors, and states that are none.

Names of tensors are ``model.KEY`` with ``Parameter.key``, which is the same in all plans, ``optimizer.KEY.STATE`` and ``buffer.FQN``,
and ``state.KIND.OWNER.NUMBER`` for those of schedulers, loaders and generators. Padding of a plan is in none of them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from autopar.errors import UsageError
from autopar.graph.graph import Padding
from autopar.runtime.checkpoint import states
from autopar.runtime.checkpoint.chunk_files import Part, as_bytes
from autopar.runtime.checkpoint.optimizer_groups import groups, settings
from autopar.runtime.step.gradients import Held


@dataclass(slots=True, kw_only=True)
class Own:
    """What this rank has.

    Attributes:
        parts: boxes, in the memory of the job; those of a tensor that several ranks have are the same on each.
        settings: hyperparameters of each parameter's group, by its key.
        numbers: states of the optimizer that are no tensors, by parameter and name.
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
        owner: whose it is: the rank, or the data rank.
        tensors: names of its tensors.
        digest: equal for equal states.
    """

    owner: int
    value: Any
    tensors: tuple[str, ...]
    digest: int


def box(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """The complete shape, where this rank's elements begin in it, and these."""
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
    """This rank's elements of a tensor, without what lies behind the model's."""
    whole, offset, local = box(value)
    if padding is not None:
        dim, length = padding.dim, padding.length
        count = min(max(length - offset[dim], 0), local.shape[dim])
        local = local.narrow(dim, 0, count)
        offset = (*offset[:dim], min(offset[dim], length), *offset[dim + 1 :])
        whole = (*whole[:dim], length, *whole[dim + 1 :])
    return Part(name=name, whole=whole, offset=offset, value=local)


def padding_of(value: Tensor, padding: Padding) -> Tensor:
    """This rank's elements behind the model's, which are zeros."""
    _, offset, local = box(value)
    first = min(max(padding.length - offset[padding.dim], 0), local.shape[padding.dim])
    return local.narrow(padding.dim, first, local.shape[padding.dim] - first)


def tensors_of(held: Sequence[Held], optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor, Padding | None]]:
    """Parameters and the optimizer's states, by name, each with its padding."""
    for h in held:
        yield f"model.{h.key}", h.parameter.detach(), h.padding
    for h in held if optimizer is not None else ():
        assert optimizer is not None
        for name, value in optimizer.state.get(h.parameter, {}).items():
            if isinstance(value, Tensor):
                is_long = value.shape == h.parameter.shape
                yield f"optimizer.{h.key}.{name}", value, h.padding if is_long else None


def of_optimizer(own: Own, held: Sequence[Held], optimizer: Optimizer) -> None:
    """Hyperparameters and states that are no tensors.

    Raises:
        UsageError: a state is neither a tensor nor a number or text.
    """
    for h, group in groups(held, optimizer):
        own.settings[h.key] = states.encode(settings(group), {}, "", where="the optimizer's groups")
    for h in held:
        for name, value in optimizer.state.get(h.parameter, {}).items():
            if not isinstance(value, Tensor):
                beside: dict[str, Tensor] = {}
                encoded = states.encode(value, beside, "", where=f"the optimizer's state {name} of {h.key}")
                if beside:
                    raise UsageError(
                        f"A checkpoint cannot hold the tensors inside of the optimizer's state {name} of {h.key}",
                        fix="Use an optimizer whose states are tensors and numbers, one by one",
                    )
                own.numbers.setdefault(h.key, {})[name] = encoded


def of_state(own: Own, kind: str, owner: int, given: Any) -> None:
    """A state of a scheduler, a loader, or generators.

    Raises:
        UsageError: it has something that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    value = states.encode(given, tensors, f"state.{kind}.{owner}", where=f"the state of the {kind}")
    own.parts += [part_of(name, tensor) for name, tensor in tensors.items()]
    digest = crc32(json.dumps(states.encode(given, {}, "", where="")).encode())
    for tensor in tensors.values():
        digest = crc32(as_bytes(tensor), digest)
    own.states[kind] = State(owner=owner, value=value, tensors=tuple(tensors), digest=digest)


def state_dicts(given: Any, what: str) -> Any:
    """What ``state_dict()`` gives, of one or of each in a list.

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
    """Gives each its own back."""
    if isinstance(given, list | tuple):
        for one, own in zip(given, state, strict=True):
            put_state_dicts(one, own)
        return
    given.load_state_dict(state)


def random_states(device: torch.device) -> dict[str, Any]:
    """Of the generators of Python, numpy and torch in this process."""
    version, words, gauss = random.getstate()
    found = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def put_random_states(found: Mapping[str, Any], device: torch.device) -> None:
    """Draws go on as they would have."""
    version, words, gauss = found["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(found["numpy"])
    torch.set_rng_state(found["torch"])
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)


def once(parts: Iterable[Part]) -> list[Part]:
    """Each name once, as a rank may have a parameter twice; without those of which it has no element, unless nobody has."""
    return list({part.name: part for part in parts if part.value.numel() or not prod(part.whole)}.values())

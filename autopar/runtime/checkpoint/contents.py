"""A rank's part of a checkpoint: boxes of tensors, and the states of optimizers, schedulers, loaders and random number generators.

Tensors are named ``model.KEY`` with ``Parameter.key``, which is the same in all plans, ``optimizer.KEY.STATE``, ``buffer.FQN``, and
``state.KIND.HASH`` for those of schedulers, loaders and generators. They do not include padding of a plan.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim import Optimizer

from autopar.errors import PlanError, UsageError
from autopar.graph.graph import Graph, Padding
from autopar.runtime.checkpoint.checkpoint_index import encode_state
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.world import Peers

Settings = dict[str, Any]

IMPLEMENTATION_SETTINGS = frozenset({"fused", "foreach", "capturable", "differentiable"})
"""Hyperparameters that choose how an optimizer computes its step, not what; a load leaves those of the job unchanged."""


def groups(held: Sequence[RankParameter], optimizer: Optimizer) -> list[tuple[RankParameter, int]]:
    """Return the parameters that the optimizer steps, each with the index of its group."""
    of = {p: place for place, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return [(h, of[h.parameter]) for h in held if h.parameter in of]


def settings(group: Mapping[str, Any]) -> Settings:
    """Return the hyperparameters of a group by name: numbers, switches and tuples of them."""
    plain = {name: _plain(value) for name, value in group.items()}
    return {name: value for name, value in plain.items() if isinstance(value, float | int | bool | tuple)}


def _plain(value: object) -> object:
    """Return the value as a Python number if it is a number of torch or numpy, and otherwise unchanged."""
    if _is_number(value):
        return value.item()
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return float(value) if isinstance(value, float) else value


def _is_number(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def check_groups(
    place: str, held: Sequence[RankParameter], optimizer: Optimizer, saved: Mapping[str, Settings], peers: Peers
) -> None:
    """Check that the parameters of each group were saved with equal hyperparameters; all ranks call it.

    Raises:
        PlanError: they were not; names two parameters; raised on all ranks, before a group is changed.
    """
    firsts: dict[int, tuple[str, Settings]] = {}
    with peers.failing_together():
        for h, group in groups(held, optimizer):
            values = {name: value for name, value in saved[h.key].items() if name not in IMPLEMENTATION_SETTINGS}
            key, first = firsts.setdefault(group, (h.key, values))
            name = next((name for name in sorted(first.keys() | values) if first.get(name) != values.get(name)), "")
            if name:
                raise PlanError(
                    "The parameters of a group of the optimizer were saved with different hyperparameters",
                    where=place,
                    got=f"{name} {first.get(name)} of {key} and {values.get(name)} of {h.key} in one group",
                    fix="Make the groups of the optimizer that was saved, or load without one",
                )


def put_groups(
    held: Sequence[RankParameter], optimizer: Optimizer, saved: Mapping[str, Settings], peers: Peers
) -> None:
    """Set the hyperparameters of groups in place; a learning rate in a tensor stays in it. All ranks call it.

    Names that the group does not have yet are set too, as a scheduler that is made later continues from them (``initial_lr``). A group
    without a parameter of this rank, as on pipeline ranks, takes the values of another rank's group with the same index.
    """
    of_group = {index: saved[h.key] for h, index in groups(held, optimizer)}
    of_ranks = peers.all_gather((len(optimizer.param_groups), of_group))
    if len({count for count, _ in of_ranks}) == 1:  # otherwise groups with the same index do not correspond
        for _, elsewhere in of_ranks:
            of_group = elsewhere | of_group
    for index, values in of_group.items():
        group = optimizer.param_groups[index]
        for name, value in values.items():
            if name in IMPLEMENTATION_SETTINGS:
                continue
            if _is_number(old := group.get(name)):
                old.fill_(value)
            else:
                group[name] = value


def make_state(optimizer: Optimizer) -> list[Tensor]:
    """Make an optimizer create the state tensors that it lacks by a step that changes no parameter; return the parameters of these states."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    stateless = [p for p in parameters if p not in optimizer.state]
    if not stateless:
        return []
    gradients = [(p, p.grad) for group in optimizer.param_groups for p in group["params"]]
    rates = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, rate in rates:
            group["lr"] = torch.zeros_like(rate) if isinstance(rate, Tensor) else 0.0
        for p, _ in gradients:
            p.grad = None
        for p in stateless:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    finally:  # the step may be refused
        for group, rate in rates:
            group["lr"] = rate
        for p, gradient in gradients:
            p.grad = gradient
    return stateless


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor to write or read: ``value`` has the elements from ``offset`` on of the tensor ``name`` of shape ``whole``."""

    name: str
    whole: tuple[int, ...]
    offset: tuple[int, ...]
    value: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the box."""
        return tuple(self.value.shape)

    @property
    def box(self) -> tuple[slice, ...]:
        """The slices that cut the box out of the complete tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offset, self.shape, strict=True))


@dataclass(slots=True, kw_only=True)
class RankContents:
    """This rank's part of a checkpoint.

    Attributes:
        parts: the boxes of tensors that this rank writes, in the memory of the job.
        settings: hyperparameters of each parameter's group, by its key.
        numbers: states of the optimizer that are not tensors, by parameter and name.
        states: encoded states of schedulers, loaders and generators, by kind, each with the rank, or the data rank, that it belongs to.
    """

    parts: list[Part] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, dict[str, Any]] = field(default_factory=dict)
    states: dict[str, tuple[int, Any]] = field(default_factory=dict)


def local_box(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Return a tensor's complete shape, the offset of this rank's elements in it, and these elements.

    Raises:
        UsageError: this rank has other elements than torch's even split gives it.
    """
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
    """Return this rank's elements of a tensor, without padding."""
    whole, offset, local = local_box(value)
    if padding is not None:
        dim, length = padding.dim, padding.length
        count = min(max(length - offset[dim], 0), local.shape[dim])
        local = local.narrow(dim, 0, count)
        offset = (*offset[:dim], min(offset[dim], length), *offset[dim + 1 :])
        whole = (*whole[:dim], length, *whole[dim + 1 :])
    return Part(name=name, whole=whole, offset=offset, value=local)


def padding_of(value: Tensor, padding: Padding) -> Tensor:
    """Return this rank's elements of the padding, which are zeros."""
    _, offset, local = local_box(value)
    first = min(max(padding.length - offset[padding.dim], 0), local.shape[padding.dim])
    return local.narrow(padding.dim, first, local.shape[padding.dim] - first)


def tensors_of(
    held: Sequence[RankParameter], optimizer: Optimizer | None, fresh: Collection[str] = ()
) -> Iterator[tuple[str, Tensor, Padding | None]]:
    """Yield parameters and states of the optimizer by name, each with its padding; without the states of ``fresh`` parameters."""
    for h in held:
        yield f"model.{h.key}", h.parameter.detach(), h.padding
    for h in held:
        states = {} if optimizer is None or h.key in fresh else optimizer.state.get(h.parameter, {})
        for name, value in states.items():
            if isinstance(value, Tensor):
                is_long = value.shape == h.parameter.shape
                yield f"optimizer.{h.key}.{name}", value, h.padding if is_long else None


def add_optimizer(contents: RankContents, held: Sequence[RankParameter], optimizer: Optimizer) -> None:
    """Add the hyperparameters of an optimizer, and its states that are not tensors.

    Raises:
        UsageError: a state is neither a tensor nor a number or text.
    """
    for h, group in groups(held, optimizer):
        plain = settings(optimizer.param_groups[group])
        contents.settings[h.key] = encode_state(plain, {}, "", where="the optimizer's groups")
    for h in held:
        for name, value in optimizer.state.get(h.parameter, {}).items():
            if not isinstance(value, Tensor):
                tensors: dict[str, Tensor] = {}
                encoded = encode_state(value, tensors, "", where=f"the optimizer's state {name} of {h.key}")
                if tensors:
                    raise UsageError(
                        f"A checkpoint cannot hold the tensors inside of the optimizer's state {name} of {h.key}",
                        fix="Use an optimizer whose states are tensors and numbers, one by one",
                    )
                contents.numbers.setdefault(h.key, {})[name] = encoded


def add_state(contents: RankContents, kind: str, owner: int, given: Any) -> None:
    """Add a state of a scheduler, a loader, or the generators.

    Raises:
        UsageError: the state has a value that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    contents.states[kind] = owner, encode_state(given, tensors, f"state.{kind}", where=f"the state of the {kind}")
    contents.parts += [part_of(name, tensor) for name, tensor in tensors.items()]


def state_dicts(given: Any, what: str) -> Any:
    """Return the ``state_dict()`` of an object, or of each object in a list.

    Raises:
        UsageError: an object has no such method.
    """
    if isinstance(given, list | tuple):
        return [state_dicts(item, what) for item in given]
    if not callable(getattr(given, "state_dict", None)) or not callable(getattr(given, "load_state_dict", None)):
        raise UsageError(
            f"The {what} is a {type(given).__name__}, which has no state_dict() and load_state_dict()",
            fix="Pass what has both, or a list of such, or keep its numbers in extra=",
        )
    return given.state_dict()


def put_state_dicts(given: Any, state: Any) -> None:
    """Load the state of an object, or of each object in a list."""
    if isinstance(given, list | tuple):
        for item, item_state in zip(given, state, strict=True):
            put_state_dicts(item, item_state)
        return
    given.load_state_dict(state)


def random_states(device: torch.device) -> dict[str, Any]:
    """Return the states of the generators of Python, numpy and torch in this process."""
    version, words, gauss = random.getstate()
    states = {
        "python": [version, torch.tensor(words, dtype=torch.int64), gauss],
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    return states | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def put_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the states of generators."""
    version, words, gauss = states["python"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def with_elements(parts: Iterable[Part]) -> list[Part]:
    """Return the parts without the empty boxes of tensors that have elements."""
    return [part for part in parts if part.value.numel() or not prod(part.whole)]


def model_parts(graph: Graph, held: Sequence[RankParameter], *, gradients: bool = False) -> Iterator[Part]:
    """Yield the boxes of the model's parameters (or gradients), by its own names, that this rank sends."""
    parameters, lengths = {p.name: p for p in graph.parameters}, defaultdict[str, int](int)
    for p in graph.parameters:
        if p.part is not None:
            lengths[p.fqn] = max(lengths[p.fqn], p.part.stop)
    for h in held:
        value = h.parameter.grad if gradients else h.parameter.detach()
        if value is None or not h.is_sent:
            continue
        parameter = parameters[h.name]
        part = part_of(parameter.fqn, value, h.padding)
        if parameter.part is not None:
            dim, offset, whole = parameter.part.dim, list(part.offset), list(part.whole)
            offset[dim] += parameter.part.start
            whole[dim] = lengths[parameter.fqn]
            part = replace(part, offset=tuple(offset), whole=tuple(whole))
        yield part


class WholeTensors:
    """Complete tensors, put together from the boxes that ranks hold; all ranks make one and make the same calls.

    Args:
        parts: the boxes that this rank sends; no other rank sends the same ones.

    Attributes:
        shapes: of all tensors, by name.
    """

    def __init__(self, parts: Iterable[Part], peers: Peers) -> None:
        self._peers, sent = peers, with_elements(parts)
        self._values = {(part.name, part.offset): part.value for part in sent}
        self._boxes: defaultdict[str, list[tuple[int, tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        boxes = [(part.name, part.whole, part.offset, part.shape, part.value.dtype) for part in sent]
        for rank, of_rank in enumerate(peers.all_gather(boxes)):
            for name, whole, offset, shape, dtype in of_rank:
                self.shapes[name], self._dtypes[name] = whole, dtype
                self._boxes[name].append((rank, offset, shape))

    def complete(self, name: str, *, dtype: torch.dtype | None = None, to: int | None = None) -> Tensor | None:
        """Return a complete tensor on the host: on every rank, or on rank ``to`` alone and None on the others."""
        rank, group, dtype = self._peers.rank, self._peers.group, dtype or self._dtypes[name]
        result = torch.empty(self.shapes[name], dtype=dtype) if to in (None, rank) else None
        for source, offset, shape in self._boxes[name]:
            if source == rank:
                value = self._values[name, offset].to("cpu", dtype).contiguous()
            elif result is not None:
                value = torch.empty(shape, dtype=dtype)
            else:
                continue
            data = value.reshape(-1).view(torch.uint8)
            if to is None and group is not None:
                dist.broadcast(data, group_src=source, group=group)
            elif source != rank:
                dist.recv(data, group_src=source, group=group)
            elif to not in (None, rank):
                dist.send(data, group_dst=to, group=group)
            if result is not None:
                result[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = value
        return result

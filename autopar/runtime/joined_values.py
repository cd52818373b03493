"""A value of the model put together from what ranks and micro-batches have of it, and outputs in the classes that the model returns.

On every axis a part of a dim is joined to the others, a pending sum is summed, and of what is the same one is taken. Axes are undone in
the reverse of the order in which they were applied; samples come last, over micro-batches and then over data ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from fractions import Fraction
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from autopar.graph.elements import Structure, number_at
from autopar.graph.graph import Layout, Ref, TensorSpec
from autopar.lower.program import Program
from autopar.ops.sequence import zigzag
from autopar.plan.mesh import DATA_AXES, R, S, Type
from autopar.rules.apply import BATCH
from autopar.rules.strategy import RING
from autopar.runtime.step.other_runs import PartialBatch
from autopar.runtime.world import World

_MESH = ("dp_replicate", "dp_shard", "cp", "tp")
"""The axes of a value that every pipeline rank has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Which samples an output is of.

    Attributes:
        counts: of each data rank's; those of all ranks make the batch.
        partial: which samples each of this rank's micro-batches has; None: they are full.
        is_global: whether all ranks were given one batch.
        total: of the batch that was given.
    """

    counts: tuple[int, ...]
    partial: PartialBatch | None
    is_global: bool
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """A value inside of a stage.

    Attributes:
        ref, traced: its name, and its spec as traced.
        spec, layout: of this rank's part in one micro-batch.
        pp_rank: of the stage that makes it.
    """

    ref: Ref
    traced: TensorSpec
    spec: TensorSpec
    layout: Layout
    pp_rank: int

    @property
    def over_samples(self) -> Type:
        """Its type on axis ``batch``; R where it is the same for all samples."""
        return dict(self.layout).get(BATCH, R)


class Join:
    """Joins values on one rank; all ranks call it alike."""

    def __init__(self, program: Program, world: World) -> None:
        self._world = world
        plan = program.plan
        self._micro_batch = plan.micro_batch_of(world.data_index)
        self._groups = {axis: world.axis_group((axis,)) for axis in ("pp", "cp", "tp")}
        self._data = world.axis_group(DATA_AXES)
        self._zigzag = {"cp"} if any(op.target == RING for op in program.graph.ops) else set[str]()

    def stacked(self, tap: Tap, taken: Mapping[int, Mapping[Ref, Tensor]], count: int) -> Tensor:
        """A rank's part in all micro-batches, behind a dim that counts these; on every pipeline rank."""
        group, shape = self._groups["pp"], (count, *tap.spec.shape)
        is_here = self._world.coordinate["pp"] == tap.pp_rank
        if is_here:
            parts = [taken[number][tap.ref] for number in range(count)]
            value = torch.stack(parts) if count > 1 else parts[0].unsqueeze(0)
        else:
            value = torch.empty(shape, dtype=tap.spec.dtype, device=self._world.device)
        if group is not None:
            value = value.contiguous()
            dist.broadcast(_bytes(value), src=dist.get_global_rank(group, tap.pp_rank), group=group)
        return value

    def complete(self, tap: Tap, value: Tensor, samples: Samples) -> Tensor:
        """The whole value for the samples of the batch that was given."""
        for axis, kind in reversed(tap.layout):
            if axis != BATCH:
                value = self._over(axis, kind, value)
        value = _cut(value, tap)
        is_sum = tap.over_samples.kind == "P"  # what is added up over samples is that of the global batch
        return self._batch(tap, value, samples, over_data=samples.is_global or is_sum)

    def split(self, tap: Tap, value: Tensor, samples: Samples) -> Tensor:
        """The value of the global batch as a DTensor that stays where it is, as far as a DTensor can say so."""
        kinds, batch = dict(tap.layout), tap.over_samples
        longer = self._longer(tap)
        for axis, kind in reversed(tap.layout):
            if axis == BATCH:
                continue
            mixed = kind.is_split and value.shape[0] > 1 and batch.is_split and batch.dim == kind.dim
            if mixed or (kind.is_split and (kind.dim in longer or axis in self._zigzag)):
                value = self._over(axis, kind, value)
                del kinds[axis]
        value = _cut(value, tap)
        is_uneven = batch.is_split and len(set(samples.counts)) > 1
        value = self._batch(tap, value, samples, over_data=is_uneven)
        if is_uneven:
            del kinds[BATCH]
        axes = tuple(axis for axis in _MESH if getattr(self._world.mesh, axis) > 1)
        if not axes:
            return value
        placements = [placement_of(kinds.get(BATCH if axis in DATA_AXES else axis)) for axis in axes]
        return DTensor.from_local(value, self._world.device_mesh[axes], placements, run_check=False)

    def is_local(self, tap: Tap, samples: Samples) -> bool:
        """Whether this rank has all of the value for the samples that it was given."""
        if self._data is not None and (
            tap.over_samples.kind == "P" or (samples.is_global and tap.over_samples.is_split)
        ):
            return False
        others = [axis for axis, kind in tap.layout if axis != BATCH and kind.kind not in ("I", "R")]
        return all(getattr(self._world.mesh, axis, 1) == 1 for axis in others)

    def _over(self, axis: str, kind: Type, value: Tensor) -> Tensor:
        group = self._groups[axis]
        if group is None or kind.kind in ("I", "R"):
            return value
        if kind.kind == "P":
            return _summed(value, group)
        size = dist.get_world_size(group)
        value = gathered(value, kind.dim + 1, group, [value.shape[kind.dim + 1]] * size)
        return zigzag(value, kind.dim + 1, size, back=True) if axis in self._zigzag else value

    def _batch(self, tap: Tap, value: Tensor, samples: Samples, *, over_data: bool) -> Tensor:
        kind, partial = tap.over_samples, samples.partial
        if kind.kind in ("I", "R"):
            return value[0]
        if kind.kind == "P":
            parts = [x if partial is None else partial.weighed(x, i) for i, x in enumerate(value)]
            total = torch.stack(parts).sum(0).to(value.dtype)
            return _summed(total, self._data) if self._data is not None and over_data else total
        each = value.shape[kind.dim + 1] // self._micro_batch
        counts = [self._micro_batch] * len(value) if partial is None else [len(own) for own in partial.micro_batches]
        parts = [x.narrow(kind.dim, 0, n * each) for x, n in zip(value, counts, strict=True)]
        own = torch.cat(parts, kind.dim) if len(parts) > 1 else parts[0]
        if self._data is None or not over_data:
            return own
        return gathered(own, kind.dim, self._data, [n * each for n in samples.counts])

    def _longer(self, tap: Tap) -> set[int]:
        """Dims that a plan has lengthened."""
        found = set[int]()
        for dim, size in enumerate(tap.spec.shape):
            axes = [axis for axis, kind in tap.layout if axis != BATCH and kind.is_split and kind.dim == dim]
            if (
                tap.over_samples != S(dim)
                and size * prod(getattr(self._world.mesh, axis) for axis in axes) > tap.traced.shape[dim]
            ):
                found.add(dim)
        return found


def placement_of(kind: Type | None) -> Placement:
    """What DTensor calls a type of one mesh axis; None: the same on all ranks."""
    if kind is None or kind.kind in ("I", "R"):
        return Replicate()
    return Partial() if kind.kind == "P" else Shard(kind.dim)


def _cut(value: Tensor, tap: Tap) -> Tensor:
    """Without what a plan has lengthened."""
    for dim, size in enumerate(tap.traced.shape):
        if value.shape[dim + 1] > size and tap.over_samples != S(dim):
            value = value.narrow(dim + 1, 0, size)
    return value


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    value = value.contiguous().clone()
    dist.all_reduce(value, group=group)
    return value


def _bytes(value: Tensor) -> Tensor:
    """The same memory as bytes: backends differ in the dtypes that they send."""
    return value.view(-1).view(torch.uint8)


def gathered(value: Tensor, dim: int, group: dist.ProcessGroup, lengths: Sequence[int]) -> Tensor:
    """Parts of a dim side by side, of which ranks may have different lengths; all ranks of the group call it."""
    longest, own = max(lengths), value.movedim(dim, 0).contiguous()
    rest = own.shape[1:]
    if own.shape[0] < longest:
        own = torch.cat([own, own.new_zeros((longest - own.shape[0], *rest))])
    parts = [torch.empty_like(own) for _ in lengths]
    if own.numel():
        dist.all_gather([_bytes(part) for part in parts], _bytes(own), group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).movedim(0, dim).contiguous()


def rebuilt(structure: Structure, loss: Any, leaf: Callable[[int], Any], more: Fraction) -> Any:
    """The outputs.

    Args:
        loss: what stands for the loss; None: nothing.
        leaf: gives a tensor by its index.
        more: by how many batches of the traced size the batch is larger than one.
    """
    match structure.kind:
        case "loss":
            return loss
        case "tensor":
            return leaf(structure.index)
        case "value":
            one, two = structure.value, structure.twice
            is_count = type(one) in (int, float) and type(two) is type(one)
            return number_at(one, two, more) if is_count else one  # type: ignore[arg-type]
    items = [rebuilt(item, loss, leaf, more) for item in structure.items]
    if structure.kind == "list":
        return items
    if structure.kind == "tuple":
        return tuple(items)
    named = dict(zip(structure.names, items, strict=True))
    return named if structure.type == ("", "") else _made(structure, named)


def _made(structure: Structure, named: dict[Any, Any]) -> Any:
    kind = _class_of(structure.type)
    if structure.kind == "fields":
        return SimpleNamespace(**named) if kind is None else _with_fields(kind, named)
    if kind is None:
        return named
    try:
        made = kind()
        for key, value in named.items():
            made[key] = value
    except TypeError:  # one that is made in a way of its own
        return named
    return made


def _with_fields(kind: type[Any], named: dict[str, Any]) -> Any:
    try:
        return kind(**named)
    except TypeError:  # it is made in a way of its own, which its fields do not tell
        made = object.__new__(kind)
        for name, value in named.items():
            object.__setattr__(made, name, value)
        return made


def _class_of(place: tuple[str, str]) -> type[Any] | None:
    """A class of a module that is imported; None for one that stands inside of a function."""
    found: Any = sys.modules.get(place[0])
    for name in place[1].split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, type) and (is_dataclass(found) or issubclass(found, tuple | Mapping)) else None

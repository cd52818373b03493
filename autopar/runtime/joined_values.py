"""Complete values of a model, joined from the parts of ranks and micro-batches, and outputs in the classes that the model returns.

On every axis shards are concatenated, pending sums are summed, and of equal values one is taken. Axes are undone in the reverse of the
order in which they were applied; samples come last, first over micro-batches and then over data ranks.
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
from autopar.runtime.step.other_runs import BatchSplit
from autopar.runtime.world import World

_MESH = ("dp_replicate", "dp_shard", "cp", "tp")
"""The mesh axes of a value that every pipeline rank has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The samples that an output has.

    Attributes:
        split: the samples of each data rank, and of each of this rank's micro-batches.
        is_global: whether all ranks were given one batch.
        total: samples of the batch that was given.
    """

    split: BatchSplit
    is_global: bool
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tap:
    """A value inside a stage.

    Attributes:
        ref, traced: its name, and its spec as traced.
        spec, layout: of this rank's part in one micro-batch.
        pp_rank: of the stage that computes it.
    """

    ref: Ref
    traced: TensorSpec
    spec: TensorSpec
    layout: Layout
    pp_rank: int

    @property
    def over_samples(self) -> Type:
        """Its type on axis ``batch``; R if it is the same for all samples."""
        return dict(self.layout).get(BATCH, R)


class Join:
    """Joins values; all ranks make the same calls."""

    def __init__(self, program: Program, world: World) -> None:
        self._world = world
        self._groups = {axis: world.axis_group((axis,)) for axis in ("pp", "cp", "tp")}
        self._data = world.axis_group(DATA_AXES)
        self._zigzag = {"cp"} if any(op.target == RING for op in program.graph.ops) else set[str]()

    def stacked(self, tap: Tap, taken: Mapping[int, Mapping[Ref, Tensor]], count: int) -> Tensor:
        """Return this rank's part in all micro-batches, stacked along a new first dim; the same on every pipeline rank."""
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
        """Return the complete value for the samples of the batch that was given."""
        for axis, kind in reversed(tap.layout):
            if axis != BATCH:
                value = self._undo_axis(axis, kind, value)
        value = _cut(value, tap)
        is_sum = tap.over_samples.kind == "P"  # a sum over samples is that of the global batch
        return self._join_samples(tap, value, samples, over_data=samples.is_global or is_sum)

    def split(self, tap: Tap, value: Tensor, samples: Samples) -> Tensor:
        """Return the value of the global batch as a DTensor that stays split, as far as a DTensor can represent it."""
        kinds, batch = dict(tap.layout), tap.over_samples
        longer = self._lengthened_dims(tap)
        for axis, kind in reversed(tap.layout):
            if axis == BATCH:
                continue
            mixed = kind.is_split and value.shape[0] > 1 and batch.is_split and batch.dim == kind.dim
            if mixed or (kind.is_split and (kind.dim in longer or axis in self._zigzag)):
                value = self._undo_axis(axis, kind, value)
                del kinds[axis]
        value = _cut(value, tap)
        is_uneven = batch.is_split and len(set(samples.split.counts)) > 1
        value = self._join_samples(tap, value, samples, over_data=is_uneven)
        if is_uneven:
            del kinds[BATCH]
        axes = tuple(axis for axis in _MESH if getattr(self._world.mesh, axis) > 1)
        if not axes:
            return value
        placements = [placement_of(kinds.get(BATCH if axis in DATA_AXES else axis)) for axis in axes]
        return DTensor.from_local(value, self._world.device_mesh[axes], placements, run_check=False)

    def is_local(self, tap: Tap, samples: Samples) -> bool:
        """Return whether this rank has the complete value for the samples that it was given."""
        if self._data is not None and (
            tap.over_samples.kind == "P" or (samples.is_global and tap.over_samples.is_split)
        ):
            return False
        others = [axis for axis, kind in tap.layout if axis != BATCH and kind.kind not in ("I", "R")]
        return all(getattr(self._world.mesh, axis, 1) == 1 for axis in others)

    def _undo_axis(self, axis: str, kind: Type, value: Tensor) -> Tensor:
        group = self._groups[axis]
        if group is None or kind.kind in ("I", "R"):
            return value
        if kind.kind == "P":
            return _summed(value, group)
        size = dist.get_world_size(group)
        value = gathered(value, kind.dim + 1, group, [value.shape[kind.dim + 1]] * size)
        return zigzag(value, kind.dim + 1, size, back=True) if axis in self._zigzag else value

    def _join_samples(self, tap: Tap, value: Tensor, samples: Samples, *, over_data: bool) -> Tensor:
        kind, split = tap.over_samples, samples.split
        if kind.kind in ("I", "R"):
            return value[0]
        if kind.kind == "P":
            parts = [split.weighed(x, i) for i, x in enumerate(value)]
            total = torch.stack(parts).sum(0).to(value.dtype)
            return _summed(total, self._data) if self._data is not None and over_data else total
        per_sample = value.shape[kind.dim + 1] // split.size
        counts = [len(indices) for indices in split.micro_batches]
        parts = [x.narrow(kind.dim, 0, n * per_sample) for x, n in zip(value, counts, strict=True)]
        local = torch.cat(parts, kind.dim) if len(parts) > 1 else parts[0]
        if self._data is None or not over_data:
            return local
        return gathered(local, kind.dim, self._data, [n * per_sample for n in samples.split.counts])

    def _lengthened_dims(self, tap: Tap) -> set[int]:
        """Dims that the plan has lengthened."""
        dims = set[int]()
        for dim, size in enumerate(tap.spec.shape):
            axes = [axis for axis, kind in tap.layout if axis != BATCH and kind.is_split and kind.dim == dim]
            if (
                tap.over_samples != S(dim)
                and size * prod(getattr(self._world.mesh, axis) for axis in axes) > tap.traced.shape[dim]
            ):
                dims.add(dim)
        return dims


def placement_of(kind: Type | None) -> Placement:
    """Return the DTensor placement of a type on one mesh axis; None means the same on all ranks."""
    if kind is None or kind.kind in ("I", "R"):
        return Replicate()
    return Partial() if kind.kind == "P" else Shard(kind.dim)


def _cut(value: Tensor, tap: Tap) -> Tensor:
    """Return the value without the elements by which the plan has lengthened it."""
    for dim, size in enumerate(tap.traced.shape):
        if value.shape[dim + 1] > size and tap.over_samples != S(dim):
            value = value.narrow(dim + 1, 0, size)
    return value


def _summed(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    value = value.contiguous().clone()
    dist.all_reduce(value, group=group)
    return value


def _bytes(value: Tensor) -> Tensor:
    """Return the same memory as bytes: backends differ in the dtypes that they support."""
    return value.view(-1).view(torch.uint8)


def gathered(value: Tensor, dim: int, group: dist.ProcessGroup, lengths: Sequence[int]) -> Tensor:
    """Return the ranks' parts concatenated along ``dim``, in which they may have different lengths; all ranks of the group call it."""
    longest, local = max(lengths), value.movedim(dim, 0).contiguous()
    other_sizes = local.shape[1:]
    if local.shape[0] < longest:
        local = torch.cat([local, local.new_zeros((longest - local.shape[0], *other_sizes))])
    parts = [torch.empty_like(local) for _ in lengths]
    if local.numel():
        dist.all_gather([_bytes(part) for part in parts], _bytes(local), group=group)
    return torch.cat([part[:length] for part, length in zip(parts, lengths, strict=True)]).movedim(0, dim).contiguous()


def rebuilt(structure: Structure, loss: Any, leaf: Callable[[int], Any], more: Fraction) -> Any:
    """Return the outputs in the structure of the model.

    Args:
        loss: what the loss is replaced by; None for nothing.
        leaf: gives a tensor by its index.
        more: by how many batches of the traced size the batch exceeds one.
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
    return named if structure.type == ("", "") else _instance(structure, named)


def _instance(structure: Structure, named: dict[Any, Any]) -> Any:
    kind = _class_of(structure.type)
    if structure.kind == "fields":
        return SimpleNamespace(**named) if kind is None else _with_fields(kind, named)
    if kind is None:
        return named
    try:
        mapping = kind()
        for key, value in named.items():
            mapping[key] = value
    except TypeError:  # its constructor has other arguments
        return named
    return mapping


def _with_fields(kind: type[Any], named: dict[str, Any]) -> Any:
    try:
        return kind(**named)
    except TypeError:  # its constructor takes other arguments than its fields
        instance = object.__new__(kind)
        for name, value in named.items():
            object.__setattr__(instance, name, value)
        return instance


def _class_of(place: tuple[str, str]) -> type[Any] | None:
    """Return a class of an imported module; None if it is defined inside a function."""
    value: Any = sys.modules.get(place[0])
    for name in place[1].split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, type) and (is_dataclass(value) or issubclass(value, tuple | Mapping)) else None

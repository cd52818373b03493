"""One rank's samples of a batch: which, in which micro-batches, with which sums over all; and whether ranks were given the same.

The ranks of ``tp``, ``cp`` and ``pp`` take one part of the global batch together. Where each brings another (a shuffle without a
common seed, a sampler by ``dist.get_rank()``), sums over ``tp`` are of different tokens, and the last stage of a pipeline holds
other labels than the first has inputs for: losses look like losses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import spmd_types
import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import UsageError
from autopar.graph.graph import Input
from autopar.lower.emit import MICRO_BATCH_WEIGHT, SHARE
from autopar.lower.program import Program
from autopar.plan.mesh import DATA_AXES
from autopar.plan.plan import Plan
from autopar.runtime.failure_watch import Alarm, Calls
from autopar.runtime.job import FAKE
from autopar.runtime.same_values import checksums, events
from autopar.runtime.step.other_runs import BatchSizes, PartialBatch, partial_of
from autopar.runtime.step.runner import Batch, micro_batches
from autopar.runtime.world import World
from autopar.tracing.batch import named_inputs

_LOGGER = logging.getLogger("autopar")

EVERY = 32
"""Of how many steps one is looked at, the first that is not refused among them (which is not timed either)."""

_ELEMENTS = 1 << 16
"""Of an input that are looked at, at most: two batches differ nearly everywhere."""


class SharedSamples:
    """Compares what ranks were given; every rank of the job makes one and enters the same calls."""

    def __init__(self, world: World, inputs: Sequence[Input]) -> None:
        self._rank, self._group = world.rank, world.host_group()
        self._data_index = [world.mesh.data_index(rank) for rank in range(world.mesh.world_size)]
        self._inputs = tuple(inputs)
        self._calls, self._told = 0, False
        self._pending: _Marks | None = None
        self._is_alone = len(self._data_index) == 1 or dist.get_backend() == FAKE

    def check(self, given: Mapping[str, Tensor], local: Mapping[str, Tensor], own: range, alarm: Alarm) -> None:
        """Before a step; all ranks call it, and all raise the same.

        Batches of the first step are compared in it. Those of a later one are marked where they lie, and compared before the step
        after it: the host has given the device that whole step meanwhile, and does not wait for what is queued before it.

        A warning, once, where data ranks were given different global batches: each takes its part of another one.

        Args:
            given: the batch as it came, with the global batch or this rank's samples.
            local: this rank's samples of it, as a step takes them.
            own: which samples of the global batch these are.
            alarm: of the call.

        Raises:
            UsageError: ranks of one ``data_rank`` have different samples, or any have different values of an input without samples.
        """
        if self._is_alone:
            return
        pending, self._pending = self._pending, None
        number, self._calls = self._calls, self._calls + 1
        if number % EVERY == 0:
            self._pending = _Marks(self._inputs, given, local, own)
            if number == 0:
                pending, self._pending = self._pending, None
        if pending is None:
            return
        alarm.runs()
        found = _of_all_ranks(pending.read(), len(self._data_index), self._group)
        alarm.met()
        self._calls = 0  # where ranks are refused, the next step is again a first one
        for place, leaf in enumerate(self._inputs):
            self._compare(leaf, [row[0][place] for row in found])
        self._calls = number + 1
        self._tell_of_other_batches([row[1] for row in found])

    def are_equal(self, given: Mapping[str, Tensor], alarm: Alarm) -> bool:
        """Whether all ranks were given the same samples; all ranks call it."""
        if self._is_alone:
            return False
        mine = _Marks(self._inputs, given, given, range(0)).read()
        alarm.runs()
        rows = _of_all_ranks(mine, len(self._data_index), self._group)
        alarm.met()
        return all(row == rows[0] for row in rows)

    def _compare(self, leaf: Input, marks: Sequence[int]) -> None:
        first: dict[int, int] = {}
        for rank, part in enumerate(self._data_index):
            other = first.setdefault(0 if leaf.batch_dim is None else part, rank)
            if marks[rank] != marks[other]:
                shared = f"par.data_rank {part}" if leaf.batch_dim is not None else "an input that has no samples"
                raise UsageError(
                    f"Ranks {rank} and {other} were given different samples, but must share them ({shared})",
                    where=leaf.name,
                    fix="Sample by par.data_rank (DistributedSampler(data, num_replicas=par.data_size, rank=par.data_rank)), or "
                    "shuffle and draw with a seed that is the same on all ranks",
                )

    def _tell_of_other_batches(self, wholes: Sequence[Sequence[int]]) -> None:
        if self._told or all(row == wholes[0] for row in wholes):
            return
        self._told = True
        if self._rank == 0:
            _LOGGER.warning(
                "data ranks were given different global batches, and each takes its part of its own: samples may come twice or "
                "never; shuffle and draw with a seed that is the same on all ranks, or give each rank its own samples "
                "(DistributedSampler(data, num_replicas=par.data_size, rank=par.data_rank))"
            )


class _Marks:
    """Numbers of each input's elements and their places, on their way to the host from wherever the input lies.

    Args:
        inputs, given, local, own: see :meth:`SharedSamples.check`.
    """

    def __init__(
        self, inputs: Sequence[Input], given: Mapping[str, Tensor], local: Mapping[str, Tensor], own: range
    ) -> None:
        is_pinned = any(given[leaf.name].is_cuda for leaf in inputs)
        self._numbers = torch.zeros(2, len(inputs), dtype=torch.int64, pin_memory=is_pinned)
        for place, leaf in enumerate(inputs):
            value, dim = given[leaf.name].to(local[leaf.name].dtype), leaf.batch_dim
            is_whole = dim is not None and value.shape[dim] != local[leaf.name].shape[dim]
            if is_whole:
                self._numbers[1, place].copy_(_mark(value), non_blocking=True)
            part = value.narrow(dim, own.start, len(own)) if is_whole and dim is not None else value
            self._numbers[0, place].copy_(_mark(part), non_blocking=True)
        self._events = events(given[leaf.name] for leaf in inputs)

    def read(self) -> Tensor:
        """[2, inputs]: of this rank's samples, and of the whole global batch, 0 where it was not given."""
        for event in self._events:
            event.synchronize()
        return self._numbers


def _mark(value: Tensor) -> Tensor:
    """A number of the elements and their places: a scalar where the value lies."""
    flat = value.detach().contiguous().view(-1)
    return checksums([flat[:: (flat.numel() // _ELEMENTS) | 1]])[0]


def _of_all_ranks(mine: Tensor, num_ranks: int, group: dist.ProcessGroup | None) -> list[Any]:
    """The numbers of every rank of the job, as nested lists."""
    rows = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(rows, mine, group=group)
    return [row.tolist() for row in rows]


def num_samples(batch: object, inputs: Sequence[Input]) -> int | None:
    """Samples of a batch; None where inputs have none, or differ in how many."""
    if not isinstance(batch, Mapping):
        return None
    batch = named_inputs(batch)
    found = {batch[leaf.name].shape[leaf.batch_dim] for leaf in inputs if _has_samples(batch.get(leaf.name), leaf)}
    return found.pop() if len(found) == 1 else None


def _has_samples(value: object, leaf: Input) -> TypeGuard[Tensor]:
    return leaf.batch_dim is not None and isinstance(value, Tensor) and value.dim() > leaf.batch_dim


def local_batch(
    batch: Batch,
    inputs: Sequence[Input],
    plan: Plan,
    data_rank: int,
    device: torch.device,
    partial: PartialBatch | None = None,
) -> dict[str, Tensor]:
    """What the data rank takes of a batch, on its device, in the dtypes of ``inputs``; the batch may hold its samples alone.

    Args:
        partial: how it computes a batch of fewer samples, where this is one.

    Page-locked memory is read after this returns; what lies on the device already in the dtype is taken as it is, not copied.

    Raises:
        UsageError: the batch is no mapping, has other inputs, shapes or sizes than the plan, or inputs that need gradients
            where these are on.
    """
    expected = [leaf.name for leaf in inputs]
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"The batch is a {type(batch).__name__}, not a dict",
            fix=f"Give its inputs by name: {{{', '.join(f'{name!r}: ...' for name in expected[:3])}}}",
        )
    batch = named_inputs(batch)
    if set(batch) != set(expected):
        unknown = [name for name in batch if name not in expected]
        raise UsageError(
            "The inputs of the batch are not those of the plan",
            expected=", ".join(expected),
            got=", ".join(batch) or "none",
            fix=f"Leave out {', '.join(unknown)}: what was no tensor in the example inputs is a constant of the plan"
            if unknown and not any(isinstance(batch[name], Tensor) for name in unknown)
            else f"Leave out {', '.join(unknown)}"
            if unknown
            else f"Add {', '.join(name for name in expected if name not in batch)}",
        )
    counts = {
        leaf.name: batch[leaf.name].shape[leaf.batch_dim] for leaf in inputs if _has_samples(batch[leaf.name], leaf)
    }
    if len(set(counts.values())) > 1:
        raise UsageError(
            f"The inputs of the batch have different numbers of samples: {', '.join(f'{n} of {name}' for name, n in counts.items())}",
            fix="Pass inputs of the same samples",
        )
    whole, own = plan.global_batch_size, plan.samples_of(data_rank)
    part = len(own)
    local: dict[str, Tensor] = {}
    for leaf in inputs:
        value, dim = _without_history(batch[leaf.name], leaf.name), leaf.batch_dim
        rest = [size for d, size in enumerate(value.shape) if d != dim]
        if rest != [size for d, size in enumerate(leaf.spec.shape) if d != dim]:
            sizes = ("samples" if d == dim else str(size) for d, size in enumerate(leaf.spec.shape))
            raise UsageError(
                f"{leaf.name} has shape {tuple(value.shape)}, but the plan takes ({', '.join(sizes)})",
                fix="Pad the input to that shape, or search a plan for the new one",
            )
        if dim is not None and partial is not None:
            value = partial.taken(value, dim)
        elif dim is not None:
            if value.shape[dim] not in (whole, part):
                raise UsageError(
                    f"{leaf.name} has {value.shape[dim]} samples",
                    fix=f"Pass {whole} (the complete global batch) or fewer"
                    + ("" if part == whole else f", or {part} (this rank's part: par.samples)"),
                )
            if value.shape[dim] != part:
                value = value.narrow(dim, own.start, part)
        local[leaf.name] = value.to(device, _dtype_for(leaf, value.dtype), non_blocking=True)
    return local


def _dtype_for(leaf: Input, given: torch.dtype) -> torch.dtype:
    """The plan's dtype, where a batch has floating numbers for floating ones, or integers that fit for integers.

    Raises:
        UsageError: it has others: the plan has what forward did with the dtype of the example.
    """
    wanted = leaf.spec.dtype
    is_floating = given.is_floating_point and wanted.is_floating_point
    fits = _is_integer(given) and _is_integer(wanted) and torch.promote_types(given, wanted) == wanted
    if not (given == wanted or is_floating or fits):
        raise UsageError.mismatch(
            f"The dtype of {leaf.name}",
            expected=_name(wanted),
            got=_name(given),
            fix=f"Cast it, or search a plan with example inputs in {_name(given)}",
        )
    return wanted


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _without_history(value: object, name: str) -> Tensor:
    """An input as a step takes it.

    Raises:
        UsageError: it is no tensor, or needs a gradient: each rank would leave that of its own samples alone.
    """
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{name} is a {type(value).__name__}, but a tensor in the example inputs", fix="Pass torch.as_tensor(...)"
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{name} requires a gradient, but gradients of a step go to parameters alone",
            fix="Call detach() on it, or make what computes it a part of the model that is given to autopar.parallelize",
        )
    # autograd may not keep what inference mode has made; a copy it may
    return value.clone() if value.is_inference() and not torch.is_inference_mode_enabled() else value


class Batches:
    """Of one parallel model; every rank of the job makes one and calls the same methods."""

    def __init__(self, program: Program, world: World, shared: SharedSamples, alarm: Alarm, calls: Calls) -> None:
        self._program, self._world, self._plan = program, world, program.plan
        self._shared, self._alarm, self._calls = shared, alarm, calls
        self._samples = self._plan.samples_of(world.data_index)
        self._group = world.axis_group(DATA_AXES)
        self._sizes = BatchSizes(
            self._plan, world.data_index, lambda batch: shared.are_equal(named_inputs(batch), alarm)
        )

    def partial(self, batch: Batch, purpose: str) -> PartialBatch | None:
        """How this rank computes a batch that is smaller than the plan's; all ranks meet for one that is."""
        size = num_samples(batch, self._program.graph.inputs)
        if size is None or not self._sizes.is_partial(batch, size, purpose):
            return None
        trains = purpose not in ("evaluate", "predict")
        partial = partial_of(self._program, size, self._world.data_index, trains=trains)
        self._calls.meet(f"{purpose} of {size} samples")
        return partial

    def local(self, batch: Batch, partial: PartialBatch | None) -> dict[str, Tensor]:
        """This rank's samples of a batch, on its device."""
        rank, device = self._world.data_index, self._world.device
        local = local_batch(batch, self._program.graph.inputs, self._plan, rank, device, partial)
        if partial is None:
            self._shared.check(named_inputs(batch), local, self._samples, self._alarm)
        return local

    def count(self, partial: PartialBatch | None) -> int:
        """Micro-batches of a step."""
        return self._plan.num_micro_batches if partial is None else len(partial.micro_batches)

    def totals(self, local: Batch, partial: PartialBatch | None, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The program's sums over the global batch, by name.

        Args:
            state: buffers that steps change, by the graph's names.
        """
        found: dict[str, Tensor] = {}
        for sums in self._program.sums:
            totals: list[Tensor] = []
            with torch.no_grad(), spmd_types.set_current_mesh(self._world.device_mesh):
                for number, part in enumerate(micro_batches(local, self._program.graph.inputs, self.count(partial))):
                    given: dict[str, Any] = {**state, **found, **part, SHARE: 1.0, MICRO_BATCH_WEIGHT: 1.0}
                    if partial is not None:
                        given |= {SHARE: partial.share, MICRO_BATCH_WEIGHT: partial.weights[number]}
                    made = sums.module(*[given[name] for name in sums.inputs])
                    if partial is not None:
                        made = [partial.weighed(value, number) for value in made]
                    totals = list(made) if not totals else [a + b for a, b in zip(totals, made, strict=True)]
            for i, total in enumerate(totals):
                if self._group is not None:
                    totals[i] = total.contiguous().clone()
                    dist.all_reduce(totals[i], group=self._group)
            found.update(zip(sums.outputs, totals, strict=True))
        return found

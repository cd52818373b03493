"""One rank's samples of a batch, its micro-batches and sums over the global batch; and a check that ranks were given the same samples.

The ranks of ``tp``, ``cp`` and ``pp`` work on the same part of the global batch. If each brings different samples (a shuffle without a
common seed, a sampler by ``dist.get_rank()``), sums over ``tp`` mix different tokens, and the last stage of a pipeline has labels of other
inputs than the first one. The losses would still look plausible, so the samples are compared.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard
from zlib import crc32

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
from autopar.runtime.same_values import checksums
from autopar.runtime.step.gradients import RankParameter
from autopar.runtime.step.other_runs import BatchSizes, BatchSplit, split_batch, split_of
from autopar.runtime.step.runner import Batch, micro_batches
from autopar.runtime.world import World
from autopar.tracing.batch import named_inputs

_LOGGER = logging.getLogger("autopar")

EVERY = 256
"""One of so many steps is checked, beginning with the first that is not refused (which is not timed).

The host waits for a batch on the device there, and so for the step before: it may not be often."""

_ELEMENTS = 1 << 16
"""At most so many elements of an input are compared: two batches differ nearly everywhere."""


class SharedSamples:
    """Compares the samples that ranks were given, and what they train; every rank of the job makes one and makes the same calls.

    Args:
        alarm: the alarm of the calls in which samples are compared.
        held: the parameters of this rank.
    """

    def __init__(self, world: World, inputs: Sequence[Input], alarm: Alarm, held: Sequence[RankParameter]) -> None:
        self._rank, self._group, self._alarm, self._held = world.rank, world.host_group(), alarm, held
        self._data_index = [world.mesh.data_index(rank) for rank in range(world.mesh.world_size)]
        self._inputs = tuple(inputs)
        self._calls, self._has_warned = 0, False
        self._is_alone = len(self._data_index) == 1 or dist.get_backend() == FAKE

    def check(self, given: Mapping[str, Tensor], local: Mapping[str, Tensor], own: range) -> None:
        """Compare samples before one step in :data:`EVERY`; all ranks call it, and all raise the same error.

        Logs a warning, once, if data ranks were given different global batches, of which each takes its part.

        Args:
            given: the batch as it was passed, with the global batch or this rank's samples.
            local: this rank's samples of it, as a step takes them.
            own: the positions of these samples in the global batch.

        Raises:
            UsageError: ranks of one ``data_rank`` have different samples, or any ranks have different values of an input without samples;
                a parameter is frozen on some ranks alone.
        """
        if self._is_alone:
            return
        if self._calls % EVERY == 0:
            rows = self._checksums_of_ranks(given, local, own)
            for place, leaf in enumerate(self._inputs):
                self._compare(leaf, [row[0][place] for row in rows])
            self._warn_of_other_batches([row[1] for row in rows])
            self._compare_frozen()
        self._calls += 1  # not if the comparison raises: the next step is compared then

    def are_equal(self, given: Mapping[str, Tensor]) -> bool:
        """Return whether all ranks were given the same samples; all ranks call it."""
        if self._is_alone:
            return False
        rows = self._checksums_of_ranks(given, given, range(0))
        return all(row == rows[0] for row in rows)

    def _checksums_of_ranks(self, given: Mapping[str, Tensor], local: Mapping[str, Tensor], own: range) -> list[Any]:
        """Return for every rank the checksums of each input of its samples, and of the complete global batch (0 if it was not given)."""
        numbers = torch.zeros(2, len(self._inputs), dtype=torch.int64)
        for place, leaf in enumerate(self._inputs):
            value, dim = given[leaf.name].to(local[leaf.name].dtype), leaf.batch_dim
            is_whole = dim is not None and value.shape[dim] != local[leaf.name].shape[dim]
            if is_whole:
                numbers[1, place].copy_(_checksum(value))
            part = value.narrow(dim, own.start, len(own)) if is_whole and dim is not None else value
            numbers[0, place].copy_(_checksum(part))
        return self._of_ranks(numbers)

    def _of_ranks(self, numbers: Tensor) -> list[Any]:
        """Return the numbers of every rank of the job, as nested lists."""
        rows = [torch.empty_like(numbers) for _ in self._data_index]
        self._alarm.runs()
        dist.all_gather(rows, numbers, group=self._group)
        self._alarm.met()
        return [row.tolist() for row in rows]

    def _compare_frozen(self) -> None:
        """Compare which parameters require gradients among the ranks that hold the same ones, whose copies would drift apart."""
        states = sorted((h.name, h.parameter.requires_grad) for h in self._held)
        marks = [crc32(repr(value).encode()) for value in ([name for name, _ in states], states)]
        rows, first = self._of_ranks(torch.tensor(marks)), dict[int, int]()
        for rank, (names, trained) in enumerate(rows):
            other = first.setdefault(names, rank)
            if trained != rows[other][1]:
                raise UsageError(
                    f"Ranks {rank} and {other} have frozen different parameters",
                    fix="Call requires_grad_ for the same parameters on every rank",
                )

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

    def _warn_of_other_batches(self, wholes: Sequence[Sequence[int]]) -> None:
        if self._has_warned or all(row == wholes[0] for row in wholes):
            return
        self._has_warned = True
        if self._rank == 0:
            _LOGGER.warning(
                "data ranks were given different global batches, and each takes its part of its own: samples may come twice or "
                "never; shuffle and draw with a seed that is the same on all ranks, or give each rank its own samples "
                "(DistributedSampler(data, num_replicas=par.data_size, rank=par.data_rank))"
            )


def _checksum(value: Tensor) -> Tensor:
    """Return a checksum of elements and their positions: a scalar on the value's device."""
    flat = value.detach().contiguous().view(-1)
    return checksums([flat[:: (flat.numel() // _ELEMENTS) | 1]])[0]


def num_samples(batch: object, inputs: Sequence[Input]) -> int | None:
    """Return the number of samples of a batch; None if inputs have none, or differ in it."""
    if not isinstance(batch, Mapping):
        return None
    batch = named_inputs(batch)
    sizes = {batch[leaf.name].shape[leaf.batch_dim] for leaf in inputs if _has_samples(batch.get(leaf.name), leaf)}
    return sizes.pop() if len(sizes) == 1 else None


def _has_samples(value: object, leaf: Input) -> TypeGuard[Tensor]:
    return leaf.batch_dim is not None and isinstance(value, Tensor) and value.dim() > leaf.batch_dim


def local_batch(
    batch: Batch,
    inputs: Sequence[Input],
    plan: Plan,
    data_rank: int,
    device: torch.device,
    split: BatchSplit,
) -> dict[str, Tensor]:
    """Return the data rank's samples of a batch, on its device, in the dtypes of ``inputs``. The batch may have only its samples.

    A copy from page-locked memory may still run when this returns. A tensor that has the device and the dtype already is used without a
    copy.

    Args:
        split: how the rank computes the batch.

    Raises:
        UsageError: the batch is no mapping, has other inputs, shapes or sizes than the plan, or has inputs that require gradients while
            gradients are on.
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
        fix = f"Leave out {', '.join(unknown)}"
        if not unknown:
            fix = f"Add {', '.join(name for name in expected if name not in batch)}"
        elif not any(isinstance(batch[name], Tensor) for name in unknown):
            fix += ": what was no tensor in the example inputs is a constant of the plan"
        what, got = "The inputs of the batch are not those of the plan", ", ".join(batch) or "none"
        raise UsageError(what, expected=", ".join(expected), got=got, fix=fix)
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
        other_sizes = [size for d, size in enumerate(value.shape) if d != dim]
        if other_sizes != [size for d, size in enumerate(leaf.spec.shape) if d != dim]:
            sizes = ("samples" if d == dim else str(size) for d, size in enumerate(leaf.spec.shape))
            raise UsageError(
                f"{leaf.name} has shape {tuple(value.shape)}, but the plan takes ({', '.join(sizes)})",
                fix="Pad the input to that shape, or search a plan for the new one",
            )
        if dim is not None and not split.is_full:
            value = split.taken(value, dim)
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
    """Return the plan's dtype, if both it and the batch's are floating, or both integers and the batch's fits.

    Raises:
        UsageError: they differ otherwise: the plan has what forward did with the dtype of the example.
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
    """Return an input as a step takes it.

    Raises:
        UsageError: it is no dense tensor with values, or requires a gradient: each rank would compute only that of its samples.
    """
    if not isinstance(value, Tensor):
        raise UsageError(
            f"{name} is a {type(value).__name__}, but a tensor in the example inputs", fix="Pass torch.as_tensor(...)"
        )
    if value.is_meta or value.layout != torch.strided:
        kind = "on meta, without values" if value.is_meta else f"of layout {value.layout}"
        raise UsageError(f"{name} is {kind}", fix="Pass a dense tensor with values")
    if value.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            f"{name} requires a gradient, but gradients of a step go to parameters alone",
            fix="Call detach() on it, or make what computes it a part of the model that is given to autopar.parallelize",
        )
    # autograd cannot save tensors made in inference mode, but copies of them
    return value.clone() if value.is_inference() and not torch.is_inference_mode_enabled() else value


class Batches:
    """Prepares the batches of one parallel model; every rank of the job makes one and calls the same methods."""

    def __init__(self, program: Program, world: World, shared: SharedSamples, calls: Calls) -> None:
        self._program, self._world, self._plan = program, world, program.plan
        self._shared, self._calls = shared, calls
        self._samples = self._plan.samples_of(world.data_index)
        self._full = split_batch(self._plan, self._plan.global_batch_size, world.data_index)
        self._group = world.axis_group(DATA_AXES)
        self._sizes = BatchSizes(self._plan, world.data_index, lambda batch: shared.are_equal(named_inputs(batch)))

    def split(self, batch: Batch, purpose: str) -> BatchSplit:
        """Return how this rank computes a batch; for one that is smaller than the plan's all ranks synchronise."""
        size = num_samples(batch, self._program.graph.inputs)
        if size is None or not self._sizes.is_partial(batch, size, purpose):
            return self._full
        trains = purpose not in ("evaluate", "predict")
        split = split_of(self._program, size, self._world.data_index, trains=trains)
        self._calls.meet(f"{purpose} of {size} samples")
        return split

    def local(self, batch: Batch, split: BatchSplit) -> dict[str, Tensor]:
        """Return this rank's samples of a batch, on its device."""
        rank, device = self._world.data_index, self._world.device
        local = local_batch(batch, self._program.graph.inputs, self._plan, rank, device, split)
        if split.is_full:
            self._shared.check(named_inputs(batch), local, self._samples)
        return local

    def totals(self, local: Batch, split: BatchSplit, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the program's sums over the global batch, by name.

        Args:
            state: buffers that steps change, by the names of the graph.
        """
        sums_by_name: dict[str, Tensor] = {}
        for sums in self._program.sums:
            totals: list[Tensor] = []
            with torch.no_grad(), spmd_types.set_current_mesh(self._world.device_mesh):
                parts = micro_batches(local, self._program.graph.inputs, len(split.micro_batches))
                for number, part in enumerate(parts):
                    numbers = {SHARE: split.share, MICRO_BATCH_WEIGHT: split.weights[number]}
                    given: dict[str, Any] = {**state, **sums_by_name, **part, **numbers}
                    outputs = [split.weighed(value, number) for value in sums.module(*[given[n] for n in sums.inputs])]
                    totals = outputs if not totals else [a + b for a, b in zip(totals, outputs, strict=True)]
            for i, total in enumerate(totals):
                if self._group is not None:
                    totals[i] = total.contiguous().clone()
                    dist.all_reduce(totals[i], group=self._group)
            sums_by_name.update(zip(sums.outputs, totals, strict=True))
        return sums_by_name

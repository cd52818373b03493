"""Whether ranks that compute on the same samples were given the same ones: nothing else in a step would tell.

The ranks of ``tp``, ``cp`` and ``pp`` take one part of the global batch together. Where each brings another (a shuffle without a
common seed, a sampler by ``dist.get_rank()``), sums over ``tp`` are of different tokens, and the last stage of a pipeline holds
other labels than the first has inputs for: losses look like losses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import UsageError
from autopar.graph.graph import Input
from autopar.runtime.guard.failure_watch import Alarm
from autopar.runtime.job import FAKE
from autopar.runtime.optimizer.checksum import checksums
from autopar.runtime.world import World

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
        mine = torch.zeros(len(self._inputs), dtype=torch.int64)
        for place, leaf in enumerate(self._inputs):
            mine[place] = _mark(given[leaf.name])
        rows = [torch.empty_like(mine) for _ in self._data_index]
        alarm.runs()
        dist.all_gather(rows, mine, group=self._group)
        alarm.met()
        return all(torch.equal(row, mine) for row in rows)

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
        devices = {given[leaf.name].device for leaf in inputs if given[leaf.name].is_cuda}
        self._numbers = torch.zeros(2, len(inputs), dtype=torch.int64, pin_memory=bool(devices))
        for place, leaf in enumerate(inputs):
            value, dim = given[leaf.name].to(local[leaf.name].dtype), leaf.batch_dim
            is_whole = dim is not None and value.shape[dim] != local[leaf.name].shape[dim]
            if is_whole:
                self._numbers[1, place].copy_(_mark(value), non_blocking=True)
            part = value.narrow(dim, own.start, len(own)) if is_whole and dim is not None else value
            self._numbers[0, place].copy_(_mark(part), non_blocking=True)
        self._events = list[torch.cuda.Event]()
        for device in devices:
            self._events.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            self._events[-1].record(torch.cuda.current_stream(device))

    def read(self) -> Tensor:
        """[2, inputs]: of this rank's samples, and of the whole global batch, 0 where it was not given."""
        for event in self._events:
            event.synchronize()
        return self._numbers


def _mark(value: Tensor) -> Tensor:
    """A number of the elements and their places: a scalar where the value lies."""
    flat = value.detach().contiguous().view(-1)
    return checksums([flat[:: (flat.numel() // _ELEMENTS) | 1]])[0]


def _of_all_ranks(mine: Tensor, num_ranks: int, group: dist.ProcessGroup | None) -> list[list[list[int]]]:
    """The numbers of every rank of the job."""
    rows = [torch.empty_like(mine) for _ in range(num_ranks)]
    dist.all_gather(rows, mine, group=group)
    found: list[list[list[int]]] = torch.stack(rows).tolist()
    return found

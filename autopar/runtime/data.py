"""Batches of a data set or a stream for a parallel model: each rank loads the samples that it computes.

**Data sets.** The global batches of an epoch have one order, whatever the plan. The same data set gives the same batches to one process and
to any number of ranks, and a position in an epoch is a number of samples.

**Streams.** A stream cannot be divided without reading it, so every rank and every worker process goes through all of it and keeps the
samples that it needs. So batches are the same for any plan and any number of workers, and a position is a number of samples. ``collate_fn``
is called with the samples that the rank computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from autopar.errors import UsageError, check_counts, check_flags, whole
from autopar.plan.plan import Plan
from autopar.runtime.step.other_runs import WholeBatch

_Part = tuple[Any, int]
"""A worker's part of a global batch, and the number of samples of that batch."""


class _Order:
    """The global batches of an epoch. A data rank loads its samples of a complete one, and all samples of a smaller one.

    Attributes:
        samples: the stream, or the indices of a data set's samples.
        size, drop_last: samples of a global batch; whether a smaller last one is left out.
        epoch: the epoch of the next iteration.
        start: the sample of that epoch at which it begins.

    Args:
        own: the positions in a complete batch that the rank loads; None means all.
    """

    def __init__(self, samples: Any, own: range | None, size: int, *, drop_last: bool) -> None:
        self.samples, self.size, self.drop_last = samples, size, drop_last
        self._own = own
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        """Return the number of batches of an epoch; for a stream it must have a length."""
        return (len(self.samples) if self.drop_last else len(self.samples) + self.size - 1) // self.size

    def kept(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Return the samples of a global batch that the rank loads."""
        return (
            samples if self._own is None or self.is_whole(len(samples)) else samples[self._own.start : self._own.stop]
        )

    def is_whole(self, count: int) -> bool:
        """Return whether every rank loads all of a global batch of ``count`` samples."""
        return self._own is None or count < self.size


class _Parts(_Order, IterableDataset[_Part]):
    """The samples of each global batch of a stream that a data rank loads."""

    def __init__(
        self, stream: Iterable[Any], own: range | None, size: int, collate: Callable[[list[Any]], Any], drop_last: bool
    ) -> None:
        super().__init__(stream, own, size, drop_last=drop_last)
        self._collate = collate
        self._number, self._workers = 0, 1

    def __iter__(self) -> Iterator[_Part]:
        """Iterate from the current ``start``.

        In a worker process torch's worker info is removed, so that the stream does not divide itself and gives all of its samples.
        """
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            self._number, self._workers = worker.id, worker.num_workers
            torch.utils.data._utils.worker._worker_info = None
        if hasattr(self.samples, "set_epoch"):
            self.samples.set_epoch(self.epoch)
        return self._parts(islice(iter(self.samples), self.start, None))

    def _parts(self, samples: Iterator[Any]) -> Iterator[_Part]:
        index = 0
        while taken := list(islice(samples, self.size)):
            if len(taken) < self.size and self.drop_last:
                return
            if index % self._workers == self._number:  # the loader takes batches from workers in turn
                yield self._collate(list(self.kept(taken))), len(taken)
            index += 1

    def parts(self, parts: Iterator[_Part], start: int) -> Iterator[_Part]:
        """Return the parts from workers, unchanged."""
        return parts


def _identity(part: _Part) -> _Part:
    return part


class PlannedBatches(_Order, Sampler[list[int]]):
    """For each global batch of an epoch of a data set, the indices of the samples that a data rank loads."""

    def __init__(
        self, own: range | None, num_samples: int, *, batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        super().__init__(range(num_samples), own, batch_size, drop_last=drop_last)
        self._shuffle, self._seed = shuffle, seed

    def sizes(self, start: int) -> Iterator[int]:
        """Yield the number of samples of each global batch of an epoch, from ``start`` on."""
        for first in range(start, len(self.samples), self.size):
            count = min(self.size, len(self.samples) - first)
            if count == self.size or not self.drop_last:
                yield count

    def __iter__(self) -> Iterator[list[int]]:
        """List of sample indices, from the current ``start`` on."""
        return self._batches(self.epoch, self.start)

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        order = self.samples
        if self._shuffle:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
            order = torch.randperm(len(order), generator=generator).tolist()
        for count in self.sizes(start):
            yield list(self.kept(order[start : start + count]))
            start += count

    def parts(self, batches: Iterator[Any], start: int) -> Iterator[_Part]:
        """Return the parts from workers, for the batches from ``start`` on."""
        return zip(batches, self.sizes(start), strict=True)


class PlannedLoader(DataLoader[Any]):
    """What ``par.dataloader`` returns: a data loader whose iterations are epochs, each of which shuffles a data set differently.

    ``state_dict()`` has the position in an epoch, the same on every rank. After :meth:`load_state_dict` the loader continues from there,
    under any plan and with any number of workers. If an iteration is left before its end, the next one begins it anew.
    """

    _given = 0

    @property
    def _order(self) -> _Parts | PlannedBatches:
        order: Any = self.dataset if self.batch_sampler is None else self.batch_sampler
        return cast("_Parts | PlannedBatches", order)

    @property
    def global_batch_size(self) -> int:
        return self._order.size

    @property
    def drops_last(self) -> bool:
        return self._order.drop_last

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Return the remaining batches of the epoch."""
        order, start = self._order, self._order.start
        batches = super().__iter__()  # starts reading, or gives worker processes their copies
        order.start, self._given = 0, start
        return self._counted(order.parts(batches, start))

    def _counted(self, parts: Iterator[_Part]) -> Iterator[Any]:
        for batch, size in parts:
            self._given += size
            yield WholeBatch(batch) if isinstance(batch, Mapping) and self._order.is_whole(size) else batch
        self._order.epoch, self._given = self._order.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. It begins at its first sample, unless it is the epoch that the loader is in.

        Without this call each iteration is the epoch after the last.
        """
        if epoch != self._order.epoch:
            self._order.epoch, self._order.start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many of its samples have been returned."""
        length = {"num_samples": len(self._order.samples)} if isinstance(self._order, PlannedBatches) else {}
        return {"epoch": self._order.epoch, "samples": self._given, **length}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Continue where the loader that gave the state was.

        Raises:
            UsageError: that loader was of a data set of another length.
        """
        order = self._order
        if isinstance(order, PlannedBatches) and state_dict["num_samples"] != len(order.samples):
            raise UsageError.mismatch(
                "The data set of this loader and that of the saved position",
                expected=f"{state_dict['num_samples']} samples",
                got=len(order.samples),
                fix="Make the loader of the same data set, or begin anew without load_state_dict",
            )
        order.epoch, order.start = state_dict["epoch"], state_dict["samples"]
        self._given = order.start


def planned_loader(  # noqa: PLR0913  keywords of the public call
    plan: Plan,
    data_rank: int,
    dataset: Dataset[Any],
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int | None = None,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    check_smaller: Callable[[int], object] = lambda _: None,
    **options: Any,
) -> PlannedLoader:
    """Return the loader of ``ParallelModel.dataloader``.

    Args:
        check_smaller: raises an error if the model cannot compute a batch of so many samples, fewer than the plan's.

    Raises:
        UsageError: a batch is larger than the plan's, smaller than 1, or has a number of samples that cannot be computed; a stream is to be
            shuffled, or its worker processes are to persist between epochs.
    """
    if isinstance(dataset, DataLoader) or not (hasattr(dataset, "__iter__") or hasattr(dataset, "__getitem__")):
        raise UsageError(
            f"The dataset of par.dataloader is a {type(dataset).__name__}",
            fix="Pass the samples: a data set with a length and indices (loader.dataset of a DataLoader), or a stream",
        )
    size = plan.global_batch_size if batch_size is None else batch_size
    check_counts(batch_size=size)
    check_flags(drop_last=drop_last, shuffle=shuffle is not None and shuffle)
    seed = None if seed is None else whole("seed", seed)
    if size > plan.global_batch_size:
        raise UsageError(
            f"A batch of {size} samples is larger than that of the plan ({plan.global_batch_size})",
            fix=f"Leave batch_size out, or make the plan with global_batch_size={size}",
        )
    if size < plan.global_batch_size:
        check_smaller(size)
    part = plan.samples_of(data_rank)
    own = part if size == plan.global_batch_size > len(part) else None  # None means all samples
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        if shuffle or seed is not None:
            raise UsageError(
                f"{type(dataset).__name__} is a stream of samples, which has an order already",
                fix="Leave shuffle and seed out, and shuffle in the stream, on all ranks alike: dataset.shuffle(seed=0)",
            )
        if options.get("persistent_workers"):  # their copies of the stream could not be restarted
            raise UsageError.unsupported(
                "A stream of samples with persistent_workers=True",
                instead="Leave it out: workers start with each epoch",
            )
        parts = _Parts(cast("Iterable[Any]", dataset), own, size, collate_fn or default_collate, drop_last)
        return PlannedLoader(parts, batch_size=None, collate_fn=cast("Any", _identity), **options)
    num_samples = len(cast("Any", dataset))
    last_size = num_samples % size
    if last_size and not drop_last:
        check_smaller(last_size)
    batches = PlannedBatches(
        own, num_samples, batch_size=size, shuffle=shuffle is not False, seed=seed or 0, drop_last=drop_last
    )
    return PlannedLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)

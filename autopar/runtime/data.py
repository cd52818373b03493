"""Batches of a data set, or of a stream, for a parallel model: each rank loads the samples that it computes, in an order that all know.

**Data sets.** The order is that of the global batches, whatever the plan: the same data set gives the same batches to one process and to any
number of ranks, and a position in an epoch is a number of samples.

**Streams.** Every rank and every worker process goes through the whole stream, and keeps the samples of its own: a stream has no order by which
they could be divided without reading it. So batches are the same for any plan and any number of workers, and a position is a
number of samples. What ``collate_fn`` does, it does for the samples that the rank computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, default_collate

from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.runtime.step.other_runs import WholeBatch

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as missing:
    raise UsageError.missing(
        "package torchdata, which par.dataloader needs", fix='Run: pip install "autopar[data]"'
    ) from missing


class _Part(NamedTuple):
    """What a worker gives of a global batch.

    Attributes:
        size: of the global batch.
        is_whole: whether ``batch`` has all of them.
    """

    batch: Any
    size: int
    is_whole: bool


class _Parts(IterableDataset[_Part]):
    """For each global batch of the stream the samples that a data rank loads: its own, or all of one that is smaller than the plan's.

    Attributes:
        start: how many samples are passed over.
    """

    def __init__(
        self, stream: Iterable[Any], own: range | None, size: int, collate: Callable[[list[Any]], Any], drop_last: bool
    ) -> None:
        self.stream, self.size, self.drop_last, self.start = stream, size, drop_last, 0
        self._own, self._collate = own, collate
        self._number, self._workers = 0, 1

    def __iter__(self) -> Iterator[_Part]:
        """From ``start`` as it is now. In a worker process the stream is told that there is none: it gives all of its samples."""
        worker = torch.utils.data.get_worker_info()
        if worker is not None:
            self._number, self._workers = worker.id, worker.num_workers
            torch.utils.data._utils.worker._worker_info = None
        return self._parts(islice(iter(self.stream), self.start, None))

    def _parts(self, samples: Iterator[Any]) -> Iterator[_Part]:
        index = 0
        while taken := list(islice(samples, self.size)):
            if len(taken) < self.size and self.drop_last:
                return
            if index % self._workers == self._number:  # workers are asked in turns
                own = self._own if len(taken) == self.size else None
                kept = taken if own is None else taken[own.start : own.stop]
                yield _Part(self._collate(kept), len(taken), own is None)
            index += 1


class StreamLoader(StatefulDataLoader):  # type: ignore[misc]
    """What ``par.dataloader`` returns for a stream; see :class:`autopar.runtime.data.PlannedLoader`, whose promises it keeps.

    Attributes:
        global_batch_size, drops_last: as given.
    """

    dataset: _Parts
    epoch, _given = 0, 0

    @property
    def global_batch_size(self) -> int:
        return self.dataset.size

    @property
    def drops_last(self) -> bool:
        return self.dataset.drop_last

    def __len__(self) -> int:
        """Batches of an epoch, of a stream that knows how many samples it has."""
        samples = len(self.dataset.stream)  # type: ignore[arg-type]
        return (samples if self.drops_last else samples + self.global_batch_size - 1) // self.global_batch_size

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch."""
        parts = self.dataset
        if hasattr(parts.stream, "set_epoch"):
            parts.stream.set_epoch(self.epoch)
        found = super().__iter__()  # which begins to read, or gives worker processes copies
        self._given, parts.start = parts.start, 0
        return self._counted(found)

    def _counted(self, found: Iterator[_Part]) -> Iterator[Any]:
        for part in found:
            self._given += part.size
            yield WholeBatch(part.batch) if isinstance(part.batch, Mapping) and part.is_whole else part.batch
        self.epoch, self._given = self.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch, from its beginning unless it is the one that goes on."""
        if epoch != self.epoch:
            self.epoch, self.dataset.start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples have been given out."""
        return {"epoch": self.epoch, "samples": self._given}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Goes on where the loader was that gave the state."""
        self.epoch, self.dataset.start = state_dict["epoch"], state_dict["samples"]
        self._given = self.dataset.start


@contextmanager
def without_its_warning() -> Iterator[None]:
    """Around the making of a loader: torchdata 0.11 calls what torch 2.13 has no more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        yield


def _as_it_is(part: _Part) -> _Part:
    return part


class PlannedBatches(Sampler[list[int]]):
    """For each global batch of an epoch the samples that a data rank loads: its own, or all of a batch that is smaller than the plan's.

    Attributes:
        epoch: of the next iteration.
        start: at how many samples of that epoch it begins.
    """

    def __init__(
        self, own: range | None, num_samples: int, *, batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.num_samples, self.batch_size, self.drop_last = num_samples, batch_size, drop_last
        self._own, self._shuffle, self._seed = own, shuffle, seed
        self.epoch, self.start = 0, 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch: from its beginning, unless it is the one that goes on."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def is_whole(self, count: int) -> bool:
        """Whether every rank loads all of a global batch of ``count`` samples."""
        return self._own is None or count < self.batch_size

    def sizes(self, start: int) -> Iterator[int]:
        """Samples of each global batch that is left of an epoch."""
        for first in range(start, self.num_samples, self.batch_size):
            count = min(self.batch_size, self.num_samples - first)
            if count == self.batch_size or not self.drop_last:
                yield count

    def __len__(self) -> int:
        """Batches of an epoch."""
        return (self.num_samples if self.drop_last else self.num_samples + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        """Numbers of samples, from ``start`` as it is now."""
        return self._batches(self.epoch, self.start)

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        order: Sequence[int] = range(self.num_samples)
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(self.num_samples, generator=generator).tolist()
        for count in self.sizes(start):
            batch = list(order[start : start + count])
            own = None if self.is_whole(count) else self._own
            yield batch if own is None else batch[own.start : own.stop]
            start += count


class PlannedLoader(StatefulDataLoader):  # type: ignore[misc]
    """What ``par.dataloader`` returns: a data loader whose iterations are epochs, each in another order.

    ``state_dict()`` says where it is in an epoch, the same on every rank; :meth:`load_state_dict` goes on from there under any
    plan and with any number of workers. An iteration that is left before its end is begun anew by the next one.
    """

    batch_sampler: PlannedBatches
    _given = 0

    @property
    def global_batch_size(self) -> int:
        return self.batch_sampler.batch_size

    @property
    def drops_last(self) -> bool:
        return self.batch_sampler.drop_last

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch."""
        batches, start = self.batch_sampler, self.batch_sampler.start
        found = super().__iter__()
        batches.start, self._given = 0, start
        return self._counted(found, list(batches.sizes(start)))

    def _counted(self, found: Iterator[Any], sizes: Sequence[int]) -> Iterator[Any]:
        batches = self.batch_sampler
        for batch, count in zip(found, sizes, strict=True):
            self._given += count
            yield WholeBatch(batch) if isinstance(batch, Mapping) and batches.is_whole(count) else batch
        batches.epoch, self._given = batches.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch; without it, each is of the one after the last."""
        self.batch_sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples have been given out."""
        batches = self.batch_sampler
        return {"epoch": batches.epoch, "samples": self._given, "num_samples": batches.num_samples}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Goes on where the loader was that gave the state.

        Raises:
            UsageError: it was of a data set of another length.
        """
        batches = self.batch_sampler
        if state_dict["num_samples"] != batches.num_samples:
            raise UsageError.mismatch(
                "The data set of this loader and that of the saved position",
                expected=f"{state_dict['num_samples']} samples",
                got=batches.num_samples,
                fix="Make the loader of the same data set, or begin anew without load_state_dict",
            )
        batches.epoch, batches.start = state_dict["epoch"], state_dict["samples"]
        self._given = batches.start


@without_its_warning()
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
) -> PlannedLoader | StreamLoader:
    """See ``ParallelModel.dataloader``.

    Args:
        check_smaller: raises where the model cannot compute a batch of so many samples, which is smaller than the plan's.

    Raises:
        UsageError: a batch is larger than the plan's, smaller than 1, or has samples that cannot be computed; a stream shall be shuffled,
            or its worker processes shall outlive an epoch.
    """
    size = batch_size or plan.global_batch_size
    if size < 1:
        raise UsageError(f"The batch_size is {size}", fix="Give 1 or more, or leave it out: it is the plan's then")
    if size > plan.global_batch_size:
        raise UsageError(
            f"A batch of {size} samples is larger than that of the plan ({plan.global_batch_size})",
            fix=f"Leave batch_size out, or make the plan with global_batch_size={size}",
        )
    if size < plan.global_batch_size:
        check_smaller(size)
    part = plan.samples_of(data_rank)
    own = part if size == plan.global_batch_size > len(part) else None  # None: all samples
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        if shuffle or seed is not None:
            raise UsageError(
                f"{type(dataset).__name__} is a stream of samples, which has an order already",
                fix="Leave shuffle and seed out, and shuffle in the stream, on all ranks alike: dataset.shuffle(seed=0)",
            )
        if options.get("persistent_workers"):  # nobody could begin their copies of the stream anew
            raise UsageError.unsupported(
                "A stream of samples with persistent_workers=True",
                instead="Leave it out: workers start with each epoch",
            )
        parts = _Parts(cast("Iterable[Any]", dataset), own, size, collate_fn or default_collate, drop_last)
        return StreamLoader(parts, batch_size=None, collate_fn=_as_it_is, **options)
    num_samples = len(cast("Any", dataset))
    rest = num_samples % size
    if rest and not drop_last:
        check_smaller(rest)
    batches = PlannedBatches(
        own, num_samples, batch_size=size, shuffle=shuffle is not False, seed=seed or 0, drop_last=drop_last
    )
    return PlannedLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)

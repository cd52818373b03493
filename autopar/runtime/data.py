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


class _Order:
    """The global batches of an epoch, of which a data rank loads its own samples, or all of one that is smaller than the plan's.

    Attributes:
        samples: the stream, or the numbers of a data set's samples.
        size, drop_last: of a global batch; whether a smaller last one is left out.
        epoch: of the next iteration.
        start: at how many samples of that epoch it begins.

    Args:
        own: which samples of a complete batch the rank loads; None: all.
    """

    def __init__(self, samples: Any, own: range | None, size: int, *, drop_last: bool) -> None:
        self.samples, self.size, self.drop_last = samples, size, drop_last
        self._own = own
        self.epoch, self.start = 0, 0

    def __len__(self) -> int:
        """Batches of an epoch, of a stream that knows how many samples it has."""
        return (len(self.samples) if self.drop_last else len(self.samples) + self.size - 1) // self.size

    def kept(self, samples: Sequence[Any]) -> Sequence[Any]:
        """Those of a global batch that the rank loads."""
        return (
            samples if self._own is None or self.is_whole(len(samples)) else samples[self._own.start : self._own.stop]
        )

    def is_whole(self, count: int) -> bool:
        """Whether every rank loads all of a global batch of ``count`` samples."""
        return self._own is None or count < self.size


class _Parts(_Order, IterableDataset[_Part]):
    """Of a stream: for each global batch the samples that a data rank loads."""

    def __init__(
        self, stream: Iterable[Any], own: range | None, size: int, collate: Callable[[list[Any]], Any], drop_last: bool
    ) -> None:
        super().__init__(stream, own, size, drop_last=drop_last)
        self._collate = collate
        self._number, self._workers = 0, 1

    def __iter__(self) -> Iterator[_Part]:
        """From ``start`` as it is now. In a worker process the stream is told that there is none: it gives all of its samples."""
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
            if index % self._workers == self._number:  # workers are asked in turns
                yield _Part(self._collate(list(self.kept(taken))), len(taken), self.is_whole(len(taken)))
            index += 1

    def parts(self, found: Iterator[_Part], start: int) -> Iterator[_Part]:
        """What workers give, as it is."""
        return found


@contextmanager
def without_its_warning() -> Iterator[None]:
    """Around the making of a loader: torchdata 0.11 calls what torch 2.13 has no more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        yield


def _as_it_is(part: _Part) -> _Part:
    return part


class PlannedBatches(_Order, Sampler[list[int]]):
    """Of a data set: for each global batch of an epoch the numbers of the samples that a data rank loads."""

    def __init__(
        self, own: range | None, num_samples: int, *, batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        super().__init__(range(num_samples), own, batch_size, drop_last=drop_last)
        self._shuffle, self._seed = shuffle, seed

    def sizes(self, start: int) -> Iterator[int]:
        """Samples of each global batch that is left of an epoch."""
        for first in range(start, len(self.samples), self.size):
            count = min(self.size, len(self.samples) - first)
            if count == self.size or not self.drop_last:
                yield count

    def __iter__(self) -> Iterator[list[int]]:
        """Numbers of samples, from ``start`` as it is now."""
        return self._batches(self.epoch, self.start)

    def _batches(self, epoch: int, start: int) -> Iterator[list[int]]:
        order = self.samples
        if self._shuffle:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        for count in self.sizes(start):
            yield list(self.kept(order[start : start + count]))
            start += count

    def parts(self, found: Iterator[Any], start: int) -> Iterator[_Part]:
        """What workers give for the batches from ``start`` on."""
        for batch, count in zip(found, self.sizes(start), strict=True):
            yield _Part(batch, count, self.is_whole(count))


class PlannedLoader(StatefulDataLoader):  # type: ignore[misc]
    """What ``par.dataloader`` returns: a data loader whose iterations are epochs, each of a data set in another order.

    ``state_dict()`` says where it is in an epoch, the same on every rank; :meth:`load_state_dict` goes on from there under any
    plan and with any number of workers. An iteration that is left before its end is begun anew by the next one.
    """

    _given = 0

    @property
    def _order(self) -> _Parts | PlannedBatches:
        order: _Parts | PlannedBatches = self.dataset if self.batch_sampler is None else self.batch_sampler
        return order

    @property
    def global_batch_size(self) -> int:
        return self._order.size

    @property
    def drops_last(self) -> bool:
        return self._order.drop_last

    def __iter__(self) -> Iterator[Any]:
        """What is left of the epoch."""
        order, start = self._order, self._order.start
        found = super().__iter__()  # which begins to read, or gives worker processes copies
        order.start, self._given = 0, start
        return self._counted(order.parts(found, start))

    def _counted(self, parts: Iterator[_Part]) -> Iterator[Any]:
        for part in parts:
            self._given += part.size
            yield WholeBatch(part.batch) if isinstance(part.batch, Mapping) and part.is_whole else part.batch
        self._order.epoch, self._given = self._order.epoch + 1, 0

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is of this epoch, from its beginning unless it is the one that goes on.

        Without it, each is of the one after the last.
        """
        if epoch != self._order.epoch:
            self._order.epoch, self._order.start = epoch, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its samples have been given out."""
        known = {"num_samples": len(self._order.samples)} if isinstance(self._order, PlannedBatches) else {}
        return {"epoch": self._order.epoch, "samples": self._given, **known}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Goes on where the loader was that gave the state.

        Raises:
            UsageError: it was of a data set of another length.
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
) -> PlannedLoader:
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
        return PlannedLoader(parts, batch_size=None, collate_fn=_as_it_is, **options)
    num_samples = len(cast("Any", dataset))
    rest = num_samples % size
    if rest and not drop_last:
        check_smaller(rest)
    batches = PlannedBatches(
        own, num_samples, batch_size=size, shuffle=shuffle is not False, seed=seed or 0, drop_last=drop_last
    )
    return PlannedLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)

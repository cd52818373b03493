"""Batches of a data set for a parallel model: each rank loads the samples that it computes, in an order that all ranks know.

The order is that of the global batches, whatever the plan: the same data set gives the same batches to one process and to any
number of ranks, and a position in an epoch is a number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils.data import Dataset, IterableDataset, Sampler

from autopar.errors import UsageError
from autopar.plan.plan import Plan
from autopar.runtime.step.partial_batch import WholeBatch
from autopar.runtime.stream import StatefulDataLoader, StreamLoader, stream_loader, without_its_warning


class PlannedBatches(Sampler[list[int]]):
    """For each global batch of an epoch the samples that a data rank loads: its own, or all of a batch that is smaller than the plan's.

    Attributes:
        epoch: of the next iteration.
        start: at how many samples of that epoch it begins.
    """

    def __init__(
        self,
        plan: Plan,
        data_rank: int,
        num_samples: int,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        self.num_samples, self.batch_size, self.drop_last = num_samples, batch_size, drop_last
        self._shuffle, self._seed = shuffle, seed
        self._own = own_samples(plan, data_rank, batch_size)
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


def own_samples(plan: Plan, data_rank: int, batch_size: int) -> range | None:
    """Which samples of a complete batch the data rank loads; None: all of them."""
    own = plan.samples_of(data_rank)
    return own if batch_size == plan.global_batch_size > len(own) else None


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
        UsageError: a batch is larger than the plan's, or has samples that cannot be computed; a stream shall be shuffled.
    """
    size = batch_size or plan.global_batch_size
    if size > plan.global_batch_size:
        raise UsageError(
            f"A batch of {size} samples is larger than that of the plan ({plan.global_batch_size})",
            fix=f"Leave batch_size out, or make the plan with global_batch_size={size}",
        )
    if size < plan.global_batch_size:
        check_smaller(size)
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        if shuffle or seed is not None:
            raise UsageError(
                f"{type(dataset).__name__} is a stream of samples, which has an order already",
                fix="Leave shuffle and seed out, and shuffle in the stream, on all ranks alike: dataset.shuffle(seed=0)",
            )
        own = own_samples(plan, data_rank, size)
        return stream_loader(dataset, own, size, drop_last=drop_last, collate_fn=collate_fn, **options)
    num_samples = len(cast("Any", dataset))
    rest = num_samples % size
    if rest and not drop_last:
        check_smaller(rest)
    batches = PlannedBatches(
        plan,
        data_rank,
        num_samples,
        batch_size=size,
        shuffle=shuffle is not False,
        seed=seed or 0,
        drop_last=drop_last,
    )
    with without_its_warning():
        return PlannedLoader(dataset, batch_sampler=batches, collate_fn=collate_fn, **options)

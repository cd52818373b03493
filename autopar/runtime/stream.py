"""Batches of a data set that is a stream: samples one after the other, without a length or numbers.

Every rank and every worker process goes through the whole stream, and keeps the samples of its own: a stream has no order by which
they could be divided without reading it. So batches are the same for any plan and any number of workers, and a position is a
number of samples. What ``collate_fn`` does, it does for the samples that the rank computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, default_collate

from autopar.errors import UsageError
from autopar.runtime.step.partial_batch import WholeBatch

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError as missing:
    raise UsageError.missing(
        "package torchdata, which par.dataloader needs", fix='Run: pip install "autopar[data]"'
    ) from missing

__all__ = ["StatefulDataLoader", "StreamLoader", "stream_loader", "without_its_warning"]


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


def stream_loader(
    stream: Any,
    own: range | None,
    batch_size: int,
    *,
    drop_last: bool,
    collate_fn: Callable[[list[Any]], Any] | None,
    **options: Any,
) -> StreamLoader:
    """See ``ParallelModel.dataloader``.

    Args:
        own: which samples of a batch of ``batch_size`` this data rank loads; None: all.

    Raises:
        UsageError: worker processes shall outlive an epoch, whose copies of the stream nobody could begin anew.
    """
    if options.get("persistent_workers"):
        raise UsageError.unsupported(
            "A stream of samples with persistent_workers=True", instead="Leave it out: workers start with each epoch"
        )
    parts = _Parts(stream, own, batch_size, collate_fn or default_collate, drop_last)
    with without_its_warning():
        return StreamLoader(parts, batch_size=None, collate_fn=_as_it_is, **options)


@contextmanager
def without_its_warning() -> Iterator[None]:
    """Around the making of a loader: torchdata 0.11 calls what torch 2.13 has no more."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        yield


def _as_it_is(part: _Part) -> _Part:
    return part

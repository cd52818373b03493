"""The checkpoints of one training run, side by side in a folder: the newest are kept, the last complete one is found again."""

from __future__ import annotations

import logging
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from autopar.errors import AutoparError, CheckpointError, UsageError
from autopar.runtime.checkpoint.meeting import Meeting
from autopar.runtime.checkpoint.of_model import Beside
from autopar.runtime.checkpoint.source import open_folder
from autopar.runtime.checkpoint.write import Save, copied
from autopar.runtime.world import DISKS

if TYPE_CHECKING:
    from autopar.runtime.parallel_model import ParallelModel

_LOGGER = logging.getLogger("autopar")

_STEP = re.compile(r"step-(\d{8,})")
_UNDER_WAY = re.compile(r"\.step-\d{8,}\.saving")


class Checkpoints:
    """Checkpoints ``ROOT/step-00000100``, ``ROOT/step-00000200`` and so on; all ranks make one and call the same methods.

    Args:
        root: the folder for them, on a file system that all nodes share; made when it is first needed.
        keep: how many complete ones stay; older ones are removed after a newer one is there.
        asynchronous: :meth:`save` copies what is saved to the host's memory and returns; a thread writes it while training goes on.
            There is one such copy, kept from save to save: a save waits for the one before it. What fails there is raised by
            the next :meth:`save` or :meth:`wait`.

    Raises:
        UsageError: ``keep`` is less than 1.
    """

    def __init__(self, root: str | Path, keep: int = 3, *, asynchronous: bool = False) -> None:
        if keep < 1:
            raise UsageError(f"Of checkpoints keep={keep} would leave none", fix="Keep 1 or more")
        self.root, self.keep, self.asynchronous = Path(root).absolute(), keep, asynchronous
        self._damaged: set[Path] = set()
        self._meeting: Meeting | None = None
        self._buffers: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def save(
        self,
        par: ParallelModel,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: Any = None,
    ) -> Path:
        """As :meth:`ParallelModel.save`, into the folder of the step ``par.step_count``; which that is.

        Raises:
            UsageError: the folder cannot be written, or that of the save before, in the background, could not.
        """
        self.wait()
        path = self.root / f"step-{par.step_count:08d}"
        beside = Beside(scheduler=scheduler, dataloader=dataloader, extra=extra)
        meeting = self._together()
        with par._calls.at_once("save"):
            if meeting.rank == 0:
                self._clean()
            save = par._begin_save(path, optimizer, beside)
            if not self.asynchronous:
                self._write(save, meeting)
                return path
            save.parts = copied(save.parts, self._buffers)
        # no daemon: a process that ends waits for it
        self._thread = threading.Thread(target=self._write_beside, args=(save, meeting), name="autopar-checkpoint")
        self._thread.start()
        return path

    def wait(self) -> None:
        """Until the save that is under way is complete.

        Raises:
            UsageError: it could not be written; on all ranks alike.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def latest(self) -> Path | None:
        """The newest complete checkpoint, the same on all ranks; None where there is none.

        Its index is whole and its files are as long as they were. Every tensor is verified when it is loaded.
        """
        self.wait()
        return self._together().first(lambda: next(iter(self._complete()), None))

    def load(
        self,
        par: ParallelModel,
        optimizer: Optimizer | None = None,
        *,
        scheduler: Any = None,
        dataloader: Any = None,
    ) -> int | None:
        """Loads the newest checkpoint; the step that it was saved at, or None where there is none. ``extra`` has its extra.

        Where it is damaged the one before it is loaded instead, with a warning; a damaged one stays where it is, and does not count
        among those that are kept. What fits another model or optimizer alone is an error at once.

        Raises:
            CheckpointError: there are checkpoints, and all of them are damaged.
            PlanError: the newest whole one is of another model, optimizer or number of data ranks.
        """
        self.wait()
        failure: CheckpointError | None = None
        for path in self._together().first(self._all):
            if path in self._damaged:
                continue
            try:
                self.extra = par.load(path, optimizer, scheduler=scheduler, dataloader=dataloader)
            except CheckpointError as error:
                self._damaged.add(path)
                failure = failure or error
                _LOGGER.warning("%s is damaged, and the checkpoint before it is loaded instead: %s", path, error)
                continue
            return par.step_count
        if failure is not None:
            raise failure.becoming(CheckpointError, fix=f"No checkpoint in {self.root} can be loaded. {failure.fix}")
        return None

    extra: Any = None
    """What the checkpoint that was loaded had as ``extra``."""

    def _together(self) -> Meeting:
        """Of all ranks, for this alone: it is used while steps are made."""
        if self._meeting is None:
            is_job = dist.is_initialized() and dist.get_world_size() > 1
            self._meeting = Meeting(dist.new_group(backend=dist.Backend.GLOO, timeout=DISKS) if is_job else None)
        return self._meeting

    def _write_beside(self, save: Save, meeting: Meeting) -> None:
        try:
            self._write(save, meeting)
        except BaseException as error:  # noqa: BLE001  of whatever kind: the next call raises it
            self._failure = error

    def _write(self, save: Save, meeting: Meeting) -> None:
        save.write(meeting)
        if meeting.rank == 0:
            self._retain(save.folder)

    def _retain(self, newest: Path) -> None:
        """Removes the oldest, never the one that has just been written."""
        others = [path for path in self._complete() if path != newest]
        for path in others[self.keep - 1 :]:
            _remove(path)

    def _clean(self) -> None:
        """Removes what saves have left that were killed."""
        with suppress(OSError):
            for path in self.root.iterdir():
                if _UNDER_WAY.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)

    def _all(self) -> list[Path]:
        """Those that are there, the newest first; on rank 0."""
        if not self.root.is_dir():
            return []
        found = [path for path in self.root.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)

    def _complete(self) -> list[Path]:
        """Those of them that are whole, as far as their indexes and the lengths of their files say."""
        return [path for path in self._all() if path not in self._damaged and _is_complete(path)]


def _is_complete(path: Path) -> bool:
    try:
        source = open_folder(path)
        source.check_files()
    except AutoparError:
        return False
    return True


def _remove(path: Path) -> None:
    """Renamed first: what is half removed is no checkpoint any more."""
    gone = path.with_name(f".{path.name}.saving")
    with suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

"""Where checkpoints are written: a save that does not come to its end leaves the one before it whole.

Torch's writer gives the files of a rank the same names each time, so that a job that is killed while it saves to the same folder
again would leave values of both steps under the metadata of the first. Here each save has names of its own, the metadata that
lists them replaces the old in one step, and files that it does not list are removed after that.
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future


class _Replacing(FileSystem):
    """Torch removes metadata that is there and renames the new: nothing is there in between. A rename alone replaces it."""

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Never, to torch's writer."""
        return False


class Writer(FileSystemWriter):
    """Writes the folder ``path``; see the module."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.fs = _Replacing()
        self._own = ""

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names of this save; called on the rank that coordinates it."""
        name = uuid.uuid4().hex[:12]
        return [replace(plan, storage_data=_StoragePrefix(f"__{rank}_{name}_")) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """What this rank holds; called on all."""
        self._own = plan.storage_data.prefix
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """When all ranks have written; called on the one that coordinates.

        Raises:
            FileNotFoundError: a rank has written to another folder than this one.
        """
        listed = {result.storage_data.relative_path for written in results for result in written}
        unseen = sorted(name for name in listed if not (Path(self.path) / name).exists())
        if unseen:
            rank = unseen[0].removeprefix("__").partition("_")[0]
            raise FileNotFoundError(f"what rank {rank} wrote is not in the folder that rank 0 sees")
        super().finish(metadata, results)
        for file in Path(self.path).glob(f"__*{DEFAULT_SUFFIX}"):
            if file.name not in listed:
                with suppress(OSError):  # the checkpoint is whole without that
                    file.unlink()

    def remove_own(self) -> None:
        """Removes what this rank has written of a save that failed, so that it does not fill a disk on which there is no room for it."""
        if self._own:
            for file in Path(self.path).glob(f"{self._own}*"):
                with suppress(OSError):
                    file.unlink()
        with suppress(OSError):
            Path(self.path, ".metadata.tmp").unlink()

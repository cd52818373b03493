"""Where checkpoints are written: a save that does not come to its end leaves the one before it whole.

Torch's writer gives the files of a rank the same names each time, so that a job that is killed while it saves to the same folder
again would leave values of both steps under the metadata of the first. Here each save has names of its own, the metadata that
lists them replaces the old in one step, and files that it does not list are removed after that.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path

from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemWriter, _StoragePrefix
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult


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

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names of this save; called on the rank that coordinates it."""
        name = uuid.uuid4().hex[:12]
        return [replace(plan, storage_data=_StoragePrefix(f"__{rank}_{name}_")) for rank, plan in enumerate(plans)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """When all ranks have written; called on the one that coordinates."""
        super().finish(metadata, results)
        listed = {stored.relative_path for stored in metadata.storage_data.values()}
        for file in Path(self.path).glob(f"__*{DEFAULT_SUFFIX}"):
            if file.name not in listed:
                file.unlink(missing_ok=True)

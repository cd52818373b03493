"""Scripts as torchrun starts them, by the ranks of a worker pool, which have imported the libraries."""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import torch.distributed as dist


@contextmanager
def as_under_torchrun() -> Iterator[None]:
    """With the variables that torchrun sets; accelerate and Lightning look at them."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    with mock.patch.dict(os.environ, names | place):
        yield


def run_script(
    path: str, arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None, folder: str | None = None
) -> str:
    """Runs a script on this rank, in a folder; returns what it prints."""
    with (
        as_under_torchrun(),
        mock.patch.dict(os.environ, environment or {}),
        mock.patch.object(sys, "argv", [path, *arguments]),
        mock.patch.object(sys, "path", [str(Path(path).parent), *sys.path]),
        chdir(folder or Path.cwd()),
        redirect_stdout(StringIO()) as said,
    ):
        runpy.run_path(path, run_name="__main__")
    return said.getvalue()

"""The ranks that measure links: this process's part of a torchrun job, or a job on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, UsageError
from autopar.util.files import check_writable

if TYPE_CHECKING:
    import torch

    from autopar.measure.collective_times import LinkJob

GRACE_S = 120.0
"""Beyond the budget: starting ranks, the last failures."""


def under_torchrun() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_output(output: Path) -> None:
    """Before anything is measured: the profile can be written, by the only process or the first rank of the job.

    Raises:
        UsageError: it cannot, or has another ending.
    """
    if output.suffix != ".toml":
        raise UsageError(f"'{output}' does not end in .toml", where="--output", fix="Name a .toml file")
    if os.environ.get("RANK", "0") == "0":
        check_writable(output, make_folder=True)


@contextlib.contextmanager
def torchrun_job(max_bytes: int, budget: float, timeout: float) -> Iterator[LinkJob]:
    """This rank's part of the torchrun job, with a process group whose collectives end after ``timeout``."""
    from datetime import timedelta

    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    from autopar.measure.collective_times import Limits, LinkJob

    device = local_device()
    store, rank, world = next(iter(rendezvous("env://", timeout=timedelta(seconds=GRACE_S))))
    store = PrefixStore("autopar", store)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend, store=PrefixStore("group", store), rank=rank, world_size=world, timeout=timedelta(seconds=timeout)
    )
    node = int(os.environ.get("GROUP_RANK", "0"))
    limits = Limits(budget_s=budget, collective_timeout_s=timeout, max_bytes=max_bytes)
    try:
        yield LinkJob(store, node=node, device=device, limits=limits)
    finally:
        dist.destroy_process_group()


def local_device() -> torch.device:
    """This rank's device: the GPU of its number on the node, or the only one that it sees; else the CPU with one thread."""
    import torch

    if not torch.cuda.is_available():
        torch.set_num_threads(1)  # the clock is the thread's own, and a rank has a core
        return torch.device("cpu")
    from autopar.runtime.job import device_index

    index = device_index(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count())
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def start_ranks(
    output: Path, ranks: int | None, *, max_bytes: int, budget: float, timeout: float, nics: int | None
) -> None:
    """``autopar profile links`` under torchrun on this machine; killed when it takes far longer than it may.

    Raises:
        AutoparError: it failed, or had to be killed.
    """
    import torch

    count = ranks or max(2, torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
    command += ["autopar", "profile", "links", "-o", str(output), f"--max-bytes={max_bytes}", f"--budget={budget}"]
    command += [f"--collective-timeout={timeout}", *([f"--nics={nics}"] if nics else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    limit_s = budget + 10 * timeout + GRACE_S
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = started.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGTERM)  # torchrun ends its ranks
            try:
                started.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    if code != 0:
        raise AutoparError(
            f"Measuring the links between {count} ranks of this machine took longer than {limit_s:.0f} s"
            if code is None
            else f"Measuring the links between {count} ranks of this machine failed with exit code {code}",
            fix="Run it again: what was measured is kept, and it goes on after the point that failed",
        )

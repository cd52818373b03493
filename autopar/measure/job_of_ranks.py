"""The ranks that measure links, in a torchrun job or in one that is started on this machine, and the groups of ranks that are measured."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, UsageError
from autopar.util.files import check_writable, child_environment
from autopar.util.toml import MAY_BE_ZERO, Table

if TYPE_CHECKING:
    import torch

    from autopar.measure.collective_times import LinkJob


GRACE_S = 120.0
"""Seconds beyond the budget for the start of ranks and the last failures."""


def under_torchrun() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_output(output: Path) -> None:
    """Check before a measurement that the profile can be written, by the only process or the first rank of the job.

    Raises:
        UsageError: the file cannot be written, or its name does not end in ``.toml``.
    """
    if output.suffix != ".toml":
        raise UsageError(f"'{output}' does not end in .toml", where="--output", fix="Name a .toml file")
    if os.environ.get("RANK", "0") == "0":
        check_writable(output, make_folder=True)


@contextlib.contextmanager
def torchrun_job(max_bytes: int, budget: float, timeout: float) -> Iterator[LinkJob]:
    """Give this rank's part of the torchrun job, whose process group ends with the context."""
    import torch.distributed as dist

    from autopar.measure.collective_times import Limits, LinkJob
    from autopar.runtime.job import start, stop

    device = local_device()
    start(device.type, collective_timeout_s=max(timeout, GRACE_S))  # the groups that are measured have ``timeout``
    node = int(os.environ.get("GROUP_RANK", "0"))
    limits = Limits(budget_s=budget, collective_timeout_s=timeout, max_bytes=max_bytes)
    try:
        yield LinkJob(dist.distributed_c10d._get_default_store(), node=node, device=device, limits=limits)
    finally:
        stop()


def local_device(kind: str = "") -> torch.device:
    """Return this rank's device and make it current.

    It is the GPU with the rank's number on the node, or the only visible one. Without GPUs, or for the kind ``cpu``, it is the CPU with one
    thread.
    """
    import torch

    from autopar.runtime import job

    device = job.local_device(job.choose_device_type(kind))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # times are CPU times of the thread, and a rank has one core
    return device


def start_ranks(
    output: Path, ranks: int | None, *, max_bytes: int, budget: float, timeout: float, nics: int | None
) -> None:
    """Run ``autopar profile links`` under torchrun on this machine. It is killed if it exceeds its limits by far.

    Raises:
        AutoparError: it failed, or had to be killed.
    """
    import torch

    count = ranks or max(2, torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m"]
    command += ["autopar", "profile", "links", "-o", str(output), f"--max-bytes={max_bytes}", f"--budget={budget}"]
    command += [f"--collective-timeout={timeout}", *([f"--nics={nics}"] if nics else [])]
    limit_s = budget + 10 * timeout + GRACE_S
    process = subprocess.Popen(command, env=child_environment(), stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if code != 0:
        raise AutoparError(
            f"Measuring the links between {count} ranks of this machine took longer than {limit_s:.0f} s"
            if code is None
            else f"Measuring the links between {count} ranks of this machine failed with exit code {code}",
            fix="Run it again: what was measured is kept, and it goes on after the point that failed",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSet:
    """Disjoint groups of ranks that communicate at the same time.

    Attributes:
        tier: ``node`` or ``network``.
        pattern: ``contiguous`` or ``strided`` ranks.
        groups: sorted ranks of each group.
        num_nodes, ranks_per_node: shape of each group.
        alone: whether one group communicates while the others are idle.
    """

    tier: str
    pattern: str
    groups: tuple[tuple[int, ...], ...] = field(metadata=MAY_BE_ZERO)
    num_nodes: int
    ranks_per_node: int
    alone: bool = False

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return len(self.groups[0])

    @property
    def name(self) -> str:
        """The name in texts and in the file of points."""
        where = f"{self.num_nodes} nodes x {self.ranks_per_node}" if self.num_nodes > 1 else f"node x {self.size}"
        return f"{where} {self.pattern}" + (" alone" if self.alone else f" x {len(self.groups)} at once")

    def to_table(self) -> dict[str, Any]:
        """Return plain data, with the name for readers."""
        return {"name": self.name, **asdict(self)}

    @classmethod
    def from_table(cls, table: Table) -> GroupSet:
        """Return the set whose :meth:`to_table` is given."""
        table.has("name")
        return table.record(cls)


def group_sets(nodes: Sequence[int]) -> tuple[GroupSet, ...]:
    """Return the groups that are measured: each size inside a node and across nodes, all groups at once and one alone.

    Args:
        nodes: the node of each rank; nodes of a job have equally many ranks.

    >>> for groups in group_sets([0, 0, 1, 1]):
    ...     print(groups.name, groups.groups)
    node x 2 contiguous x 2 at once ((0, 1), (2, 3))
    node x 2 contiguous alone ((0, 1),)
    2 nodes x 1 strided x 2 at once ((0, 2), (1, 3))
    2 nodes x 1 strided alone ((0, 2),)
    2 nodes x 2 contiguous x 1 at once ((0, 1, 2, 3),)
    """
    members = [[rank for rank, of in enumerate(nodes) if of == node] for node in dict.fromkeys(nodes)]
    width = min(len(ranks) for ranks in members)
    members = [ranks[:width] for ranks in members]
    sets: list[GroupSet] = []
    for size in _sizes(width):
        if size > 1:
            chunks = [ranks[i : i + size] for ranks in members for i in range(0, width - size + 1, size)]
            sets += _with_alone("node", "contiguous", chunks, 1, size)
            if size < width and width % size == 0:
                stride = width // size
                strided = [ranks[i::stride] for ranks in members for i in range(stride)]
                sets += _with_alone("node", "strided", strided, 1, size)[:1]
    if len(members) > 1:
        for size in _sizes(width):
            across = [
                [rank for ranks in members for rank in ranks[i : i + size]] for i in range(0, width - size + 1, size)
            ]
            pattern = "contiguous" if size == width else "strided"
            sets += _with_alone("network", pattern, across, len(members), size)
        if len(members) > 2:
            pairs = zip(members[::2], members[1::2], strict=False)
            across_pairs = [[a, b] for one, other in pairs for a, b in zip(one, other, strict=True)]
            sets += _with_alone("network", "strided", across_pairs, 2, 1)
    return tuple(sets)


def _sizes(width: int) -> list[int]:
    """Return powers of two below ``width``, and ``width``."""
    powers = [2**i for i in range(width.bit_length()) if 2**i < width]
    return [*powers, width]


def _with_alone(tier: str, pattern: str, groups: list[list[int]], num_nodes: int, per_node: int) -> list[GroupSet]:
    """Return the set of all groups, and that of the first group alone."""
    rows = tuple(tuple(sorted(group)) for group in groups)
    at_once = GroupSet(tier=tier, pattern=pattern, groups=rows, num_nodes=num_nodes, ranks_per_node=per_node)
    if len(rows) == 1:
        return [at_once]
    return [at_once, replace(at_once, groups=rows[:1], alone=True)]

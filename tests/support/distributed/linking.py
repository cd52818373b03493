"""Jobs of the tests of ``autopar profile links``: what workers run must be importable by name."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.measure.collective_times import COLLECTIVES, Limits, LinkJob, LinkPoints, measure_links
from autopar.measure.job_of_ranks import GroupSet

LARGEST = 16 * 1024


def measure(path: str, wrong: str, timeout_s: float) -> tuple[list[list[object]], list[list[object]]] | None:
    """One rank's part; ``wrong``: a collective that rank 1 refuses while rank 0 waits for it."""

    def refuse(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
        if dist.get_rank() == 1:
            raise ValueError("refused")
        return COLLECTIVES[wrong](x, ranks, group)

    collectives = {kind: refuse if kind == wrong else run for kind, run in COLLECTIVES.items()}
    store = dist.distributed_c10d._get_default_store()
    limits = Limits(budget_s=30.0, collective_timeout_s=timeout_s, max_bytes=LARGEST)
    job = LinkJob(store, node=0, device=torch.device("cpu"), limits=limits, collectives=collectives)
    found = measure_links(job, Path(path))
    return None if found is None else (found.points, found.failed)


def leave(path: str) -> str:
    if dist.get_rank() == 1:
        return ""
    limits = Limits(budget_s=1.0, collective_timeout_s=0.5, max_bytes=LARGEST, grace_s=0.5)
    job = LinkJob(dist.distributed_c10d._get_default_store(), node=0, device=torch.device("cpu"), limits=limits)
    try:
        measure_links(job, Path(path))
    except AutoparError as error:
        return str(error)
    return "no error"


class SlowLink(LinkJob):
    """A job whose collectives take a latency and their bytes, without ranks; ``asked``: bytes, calls and repeats."""

    def __init__(self, latency_s: float, bandwidth_bytes_per_s: float, limits: Limits) -> None:
        self.latency_s, self.bandwidth_bytes_per_s, self.limits = latency_s, bandwidth_bytes_per_s, limits
        self.device = torch.device("cpu")
        self.asked: list[tuple[int, int, int]] = []

    def sizes(self, allowed_s: float) -> list[int]:
        """The sizes of an all-reduce that are measured in so much time."""
        sets = [GroupSet(tier="network", pattern="contiguous", groups=((0, 1),), num_nodes=2, ranks_per_node=1)]
        found = LinkPoints(job={}, sets=sets)
        self._sizes(found, 0, "all_reduce", self.limits.max_bytes, allowed_s, None)
        return [point[2] for point in found.points]

    def _tell(self, do: str, **arguments: Any) -> list[Any]:
        self.asked.append((arguments["num_bytes"], arguments["calls"], arguments["repeats"]))
        return [[self.latency_s + arguments["num_bytes"] / self.bandwidth_bytes_per_s, 0.0]]

"""The ranks that plans run on, measured together before: what a core gives when all compute, and collectives.

Of collectives a few sizes of each kind, on all shapes of groups.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.hardware.cluster import Cluster
from autopar.hardware.link import load_json
from autopar.hardware.machine import device_name
from autopar.hardware.read import MachineProfile, load_library, slowed
from autopar.measure.collective_times import COLLECTIVES, Limits, LinkJob, LinkPoints, measure_links
from autopar.measure.job_of_ranks import GroupSet
from autopar.measure.link_fit import links_of
from autopar.measure.timers import Layers
from autopar.util.files import write_json

CROWD_REPEATS, CROWD_S = 15, 0.06
WORK_S, BATCH_S = 1e-3, 10e-3
KINDS = tuple(kind for kind in COLLECTIVES if kind != "broadcast")
"""What plans use."""


@dataclass(frozen=True, kw_only=True)
class LinkTask:
    """What every rank of a job measures together; picklable.

    Attributes:
        nodes: the node of each rank.
        budget_s: of all measurements; sizes that would take longer are left out.
        max_bytes: of the largest collective.
    """

    nodes: tuple[int, ...]
    budget_s: float = 25.0
    max_bytes: int = 2**24
    collective_timeout_s: float = 120.0
    device_type: str = "cpu"

    def run(self) -> dict[str, dict[str, Any]]:
        """On this rank, whose process group is there; rank 0 gives ``links``: cores, sets of groups and points."""
        crowd = crowding()
        job = _BetweenWork(
            dist.distributed_c10d._get_default_store(),
            node=self.nodes[dist.get_rank()],
            device=torch.device("cpu"),
            limits=Limits(
                budget_s=self.budget_s,
                collective_timeout_s=self.collective_timeout_s,
                max_bytes=self.max_bytes,
                growth=8,
                batch_s=BATCH_S,
            ),
            collectives={kind: COLLECTIVES[kind] for kind in KINDS},
        )
        job.crowding = crowd
        found = measure_links(job)
        if found is None:
            return {}
        sets = [group_set.to_dict() for group_set in found.sets]
        return {
            "links": {
                "crowding": crowd,
                "layers_s": job.spent_s / max(job.passes, 1),
                "sets": sets,
                "points": found.points,
                "failed": found.failed,
            }
        }


class _BetweenWork(LinkJob):
    """Times collectives as a step has them: each after some computation of every rank, whose own time does not count.

    One after the other, nothing between, they find all ranks awake and their buffers warm, and cores that nothing but the
    collective wants. The computation between is slower than in a loop of its own, a third on some virtual machines: cores
    went to sleep and other work came by.

    Attributes:
        crowding: see :func:`crowding`.
        active: ranks of the groups that are measured.
        passes, spent_s: of the computation.
    """

    crowding = 1.0
    active, passes, spent_s = 0, 0, 0.0

    def _greeting(self, path: Path | None) -> LinkPoints:
        """Of ranks on one machine it does not matter which ones of a node meet, and in a step all groups do at once."""
        found = super()._greeting(path)
        found.sets = [s for s in found.sets if not s.alone and (s.tier != "node" or s.pattern == "contiguous")]
        return found

    def _open(self, number: int, groups: list[list[int]]) -> None:
        self.active = sum(map(len, groups))
        super()._open(number, groups)

    @cached_property
    def _work(self) -> Layers:
        return Layers()

    def _spent_s(self, run: Callable[[], object], calls: int) -> float:
        share = max(self.crowding * self.active / self.world, 1.0)
        own_s, start = 0.0, time.perf_counter()
        for _ in range(calls):
            spent_s, passes = self._work.run(WORK_S)
            own_s, self.passes = own_s + spent_s, self.passes + passes
            run()
        rest_s = time.perf_counter() - start - share * own_s
        self.spent_s += own_s
        return max(rest_s, 1e-6)

    def _summary(self, samples: list[float]) -> tuple[float, float]:
        mean = statistics.mean(samples)
        return mean, statistics.pstdev(samples) / mean


def crowding() -> float:
    """Wall time of computation while all ranks compute, over the time of the calling thread: 1 on a core of one's own.

    Of the slowest rank, as a step ends with it. Two ranks on a core take a little more than twice as long: the scheduler
    moves them late, and what one leaves in the caches the other one evicts. The lower quartile of several moments: work of
    others that comes by only makes it longer.
    """
    work, found = Layers(), list[float]()
    for _ in range(CROWD_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        own_s, _ = work.run(CROWD_S)
        times = torch.tensor([time.perf_counter() - start, own_s])
        everyone = [torch.empty_like(times) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, times)
        found.append(max(float(wall / own) for wall, own in everyone))
    return max(statistics.quantiles(found, n=4)[0], 1.0)


def measured_cluster(
    name: str,
    machine: MachineProfile,
    nodes: tuple[int, int],
    launch: Callable[[LinkTask], Sequence[Mapping[str, Mapping[str, Any]]]],
    *,
    kept: Path | None = None,
    again: bool = False,
) -> Cluster:
    """A cluster of nodes that all lie on this machine, as its ranks measure them, or measured before and kept in a file.

    Args:
        nodes: how many, and ranks on each.
        launch: runs a task on all these ranks.
        again: measures although there is a kept file, and writes it anew.

    Raises:
        AutoparError: nothing could be measured.
    """
    num_nodes, per_node = nodes
    task = LinkTask(nodes=tuple(rank // per_node for rank in range(num_nodes * per_node)))
    if kept is not None and kept.is_file() and not again:
        found = load_json(kept)
    else:
        found = {"when": time.strftime("%Y-%m-%d"), **launch(task)[0]["links"]}
        if kept is not None:
            write_json(kept, found)
    where = f"measured {found['when']} on {len(task.nodes)} ranks of {device_name()}, "
    where += f"{machine.library}, torch {torch.__version__}"
    links = links_of(
        [GroupSet.from_dict(item) for item in found["sets"]], found["points"], nodes=task.nodes, machine=machine,
        library=machine.library, where=where, points_name="-",
    )  # fmt: skip
    if machine.device.overheads.layers_s:
        factor = found["layers_s"] / machine.device.overheads.layers_s
        machine = replace(machine, device=slowed(machine.device, 1.0 / factor, "its speed between collectives"))
    group = machine.group(num_nodes, per_node, num_cores=per_node / found["crowding"])
    return links.on(Cluster(name=name, groups=(group,), library=load_library(machine.library)))

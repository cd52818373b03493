"""Measurements on the ranks that will run plans: how much computation slows down while all ranks compute, and times of collectives.

A few sizes of each kind of collective are measured on all shapes of groups.
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
from autopar.util.toml import Table, as_table

PACE_REPEATS, PACE_S = 15, 0.06
"""Repetitions of :func:`pace`, and seconds of computation in each."""
WORK_S = 1e-3
"""Seconds of computation before each collective."""
LIMITS = Limits(budget_s=25.0, collective_timeout_s=120.0, max_bytes=2**24, growth=8, batch_s=10e-3)
KINDS = tuple(kind for kind in COLLECTIVES if kind != "broadcast")
"""The collectives that plans use."""


@dataclass(frozen=True, kw_only=True)
class LinkTask:
    """A measurement that every rank of a job takes part in; picklable.

    Attributes:
        nodes: the node of each rank.
        limits: of its time and of sizes; sizes that would take longer are left out.
    """

    nodes: tuple[int, ...]
    limits: Limits = LIMITS

    def run(self) -> dict[str, dict[str, Any]]:
        """Measure on this rank of the process group; rank 0 returns ``links``: crowding, and the fields of ``LinkPoints``."""
        before = pace()
        job = _BetweenWork(
            dist.distributed_c10d._get_default_store(),
            node=self.nodes[dist.get_rank()],
            device=torch.device("cpu"),
            limits=self.limits,
            collectives={kind: COLLECTIVES[kind] for kind in KINDS},
        )
        job.crowding = before[0]
        points = measure_links(job)
        crowding, layers_s = (statistics.mean(pair) for pair in zip(before, pace(), strict=True))
        if points is None:
            return {}
        return {"links": {"crowding": crowding, "layers_s": layers_s, **as_table(points)}}


class _BetweenWork(LinkJob):
    """Times collectives as they occur in a step: each after some computation of every rank, whose time is subtracted.

    In a loop of collectives alone, all ranks are awake, their buffers are in caches, and cores have nothing else to do. Computation between
    collectives is slower than in a loop of its own, by a third on some virtual machines, since cores fall asleep and other processes get to
    run.

    Attributes:
        crowding: see :func:`pace`.
        active: ranks of the groups that are measured.
    """

    crowding = 1.0
    active = 0

    def _greeting(self, path: Path | None) -> LinkPoints:
        """Keep the sets of groups that differ on one machine: contiguous ranks of a node, and all groups at once, as in a step."""
        links = super()._greeting(path)
        links.sets = [s for s in links.sets if not s.alone and (s.tier != "node" or s.pattern == "contiguous")]
        return links

    def _open(self, number: int, groups: list[list[int]]) -> None:
        self.active = sum(map(len, groups))
        super()._open(number, groups)

    @cached_property
    def _work(self) -> Layers:
        return Layers()

    def _spent_s(self, run: Callable[[], object], calls: int) -> float:
        """Return the wall time of ``calls`` collectives with computation before each, less the time of the computation."""
        share = max(self.crowding * self.active / self.world, 1.0)
        work_s, start = 0.0, time.perf_counter()
        for _ in range(calls):
            work_s += self._work.run(WORK_S)[0]
            run()
        return max(time.perf_counter() - start - share * work_s, 1e-6)

    def _summary(self, samples: list[float]) -> tuple[float, float]:
        mean = statistics.mean(samples)
        return mean, statistics.pstdev(samples) / mean


def pace() -> tuple[float, float]:
    """Return how fast the ranks compute while all of them do: their crowding, and the seconds of a pass of :class:`Layers`.

    Crowding is wall time over the CPU time of the thread: 1 if each rank has a core. It is that of the slowest rank, with which a step
    ends. Two ranks on a core take a little more than twice as long, since the scheduler moves them late and they evict each other's
    caches. The lower quartile of several repetitions is taken, as other processes only make it longer.

    A pass takes CPU time, the mean of the ranks and the median of the repetitions. Repetitions are as long as those that the profile of
    the machine was measured with: passes of a millisecond between collectives take half as long again, which those of a step do not.
    """
    work, ratios, passes_s = Layers(), list[float](), list[float]()
    for _ in range(PACE_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        thread_s, passes = work.run(PACE_S)
        times = torch.tensor([time.perf_counter() - start, thread_s, passes])
        by_rank = [torch.empty_like(times) for _ in range(dist.get_world_size())]
        dist.all_gather(by_rank, times)
        ratios.append(max(float(wall / thread) for wall, thread, _ in by_rank))
        passes_s.append(statistics.mean(float(thread / count) for _, thread, count in by_rank))
    return max(statistics.quantiles(ratios, n=4)[0], 1.0), statistics.median(passes_s)


def measured_cluster(
    name: str,
    machine: MachineProfile,
    nodes: tuple[int, int],
    launch: Callable[[LinkTask], Sequence[Mapping[str, Mapping[str, Any]]]],
    *,
    kept: Path | None = None,
    again: bool = False,
) -> Cluster:
    """Return a cluster of nodes that are all on this machine, as its ranks measure them, or as a file of an earlier measurement says.

    Args:
        name: the name of the cluster.
        machine: the profile of this machine.
        nodes: the number of nodes, and ranks on each.
        launch: runs a task on all these ranks.
        kept: the file of measurements.
        again: whether to measure in any case, and write the file anew.

    Raises:
        AutoparError: nothing could be measured.
    """
    num_nodes, per_node = nodes
    task = LinkTask(nodes=tuple(rank // per_node for rank in range(num_nodes * per_node)))
    if kept is not None and kept.is_file() and not again:
        data = load_json(kept)
    else:
        data = {"when": time.strftime("%Y-%m-%d"), **launch(task)[0]["links"]}
        if kept is not None:
            write_json(kept, data, make_folder=True)
    table = Table(data, file=str(kept))
    where = f"measured {table.text('when')} on {len(task.nodes)} ranks of {device_name()}, "
    where += f"{machine.library}, torch {torch.__version__}"
    points: Any = table.raw("points")
    links = links_of(
        [GroupSet.from_table(item) for item in table.tables("sets")], points, nodes=task.nodes, machine=machine,
        library=machine.library, where=where, points_name="-",
    )  # fmt: skip
    if machine.device.overheads.layers_s:
        factor = table.number("layers_s") / machine.device.overheads.layers_s
        machine = replace(machine, device=slowed(machine.device, 1.0 / factor, "its speed among its ranks"))
    group = machine.group(num_nodes, per_node, num_cores=per_node / table.number("crowding"))
    return links.on(Cluster(name=name, groups=(group,), library=load_library(machine.library)))

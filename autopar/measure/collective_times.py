"""Measurement of collectives over the ranks of a running job, as ``autopar profile links`` runs it on each rank.

Rank 0 leads. It writes the next task to the job's store, every rank does the task and writes its answer, and rank 0 goes on when all have
answered. Every collective and every wait for the store has a time limit, so that a dead rank or a hanging collective ends as a failed point
or an error.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from autopar.errors import AutoparError
from autopar.hardware.link import load_json
from autopar.hardware.machine import device_name
from autopar.measure.job_of_ranks import GroupSet, group_sets
from autopar.measure.timers import free_bytes, median_and_spread, synchronize
from autopar.util.files import check_same, write_json
from autopar.util.toml import Table, as_table

SMALLEST_BYTES = 1024
"""Bytes of the smallest collective."""
GROWTH = 4
"""Ratio of one size to the next."""
REPEATS, FEWEST = 7, 2
"""Samples of a point: the usual number, and that of large points for which little time is left."""
SHOWN = 3.0
"""Ratio of the longest to the shortest time of a collective from which the sizes show its bandwidth, not only its latency."""
BATCH_S = 2e-3
"""Seconds of one sample: small collectives are called several times."""
MAX_CALLS = 100
IDLE_S = 600.0
"""Seconds for which a rank waits for the next task, since rank 0 may be busy."""
BUFFERS = 4
"""Upper limit on the memory of a point on each rank, as a multiple of its bytes."""

Run = Callable[[torch.Tensor, tuple[int, ...], dist.ProcessGroup], object]
"""A function that runs one collective, of a flat float32 tensor of the point's bytes, the ranks of the group, and the group."""
Progress = Callable[[str, int, int], None]


def _all_gather(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
    part = x.numel() // len(ranks)
    return dist.all_gather_into_tensor(x, x.new_empty(part), group=group)


def _reduce_scatter(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
    return dist.reduce_scatter_tensor(x.new_empty(x.numel() // len(ranks)), x, group=group)


def _send(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
    """Send a message there and back, which takes twice the time of one."""
    if dist.get_rank() == ranks[0]:
        dist.send(x, ranks[1], group=group)
        dist.recv(x, ranks[1], group=group)
    else:
        dist.recv(x, ranks[0], group=group)
        dist.send(x, ranks[0], group=group)
    return None


COLLECTIVES: Mapping[str, Run] = {
    "all_reduce": lambda x, _, group: dist.all_reduce(x, group=group),
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": lambda x, _, group: dist.all_to_all_single(torch.empty_like(x), x, group=group),
    "broadcast": lambda x, ranks, group: dist.broadcast(x, src=ranks[0], group=group),
    "send": _send,
}


@dataclass(slots=True, kw_only=True)
class LinkPoints:
    """The measurements so far, which rank 0 keeps in a file.

    Attributes:
        job: device, library and node of each rank.
        sets: the groups of ranks that are measured.
        points: ``[groups, kind, bytes, seconds, spread]``; the spread is the distance of the quartiles over the median.
        failed: ``[groups, kind, bytes, reason]``.
        trying: the point that was being measured when the file was written.
    """

    job: dict[str, Any]
    sets: list[GroupSet]
    points: list[list[Any]] = field(default_factory=list)
    failed: list[list[Any]] = field(default_factory=list)
    trying: list[Any] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file, completely or not at all."""
        write_json(path, as_table(self), make_folder=True)

    @classmethod
    def load(cls, path: Path) -> LinkPoints:
        """Read a file; the point that was being measured when it was written counts as failed.

        Raises:
            UsageError: the file is damaged.
        """
        points = Table(load_json(path), file=str(path)).record(cls)
        if points.trying:
            points.failed.append([*points.trying, "the job ended while this was measured"])
            points.trying = []
        return points


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the time and size of a measurement.

    Attributes:
        budget_s: seconds of all measurements.
        collective_timeout_s: time limit of one collective.
        max_bytes: largest size of a collective; the memory of a node may allow less.
        growth: ratio of one size to the next.
        batch_s: approximate seconds of one sample, a call or several.
        grace_s: further seconds that a rank may take to answer before it counts as dead.
    """

    budget_s: float = 120.0
    collective_timeout_s: float = 30.0
    max_bytes: int = 2**30
    growth: int = GROWTH
    batch_s: float = BATCH_S
    grace_s: float = 10.0


class LinkJob:
    """One rank's part of a measurement.

    Args:
        store: a store of all ranks of the default process group, which must be initialised.
        node: number of this rank's node.
        device: device of the tensors.
        limits: the limits, equal on all ranks.
        collectives: functions by kind of collective.
    """

    def __init__(
        self,
        store: Store,
        *,
        node: int,
        device: torch.device,
        limits: Limits,
        collectives: Mapping[str, Run] = COLLECTIVES,
    ) -> None:
        self.store, self.node, self.device = PrefixStore("autopar-links", store), node, device
        self.limits, self.collectives = limits, collectives
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._number = 0
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}

    # --- every rank

    def follow(self) -> None:
        """Do the tasks of rank 0 until it is done.

        Raises:
            AutoparError: rank 0 gave no task within :data:`IDLE_S`.
        """
        while True:
            task = json.loads(self._wait(f"task{self._number}", IDLE_S, "what comes next, of rank 0"))
            if task["do"] == "stop":
                return
            self._answer(task)

    def _answer(self, task: dict[str, Any]) -> None:
        """Do one task (a method by name) and write its result or failure to the store."""
        number, self._number = self._number, self._number + 1
        try:
            answer = {"value": getattr(self, f"_{task['do']}")(number, **task["with"])}
        except Exception as error:  # noqa: BLE001  every failure of a rank is a failure of the point
            answer = {"failure": f"rank {self.rank}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        self.store.set(f"done{number}.{self.rank}", json.dumps(answer))

    def _hello(self, number: int) -> dict[str, Any]:
        """Return this rank's node, device and free memory."""
        return {"node": self.node, "device": device_name(), "room": free_bytes(self.device)}

    def _open(self, number: int, groups: list[list[int]]) -> None:
        """Make new groups. A group in which a collective failed cannot be used again, and groups of NCCL keep memory of the device."""
        for group in self._groups.values() if self.device.type == "cuda" else ():
            dist.destroy_process_group(group)
        self._groups = {}
        for ranks in groups:
            group = dist.new_group(ranks, timeout=timedelta(seconds=self.limits.collective_timeout_s))
            if self.rank in ranks:
                self._groups[tuple(ranks)] = group

    def _run(self, number: int, kind: str, num_bytes: int, calls: int, repeats: int) -> list[float] | None:
        """Return the seconds of one call and their spread, or None on a rank that is in no group."""
        self._together(number)
        if not self._groups:
            return None
        ((ranks, group),) = self._groups.items()
        x = torch.ones(num_bytes // 4, device=self.device)
        run = partial(self.collectives[kind], x, ranks, group)
        run()
        samples = []
        for _ in range(repeats):
            x.fill_(1.0)  # sums must not grow without end
            samples.append(self._spent_s(run, calls) / calls / (2 if kind == "send" else 1))
        return list(self._summary(samples))

    def _spent_s(self, run: Callable[[], object], calls: int) -> float:
        """Return the seconds of ``calls`` calls of a collective."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(self.device)
        return time.perf_counter() - start

    def _summary(self, samples: list[float]) -> tuple[float, float]:
        """Return a time and its spread."""
        return median_and_spread(samples)

    def _together(self, number: int) -> None:
        """Wait until every rank has arrived, by the store alone."""
        if self.store.add(f"here{number}", 1) == self.world:
            self.store.set(f"go{number}", "")
        self._wait(f"go{number}", self.limits.collective_timeout_s, "the start of a measurement on every rank")

    def _wait(self, key: str, timeout_s: float, what: str) -> bytes:
        """Return a value of the store once it is there.

        Raises:
            AutoparError: it was not there within the time limit.
        """
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            value: bytes = self.store.get(key)
        except (RuntimeError, ValueError) as error:  # DistStoreError is a RuntimeError
            raise AutoparError(
                f"Waited {timeout_s:g} s in vain for {what}",
                where=f"rank {self.rank}",
                fix="See what the other ranks say",
            ) from error
        return value

    # --- rank 0

    def lead(self, path: Path | None, progress: Progress) -> LinkPoints:
        """Measure all points that the file does not have; the other ranks :meth:`follow`.

        Args:
            path: the file of points, written after each kind of collective on each set of groups.
            progress: called with each set and kind.

        Raises:
            UsageError: the file belongs to another job.
            AutoparError: a rank gave no answer.
        """
        try:
            links = self._greeting(path)
            limit = min(self.limits.max_bytes, links.job.pop("room") // BUFFERS)
            sets = enumerate(links.sets)
            turns = [(i, kind) for i, s in sets for kind in self.collectives if kind != "send" or s.size == 2]
            end = time.monotonic() + self.limits.budget_s
            opened = -1
            for turn, (index, kind) in enumerate(turns):
                progress(f"{links.sets[index].name}: {kind}", turn, len(turns))
                allowed_s = max(end - time.monotonic(), 0.0) / (len(turns) - turn)
                try:
                    if opened != index:
                        self._tell("open", groups=links.sets[index].groups)
                        opened = index
                    self._sizes(links, index, kind, limit, allowed_s, path)
                except _PointError as error:
                    links.failed.append([*(links.trying or [links.sets[index].name, kind, 0]), str(error)])
                    links.trying, opened = [], -1
                if path is not None:
                    links.save(path)
            return links
        finally:
            self.store.set(f"task{self._number}", json.dumps({"do": "stop"}))

    def _greeting(self, path: Path | None) -> LinkPoints:
        """Return the points of the file, or none, with the job and the memory that each rank may use."""
        hello = self._tell("hello")
        nodes = [answer["node"] for answer in hello]
        job = {
            "backend": dist.get_backend(), "device": hello[0]["device"], "torch": torch.__version__, "nodes": nodes,
        }  # fmt: skip
        links = LinkPoints(job=job, sets=list(group_sets(nodes)))
        if path is not None and path.exists():
            links = LinkPoints.load(path)
            check_same("The job of this file of points", path, expected=job, got=links.job)
        links.job = {**job, "room": min(answer["room"] // nodes.count(answer["node"]) for answer in hello)}
        return links

    def _sizes(self, links: LinkPoints, index: int, kind: str, limit: int, allowed_s: float, path: Path | None) -> None:
        """Measure one kind on one set of groups at growing sizes, as far as the time allows.

        Raises:
            _PointError: a measurement failed; ``links.trying`` says which.
        """
        name, size = links.sets[index].name, links.sets[index].size
        seen = {p[2]: p[3] for p in links.points if p[:2] == [name, kind]}
        failed_sizes = [p[2] for p in links.failed if p[:2] == [name, kind]]
        start, estimate_s = time.monotonic(), 1e-3
        num_bytes, growth = SMALLEST_BYTES, self.limits.growth
        while num_bytes <= limit:
            padded = -(-num_bytes // (4 * size)) * 4 * size
            num_bytes *= growth
            if padded in seen:
                estimate_s = growth * seen[padded]
                continue
            if failed_sizes and padded >= min(failed_sizes):
                return
            calls = int(min(MAX_CALLS, max(1, self.limits.batch_s / estimate_s)))
            repeats = 3 if estimate_s > 0.1 else REPEATS
            if time.monotonic() - start + estimate_s * (calls * repeats + 1) > allowed_s and seen:
                # small sizes alone do not show the bandwidth: a larger one is measured too, if by few calls
                if max(seen.values()) > SHOWN * min(seen.values()) or estimate_s > self.limits.collective_timeout_s:
                    return
                calls, repeats = 1, FEWEST
            links.trying = [name, kind, padded]
            if path is not None and self.device.type == "cuda":  # a collective that hangs may take the process with it
                links.save(path)
            answers = self._tell("run", kind=kind, num_bytes=padded, calls=calls, repeats=repeats)
            links.trying = []
            times = [answer for answer in answers if answer is not None]
            seen[padded], spread = (max(values) for values in zip(*times, strict=True))
            links.points.append([name, kind, padded, seen[padded], spread])
            estimate_s = growth * seen[padded]

    def _tell(self, do: str, **arguments: Any) -> list[Any]:
        """Give a task to every rank, this one included, and return the answers.

        Raises:
            _PointError: a rank failed; the error says which and why.
            AutoparError: a rank gave no answer.
        """
        number, task = self._number, {"do": do, "with": arguments}
        self.store.set(f"task{number}", json.dumps(task))
        self._answer(task)
        timeout_s = 2 * self.limits.collective_timeout_s + self.limits.budget_s + self.limits.grace_s
        answers = [
            json.loads(self._wait(f"done{number}.{rank}", timeout_s, f"an answer of rank {rank}"))
            for rank in range(self.world)
        ]
        failures = [answer["failure"] for answer in answers if "failure" in answer]
        if failures:
            raise _PointError("; ".join(failures))
        return [answer["value"] for answer in answers]


class _PointError(Exception):
    """A task failed on a rank. All ranks are ready for the next task."""


def measure_links(job: LinkJob, path: Path | None = None, *, progress: Progress = lambda *_: None) -> LinkPoints | None:
    """Measure on all ranks; return the points on rank 0, and None on the others. All ranks must call it."""
    if job.rank == 0:
        return job.lead(path, progress)
    job.follow()
    return None

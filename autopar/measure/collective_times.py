"""Times collectives over the ranks of a running job: what ``autopar profile links`` runs on each of them.

Rank 0 leads: it writes the next task to the job's store, every rank does it and writes how it went, and rank 0 goes on
when all have answered. Nothing but a store is waited for without a time limit of a collective, and the store's waits
have limits as well: a rank that died or a collective that hangs ends as a failed point or as an error, never as a wait.
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

from autopar.errors import AutoparError, UsageError
from autopar.hardware.link import load_json
from autopar.hardware.machine import device_name
from autopar.measure.job_of_ranks import GroupSet, group_sets
from autopar.measure.timers import free_bytes, median_and_spread, synchronize
from autopar.util.files import check_same, write_json

SMALLEST_BYTES = 1024
GROWTH = 4
REPEATS, FEWEST = 7, 2
SHOWN = 3.0
"""Bytes show in a collective's time when it takes so many times what the quickest size takes; latency is the rest."""
BATCH_S = 2e-3
MAX_CALLS = 100
IDLE_S = 600.0
"""How long a rank waits for the next task: rank 0 may be busy with something else."""
BUFFERS = 4
"""A point takes at most so many times its bytes on each rank."""

Run = Callable[[torch.Tensor, tuple[int, ...], dist.ProcessGroup], object]
"""Runs one collective: a flat float32 tensor of the point's bytes, the ranks of the group, the group."""
Progress = Callable[[str, int, int], None]


def _all_gather(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
    part = x.numel() // len(ranks)
    return dist.all_gather_into_tensor(x, x.new_empty(part), group=group)


def _reduce_scatter(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
    return dist.reduce_scatter_tensor(x.new_empty(x.numel() // len(ranks)), x, group=group)


def _send(x: torch.Tensor, ranks: tuple[int, ...], group: dist.ProcessGroup) -> object:
    """There and back: twice the time of a message."""
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
    """What was measured so far; rank 0 keeps it in a file.

    Attributes:
        job: what the points belong to: device, library, node of each rank.
        points: ``[groups, kind, bytes, seconds, spread]``; spread: distance of the quartiles over the median.
        failed: ``[groups, kind, bytes, reason]``.
        trying: what was being measured when the file was written.
    """

    job: dict[str, Any]
    sets: list[GroupSet]
    points: list[list[Any]] = field(default_factory=list)
    failed: list[list[Any]] = field(default_factory=list)
    trying: list[Any] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        data = {"job": self.job, "sets": [found.to_dict() for found in self.sets], "points": self.points}
        write_json(path, {**data, "failed": self.failed, "trying": self.trying})

    @classmethod
    def load(cls, path: Path) -> LinkPoints:
        """Read the file; what was being tried when it was written counts as failed.

        Raises:
            UsageError: the file is damaged.
        """
        data = load_json(path)
        try:
            found = cls(**data | {"sets": [GroupSet.from_dict(item) for item in data["sets"]]})
        except (KeyError, TypeError, IndexError) as error:
            raise UsageError.unreadable(path, error, fix="Give a file that 'autopar profile' wrote") from error
        if found.trying:
            found.failed.append([*found.trying, "the job ended while this was measured"])
            found.trying = []
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long and how large.

    Attributes:
        budget_s: of the whole measurement.
        collective_timeout_s: of one collective.
        max_bytes: of one; the memory of the fullest node may allow less.
        growth: from one size to the next.
        batch_s: so long, about, is one sample: a call, or as many as it takes.
        grace_s: how much longer than all of this a rank may take to answer before it counts as gone.
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
        store: shared by all ranks of the default process group, which is initialised.
        node: number of the node that this rank stands on.
        device: of the tensors.
        limits: the same on all ranks.
        collectives: by kind.
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
        """Do what rank 0 says until it is done.

        Raises:
            AutoparError: rank 0 is gone.
        """
        while True:
            task = json.loads(self._wait(f"task{self._number}", IDLE_S, "what comes next, of rank 0"))
            if task["do"] == "stop":
                return
            self._answer(task)

    def _answer(self, task: dict[str, Any]) -> None:
        number, self._number = self._number, self._number + 1
        try:
            answer = {"value": getattr(self, f"_{task['do']}")(number, **task["with"])}
        except Exception as error:  # noqa: BLE001  every failure of a rank is a failure of the point
            answer = {"failure": f"rank {self.rank}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        self.store.set(f"done{number}.{self.rank}", json.dumps(answer))

    def _hello(self, number: int) -> dict[str, Any]:
        return {"node": self.node, "device": device_name(), "room": free_bytes(self.device)}

    def _open(self, number: int, groups: list[list[int]]) -> None:
        """New groups: those in which something failed cannot be used again, and those of NCCL keep memory of the device."""
        for group in self._groups.values() if self.device.type == "cuda" else ():
            dist.destroy_process_group(group)
        self._groups = {}
        for ranks in groups:
            made = dist.new_group(ranks, timeout=timedelta(seconds=self.limits.collective_timeout_s))
            if self.rank in ranks:
                self._groups[tuple(ranks)] = made

    def _run(self, number: int, kind: str, num_bytes: int, calls: int, repeats: int) -> list[float] | None:
        """Seconds of one call and the spread; None on a rank outside of the groups."""
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
        """Seconds of so many calls of a collective."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        synchronize(self.device)
        return time.perf_counter() - start

    def _summary(self, samples: list[float]) -> tuple[float, float]:
        """What is told of the samples: a time and its spread."""
        return median_and_spread(samples)

    def _together(self, number: int) -> None:
        """Wait until every rank is here, by the store alone."""
        if self.store.add(f"here{number}", 1) == self.world:
            self.store.set(f"go{number}", "")
        self._wait(f"go{number}", self.limits.collective_timeout_s, "the start of a measurement on every rank")

    def _wait(self, key: str, timeout_s: float, what: str) -> bytes:
        try:
            self.store.wait([key], timedelta(seconds=timeout_s))
            found: bytes = self.store.get(key)
        except (RuntimeError, ValueError) as error:  # DistStoreError is a RuntimeError
            raise AutoparError(
                f"Waited {timeout_s:g} s in vain for {what}",
                where=f"rank {self.rank}",
                fix="See what the other ranks say",
            ) from error
        return found

    # --- rank 0

    def lead(self, path: Path | None = None, *, progress: Progress | None = None) -> LinkPoints:
        """Measure everything that the file does not have yet; the other ranks :meth:`follow`.

        Args:
            path: of the file of points, written after each kind of collective on each set of groups.

        Raises:
            UsageError: the file belongs to another job.
            AutoparError: a rank is gone.
        """
        try:
            found = self._greeting(path)
            limit = min(self.limits.max_bytes, found.job.pop("room") // BUFFERS)
            turns = [
                (i, kind)
                for i, s in enumerate(found.sets)
                for kind in self.collectives
                if kind != "send" or s.size == 2
            ]
            end = time.monotonic() + self.limits.budget_s
            opened = -1
            for turn, (index, kind) in enumerate(turns):
                if progress is not None:
                    progress(f"{found.sets[index].name}: {kind}", turn, len(turns))
                allowed_s = max(end - time.monotonic(), 0.0) / (len(turns) - turn)
                try:
                    if opened != index:
                        self._tell("open", groups=found.sets[index].groups)
                        opened = index
                    self._sizes(found, index, kind, limit, allowed_s, path)
                except _PointError as error:
                    found.failed.append([*(found.trying or [found.sets[index].name, kind, 0]), str(error)])
                    found.trying, opened = [], -1
                if path is not None:
                    found.save(path)
            return found
        finally:
            self.store.set(f"task{self._number}", json.dumps({"do": "stop"}))

    def _greeting(self, path: Path | None) -> LinkPoints:
        hello = self._tell("hello")
        nodes = [answer["node"] for answer in hello]
        job = {
            "backend": dist.get_backend(), "device": hello[0]["device"], "torch": torch.__version__, "nodes": nodes,
        }  # fmt: skip
        found = LinkPoints(job=job, sets=list(group_sets(nodes)))
        if path is not None and path.exists():
            found = LinkPoints.load(path)
            check_same("The job of this file of points", path, expected=job, got=found.job)
        found.job = {**job, "room": min(answer["room"] // nodes.count(answer["node"]) for answer in hello)}
        return found

    def _sizes(self, found: LinkPoints, index: int, kind: str, limit: int, allowed_s: float, path: Path | None) -> None:
        """All sizes of one kind on one set of groups that the time allows.

        Raises:
            _PointError: a measurement failed; ``found.trying`` says which.
        """
        name, size = found.sets[index].name, found.sets[index].size
        known = {p[2]: p[3] for p in found.points if p[:2] == [name, kind]}
        lost = [p[2] for p in found.failed if p[:2] == [name, kind]]
        start, estimate_s = time.monotonic(), 1e-3
        num_bytes, growth = SMALLEST_BYTES, self.limits.growth
        while num_bytes <= limit:
            even = -(-num_bytes // (4 * size)) * 4 * size
            num_bytes *= growth
            if even in known:
                estimate_s = growth * known[even]
                continue
            if lost and even >= min(lost):
                return
            calls = int(min(MAX_CALLS, max(1, self.limits.batch_s / estimate_s)))
            repeats = 3 if estimate_s > 0.1 else REPEATS
            if time.monotonic() - start + estimate_s * (calls * repeats + 1) > allowed_s and known:
                # what is known only of small sizes says nothing of larger ones: bytes must show, in however few calls
                if max(known.values()) > SHOWN * min(known.values()) or estimate_s > self.limits.collective_timeout_s:
                    return
                calls, repeats = 1, FEWEST
            found.trying = [name, kind, even]
            if path is not None and self.device.type == "cuda":  # a collective that hangs may take the process with it
                found.save(path)
            answers = self._tell("run", kind=kind, num_bytes=even, calls=calls, repeats=repeats)
            found.trying = []
            times = [answer for answer in answers if answer is not None]
            known[even], spread = (max(values) for values in zip(*times, strict=True))
            found.points.append([name, kind, even, known[even], spread])
            estimate_s = growth * known[even]

    def _tell(self, do: str, **arguments: Any) -> list[Any]:
        """Every rank's answer to a task, this one's among them.

        Raises:
            _PointError: a rank failed; says which and why.
            AutoparError: a rank gave no answer.
        """
        number, task = self._number, {"do": do, "with": arguments}
        self.store.set(f"task{number}", json.dumps(task))
        self._answer(task)
        patience = 2 * self.limits.collective_timeout_s + self.limits.budget_s + self.limits.grace_s
        answers = [
            json.loads(self._wait(f"done{number}.{rank}", patience, f"an answer of rank {rank}"))
            for rank in range(self.world)
        ]
        failures = [answer["failure"] for answer in answers if "failure" in answer]
        if failures:
            raise _PointError("; ".join(failures))
        return [answer["value"] for answer in answers]


class _PointError(Exception):
    """A task failed on some rank; all ranks are ready for the next one."""


def measure_links(job: LinkJob, path: Path | None = None, *, progress: Progress | None = None) -> LinkPoints | None:
    """On rank 0 the points, on the others None; all ranks call it."""
    if job.rank == 0:
        return job.lead(path, progress=progress)
    job.follow()
    return None

"""The programs of each rank: the steps of several plans in turns, and a measurement of the ranks and of the links between them.

For links it measures how much computation slows down while all ranks compute, and a few sizes of each kind of collective on all shapes of
groups.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.link import load_json
from autopar.hardware.machine import device_name
from autopar.hardware.read import MachineProfile, load_library, slowed
from autopar.lower.program import lower
from autopar.measure.collective_times import COLLECTIVES, Limits, LinkJob, LinkPoints, measure_links
from autopar.measure.job_of_ranks import GroupSet
from autopar.measure.link_fit import links_of
from autopar.measure.timers import Layers, synchronize
from autopar.models.resolve import ModelSource
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.job import start, stop
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.util.files import write_json
from autopar.util.toml import Table, as_table

LEARNING_RATE = 1e-4

QUIET_PROFILER = {"KINETO_LOG_LEVEL": "9"}
"""Environment in which the profiler of :func:`cpu_peak_bytes` does not log: a level above all that exist (at 5 torch 2.13 still logs)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Some plans of one model; picklable.

    Attributes:
        source: the model.
        graphs: the traced model by the name of a plan's precision.
        plans: plans by key.
        device_type: ``cpu`` or ``cuda``.
        rounds, steps: in each round every plan in turn runs ``steps`` timed steps, after one that is not timed.
        warm_up: steps of each plan before the first round.
        alone: whether one plan is built, run and freed before the next one, since several do not fit in memory.
        as_rank: this process alone runs as this rank of a fake process group, whose collectives move nothing, for the compute and memory of
            plans with more ranks.
        collective_timeout_s: time limit of a collective.
    """

    source: ModelSource
    graphs: Mapping[str, Graph]
    plans: Mapping[str, Plan]
    device_type: str = "cpu"
    rounds: int = 3
    steps: int = 3
    warm_up: int = 2
    alone: bool = False
    as_rank: int | None = None
    collective_timeout_s: float = 120.0


def run(job: Job | LinkTask) -> dict[str, dict[str, Any]]:
    """Run the job on this rank of the process group.

    Returns:
        For each plan the ``seconds`` of its timed steps, ``layers_s`` of a pass of small layers (the speed of the machine at that time),
        ``memory_bytes`` at the peak of tensors and ``parts`` by category, or ``failure``; for collectives the result of
        :meth:`LinkTask.run`.
    """
    if isinstance(job, LinkTask):
        return job.run()
    if job.as_rank is not None:  # alone in a fake group, which the caller ends
        from torch.testing._internal.distributed.fake_pg import FakeStore

        stop()
        size = next(iter(job.plans.values())).mesh.world_size
        dist.init_process_group("fake", store=FakeStore(), rank=job.as_rank, world_size=size)
    elif job.device_type == "cuda" and dist.get_backend() != "nccl":  # one device, on a worker of a gloo group
        stop()
        start("cuda", collective_timeout_s=job.collective_timeout_s)
    logger = logging.getLogger("autopar")
    level = logger.level
    logger.setLevel(logging.ERROR)  # errors of predictions are the result here
    try:
        return _run(job)
    finally:
        logger.setLevel(level)


def _run(job: Job) -> dict[str, dict[str, Any]]:
    """Run the plans of the job, all in turns or one after the other."""
    model = job.source.build()
    worlds: dict[Mesh, World] = {}  # plans of a mesh share its groups, as the threads of each group keep polling
    results: dict[str, dict[str, Any]] = {}
    for keys in [[key] for key in job.plans] if job.alone else [list(job.plans)]:
        results |= _in_turns(job, {key: job.plans[key] for key in keys}, model, worlds)
        if job.alone:
            gc.collect()  # hooks and their modules refer to each other
            torch.cuda.empty_cache()
    return results


def _in_turns(
    job: Job, plans: Mapping[str, Plan], model: torch.nn.Module, worlds: dict[Mesh, World]
) -> dict[str, dict[str, Any]]:
    """Run plans whose steps take turns, so that other load of the machine affects all of them."""
    runners: dict[str, _Runner] = {}
    results: dict[str, dict[str, Any]] = {}
    for key, plan in plans.items():
        try:
            if plan.mesh not in worlds:
                worlds[plan.mesh] = World(plan.mesh, job.device_type)
            runners[key] = _Runner(job, plan, model, worlds[plan.mesh])
            runners[key].steps(job.warm_up)
        except Exception:  # noqa: BLE001  one plan's failure, equal on all ranks, is a result
            runners.pop(key, None)
            results[key] = {"failure": traceback.format_exc(limit=-3)}
    layers = Layers()
    for round_number in range(job.rounds):
        for runner in runners.values():
            runner.steps(1)
            dist.barrier()
            runner.layers_s.append(layers.pass_s())
            runner.timed(job.steps)
            if round_number == 0:
                runner.measure_memory()
    for key, runner in runners.items():
        record = runner.parallel.monitor.record
        results[key] = {
            "seconds": runner.seconds,
            "layers_s": statistics.median(runner.layers_s),
            "memory_bytes": runner.memory_bytes,
            "parts": {part.name: part.measured_s for part in record.parts} if record else {},
        }
    return results


class _Runner:
    """The model and optimizer of one plan on this rank."""

    def __init__(self, job: Job, plan: Plan, model: torch.nn.Module, world: World) -> None:
        graph = job.graphs[plan.precision.name]
        program = lower(plan, graph, device=world.device, rank=world.rank)
        self.parallel = ParallelModel(program, world, ModelWeights(model, 0))
        if job.as_rank is not None:
            self.parallel.monitor.close()  # the other ranks do not exist
        self.optimizer = OPTIMIZERS[plan.optimizer.lower()](self.parallel.parameters(), lr=LEARNING_RATE)
        self.scaler = self.parallel.grad_scaler()
        batch = job.source.make_batch(plan.global_batch_size)
        self.batch = {leaf.name: _as(batch[leaf.name], leaf.spec.dtype) for leaf in graph.inputs}
        self.device = world.device
        self.seconds: list[float] = []
        self.layers_s: list[float] = []
        self.memory_bytes = 0

    def steps(self, count: int) -> None:
        """Run training steps."""
        for _ in range(count):
            self.parallel.train_step(self.batch)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def timed(self, count: int) -> None:
        """Run training steps and keep the wall time of each."""
        for _ in range(count):
            dist.barrier()
            synchronize(self.device)
            start_s = time.perf_counter()
            self.steps(1)
            synchronize(self.device)
            self.seconds.append(time.perf_counter() - start_s)

    def measure_memory(self) -> None:
        """Measure the peak of tensors in one step: of CUDA's allocator, or of the profiler's events on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            others = torch.cuda.memory_allocated(self.device) - self._held_bytes()
            self.steps(1)
            self.memory_bytes = torch.cuda.max_memory_allocated(self.device) - others
        else:
            held = self._held_bytes()
            self.memory_bytes = held + cpu_peak_bytes(lambda: self.steps(1))

    def _held_bytes(self) -> int:
        """Return the bytes of parameters and optimizer states, which stay between steps."""
        tensors: list[torch.Tensor] = list(self.parallel.parameters())
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        local = (getattr(t, "_local_tensor", t) for t in tensors)
        return sum(t.numel() * t.element_size() for t in local)


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "sgd": torch.optim.SGD,
    "adafactor": torch.optim.Adafactor,
}
"""The optimizers that can be run, by the names that plans have; one with declared bytes of states is not torch's."""


def cpu_peak_bytes(function: Any) -> int:
    """Return the peak of bytes of CPU tensors while ``function`` runs, over those at its start."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        function()
    results = profiler.profiler.kineto_results
    events = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    now = peak = 0
    for _, size in events:
        now += size
        peak = max(peak, now)
    return peak


def _as(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if value.is_floating_point() else value


# --- the ranks and their links

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

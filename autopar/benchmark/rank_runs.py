"""The program of each rank: it builds several plans, runs their steps in turns, and returns times, memory and categories."""

from __future__ import annotations

import gc
import logging
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from autopar.benchmark.rank_links import LinkTask
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.measure.timers import Layers, synchronize
from autopar.models.resolve import ModelSource
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.runtime.job import start, stop
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World

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
    if job.as_rank is not None:
        _fake_group(job)
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


def _fake_group(job: Job) -> None:
    """Replace the process group by a fake one, which the caller ends."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stop()
    size = next(iter(job.plans.values())).mesh.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=job.as_rank or 0, world_size=size)


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
            "layers_s": median(runner.layers_s),
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

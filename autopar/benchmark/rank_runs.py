"""What every rank does: builds several plans, runs their steps in turns, tells times, memory and categories.

Under torchrun on other machines: ``torchrun ... autopar/benchmark/rank_runs.py JOB RESULT``, where JOB holds a pickled
:class:`Job` and RESULT will hold a JSON list of what :func:`run` gave on each rank.
"""

from __future__ import annotations

import gc
import json
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
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
from autopar.util.files import write_text

LEARNING_RATE = 1e-4

QUIET_PROFILER = {"KINETO_LOG_LEVEL": "9"}
"""The environment in which the profiler of :func:`cpu_peak_bytes` says nothing on stderr: a level above all that it has
(with 5 it talks in torch 2.13)."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Some plans of one model; picklable.

    Attributes:
        plans: by key; ``graphs``: the traced model for each plan's precision, by its name.
        device_type: ``cpu`` or ``cuda``.
        rounds, steps: each round runs ``steps`` timed steps of each plan in turn, after one that is not timed.
        warm_up: steps of each plan before the first round.
        alone: one plan is built, run and freed before the next one: where several do not fit beside each other.
        as_rank: instead of a job of many ranks this one process is that rank of a group of fakes, whose
            collectives move nothing: for compute and memory of a plan for more ranks.
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
    """The job on this rank, whose process group is there.

    Returns:
        For each plan ``seconds`` of its timed steps, ``layers_s`` of a pass of small layers (the speed of the
        machine meanwhile), ``memory_bytes`` at the peak of tensors and ``parts`` by category,
        or ``failure``; of collectives what :meth:`LinkTask.run` gives.
    """
    if isinstance(job, LinkTask):
        return job.run()
    if job.as_rank is not None:
        _fake_group(job)
    elif job.device_type == "cuda" and dist.get_backend() != "nccl":  # one device, by a worker of a gloo world
        stop()
        start("cuda", collective_timeout_s=job.collective_timeout_s)
    logger = logging.getLogger("autopar")
    level = logger.level
    logger.setLevel(logging.ERROR)  # that predictions are off is the result, and no warning
    try:
        return _run(job)
    finally:
        logger.setLevel(level)


def _fake_group(job: Job) -> None:
    """In place of the process group that is there; the caller ends this one."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stop()
    size = next(iter(job.plans.values())).mesh.world_size
    dist.init_process_group("fake", store=FakeStore(), rank=job.as_rank or 0, world_size=size)


def _run(job: Job) -> dict[str, dict[str, Any]]:
    model = job.source.build()
    worlds: dict[Mesh, World] = {}  # plans of a mesh share its groups: the threads of each keep waking up
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
    """Plans whose steps take turns, so that whatever else the machine does meets all of them."""
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
    for turn in range(job.rounds):
        for runner in runners.values():
            runner.steps(1)
            dist.barrier()
            runner.layers_s.append(layers.pass_s())
            runner.timed(job.steps)
            if turn == 0:
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
    """One plan's model and optimizer on this rank."""

    def __init__(self, job: Job, plan: Plan, model: torch.nn.Module, world: World) -> None:
        graph = job.graphs[plan.precision.name]
        program = lower(plan, graph, device=world.device, rank=world.rank)
        self.parallel = ParallelModel(program, world, ModelWeights(model, 0))
        if job.as_rank is not None:
            self.parallel.monitor.close()  # the other ranks have nothing to tell
        self.optimizer = torch_optimizer(plan.optimizer, list(self.parallel.parameters()))
        self.scaler = self.parallel.grad_scaler()
        batch = job.source.make_batch(plan.global_batch_size)
        self.batch = {leaf.name: _as(batch[leaf.name], leaf.spec.dtype) for leaf in graph.inputs}
        self.device = world.device
        self.seconds: list[float] = []
        self.layers_s: list[float] = []
        self.memory_bytes = 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.parallel.train_step(self.batch)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def timed(self, count: int) -> None:
        for _ in range(count):
            dist.barrier()
            synchronize(self.device)
            start_s = time.perf_counter()
            self.steps(1)
            synchronize(self.device)
            self.seconds.append(time.perf_counter() - start_s)

    def measure_memory(self) -> None:
        """Of one step: on CUDA the allocator's peak, on a CPU by the profiler's account of every tensor."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            others = torch.cuda.memory_allocated(self.device) - self._held_bytes()
            self.steps(1)
            self.memory_bytes = torch.cuda.max_memory_allocated(self.device) - others
        else:
            held = self._held_bytes()
            self.memory_bytes = held + cpu_peak_bytes(lambda: self.steps(1))

    def _held_bytes(self) -> int:
        """Parameters and states of the optimizer, between steps."""
        tensors: list[torch.Tensor] = list(self.parallel.parameters())
        tensors += [v for state in self.optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        local = (getattr(t, "_local_tensor", t) for t in tensors)
        return sum(t.numel() * t.element_size() for t in local)


def torch_optimizer(name: str, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    """The optimizer of a plan as torch makes it by default."""
    sgd = torch.optim.SGD
    kinds: dict[str, Callable[..., torch.optim.Optimizer]]
    kinds = {"adam": torch.optim.Adam, "momentum": partial(sgd, momentum=0.9), "sgd": sgd}
    return kinds.get(name, torch.optim.AdamW)(parameters, lr=LEARNING_RATE)


def cpu_peak_bytes(function: Any) -> int:
    """The most bytes of CPU tensors that are alive at once while ``function`` runs, over those at its beginning."""
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


# --- under torchrun


def main(job_file: Path, result_file: Path) -> None:
    """One rank of a torchrun job; rank 0 writes what all found."""
    torch.set_num_threads(1)
    job: Job | LinkTask = pickle.loads(job_file.read_bytes())
    start(job.device_type, collective_timeout_s=job.collective_timeout_s)
    mine = run(job)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if dist.get_rank() == 0:
        write_text(result_file, json.dumps(everyone))
    stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Host time around operators, between two processes: optimizers on DTensors, FSDP's units, collectives, pipeline actions.

Times are those of the calling thread, which sleeps while it waits: what collectives take is not in them, and other
processes disturb little. What other threads of the process do for a pipeline's messages is a time of its own: they take
it from the same cores. Every rank of a job of two calls these functions in the same order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate

from autopar.ops import collectives
from autopar.runtime.local_optimizer import LocalSteps

_SIZE = 8
_REPEATS, _WARM_UP = 9, 3
_ROUNDS, _BUDGET_S = 5, 6.0
_PARAMETERS = (2, 10)
_UNITS = 6
_KERNELS_OF_ADAMW = 9  # autopar.cost.step.optimizer: operators of AdamW for one parameter


def measure_overheads() -> dict[str, float]:
    """All of them, by the names of :class:`autopar.hardware.device.Overheads`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    end, rounds = time.monotonic() + _BUDGET_S, [_measured_once(mesh)]
    while len(rounds) < _ROUNDS and _has_time(end):
        rounds.append(_measured_once(mesh))
    return {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}


def _has_time(end: float) -> bool:
    """By the clock of rank 0: both go on, or none."""
    verdict = torch.tensor(float(time.monotonic() < end))
    dist.broadcast(verdict, src=0)
    return bool(verdict)


def _measured_once(mesh: DeviceMesh) -> dict[str, float]:
    return {
        "sharded_launch_s": sharded_launch_s(mesh),
        "collective_s": collective_s(mesh),
        **action_times(mesh),
        **unit_times(mesh),
    }


def sharded_launch_s(mesh: DeviceMesh) -> float:
    """One operator of AdamW on a parameter that is a DTensor, stepped as the runtime does."""
    parameters = []
    for _ in range(16):
        whole = DTensor.from_local(torch.ones(_SIZE, _SIZE), mesh, [Replicate()], run_check=False)
        parameters.append(nn.Parameter(whole))
        parameters[-1].grad = torch.zeros_like(parameters[-1])
    steps = LocalSteps(parameters)
    time_s = _median_s(torch.optim.AdamW(parameters).step) / (len(parameters) * _KERNELS_OF_ADAMW)
    steps.remove()
    return time_s


def collective_s(mesh: DeviceMesh) -> float:
    """A typed all-reduce beyond torch's own, forward or backward: half of what both take more."""
    start, count = torch.ones(64, requires_grad=True), 10

    def typed() -> None:
        y = start
        for _ in range(count):
            y = collectives.all_reduce(y, "tp", "R")
        y.sum().backward()  # type: ignore[no-untyped-call]

    def plain() -> None:
        for _ in range(2 * count):
            dist.all_reduce(start.detach())

    with collectives.on_meshes((mesh,)):
        return max(_median_s(typed) - _median_s(plain), 0.0) / (2 * count)


def unit_times(mesh: DeviceMesh) -> dict[str, float]:
    """FSDP: hooks around a forward or backward, a gather, a reduction; for a unit, and more for each parameter.

    Three ways to run tell them apart: gathers in forward and backward with and without reductions, and no gather in
    backward with them. Collectives of no bytes to speak of are in the gathers and reductions, as far as the calling
    thread works for them.
    """
    found: dict[int, tuple[float, float, float]] = {}
    for count in _PARAMETERS:
        plain = _units(count)
        base = _median_s(lambda plain=plain: _pass(plain)) / _UNITS  # type: ignore[misc]
        twice, once = (_sharded(_units(count), mesh, reshard=reshard) for reshard in (True, False))
        both = _median_s(lambda twice=twice: _pass(twice)) / _UNITS - base  # type: ignore[misc]
        single = _median_s(lambda once=once: _pass(once)) / _UNITS - base  # type: ignore[misc]
        twice.set_requires_gradient_sync(False)
        silent = _median_s(lambda twice=twice: _pass(twice)) / _UNITS - base  # type: ignore[misc]
        gather, reduction = max(both - single, 0.0), max(both - silent, 0.0)
        found[count] = (max(both - 2 * gather - reduction, 0.0) / 2, gather, reduction)
    few, many = _PARAMETERS
    times = {}
    for i, name in enumerate(("unit", "gather", "reduce")):
        slope = max(found[many][i] - found[few][i], 0.0) / (many - few)
        times[f"{name}_parameter_s"] = slope
        times[f"{name}_s"] = max(found[few][i] - few * slope, 0.0)
    return times


def action_times(mesh: DeviceMesh) -> dict[str, float]:
    """Pipelines of linear layers, beyond the layers' own forward and backward: under 1F1B, and with two stages a rank.

    For each action the time of the calling thread; for each tensor sent or received that of all other threads. The
    latter has a mean: most messages take little, and some a time slice of the scheduler.
    """
    found = {}
    for prefix, virtual_stages in (("", 1), ("interleaved_", 2)):
        count = 8
        pipelined, alone = _pipeline(mesh, virtual_stages, count)
        own = [_used_s(pipelined) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
        base_s = _median_s(alone)
        actions = 2 * count * virtual_stages
        ends = 2 * count * (2 * virtual_stages - 1)  # one stage of all the ranks' has one neighbour, the others two
        found[f"{prefix}action_s"] = max(statistics.median(thread for thread, _ in own) - base_s, 0.0) / actions
        found[f"{prefix}message_s"] = statistics.mean(others for _, others in own) / ends
    return found


def _pipeline(
    mesh: DeviceMesh, virtual_stages: int, num_micro_batches: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A step of this rank's stages by a schedule of torch's, and the same layers without one."""
    rank, last = dist.get_rank(), 2 * virtual_stages - 1
    batch = torch.ones(num_micro_batches, _SIZE)
    example = batch[:1].to("meta")
    numbers = range(rank, 2 * virtual_stages, 2)
    layers = [nn.Linear(_SIZE, _SIZE) for _ in numbers]
    stages = [
        PipelineStage(
            layer, number, last + 1, torch.device("cpu"), input_args=(example.clone().requires_grad_(number > 0),),
            output_args=(example.clone().requires_grad_(),), group=mesh.get_group(),
        )
        for number, layer in zip(numbers, layers, strict=True)
    ]  # fmt: skip
    options: dict[str, Any] = {"loss_fn": lambda output, _: output.sum(), "scale_grads": False}
    schedule: Any = (
        Schedule1F1B(stages[0], num_micro_batches, **options)
        if virtual_stages == 1
        else ScheduleInterleaved1F1B(list(stages), num_micro_batches, **options)
    )

    def pipelined() -> None:
        if rank == 0:
            schedule.step(batch, target=batch, losses=[])
        else:
            schedule.step(target=batch, losses=[])

    def alone() -> None:
        for number, layer in zip(numbers, layers, strict=True):
            for row in torch.split(batch, 1):
                layer(row.detach().requires_grad_(number > 0)).sum().backward()

    return pipelined, alone


def _units(num_parameters: int) -> nn.Sequential:
    return nn.Sequential(*(_Unit(num_parameters) for _ in range(_UNITS)))


class _Unit(nn.Module):
    def __init__(self, num_parameters: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.eye(_SIZE)) for _ in range(num_parameters)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


def _sharded(units: nn.Sequential, mesh: DeviceMesh, *, reshard: bool) -> FSDPModule:
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    return fully_shard(units, mesh=mesh, reshard_after_forward=reshard)


def _pass(module: nn.Module | FSDPModule) -> None:
    assert isinstance(module, nn.Module)
    module(torch.ones(1, _SIZE)).sum().backward()


def _median_s(function: Callable[[], object]) -> float:
    times: Sequence[float] = [_once_s(function) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
    return statistics.median(times)


def _once_s(function: Callable[[], object]) -> float:
    return _used_s(function)[0]


def _used_s(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the calling thread, and of all others of the process together."""
    dist.barrier()
    start, all_start = time.thread_time(), time.process_time()
    function()
    thread_s = time.thread_time() - start
    return thread_s, max(time.process_time() - all_start - thread_s, 0.0)

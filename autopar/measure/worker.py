"""One of the processes that :mod:`autopar.hardware.machine` starts: ``python -m autopar.measure.worker RANK RANKS FOLDER``.

On a CPU all ranks measure the device at once, as they compute in training, then the first two the link between them over gloo; of
GPUs rank 0 measures one alone, then all ranks, one on each, the link over NCCL (one GPU alone has no link). Rank 0 writes the result as JSON to ``FOLDER/result.json``. A process of its own, so that
thread counts and process groups of the caller stay as they are.

Of the host's time around operators (optimizers on DTensors, FSDP's units, collectives, pipeline actions) it measures that of the
calling thread, which sleeps while it waits: what collectives take is not in it, and other processes disturb little. What other
threads of the process do for a pipeline's messages is a time of its own: they take it from the same cores. Every rank of a job of two
calls these functions in the same order.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate

from autopar.measure import timers as measure
from autopar.ops import collectives
from autopar.runtime.local_optimizer import LocalSteps

_SIZE = 8
_REPEATS, _WARM_UP = 9, 3
ROUNDS, BUDGET_S = 5, 6.0
_PARAMETERS = (2, 10)
_UNITS = 6
_KERNELS_OF_ADAMW = 9  # autopar.cost.step.memory: operators of AdamW for one parameter


def measure_overheads() -> dict[str, float]:
    """All of them, by the names of :class:`autopar.hardware.device.Overheads`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return _in_rounds(lambda: _measured_once(mesh), _has_time)


def _in_rounds(measure_once: Callable[[], dict[str, Any]], has_time: Callable[[float], bool]) -> dict[str, Any]:
    """What is measured up to ``ROUNDS`` times, none begun after ``BUDGET_S``; of each number the median.

    The speed of a shared machine changes from second to second by a fifth and more, and one number must not be
    measured in a good second and the next one in a bad one.

    Args:
        has_time: whether a time by the clock has not come yet.
    """
    end, rounds = time.monotonic() + BUDGET_S, [measure_once()]
    while len(rounds) < ROUNDS and has_time(end):
        rounds.append(measure_once())
    return dict(_medians(rounds))


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
    times: Sequence[float] = [_used_s(function)[0] for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
    return statistics.median(times)


def _used_s(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the calling thread, and of all others of the process together."""
    dist.barrier()
    start, all_start = time.thread_time(), time.process_time()
    function()
    thread_s = time.thread_time() - start
    return thread_s, max(time.process_time() - all_start - thread_s, 0.0)


LINK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
SMALL_BYTES = 4096
SLOW_DIMS = (1, 16)
"""Rows of products in float16 on a CPU, for which torch has no blocked kernel where there are no instructions: the rate is flat, and low."""
DELAYS_OF_SMALL_ALL_REDUCE = 5  # with 2 ranks: profiles/links/gloo.toml, 1 + 2 * 2 steps


_HAS_TF32 = (8, 0)
"""From which compute capability on GPUs have it, and bfloat16, which older ones are made to multiply (NVIDIA A100 white paper)."""


def _medians(found: Sequence[Any]) -> Any:
    """Of equal trees of numbers."""
    first = found[0]
    if isinstance(first, dict):
        return {key: _medians([tree[key] for tree in found]) for key in first}
    if isinstance(first, list | tuple):
        return [_medians(items) for items in zip(*found, strict=True)]
    return statistics.median(found)


def measure_device(device: torch.device) -> dict[str, Any]:
    """Everything about the device alone: rates by dtype and size, copy bandwidth, launch time, memory."""
    is_cpu = device.type == "cpu"
    is_older = not is_cpu and torch.cuda.get_device_capability(device) < _HAS_TF32
    dtypes = (torch.float32, torch.float16) if is_older else (torch.float32, torch.bfloat16, torch.float16)
    sizes = {torch.float16: SLOW_DIMS} if is_cpu else {}
    found: dict[str, Any] = {
        "matmul": {
            str(dtype).removeprefix("torch."): measure.matmul_rates(device, dtype, smallest_dims=sizes.get(dtype))
            for dtype in dtypes
        },
        "copy_bandwidth_bytes_per_s": measure.copy_bandwidth_bytes_per_s(device),
        "launch_s": measure.launch_s(device),
    }
    if is_cpu:
        found |= measure_host(device, dtypes, found["matmul"])
    else:
        found["host"] = measure.host_link(device)
        if not is_older:
            found["matmul"]["tf32"] = _in_tf32(device)
    return found


def _in_tf32(device: torch.device) -> list[dict[str, float]]:
    """Rates of products of float32 in the mode that makes them in TF32; this process is there for measuring alone."""
    torch.set_float32_matmul_precision("high")
    try:
        return measure.matmul_rates(device, torch.float32)
    finally:
        torch.set_float32_matmul_precision("highest")


def measure_host(
    device: torch.device, dtypes: tuple[torch.dtype, ...], points: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    """What a CPU spends besides products and copies; adds the products' backward to ``points``."""
    attention = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for point in points[name]:
            point["backward_flops_per_s"] = measure.linear_backward_flops_per_s(
                device, dtype, int(point["smallest_dim"])
            )
        attention[name] = measure.attention_times(device, dtype)
    point = next(p for p in points["float32"] if p["smallest_dim"] == 64)
    forward, backward = measure.product_s(device, point["flops_per_s"], point["backward_flops_per_s"])
    return {
        "attention": attention,
        "functions": measure.function_times(device),
        "overheads": {
            "gradient_s": measure.gradient_s(device),
            "view_s": measure.view_s(device),
            "layers_s": measure.Layers().pass_s(0.05),
            "product_s": forward,
            "product_gradient_s": backward,
        },
    }


def measure_link(device: torch.device) -> dict[str, float]:
    """Latency and bus bandwidth between the ranks (wall time: waiting is what counts).

    By an all-reduce; of GPUs by an all-gather, which no switch carries out, so that it shows what the links carry. The small one has
    a few elements for each rank: of fewer elements than its ring has parts gloo sends but some.
    """
    ranks, large_bytes = dist.get_world_size(), LINK_BYTES[device.type]
    timed = {"small": (SMALL_BYTES // 4 // ranks * ranks, 20), "large": (large_bytes // 4 // ranks * ranks, 1)}
    tensors = {name: torch.ones(length, device=device) for name, (length, _) in timed.items()}
    parts = {name: whole.chunk(ranks)[dist.get_rank()].clone() for name, whole in tensors.items()}
    times: dict[str, list[float]] = {name: [] for name in timed}
    for repeat in range(12):
        for name, (_, calls) in timed.items():
            dist.barrier()
            measure.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                _exchange(tensors[name], parts[name])
            measure.synchronize(device)
            if repeat >= 2:
                times[name].append((time.perf_counter() - start) / calls)
    small_s, large_s = statistics.median(times["small"]), statistics.median(times["large"])
    factor = (1 if device.type == "cuda" else 2) * (ranks - 1) / ranks
    more_bytes = 4 * (tensors["large"].numel() - tensors["small"].numel())
    return {
        "latency_s": small_s / DELAYS_OF_SMALL_ALL_REDUCE,
        "bandwidth_bytes_per_s": more_bytes * factor / max(large_s - small_s, 1e-9),
    }


def _exchange(whole: torch.Tensor, part: torch.Tensor) -> None:
    if whole.is_cuda:
        dist.all_gather_into_tensor(whole, part)
    else:
        dist.all_reduce(whole)


def main(rank: int, ranks: int, folder: Path) -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    result: dict[str, Any] = {}
    if rank == 0 or device.type == "cpu":
        # on a CPU all at once, as ranks compute in training: cores share caches, memory and often execution units
        result = _in_rounds(lambda: measure_device(device), lambda end: time.monotonic() < end)
    ranks = ranks if device.type == "cuda" else min(ranks, 2)
    if ranks > 1 and rank < ranks:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=(folder / "rendezvous").as_uri(), rank=rank, world_size=ranks)
        result |= {"link": measure_link(device), "link_ranks": ranks}
        if device.type == "cpu":
            result.setdefault("overheads", {}).update(measure_overheads())
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result), encoding="utf-8")
    if ranks > 1 and rank < ranks:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

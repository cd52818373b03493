"""One of the processes that measure this machine: ``python -m autopar.measure.worker RANK RANKS FOLDER``.

:mod:`autopar.hardware.machine` starts them, so that thread counts and process groups of the caller stay as they are. On CPUs all ranks
measure the device at once, since they compute at once in training; then the first two measure the link between them over gloo. On GPUs rank
0 measures one device; then all ranks, one for each GPU, measure the link over NCCL. Rank 0 writes ``FOLDER/result.json``.

The host's time around operators (optimizers on DTensors, FSDP units, collectives, pipeline actions) is CPU time of the calling thread.
Waiting is not in it, and other processes hardly affect it. What other threads do for a pipeline's messages is measured separately, as they
use the same cores. Functions that measure between two ranks must be called by both in the same order.
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
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.utils import _pytree as pytree

from autopar.measure import timers as measure
from autopar.ops import collectives
from autopar.runtime.local_optimizer import LocalSteps

_SIZE = 8
"""Size of the dims of tensors with negligible work."""
_REPEATS, _WARM_UP = 9, 3
ROUNDS, BUDGET_S = 5, 6.0
"""Most rounds of measurements, and seconds after which no further round begins."""
_PARAMETERS = (2, 10)
"""Parameters of an FSDP unit in the two measurements that give its costs a constant and a slope."""
_UNITS = 6
_KERNELS_OF_ADAMW = 9  # autopar.cost.step.memory: operators of AdamW for one parameter


def measure_overheads() -> dict[str, float]:
    """Return all overheads of the host by the field names of :class:`autopar.hardware.device.Overheads`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def measured_once() -> dict[str, float]:
        """Return one round of measurements."""
        own = {"sharded_launch_s": sharded_launch_s(mesh), "collective_s": collective_s(mesh)}
        return own | action_times(mesh) | unit_times(mesh)

    return _in_rounds(measured_once, _has_time)


def _in_rounds(measure_once: Callable[[], dict[str, Any]], has_time: Callable[[float], bool]) -> dict[str, Any]:
    """Measure in up to ``ROUNDS`` rounds, of which none begins after ``BUDGET_S``, and return the median of each number.

    The speed of a shared machine changes by a fifth and more from second to second. Rounds keep one number from being measured in a fast
    second and the next one in a slow second.

    Args:
        measure_once: one round.
        has_time: returns whether a time of the monotonic clock is still to come.
    """
    end, rounds = time.monotonic() + BUDGET_S, [measure_once()]
    while len(rounds) < ROUNDS and has_time(end):
        rounds.append(measure_once())
    medians: dict[str, Any] = pytree.tree_map(lambda *numbers: statistics.median(numbers), *rounds)
    return medians


def _has_time(end: float) -> bool:
    """Return whether rank 0 has time left, so that both ranks decide alike."""
    verdict = torch.tensor(float(time.monotonic() < end))
    dist.broadcast(verdict, src=0)
    return bool(verdict)


def sharded_launch_s(mesh: DeviceMesh) -> float:
    """Return the seconds of one operator of AdamW on a parameter that is a DTensor, stepped as the runtime does."""
    parameters = []
    for _ in range(16):
        replicated = DTensor.from_local(torch.ones(_SIZE, _SIZE), mesh, [Replicate()], run_check=False)
        parameters.append(nn.Parameter(replicated))
        parameters[-1].grad = torch.zeros_like(parameters[-1])
    steps = LocalSteps(parameters)
    time_s = _median_s(torch.optim.AdamW(parameters).step) / (len(parameters) * _KERNELS_OF_ADAMW)
    steps.remove()
    return time_s


def collective_s(mesh: DeviceMesh) -> float:
    """Return the overhead of a typed all-reduce over torch's own, in seconds, for forward or backward: half of the overhead of both."""
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
    """Return the overheads of FSDP in seconds: of hooks around a pass, of a gather and of a reduction, for a unit and a parameter.

    Three runs separate them: gathers in forward and backward with reductions, the same without reductions, and no gather in backward.
    Collectives of negligible bytes are part of gathers and reductions, as far as the calling thread works for them.
    """
    times_by_count: dict[int, tuple[float, float, float]] = {}
    for count in _PARAMETERS:
        plain = _units(count)
        base_s = _median_s(lambda plain=plain: _pass(plain)) / _UNITS  # type: ignore[misc]
        twice, once = (_sharded(_units(count), mesh, reshard=reshard) for reshard in (True, False))
        both_s = _median_s(lambda twice=twice: _pass(twice)) / _UNITS - base_s  # type: ignore[misc]
        single_s = _median_s(lambda once=once: _pass(once)) / _UNITS - base_s  # type: ignore[misc]
        twice.set_requires_gradient_sync(False)
        unreduced_s = _median_s(lambda twice=twice: _pass(twice)) / _UNITS - base_s  # type: ignore[misc]
        gather_s, reduction_s = max(both_s - single_s, 0.0), max(both_s - unreduced_s, 0.0)
        times_by_count[count] = (max(both_s - 2 * gather_s - reduction_s, 0.0) / 2, gather_s, reduction_s)
    fewest, most = _PARAMETERS
    times = {}
    for i, name in enumerate(("unit", "gather", "reduce")):
        slope = max(times_by_count[most][i] - times_by_count[fewest][i], 0.0) / (most - fewest)
        times[f"{name}_parameter_s"] = slope
        times[f"{name}_s"] = max(times_by_count[fewest][i] - fewest * slope, 0.0)
    return times


def action_times(mesh: DeviceMesh) -> dict[str, float]:
    """Return the seconds of pipeline actions and messages beyond the layers' own work, under 1F1B and with two stages a rank.

    Each action has the time of the calling thread, each tensor that is sent or received that of all other threads. The latter is a mean:
    most messages take little, and some take a time slice of the scheduler.
    """
    times = {}
    for prefix, virtual_stages in (("", 1), ("interleaved_", 2)):
        count = 8
        pipelined, alone = _pipeline(mesh, virtual_stages, count)
        samples = [_used_s(pipelined) for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
        base_s = _median_s(alone)
        actions = 2 * count * virtual_stages
        ends = 2 * count * (2 * virtual_stages - 1)  # on each rank one stage has one neighbour, the others have two
        times[f"{prefix}action_s"] = max(statistics.median(thread for thread, _ in samples) - base_s, 0.0) / actions
        times[f"{prefix}message_s"] = statistics.mean(other_threads for _, other_threads in samples) / ends
    return times


def _pipeline(
    mesh: DeviceMesh, virtual_stages: int, num_micro_batches: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return two functions: a step of this rank's stages under a schedule of torch, and the same layers without a schedule."""
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
    """Return modules of small products, one for each parameter."""
    layers = ([nn.Linear(_SIZE, _SIZE, bias=False) for _ in range(num_parameters)] for _ in range(_UNITS))
    return nn.Sequential(*(nn.Sequential(*unit) for unit in layers))


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
    """Return CPU seconds of the calling thread, and of all other threads of the process together."""
    dist.barrier()
    start, all_start = time.thread_time(), time.process_time()
    function()
    thread_s = time.thread_time() - start
    return thread_s, max(time.process_time() - all_start - thread_s, 0.0)


LINK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
"""Bytes of the large collective, by kind of device."""
SMALL_BYTES = 4096
DELAYS_OF_SMALL_ALL_REDUCE = 5  # with 2 ranks: profiles/links/gloo.toml, 1 + 2 * 2 steps


_HAS_TF32 = (8, 0)
"""The compute capability from which GPUs have TF32 and bfloat16 (NVIDIA A100 white paper); older ones emulate bfloat16."""


def measure_device(device: torch.device) -> dict[str, Any]:
    """Return the measurements of one device: rates by dtype and size, copy bandwidth, launch time, memory."""
    is_cpu = device.type == "cpu"
    is_older = not is_cpu and torch.cuda.get_device_capability(device) < _HAS_TF32
    dtypes = (torch.float32, torch.float16) if is_older else (torch.float32, torch.bfloat16, torch.float16)
    measured: dict[str, Any] = {
        "matmul": {str(dtype).removeprefix("torch."): measure.matmul_rates(device, dtype) for dtype in dtypes},
        "copy_bandwidth_bytes_per_s": measure.copy_bandwidth_bytes_per_s(device),
        "launch_s": measure.launch_s(device),
    }
    if is_cpu:
        measured |= measure_host(device, dtypes, measured["matmul"])
    else:
        measured["host"] = measure.host_link(device)
        if not is_older:  # the mode is the process's, which exists for measurements only
            torch.set_float32_matmul_precision("high")
            measured["matmul"]["tf32"] = measure.matmul_rates(device, torch.float32)
            torch.set_float32_matmul_precision("highest")
    return measured


def measure_host(
    device: torch.device, dtypes: tuple[torch.dtype, ...], points: dict[str, list[dict[str, float]]]
) -> dict[str, Any]:
    """Return what a CPU spends besides products and copies, and add the rates of the products' backward to ``points``."""
    attention = {}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for point in points[name]:
            point["backward_flops_per_s"] = measure.linear_backward_flops_per_s(
                device, dtype, int(point["smallest_dim"])
            )
        attention[name] = measure.attention_times(device, dtype)
    point = [p for p in points["float32"] if p["smallest_dim"] <= 64][-1]
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
    """Return the latency and bus bandwidth between the ranks, in wall time, since waiting is what a link costs.

    On CPUs they are those of an all-reduce. On GPUs they are those of an all-gather, which no switch carries out, so that the links'
    bandwidth shows. The small collective has a multiple of the number of ranks in elements: gloo skips messages when there are fewer
    elements than parts of its ring.
    """
    ranks, large_bytes = dist.get_world_size(), LINK_BYTES[device.type]
    cases = {"small": (SMALL_BYTES // 4 // ranks * ranks, 20), "large": (large_bytes // 4 // ranks * ranks, 1)}
    tensors = {name: torch.ones(length, device=device) for name, (length, _) in cases.items()}
    parts = {name: tensor.chunk(ranks)[dist.get_rank()].clone() for name, tensor in tensors.items()}
    times: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(12):
        for name, (_, calls) in cases.items():
            dist.barrier()
            measure.synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                if device.type == "cuda":
                    dist.all_gather_into_tensor(tensors[name], parts[name])
                else:
                    dist.all_reduce(tensors[name])
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


def main(rank: int, ranks: int, folder: Path) -> None:
    """Measure this machine as one rank; rank 0 writes the result."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    result: dict[str, Any] = {}
    if rank == 0 or device.type == "cpu":
        # CPU ranks measure at once, as they compute in training: cores share caches, memory and often execution units
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

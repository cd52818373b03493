"""One of the processes that :mod:`autopar.hardware.machine` starts: ``python -m autopar.measure.worker RANK RANKS FOLDER``.

On a CPU all ranks measure the device at once, as they compute in training, then the first two the link between them over gloo; of
GPUs rank 0 measures one alone, then all ranks, one on each, the link over NCCL (one GPU alone has no link). Rank 0 writes the result as JSON to ``FOLDER/result.json``. A process of its own, so that
thread counts and process groups of the caller stay as they are.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.measure import timers as measure
from autopar.measure.overheads import measure_overheads

LINK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20}
SMALL_BYTES = 4096
SLOW_DIMS = (1, 16)
"""Rows of products in float16 on a CPU, for which torch has no blocked kernel where there are no instructions: the rate is flat, and low."""
DELAYS_OF_SMALL_ALL_REDUCE = 5  # with 2 ranks: profiles/links/gloo.toml, 1 + 2 * 2 steps


_HAS_TF32 = (8, 0)
"""From which compute capability on GPUs have it, and bfloat16, which older ones are made to multiply (NVIDIA A100 white paper)."""

ROUNDS, BUDGET_S = 5, 6.0


def measured_in_rounds(device: torch.device) -> dict[str, Any]:
    """:func:`measure_device` up to ``ROUNDS`` times, none begun after ``BUDGET_S``; of each number the median.

    The speed of a shared machine changes from second to second by a fifth and more, and one number must not be
    measured in a good second and the next one in a bad one.
    """
    end, rounds = time.monotonic() + BUDGET_S, [measure_device(device)]
    while len(rounds) < ROUNDS and time.monotonic() < end:
        rounds.append(measure_device(device))
    return dict(_medians(rounds))


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
            str(dtype).removeprefix("torch."): [
                {"smallest_dim": min(t.m, t.n, t.k), "flops_per_s": t.flops_per_s}
                for t in measure.matmul_times(device, dtype, smallest_dims=sizes.get(dtype))
            ]
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
        times = measure.matmul_times(device, torch.float32)
    finally:
        torch.set_float32_matmul_precision("highest")
    return [{"smallest_dim": min(t.m, t.n, t.k), "flops_per_s": t.flops_per_s} for t in times]


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
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(calls):
                _exchange(tensors[name], parts[name])
            _synchronize(device)
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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(rank: int, ranks: int, folder: Path) -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    result: dict[str, Any] = {}
    if rank == 0 or device.type == "cpu":
        # on a CPU all at once, as ranks compute in training: cores share caches, memory and often execution units
        result = measured_in_rounds(device)
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

"""Timers for one device: matmul rates by size, copy bandwidth, the overhead of one operator.

On a CPU the clock is the thread's own CPU time and PyTorch is expected to run one thread: other processes then disturb
little. On a GPU it is the time between events on the stream.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

OTHER_DIM = {"cpu": 1024, "cuda": 8192}
SMALLEST_DIMS = {"cpu": (1, 16, 64, 256, 1024), "cuda": (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)}
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTime:
    """The median time of ``[m, k] @ [k, n]``."""

    m: int
    n: int
    k: int
    time_s: float

    @property
    def flops_per_s(self) -> float:
        """A multiplication and an addition for each of m n k."""
        return 2 * self.m * self.n * self.k / self.time_s


def timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """What times one call of a function on this device, in seconds."""

    def on_cpu(function: Callable[[], object]) -> float:
        start = time.thread_time()
        function()
        return time.thread_time() - start

    def on_cuda(function: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        function()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return on_cuda if device.type == "cuda" else on_cpu


def median_time_s(
    function: Callable[[], object], device: torch.device, *, repeats: int = 5, min_time_s: float = 1e-3
) -> float:
    """The median time of one call: after a warm-up, calls are batched until a batch takes ``min_time_s``."""
    clock = timer(device)
    calls = 1

    def batch() -> None:
        for _ in range(calls):
            function()

    while clock(batch) < min_time_s and calls < 2**14:
        calls *= 2
    return statistics.median(clock(batch) for _ in range(repeats)) / calls


def matmul_times(
    device: torch.device, dtype: torch.dtype, *, smallest_dims: Iterable[int] | None = None, repeats: int = 5
) -> tuple[MatmulTime, ...]:
    """Times of ``[m, k] @ [k, n]`` with n = k fixed and a rising m: the curve of a linear over more and more tokens."""
    other = OTHER_DIM[device.type]
    weight = torch.randn(other, other, device=device).to(dtype)  # constants draw less power: too fast on a GPU
    times = []
    for m in smallest_dims or SMALLEST_DIMS[device.type]:
        tokens = torch.randn(m, other, device=device).to(dtype)
        time_s = median_time_s(lambda tokens=tokens: tokens @ weight, device, repeats=repeats)  # type: ignore[misc]
        times.append(MatmulTime(m=m, n=other, k=other, time_s=time_s))
    return tuple(times)


def copy_bandwidth_bytes_per_s(device: torch.device, *, repeats: int = 5) -> float:
    """Bytes read plus bytes written for each second of a large copy."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_time_s(lambda: target.copy_(source), device, repeats=repeats)


_CHAINED = 40


def launch_s(device: torch.device, *, repeats: int = 5) -> float:
    """The time of an operator that has next to nothing to do, recorded for backward as in training: of a chain of four."""
    start, weight = (torch.full((8, 8), 0.1, device=device, requires_grad=True) for _ in range(2))

    def chain() -> torch.Tensor:
        x = start
        for _ in range(_CHAINED // 4):
            x = torch.nn.functional.gelu(torch.nn.functional.linear(x, weight) * x + start)
        return x

    return median_time_s(chain, device, repeats=repeats, min_time_s=5e-3) / _CHAINED

"""Timers for one device: matmul rates by size, copy bandwidth, the overhead of one operator.

On a CPU the clock is the thread's own CPU time and PyTorch is expected to run one thread: other processes then disturb
little. On a GPU it is the time between events on the stream.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from autopar.errors import UsageError

OTHER_DIM = {"cpu": 1024, "cuda": 8192}
SMALLEST_DIMS = {"cpu": (1, 16, 64, 256, 1024), "cuda": (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)}
HOST_COPY_BYTES = 256 * 2**20
REPEATS = 5
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}


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


def free_bytes(device: torch.device) -> int:
    """Memory of the device that nobody uses; of a CPU the host's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def synchronize(device: torch.device) -> None:
    """Waits for what runs on the device; on a CPU everything has ended."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_and_spread(samples: Iterable[float]) -> tuple[float, float]:
    """The median, and the distance of the quartiles over it."""
    ordered = sorted(samples)
    median, quarter = statistics.median(ordered), len(ordered) // 4
    return median, (ordered[-1 - quarter] - ordered[quarter]) / median if median else 0.0


def median_time_s(function: Callable[[], object], device: torch.device, *, min_time_s: float = 1e-3) -> float:
    """The median time of one call: after a warm-up, calls are batched until a batch takes ``min_time_s``."""
    clock = timer(device)
    calls = 1

    def batch() -> None:
        for _ in range(calls):
            function()

    while clock(batch) < min_time_s and calls < 2**14:
        calls *= 2
    return statistics.median(clock(batch) for _ in range(REPEATS)) / calls


def matmul_rates(
    device: torch.device, dtype: torch.dtype, *, smallest_dims: Iterable[int] | None = None
) -> list[dict[str, float]]:
    """Rates of ``[m, k] @ [k, n]`` with n = k fixed and a rising m, the smallest: the curve of a linear over more and more tokens."""
    other = OTHER_DIM[device.type]
    weight = torch.randn(other, other, device=device).to(dtype)  # constants draw less power: too fast on a GPU
    found: list[dict[str, float]] = []
    for m in smallest_dims or SMALLEST_DIMS[device.type]:
        tokens = torch.randn(m, other, device=device).to(dtype)
        time_s = median_time_s(lambda tokens=tokens: tokens @ weight, device)  # type: ignore[misc]
        found.append({"smallest_dim": m, "flops_per_s": 2 * m * other * other / time_s})
    return found


def copy_bandwidth_bytes_per_s(device: torch.device) -> float:
    """Bytes read plus bytes written for each second of a large copy."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_time_s(lambda: target.copy_(source), device)


def host_link(device: torch.device) -> dict[str, float]:
    """The rates of ``[device.host]``: copies of 256 MiB from and to page-locked memory, and of 4 bytes for the latency.

    One device at a time: those of a node that copy together may share what is measured here.

    Raises:
        UsageError: the device has no host of its own: it is one.
    """
    if device.type != "cuda":
        raise UsageError(f"The device {device} has no link to a host", fix="Measure a CUDA device")
    host, times = torch.device("cpu"), {}
    for name, size in (("large", HOST_COPY_BYTES), ("small", 4)):
        there = torch.ones(size, dtype=torch.uint8, device=device)
        here = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        times[name, "down"] = median_time_s(partial(here.copy_, there, non_blocking=True), device)
        times[name, "up"] = median_time_s(partial(there.copy_, here, non_blocking=True), device)
    return {
        "to_host_bytes_per_s": HOST_COPY_BYTES / times["large", "down"],
        "to_device_bytes_per_s": HOST_COPY_BYTES / times["large", "up"],
        "latency_s": max(times["small", "down"], times["small", "up"]),
        "memory_bandwidth_bytes_per_s": copy_bandwidth_bytes_per_s(host),
        "launch_s": launch_s(host),
    }


_LAYERS = 10
_LAUNCHES, _GRADIENTS = 4, 8
"""Of one layer of :func:`_chain`, as ``autopar.cost.operators.work`` counts them."""


def _chain(device: torch.device) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
    """Layers of operators that have next to nothing to do, as emitted programs call them; and what has gradients."""
    start, weight = (torch.full(shape, 0.1, device=device, requires_grad=True) for shape in ((1, 8, 8), (8, 8)))
    bias, scale, shift = (torch.full((8,), 0.1, device=device, requires_grad=True) for _ in range(3))
    functional = torch.nn.functional

    def chain() -> torch.Tensor:
        x = start
        for _ in range(_LAYERS):
            y = functional.layer_norm(x, (8,), scale, shift)
            x = x + functional.gelu(functional.linear(y, weight.t(), bias))
        return x

    return chain, (start, weight, bias, scale, shift)


def launch_s(device: torch.device) -> float:
    """The time of an operator that has next to nothing to do, recorded for backward as in training."""
    return median_time_s(_chain(device)[0], device, min_time_s=5e-3) / (_LAYERS * _LAUNCHES)


# --- a CPU, where the host is the device: what surrounds operators, and functions that compute longer than they move

_TENSOR_ROWS, _TENSOR_WIDTH = 64, 512
_REPEATED = 8


def gradient_s(device: torch.device) -> float:
    """Host time of one gradient in backward, of the same operators."""
    return _backward_s(*_chain(device), device) / (_LAYERS * _GRADIENTS)


def view_s(device: torch.device) -> float:
    """Host time of a view, forward or backward (half of both)."""
    start = torch.ones(8, 8, device=device, requires_grad=True)

    def chain() -> torch.Tensor:
        x = start
        for _ in range(_LAYERS):
            x = x.transpose(0, 1).unsqueeze(0).transpose(0, 2).squeeze(2).unsqueeze(1).squeeze(1)
        return x

    forward = median_time_s(chain, device, min_time_s=5e-3)
    return (forward + _backward_s(chain, (start,), device)) / (2 * 6 * _LAYERS)


_NARROW, _WIDE = 64, 256


def product_s(device: torch.device, flops_per_s: float, backward_flops_per_s: float) -> tuple[float, float]:
    """What a product of small matrices takes besides its operations and its launch: forward, and each of backward's.

    Of eight linears over 64 tokens, from 64 features to 256 and back, whose smallest dim is 64 throughout; the curve of
    :func:`matmul_rates` has one small dim and two large ones.

    Args:
        flops_per_s, backward_flops_per_s: of the curve at 64.
    """
    tokens = torch.randn(_NARROW, _NARROW, device=device, requires_grad=True)
    shapes = [(_NARROW, _WIDE), (_WIDE, _NARROW)] * 4
    weights = [torch.randn(shape, device=device).mul_(0.1).requires_grad_() for shape in shapes]

    def chain() -> torch.Tensor:
        x = tokens
        for weight in weights:
            x = torch.nn.functional.linear(x, weight.t())
        return x

    flops, count = 2.0 * _NARROW * _NARROW * _WIDE, len(shapes)
    forward = median_time_s(chain, device, min_time_s=5e-3) / count
    backward = _backward_s(chain, (tokens, *weights), device) / (2 * count)
    return (
        max(forward - flops / flops_per_s - launch_s(device), 0.0),
        max(backward - flops / backward_flops_per_s - gradient_s(device), 0.0),
    )


def function_times(device: torch.device) -> dict[str, tuple[float, float]]:
    """Seconds for each element of elementwise functions, forward and backward, on tensors that stay in the cache."""
    functional = torch.nn.functional
    weight, bias = (torch.ones(_TENSOR_WIDTH, device=device, requires_grad=True) for _ in range(2))
    makers: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "tanh": torch.tanh,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "exp": torch.exp,
        "softmax": lambda x: torch.softmax(x, -1),
        "norm": lambda x: functional.layer_norm(x, (_TENSOR_WIDTH,), weight, bias),
        "pow": lambda x: torch.pow(x, 3.0),
    }
    found = {}
    host, host_backward = launch_s(device), gradient_s(device)
    for name, function in makers.items():
        inputs = [torch.randn(_TENSOR_ROWS, _TENSOR_WIDTH, device=device, requires_grad=True) for _ in range(_REPEATED)]

        def many(function: Any = function, inputs: Any = inputs) -> torch.Tensor:
            return torch.stack([function(x) for x in inputs])

        def copied(inputs: Any = inputs) -> torch.Tensor:
            return torch.stack(inputs)

        forward = median_time_s(many, device) - median_time_s(copied, device)
        backward = _backward_s(many, inputs, device) - _backward_s(copied, inputs, device)
        elements = _REPEATED * _TENSOR_ROWS * _TENSOR_WIDTH
        found[name] = (
            max(forward - _REPEATED * host, 0.0) / elements,
            max(backward - _REPEATED * host_backward, 0.0) / elements,
        )
    return found


def attention_times(device: torch.device, dtype: torch.dtype) -> list[tuple[int, float, float]]:
    """(width of a head, FLOP/s forward, backward) of causal fused attention; masked scores and launches not counted."""
    found = []
    for width, rows in ((32, 64), (64, 256)):
        query, key, value = (torch.randn(4, 4, rows, width, device=device).to(dtype).requires_grad_() for _ in range(3))

        def attend(query: Any = query, key: Any = key, value: Any = value) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        flops = 4.0 * query.numel() * rows * (rows + 1) / (2 * rows)
        forward = median_time_s(attend, device)
        backward = _backward_s(attend, (query, key, value), device)
        found.append((width, flops / forward, 2.5 * flops / backward))
    return found


def linear_backward_flops_per_s(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    """FLOP/s of both products of the backward of a linear over ``rows`` tokens."""
    other = OTHER_DIM[device.type]
    weight = torch.randn(other, other, device=device).to(dtype).requires_grad_()
    tokens = torch.randn(rows, other, device=device).to(dtype).requires_grad_()
    backward = _backward_s(lambda: torch.nn.functional.linear(tokens, weight), (tokens, weight), device)
    return 4.0 * rows * other * other / backward


def _backward_s(function: Callable[[], torch.Tensor], inputs: Iterable[torch.Tensor], device: torch.device) -> float:
    """The median time of the backward of what ``function`` gives."""
    output, given = function(), tuple(inputs)
    gradient = torch.ones_like(output)
    return median_time_s(lambda: torch.autograd.grad(output, given, gradient, retain_graph=True), device)


class Layers:
    """Small layers, forward and backward: the computation that the speed of a machine at two moments is compared by.

    A shared machine is a third faster at one moment than at another, as what runs beside it on the host wants.
    """

    def __init__(self) -> None:
        width = 64
        self._layers = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        self._x = torch.randn(width, width)

    def run(self, at_least_s: float) -> tuple[float, int]:
        """Computes for so long by the clock of the calling thread; how long it was, and how many passes."""
        start, passes = time.thread_time(), 0
        while time.thread_time() - start < at_least_s:
            self._layers(self._x).sum().backward()
            passes += 1
        return time.thread_time() - start, passes

    def pass_s(self, at_least_s: float = 5e-3) -> float:
        """Of one pass."""
        spent_s, passes = self.run(at_least_s)
        return spent_s / passes

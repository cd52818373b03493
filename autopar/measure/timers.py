"""Timers for one device: rates of products by size, copy bandwidth, the overhead of one operator, and what else a CPU spends.

On a CPU the clock is CPU time of the calling thread. The caller must have set PyTorch to one thread; other processes then hardly affect the
times. On a GPU the time is that between events on the stream.
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

LARGE_DIM = {"cpu": 1024, "cuda": 8192}
"""The length of the two large dims of measured products, by kind of device."""
SMALLEST_DIMS = {"cpu": (1, 16, 64, 256, 1024), "cuda": (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)}
"""The lengths of their third dim, the rows (tokens), by kind of device."""
LONG_PRODUCT_S = 0.03
"""Seconds of a product after which no larger one is measured.

A CPU without instructions for a dtype has no blocked kernel for it: about 1 GFLOP/s, which does not grow with the rows.
"""
HOST_COPY_BYTES = 256 * 2**20
"""Bytes of a copy between a device and its host."""
REPEATS = 5
"""The number of batches of calls of which a time is the median."""
COPY_BYTES = {"cpu": 64 * 2**20, "cuda": 2**30}
"""Bytes of a copy within a device, by kind of device."""


def timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """Return a function that times one call of a function on this device, in seconds."""

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
    """Return the free memory of the device in bytes; for a CPU that of the host."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has no work left; a CPU never has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_and_spread(samples: Iterable[float]) -> tuple[float, float]:
    """Return the median of samples, and the distance of their quartiles over the median."""
    ordered = sorted(samples)
    median, quarter = statistics.median(ordered), len(ordered) // 4
    return median, (ordered[-1 - quarter] - ordered[quarter]) / median if median else 0.0


def sampler(function: Callable[[], object], device: torch.device, *, min_time_s: float = 1e-3) -> Callable[[], float]:
    """Return a function that returns the seconds of one warm call, the mean over a batch of calls that takes at least ``min_time_s``."""
    clock = timer(device)
    calls = 1

    def batch() -> None:
        for _ in range(calls):
            function()

    function()
    while clock(batch) < min_time_s and calls < 2**14:
        calls *= 2
    return lambda: clock(batch) / calls


def median_time_s(function: Callable[[], object], device: torch.device, *, min_time_s: float = 1e-3) -> float:
    """Return the median seconds of one call over :data:`REPEATS` samples; see :func:`sampler`."""
    sample = sampler(function, device, min_time_s=min_time_s)
    return statistics.median(sample() for _ in range(REPEATS))


def matmul_rates(device: torch.device, dtype: torch.dtype) -> list[dict[str, float]]:
    """Return the FLOP/s of ``[m, k] @ [k, k]`` for rising m, the smallest dim, and fixed k: a linear over more and more tokens.

    The last m is that of :data:`SMALLEST_DIMS`, or the first one whose product takes longer than :data:`LONG_PRODUCT_S`.
    """
    dim = LARGE_DIM[device.type]
    weight = torch.randn(dim, dim, device=device).to(dtype)  # constants draw less power: too fast on a GPU
    rates: list[dict[str, float]] = []
    for m in SMALLEST_DIMS[device.type]:
        tokens = torch.randn(m, dim, device=device).to(dtype)
        time_s = median_time_s(lambda tokens=tokens: tokens @ weight, device)  # type: ignore[misc]
        rates.append({"smallest_dim": m, "flops_per_s": 2 * m * dim * dim / time_s})
        if time_s > LONG_PRODUCT_S:
            break
    return rates


def copy_bandwidth_bytes_per_s(device: torch.device) -> float:
    """Return the bytes read plus the bytes written by a large copy, per second."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_time_s(lambda: target.copy_(source), device)


def host_link(device: torch.device) -> dict[str, float]:
    """Return the table ``[device.host]`` of a profile: rates of large copies from and to page-locked memory, and the latency of small ones.

    One device copies at a time. Devices of a node that copy at once may share these rates.

    Raises:
        UsageError: the device is a CPU.
    """
    if device.type != "cuda":
        raise UsageError(f"The device {device} has no link to a host", fix="Measure a CUDA device")
    host, times = torch.device("cpu"), {}
    for name, size in (("large", HOST_COPY_BYTES), ("small", 4)):
        device_tensor = torch.ones(size, dtype=torch.uint8, device=device)
        host_tensor = torch.ones(size, dtype=torch.uint8, pin_memory=True)
        times[name, "down"] = median_time_s(partial(host_tensor.copy_, device_tensor, non_blocking=True), device)
        times[name, "up"] = median_time_s(partial(device_tensor.copy_, host_tensor, non_blocking=True), device)
    return {
        "to_host_bytes_per_s": HOST_COPY_BYTES / times["large", "down"],
        "to_device_bytes_per_s": HOST_COPY_BYTES / times["large", "up"],
        "latency_s": max(times["small", "down"], times["small", "up"]),
        "memory_bandwidth_bytes_per_s": copy_bandwidth_bytes_per_s(host),
        "launch_s": launch_s(host),
    }


_LAYERS = 10
"""Layers of a chain of operators that is timed as a whole."""
_LAUNCHES, _GRADIENTS = 4, 8
"""Launches and gradients of one layer of :func:`_chain`, as ``autopar.cost.operators.work`` counts them."""


def _chain(device: torch.device) -> tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return a function that runs operators with negligible work as emitted programs do, and the tensors that get gradients."""
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
    """Return the seconds of an operator with negligible work, recorded for backward as in training."""
    return median_time_s(_chain(device)[0], device, min_time_s=5e-3) / (_LAYERS * _LAUNCHES)


# --- a CPU: the host's time around operators, and functions whose time is computation rather than memory traffic

_TENSOR_ROWS, _TENSOR_WIDTH = 64, 512
"""The shape of the tensors of :func:`function_times`."""
_TENSORS = 8
"""The number of these tensors, on each of which a function is called once."""


def gradient_s(device: torch.device) -> float:
    """Return the host's seconds for one gradient that backward computes, of operators with negligible work."""
    return _backward_s(*_chain(device), device) / (_LAYERS * _GRADIENTS)


def view_s(device: torch.device) -> float:
    """Return the host's seconds for a view, in forward or in backward: the mean of both."""
    start = torch.ones(8, 8, device=device, requires_grad=True)

    def chain() -> torch.Tensor:
        x = start
        for _ in range(_LAYERS):
            x = x.transpose(0, 1).unsqueeze(0).transpose(0, 2).squeeze(2).unsqueeze(1).squeeze(1)  # six views
        return x

    forward = median_time_s(chain, device, min_time_s=5e-3)
    return (forward + _backward_s(chain, (start,), device)) / (2 * 6 * _LAYERS)


_NARROW, _WIDE = 64, 256


def product_s(device: torch.device, flops_per_s: float, backward_flops_per_s: float) -> tuple[float, float]:
    """Return the seconds of a product of small matrices beyond its FLOPs and its launch: in forward, and for each product in backward.

    They are measured on eight linears over 64 tokens, from 64 features to 256 and back, so that the smallest dim is 64 throughout. The
    rates of :func:`matmul_rates` are of products with one small dim and two large ones.

    Args:
        device: the CPU.
        flops_per_s, backward_flops_per_s: those rates where the smallest dim is 64.
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
    """Return the seconds for an element of some functions, forward and backward, on tensors that stay in the cache."""
    functional = torch.nn.functional
    weight, bias = (torch.ones(_TENSOR_WIDTH, device=device, requires_grad=True) for _ in range(2))
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "tanh": torch.tanh,
        "gelu": functional.gelu,
        "silu": functional.silu,
        "exp": torch.exp,
        "softmax": lambda x: torch.softmax(x, -1),
        "norm": lambda x: functional.layer_norm(x, (_TENSOR_WIDTH,), weight, bias),
        "pow": lambda x: torch.pow(x, 3.0),
    }
    times_s = {}
    host, host_backward = launch_s(device), gradient_s(device)
    for name, function in functions.items():
        inputs = [torch.randn(_TENSOR_ROWS, _TENSOR_WIDTH, device=device, requires_grad=True) for _ in range(_TENSORS)]

        def stacked(function: Any = function, inputs: Any = inputs) -> torch.Tensor:
            return torch.stack([function(x) for x in inputs])

        copied = partial(torch.stack, inputs)
        forward = median_time_s(stacked, device) - median_time_s(copied, device)
        backward = _backward_s(stacked, inputs, device) - _backward_s(copied, inputs, device)
        elements = _TENSORS * _TENSOR_ROWS * _TENSOR_WIDTH
        times_s[name] = (
            max(forward - _TENSORS * host, 0.0) / elements,
            max(backward - _TENSORS * host_backward, 0.0) / elements,
        )
    return times_s


def attention_times(device: torch.device, dtype: torch.dtype) -> list[tuple[int, float, float]]:
    """Return (width of a head, FLOP/s forward, FLOP/s backward) of causal fused attention for two widths; masked scores do not count."""
    rates = []
    for width, rows in ((32, 64), (64, 256)):
        query, key, value = (torch.randn(4, 4, rows, width, device=device).to(dtype).requires_grad_() for _ in range(3))

        def attend(query: Any = query, key: Any = key, value: Any = value) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)

        flops = 4.0 * query.numel() * rows * (rows + 1) / (2 * rows)  # two products with half of the keys on average
        forward = median_time_s(attend, device)
        backward = _backward_s(attend, (query, key, value), device)
        rates.append((width, flops / forward, 2.5 * flops / backward))
    return rates


def linear_backward_flops_per_s(device: torch.device, dtype: torch.dtype, rows: int) -> float:
    """Return the FLOP/s of both products in the backward of a linear over ``rows`` tokens."""
    large_dim = LARGE_DIM[device.type]
    weight = torch.randn(large_dim, large_dim, device=device).to(dtype).requires_grad_()
    tokens = torch.randn(rows, large_dim, device=device).to(dtype).requires_grad_()
    backward = _backward_s(lambda: torch.nn.functional.linear(tokens, weight), (tokens, weight), device)
    return 4.0 * rows * large_dim * large_dim / backward


def _backward_s(function: Callable[[], torch.Tensor], inputs: Iterable[torch.Tensor], device: torch.device) -> float:
    """Return the median seconds of the backward from a function's output to the inputs."""
    output, inputs_of_output = function(), tuple(inputs)
    gradient = torch.ones_like(output)
    return median_time_s(lambda: torch.autograd.grad(output, inputs_of_output, gradient, retain_graph=True), device)


class Layers:
    """Forward and backward of small layers: a fixed computation whose time shows how fast the machine is at the moment.

    A shared machine may be a third faster at one moment than at another, depending on the load of its host.
    """

    def __init__(self) -> None:
        width = 64
        self._layers = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )
        self._x = torch.randn(width, width)

    def run(self, at_least_s: float) -> tuple[float, int]:
        """Compute for at least so many seconds of the calling thread; return the seconds spent and the number of passes."""
        start, passes = time.thread_time(), 0
        while time.thread_time() - start < at_least_s:
            self._layers(self._x).sum().backward()
            passes += 1
        return time.thread_time() - start, passes

    def pass_s(self, at_least_s: float = 5e-3) -> float:
        """Return the seconds of one pass."""
        spent_s, passes = self.run(at_least_s)
        return spent_s / passes

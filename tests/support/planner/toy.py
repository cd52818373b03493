"""Prices simple enough to reason about: a device of round numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from autopar.graph.graph import Op, Ref, TensorSpec
from autopar.planner.sharding.energy import FREE, Cost

SAVES_INPUTS = ("linear", "mul", "silu", "scaled_dot", "pow", "cross_entropy", "embedding", "div", "gelu", "layer_norm")
FREE_TARGETS = ("view", "transpose", "autopar")
SAVES_OUTPUT = ("rsqrt", "scaled_dot", "tanh", "softmax")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyPricing:
    """600 TFLOP/s, 3 TB/s, 300 GB/s between ranks, 16 bytes of state a parameter."""

    size: int
    flops_per_s: float = 6e14
    memory_bytes_per_s: float = 3e12
    link_bytes_per_s: float = 3e11
    latency_s: float = 1e-5
    launch_s: float = 3e-6
    state_bytes_per_element: float = 16.0
    prices_by_bytes: bool = True

    def op_cost(self, op: Op, operands: Sequence[TensorSpec]) -> Cost:
        moved = sum(s.num_bytes for s in (*operands, *op.outputs))
        flops = 0.0
        if "linear" in op.target:
            flops = 6.0 * op.spec.numel * operands[0].shape[-1]
        elif "scaled_dot" in op.target:
            flops = 12.0 * prod(operands[0].shape) * operands[1].shape[-2]
        elif any(name in op.target for name in FREE_TARGETS):
            return FREE
        return Cost(time_s=max(flops / self.flops_per_s, 2 * moved / self.memory_bytes_per_s) + self.launch_s)

    def collective_time_s(self, kind: str, num_bytes: int, axis: str | None = None) -> float:
        share = (self.size - 1) / self.size * (2 if kind == "all_reduce" else 1)
        return self.latency_s + share * num_bytes / self.link_bytes_per_s

    def saves(self, op: Op, operands: Sequence[TensorSpec]) -> Sequence[Ref]:
        saved = [r for r in op.operands if any(name in op.target for name in SAVES_INPUTS)]
        return [*saved, *(Ref(op.name) for name in SAVES_OUTPUT if name in op.target)]

    def gradient_bytes(self, spec: TensorSpec) -> int:
        return spec.numel * 4

    def state_bytes(self, spec: TensorSpec) -> float:
        return spec.numel * self.state_bytes_per_element

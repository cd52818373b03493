"""Faults planted in the program that workers run, and there alone: one operator, on chosen ranks, in one direction."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar.lower.program
import autopar.ops.collectives
import autopar.ops.kernels
from autopar.graph.graph import Graph, Op
from autopar.lower.read_plan import local_graph
from autopar.plan.plan import Plan
from autopar.verification.reference import Subject


@dataclass(frozen=True)
class Fault:
    """One operator made wrong.

    ``op``: its name in one rank's graph. ``kind``: of :data:`KINDS`, or ``sum``: the pending sum of the gradients of
    the parameters that it reads is forgotten.
    """

    op: str
    kind: str


@dataclass(frozen=True)
class Faulty:
    """A subject in whose workers the fault is planted: only they unpickle it."""

    subject: Subject
    fault: Fault | None

    def __reduce__(self) -> Any:
        return _arrive, (self.subject, self.fault)

    def build(self, *, drops: bool = False) -> nn.Module:
        return self.subject.build(drops=drops)

    def make_batch(self, batch_size: int, *, seed: int) -> dict[str, Tensor]:
        return self.subject.make_batch(batch_size, seed=seed)


def _arrive(subject: Subject, fault: Fault | None) -> Faulty:
    """In a worker: programs are lowered with the fault from now on, or without one again."""

    def lowered(plan: Plan, graph: Graph, data_rank: int = 0) -> Graph:
        local = local_graph(plan, graph, data_rank)
        return local if fault is None else planted(local, fault)

    autopar.lower.program.local_graph = lowered
    return Faulty(subject, fault)


def planted(local: Graph, fault: Fault) -> Graph:
    """The graph with one operator made wrong."""
    (op,) = [op for op in local.ops if op.name == fault.op]
    if fault.kind == "sum":
        read = {ref.name for ref in op.operands}
        assert any(p.name in read and p.gradient_sum_axes for p in local.parameters)
        forgotten = (replace(p, gradient_sum_axes=()) if p.name in read else p for p in local.parameters)
        return replace(local, parameters=tuple(forgotten))
    setattr(autopar.ops.collectives, f"fault_{fault.kind}", KINDS[fault.kind](op))
    autopar.ops.kernels.resolve.cache_clear()
    wrong = replace(op, target=f"autopar.fault_{fault.kind}")
    return replace(local, ops=tuple(wrong if one is op else one for one in local.ops))


class _Scaled(torch.autograd.Function):
    """Multiplies by one number forward and by another backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] * ctx.factor, None, None


def _scaled(made: Any, forward: float, backward: float) -> Any:
    """What an operator makes, wrong in its first tensor."""
    if isinstance(made, Tensor):
        return _Scaled.apply(made, forward, backward)
    return (_Scaled.apply(made[0], forward, backward), *made[1:])


def _no_sum(op: Op) -> Callable[..., Tensor]:
    """A reduce-scatter that hands on the rank's own summand."""
    assert op.target == "autopar.reduce_scatter"
    return lambda x, axis, dim: autopar.ops.collectives.shard(x, axis, dim, "R")


def _no_gradient_sum(op: Op) -> Callable[..., Tensor]:
    """An all-gather for readers that do the same work, where each does its own."""
    assert op.target == "autopar.all_gather"
    return lambda x, axis, dim, _: autopar.ops.collectives.all_gather(x, axis, dim, "I")


def _wrong(forward: float, backward: float, *, last: bool = False) -> Callable[[Op], Callable[..., Tensor]]:
    """A wrong value, or a wrong gradient that is passed back; ``last``: on the last rank alone."""

    def make(op: Op) -> Callable[..., Tensor]:
        right = autopar.ops.kernels.resolve(op.target)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            made = right(*args, **kwargs)
            is_wrong = not last or dist.get_rank() == dist.get_world_size() - 1
            return _scaled(made, forward, backward) if is_wrong else made

        return call

    return make


KINDS: Mapping[str, Callable[[Op], Callable[..., Tensor]]] = {
    "no_sum": _no_sum,
    "no_gradient_sum": _no_gradient_sum,
    "one_rank": _wrong(1.25, 1.0, last=True),
    "value": _wrong(1.25, 1.0),
    "gradient": _wrong(1.0, 1.25),
}

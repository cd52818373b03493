"""Operators that draw random numbers: one stream for each, equal on replicas, other numbers on other parts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar import rules
from autopar.graph.ir import Graph, Op, TensorSpec
from autopar.graph.random import draws_random
from autopar.graph.trace import trace
from autopar.layout import R


class Noisy(nn.Module):
    """Stochastic depth, noise of several kinds, and a sample of categories."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.5)
            x = x + layer(x) * keep
        x = x + torch.rand(x.shape[0], 1, 1) + torch.rand(x.shape[0], 1, 1) + 0.1 * torch.randn_like(x)
        x = F.dropout2d(x.unsqueeze(-1), 0.5).squeeze(-1) * torch.bernoulli(x.sigmoid())
        return F.gumbel_softmax(x, dim=-1).square().sum()


def noisy() -> Graph:
    return trace(Noisy(), (torch.zeros(4, 3, 4),))


def test_equal_calls_stay_apart_and_none_runs_before_the_rest() -> None:
    graph = noisy()
    drawn = [op.target for op in graph.ops if draws_random(op.target)]
    assert not any(draws_random(op.target) for op in graph.prelude)
    assert drawn.count("aten.rand.default") == 2
    assert len(drawn) == 8, drawn


def test_what_is_drawn_has_no_gradient() -> None:
    graph = noisy()
    for op in graph.ops:
        if draws_random(op.target):
            assert not op.spec.requires_grad
            assert not any(graph.spec(ref).requires_grad for ref in op.operands)


def offered(target: str, args: tuple[object, ...], *operands: TensorSpec, out: tuple[int, ...]) -> dict[str, bool]:
    spec = TensorSpec(shape=out, dtype=torch.float32)
    op = Op(name="y", target=target, args=args, outputs=(spec,))  # type: ignore[arg-type]
    found = rules.strategies(op, operands, axis="tp", size=2)  # type: ignore[arg-type]
    assert all(R in (*s.inputs, *s.outputs) or s.random for s in found)
    return {s.name: s.random for s in found}


def test_parts_are_drawn_by_themselves_where_no_number_depends_on_another() -> None:
    assert offered("aten.rand.default", ((4, 6),), out=(4, 6)) == {
        "split d0": True,
        "split d1": True,
        "replicate": False,
    }
    assert offered("aten.randperm.default", (4,), out=(4,)) == {"replicate": False}

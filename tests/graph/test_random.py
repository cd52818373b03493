"""Random operators are operators of the graph, and copies of a batch can be told from what is copied."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.graph import Graph, trace
from autopar.graph.evaluate import evaluate
from autopar.layout import S
from autopar.rules.apply import shard
from autopar.search.batch import solve_batch
from autopar.search.classes import compact


class _Model(nn.Module):
    """A linear whose output a function changes."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.change(self.first(x))).square().mean()


def _traced(change: Callable[[Tensor], Tensor], batch: int = 4) -> Graph:
    return trace(_Model(change), (torch.zeros(batch, 6),))


def _stochastic_depth(x: Tensor) -> Tensor:
    return x.div(0.5) * torch.floor(torch.rand((x.shape[0], 1), dtype=x.dtype) + 0.5)


@pytest.mark.parametrize(
    "change",
    [
        _stochastic_depth,
        lambda x: x + torch.randn_like(x),
        lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5),
        lambda x: F.dropout1d(x[:, None], 0.5)[:, 0],
        lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    ],
)
def test_noise_is_split_with_the_samples_and_drawn_by_salt(change: Callable[[Tensor], Tensor]) -> None:
    graph = _traced(change)
    drawn = [op for op in graph.ops if op.target == "autopar.noise"]
    assert len(drawn) == 1
    assert not any(op.target == "autopar.noise" for op in graph.prelude)
    typing = solve_batch(compact(graph))
    assert typing.strategies[drawn[0].name].outputs == (S(0),)
    assert typing.strategies[drawn[0].name].random
    local = shard(graph, typing, global_batch_size=4, micro_batch_size=1)
    part = next(op for op in local.ops if op.target == "autopar.noise")
    assert part.args[0] == part.spec.shape == (1, *drawn[0].spec.shape[1:])

    whole = {p.fqn: torch.randn(p.spec.shape) for p in graph.parameters}
    batch = {"x": torch.randn(4, 6)}
    assert evaluate(graph, batch, whole) == evaluate(graph, batch, whole)


def test_two_draws_differ() -> None:
    graph = _traced(lambda x: x * torch.rand_like(x) + torch.rand_like(x))
    assert len({op.args[2] for op in graph.ops if op.target == "autopar.noise"}) == 2


def test_other_random_numbers_are_refused_with_the_line() -> None:
    with pytest.raises(
        TraceError, match=r"test_random.py:\d+: random numbers come from streams.*aten.randperm.*bernoulli"
    ):
        _traced(lambda x: x * torch.randperm(6))


def test_a_mask_of_windows_is_split_with_the_samples_that_it_is_repeated_for() -> None:
    """As in a Swin: windows are samples to attention, and the mask of one image is repeated for each."""
    mask = torch.where(torch.eye(2, dtype=torch.bool), 0.0, -1.0).repeat(3, 1, 1) * torch.arange(3.0).view(3, 1, 1)

    def windows(repeat: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor], Tensor]:
        def change(x: Tensor) -> Tensor:
            inner = x.view(-1, 2, 1)
            return (inner + repeat(mask, x.shape[0]).sum(-1, keepdim=True)).view(x.shape)

        return change

    def expanded(mask: Tensor, times: int) -> Tensor:
        return mask[None].expand(times, -1, -1, -1).reshape(-1, 2, 2)

    def repeated(mask: Tensor, times: int) -> Tensor:
        return mask.repeat(times, 1, 1)

    for repeat in (expanded, repeated):
        model = _Model(windows(repeat))
        graph = trace(model, (torch.zeros(4, 6),))
        typing = solve_batch(compact(graph))
        local = shard(graph, typing, global_batch_size=4, micro_batch_size=1)
        assert any(op.spec.shape[0] == 3 for op in (*local.prelude, *local.ops) if op.spec.shape)
        batch = torch.randn(4, 6)
        whole = {name: p.detach() for name, p in model.named_parameters()}
        torch.testing.assert_close(evaluate(graph, {"x": batch}, whole), model(batch))


def test_dots_in_an_equation_and_normed_weights_have_rules() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
            self.weight = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            scores = torch.einsum("...qd,...kd->...qk", y, y)
            return torch.einsum("...d,de", scores @ y, self.weight).square().mean()

    model = Model()
    graph = trace(model, (torch.zeros(4, 2, 5, 6),))
    assert not any("..." in op.args[0] for op in graph.ops if op.target == "aten.einsum.default")
    solve_batch(compact(graph))
    batch = torch.randn(4, 2, 5, 6)
    whole = {name: p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(evaluate(graph, {"x": batch}, whole), model(batch))

"""Numbers that count samples are not constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import TraceError
from autopar.models.graph_for_plan import trace_model
from autopar.plan.plan import FP32
from autopar.planner.sharding.input_axes import samples_apart
from autopar.tracing.repeated_steps import CountError
from autopar.tracing.trace import trace
from tests.support.small_models import model_of


def _loss(self: Any, ids: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten(), **options)


def _shares(self: Any, ids: Tensor) -> Tensor:
    logits = self.head(self.embed(ids)).flatten(0, 1)
    shares = logits.softmax(-1).sum(0) / logits.shape[0]
    return (shares * shares.detach()).sum()


SCALED: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "mean": (lambda self, ids: 0.5 * _loss(self, ids), 1),
    "tensor": (lambda self, ids: _loss(self, ids, reduction="sum") / (ids != -100).sum(), 1),
    "by sequence": (lambda self, ids: _loss(self, ids, reduction="sum") / ids.shape[1], 1),
    "numel": (lambda self, ids: _loss(self, ids, reduction="sum") / ids.numel(), 2),
    "ones": (lambda self, ids: _loss(self, ids, reduction="sum") * (1.0 / torch.ones_like(ids).sum()), 2),
    "by expert": (_shares, 2),
    "passes differ": (lambda self, ids: _loss(self, ids) / (2.0 if len(ids) == 4 else 3.0), 2),
}
"""Losses, with how often they are exported: once where no number counts samples."""


@pytest.mark.parametrize("kind", SCALED)
def test_a_count_of_the_example_is_refused_and_other_numbers_cost_no_second_export(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    loss, exports = SCALED[kind]

    def forward(self: Any, ids: Tensor) -> Tensor:
        return loss(self, ids)

    exported: list[object] = []
    export = torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *args, **kwargs: exported.append(args) or export(*args, **kwargs)
    )
    model, batch = model_of(forward, embed=nn.Embedding(16, 8), head=nn.Linear(8, 16)), torch.zeros(4, 8).long()
    if exports == 1:
        assert trace(model, (batch,)).batch_size == 4
    else:
        with pytest.raises(TraceError, match=r"test_batch_size_numbers\.py.*depends on the batch size"):
            trace(model, (batch,))
    assert len(exported) == exports


Statistic = Callable[[Tensor, int], Tensor]

COUNTING: dict[str, Statistic] = {
    "by sum": lambda x, n: ((x - x.sum(0) / n) ** 2).sum(0) / (n - 1),  # which is 1 in a trace of two samples
    "by power": lambda x, n: x.square().sum(0) * n**-1,
    "by exponent": lambda x, n: x.square().mean(0) ** (1 / n),
    "by limit": lambda x, n: x.square().sum(0).clamp(max=n / 2),
    "shifted": lambda x, n: x.square().mean(0) + 0.01 * n,
    "by constant": lambda x, n: x.square().sum(0) / torch.tensor(float(n)),
    "by filled row": lambda x, n: (torch.full((1, n), 1 / n) @ x).square().squeeze(0),
    "by constant sum": lambda x, n: x.square().mean(0) + torch.arange(n).sum(),
    "by soft weights": lambda x, n: x.square().sum(0) * torch.zeros(n).softmax(0)[0],
    "by last place": lambda x, n: x.square().mean(0) + torch.arange(n)[-1],
    "turned": lambda x, n: x.square().mean(0).roll(n // 2),
}


class Deep(nn.Module):
    """Statistics of the batch in each of three layers, far from the loss."""

    def __init__(self, statistic: Statistic) -> None:
        super().__init__()
        self.statistic = statistic
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + (y * (self.statistic(y, len(y)) + 1e-3).rsqrt()).relu()
        return F.cross_entropy(self.head(x), target)


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("statistic", COUNTING)
def test_numbers_in_layers_are_seen_as_well(statistic: str, samples: int) -> None:
    with pytest.raises(CountError, match="depends on the batch size"):
        trace(Deep(COUNTING[statistic]), (torch.randn(samples, 8), torch.zeros(samples, dtype=torch.int64)))


def test_a_model_of_one_batch_size_is_told_so() -> None:
    with pytest.raises(CountError, match="runs with 2 samples, but not with 4"):
        trace(Deep(lambda x, n: x.view(2, 8).mean(0)), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize(
    "statistic",
    [
        lambda x, n: (torch.ones(1, n) @ x).square().squeeze(0),
        lambda x, n: x[torch.arange(n), 0].square().mean(0, keepdim=True).expand(8),
    ],
    ids=["ones", "own rows"],
)
def test_constants_with_a_place_for_each_sample_pass(statistic: Statistic) -> None:
    assert trace(Deep(statistic), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64))).batch_size == 2


def test_where_numbers_count_samples_the_trace_is_of_the_global_batch() -> None:
    model, batch = Deep(COUNTING["by sum"]), [torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)]
    graph = trace_model(model, batch, FP32, global_batch_size=8, samples_apart=samples_apart)
    divisors = [op.args[1] for op in graph.ops if op.target == "aten.div.Tensor" and op.spec.shape == (8,)]
    assert (graph.exact, graph.batch_size, divisors) == (True, 8, [8, 7] * 3)


def _counting_in_place(self: Any, x: Tensor) -> Tensor:
    """Scales by a number that is the example's batch size by chance, too."""
    self.seen.add_(x.shape[0])
    return (self.head(x) / (1.0 + self.seen)).square().sum() * 4.0


def test_numbers_in_place_are_compared_too() -> None:
    with pytest.raises(TraceError, match="depends on the batch size"):
        trace(model_of(_counting_in_place, head=nn.Linear(8, 8), seen=nn.Buffer(torch.zeros(()))), (torch.randn(4, 8),))


def _unrolled(self: Any, x: Tensor) -> Tensor:
    return sum((self.head(x[i]).tanh().sum() for i in range(len(x))), start=torch.zeros(()))


def test_a_loop_over_samples_is_of_one_batch_size() -> None:
    """Its steps are alike but for their number."""
    with pytest.raises(CountError, match=r"depends on the batch size: .* for a batch of 2"):
        trace(model_of(_unrolled, head=nn.Linear(8, 8)), (torch.randn(2, 8),))

"""Numbers that count samples are not constants."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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


class Scaled(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.embed(ids)).flatten(0, 1)
        if self.kind == "mean":
            return 0.5 * F.cross_entropy(logits, ids.flatten())
        if self.kind == "by expert":
            shares = logits.softmax(-1).sum(0) / logits.shape[0]
            return (shares * shares.detach()).sum()
        loss = F.cross_entropy(logits, ids.flatten(), reduction="sum")
        if self.kind == "tensor":
            return loss / (ids != -100).sum()
        if self.kind == "by sequence":
            return loss / ids.shape[1]
        if self.kind == "constant":
            return loss / torch.tensor(float(ids.shape[0]))
        if self.kind == "passes differ":
            return loss / (2.0 if ids.shape[0] == 4 else 3.0)
        return loss / ids.numel() if self.kind == "numel" else loss * (1.0 / torch.ones_like(ids).sum())


@pytest.mark.parametrize("kind", ["numel", "ones", "by expert", "constant", "passes differ"])
def test_a_count_of_the_example_is_refused(kind: str) -> None:
    with pytest.raises(TraceError, match="depends on the batch size") as caught:
        trace(Scaled(kind), (torch.zeros((4, 8), dtype=torch.int64),))
    assert "test_batch_size_numbers.py" in str(caught.value)


@pytest.mark.parametrize("kind", ["mean", "tensor", "by sequence"])
def test_other_numbers_pass(kind: str) -> None:
    graph = trace(Scaled(kind), (torch.zeros((4, 8), dtype=torch.int64),))
    assert graph.batch_size == 4


@pytest.mark.parametrize(("kind", "most"), [("mean", 1), ("by sequence", 1), ("numel", 2)])
def test_numbers_that_passes_show_to_be_the_same_cost_no_second_export(
    monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    exported: list[object] = []
    export = torch.export.export

    def counted(*args: Any, **kwargs: Any) -> torch.export.ExportedProgram:
        exported.append(args)
        return export(*args, **kwargs)

    monkeypatch.setattr(torch.export, "export", counted)
    model, batch = Scaled(kind), (torch.zeros((4, 8), dtype=torch.int64),)
    with pytest.raises(TraceError) if most == 2 else nullcontext():
        trace(model, batch)
    assert len(exported) == most


def _by_sum(x: Tensor, n: int) -> Tensor:
    return ((x - x.sum(0) / n) ** 2).sum(0) / (n - 1)  # which is 1 in a trace of two samples


def _by_power(x: Tensor, n: int) -> Tensor:
    return x.square().sum(0) * n**-1


def _by_exponent(x: Tensor, n: int) -> Tensor:
    return x.square().mean(0) ** (1 / n)


def _by_limit(x: Tensor, n: int) -> Tensor:
    return x.square().sum(0).clamp(max=n / 2)


def _shifted(x: Tensor, n: int) -> Tensor:
    return x.square().mean(0) + 0.01 * n


def _by_constant(x: Tensor, n: int) -> Tensor:
    return x.square().sum(0) / torch.tensor(float(n))


def _by_filled_row(x: Tensor, n: int) -> Tensor:
    return (torch.full((1, n), 1 / n) @ x).square().squeeze(0)


def _by_constant_sum(x: Tensor, n: int) -> Tensor:
    return x.square().mean(0) + torch.arange(n).sum()


def _by_soft_weights(x: Tensor, n: int) -> Tensor:
    return x.square().sum(0) * torch.zeros(n).softmax(0)[0]


def _by_last_place(x: Tensor, n: int) -> Tensor:
    return x.square().mean(0) + torch.arange(n)[-1]


def _turned(x: Tensor, n: int) -> Tensor:
    return x.square().mean(0).roll(n // 2)


def _of_ones(x: Tensor, n: int) -> Tensor:
    return (torch.ones(1, n) @ x).square().squeeze(0)


def _of_own_rows(x: Tensor, n: int) -> Tensor:
    return x[torch.arange(n), 0].square().mean(0, keepdim=True).expand(8)


Statistic = Callable[[Tensor, int], Tensor]


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
@pytest.mark.parametrize(
    "statistic",
    [
        _by_sum, _by_power, _by_exponent, _by_limit, _shifted, _by_constant, _by_filled_row, _by_constant_sum,
        _by_soft_weights, _by_last_place, _turned,
    ],
    ids=lambda statistic: statistic.__name__.strip("_"),
)  # fmt: skip
def test_numbers_in_layers_are_seen_as_well(statistic: Statistic, samples: int) -> None:
    with pytest.raises(CountError, match="depends on the batch size"):
        trace(Deep(statistic), (torch.randn(samples, 8), torch.zeros(samples, dtype=torch.int64)))


def test_a_model_of_one_batch_size_is_told_so() -> None:
    with pytest.raises(CountError, match="runs with 2 samples, but not with 4"):
        trace(Deep(lambda x, n: x.view(2, 8).mean(0)), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize("statistic", [_of_ones, _of_own_rows])
def test_constants_with_a_place_for_each_sample_pass(statistic: Statistic) -> None:
    assert trace(Deep(statistic), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64))).batch_size == 2


def test_where_numbers_count_samples_the_trace_is_of_the_global_batch() -> None:
    model, batch = Deep(_by_sum), [torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)]
    graph = trace_model(model, batch, FP32, global_batch_size=8, samples_apart=samples_apart)
    divisors = [op.args[1] for op in graph.ops if op.target == "aten.div.Tensor" and op.spec.shape == (8,)]
    assert (graph.exact, graph.batch_size, divisors) == (True, 8, [8, 7] * 3)


class Counting(nn.Module):
    """Counts samples in place, and scales by a number that is the example's batch size by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(x.shape[0])
        return (self.head(x) / (1.0 + self.seen)).square().sum() * 4.0


def test_numbers_in_place_are_compared_too() -> None:
    with pytest.raises(TraceError, match="depends on the batch size"):
        trace(Counting(), (torch.randn(4, 8),))


class Unrolled(nn.Module):
    """A loop over the samples, whose steps are alike but for their number."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return sum((self.head(x[i]).tanh().sum() for i in range(len(x))), start=torch.zeros(()))


def test_a_loop_over_samples_is_of_one_batch_size() -> None:
    with pytest.raises(CountError, match=r"depends on the batch size: .* for a batch of 2"):
        trace(Unrolled(), (torch.randn(2, 8),))

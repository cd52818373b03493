"""Numbers that count samples are not constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import TraceError
from autopar.graph.graph import Ref
from autopar.tracing import repeated_steps
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
    if most == 2:
        with pytest.raises(TraceError):
            trace(model, batch)
    else:
        assert repeated_steps.suspects(trace(model, batch))
    assert len(exported) == most


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


def test_a_number_that_no_pass_shows_needs_a_trace() -> None:
    """Of a computed constant or a number that is made of others, equal passes say nothing."""
    graph = trace(Scaled("by sequence"), (torch.zeros((4, 8), dtype=torch.int64),))
    (op,) = repeated_steps.suspects(graph)
    (number,) = (argument for argument in op.args if not isinstance(argument, Ref))
    call = (op.target, "tensor", number)
    assert repeated_steps.are_same(graph, [call], [call])
    assert not repeated_steps.are_same(graph, [], [])
    assert not repeated_steps.are_same(graph, [call], [])
    assert not repeated_steps.are_same(graph, [call], [(op.target, "tensor", 2.5)])

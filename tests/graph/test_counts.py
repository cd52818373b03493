"""Numbers that count samples are not constants."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import TraceError
from autopar.graph.trace import trace


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
        return loss / ids.numel() if self.kind == "numel" else loss * (1.0 / torch.ones_like(ids).sum())


@pytest.mark.parametrize("kind", ["numel", "ones", "by expert"])
def test_a_count_of_the_example_is_refused(kind: str) -> None:
    with pytest.raises(TraceError, match="do not depend on the batch size") as caught:
        trace(Scaled(kind), (torch.zeros((4, 8), dtype=torch.int64),))
    assert "test_counts.py" in str(caught.value)


@pytest.mark.parametrize("kind", ["mean", "tensor", "by sequence"])
def test_other_numbers_pass(kind: str) -> None:
    graph = trace(Scaled(kind), (torch.zeros((4, 8), dtype=torch.int64),))
    assert graph.batch_size == 4

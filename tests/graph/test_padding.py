from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.graph.graph import Graph
from autopar.graph.rewrites import lengths, pad
from autopar.runtime.step.gradients import lengthened
from autopar.tracing.trace import trace
from tests.support.close import assert_close
from tests.support.said import refuses
from tests.support.small_models import evaluate, model_of


def forward(self: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """With a soft cap, and what ``peek`` adds to the loss."""
    logits = 3.0 * torch.tanh(self.head(self.table(ids)) / 3.0)
    loss = nn.functional.cross_entropy(logits.view(-1, 21), labels.view(-1), label_smoothing=0.1)
    if self.peek == "logsumexp":
        loss = loss + logits.logsumexp(-1).mean()
    if self.peek == "weight":
        loss = loss + self.head.weight.pow(2).mean()
    return loss


def batch() -> dict[str, Tensor]:
    labels = torch.randint(0, 21, (4, 5))
    labels[1, 2:] = -100
    return {"ids": torch.randint(0, 21, (4, 5)), "labels": labels}


def traced(tied: bool, peek: str = "") -> tuple[nn.Module, Graph]:
    """With a head beside the embedding, or tied to it."""
    table, head = nn.Embedding(21, 4), nn.Linear(4, 21, bias=not tied)
    if tied:
        head.weight = table.weight
    model = model_of(forward, table=table, head=head, peek=peek).double()
    return model, trace(model, (), batch())


def test_a_tied_table_is_padded_once_a_head_with_its_bias_unless_it_divides_or_is_short() -> None:
    _, graph = traced(tied=True)
    assert lengths(graph, 4) == lengths(graph, 1, 8) == lengths(graph, 2, 4) == {"table.weight": 24}
    assert lengths(graph, 1, 7) == lengths(graph, 1) == {}, "rows are aligned without a split"
    _, graph = traced(tied=False)
    assert lengths(graph, 4) == {"table.weight": 24, "head.weight": 24, "head.bias": 24}
    assert lengths(graph, 3) == {}
    assert lengths(graph, 5) == {}, "21 rows over 5 ranks: less than 25"


@pytest.mark.parametrize("peek", ["logsumexp", "weight"])
def test_logits_or_weights_that_others_see_are_not_padded(peek: str) -> None:
    assert "head.weight" not in lengths(traced(tied=False, peek=peek)[1], 4)


def test_what_is_only_looked_up_in_is_not_aligned() -> None:
    def placed(self: Any, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(ids) + self.places(torch.arange(5)))
        return nn.functional.cross_entropy(logits.view(-1, 21), labels.view(-1))

    model = model_of(placed, table=nn.Embedding(21, 4), head=nn.Linear(4, 21), places=nn.Embedding(5, 4))
    graph = trace(model.double(), (), batch())
    assert lengths(graph, 2)["places.weight"] == 6
    assert set(lengths(graph, 1, 4)) == {"head.weight", "head.bias"}


@pytest.mark.parametrize(("ranks", "multiple"), [(4, 1), (1, 8), (2, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_are_those_without_padding(tied: bool, ranks: int, multiple: int) -> None:
    model, graph = traced(tied)
    data, parameters = batch(), dict(model.named_parameters())
    longer = pad(graph, lengths(graph, ranks, multiple))
    assert {p.spec.shape[0] for p in longer.parameters if p.padding and p.fqn != "table.weight"} <= {24}
    long = {
        p.fqn: lengthened(parameters[p.fqn].detach(), 0, p.spec.shape[0]).requires_grad_()
        for p in longer.parameters
        if p.padding
    }
    assert long
    wanted, found = evaluate(graph, data, parameters), evaluate(longer, data, parameters | long)
    assert_close(found, wanted)
    wanted.backward()
    found.backward()
    for name, value in long.items():
        assert_close(value.grad[:21], parameters[name].grad)
        assert not value.grad[21:].any(), "padding has a gradient of exactly zero"


def test_vocabularies_are_padded_whole() -> None:
    _, graph = traced(tied=False)
    refuses(ValueError, "padded together", pad, graph, {"head.weight": 24})
    refuses(ValueError, "no dim", pad, graph, {"other.weight": 24})

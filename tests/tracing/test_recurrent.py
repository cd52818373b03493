"""Recurrent networks are taken apart at their dropout, bags of embeddings of one length are rows: both compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.graph.rewrites import compact
from autopar.plan.mesh import S
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules.apply import shard
from autopar.tracing.trace import trace
from autopar.verification.against_one_device import _without_dropout
from tests.support.small_models import model_of, same_as_the_model


class Recurrent(nn.Module):
    """Reads every output of the network."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        self.net = getattr(nn, kind)(6, 8, num_layers=3, dropout=0.5, **options)

    def forward(self, x: Tensor) -> Tensor:
        made, ends = self.net(x)
        ends = ends if isinstance(ends, tuple) else (ends,)
        return sum((end.square().mean() for end in ends), made.square().mean())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"batch_first": True, "bidirectional": True}),
        ("LSTM", {"proj_size": 4}),
        ("GRU", {"bidirectional": True}),
        ("RNN", {"bias": False}),
    ],
)
def test_dropout_between_layers_is_that_of_all_others(kind: str, options: dict[str, Any]) -> None:
    model, x = Recurrent(kind, **options), torch.randn(4, 4, 6)
    graph = trace(model, (x,))
    dropped = [op for op in graph.ops if op.target == "autopar.dropout"]
    assert len(dropped) == 2
    assert len({op.args[2] for op in dropped}) == 2
    model.net.dropout = 0.0
    same_as_the_model(model, {"x": x}, _without_dropout(graph))


def test_parts_of_a_batch_draw_numbers_of_their_own() -> None:
    graph = trace(Recurrent("GRU", batch_first=True), (torch.zeros(4, 3, 6),))
    typing = solve_batch(compact(graph))
    assert all(typing.strategies[op.name].outputs[0] == S(0) for op in graph.ops if "gru" in op.target)
    assert all(typing.strategies[op.name].random for op in graph.ops if op.target == "autopar.dropout")
    local = shard(graph, typing, global_batch_size=8, micro_batch_size=1)
    assert all(op.spec.shape[0] == 1 for op in local.ops if op.target == "autopar.dropout")


class Bags(nn.Module):
    """A table, read as a user reads it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(32, 8, **options), nn.Linear(8, 1)

    def forward(self, ids: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.head(self.table(ids, offsets, weights)).square().mean()


_IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "options",
    [
        {"mode": "sum"},
        {"mode": "mean", "padding_idx": int(_IDS[0, 0])},
        {"mode": "max", "padding_idx": int(_IDS[0, 0]) - 32},
        {"mode": "mean", "scale_grad_by_freq": True},
        {"mode": "sum", "sparse": True},
    ],
)
def test_bags_of_one_length_are_split_by_samples(options: dict[str, Any]) -> None:
    graph = trace(Bags(**options), (_IDS,))
    (op,) = [op for op in graph.ops if "bag" in op.target]
    assert op.target == "autopar.embedding_bag"
    assert op.args[4] == (options["padding_idx"] % 32 if "padding_idx" in options else -1)
    same_as_the_model(Bags(**options | {"sparse": False}), {"ids": _IDS}, graph)
    if not options.get("scale_grad_by_freq"):
        assert solve_batch(compact(graph)).strategies[op.name].outputs[0] == S(0)


def test_rows_of_a_bag_may_have_factors() -> None:
    model, batch = Bags(mode="sum"), {"ids": _IDS, "weights": torch.rand(4, 6)}
    graph = same_as_the_model(model, batch)
    (op,) = [op for op in graph.ops if "bag" in op.target]
    assert solve_batch(compact(graph)).strategies[op.name].inputs[1:] == (S(0), S(0))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_different_lengths_keep_their_offsets(mode: str) -> None:
    model = Bags(mode=mode, include_last_offset=True)
    batch = {"ids": _IDS.flatten(), "offsets": torch.tensor([0, 2, 2, 9, 24])}
    assert any(op.target == "autopar.embedding_bag_ragged" for op in same_as_the_model(model, batch).ops)


def of_tables(*, sparse: bool) -> nn.Module:
    """Of a table and bags whose gradients torch makes sparse, if so."""
    return model_of(
        lambda self, ids: (self.rows(ids).sum(1) + self.bags(ids)).square().mean(),
        rows=nn.Embedding(32, 8, sparse=sparse),
        bags=nn.EmbeddingBag(32, 8, sparse=sparse),
    )


def test_gradients_of_sparse_embeddings_are_dense_and_a_note_says_so() -> None:
    graph, dense = trace(of_tables(sparse=True), (_IDS,)), of_tables(sparse=False)
    assert [note for note in graph.notes if "sparse=True" in note]
    assert not any("sparse=True" in note for note in trace(dense, (_IDS,)).notes)
    same_as_the_model(dense, {"ids": _IDS}, graph)

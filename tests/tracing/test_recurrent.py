from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.graph.graph import Graph, Ref
from autopar.graph.interpreter import leaves, run
from autopar.graph.operator_kinds import draws_random
from autopar.graph.rewrites import compact
from autopar.plan.mesh import S
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules.apply import shard
from autopar.tracing.trace import trace
from autopar.verification.against_one_device import _without_dropout
from tests.support.small_models import evaluate, model_of, same_as_the_model


def _read_whole(self: Any, x: Tensor) -> Tensor:
    made, ends = self.net(x)
    ends = ends if isinstance(ends, tuple) else (ends,)
    return sum((end.square().mean() for end in ends), made.square().mean())


def recurrent(kind: str, **options: Any) -> nn.Module:
    return model_of(_read_whole, net=getattr(nn, kind)(6, 8, num_layers=3, dropout=0.5, **options))


@pytest.mark.parametrize(("kind", "options"), [
    ("LSTM", {"batch_first": True, "bidirectional": True}),
    ("LSTM", {"proj_size": 4}),
    ("GRU", {"bidirectional": True}),
    ("RNN", {"bias": False}),
])  # fmt: skip
def test_dropout_between_layers_is_that_of_all_others(kind: str, options: dict[str, Any]) -> None:
    model, x = recurrent(kind, **options), torch.randn(4, 4, 6)
    graph = trace(model, (x,))
    dropped = [op for op in graph.ops if op.target == "autopar.dropout"]
    assert len(dropped) == 2
    assert len({op.args[2] for op in dropped}) == 2
    model.net.dropout = 0.0
    same_as_the_model(model, {"x": x}, _without_dropout(graph))


def test_parts_of_a_batch_draw_numbers_of_their_own() -> None:
    graph = trace(recurrent("GRU", batch_first=True), (torch.zeros(4, 3, 6),))
    typing = solve_batch(compact(graph))
    assert all(typing.strategies[op.name].outputs[0] == S(0) for op in graph.ops if "gru" in op.target)
    assert all(typing.strategies[op.name].random for op in graph.ops if op.target == "autopar.dropout")
    local = shard(graph, typing, global_batch_size=8, micro_batch_size=1)
    assert all(op.spec.shape[0] == 1 for op in local.ops if op.target == "autopar.dropout")


def bags(**options: Any) -> nn.Module:
    forward = lambda self, ids, offsets=None, weights=None: self.head(self.table(ids, offsets, weights)).square().mean()
    return model_of(forward, table=nn.EmbeddingBag(32, 8, **options), head=nn.Linear(8, 1))


_IDS = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("options", "factors"), [
    ({"mode": "sum"}, {}), ({"mode": "sum", "sparse": True}, {}), ({"mode": "mean", "scale_grad_by_freq": True}, {}),
    ({"mode": "mean", "padding_idx": int(_IDS[0, 0])}, {}), ({"mode": "max", "padding_idx": int(_IDS[0, 0]) - 32}, {}),
    ({"mode": "sum"}, {"weights": torch.linspace(0, 1, 24).view(4, 6)}),
])  # fmt: skip
def test_bags_of_one_length_are_split_by_samples(options: dict[str, Any], factors: dict[str, Tensor]) -> None:
    graph = trace(bags(**options), (_IDS,), factors)
    (op,) = [op for op in graph.ops if "bag" in op.target]
    assert op.target == "autopar.embedding_bag"
    assert op.args[4] == (options["padding_idx"] % 32 if "padding_idx" in options else -1)
    same_as_the_model(bags(**options | {"sparse": False}), {"ids": _IDS, **factors}, graph)
    if not options.get("scale_grad_by_freq"):
        strategy = solve_batch(compact(graph)).strategies[op.name]
        assert {*strategy.inputs[1:], strategy.outputs[0]} == {S(0)}


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_different_lengths_keep_their_offsets(mode: str) -> None:
    model = bags(mode=mode, include_last_offset=True)
    batch = {"ids": _IDS.flatten(), "offsets": torch.tensor([0, 2, 2, 9, 24])}
    assert any(op.target == "autopar.embedding_bag_ragged" for op in same_as_the_model(model, batch).ops)


def test_bags_without_an_index_of_padding_count_all_ids() -> None:
    def of_rows(self: Any, ids: Tensor) -> Tensor:
        made, *_ = torch.embedding_bag(self.table.weight, ids.flatten(), torch.arange(0, ids.numel(), 6), False, 0)
        return made.square().mean()

    (op,) = [
        op
        for op in same_as_the_model(model_of(of_rows, table=nn.Embedding(32, 8)), {"ids": _IDS}).ops
        if "bag" in op.target
    ]
    assert op.args[4] == -1


def test_gradients_of_sparse_embeddings_are_dense_and_a_note_says_so() -> None:
    def of_tables(**options: bool) -> nn.Module:
        parts = {"rows": nn.Embedding(32, 8, **options), "bags": nn.EmbeddingBag(32, 8, **options)}
        return model_of(lambda self, ids: (self.rows(ids).sum(1) + self.bags(ids)).square().mean(), **parts)

    graph, dense = trace(of_tables(sparse=True), (_IDS,)), of_tables()
    assert [note for note in graph.notes if "sparse=True" in note]
    assert not any("sparse=True" in note for note in trace(dense, (_IDS,)).notes)
    same_as_the_model(dense, {"ids": _IDS}, graph)


def _changing(change: Callable[[Tensor], Tensor]) -> nn.Module:
    parts = {"first": nn.Linear(6, 6), "last": nn.Linear(6, 6)}
    return model_of(lambda self, x: self.last(change(self.first(x))).square().mean(), **parts)


def _traced(change: Callable[[Tensor], Tensor]) -> Graph:
    return trace(_changing(change), (torch.zeros(4, 6),))


@pytest.mark.parametrize("change", [
    lambda x: x.div(0.5) * torch.floor(torch.rand((x.shape[0], 1), dtype=x.dtype) + 0.5),
    lambda x: x + torch.randn_like(x), lambda x: x * torch.empty_like(x).uniform_(0.5, 1.5),
    lambda x: F.dropout1d(x[:, None], 0.5)[:, 0], lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
])  # fmt: skip
def test_noise_is_split_with_the_samples_and_drawn_by_salt(change: Callable[[Tensor], Tensor]) -> None:
    graph = _traced(change)
    drawn = [op for op in graph.ops if draws_random(op.target)]
    assert len(drawn) == 1
    assert not any(draws_random(op.target) for op in graph.prelude)
    typing = solve_batch(compact(graph))
    assert typing.strategies[drawn[0].name].outputs == (S(0),)
    assert typing.strategies[drawn[0].name].random
    local = shard(graph, typing, global_batch_size=4, micro_batch_size=1)
    part = next(op for op in local.ops if draws_random(op.target))
    assert part.spec.shape == (1, *drawn[0].spec.shape[1:])
    assert all(arg == part.spec.shape for arg in part.args if isinstance(arg, tuple))

    whole = {p.fqn: torch.randn(p.spec.shape) for p in graph.parameters}
    batch = {"x": torch.randn(4, 6)}
    assert evaluate(graph, batch, whole) == evaluate(graph, batch, whole)


def test_two_draws_differ() -> None:
    graph = _traced(lambda x: x * torch.rand_like(x) + torch.rand_like(x))
    drawn = [Ref(op.name) for op in graph.ops if draws_random(op.target)]
    env = leaves(graph, {"x": torch.zeros(4, 6)}, {p.fqn: torch.zeros(p.spec.shape) for p in graph.parameters}, {})
    run((*graph.prelude, *graph.ops), env)
    assert len(drawn) == 2
    assert not torch.equal(*(env[ref] for ref in drawn))


def test_a_mask_of_windows_is_split_with_the_samples_that_it_is_repeated_for() -> None:
    """As in a Swin: windows are samples to attention, and the mask of one image is repeated for each."""
    mask = torch.where(torch.eye(2, dtype=torch.bool), 0.0, -1.0).repeat(3, 1, 1) * torch.arange(3.0).view(3, 1, 1)

    expanded = lambda times: mask[None].expand(times, -1, -1, -1).reshape(-1, 2, 2)
    repeated = lambda times: mask.repeat(times, 1, 1)
    for repeat in (expanded, repeated):
        model = _changing(lambda x, more=repeat: (x.view(-1, 2, 1) + more(len(x)).sum(-1, keepdim=True)).view(x.shape))
        graph = trace(model, (torch.zeros(4, 6),))
        typing = solve_batch(compact(graph))
        local = shard(graph, typing, global_batch_size=4, micro_batch_size=1)
        assert any(op.spec.shape[0] == 3 for op in (*local.prelude, *local.ops) if op.spec.shape)
        same_as_the_model(model, {"x": torch.randn(4, 6)}, graph)


def test_dots_in_an_equation_and_normed_weights_have_rules() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.first(x)
        scores = torch.einsum("...qd,...kd->...qk", y, y)
        return torch.einsum("...d,de", scores @ y, self.weight).square().mean()

    first = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    model = model_of(forward, first=first, weight=nn.Parameter(torch.randn(6, 3)))
    graph = same_as_the_model(model, {"x": torch.randn(4, 2, 5, 6)})
    assert not any("..." in op.args[0] for op in graph.ops if op.target == "aten.einsum.default")
    solve_batch(compact(graph))


def _noisy(self: Any, x: Tensor) -> Tensor:
    """Stochastic depth, noise of several kinds, and a sample of categories."""
    for layer in self.layers:
        keep = x.new_empty((x.shape[0], 1, 1)).bernoulli_(0.5)
        x = x + layer(x) * keep
    x = x + torch.rand(x.shape[0], 1, 1) + torch.rand(x.shape[0], 1, 1) + 0.1 * torch.randn_like(x)
    x = F.dropout2d(x.unsqueeze(-1), 0.5).squeeze(-1) * torch.bernoulli(x.sigmoid())
    return F.gumbel_softmax(x, dim=-1).square().sum()


def test_equal_calls_stay_apart_without_gradients_and_none_runs_before_the_rest() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    graph = trace(model_of(_noisy, layers=layers), (torch.zeros(4, 3, 4),))
    drawn = [op for op in graph.ops if draws_random(op.target)]
    targets = [op.target for op in drawn]
    assert not any(draws_random(op.target) for op in graph.prelude)
    assert targets.count("aten.rand.default") == 2
    assert len(targets) == 8, targets
    for op in drawn:
        assert not op.spec.requires_grad
        assert not any(graph.spec(ref).requires_grad for ref in op.operands)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_networks_pass_gradients_on_and_their_samples_are_apart(kind: str) -> None:
    """They count as random for the dropout between their layers; there is none here."""
    net = getattr(nn, kind)(8, 8, num_layers=2, batch_first=True)
    model = model_of(lambda self, x: self.net(self.first(x))[0].square().mean(), first=nn.Linear(6, 8), net=net)
    graph = same_as_the_model(model, {"x": torch.randn(4, 3, 6)})
    (op,) = [op for op in graph.ops if kind.lower() in op.target]
    assert {spec.shape for spec in op.outputs[1:]} == {(2, 4, 8)}  # torch 2.11 exports (2, 1, 4, 8) of an LSTM
    assert solve_batch(compact(graph)).strategies[op.name].outputs[0] == S(0)


def test_what_is_random_and_differentiable_keeps_its_gradient() -> None:
    graph = _traced(lambda x: F.rrelu(x, training=True))
    (op,) = [op for op in graph.ops if "rrelu" in op.target]
    assert op.spec.requires_grad

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar import api
from autopar.errors import InfeasibleError, RuleError
from autopar.graph.graph import Block, Graph, Op, Ref
from autopar.graph.rewrites import compact
from autopar.plan.mesh import I
from autopar.planner.sharding import input_axes as batch
from autopar.planner.sharding.energy import Cost
from autopar.planner.sharding.input_axes import solve_batch
from autopar.rules.strategy import Strategy
from autopar.rules.table import Rule, default_table
from autopar.tracing.trace import trace
from tests.support.clusters import two_kinds
from tests.support.planner.graphs import mlp, op
from tests.support.said import refuses
from tests.support.small_models import model_of


def test_an_operator_that_mixes_samples_is_named() -> None:
    graph = mlp(layers=1)
    ops = list(graph.ops)
    mixing = replace(op("mixed", "aten.softmax.int", (Ref("start"), 0), 4, 8), source="model.py:7", module="gate")
    ops[1:1] = [mixing]
    ops[2] = ops[2].with_operands((Ref("mixed"), Ref("up0")))
    blocks = (Block(index=0, start=0, stop=len(ops), hash="all", label="all"),)
    mixed: Graph = replace(graph, ops=tuple(ops), blocks=blocks)
    caught = refuses(RuleError, "Samples of the batch depend on each other", solve_batch, compact(mixed))
    assert "mixed (aten.softmax.int)" in str(caught) and "model.py:7" in str(caught)


def test_where_samples_meet_no_gradient_of_a_parameter_is_taken_for_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        order = torch.sort(x[:, 0])[1]
        return (self.linear(x)[order] + self.bias[order]).sin().sum()

    model = model_of(forward, bias=torch.nn.Parameter(torch.ones(8, 4)), linear=torch.nn.Linear(4, 4))
    graph = replace(trace(model, (torch.zeros(8, 4),), exact=True), mixing="sort")
    usual = batch._BatchCosts.operator_costs

    def operator_costs(
        self: batch._BatchCosts, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]
    ) -> list[Cost]:
        found = zip(strategies, usual(self, op, strategies, saved), strict=True)
        return [Cost() if strategy.name == "invariant" else cost for strategy, cost in found]

    monkeypatch.setattr(batch._BatchCosts, "operator_costs", operator_costs)
    typing = solve_batch(compact(graph))
    for one in graph.ops:
        for ref, kind in zip(one.operands, typing.strategies[one.name].inputs, strict=True):
            assert kind != I or not graph.is_parameter(ref), f"{one.name} reads {ref}"


def test_rules_that_change_are_asked_for_again() -> None:
    graph = mlp(layers=2)
    typing = solve_batch(compact(graph))
    assert compact(graph) is compact(graph) and solve_batch(compact(graph)) is typing
    table = default_table()
    table.put("mylib.unused.default", Rule(line="b... -> b..."))
    try:
        assert solve_batch(compact(graph)) is not typing and solve_batch(compact(graph)) == typing
    finally:
        del table.rules["mylib.unused.default"]


def test_runs_and_layers_in_turn_are_cut_to_first_inner_and_last() -> None:
    small = compact(mlp(layers=9))
    assert [b.label for b in small.graph.blocks] == ["start", "layers.0", "layers.1", "layers.8", "loss"]
    assert small.members == ((0,), (1,), tuple(range(2, 9)), (9,), (10,))
    assert small.alike == ((Ref("r0"), Ref("r1")),)
    last = small.graph.blocks[3]
    assert small.graph.block_inputs(last) == (Ref("r1"),)
    assert {p.name for p in small.graph.parameters} == {"w_in", *(f"{k}{i}" for k in ("up", "down") for i in (0, 1, 8))}
    short = mlp(layers=3)
    assert compact(short).graph.ops == short.ops
    small = compact(mlp(layers=8), keys=["a"] * 5 + ["b"] * 5)
    assert small.members == ((0,), (1,), (2, 3), (4,), (5,), (6, 7), (8,), (9,))
    small = compact(mlp(layers=14, turn=3))
    assert [b.label for b in small.graph.blocks[1:-1]] == [f"layers.{i}" for i in (0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13)]
    assert small.members[4:7] == ((4, 7), (5, 8), (6, 9))
    assert small.class_of == (0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8, 9, 10, 11, 12)
    assert small.alike == ((Ref("r2"), Ref("r5")),)
    assert small.graph.block_inputs(small.graph.blocks[7]) == (Ref("r5"),)


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Skips(torch.nn.Module):
    """Layers of which the later half reads what the earlier half makes, in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (torch.nn.ModuleList(Layer() for _ in range(6)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = []
        for layer in self.encoder:
            x = layer(x)
            made.append(x)
        for layer in self.decoder:
            x = layer(x + made.pop())
        return x.square().sum()


def test_values_that_inner_layers_read_of_others_are_those_of_the_compact_graph() -> None:
    graph = trace(Skips(), (torch.zeros(4, 8, 8),), repeats=True)
    small = compact(graph)
    made = {op.name for op in small.graph.ops}
    assert max(map(len, small.members)) > 2 and {ref.name for pair in small.alike for ref in pair} <= made
    plan = api.search(graph, cluster="cpu:1x2", global_batch_size=4, pins=["tp=2"])
    assert len(plan.blocks) == len(graph.blocks) and plan.mesh.tp == 2


def _meets(output: torch.Tensor, batch: Any = None) -> torch.Tensor:
    return (torch.softmax(output.mean((1, 2)), 0) * output.mean((1, 2))).sum()


def test_what_needs_too_much_memory_as_samples_meet_says_so_and_where() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return _meets(self.linear(x).square())

    model = model_of(forward, linear=torch.nn.Linear(64, 64))
    graph = api.trace(model, example_inputs={"x": torch.ones(2, 256, 64)}, global_batch_size=64)
    assert "test_batch.py:" in graph.mixing
    reserve = 400 * 2**20
    small = two_kinds(fast_memory=reserve + 2_000_000, slow_memory=reserve + 2_000_000)
    said = r"samples that meet in .*test_batch\.py:\d+.*Keep samples apart there, or"
    refuses(InfeasibleError, said, api.search, graph, cluster=small, global_batch_size=64)


def test_samples_that_meet_in_a_loss_function_are_said_to_do_so_there() -> None:
    model = torch.nn.Linear(64, 64)
    graph = api.trace(model, example_inputs=[torch.ones(2, 8, 64)], loss_fn=_meets, global_batch_size=8)
    assert f"test_batch.py:{_meets.__code__.co_firstlineno}" in graph.mixing

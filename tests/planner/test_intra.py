from collections.abc import Iterator
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.cost.network.collectives import CollectiveModel
from autopar.graph.graph import Graph, Op, Ref
from autopar.graph.rewrites import compact
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import I, Mesh, P, R, S, Type, conversion
from autopar.planner.sharding import block_chain as chain
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver, owners_of
from autopar.planner.sharding.block_table import AxisCosts, AxisPricing
from autopar.planner.sharding.energy import Weights
from autopar.planner.sharding.strategy_energy import TypingProblem, repetition_classes, rests_of
from autopar.rules import table as rules
from autopar.rules.apply import shard
from autopar.rules.strategy import Strategy
from autopar.tracing.trace import trace
from tests.support.planner.graphs import llama_block, mlp
from tests.support.small_models import model_of


def _attend(self: Any, x: Tensor) -> Tensor:
    first = self.first(x)
    q, k, v = (layer(first).unflatten(-1, (2, -1)).transpose(1, 2) for layer in self.layers)
    return F.scaled_dot_product_attention(q, k, v).sum()


@cache
def attention() -> Graph:
    """One attention of two heads with shared input."""
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in "qkv"])
    return trace(model_of(_attend, first=nn.Linear(4, 4, bias=False), layers=layers), (torch.zeros(1, 4, 4),))


CLUSTER = Cluster.parse("h100-sxm5-80gb:1x8")


def pricing(size: int) -> AxisPricing:
    return AxisPricing(
        device=CLUSTER.devices[0], collectives=CollectiveModel(CLUSTER), mesh=Mesh(tp=size), axis="tp",
        state_bytes_per_element=16.0, gradient_itemsize=4,
    )  # fmt: skip


def solver(graph: Graph, size: int) -> AxisSolver:
    small = compact(graph)
    costs = AxisCosts(graph=small.graph, axis="tp", size=size, pricing=pricing(size), owners=owners_of(small))
    return AxisSolver(small, costs)


@lru_cache(maxsize=8)
def known_costs(graph: Graph, size: int) -> AxisCosts:
    return AxisCosts(graph=graph, axis="tp", size=size, pricing=pricing(size))


def energy(graph: Graph, size: int, chosen: dict[str, Strategy], rests: dict[str, Type], weights: Weights) -> float:
    """The cost of one typing, written anew: changes shared inside a block, saved values charged once."""
    costs = known_costs(graph, size)
    total = 0.0

    def pay(cost: object) -> None:
        nonlocal total
        total += float("inf") if cost is None else (
            cost.time_s + weights.per_step_s * cost.step_s
            + weights.saved_byte * cost.saved_bytes + weights.state_byte * cost.state_bytes
        )  # fmt: skip

    for name, rest in rests.items():
        pay(costs.at_rest(graph.parameter(name), rest))
    for block in graph.blocks:
        changed: set[tuple[Ref, Type]] = set()
        saved: set[Ref] = set()
        for one in graph.block_ops(block):
            strategy = chosen[one.name]
            new = [r for r in costs.saves(one) if r not in saved]
            saved.update(new)
            pay(costs.operator_costs(one, [strategy], new)[0])
            for ref, wanted in zip(one.operands, strategy.inputs, strict=True):
                if (ref, wanted) in changed or graph.is_prelude(ref):
                    continue
                changed.add((ref, wanted))
                if graph.is_parameter(ref):
                    pay(costs.use(graph.parameter(ref.name), rests[ref.name], wanted))
                else:
                    made = chosen[ref.name].outputs[ref.index]
                    if made != wanted:
                        pay(costs.change(ref, made, wanted))
    pay(costs.change(graph.loss, chosen[graph.loss.name].outputs[0], I))
    return total


def brute_force(graph: Graph, size: int, weights: Weights) -> float:
    table, specs = rules.default_table(), {o.name: tuple(graph.spec(r) for r in o.operands) for o in graph.ops}
    offered = {o.name: table.strategies(o, specs[o.name], axis="tp", size=Fraction(size)) for o in graph.ops}

    def typings(chosen: dict[str, Strategy], left: tuple[Op, ...]) -> Iterator[dict[str, Strategy]]:
        if not left:
            yield chosen
            return
        for strategy in offered[left[0].name]:
            if _possible(graph, left[0].operands, strategy, chosen):
                yield from typings({**chosen, left[0].name: strategy}, left[1:])

    return min(_best_rests(graph, size, chosen, weights) for chosen in typings({}, graph.ops))


def _possible(graph: Graph, operands: tuple[Ref, ...], strategy: Strategy, chosen: dict[str, Strategy]) -> bool:
    return all(
        graph.is_prelude(r) or graph.is_parameter(r)
        or conversion(chosen[r.name].outputs[r.index], w, requires_grad=graph.spec(r).requires_grad) is not None
        for r, w in zip(operands, strategy.inputs, strict=True)
    )  # fmt: skip


def _best_rests(graph: Graph, size: int, chosen: dict[str, Strategy], weights: Weights) -> float:
    """Parameters do not touch each other: each takes its best type at rest by itself."""
    rests: dict[str, Type] = dict.fromkeys((p.name for p in graph.parameters), I)
    start = energy(graph, size, chosen, rests, weights)
    best = start
    for p in graph.parameters:
        options = (energy(graph, size, chosen, {**rests, p.name: rest}, weights) for rest in rests_of(p.spec, size)[1:])
        best += min(0.0, min(options, default=start) - start)
    return best


@pytest.mark.parametrize(("price", "width", "hidden"), [(0.0, 4, 3), (1e-7, 3, 6)])
def test_a_small_mlp_is_solved_exactly(price: float, width: int, hidden: int) -> None:
    graph = mlp(layers=1, batch=3, hidden=hidden, width=width)
    weights = Weights(per_step_s=0.25, saved_byte=price, state_byte=price)
    assert solver(graph, 2).solve(weights).value == pytest.approx(brute_force(graph, 2, weights), rel=1e-12)


def test_the_value_is_the_energy_of_the_typing_that_is_returned() -> None:
    graph = attention()
    weights = Weights(per_step_s=0.5, saved_byte=1e-8, state_byte=1e-9)
    found = solver(graph, 2).solve(weights)
    written = energy(graph, 2, dict(found.typing.strategies), dict(found.typing.parameters), weights)
    assert found.value == pytest.approx(written, rel=1e-12)


def test_inner_layers_of_a_run_are_solved_as_one() -> None:
    assert len(solver(mlp(layers=40), 2).problems) == 3


@pytest.mark.parametrize("price", [0.0, 1e-7])
def test_layers_in_turn_cost_what_they_cost_without_one_that_stands_for_others(price: float) -> None:
    graph, weights = mlp(layers=15, turn=3), Weights(per_step_s=0.25, saved_byte=price, state_byte=price)
    whole = compact(graph, keys=range(len(graph.blocks)))
    assert len(compact(graph).members) == 11
    assert len(whole.members) == 17
    costs = AxisCosts(graph=whole.graph, axis="tp", size=2, pricing=pricing(2), owners=owners_of(whole))
    assert solver(graph, 2).solve(weights).value == pytest.approx(AxisSolver(whole, costs).solve(weights).value)


def types(found: AxisSolution, name: str) -> tuple[tuple[Type, ...], tuple[Type, ...]]:
    return found.typing.strategies[name].inputs, found.typing.strategies[name].outputs


PRICE = 1e-11  # seconds a byte: 80 GB are worth 0.8 s


def test_a_price_on_memory_gives_megatron_tensor_and_sequence_parallelism_where_that_divides() -> None:
    dear = Weights(per_step_s=1 / 64, saved_byte=PRICE, state_byte=PRICE)
    found = solver(llama_block(), 8).solve(dear)
    assert types(found, "norm1") == ((S(1), R), (S(1),))
    for name in ("q1", "k1", "v1", "gate1", "up1"):
        assert types(found, name) == ((R, S(0)), (S(2),)), name
    assert types(found, "core1") == ((S(1),) * 3, (S(1),))
    for name in ("o1", "down1"):
        assert types(found, name) == ((S(2), S(1)), (P,)), name
    assert types(found, "out1") == ((S(1), S(1)), (S(1),))
    odd = solver(llama_block(seq=4095), 8).solve(dear)
    assert types(odd, "gate1")[0][1] == S(0) and all(t != S(1) for t in types(odd, "out1")[1])


def test_without_a_price_the_batch_is_split_where_it_divides_and_heads_in_attention_where_not() -> None:
    free = Weights(per_step_s=0.0)
    by_batch = solver(llama_block(batch=8, seq=1024), 8).solve(free)
    assert types(by_batch, "core1")[1] == (S(0),) and types(by_batch, "gate1") == ((S(0), R), (S(0),))
    ulysses = solver(llama_block(), 8).solve(free)
    assert types(ulysses, "gate1") == ((S(1), R), (S(1),))
    assert types(ulysses, "core1") == ((S(1),) * 3, (S(1),))


def test_a_value_is_offered_the_same_types_by_every_block_that_it_touches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a boundary has too many states, its values are narrowed; the block on their other side has to follow."""
    graph = mlp(layers=2)
    free = solver(graph, 2).solve(Weights())
    monkeypatch.setattr(chain, "MAX_BOUNDARY_STATES", 10)  # more than one value's types, fewer than those of two
    narrow = solver(graph, 2)
    assert all(t.is_split or t == I for types in narrow.types.values() for t in types)
    found = narrow.solve(Weights())
    assert free.value <= found.value < float("inf")
    shard(graph, found.typing)


def test_a_block_that_is_too_wide_changes_a_value_to_fewer_types(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = attention()
    free = solver(graph, 2).solve(Weights())
    monkeypatch.setattr(TypingProblem, "is_wide", lambda self, keep: self.max_extras > 1)
    found = solver(graph, 2)
    assert all(problem.problem.max_extras == 1 for problem in found.problems.values())
    assert found.solve(Weights()).value >= free.value


def forward(self: Any, x: Tensor) -> Tensor:
    drive, state, states = self.inside(x), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = torch.tanh(0.5 * state + drive[:, t])
        states.append(state)
    return self.outside(torch.stack(states, 1)).square().sum()


@cache
def scan() -> Graph:
    return trace(model_of(forward, inside=nn.Linear(8, 8), outside=nn.Linear(8, 8)), (torch.zeros(4, 6, 8),))


@pytest.mark.parametrize("model", ["attention", "loop"])
def test_where_tables_are_too_large_values_stay_as_they_are(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """In place of an integer program of seconds for each of dozens of entries of a table: nothing is cut inside a block, and what has
    several readers is read by all of them as it is made."""
    graph = attention() if model == "attention" else scan()
    free = solver(graph, 2).solve(Weights())
    monkeypatch.setattr(TypingProblem, "is_wide", lambda self, keep: True)
    monkeypatch.setattr(TypingProblem, "is_eliminated", lambda self, keep: self.max_extras == 0)
    narrow = solver(graph, 2)
    assert all(problem.problem.max_extras == 0 for problem in narrow.problems.values())
    for problem in narrow.problems.values():
        ops = graph.block_ops(problem.block)
        states = {op.name: problem.problem.states[problem.problem.ops[op.name]] for op in ops}
        made = {Ref(name): {s.outputs[0] for s in own} for name, own in states.items()}
        for op in ops:
            for strategy in states[op.name]:
                wanted = zip(op.operands, strategy.inputs, strict=True)
                assert all(kind in made[ref] for ref, kind in wanted if kind.is_split and ref in made)
    found = narrow.solve(Weights())
    assert free.value * (1 - 1e-9) <= found.value < float("inf")
    shard(graph, found.typing)


def test_the_steps_of_a_loop_in_a_wide_block_have_one_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = scan()
    free = solver(graph, 2).solve(Weights())
    monkeypatch.setattr(TypingProblem, "is_wide", lambda self, keep: not self.op_classes)
    found = solver(graph, 2).solve(Weights())
    keys = {name: key for block in graph.blocks for name, key in repetition_classes(graph, block).items()}
    steps = [o for o in graph.ops if o.target == "aten.tanh.default"]
    assert len(steps) == 6
    assert len({keys[o.name] for o in steps}) <= 3, "the first steps begin from zeros"
    for same in set(keys.values()):
        assert len({found.typing.strategies[name] for name, key in keys.items() if key == same}) == 1
    assert free.value <= found.value < float("inf")
    shard(graph, found.typing)


def _again(self: Any, x: Tensor) -> Tensor:
    x = self.before(x)
    for _ in range(3):
        x = x + self.layer(x)
    return self.after(x).square().sum()


def test_a_layer_called_again_with_many_parameters_has_one_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = model_of(_again, layer=layer, before=nn.Linear(8, 8), after=nn.Linear(8, 8))
    graph = trace(model, (torch.zeros(4, 8),))
    dear = Weights(state_byte=1e-3)
    free = solver(graph, 2)
    assert not free.equal_blocks
    best = free.solve(dear)
    monkeypatch.setattr(chain, "MAX_BOUNDARY_STATES", 100)
    tied = solver(graph, 2)
    assert tied.equal_blocks and not any(boundary.shared for boundary in tied.boundaries)
    found = tied.solve(dear)
    layers = {i for pair in tied.equal_blocks for i in pair}
    assert len(layers) == 3
    assert len({(found.blocks[i].strategies, found.blocks[i].parameters) for i in layers}) == 1
    assert any(kind.is_split for kind in found.typing.parameters.values())
    assert best.value * (1 - 1e-9) <= found.value < float("inf")
    shard(graph, found.typing)


def _meeting(self: Any, x: Tensor) -> Tensor:
    """Layers that each read what four others made, with one projection for all of them."""
    parts = [torch.tanh(tower(x)) for tower in self.towers]
    y = parts[0]
    for layer in self.layers:
        for part in parts:
            y = y + layer["b"](torch.relu(layer["a"](self.shared(part) * y)))
    return y.square().sum()


@pytest.mark.parametrize("limit", [1 << 14, 400, 40, 1])
def test_tables_stay_small_where_a_block_reads_many_values(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Without it a block of six values and six parameters has millions of entries, each an integer program."""
    towers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
    layers = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(8, 16), "b": nn.Linear(16, 8)}) for _ in range(3)])
    model = model_of(_meeting, towers=towers, shared=nn.Linear(8, 8), layers=layers)
    graph = trace(model, (torch.zeros(4, 6, 8),))
    free = solver(graph, 2).solve(Weights(state_byte=1e-3))
    monkeypatch.setattr(chain, "MAX_BOUNDARY_STATES", limit)
    narrow = solver(graph, 2)
    sizes = [problem.solve_all([Weights()]).tables[0].size for problem in narrow.problems.values()]
    assert max(sizes) <= limit
    assert limit == 1 or max(sizes) > 1, "no more is taken than has to be"
    found = narrow.solve(Weights(state_byte=1e-3))
    assert free.value * (1 - 1e-9) <= found.value < float("inf")
    shard(graph, found.typing)

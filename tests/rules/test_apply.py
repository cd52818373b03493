from dataclasses import replace
from fractions import Fraction

import torch

from autopar.errors import InternalError, RuleError
from autopar.graph.graph import Graph, Op, Ref, TensorSpec
from autopar.graph.rewrites import signature
from autopar.plan.mesh import R
from autopar.rules.apply import shard
from autopar.rules.strategy import Strategy, Typing
from tests.support.lower.chooser import batch_typing, named_typing
from tests.support.planner.graphs import mlp
from tests.support.said import refuses

GRAPH = mlp(layers=2)


def batch_graph() -> Graph:
    return shard(GRAPH, batch_typing(GRAPH, 2), global_batch_size=8, micro_batch_size=2)


def tensor_typing(**changed: str) -> Typing:
    """The inner dim of each layer is split, and between layers the width."""
    layer = {"a": "split n", "s": "split x.1", "b": "split k", "r": "split x.1"}
    layers = {f"{name}{i}": how for i in range(2) for name, how in layer.items()}
    return named_typing(GRAPH, "tp", {"start": "split n", **layers, "loss": "split d1", **changed})


def test_consumers_of_one_block_share_a_conversion_and_blocks_do_not() -> None:
    """The last layer's addition reads the stream whole, as its first product does; what every rank has is no loss."""
    refuses(InternalError, "cannot become", shard, batch_graph(), tensor_typing(r1="replicate", loss="replicate"))
    local = shard(batch_graph(), tensor_typing(r1="replicate", loss="linear 0"))
    gathered = [op for op in local.block_ops(local.blocks[2]) if op.name.startswith("r0_tp_R")]
    assert len(gathered) == 1
    assert sum(r == Ref("r0_tp_R") for op in local.ops for r in op.operands) == 2


def test_statistics_over_the_batch_are_refused_by_name() -> None:
    typing = batch_typing(GRAPH, 2)
    whole = Strategy(name="whole", inputs=(R,), outputs=(R,))
    mixed = replace(typing, strategies={**typing.strategies, "s0": whole})
    said = r"s0 \(aten.silu.default\).*: Samples of the batch depend on each other"
    refuses(RuleError, said, shard, GRAPH, mixed, micro_batch_size=2)


def test_a_dim_that_does_not_divide_and_a_missing_strategy_are_refused() -> None:
    thirds = replace(tensor_typing(), size=Fraction(3))
    refuses(RuleError, "the dim does not divide by tp=3", shard, batch_graph(), thirds)
    typing = tensor_typing()
    rest = {name: s for name, s in typing.strategies.items() if name != "s1"}
    refuses(InternalError, r"s1 .* has no strategy on axis tp", shard, batch_graph(), replace(typing, strategies=rest))


def test_operators_with_and_without_gradient_are_told_apart() -> None:
    plain = TensorSpec(shape=(4,), dtype=torch.float32)
    op = Op(name="y", target="aten.sin.default", args=(Ref("x"),), outputs=(plain,))
    with_gradient = replace(plain, requires_grad=True)
    assert signature((op,), lambda _: plain) != signature((op,), lambda _: with_gradient)

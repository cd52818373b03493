from dataclasses import replace

import pytest
import torch

from autopar.errors import InternalError, RuleError
from autopar.graph.graph import Graph, Op, Ref, TensorSpec
from autopar.graph.rewrites import signature
from autopar.plan.mesh import P, R
from autopar.rules.apply import shard
from autopar.rules.strategy import Typing
from tests.support.lower import chooser, mlp


def batch_graph() -> Graph:
    graph = mlp.mlp_graph()
    return shard(graph, chooser.batch_typing(graph, 2), global_batch_size=8, micro_batch_size=2)


def with_strategy(typing: Typing, **changed: object) -> Typing:
    return replace(typing, strategies={**typing.strategies, **changed})


def test_consumers_of_one_block_share_a_conversion_and_blocks_do_not() -> None:
    typing = mlp.tensor_typing(2)
    # both read the stream whole: the residual addition of layer 1 and the head
    whole = with_strategy(
        typing, r1=mlp.strategy("r", (R, R), R), square=mlp.strategy("s", (R, R), R), total=mlp.strategy("r", (R,), R),
        loss=mlp.strategy("k", (P, R), P),
    )  # fmt: skip
    with pytest.raises(InternalError, match="cannot become"):
        shard(batch_graph(), with_strategy(whole, loss=mlp.strategy("r", (R, R), R)))
    local = shard(batch_graph(), whole)
    gathered = [op for op in local.block_ops(local.blocks[1]) if op.name.startswith("r0_tp_R")]
    assert len(gathered) == 1
    assert sum(r == Ref("r0_tp_R") for op in local.ops for r in op.operands) == 2


def test_statistics_over_the_batch_are_refused_by_name() -> None:
    graph = mlp.mlp_graph()
    typing = chooser.batch_typing(graph, 2)
    with pytest.raises(RuleError, match="Samples of the batch depend on each other") as error:
        shard(graph, with_strategy(typing, g0=mlp.strategy("whole", (R,), R)), micro_batch_size=2)
    assert "g0 (aten.gelu.default)" in str(error.value)


def test_a_dim_that_does_not_divide_is_refused() -> None:
    with pytest.raises(RuleError, match="the dim does not divide by tp=3"):
        shard(batch_graph(), mlp.tensor_typing(3))


def test_a_missing_strategy_is_refused() -> None:
    typing = mlp.tensor_typing(2)
    rest = {name: s for name, s in typing.strategies.items() if name != "g1"}
    with pytest.raises(InternalError, match=r"g1 .* has no strategy on axis tp"):
        shard(batch_graph(), replace(typing, strategies=rest))


def test_operators_with_and_without_gradient_are_told_apart() -> None:
    plain = TensorSpec(shape=(4,), dtype=torch.float32)
    op = Op(name="y", target="aten.sin.default", args=(Ref("x"),), outputs=(plain,))
    with_gradient = replace(plain, requires_grad=True)
    assert signature((op,), lambda _: plain) != signature((op,), lambda _: with_gradient)

"""What may stand beside a ring: every rule in zig-zag order by execution, leaves in their own order, what is refused."""

from __future__ import annotations

from fractions import Fraction
from functools import partial

import pytest
import torch

from autopar.errors import RuleError
from autopar.graph.graph import Graph, Op, Parameter, Ref
from autopar.plan.mesh import I, P, R, S, Type
from autopar.rules.apply import shard
from autopar.rules.by_execution import verify_rule
from autopar.rules.strategy import RING, ZIGZAG_SAFE, Strategy, Typing, check_strategy
from autopar.rules.table import default_table
from tests.support.graphs_by_hand import graph_of_ops
from tests.support.planner import graphs
from tests.support.rule_examples import every

ATTENTION = "aten.scaled_dot_product_attention.default"


@pytest.mark.slow
def test_every_rule_is_right_in_zigzag_order() -> None:
    """Parts of chunks that are no neighbours: for every strategy that may stand beside a ring, forward and gradient."""
    examples = [
        e for e in every(default_table(), 5) if "other" not in (*e.op.args, *(value for _, value in e.op.kwargs))
    ]
    failures = [
        line for e in examples for line in verify_rule(e.op, e.operands, size=2, axis="cp", seed=5, zigzag=True)
    ]
    assert len(examples) > 400
    assert failures == []


def test_the_check_in_zigzag_order_finds_what_depends_on_neighbours() -> None:
    """Neighbours change places: right for two ranks with two of four each, wrong where a chunk is half a pair."""

    @torch.library.custom_op("zigzag_check::swapped", mutates_args=())
    def swapped(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 2).flip(1).reshape(-1)

    op = Op(name="call", target="zigzag_check.swapped.default", args=(Ref("x"),), outputs=())
    x, split = torch.randn(4, dtype=torch.float64), Strategy(name="split", inputs=(S(0),), outputs=(S(0),))
    assert verify_rule(op, [x], size=2, strategies=[split]) == []
    assert verify_rule(op, [x], size=2, strategies=[split], zigzag=True)


def test_what_knows_its_part_is_refused() -> None:
    """Look-up and loss over split classes, attention that begins at its rank's first row; not sums with a count."""
    for target in ("autopar.embedding_vocabulary", "autopar.cross_entropy_vocabulary", "autopar.attention_gathered"):
        with pytest.raises(RuleError, match="cannot be used beside ring attention") as caught:
            check_strategy(Strategy(name="s", inputs=(), outputs=(), target=target), "here")
        assert caught.value.fix and caught.value.where == "here"
    for target in ZIGZAG_SAFE:
        check_strategy(Strategy(name="s", inputs=(), outputs=(), target=target), "here")


spec = partial(graphs.spec, dtype=torch.float64)


def ring_graph(length: int = 8) -> Graph:
    """x times a weight and its transpose, attention of it with itself, a sum."""
    heads = (2, 1, length, 4)
    ops = (
        Op(name="h", target="aten.linear.default", args=(Ref("x"), Ref("w"), None), outputs=(spec(2, 1, length, 8),)),
        Op(name="g", target="aten.linear.default", args=(Ref("h"), Ref("v"), None), outputs=(spec(*heads),)),
        Op(name="y", target=ATTENTION, args=(Ref("g"), Ref("g"), Ref("g"), None, 0.0, True), outputs=(spec(*heads),)),
        Op(name="loss", target="aten.sum.default", args=(Ref("y"),), outputs=(spec(),)),
    )
    parameters = [Parameter(name="w", fqn="w", spec=spec(8, 4)), Parameter(name="v", fqn="v", spec=spec(4, 8))]
    return graph_of_ops("ring", ops, {"x": spec(2, 1, length, 4, grad=False)}, parameters)


def ring_typing(*, w: Type = I, v: Type = I, x: Type = R, hidden: bool = True) -> Typing:
    ring = (
        ("axis", "cp"),
        ("ranks", 2),
    )
    inside = (
        {
            "h": Strategy(name="split n", inputs=(R, S(0)), outputs=(S(3),)),
            "g": Strategy(name="split k", inputs=(S(3), S(1)), outputs=(P,)),
        }
        if hidden
        else {
            "h": Strategy(name="split b.1", inputs=(S(2), R), outputs=(S(2),)),
            "g": Strategy(name="split b.1", inputs=(S(2), R), outputs=(S(2),)),
        }
    )
    rows = (S(2), S(2), S(2))
    return Typing(
        axis="cp",
        size=Fraction(2),
        strategies={
            **inside,
            "y": Strategy(name="ring", inputs=rows, outputs=(S(2),), target=RING, extra=ring),
            "loss": Strategy(name="split d2", inputs=(S(2),), outputs=(P,)),
        },
        parameters={"w": w, "v": v},
        inputs={"x": x},
    )


def made(graph: Graph) -> list[tuple[str, str]]:
    return [(op.name, op.target) for op in (*graph.prelude, *graph.ops) if "_cp_" in op.name]


def test_a_part_of_a_parameter_is_put_into_zigzag_order_by_way_of_the_whole() -> None:
    local = shard(ring_graph(), ring_typing(w=S(0), v=S(0)))
    assert made(local)[:4] == [
        ("w_cp_I", "autopar.all_gather"),
        ("w_cp_S0", "autopar.zigzag_shard"),
        ("v_cp_I", "autopar.all_gather"),
        ("v_cp_S1", "autopar.zigzag_shard"),
    ]
    assert [p.spec.shape for p in local.parameters] == [(4, 4), (2, 8)]
    assert [p.layout for p in local.parameters] == [(("cp", S(0)),)] * 2
    assert dict(local.parameter("w").layout)["cp"] == S(0)


def test_a_part_of_a_leaf_becomes_whole_in_its_own_order() -> None:
    local = shard(ring_graph(), ring_typing(w=S(0), v=S(1), x=S(2), hidden=False))
    assert made(local) == [
        ("x_cp_R", "autopar.all_gather"), ("x_cp_S2", "autopar.zigzag_shard"), ("w_cp_R", "autopar.all_gather"),
        ("v_cp_R", "autopar.all_gather"), ("loss_cp_I", "autopar.all_reduce"),
    ]  # fmt: skip


def test_a_dim_that_is_not_made_of_two_chunks_a_rank_is_refused() -> None:
    with pytest.raises(RuleError, match=r"cannot be split as S\(2\).* by twice cp=2") as caught:
        shard(ring_graph(length=6), ring_typing())
    assert "cp_attention" in caught.value.fix

"""A sum that is pending on ``tp`` passes operators that know their part on ``cp``: no false alarms, and right numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch

from autopar.graph.graph import Graph, Op, Parameter, Ref
from autopar.lower.check_types import typecheck
from autopar.lower.program import Program, lower
from autopar.plan.mesh import Mesh, P
from autopar.rules import apply
from tests.support.graphs_by_hand import graph_of_ops
from tests.support.lower import chooser
from tests.support.lower.chooser import named_typing
from tests.support.lower.models import plan_of
from tests.support.planner import graphs
from tools.campaigns.pairs import Pair, check_pair

MESH = Mesh(cp=2, tp=2)
spec = partial(graphs.spec, dtype=torch.float64)


def attention_graph() -> Graph:
    """Causal attention of projections q (keys too) and v; the loss is a sum."""
    flat, cut, turned = spec(4, 8, 8), spec(4, 8, 2, 4), spec(4, 2, 8, 4)

    def projected(name: str) -> list[Op]:
        return [
            Op(name=name, target="aten.linear.default", args=(Ref("x_1"), Ref(f"p_{name}"), None), outputs=(flat,)),
            Op(name=f"{name}_4", target="aten.view.default", args=(Ref(name), (4, 8, 2, 4)), outputs=(cut,)),
            Op(name=f"{name}_t", target="aten.transpose.int", args=(Ref(f"{name}_4"), 1, 2), outputs=(turned,)),
        ]

    qkv = (Ref("q_t"), Ref("q_t"), Ref("v_t"), None, 0.0, True)
    ops = (
        *projected("q"),
        *projected("v"),
        Op(name="y", target="aten.scaled_dot_product_attention.default", args=qkv, outputs=(turned,)),
        Op(name="loss", target="aten.sum.default", args=(Ref("y"),), outputs=(spec(),)),
    )
    parameters = [Parameter(name=f"p_{n}", fqn=f"m.{n}", spec=spec(8, 8)) for n in ("q", "v")]
    return graph_of_ops("fuzz", ops, {"x_1": spec(4, 8, 8, grad=False)}, parameters)


def pair(cp: Mapping[str, str], tp: Mapping[str, str]) -> Pair:
    graph = attention_graph()
    batch = chooser.batch_typing(graph, 4)
    local = apply.shard(graph, batch, global_batch_size=4, micro_batch_size=4)
    first = named_typing(local, "cp", cp)
    inner = apply.shard(local, first)
    second = named_typing(inner, "tp", tp)
    plan = plan_of(graph, MESH, 4, (batch, first, second), graphs=(graph, local, inner))
    return Pair(whole=graph, traced=graph, plan=replace(plan, cluster="cpu:1x4"))


SEQUENCE = {"q": "split b.1", "q_4": "split d1", "q_t": "split d1", "loss": "split d2"}
SPLIT_V = {"v": "split b.1", "v_4": "split d1", "v_t": "split d1"}
WHOLE_V = {"v": "replicate", "v_4": "replicate", "v_t": "replicate"}
PENDING = {"v": "split k", "v_4": "linear 0", "v_t": "linear 0", "y": "linear 2", "loss": "linear 0"}


@pytest.mark.parametrize(
    ("kind", "value", "target"),
    [
        ("ring", SPLIT_V, "attention_ring"),
        ("gather", WHOLE_V, "attention_gathered"),
    ],
)
def test_a_pending_sum_passes_attention_over_a_split_sequence(kind: str, value: Mapping[str, str], target: str) -> None:
    made = pair({**SEQUENCE, **value, "y": kind}, PENDING)
    program: Program = lower(made.plan, made.traced)
    assert f"{target}(" in program.code
    (attention,) = (op for op in program.graph.ops if op.name == "y")
    assert dict(attention.layouts[0])["tp"] == P
    for rank in range(MESH.world_size):
        assert typecheck(program, rank=rank) > 5
    assert check_pair(made) == ""

"""The pin of ep: experts are split over the ranks of tp, or not; what cannot be is named."""

from __future__ import annotations

import pytest
import torch

from autopar import search as search_plan
from autopar.api import estimate
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError, RuleError, UsageError
from autopar.graph.trace import trace
from autopar.layout import S
from autopar.mesh import Mesh
from autopar.plan import Plan
from autopar.plan_io import plan_from_dict, plan_to_dict
from tests.lower.moe import Layer, mixture_graph

from .graphs import mlp


def planned(*pins: str, ranks: int = 4) -> Plan:
    return estimate(mixture_graph(), cluster=Cluster.parse(f"cpu:1x{ranks}"), global_batch_size=16, pins=pins)


def expert_types(plan: Plan) -> set[object]:
    return {
        kind
        for layout in plan.layouts
        for typing in layout.typings
        if typing.axis == "tp"
        for name, kind in zip(typing.parameter_names, typing.parameters, strict=True)
        if "experts" in name
    }


@pytest.mark.parametrize("tp", [2, 4])
def test_ep_borrows_the_ranks_of_tp(tp: int) -> None:
    plan = planned(f"ep={tp}", f"tp={tp}")
    assert plan.mesh.ep == tp and plan.mesh.world_size == 4
    assert expert_types(plan) == {S(0)}
    assert f"(ep={tp} on tp)" in str(plan.mesh)
    assert plan_from_dict(plan_to_dict(plan)).mesh == plan.mesh


def test_without_ep_experts_are_whole_or_split_inside() -> None:
    plan = planned("ep=1", "tp=2")
    assert plan.mesh.ep == 1
    assert not any(name == "experts" or name.startswith("dispatch") for name in strategies(plan))


def strategies(plan: Plan) -> set[str]:
    return {s for layout in plan.layouts for typing in layout.typings for s in typing.strategies}


def test_ep_alone_decides_tp() -> None:
    plan = search_plan(mixture_graph(), cluster=Cluster.parse("cpu:1x4"), global_batch_size=16, pins=["ep=2"])
    assert plan.mesh.tp == plan.mesh.ep == 2


def test_what_ep_cannot_be_is_named() -> None:
    with pytest.raises(InfeasibleError, match=r"ep=2 \(experts borrow the ranks of tp: ep is 1 or tp\); tp=1"):
        planned("ep=2", "tp=1")
    with pytest.raises(InfeasibleError, match=r"autopar\.experts of layers\.0"):
        planned("ep=8", "tp=8", ranks=8)
    with pytest.raises(UsageError, match="ep splits the experts of a model"):
        estimate(mlp(), cluster=Cluster.parse("cpu:1x4"), global_batch_size=16, pins=["ep=2"])


class Balanced(torch.nn.Module):
    """A product of two means over tokens, as auxiliary losses of routers are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.layer = Layer(True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.embed(ids))
        shares = self.layer.router(x).softmax(-1)
        counts = torch.nn.functional.one_hot(shares.argmax(-1), 4).float()
        return x.square().mean() + (counts.mean((0, 1)) * shares.mean((0, 1))).sum()


def test_an_auxiliary_loss_is_no_mean_of_means() -> None:
    graph = trace(Balanced(), (torch.zeros((4, 8), dtype=torch.int64),))
    with pytest.raises(RuleError, match=r"aten\.mul\.Tensor.*samples are independent up to the loss"):
        estimate(graph, cluster=Cluster.parse("cpu:1x4"), global_batch_size=16, pins=["dp=4"])


def test_ep_is_no_axis() -> None:
    assert Mesh(tp=2, ep=2).world_size == 2

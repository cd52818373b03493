"""Blocks that are priced once for several layouts cost what they cost in each layout priced alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import api
from autopar.cost.model import BlockCost, CostModel
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.models.resolve import resolve_model
from autopar.plan.plan import BF16
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import LayoutKey, PricedLayout, TypedLayout
from autopar.planner.sharding.energy import Weights
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space

CLUSTER = Cluster.parse("h100-sxm5-80gb:1x8")


@pytest.fixture(scope="module")
def graph() -> Graph:  # 66 words do not divide by 4: the vocabulary is padded where it is split
    source = resolve_model("gpt:layers=4,hidden=32,heads=4,vocab=66", sequence_length=16)
    return api.trace(source.model, example_inputs=source.example_inputs, precision="bf16", name=source.name)


def layouts_of(graph: Graph) -> Layouts:
    model = CostModel(CLUSTER, BF16, "adamw")
    return Layouts(graph, model, global_batch_size=64, pins=Pins.parse(()), space=load_space("wide"))


def options_of(layouts: Layouts, split: LayoutKey) -> list[PricedLayout]:
    """Layouts that prices of memory and of sums far apart make best."""
    weights = [
        Weights(per_step_s=step, saved_byte=price, state_byte=price)
        for step in (0.01, 10.0)
        for price in (0.0, 1e-9, 1e-7, 1e-5, 1e-3)
    ]
    solutions = {solution.signature: solution for solution in layouts.solver(split, "").solve_all(weights)}
    return [layouts.price(TypedLayout(key=split, kind="", solution=solution)) for solution in solutions.values()]


def unnamed(cost: BlockCost) -> BlockCost:
    """Equal blocks differ in the names of the parameters that they alone read."""
    return replace(cost, parameters=tuple(p if p.shared else replace(p, name="") for p in cost.parameters))


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 4])
def test_costs_are_those_of_each_layout_alone(graph: Graph, tp: int, micro_batch_size: int) -> None:
    layouts, split = layouts_of(graph), LayoutKey(micro_batch_size=micro_batch_size, tp=tp)
    options = options_of(layouts, split)
    assert len(options) > 1
    for option in options:
        local = layouts.local_graph(option)
        alone = [
            layouts.model.price(layouts.model.block_work(local, block), layouts.graphs.mesh(split))
            for block in local.blocks
        ]
        first = [alone[option.keys.index(key)] for key in option.keys]
        assert [unnamed(cost) for cost in option.costs] == [unnamed(cost) for cost in first]
        assert option.prelude_s == layouts.model.prelude_time_s(local)

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from autopar import api
from autopar.errors import PlanError, UsageError
from autopar.lower.program import lower
from autopar.plan.file import plan_from_dict, plan_to_dict
from autopar.plan.plan import Plan
from autopar.plan.text import diff_plans
from autopar.report.summaries import plan_summary
from autopar.util.files import dumps
from tests.support.clusters import two_kinds
from tests.support.planner.graphs import mlp
from tests.support.said import refuses
from tests.support.small_models import model_of


@pytest.fixture(scope="module")
def plan() -> Plan:
    pins = ["data_shares=3-1", "zero=1", "dp_replicate=1"]
    return api.estimate(mlp(layers=2), cluster=two_kinds(2, 2), global_batch_size=16, pins=pins)


def test_shares_come_back_from_a_file_and_say_whose_samples_are_whose(plan: Plan) -> None:
    again = plan_from_dict(json.loads(dumps(plan_to_dict(plan))))
    assert again == plan
    assert (again.data_shares, again.micro_batch_size, again.num_micro_batches) == ((3, 1), 3, 2)
    assert [again.micro_batch_of(rank) for rank in range(4)] == [3, 3, 1, 1]
    assert [again.samples_of(rank) for rank in range(4)] == [range(6), range(6, 12), range(12, 14), range(14, 16)]
    assert plan_summary(plan)["data_shares"] == [3, 1]
    assert "16 = 2 micro-batches x (2 x 3 on cpu + 2 x 1 on cpu-slow) samples" in str(plan)
    assert "slowest device sets the pace" not in str(plan)


def test_equal_shares_are_not_in_the_file(plan: Plan) -> None:
    predicted = replace(plan.predicted, memory=plan.predicted.memory[:1], memory_limits_bytes=())
    equal = replace(plan, data_shares=(), micro_batch_size=2, predicted=predicted)
    assert "data_shares" not in plan_to_dict(equal)
    assert plan_from_dict(plan_to_dict(equal)) == equal
    assert [equal.samples_of(rank) for rank in range(4)] == [range(i, i + 4) for i in range(0, 16, 4)]
    changes = [str(change) for change in diff_plans(equal, plan) if not change.path.startswith("predicted.")]
    assert changes == ["micro_batch_size: 2 -> 3", "data_shares: [] -> [3, 1]"]


def shares(*value: int) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(data_shares=list(value), micro_batch_size=max(value))


BAD: list[tuple[Callable[[dict[str, Any]], None], str]] = [
    (shares(3), "Expected a share for each of 2 node groups, got 3."),
    (shares(3, 0), "Expected at least one sample for every data rank, got 3-0"),
    (shares(2, 2), "Expected shares that differ, got 2-2. Pin micro_batch=2"),
    (shares(3, 2), "divides the global batch 16, got 2 x 3 + 2 x 2 = 10"),
    (lambda data: data.update(groups=[]), "Expected node groups that differ, got 3-1"),
    (
        lambda data: data.update(micro_batch_size=1),
        "'micro_batch_size' does not fit the plan. Expected 3, the largest of data_shares",
    ),
    (
        lambda data: data["predicted"]["memory"][0].update(group=2),
        "'predicted.memory[0].group' does not fit the plan. Expected a group that data_shares names, got 2",
    ),
    (
        lambda data: data["mesh"].update(dp_shard=2, tp=2),
        "Expected data parallelism alone (pp=1, cp=1, tp=1 and ep_data=1) beside unequal shares, got dp_shard=2 x tp=2",
    ),
]


@pytest.mark.parametrize(("change", "expected"), BAD, ids=[text[:30] for _, text in BAD])
def test_broken_shares_are_named(plan: Plan, change: Callable[[dict[str, Any]], None], expected: str) -> None:
    data = json.loads(dumps(plan_to_dict(plan)))
    change(data)
    refuses(PlanError, re.escape(expected), plan_from_dict, data, place="p.json")


def test_each_rank_lowers_its_own_micro_batch(plan: Plan) -> None:
    graph = mlp(layers=2)
    assert [lower(plan, graph, rank=rank).graph.batch_size for rank in range(4)] == [3, 3, 1, 1]


def test_samples_that_meet_are_shared_equally() -> None:
    parts = {"inner": nn.Linear(4, 4), "norm": nn.BatchNorm1d(4)}
    model = model_of(lambda self, x: self.norm(self.inner(x)).square().mean(), **parts)
    graph = api.trace(model, example_inputs={"x": torch.randn(8, 4)}, global_batch_size=8)
    cluster = two_kinds(1, 1, factor=3.0)
    found = api.search(graph, cluster=cluster, global_batch_size=8, pins=["dp=2"])
    assert not found.data_shares
    with pytest.raises(UsageError, match=r"pin 'data_shares=6-2': Samples .* all data ranks must take equal numbers"):
        api.search(graph, cluster=cluster, global_batch_size=8, pins=["data_shares=6-2"])
    with pytest.raises(PlanError, match=r"norm: Samples .* cannot take the unequal shares 6-2"):
        lower(replace(found, data_shares=(6, 2), micro_batch_size=6), graph)

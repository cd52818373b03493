"""What data ranks with shares of their own take: each group as on a cluster of its own devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Plan
from tests.support.clusters import of_one, two_kinds
from tests.support.planner.graphs import mlp


@pytest.fixture(scope="module")
def graph() -> Graph:
    return mlp(layers=4, batch=2, width=64, hidden=256)


def estimate(graph: Graph, cluster: Cluster, batch: int, *pins: str) -> Plan:
    return api.estimate(graph, cluster=cluster, global_batch_size=batch, pins=["dp_replicate=1", "tp=1", "pp=1", *pins])


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("shares", [(3, 1), (1, 3)])
def test_the_step_is_that_of_the_slower_group_on_its_own_devices(
    graph: Graph, zero: int, shares: tuple[int, int]
) -> None:
    cluster, batch = two_kinds(factor=2.0), 16
    mixed = estimate(graph, cluster, batch, f"zero={zero}", f"data_shares={shares[0]}-{shares[1]}")
    alone = [
        estimate(graph, of_one(cluster, group, num_nodes=2), 8 * share, f"zero={zero}", f"micro_batch={share}")
        for group, share in enumerate(shares)
    ]
    assert {plan.num_micro_batches for plan in (mixed, *alone)} == {2}
    slower = max(alone, key=lambda plan: plan.predicted.step_time_s)
    assert mixed.predicted.step_time_s == pytest.approx(slower.predicted.step_time_s, rel=1e-12)
    assert mixed.predicted.breakdown == slower.predicted.breakdown
    assert mixed.predicted.peak_memory_bytes == max(plan.predicted.peak_memory_bytes for plan in alone)
    done = mixed.model.flops_per_sample * batch / mixed.predicted.step_time_s
    peaks = [2 * group.device.rate("float32").datasheet_flops_per_s for group in cluster.groups]
    assert mixed.predicted.mfu == pytest.approx(done / sum(peaks))


def test_each_group_has_its_own_memory(graph: Graph) -> None:
    small = 500 * 2**20
    cluster = two_kinds(factor=2.0, slow_memory=small)
    plan = estimate(graph, cluster, 16, "zero=1", "data_shares=3-1")
    alone = [
        estimate(graph, of_one(cluster, group, num_nodes=2), 8 * share, "zero=1", f"micro_batch={share}")
        for group, share in enumerate(plan.data_shares)
    ]
    assert [replace(m, group=0) for m in plan.predicted.memory] == [own.predicted.memory[0] for own in alone]
    assert [plan.memory_of(rank)[0].group for rank in range(4)] == [0, 0, 1, 1]
    limits = (cluster.groups[0].device.memory_bytes, small)
    assert plan.predicted.memory_limits_bytes == limits
    assert plan.predicted.memory_limit_bytes == limits[0]  # of the largest peak
    assert plan.predicted.fits
    tight = replace(plan.predicted, memory_limits_bytes=(limits[0], plan.predicted.memory[1].total - 2))
    assert not tight.fits

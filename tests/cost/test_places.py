from collections.abc import Sequence
from dataclasses import replace

import pytest

from autopar import api
from autopar.cost.network.collectives import CollectiveModel
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from tests.support.clusters import of_one, two_kinds
from tests.support.planner.graphs import mlp

STAGES = ["pp=2", "dp_replicate=1", "dp_shard=2", "tp=1", "zero=1", "micro_batch=2", "schedule=1F1B"]
STAGES += ["stage@start=0", "stage@layers.0-2=0", "stage@layers.3-5=1", "stage@loss=1"]
DATA = ["pp=1", "dp_replicate=1", "tp=1"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return mlp(layers=6, batch=2, width=64, hidden=256)


def estimate(graph: Graph, cluster: Cluster, *pins: str, batch: int = 16) -> Plan:
    return api.estimate(graph, cluster=cluster, global_batch_size=batch, pins=pins)


def with_slower(cluster: Cluster, link: str) -> Cluster:
    """The second group has a ``link`` of a tenth of the bandwidth."""
    first, second = cluster.groups
    own = getattr(second, link)
    slower = replace(own, bandwidth_bytes_per_s=own.bandwidth_bytes_per_s / 10)
    return replace(cluster, groups=(first, replace(second, **{link: slower})))


def each_alone(graph: Graph, cluster: Cluster, shares: Sequence[int], zero: int) -> list[Plan]:
    """The plans of clusters of one of two groups each, for as many samples as that has."""
    return [
        estimate(graph, of_one(cluster, i, num_nodes=2), *DATA, f"zero={zero}", f"micro_batch={share}", batch=8 * share)
        for i, share in enumerate(shares)
    ]


def test_a_stage_takes_what_it_takes_on_its_own_device(graph: Graph) -> None:
    cluster = two_kinds(factor=3.0)
    mixed = estimate(graph, cluster, *STAGES)
    fast, slow = (estimate(graph, of_one(cluster, group, num_nodes=2), *STAGES) for group in (0, 1))
    assert mixed.predicted.stage_times == (fast.predicted.stage_times[0], slow.predicted.stage_times[1])
    for rank, own in enumerate((fast, slow)):
        assert mixed.predicted.memory[rank] == own.predicted.memory[rank]
    assert fast.predicted.step_time_s < mixed.predicted.step_time_s <= slow.predicted.step_time_s


def test_a_stage_on_both_kinds_runs_as_the_slowest(graph: Graph) -> None:
    cluster = two_kinds(fast=1, slow=3, factor=3.0)
    mixed, slow = estimate(graph, cluster, *STAGES), estimate(graph, of_one(cluster, 1, num_nodes=1), *STAGES)
    assert mixed.devices_of(0) == ("cpu", "cpu-slow")
    assert [f for f, _ in mixed.predicted.stage_times] == pytest.approx([f for f, _ in slow.predicted.stage_times])


def test_messages_and_collectives_of_a_stage_feel_its_own_links() -> None:
    cluster = with_slower(two_kinds(fast=2, slow=6), "nic")
    collectives, mesh = CollectiveModel(cluster), Mesh(pp=4, tp=2)
    times = [collectives.send_time_s(1e6, mesh, rank) for rank in range(4)]
    assert times[0] > 2 * times[1] == 2 * times[2]
    assert collectives.send_time_s(1e6, mesh) == max(times)
    cluster = with_slower(two_kinds(fast=4, slow=4), "intra_node")
    mesh = Mesh(pp=2, dp_shard=2, tp=2)
    whole = CollectiveModel(cluster).time_s("all_reduce", 1e7, mesh, ("tp",))
    parts = [CollectiveModel(cluster, frozenset({i})).time_s("all_reduce", 1e7, mesh, ("tp",)) for i in range(2)]
    assert parts[0] < parts[1] == whole


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("shares", [(3, 1), (1, 3)])
def test_the_step_is_that_of_the_slower_group_alone(graph: Graph, zero: int, shares: tuple[int, int]) -> None:
    cluster = two_kinds(factor=2.0)
    mixed = estimate(graph, cluster, *DATA, f"zero={zero}", f"data_shares={shares[0]}-{shares[1]}")
    alone = each_alone(graph, cluster, shares, zero)
    assert {plan.num_micro_batches for plan in (mixed, *alone)} == {2}
    slower = max(alone, key=lambda plan: plan.predicted.step_time_s)
    assert mixed.predicted.step_time_s == pytest.approx(slower.predicted.step_time_s, rel=1e-12)
    assert mixed.predicted.breakdown == slower.predicted.breakdown
    assert mixed.predicted.peak_memory_bytes == max(plan.predicted.peak_memory_bytes for plan in alone)
    done = mixed.model.flops_per_sample * 16 / mixed.predicted.step_time_s
    peaks = [2 * group.device.rate("float32").datasheet_flops_per_s for group in cluster.groups]
    assert mixed.predicted.mfu == pytest.approx(done / sum(peaks))


def test_each_group_has_its_own_memory(graph: Graph) -> None:
    small = 500 * 2**20
    cluster = two_kinds(factor=2.0, slow_memory=small)
    plan = estimate(graph, cluster, *DATA, "zero=1", "data_shares=3-1")
    alone = each_alone(graph, cluster, plan.data_shares, 1)
    assert [replace(m, group=0) for m in plan.predicted.memory] == [own.predicted.memory[0] for own in alone]
    assert [plan.memory_of(rank)[0].group for rank in range(4)] == [0, 0, 1, 1]
    limits = (cluster.groups[0].device.memory_bytes, small)
    assert plan.predicted.memory_limits_bytes == limits
    assert plan.predicted.memory_limit_bytes == limits[0]  # of the largest peak
    assert plan.predicted.fits
    tight = replace(plan.predicted, memory_limits_bytes=(limits[0], plan.predicted.memory[1].total - 2))
    assert not tight.fits

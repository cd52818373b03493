"""Each pipeline rank is priced on the devices that it lies on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import api
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.network.placement import places_of
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from tests.support.clusters import of_one, two_kinds
from tests.support.planner.graphs import mlp

PINS = ["pp=2", "dp_replicate=1", "dp_shard=2", "tp=1", "zero=1", "micro_batch=2", "schedule=1F1B"]
CUT = ["stage@start=0", "stage@layers.0-2=0", "stage@layers.3-5=1", "stage@loss=1"]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return mlp(layers=6, batch=2, width=64, hidden=256)


def estimate(graph: Graph, cluster: Cluster, *more: str) -> Plan:
    return api.estimate(graph, cluster=cluster, global_batch_size=16, pins=[*PINS, *CUT, *more])


def test_pipeline_ranks_lie_on_the_groups_of_their_ranks() -> None:
    cluster = two_kinds(fast=2, slow=6)
    assert places_of(Mesh(pp=4, tp=2), cluster) == (frozenset({0}), *[frozenset({1})] * 3)
    assert places_of(Mesh(pp=2, tp=4), cluster) == (frozenset({0, 1}), frozenset({1}))
    assert places_of(Mesh(tp=8), cluster) == (frozenset({0, 1}),)


def test_a_stage_takes_what_it_takes_on_its_own_device(graph: Graph) -> None:
    cluster = two_kinds(factor=3.0)
    mixed = estimate(graph, cluster)
    fast, slow = (estimate(graph, of_one(cluster, group, num_nodes=2)) for group in (0, 1))
    assert mixed.predicted.stage_times == (fast.predicted.stage_times[0], slow.predicted.stage_times[1])
    for rank, own in enumerate((fast, slow)):
        assert mixed.predicted.memory[rank] == own.predicted.memory[rank]
    assert fast.predicted.step_time_s < mixed.predicted.step_time_s <= slow.predicted.step_time_s


def test_a_stage_on_both_kinds_runs_as_the_slowest(graph: Graph) -> None:
    cluster = two_kinds(fast=1, slow=3, factor=3.0)
    mixed, slow = estimate(graph, cluster), estimate(graph, of_one(cluster, 1, num_nodes=1))
    assert mixed.devices_of(0) == ("cpu", "cpu-slow")
    assert [f for f, _ in mixed.predicted.stage_times] == pytest.approx([f for f, _ in slow.predicted.stage_times])


def test_utilisation_counts_what_all_devices_could_do(graph: Graph) -> None:
    cluster = two_kinds(factor=3.0)
    plan = estimate(graph, cluster)
    peaks = [group.device.rate("float32").datasheet_flops_per_s * 2 for group in cluster.groups]
    done = plan.model.flops_per_sample * 16 / plan.predicted.step_time_s
    assert plan.predicted.mfu == pytest.approx(done / sum(peaks))


def test_a_message_feels_the_link_between_its_two_stages() -> None:
    cluster = two_kinds(fast=2, slow=6)
    slower = replace(cluster.groups[1].nic, bandwidth_bytes_per_s=cluster.groups[1].nic.bandwidth_bytes_per_s / 10)
    cluster = replace(cluster, groups=(cluster.groups[0], replace(cluster.groups[1], nic=slower)))
    collectives, mesh = CollectiveModel(cluster), Mesh(pp=4, tp=2)
    times = [collectives.hop_time_s(1e6, mesh, rank) for rank in range(4)]
    assert times[0] > 2 * times[1] == 2 * times[2]
    assert collectives.send_time_s(1e6, mesh) == max(times)


def test_collectives_of_a_stage_are_those_of_its_own_links() -> None:
    cluster = two_kinds(fast=4, slow=4)
    link = cluster.groups[1].intra_node
    slower = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / 10)
    cluster = replace(cluster, groups=(cluster.groups[0], replace(cluster.groups[1], intra_node=slower)))
    mesh = Mesh(pp=2, dp_shard=2, tp=2)
    whole = CollectiveModel(cluster).time_s("all_reduce", 1e7, mesh, ("tp",))
    parts = [CollectiveModel(cluster, frozenset({i})).time_s("all_reduce", 1e7, mesh, ("tp",)) for i in range(2)]
    assert parts[0] < parts[1] == whole

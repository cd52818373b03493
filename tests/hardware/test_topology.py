"""The fabric of a cluster: tiers and bottlenecks of groups of ranks, against what its tree says one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.network.placement import shapes_of
from autopar.errors import UsageError
from autopar.hardware.cluster import NETWORK, Cluster, Tier
from autopar.hardware.link import Link
from autopar.hardware.topology import Fabric

BASE = Cluster.parse("a100-sxm4-80gb:12x4")


def uplink(rate: float, latency_s: float, half: float = 0.0) -> Link:
    return Link(
        name="up", bandwidth_bytes_per_s=rate, latency_s=latency_s, half_bandwidth_bytes=half, provenance="test"
    )


RACKS_AND_PODS = replace(
    BASE,
    groups=(
        replace(BASE.groups[0], num_nodes=4, nics_per_node=1),
        replace(BASE.groups[0], num_nodes=8, nics_per_node=2, nic=uplink(9e9, 5e-6, 7.0)),
    ),
    tiers=(
        Tier(name="rack", num_nodes=2, uplink=uplink(11e9, 1e-6)),
        Tier(name="pod", num_nodes=6, uplink=uplink(8e9, 2e-6)),
    ),
)


def test_the_tree_has_every_node_and_switch_below_the_network() -> None:
    fabric = Fabric(RACKS_AND_PODS)
    assert networkx.is_arborescence(fabric.tree.reverse())
    assert [level.name for level in fabric.levels] == ["node", "rack", "pod"]
    assert [len(level.rate_bytes_per_s) for level in fabric.levels] == [12, 6, 2]
    assert fabric.nodes.tolist() == [rank // 4 for rank in range(48)]
    assert networkx.shortest_path(fabric.tree, "node:7", NETWORK) == ["node:7", "rack:3", "pod:1", NETWORK]
    assert Fabric(Cluster.parse("cpu:1x4")).tier_of([0, 3]) == "node"


def test_tiers_and_links_between_ranks() -> None:
    ranks = {(5,): "device", (0, 3): "node", (0, 7): "rack", (0, 8): "pod", (20, 24): NETWORK, (0, 1, 47): NETWORK}
    assert {own: RACKS_AND_PODS.tier_of(own) for own in ranks} == ranks
    assert RACKS_AND_PODS.link_between(0, 3) == BASE.groups[0].intra_node
    nic = BASE.groups[0].nic
    inside, across = RACKS_AND_PODS.link_between(0, 7), RACKS_AND_PODS.link_between(0, 47)
    assert inside.bandwidth_bytes_per_s == nic.bandwidth_bytes_per_s
    assert inside.latency_s == pytest.approx(nic.latency_s)
    assert across.bandwidth_bytes_per_s == 8e9
    assert across.latency_s == pytest.approx((nic.latency_s + 5e-6) / 2 + 1e-6 + 2e-6)
    graph = RACKS_AND_PODS.topology()
    path = networkx.shortest_path(graph, "device:0", "device:47")
    assert sum(graph.edges[edge]["latency_s"] for edge in pairwise(path)) == pytest.approx(across.latency_s)
    assert graph.nodes["device:47"] == {"kind": "device", "device": BASE.groups[0].device.name}


def by_hand(group: list[int], groups: list[list[int]]) -> tuple[float, float]:
    """Egress and delay of one group beside others, by walking up the tree from each of its nodes."""
    cluster, tree = RACKS_AND_PODS, Fabric(RACKS_AND_PODS).tree
    paths = [[networkx.shortest_path(tree, f"node:{cluster.node_of(r)}", NETWORK) for r in own] for own in groups]
    mine = paths[groups.index(group)]
    egress, latency_s = float("inf"), 0.0
    for depth in range(3):
        if len({path[depth] for path in mine}) == 1:
            continue
        latencies = []
        for domain, members in Counter(path[depth] for path in mine).items():
            others = [own for own in paths if any(p[depth] == domain for p in own)]
            leaving = sum(len({p[depth] for p in own}) > 1 for own in others)
            (edge,) = (data for _, _, data in tree.out_edges(domain, data=True))
            share = min(members, edge["num_links"] / leaving)
            egress = min(egress, edge["link"].rate_bytes_per_s * share)
            latencies.append(edge["link"].latency_s)
        latency_s += max(latencies)
    return egress, latency_s


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(48)), size=st.sampled_from([2, 3, 4, 6, 8, 16]))
def test_the_bottleneck_of_a_group_is_that_of_the_links_on_its_way(order: list[int], size: int) -> None:
    groups = [order[i : i + size] for i in range(0, 48, size)]
    wanted = [pytest.approx(by_hand(group, groups)) for group in groups]
    found = [(shape.egress_bytes_per_s, shape.inter_latency_s) for shape in shapes_of(groups, RACKS_AND_PODS)]
    assert all(any(one == other for other in wanted) for one in found)
    assert all(any(one == other for one in found) for other in wanted)


@pytest.mark.parametrize(
    ("name", "num_nodes", "says"),
    [("rack", 4, "got rack, rack"), ("network", 4, "got rack, network"), ("pod", 3, "pod of 3 nodes over rack of 2")],
)
def test_tiers_that_are_no_tree_are_refused(name: str, num_nodes: int, says: str, tmp_path: Path) -> None:
    data = RACKS_AND_PODS.to_dict()
    data["tier"][1] |= {"name": name, "num_nodes": num_nodes}
    with pytest.raises(UsageError, match=says):
        Cluster.from_dict(data)

"""The topology of a cluster as a graph of devices, cards and switches.

:func:`topology` has every device, card and switch, for people and their tools. :class:`Fabric` is the tree of switches above the nodes; its
tiers give the bottlenecks of groups of ranks (:mod:`autopar.cost.network.placement`). networkx is only imported for graphs, as a search
needs only the tiers.

The delay of a link is that of a message that goes up through it and down through an equal one on the other side. So an edge of
:func:`topology` has half of it, and the delays on a path add up to the one-way delay.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autopar.hardware.cluster import NETWORK, Cluster
from autopar.hardware.link import Link

if TYPE_CHECKING:
    import networkx

NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """The domains of one tier, each with a number of equal links to the next tier.

    Attributes:
        name: of the tier; ``node`` for the nodes themselves.
        domains: for each node of the cluster the number of its domain, [nodes].
        rate_bytes_per_s, latency_s, half_bandwidth_bytes: of one link of each domain, [domains].
        num_links: of each domain, [domains].
    """

    name: str
    domains: NDArray[np.int64]
    rate_bytes_per_s: NDArray[np.float64]
    latency_s: NDArray[np.float64]
    half_bandwidth_bytes: NDArray[np.float64]
    num_links: NDArray[np.float64]


class Fabric:
    """The tree of switches of a cluster; its leaves are the nodes, its root the network that connects everything.

    Attributes:
        cluster: the cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @cached_property
    def nodes(self) -> NDArray[np.int64]:
        """The node of each rank, [ranks]."""
        groups = self.cluster.groups
        per_node = np.repeat([group.devices_per_node for group in groups], [group.num_nodes for group in groups])
        return np.repeat(np.arange(len(per_node)), per_node)

    @cached_property
    def tree(self) -> networkx.DiGraph[str]:
        """An edge from each node and switch to its parent, with ``link`` (:class:`Link`) and ``num_links``."""
        import networkx

        tree: networkx.DiGraph[str] = networkx.DiGraph()
        node = 0
        for group in self.cluster.groups:
            for _ in range(group.num_nodes):
                below, link, count = _name(NODE, node), group.nic, group.nics_per_node
                for tier in self.cluster.tiers:
                    switch = _name(tier.name, node // tier.num_nodes)
                    tree.add_edge(below, switch, link=link, num_links=count)
                    below, link, count = switch, tier.uplink, 1
                tree.add_edge(below, NETWORK, link=link, num_links=count)
                node += 1
        return tree

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The tiers below the network, nodes first; computed without the tree, as searches need them and networkx imports slowly."""
        per_node = [(group.nic, group.nics_per_node) for group in self.cluster.groups for _ in range(group.num_nodes)]
        nodes = np.arange(len(per_node))
        found = [_level(NODE, nodes, per_node)]
        for tier in self.cluster.tiers:
            domains = nodes // tier.num_nodes
            found.append(_level(tier.name, domains, [(tier.uplink, 1)] * (int(domains[-1]) + 1)))
        return tuple(found)

    def tier_of(self, ranks: Iterable[int]) -> str:
        """Return the innermost tier that holds all ranks: ``device``, ``node``, the name of a tier of switches, or ``network``."""
        members = set(ranks)
        nodes = [self.cluster.node_of(rank) for rank in members]
        if len(nodes) <= 1:
            return "device"
        return next((level.name for level in self.levels if len(set(level.domains[nodes].tolist())) == 1), NETWORK)

    def link_between(self, rank: int, other: int) -> Link:
        """Return the link that limits a single message from ``rank`` to ``other``: the narrowest on the path, with the sum of the delays."""
        ours, theirs = self.cluster.node_of(rank), self.cluster.node_of(other)
        if ours == theirs:
            return self.cluster.group_of(rank).intra_node
        import networkx

        both_ways = self.tree.to_undirected(as_view=True)
        path = networkx.shortest_path(both_ways, _name(NODE, ours), _name(NODE, theirs))
        links: list[Link] = [both_ways.edges[edge]["link"] for edge in pairwise(path)]
        narrowest = min(links, key=lambda link: link.bandwidth_bytes_per_s)
        return replace(narrowest, latency_s=sum(link.latency_s for link in links) / 2)


def _level(name: str, domains: NDArray[np.int64], up: Sequence[tuple[Link, int]]) -> Level:
    """Return a tier of these domains, each with a number of equal uplinks."""
    links = [link for link, _ in up]
    return Level(
        name=name,
        domains=domains,
        rate_bytes_per_s=np.array([link.rate_bytes_per_s for link in links]),
        latency_s=np.array([link.latency_s for link in links]),
        half_bandwidth_bytes=np.array([link.half_bandwidth_bytes for link in links]),
        num_links=np.array([count for _, count in up], dtype=float),
    )


def topology(cluster: Cluster) -> networkx.Graph[str]:
    """Devices, node switches, cards and switches of a cluster as a graph.

    Nodes have ``kind`` (``device``, ``switch``, ``nic``), devices also ``device``, the name of their profile. Edges have ``link``,
    the name of theirs, ``bandwidth_bytes_per_s`` of one direction and ``latency_s``. Names: ``device:RANK``, ``node:NODE``,
    ``nic:NODE.CARD``, ``TIER:DOMAIN`` and ``network``.
    """
    import networkx

    graph: networkx.Graph[str] = networkx.Graph()
    graph.add_node(NETWORK, kind="switch")
    fabric, rank, node = Fabric(cluster), 0, 0
    for below, above, link in fabric.tree.edges(data="link"):
        if not below.startswith(f"{NODE}:"):
            graph.add_node(below, kind="switch")
            graph.add_edge(below, above, **_edge(link))
    for group in cluster.groups:
        for _ in range(group.num_nodes):
            switch = _name(NODE, node)
            (above,) = fabric.tree.successors(switch)
            graph.add_node(switch, kind="switch")
            graph.add_node(above, kind="switch")
            for card in range(group.nics_per_node):
                graph.add_node(f"nic:{node}.{card}", kind="nic")
                graph.add_edge(f"nic:{node}.{card}", above, **_edge(group.nic))
            for index in range(group.devices_per_node):
                graph.add_node(f"device:{rank}", kind="device", device=group.device.name)
                graph.add_edge(f"device:{rank}", switch, **_edge(group.intra_node))
                card = index * group.nics_per_node // group.devices_per_node
                graph.add_edge(f"device:{rank}", f"nic:{node}.{card}", **{**_edge(group.nic), "latency_s": 0.0})
                rank += 1
            node += 1
    return graph


def _edge(link: Link) -> dict[str, Any]:
    bandwidth = link.bandwidth_bytes_per_s
    return {"link": link.name, "bandwidth_bytes_per_s": bandwidth, "latency_s": link.latency_s / 2}


def _name(tier: str, domain: int) -> str:
    return f"{tier}:{domain}"

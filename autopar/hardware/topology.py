"""The topology of a cluster as a graph of devices, cards and switches.

:func:`topology` has every device, card and switch, for people and their tools. :class:`Fabric` has the tiers of the tree of switches above
the nodes, which give the bottlenecks of groups of ranks (:mod:`autopar.cost.network.placement`); a search needs no graph.

The delay of a link is that of a message that goes up through it and down through an equal one on the other side. So an edge of
:func:`topology` has half of it, and the delays on a path add up to the one-way delay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    def levels(self) -> tuple[Level, ...]:
        """The tiers below the network, nodes first."""
        per_node = [(group.nic, group.nics_per_node) for group in self.cluster.groups for _ in range(group.num_nodes)]
        nodes = np.arange(len(per_node))
        found = [_level(NODE, nodes, per_node)]
        for tier in self.cluster.tiers:
            domains = nodes // tier.num_nodes
            found.append(_level(tier.name, domains, [(tier.uplink, 1)] * (int(domains[-1]) + 1)))
        return tuple(found)


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
    rank = node = 0
    for group in cluster.groups:
        for _ in range(group.num_nodes):
            here = f"{NODE}:{node}"
            switches = [*(f"{tier.name}:{node // tier.num_nodes}" for tier in cluster.tiers), NETWORK]
            graph.add_nodes_from((here, *switches), kind="switch")
            for tier, (below, above) in zip(cluster.tiers, pairwise(switches), strict=True):
                graph.add_edge(below, above, **_edge(tier.uplink))
            for card in range(group.nics_per_node):
                graph.add_node(f"nic:{node}.{card}", kind="nic")
                graph.add_edge(f"nic:{node}.{card}", switches[0], **_edge(group.nic))
            for index in range(group.devices_per_node):
                graph.add_node(f"device:{rank}", kind="device", device=group.device.name)
                graph.add_edge(f"device:{rank}", here, **_edge(group.intra_node))
                card = index * group.nics_per_node // group.devices_per_node
                graph.add_edge(f"device:{rank}", f"nic:{node}.{card}", **{**_edge(group.nic), "latency_s": 0.0})
                rank += 1
            node += 1
    return graph


def _edge(link: Link) -> dict[str, Any]:
    bandwidth = link.bandwidth_bytes_per_s
    return {"link": link.name, "bandwidth_bytes_per_s": bandwidth, "latency_s": link.latency_s / 2}

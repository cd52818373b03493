"""Where ranks lie: pipeline ranks on node groups, and groups of ranks on nodes and links.

The ranks of a group that share a node share its network cards, and so do groups that communicate at the same time. A group with m ranks on
a node of R cards, on which k groups communicate, leaves it with ``min(m * B_nic, R * B_nic / k)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InternalError, UsageError
from autopar.hardware.cluster import NODE, Cluster
from autopar.hardware.device import Device, HostLink
from autopar.hardware.link import Link
from autopar.plan.mesh import Mesh


def places_of(mesh: Mesh, cluster: Cluster) -> tuple[frozenset[int], ...]:
    """Return for each pipeline rank the positions of the node groups that its ranks lie on.

    >>> places_of(Mesh(pp=2, tp=4), Cluster.parse("h100-sxm5-80gb:1x8"))
    (frozenset({0}), frozenset({0}))
    """
    share, places = mesh.world_size // mesh.pp, []
    for rank in range(mesh.pp):
        first, groups = 0, []
        for i, group in enumerate(cluster.groups):
            if first < (rank + 1) * share and rank * share < first + group.num_devices:
                groups.append(i)
            first += group.num_devices
        places.append(frozenset(groups))
    return tuple(places)


def slowest(devices: Iterable[Device], dtype: str) -> Device:
    """Return the device with the lowest matmul rate.

    Raises:
        UsageError: a profile does not have the dtype.
    """
    return min(devices, key=lambda device: device.rate(dtype).ceiling_flops_per_s)


def peak_flops(mesh: Mesh, cluster: Cluster, dtype: str) -> float:
    """Return the FLOP/s of the mesh's devices by their datasheets."""
    total, remaining = 0.0, mesh.world_size
    for group in cluster.groups:
        taken = min(remaining, group.num_devices)
        total += group.device.rate(dtype).datasheet_flops_per_s * taken
        remaining -= taken
    return total


def check_kinds(cluster: Cluster) -> None:
    """Refuse clusters of CPUs and GPUs: what operators keep and the backend of the process group differ.

    Raises:
        UsageError: there are both.
    """
    kinds = {device.kind for device in cluster.devices}
    if len(kinds) > 1:
        raise UsageError(
            "The cluster mixes GPUs and CPUs",
            where=cluster.name,
            got=", ".join(f"{device.name} ({device.kind})" for device in cluster.devices),
            fix="Plan for the devices of one kind",
        )


def host_of(device: Device, devices: Iterable[Device]) -> HostLink:
    """Return the link for offloading, that of the slowest device to its host.

    Args:
        device: the slowest of ``devices``.
        devices: the devices, each of which needs a link to a host.

    Raises:
        UsageError: a device's profile has no link to a host.
    """
    missing = next((other.name for other in devices if other.host is None), None)
    if device.host is None or missing is not None:
        raise UsageError(
            f"Nothing can be offloaded to the host: the profile of {missing or device.name} has no link to it",
            fix="Pin offload=none, or add [device.host] to the profile (profiles/README.md)",
        )
    return device.host


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What determines the time of a collective of one group.

    Attributes:
        size: the number of ranks.
        num_nodes: the number of nodes that they lie on.
        ranks_per_node: the fewest ranks of the group on one of these nodes.
        intra_node: the slowest of their nodes' links.
        egress_bytes_per_s: the group's bandwidth out of a node (or out of a domain of switches); infinite on one node.
        inter_latency_s: the one-way delay between nodes; 0 on one node.
        half_bandwidth_bytes: the message size at half of the bandwidth of the card, or of an uplink where that is larger; 0 on one node.
    """

    size: int
    num_nodes: int
    ranks_per_node: int
    intra_node: Link
    egress_bytes_per_s: float = math.inf
    inter_latency_s: float = 0.0
    half_bandwidth_bytes: float = 0.0


def shapes_of(groups: Sequence[Sequence[int]], cluster: Cluster) -> tuple[GroupShape, ...]:
    """Return the distinct shapes of groups of ranks that communicate at the same time."""
    return _shapes(np.array(groups), Fabric(cluster))


def group_shape(
    mesh: Mesh, axes: tuple[str, ...], fabric: Fabric, only: frozenset[int] | None = None
) -> tuple[GroupShape, ...]:
    """Return the distinct shapes of the groups over ``axes``, all of which communicate at the same time.

    The ranks of the mesh are the cluster's first ones.

    Args:
        mesh: the mesh.
        axes: the axes over which the groups communicate.
        fabric: the fabric of the cluster.
        only: node groups whose shapes alone are returned, while all groups communicate; None: all shapes. With a pipeline these are the
            shapes of the pipeline ranks that lie on exactly these node groups. Without one they are those of the groups within them or, if
            there are none, of the groups with ranks there.

    Raises:
        UsageError: the mesh has more ranks than the cluster.
    """
    cluster = fabric.cluster
    if mesh.world_size > cluster.world_size:
        raise UsageError(
            f"The mesh has {mesh.world_size} ranks, but the cluster {cluster.name} has {cluster.world_size} devices",
            fix=f"Take degrees whose product is {cluster.world_size}, or a larger cluster",
        )
    names, degrees, axes = mesh.cut(axes)
    order = [i for i, axis in enumerate(names) if axis not in axes]
    order += [i for i, axis in enumerate(names) if axis in axes]
    ranks = np.arange(mesh.world_size).reshape(degrees).transpose(order).reshape(-1, mesh.size(axes))
    if only is None or "pp" in axes:
        return _shapes(ranks, fabric)
    return _shapes(ranks, fabric, _within(ranks, mesh.pp, cluster, only))


def _within(ranks: NDArray[Any], pp: int, cluster: Cluster, only: frozenset[int]) -> NDArray[np.bool_]:
    """Return which rows of ``ranks`` [groups, size], sorted by pipeline rank, :func:`group_shape` keeps."""
    places = np.repeat(np.arange(len(cluster.groups)), [group.num_devices for group in cluster.groups])[ranks]
    rows = places.reshape(pp, -1) if pp > 1 else places
    covers = np.array([set(row) <= only if pp == 1 else set(row) == only for row in rows.tolist()])
    if pp == 1 and not covers.any():
        covers = np.array([not only.isdisjoint(row) for row in rows.tolist()])
    keep = np.repeat(covers, len(ranks) // len(covers))
    if not keep.any():
        raise InternalError(f"No group of ranks lies on the node groups {sorted(only)}", where=cluster.name)
    return keep


def hop_shape(mesh: Mesh, fabric: Fabric, here: int) -> tuple[GroupShape, ...]:
    """Return the shapes of the pairs of ranks between which pipeline rank ``here`` and the next one send, all at the same time."""
    grid = np.arange(mesh.world_size).reshape(mesh.pp, -1)
    return _shapes(np.stack([grid[here], grid[(here + 1) % mesh.pp]], axis=1), fabric)


def _shapes(ranks: NDArray[Any], fabric: Fabric, keep: NDArray[np.bool_] | None = None) -> tuple[GroupShape, ...]:
    """Return the shapes of the rows of ``ranks`` [groups, size], or of those to ``keep`` while all communicate."""
    cluster, size = fabric.cluster, ranks.shape[1]
    first = cluster.groups[0]
    if int(ranks.max()) < first.devices_per_node:  # all on one node
        return (GroupShape(size=size, num_nodes=1, ranks_per_node=size, intra_node=first.intra_node),)
    nodes = fabric.nodes[ranks]
    columns = [*_spread(nodes), *_crossing(nodes, fabric)]
    table = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
    if keep is not None:
        table = table[keep]
    distinct = table[:1] if bool((table == table[0]).all()) else np.unique(table, axis=0)  # mostly all are equal
    shapes = []
    for num_nodes, fewest, slowest, egress, latency, half in distinct:
        shapes.append(
            GroupShape(
                size=size,
                num_nodes=int(num_nodes),
                ranks_per_node=int(fewest),
                intra_node=cluster.groups[int(slowest)].intra_node,
                egress_bytes_per_s=float(egress),
                inter_latency_s=float(latency),
                half_bandwidth_bytes=float(half),
            )
        )
    return tuple(shapes)


def _spread(nodes: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return for each group the number of its nodes and the fewest ranks on one of them."""
    _, pairs, counts = _members(nodes)
    num_nodes = np.bincount(pairs, minlength=len(nodes))
    fewest = np.full(len(nodes), nodes.shape[1])
    np.minimum.at(fewest, pairs, counts)
    return num_nodes, fewest


def _members(domains: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return the distinct (domain, group) pairs and how many ranks of the group lie in the domain."""
    count, size = domains.shape
    if size > 1 and not bool((domains[:, 1:] >= domains[:, :-1]).all()):
        domains = np.sort(domains, axis=1)
    begins = np.ones((count, size), dtype=bool)
    np.not_equal(domains[:, 1:], domains[:, :-1], out=begins[:, 1:])
    first = np.flatnonzero(begins)
    counts = np.diff(first, append=count * size)
    return domains.reshape(-1)[first], first // size, counts


def _crossing(nodes: NDArray[Any], fabric: Fabric) -> tuple[NDArray[Any], ...]:
    """Return for each group the index of its slowest node group, its egress, one-way delay and half-bandwidth size.

    A group that does not fit in a domain of a tier leaves each domain that it has ranks in. There each rank uses one link, as far as there
    are links, and shares them with the other groups that leave the domain (:class:`Fabric`).
    """
    groups = fabric.cluster.groups
    kinds = np.repeat(np.arange(len(groups)), [group.num_nodes for group in groups])
    order = np.argsort([-group.intra_node.bandwidth_bytes_per_s for group in groups], kind="stable")
    place = np.argsort(order)
    slowest = order[place[kinds[nodes]].max(axis=1)]
    egress = np.full(len(nodes), np.inf)
    latency, half_bandwidth = np.zeros(len(nodes)), np.zeros(len(nodes))
    for level in fabric.levels:
        domains = level.domains[nodes]
        crosses = domains.max(axis=1) > domains.min(axis=1)
        domain, group, counts = _members(domains)
        keep = crosses[group]
        domain, group, counts = domain[keep], group[keep], counts[keep]
        if len(domain):
            sharing = np.bincount(domain)[domain]
            shared = level.rate_bytes_per_s[domain] * np.minimum(counts, level.num_links[domain] / sharing)
            np.minimum.at(egress, group, shared)
            latency += np.where(crosses, level.latency_s[domains].max(axis=1), 0.0)
            half = np.where(crosses, level.half_bandwidth_bytes[domains].max(axis=1), 0.0)
            half_bandwidth = np.maximum(half_bandwidth, half)
    return slowest, egress, latency, half_bandwidth

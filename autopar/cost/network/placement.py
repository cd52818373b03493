"""Where ranks lie: pipeline ranks on node groups, and the ranks of a collective on nodes, with what siblings leave them of the links.

On a hierarchy the ranks of a group that share a node share its cards, and groups that communicate at the same time share
them as well: a group of m ranks a node, beside k - 1 siblings on a node of R cards, leaves it with
``min(m * B_nic, R * B_nic / k)``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InternalError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.device import Device, HostLink
from autopar.hardware.link import Link
from autopar.hardware.topology import Fabric
from autopar.plan.mesh import Mesh


def places_of(mesh: Mesh, cluster: Cluster) -> tuple[frozenset[int], ...]:
    """For each pipeline rank the node groups, by position, that its ranks lie on.

    >>> places_of(Mesh(pp=2, tp=4), Cluster.parse("h100-sxm5-80gb:1x8"))
    (frozenset({0}), frozenset({0}))
    """
    share, found = mesh.world_size // mesh.pp, []
    for rank in range(mesh.pp):
        first, own = 0, []
        for i, group in enumerate(cluster.groups):
            if first < (rank + 1) * share and rank * share < first + group.num_devices:
                own.append(i)
            first += group.num_devices
        found.append(frozenset(own))
    return tuple(found)


def slowest(devices: Iterable[Device], dtype: str) -> Device:
    """The device that multiplies matrices most slowly.

    Raises:
        UsageError: a profile does not know the dtype.
    """
    return min(devices, key=lambda device: device.rate(dtype).ceiling_flops_per_s)


def peak_flops(mesh: Mesh, cluster: Cluster, dtype: str) -> float:
    """What the devices of a mesh could compute in a second, by their datasheets."""
    total, left = 0.0, mesh.world_size
    for group in cluster.groups:
        taken = min(left, group.num_devices)
        total += group.device.rate(dtype).datasheet_flops_per_s * taken
        left -= taken
    return total


def check_kinds(cluster: Cluster) -> None:
    """Refuse CPUs beside GPUs: what an operator keeps, and the backend that joins the ranks, differ.

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
    """What offloading can use: the slowest device's link to its host.

    Args:
        device: the slowest of ``devices``.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """What decides the time of a collective of one group.

    Attributes:
        size: ranks.
        num_nodes: nodes that they stand on.
        ranks_per_node: fewest ranks of the group on one of those nodes.
        intra_node: the slowest of their nodes' links.
        egress_bytes_per_s: what the group gets out of a node (or of a domain of switches); infinite on one node.
        inter_latency_s: one-way delay between nodes; 0 on one node.
        half_bandwidth_bytes: message size at half of the bandwidth of the card, or of an uplink where that is larger; 0 on one node.
    """

    size: int
    num_nodes: int
    ranks_per_node: int
    intra_node: Link
    egress_bytes_per_s: float = math.inf
    inter_latency_s: float = 0.0
    half_bandwidth_bytes: float = 0.0


def shapes_of(groups: Sequence[Sequence[int]], cluster: Cluster) -> tuple[GroupShape, ...]:
    """The different shapes of groups of ranks that communicate at the same time."""
    return _shapes(np.array(groups), Fabric(cluster))


def group_shape(
    mesh: Mesh, axes: tuple[str, ...], fabric: Fabric, only: frozenset[int] | None = None
) -> tuple[GroupShape, ...]:
    """The different shapes of the groups over ``axes``, all of which communicate at the same time.

    Ranks of the mesh are the cluster's first ones.

    Args:
        fabric: of the cluster.
        only: shapes of the pipeline ranks that lie on these node groups, all of them and no others, while the others
            communicate as well; without a pipeline, of the groups over ``axes`` that lie within them, or where these are
            larger, of those that have ranks there. None: of all.

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
    """Which rows of ``ranks`` [groups, size], pipeline rank by pipeline rank, :func:`group_shape` asks for."""
    places = np.repeat(np.arange(len(cluster.groups)), [group.num_devices for group in cluster.groups])[ranks]
    rows = places.reshape(pp, -1) if pp > 1 else places
    covers = np.array([set(row) <= only if pp == 1 else set(row) == only for row in rows.tolist()])
    if pp == 1 and not covers.any():
        covers = np.array([not only.isdisjoint(row) for row in rows.tolist()])
    found = np.repeat(covers, len(ranks) // len(covers))
    if not found.any():
        raise InternalError(f"No group of ranks lies on the node groups {sorted(only)}", where=cluster.name)
    return found


def hop_shape(mesh: Mesh, fabric: Fabric, here: int) -> tuple[GroupShape, ...]:
    """The pairs of ranks between which pipeline rank ``here`` and the next one send, all at the same time."""
    grid = np.arange(mesh.world_size).reshape(mesh.pp, -1)
    return _shapes(np.stack([grid[here], grid[(here + 1) % mesh.pp]], axis=1), fabric)


def _shapes(ranks: NDArray[Any], fabric: Fabric, keep: NDArray[np.bool_] | None = None) -> tuple[GroupShape, ...]:
    """Shapes of the rows of ``ranks`` [groups, size], or of those to ``keep`` while the others communicate as well."""
    cluster, size = fabric.cluster, ranks.shape[1]
    first = cluster.groups[0]
    if int(ranks.max()) < first.devices_per_node:  # all on one node
        return (GroupShape(size=size, num_nodes=1, ranks_per_node=size, intra_node=first.intra_node),)
    nodes = fabric.nodes[ranks]
    columns = [*_spread(nodes), *_crossing(nodes, fabric)]
    table = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
    if keep is not None:
        table = table[keep]
    found = table[:1] if bool((table == table[0]).all()) else np.unique(table, axis=0)  # mostly all are alike
    shapes = []
    for num_nodes, fewest, slowest, egress, latency, half in found:
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
    """For each group the number of its nodes and the fewest ranks on one of them."""
    _, pairs, counts = _members(nodes)
    num_nodes = np.bincount(pairs, minlength=len(nodes))
    fewest = np.full(len(nodes), nodes.shape[1])
    np.minimum.at(fewest, pairs, counts)
    return num_nodes, fewest


def _members(domains: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """The distinct (domain, group) pairs and how many ranks of the group stand in the domain."""
    count, size = domains.shape
    if size > 1 and not bool((domains[:, 1:] >= domains[:, :-1]).all()):
        domains = np.sort(domains, axis=1)
    begins = np.ones((count, size), dtype=bool)
    np.not_equal(domains[:, 1:], domains[:, :-1], out=begins[:, 1:])
    first = np.flatnonzero(begins)
    counts = np.diff(first, append=count * size)
    return domains.reshape(-1)[first], first // size, counts


def _crossing(nodes: NDArray[Any], fabric: Fabric) -> tuple[NDArray[Any], ...]:
    """For each group: index of its slowest node group, egress, one-way delay between nodes, half-bandwidth size.

    A group that does not fit into a domain of a tier leaves each domain that it has ranks in: those ranks use a link each, as far
    as there are, beside the other groups that leave it (:mod:`autopar.hardware.topology`).
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
            beside = np.bincount(domain)[domain]
            shared = level.rate_bytes_per_s[domain] * np.minimum(counts, level.num_links[domain] / beside)
            np.minimum.at(egress, group, shared)
            latency += np.where(crosses, level.latency_s[domains].max(axis=1), 0.0)
            half = np.where(crosses, level.half_bandwidth_bytes[domains].max(axis=1), 0.0)
            half_bandwidth = np.maximum(half_bandwidth, half)
    return slowest, egress, latency, half_bandwidth

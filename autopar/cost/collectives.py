"""Time of one collective: the cheapest of the library's algorithms on the links that the group has.

Steps and volumes are those of NCCL's ``src/graph/tuning.cc`` and of the ring and tree algorithms; all constants stand in
``profiles/``. On a hierarchy the ranks of a group that share a node share its cards, and groups that communicate at the
same time share them as well: a group of m ranks a node, beside k - 1 siblings on a node of R cards, leaves it with
``min(m * B_nic, R * B_nic / k)``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.cluster import Cluster
from autopar.errors import UsageError
from autopar.links import Algorithm, Link
from autopar.measured import CollectiveTime
from autopar.mesh import Mesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


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
        half_bandwidth_bytes: of the card, message size at half of its bandwidth; 0 on one node.
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
    return _shapes(np.array(groups), cluster)


def group_shape(
    mesh: Mesh, axes: tuple[str, ...], cluster: Cluster, only: frozenset[int] | None = None
) -> tuple[GroupShape, ...]:
    """The different shapes of the groups over ``axes``, all of which communicate at the same time.

    Ranks of the mesh are the cluster's first ones.

    Args:
        only: shapes of the pipeline ranks that lie on these node groups, all of them and no others, while the others
            communicate as well; without a pipeline, of the groups over ``axes`` that lie within them. None: of all.

    Raises:
        UsageError: the mesh has more ranks than the cluster.
    """
    if mesh.world_size > cluster.world_size:
        raise UsageError(
            "the mesh fits the cluster",
            value=f"{mesh.world_size} ranks for {cluster.world_size} devices",
            place=cluster.name,
        )
    names, degrees, axes = mesh.cut(axes)
    order = [i for i, axis in enumerate(names) if axis not in axes]
    order += [i for i, axis in enumerate(names) if axis in axes]
    ranks = np.arange(mesh.world_size).reshape(degrees).transpose(order).reshape(-1, mesh.size(axes))
    if only is None or "pp" in axes:
        return _shapes(ranks, cluster)
    return _shapes(ranks, cluster, _within(ranks, mesh.pp, cluster, only))


def _within(ranks: NDArray[Any], pp: int, cluster: Cluster, only: frozenset[int]) -> NDArray[np.bool_]:
    """Which rows of ``ranks`` [groups, size], pipeline rank by pipeline rank, :func:`group_shape` asks for."""
    places = np.repeat(np.arange(len(cluster.groups)), [group.num_devices for group in cluster.groups])[ranks]
    rows = places.reshape(pp, -1) if pp > 1 else places
    covers = np.array([set(row) <= only if pp == 1 else set(row) == only for row in rows.tolist()])
    found = np.repeat(covers, len(ranks) // len(covers))
    if not found.any():
        raise UsageError("some group over the axes lies on these node groups", value=sorted(only), place=cluster.name)
    return found


def group_place(mesh: Mesh, axes: tuple[str, ...]) -> tuple[object, ...]:
    """Equal for axes of meshes that have the same groups: world size, and for each axis its degree and distance of ranks."""
    names, degrees, axes = mesh.cut(axes)
    found: list[tuple[int, int]] = []
    distance = 1
    for name, degree in zip(reversed(names), reversed(degrees), strict=True):
        if name in axes and degree > 1:
            if found and found[-1][0] * found[-1][1] == distance:  # neighbouring axes are one
                found[-1] = (found[-1][0], found[-1][1] * degree)
            else:
                found.append((distance, degree))
        distance *= degree
    return (distance, *found)


def send_shape(mesh: Mesh, cluster: Cluster) -> tuple[GroupShape, ...]:
    """The pairs of ranks between which neighbouring pipeline stages send, all at the same time.

    For pp of 1 there is none.
    """
    if mesh.pp == 1:
        return ()
    shapes: dict[GroupShape, None] = {}
    for here in range(mesh.pp):
        shapes |= dict.fromkeys(hop_shape(mesh, cluster, here))
    return tuple(shapes)


def hop_shape(mesh: Mesh, cluster: Cluster, here: int) -> tuple[GroupShape, ...]:
    """The pairs of ranks between which pipeline rank ``here`` and the next one send, all at the same time."""
    grid = np.arange(mesh.world_size).reshape(mesh.pp, -1)
    return _shapes(np.stack([grid[here], grid[(here + 1) % mesh.pp]], axis=1), cluster)


def _shapes(ranks: NDArray[Any], cluster: Cluster, keep: NDArray[np.bool_] | None = None) -> tuple[GroupShape, ...]:
    """Shapes of the rows of ``ranks`` [groups, size], or of those to ``keep`` while the others communicate as well."""
    nodes = _nodes(cluster)[ranks]
    columns = [*_spread(nodes), *_crossing(nodes, cluster)]
    table = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
    if keep is not None:
        table = table[keep]
    found = table[:1] if bool((table == table[0]).all()) else np.unique(table, axis=0)  # mostly all are alike
    size = ranks.shape[1]
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


def _nodes(cluster: Cluster) -> NDArray[Any]:
    """The node of each rank."""
    groups = cluster.groups
    per_node = np.repeat([group.devices_per_node for group in groups], [group.num_nodes for group in groups])
    return np.repeat(np.arange(len(per_node)), per_node)


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


def _crossing(nodes: NDArray[Any], cluster: Cluster) -> tuple[NDArray[Any], ...]:
    """For each group: index of its slowest node group, egress, one-way delay between nodes, half-bandwidth size."""
    kinds = np.repeat(np.arange(len(cluster.groups)), [group.num_nodes for group in cluster.groups])
    order = np.argsort([-group.intra_node.bandwidth_bytes_per_s for group in cluster.groups], kind="stable")
    place = np.argsort(order)
    slowest = order[place[kinds[nodes]].max(axis=1)]
    crosses = nodes.max(axis=1) > nodes.min(axis=1)
    card = np.array([group.nic.rate_bytes_per_s for group in cluster.groups])
    cards = np.array([group.nics_per_node for group in cluster.groups])
    egress = np.full(len(nodes), np.inf)
    domain, group, counts = _members(nodes)
    keep = crosses[group]
    domain, group, counts = domain[keep], group[keep], counts[keep]
    if len(domain):
        beside = np.bincount(domain)[domain]
        kind = kinds[domain]
        np.minimum.at(egress, group, card[kind] * np.minimum(counts, cards[kind] / beside))
    nic_latency = np.array([group.nic.latency_s for group in cluster.groups])
    half = np.array([group.nic.half_bandwidth_bytes for group in cluster.groups])
    latency = np.where(crosses, nic_latency[kinds[nodes]].max(axis=1), 0.0)
    _add_tiers(nodes, cluster, egress, latency)
    return slowest, egress, latency, np.where(crosses, half[kinds[nodes]].max(axis=1), 0.0)


def _add_tiers(nodes: NDArray[Any], cluster: Cluster, egress: NDArray[Any], latency: NDArray[Any]) -> None:
    """Narrow ``egress`` and lengthen ``latency`` of the groups that leave a domain of switches."""
    for tier in cluster.tiers:
        domains = nodes // tier.num_nodes
        crosses = domains.max(axis=1) > domains.min(axis=1)
        domain, group, _ = _members(domains)
        keep = crosses[group]
        domain, group = domain[keep], group[keep]
        if len(domain):
            beside = np.bincount(domain)[domain]
            np.minimum.at(egress, group, tier.uplink.rate_bytes_per_s / beside)
        latency[crosses] += tier.uplink.latency_s


@dataclass(frozen=True, slots=True)
class _Line:
    """One algorithm's time: ``latency_s + num_bytes * s_per_byte``."""

    latency_s: float
    s_per_byte: float


class CollectiveModel:
    """Times of collectives on one cluster; remembers what it has worked out.

    Args:
        only: node groups; see :func:`group_shape`.
    """

    def __init__(self, cluster: Cluster, only: frozenset[int] | None = None) -> None:
        self.cluster, self.only = cluster, only
        self._groups: dict[tuple[Mesh, tuple[str, ...]], tuple[GroupShape, ...]] = {}
        self._placed: dict[tuple[object, ...], tuple[GroupShape, ...]] = {}  # by what of a mesh decides
        self._lines: dict[tuple[str, int], tuple[GroupShape, tuple[_Line, ...]]] = {}  # kept, so that ids stay theirs
        self._measured = _measured_on(cluster)

    def time_s(self, kind: str, num_bytes: float, mesh: Mesh, axes: tuple[str, ...]) -> float:
        """Time of a collective over ``axes`` of the mesh while all its groups do the same.

        Args:
            kind: one of :data:`KINDS`.
            num_bytes: of the full tensor; of one rank's part for ``all_to_all``.
            mesh: whose ranks are the cluster's first ones.
            axes: mesh axes; a group of one rank costs nothing.

        Raises:
            UsageError: an unknown collective, or a mesh larger than the cluster.
        """
        shapes = self._groups.get((mesh, axes))
        if shapes is None:
            place = group_place(mesh, axes)
            if self.only is not None:  # which groups lie on the nodes that are priced depends on all of the mesh
                place = (mesh, axes)
            if place not in self._placed:
                self._placed[place] = group_shape(mesh, axes, self.cluster, self.only)
            shapes = self._groups[mesh, axes] = self._placed[place]
        return max(self.shape_time_s(kind, num_bytes, shape) for shape in shapes)

    @property
    def is_measured(self) -> bool:
        """Whether some times come from a table, and not from straight lines."""
        return bool(self._measured)

    def send_time_s(self, num_bytes: float, mesh: Mesh) -> float:
        """Time of the slowest message between neighbouring pipeline ranks, all of them sending at once."""
        return self.pair_time_s("send", num_bytes, mesh)

    def hop_time_s(self, num_bytes: float, mesh: Mesh, here: int) -> float:
        """Time of the slowest message between the ranks of pipeline rank ``here`` and those of the next one."""
        key = (mesh, ("send", str(here)))
        if key not in self._groups:
            self._groups[key] = hop_shape(mesh, self.cluster, here)
        return max(self.shape_time_s("send", num_bytes, shape) for shape in self._groups[key])

    def pair_time_s(self, kind: str, num_bytes: float, mesh: Mesh) -> float:
        """Time of a collective of two neighbouring pipeline ranks, the first and the last counted as such."""
        key = (mesh, ("send",))
        if key not in self._groups:
            place = ("send", mesh.pp, mesh.world_size)
            if place not in self._placed:
                self._placed[place] = send_shape(mesh, self.cluster)
            self._groups[key] = self._placed[place]
        return max((self.shape_time_s(kind, num_bytes, shape) for shape in self._groups[key]), default=0.0)

    def shape_time_s(self, kind: str, num_bytes: float, shape: GroupShape) -> float:
        """Time of a collective of one group."""
        if shape.size == 1 or num_bytes == 0:
            return 0.0
        if self._measured:
            found = self._measured.get((kind, shape.size, shape.num_nodes, shape.ranks_per_node))
            if found is not None:
                return found.time_s(num_bytes)
        known = self._lines.get((kind, id(shape)))
        if known is None:
            known = self._lines[kind, id(shape)] = shape, self._options(kind, shape)
        return min([line.latency_s + num_bytes * line.s_per_byte for line in known[1]])

    def _options(self, kind: str, shape: GroupShape) -> tuple[_Line, ...]:
        library = self.cluster.library
        kind = dict(library.implemented_as).get(kind, kind)
        if kind not in KINDS:
            raise UsageError("the collective is known", value=kind, remedy=f"known: {', '.join(KINDS)}")
        found = [
            _line(kind, shape, algorithm, self._bandwidth(kind, shape, algorithm))
            for algorithm in library.algorithms
            if (not algorithm.collectives or kind in algorithm.collectives) and self._serves(kind, shape, algorithm)
        ]
        if not found:
            raise UsageError(
                "the collective library has an algorithm for every collective", value=kind, place=library.name
            )
        return tuple(found)

    def _serves(self, kind: str, shape: GroupShape, algorithm: Algorithm) -> bool:
        if algorithm.name == "nvls":
            return shape.ranks_per_node > 1 and self._switch(kind, shape) is not None
        return algorithm.name != "tree" or kind == "all_reduce"

    def _switch(self, kind: str, shape: GroupShape) -> float | None:
        """Bus bandwidth of in-switch reduction for the group's devices of one node."""
        for entry in self.cluster.library.switch_bandwidths:
            if (entry.link, entry.collective, entry.num_devices) == (
                shape.intra_node.name,
                kind,
                shape.ranks_per_node,
            ):
                return entry.bandwidth_bytes_per_s
        return None

    def _bandwidth(self, kind: str, shape: GroupShape, algorithm: Algorithm) -> float:
        """Bus bandwidth inside a node."""
        switch = self._switch(kind, shape) if algorithm.name == "nvls" else None
        link = shape.intra_node
        return (switch or link.bandwidth_bytes_per_s) * link.step_fraction * algorithm.bandwidth_fraction


def _measured_on(cluster: Cluster) -> dict[tuple[str, int, int, int], CollectiveTime]:
    """The library's measured collectives that hold on the cluster.

    They were taken with all ranks of each node busy, on equal nodes; across nodes nothing is known of other switches.
    """
    if not cluster.is_homogeneous:
        return {}
    return {
        (entry.kind, entry.size, entry.num_nodes, entry.ranks_per_node): entry
        for entry in cluster.library.measured
        if entry.devices_per_node == cluster.devices_per_node and (entry.num_nodes == 1 or not cluster.tiers)
    }


def collective_time_s(kind: str, num_bytes: float, shape: GroupShape, cluster: Cluster) -> float:
    """Time of one collective of one group; :class:`CollectiveModel` where many are asked for."""
    return CollectiveModel(cluster).shape_time_s(kind, num_bytes, shape)


def volume_factor(kind: str, size: int) -> float:
    """Bytes that each rank puts on its link, over the bytes of the collective."""
    factors = {"all_reduce": 2.0 * (size - 1) / size, "send": 1.0, "broadcast": 1.0}
    return factors.get(kind, (size - 1) / size)


def _line(kind: str, shape: GroupShape, algorithm: Algorithm, bandwidth: float) -> _Line:
    intra = algorithm.intra_step_s + algorithm.delays_per_step * shape.intra_node.latency_s
    inter = algorithm.inter_step_s + algorithm.delays_per_step * shape.inter_latency_s
    first = shape.inter_latency_s if shape.num_nodes > 1 else shape.intra_node.latency_s
    latency = algorithm.base_s + algorithm.base_delays * first
    steps, inter_steps = _steps(kind, shape, algorithm.name)
    latency += steps * intra + inter_steps * inter
    s_per_byte = _s_per_byte(kind, shape, algorithm, bandwidth)
    # each link's pipeline fills at its own rate; LL has none, as it sends every line by itself
    inside = s_per_byte if shape.num_nodes == 1 else volume_factor(kind, shape.size) / bandwidth
    fill = max(shape.half_bandwidth_bytes * s_per_byte, shape.intra_node.half_bandwidth_bytes * inside)
    return _Line(latency + (0.0 if algorithm.protocol == "LL" else fill), s_per_byte)


def _steps(kind: str, shape: GroupShape, name: str) -> tuple[float, float]:
    """Steps inside nodes and between them, one after the other (NCCL's ``tuning.cc``)."""
    nodes = shape.num_nodes
    if kind in ("send", "all_to_all"):  # all partners at once
        return (0.0, 1.0) if nodes > 1 else (1.0, 0.0)
    if name == "nvls":
        return 0.0, 2.0 * math.log2(nodes)
    if name == "tree":
        return 2.0 * (shape.size / nodes - 1), 2.0 * math.log2(nodes)
    passes = 2 if kind == "all_reduce" else 1
    steps = passes * (shape.size - 1)
    inter = 0 if nodes == 1 else 2 * nodes if kind == "all_reduce" else nodes - 1
    return max(steps - inter, 0), min(inter, steps)


def _s_per_byte(kind: str, shape: GroupShape, algorithm: Algorithm, bandwidth: float) -> float:
    """Seconds for each byte: the narrower of the links inside the nodes and of the way out of them."""
    size, nodes = shape.size, shape.num_nodes
    egress = shape.egress_bytes_per_s * algorithm.bandwidth_fraction
    factor = volume_factor(kind, size)
    if kind == "all_to_all":
        out = (size - shape.ranks_per_node) / size * shape.ranks_per_node / egress
        return max((shape.ranks_per_node - 1) / size / bandwidth, out)
    if kind == "send":
        return 1.0 / (egress if nodes > 1 else bandwidth)
    if algorithm.name == "ring" or nodes == 1:
        return factor / min(bandwidth, egress)
    # reduced inside each node first: what leaves a node is one tensor, up and down a double binary tree of nodes
    return max(factor / bandwidth, (1.0 if nodes == 2 else 2.0) / egress)

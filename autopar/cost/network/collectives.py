"""Time of one collective: that of the fastest of the library's algorithms on the links of the group.

Steps and volumes are those of NCCL's ``src/graph/tuning.cc`` and of the ring and tree algorithms. All constants are in ``profiles/``.
``placement.py`` says which share of the links a group has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.cost.network.placement import Fabric, GroupShape, group_shape, hop_shape
from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.link import Algorithm, CollectiveTime
from autopar.plan.mesh import Mesh

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


@dataclass(frozen=True, slots=True)
class _Line:
    """The time of one algorithm: ``latency_s + num_bytes * s_per_byte``."""

    latency_s: float
    s_per_byte: float


class CollectiveModel:
    """Computes and caches the times of collectives on one cluster.

    Args:
        cluster: the cluster with its collective library.
        only: the node groups whose ranks count; see :func:`group_shape`.
    """

    def __init__(self, cluster: Cluster, only: frozenset[int] | None = None) -> None:
        self.cluster, self.only = cluster, only
        self._fabric = Fabric(cluster)
        self._groups: dict[tuple[Mesh, tuple[str, ...]], tuple[GroupShape, ...]] = {}
        self._pairs: dict[tuple[int, int, int | None], tuple[GroupShape, ...]] = {}
        self._pair_times: dict[tuple[str, float, int, int, int | None], float] = {}
        self._lines: dict[tuple[str, GroupShape], tuple[_Line, ...]] = {}
        self._measured = _measured_on(cluster)

    def time_s(self, kind: str, num_bytes: float, mesh: Mesh, axes: tuple[str, ...]) -> float:
        """Return the seconds of a collective over ``axes`` of the mesh while all its groups do the same.

        Args:
            kind: one of :data:`KINDS`.
            num_bytes: the bytes of the full tensor; of one rank's part for ``all_to_all``.
            mesh: the mesh, whose ranks are the cluster's first ones.
            axes: mesh axes; a group of one rank costs nothing.

        Raises:
            UsageError: the collective is unknown, or the mesh is larger than the cluster.
        """
        shapes = self._groups.get((mesh, axes))
        if shapes is None:
            shapes = self._groups[mesh, axes] = group_shape(mesh, axes, self._fabric, self.only)
        return max([self.shape_time_s(kind, num_bytes, shape) for shape in shapes])

    def ends(self, kind: str) -> list[int]:
        """Return the largest whole numbers of bytes of the pieces in which a collective was measured, in rising order."""
        pieces = [piece for key, time in self._measured.items() if key[0] == kind for piece in time.pieces]
        return sorted({int(piece.up_to_bytes) for piece in pieces if piece.up_to_bytes >= 1})

    def send_time_s(self, num_bytes: float, mesh: Mesh, here: int | None = None) -> float:
        """Return the seconds of a message between neighbouring pipeline ranks; see :meth:`pair_time_s`."""
        return self.pair_time_s("send", num_bytes, mesh, here)

    def pair_time_s(self, kind: str, num_bytes: float, mesh: Mesh, here: int | None = None) -> float:
        """Return the seconds of a collective of two neighbouring pipeline ranks; the last and the first one are neighbours too.

        Args:
            here: of these ranks and those of the next one, the slowest pair; None: the slowest pair of all, which communicate at once.
        """
        key = kind, num_bytes, mesh.pp, mesh.world_size, here
        time_s = self._pair_times.get(key)
        if time_s is None:
            times = (self.shape_time_s(kind, num_bytes, shape) for shape in self._neighbours(mesh, here))
            time_s = self._pair_times[key] = max(times, default=0.0)
        return time_s

    def _neighbours(self, mesh: Mesh, here: int | None) -> tuple[GroupShape, ...]:
        """Return the shapes of pairs of neighbouring pipeline ranks, or those of rank ``here`` and the next one."""
        key = mesh.pp, mesh.world_size, here
        if key not in self._pairs:
            hops = (range(mesh.pp) if mesh.pp > 1 else ()) if here is None else (here,)
            shapes = (shape for rank in hops for shape in hop_shape(mesh, self._fabric, rank))
            self._pairs[key] = tuple(dict.fromkeys(shapes))
        return self._pairs[key]

    def shape_time_s(self, kind: str, num_bytes: float, shape: GroupShape) -> float:
        """Return the seconds of a collective of one group."""
        if shape.size == 1 or num_bytes == 0:
            return 0.0
        if self._measured:
            measured = self._measured.get((kind, shape.size, shape.num_nodes, shape.ranks_per_node))
            if measured is not None:
                return measured.time_s(num_bytes)
        lines = self._lines.get((kind, shape))
        if lines is None:
            lines = self._lines[kind, shape] = self._options(kind, shape)
        return min([line.latency_s + num_bytes * line.s_per_byte for line in lines])

    def _options(self, kind: str, shape: GroupShape) -> tuple[_Line, ...]:
        library = self.cluster.library
        kind = library.implemented_as.get(kind, kind)
        if kind not in KINDS:
            raise UsageError.unknown("collective", kind, KINDS)
        lines = [
            _line(kind, shape, algorithm, self._bandwidth(kind, shape, algorithm))
            for algorithm in library.algorithms
            if (not algorithm.collectives or kind in algorithm.collectives) and self._serves(kind, shape, algorithm)
        ]
        if not lines:
            raise UsageError(
                f"The collective library {library.name} has no algorithm for {kind}",
                fix="Add [[library.algorithms]] for it (profiles/README.md), or name another library",
            )
        return tuple(lines)

    def _serves(self, kind: str, shape: GroupShape, algorithm: Algorithm) -> bool:
        if algorithm.name == "nvls":
            return shape.ranks_per_node > 1 and self._switch(kind, shape) is not None
        return algorithm.name != "tree" or kind == "all_reduce"

    def _switch(self, kind: str, shape: GroupShape) -> float | None:
        """Return the bus bandwidth of in-switch reduction for the group's devices of one node; None where there is none."""
        for entry in self.cluster.library.switch_bandwidths:
            if (entry.link, entry.collective, entry.num_devices) == (shape.intra_node.name, kind, shape.ranks_per_node):
                return entry.bandwidth_bytes_per_s
        return None

    def _bandwidth(self, kind: str, shape: GroupShape, algorithm: Algorithm) -> float:
        """Return the bus bandwidth inside a node in bytes per second."""
        switch = self._switch(kind, shape) if algorithm.name == "nvls" else None
        link = shape.intra_node
        return (switch or link.bandwidth_bytes_per_s) * link.step_fraction * algorithm.bandwidth_fraction


def _measured_on(cluster: Cluster) -> dict[tuple[str, int, int, int], CollectiveTime]:
    """Return the library's measured collectives that hold on the cluster.

    They were measured with all ranks of each node busy, on equal nodes. Across nodes they do not hold for clusters with tiers of other
    switches.
    """
    if not cluster.is_homogeneous:
        return {}
    return {
        (entry.kind, entry.size, entry.num_nodes, entry.ranks_per_node): entry
        for entry in cluster.library.measured
        if entry.devices_per_node == cluster.devices_per_node and (entry.num_nodes == 1 or not cluster.tiers)
    }


def volume_factor(kind: str, size: int) -> float:
    """Return the bytes that each rank puts on its link, over the bytes of the collective."""
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
    # Each link's pipeline fills at its own rate. LL has none, as it sends every line by itself.
    inside = s_per_byte if shape.num_nodes == 1 else volume_factor(kind, shape.size) / bandwidth
    fill = max(shape.half_bandwidth_bytes * s_per_byte, shape.intra_node.half_bandwidth_bytes * inside)
    return _Line(latency + (0.0 if algorithm.protocol == "LL" else fill), s_per_byte)


def _steps(kind: str, shape: GroupShape, name: str) -> tuple[float, float]:
    """Return the sequential steps inside nodes and between them (NCCL's ``tuning.cc``)."""
    nodes = shape.num_nodes
    if kind in ("send", "all_to_all"):  # to all partners at once
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
    """Return the seconds for each byte on the narrower of the links inside nodes and the links out of them."""
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
    # The tensor is reduced inside each node first: one tensor leaves a node, up and down a double binary tree of nodes.
    return max(factor / bandwidth, (1.0 if nodes == 2 else 2.0) / egress)

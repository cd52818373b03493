"""Clusters: which devices there are, on which nodes, and what connects them.

Ranks count the devices group by group, node by node. The tiers of a cluster, from the inside out: the device itself,
its node, then each :class:`Tier` of switches (racks, pods), and at last the network that joins everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import UsageError, shown
from autopar.hardware.device import Device
from autopar.hardware.link import CollectiveLibrary, Link
from autopar.util.files import check_places
from autopar.util.toml import Table, as_table

if TYPE_CHECKING:
    import networkx

NETWORK, NODE = "network", "node"

MOST_DEVICES = 2**20
"""Some ten times the largest clusters that are built. The time of a search grows with the number."""

MAX_PERMUTED_GROUPS = 3
"""Up to so many node groups all orders are tried as orders of ranks; of more only the given one and its reverse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Equal nodes.

    Attributes:
        intra_node: the link from each device to the node's switch (or to other devices).
        nic: one network card of a node.
        nics_per_node: device i of a node uses card ``i * nics_per_node // devices_per_node``.
    """

    device: Device
    num_nodes: int
    devices_per_node: int
    intra_node: Link
    nic: Link
    nics_per_node: int

    @property
    def num_devices(self) -> int:
        """The number of devices of all nodes of the group."""
        return self.num_nodes * self.devices_per_node

    def with_memory(self, num_bytes: int) -> NodeGroup:
        """Return the same nodes with so many bytes of memory on every device, as the user states."""
        return replace(self, device=self.device.with_memory(num_bytes, "stated by the user"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A layer of switches: each domain of ``num_nodes`` consecutive nodes shares one ``uplink`` to the next layer."""

    name: str
    num_nodes: int
    uplink: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of nodes, tiers of switches between them (innermost first) and the collective library that they run.

    >>> cluster = Cluster.parse("h100-sxm5-80gb:4x8")
    >>> cluster.world_size, cluster.num_nodes, cluster.devices_per_node
    (32, 4, 8)
    """

    name: str
    groups: tuple[NodeGroup, ...] = field(metadata={"key": "group"})
    tiers: tuple[Tier, ...] = field(default=(), metadata={"key": "tier"})
    library: CollectiveLibrary

    def __post_init__(self) -> None:
        """Check the size.

        Raises:
            UsageError: there are more than :data:`MOST_DEVICES`.
        """
        if self.world_size > MOST_DEVICES:
            raise UsageError(
                f"The cluster has {self.world_size:.3g} devices", where=self.name, fix=f"Give at most {MOST_DEVICES:,}"
            )

    @classmethod
    def parse(cls, text: str | Path, *, cache_dir: Path | None = None) -> Cluster:
        """Return a cluster from ``DEVICE:NODESxPER_NODE``, ``local`` or the path of a TOML file.

        The first two take options as in ``cpu:1x4?memory=1e9&cores=2``: ``memory`` (bytes of one device, ``80GB`` or
        ``80GiB``), ``host_memory`` (of its host, for offloading), ``nics`` (cards of a node), ``nic_bandwidth`` (bytes/s of one), ``cores`` (of a node of CPU ranks: more ranks than cores share
        them) and for ``local`` ``ranks``.

        Args:
            cache_dir: where ``local`` keeps its measurements; ``None`` for the user's cache directory.

        Raises:
            UsageError: names the unknown device or option with the closest known one, or the file, line and key.
        """
        from autopar.hardware.describe import parse_cluster  # below this module would be a cycle: it builds clusters

        if not isinstance(text, str | Path):
            raise UsageError(f"A cluster is a text, and not {shown(text)}", fix="Write for example h100-sxm5-80gb:4x8")
        return parse_cluster(str(text), cache_dir=cache_dir)

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Return a cluster from a TOML file, whose schema is in ``profiles/README.md``. :meth:`parse` reads such files too."""
        from autopar.hardware import read as store

        check_places(path=path)
        return store.load_cluster(Path(path))

    @classmethod
    def detect(cls, *, num_ranks: int | None = None, cache_dir: Path | None = None, refresh: bool = False) -> Cluster:
        """Measure this machine in a few seconds: matmul, memory, and the link between two local ranks.

        Args:
            num_ranks: devices to plan for; ``None`` for the number of GPUs, or of CPU cores if there are none.
            cache_dir: where the measurement is kept; ``None`` for the user's cache directory.
            refresh: measure again even if a measurement is kept.
        """
        from autopar.hardware import machine as detect

        return detect.detect(num_ranks=num_ranks, cache_dir=cache_dir, refresh=refresh)

    @property
    def world_size(self) -> int:
        """The number of devices."""
        return sum(group.num_devices for group in self.groups)

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return sum(group.num_nodes for group in self.groups)

    @property
    def devices_per_node(self) -> int:
        """Devices of a node; of the smallest if groups differ."""
        return min(group.devices_per_node for group in self.groups)

    @property
    def is_homogeneous(self) -> bool:
        """Whether all nodes are equal."""
        return all(replace(group, num_nodes=1) == replace(self.groups[0], num_nodes=1) for group in self.groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The different devices, group by group."""
        return tuple(dict.fromkeys(group.device for group in self.groups))

    @property
    def orders(self) -> tuple[tuple[int, ...], ...]:
        """Orders of the groups in which ranks may count them, the given one first; of equivalent ones only one.

        Switches connect consecutive nodes, so that groups can only be exchanged if each consists of complete domains.
        """
        given = tuple(range(len(self.groups)))
        if any(group.num_nodes % tier.num_nodes for group in self.groups for tier in self.tiers):
            return (given,)
        candidates = permutations(given) if len(given) <= MAX_PERMUTED_GROUPS else (given, given[::-1])
        different = {tuple(self.groups[i] for i in order): order for order in reversed(list(candidates))}
        return tuple(sorted(different.values()))

    def reordered(self, order: tuple[int, ...]) -> Cluster:
        """Return the same nodes, with ranks counted through the groups in one of :attr:`orders`."""
        return replace(self, groups=tuple(self.groups[i] for i in order))

    def topology(self) -> networkx.Graph[str]:
        """Devices, node switches, cards and switches as a networkx graph, for people and their tools; a search needs none.

        Nodes have ``kind`` (``device``, ``switch``, ``nic``), devices also ``device``, the name of their profile. Edges have ``link``,
        the name of theirs, ``bandwidth_bytes_per_s`` of one direction and ``latency_s``, half of that of a message that goes up through a link
        and down through an equal one, so that the delays on a path add up. Names: ``device:RANK``, ``node:NODE``,
        ``nic:NODE.CARD``, ``TIER:DOMAIN`` and ``network``.
        """
        import networkx

        graph: networkx.Graph[str] = networkx.Graph()
        rank = node = 0
        for group in self.groups:
            for _ in range(group.num_nodes):
                here = f"{NODE}:{node}"
                switches = [*(f"{tier.name}:{node // tier.num_nodes}" for tier in self.tiers), NETWORK]
                graph.add_nodes_from((here, *switches), kind="switch")
                for tier, (below, above) in zip(self.tiers, pairwise(switches), strict=True):
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

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as plain data without references to profiles; written as TOML it is a cluster file."""
        table: dict[str, Any] = as_table(self)
        return table

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Cluster:
        """Read the result of :meth:`to_dict`.

        Raises:
            UsageError: a key is missing, unknown or wrong.
        """
        from autopar.hardware import read as store

        return store.cluster_from_table(Table(data, file="cluster"))

    def with_groups(self, change: Callable[[NodeGroup], NodeGroup]) -> Cluster:
        """Return the same cluster with ``change`` applied to each group of nodes."""
        return replace(self, groups=tuple(map(change, self.groups)))


def _edge(link: Link) -> dict[str, Any]:
    bandwidth = link.bandwidth_bytes_per_s
    return {"link": link.name, "bandwidth_bytes_per_s": bandwidth, "latency_s": link.latency_s / 2}

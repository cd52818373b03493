"""Reads machine profiles, cluster files and files of measured links, and builds clusters. The schema is in ``profiles/README.md``.

``autopar.hardware.describe`` reads clusters in one line of text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster, NodeGroup, Tier
from autopar.hardware.device import Device, times
from autopar.hardware.link import CollectiveLibrary, CollectiveTime, Link
from autopar.util.files import data_files
from autopar.util.toml import Table

RESERVED_TIERS = ("device", "node", "nic", "network")
"""Names of the other parts of a cluster's topology, which tiers must not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node, whatever its device.

    Attributes:
        num_devices: devices of the node that ``num_nics`` cards belong to.
        link_domain: devices that the node's links connect if they span several nodes (NVL72); 0: those of one node.
        num_cores: number of ranks that run at full speed; more ranks share it. ``None`` if every rank has its own device.
        shares_memory: whether ``Device.memory_bytes`` is the node's, divided among its ranks.
    """

    num_devices: int
    num_nics: int
    link_domain: int = 0
    num_cores: int | None = None
    shares_memory: bool = False
    provenance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineProfile:
    """A device and its node. Its fields are the keys and tables of its file.

    Attributes:
        library: the name of the collective library.
        reported: pattern of the complete name that the driver reports, without the maker; empty if no device is certain to be of the
            profile. Boards without a profile differ from every profile in clocks, links or memory: PCIe, NVL and SXM3 boards, A10, L40S,
            H800, GH200, workstations. So do parts of a GPU, whose names are longer (``MIG 1g.10gb``).
        shares_name: whether other devices report the same name, so that the memory decides.
    """

    library: str
    reported: str = ""
    shares_name: bool = False
    device: Device
    intra_node: Link
    nic: Link
    node: Node

    def group(self, num_nodes: int, devices_per_node: int, *, num_cores: float | None = None) -> NodeGroup:
        """Equal nodes of this machine; nodes that its links connect count as one, in domains of equal size.

        Args:
            num_cores: overrides the profile's; a fraction if ranks were measured to get less than their share.
        """
        joined = _joined(num_nodes, devices_per_node, self.node.link_domain)
        num_nodes, devices_per_node = num_nodes // joined, devices_per_node * joined
        cores = num_cores or self.node.num_cores or devices_per_node
        share = min(1.0, cores / devices_per_node)
        device = slowed(self.device, share)
        if self.node.shares_memory:
            note = device.provenance["memory"]
            device = device.with_memory(
                device.memory_bytes // devices_per_node, f"{note}; divided among {devices_per_node} ranks"
            )
        return NodeGroup(
            device=device,
            num_nodes=num_nodes,
            devices_per_node=devices_per_node,
            intra_node=_slowed_link(self.intra_node, share),
            nic=self.nic,
            nics_per_node=max(1, devices_per_node * self.node.num_nics // self.node.num_devices),
        )


def _joined(num_nodes: int, devices_per_node: int, link_domain: int) -> int:
    """Nodes in one domain of links: as many as fit and divide the number of nodes.

    >>> _joined(16, 4, 72), _joined(64, 4, 72), _joined(20, 4, 72), _joined(4, 8, 0)
    (16, 16, 10, 1)
    """
    return max((n for n in range(1, link_domain // devices_per_node + 1) if num_nodes % n == 0), default=1)


def _slowed_link(link: Link, share: float) -> Link:
    """Return the link if several ranks share a core: messages between processes of one node are work of its cores."""
    if share == 1.0:
        return link
    return replace(
        link,
        bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share,
        latency_s=link.latency_s / share,
        provenance=f"{link.provenance}; times {share:.3g}, the cores that each rank has",
    )


def slowed(device: Device, share: float, why: str = "the cores that each rank has") -> Device:
    """Return the device at a fraction ``share`` of its speed, as several ranks share a core."""
    if share == 1.0:
        return device
    note = f"; times {share:.3g}, {why}"
    rates = tuple(
        replace(times(rate, share, "ceiling_flops_per_s", "datasheet_flops_per_s"), provenance=rate.provenance + note)
        for rate in device.matmul
    )
    table, overheads = device.operators, device.overheads
    numbers = [name for name in overheads.__slots__ if name != "provenance"]
    notes = {key: text + note if key in ("bandwidth", "launch") else text for key, text in device.provenance.items()}
    return replace(
        device,
        matmul=rates,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * share,
        launch_s=device.launch_s / share,
        operators=None if table is None else replace(table, scale=table.scale / share),
        functions=tuple(times(rate, 1 / share, "forward_s", "backward_s") for rate in device.functions),
        overheads=replace(times(overheads, 1 / share, *numbers), provenance=overheads.provenance + note),
        provenance=notes,
    )


def known_devices() -> tuple[str, ...]:
    """Return the names of the shipped machine profiles."""
    return tuple(data_files("profiles"))


def load_profile(name: str) -> MachineProfile:
    """Return a shipped profile by name, or a profile file by path (it ends in ``.toml``).

    Raises:
        UsageError: the name is unknown (with the closest known one), or the file is malformed.
    """
    if name.endswith(".toml"):
        return Table.load(Path(name)).record(MachineProfile)
    path = data_files("profiles").get(name.lower())
    if path is None:
        raise UsageError.unknown("device profile", name, known_devices(), fix="or give the path of a .toml profile")
    return _profile_in(path)


@cache
def _profile_in(path: Path) -> MachineProfile:
    """Return a shipped profile, which is read once."""
    return Table.load(path).record(MachineProfile)


@cache
def load_library(name: str) -> CollectiveLibrary:
    """Return a shipped collective library.

    Raises:
        UsageError: the name is unknown.
    """
    known = data_files("profiles/links")
    if name not in known:
        raise UsageError.unknown("collective library", name, known)
    return Table.load(known[name]).record(CollectiveLibrary)


def load_cluster(path: Path) -> Cluster:
    """Return a cluster from a TOML file.

    Raises:
        UsageError: names file, line and key.
    """
    return cluster_from_table(Table.load(path), default_name=path.stem)


def cluster_from_table(table: Table, *, default_name: str | None = None) -> Cluster:
    """Read a cluster file or the result of :meth:`Cluster.to_dict`; devices and the library may be names of profiles."""
    groups = [_group(item) for item in table.tables("group")]
    if not groups:
        for key in ("name", "tier", "library", "links"):
            table.has(key)
        table.finish()  # a misspelt [[group]] is named, with its line
        raise UsageError.missing("[[group]] of nodes", where=table.place(None), fix="Add at least one")
    links = table.text("links") if table.has("links") else None
    cluster = table.record(
        Cluster,
        name=table.text("name", default_name),
        groups=tuple(group for group, _ in groups),
        library=_library(table, [library for _, library in groups]),
    )
    _check_tiers(table, cluster.tiers)
    return cluster if links is None else Links.load(table.beside(links)).on(cluster)


def _group(table: Table) -> tuple[NodeGroup, str | None]:
    """Return a group, and the library of the profile that it names, or None."""
    memory_bytes = table.integer("memory_bytes") if table.has("memory_bytes") else None
    library = None
    if isinstance(name := table.raw("device"), str):
        try:
            profile = load_profile(str(table.beside(name)) if name.endswith(".toml") else name)
        except UsageError as error:
            raise error.becoming(UsageError, where=table.place("device")) from error
        group, library = profile.group(table.integer("num_nodes"), table.integer("devices_per_node")), profile.library
        given: dict[str, Any] = {n: table.table(n).record(Link) for n in ("intra_node", "nic") if table.has(n)}
        group = replace(group, nics_per_node=table.integer("nics_per_node", group.nics_per_node), **given)
        table.finish()
    else:
        group = table.record(NodeGroup)
    if memory_bytes is not None:
        group = group.with_memory(memory_bytes)
    return group, library


def _check_tiers(table: Table, tiers: Sequence[Tier]) -> None:
    """Check that tiers are a tree of switches with distinct names.

    Raises:
        UsageError: they are not.
    """
    names = [*RESERVED_TIERS, *(tier.name for tier in tiers)]
    if len({*names}) < len(names):
        raise table.wrong(
            "tier", f"different names, and none of {', '.join(RESERVED_TIERS)}", ", ".join(tier.name for tier in tiers)
        )
    for below, above in pairwise(tiers):
        if above.num_nodes % below.num_nodes:
            raise table.wrong(
                "tier",
                "domains that are made of complete domains of the tier before",
                f"{above.name} of {above.num_nodes} nodes over {below.name} of {below.num_nodes}",
            )


def _library(table: Table, from_profiles: list[str | None]) -> CollectiveLibrary:
    if table.has("library") and not isinstance(table.raw("library"), str):
        return table.table("library").record(CollectiveLibrary)
    names = {name for name in from_profiles if name is not None}
    if not table.has("library") and len(names) != 1:
        raise UsageError.missing(
            "collective library of the cluster",
            where=table.place(None),
            fix=f'Add library = "NAME"{": the groups have " + ", ".join(sorted(names)) if names else ""}',
        )
    name = table.text("library", next(iter(names), None))
    try:
        return load_library(name)
    except UsageError as error:
        raise error.becoming(UsageError, where=table.place("library")) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Measured links of a cluster and collectives on them.

    Attributes:
        library: name of the collective library that ran.
        intra_node, nic: fitted links, which price groups of shapes that were not measured.
        measured: collectives on groups that were measured.
        points: name of the file of raw points, next to this one.
    """

    library: str
    intra_node: Link
    nic: Link
    measured: tuple[CollectiveTime, ...]
    points: str
    provenance: str

    @classmethod
    def load(cls, path: Path) -> Links:
        """Read a file of ``autopar profile links``.

        Raises:
            UsageError: names file, line and key.
        """
        return Table.load(path).record(cls)

    def on(self, cluster: Cluster) -> Cluster:
        """Return the cluster with these links and collectives, and the shipped library that ran."""
        linked = cluster.with_groups(lambda group: replace(group, intra_node=self.intra_node, nic=self.nic))
        return replace(linked, library=replace(load_library(self.library), measured=self.measured))

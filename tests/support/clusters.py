"""Clusters for tests: devices with other numbers, CPU ranks of several kinds."""

import random
from dataclasses import replace
from itertools import product
from typing import Any

from autopar.cost.network.collectives import KINDS
from autopar.hardware.cluster import Cluster, NodeGroup
from autopar.hardware.describe import scaled
from autopar.hardware.device import HostLink
from autopar.hardware.link import CollectiveTime, Piece

HOST = HostLink(
    to_host_bytes_per_s=4e10, to_device_bytes_per_s=4e10, latency_s=1e-6, memory_bandwidth_bytes_per_s=4e10,
    launch_s=1e-6, provenance="made up for tests",
)  # fmt: skip


def with_device(cluster: Cluster, **changes: Any) -> Cluster:
    groups = (replace(group, device=replace(group.device, **changes)) for group in cluster.groups)
    return replace(cluster, groups=tuple(groups))


def slow_group(
    group: NodeGroup, factor: float, *, name: str = "cpu-slow", memory_bytes: int | None = None
) -> NodeGroup:
    """The same nodes, each device ``factor`` times as slow in everything that it computes."""
    cluster = Cluster.parse("cpu:1x1")
    numbers = {"device.matmul": 1 / factor, "device.bandwidth": 1 / factor, "device.launch": factor}
    (slow,) = scaled(replace(cluster, groups=(group,)), numbers).groups
    device = replace(slow.device, name=name, memory_bytes=memory_bytes or slow.device.memory_bytes)
    return replace(slow, device=device)


def two_kinds(
    fast: int = 2, slow: int = 2, *, factor: float = 2.0, slow_memory: int | None = None, fast_memory: int | None = None
) -> Cluster:
    """A node of fast ranks and one of slow ones."""
    base = Cluster.parse(f"cpu:1x{fast}")
    if fast_memory is not None:
        base = with_device(base, memory_bytes=fast_memory)
    (group,) = base.groups
    other = slow_group(replace(group, devices_per_node=slow), factor, memory_bytes=slow_memory)
    return replace(base, name="two-kinds", groups=(group, other))


def three_kinds(slow: int = 1) -> Cluster:
    """A node of one fast rank, of ``slow`` ones and of one that is slower still."""
    cluster = two_kinds(1, slow, factor=2.0)
    return replace(cluster, groups=(*cluster.groups, slow_group(cluster.groups[0], 5.0, name="cpu-slower")))


def of_one(cluster: Cluster, group: int, *, num_nodes: int = 1) -> Cluster:
    """As many devices, all of one of its groups."""
    (own,) = cluster.groups[group : group + 1]
    return replace(
        cluster,
        name="one-kind",
        groups=(replace(own, devices_per_node=cluster.world_size // num_nodes, num_nodes=num_nodes),),
    )


def in_pieces(cluster: Cluster, chance: random.Random) -> Cluster:
    """One whose collectives were measured, in pieces of any speed: large ones may take longer for each byte than small ones."""
    times = []
    for kind, nodes, log_size in product(KINDS, (1, 2), range(1, 5)):
        size, most = 2**log_size, cluster.devices_per_node
        if size // nodes in range(1, most + 1) and size <= cluster.world_size:
            shape = {"size": size, "num_nodes": nodes, "ranks_per_node": size // nodes, "devices_per_node": most}
            ends = [*sorted(chance.sample([2**n for n in range(10, 28)], 3)), 0]
            lines = [
                {"latency_s": chance.choice([0.0, 1e-4]), "s_per_byte": chance.choice([1e-12, 1e-9])} for _ in ends
            ]
            pieces = tuple(Piece(up_to_bytes=end, **line) for end, line in zip(ends, lines, strict=True))
            times.append(CollectiveTime(kind=kind, **shape, residual=0.0, provenance="example", pieces=pieces))
    return replace(cluster, library=replace(cluster.library, measured=tuple(times)))

"""Clusters of CPU ranks of two kinds, for tests."""

from __future__ import annotations

from dataclasses import replace

from autopar.hardware.cluster import Cluster, NodeGroup
from autopar.hardware.describe import scaled


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
    (group,) = base.groups
    if fast_memory is not None:
        group = replace(group, device=replace(group.device, memory_bytes=fast_memory))
    other = slow_group(replace(group, devices_per_node=slow), factor, memory_bytes=slow_memory)
    return replace(base, name="two-kinds", groups=(group, other))


def of_one(cluster: Cluster, group: int, *, num_nodes: int = 1) -> Cluster:
    """As many devices, all of one of its groups."""
    (own,) = cluster.groups[group : group + 1]
    return replace(
        cluster,
        name="one-kind",
        groups=(replace(own, devices_per_node=cluster.world_size // num_nodes, num_nodes=num_nodes),),
    )

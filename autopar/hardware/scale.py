"""Numbers of a cluster by name, and the same cluster with some of them scaled: what if the network were half as fast?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster, NodeGroup
from autopar.hardware.device import Device
from autopar.hardware.link import Link


def _links(link: Callable[[Link, float], Link], *, node: bool, network: bool) -> Callable[[Cluster, float], Cluster]:
    def scaled(cluster: Cluster, factor: float) -> Cluster:
        def group(g: NodeGroup) -> NodeGroup:
            inside = link(g.intra_node, factor) if node else g.intra_node
            return replace(g, intra_node=inside, nic=link(g.nic, factor) if network else g.nic)

        tiers = tuple(replace(t, uplink=link(t.uplink, factor)) if network else t for t in cluster.tiers)
        return replace(cluster, groups=tuple(group(g) for g in cluster.groups), tiers=tiers)

    return scaled


def _bandwidth(link: Link, factor: float) -> Link:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor, provenance=_note(factor, link))


def _delay(link: Link, factor: float) -> Link:
    return replace(link, latency_s=link.latency_s * factor, provenance=_note(factor, link))


def _latency(cluster: Cluster, factor: float) -> Cluster:
    """Delays stand in links or in the steps of the collective library: both are scaled."""
    cluster = _links(_delay, node=True, network=True)(cluster, factor)
    algorithms = tuple(
        replace(a, base_s=a.base_s * factor, intra_step_s=a.intra_step_s * factor, inter_step_s=a.inter_step_s * factor)
        for a in cluster.library.algorithms
    )
    return replace(cluster, library=replace(cluster.library, algorithms=algorithms))


def _note(factor: float, link: Link) -> str:
    return f"{factor:g} times: {link.provenance}"


def _devices(change: Callable[[Device, float], Device]) -> Callable[[Cluster, float], Cluster]:
    def scaled(cluster: Cluster, factor: float) -> Cluster:
        return replace(cluster, groups=tuple(replace(g, device=change(g.device, factor)) for g in cluster.groups))

    return scaled


def _memory(device: Device, factor: float) -> Device:
    return replace(device, memory_bytes=round(device.memory_bytes * factor))


def _memory_bandwidth(device: Device, factor: float) -> Device:
    return replace(device, memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * factor)


def _launch(device: Device, factor: float) -> Device:
    return replace(device, launch_s=device.launch_s * factor)


def _matmul(device: Device, factor: float) -> Device:
    rates = tuple(replace(r, ceiling_flops_per_s=r.ceiling_flops_per_s * factor) for r in device.matmul)
    return replace(device, matmul=rates)


SCALES: dict[str, tuple[str, Callable[[Cluster, float], Cluster]]] = {
    "link.bandwidth": ("every link, inside nodes and between them", _links(_bandwidth, node=True, network=True)),
    "link.latency": ("delays of links and of a collective's steps", _latency),
    "node.bandwidth": ("the links inside nodes", _links(_bandwidth, node=True, network=False)),
    "network.bandwidth": ("cards and uplinks", _links(_bandwidth, node=False, network=True)),
    "device.memory": ("bytes of a device", _devices(_memory)),
    "device.bandwidth": ("of the device's memory", _devices(_memory_bandwidth)),
    "device.matmul": ("ceilings of products", _devices(_matmul)),
    "device.launch": ("overhead of an operator", _devices(_launch)),
}
"""Names of numbers, what they are, and how a cluster is made with that number times a factor."""


def scaled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """``cluster`` with each named number times its factor.

    Raises:
        UsageError: an unknown name, or a factor that is not above zero.

    >>> h100 = Cluster.parse("h100-sxm5-80gb:2x8")
    >>> slow = scaled(h100, {"network.bandwidth": 0.5})
    >>> slow.groups[0].nic.bandwidth_bytes_per_s / h100.groups[0].nic.bandwidth_bytes_per_s
    0.5
    """
    for name, factor in factors.items():
        if name not in SCALES:
            raise UsageError.unknown("number of a cluster", name, SCALES)
        if not 0 < factor < float("inf"):
            raise UsageError(f"The factor of {name} is {factor}", fix=f"Scale {name} by a number above zero")
        cluster = SCALES[name][1](cluster, factor)
    changed = ", ".join(f"{name} x {factor:g}" for name, factor in factors.items() if factor != 1)
    return replace(cluster, name=f"{cluster.name} ({changed})") if changed else cluster


def with_free_links(cluster: Cluster) -> Cluster:
    """The same devices, joined by links that take no time worth counting."""

    def free(link: Link) -> Link:
        return replace(
            link, bandwidth_bytes_per_s=1e18, latency_s=0.0, half_bandwidth_bytes=0.0, provenance="taken as free"
        )

    groups = (replace(group, intra_node=free(group.intra_node), nic=free(group.nic)) for group in cluster.groups)
    tiers = (replace(tier, uplink=free(tier.uplink)) for tier in cluster.tiers)
    return replace(cluster, groups=tuple(groups), tiers=tuple(tiers))

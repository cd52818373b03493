"""Where the ranks of a pipeline rank lie, on a cluster of several node groups."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.cluster import Cluster
from autopar.device import Device
from autopar.errors import UsageError
from autopar.host import HostLink
from autopar.mesh import Mesh


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
            "the devices of a cluster are all GPUs or all CPUs",
            value=", ".join(f"{device.name} ({device.kind})" for device in cluster.devices),
            place=cluster.name,
            remedy="plan for one of the kinds",
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
            "something is offloaded where the device's profile has the link to its host",
            value=f"none of {missing or device.name}",
            remedy="pin offload=none, or add [device.host] to the profile (profiles/README.md)",
        )
    return device.host

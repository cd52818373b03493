"""The cluster of a running job, from the places of its ranks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch

from autopar.errors import RuntimeMismatchError
from autopar.hardware.cluster import Cluster, NodeGroup
from autopar.hardware.describe import has_memory, shipped_profile_name
from autopar.hardware.machine import device_bytes, device_name, machine_profile
from autopar.hardware.read import MachineProfile, load_library, load_profile

_LOGGER = logging.getLogger("autopar")

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_DESCRIBE = (
    "Describe the cluster (cluster=FILE.toml); 'autopar profile all' under torchrun measures one of equal devices"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a rank.

    Attributes:
        host: host name and boot id of the machine, by which NCCL distinguishes machines too. Containers with their own host names count as
            machines, as they cannot access each other's memory.
        kind: ``cuda`` or ``cpu``.
        device: the name that its driver reports; of a CPU that of the processor.
        memory_bytes: of the device.
    """

    host: tuple[str, str]
    kind: str
    device: str
    memory_bytes: int

    @property
    def model(self) -> tuple[str, bool]:
        """A key that is equal for equal devices: the shipped profile, or the reported name; and whether it is a profile."""
        name = shipped_profile_name(self.device, self.memory_bytes) if self.kind == "cuda" else None
        return (self.device, False) if name is None else (name, True)


def place_here() -> Place:
    """Return the place of this rank, whose device must have been chosen."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = ""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return Place(host=(socket.gethostname(), boot), kind=kind, device=device_name(), memory_bytes=device_bytes())


def cluster_at(places: Sequence[Place]) -> Cluster:
    """Return the cluster of ranks at ``places``. It is called on the first of them, whose machine is measured if it has no shipped profile.

    Raises:
        RuntimeMismatchError: the ranks of a node are not consecutive, a node has different devices, or devices have no shipped profile and
            differ from those of the first rank.
    """
    nodes = _nodes(places)
    profiles = {model: _profile(model, places) for model in dict.fromkeys(place.model for place in places)}
    groups: list[NodeGroup] = []
    for (model, per_node), alike in groupby((ranks[0].model, len(ranks)) for ranks in nodes):
        group = profiles[model].group(len(list(alike)), per_node)
        _, is_shipped = model
        if not is_shipped and len(nodes) > 1:
            group = replace(group, nics_per_node=1)  # their number is unknown
            _LOGGER.warning(
                "the network between the %d nodes of this job was not measured: the plan takes it for one card a node of %.3g GB/s; "
                "%s",
                len(nodes),
                group.nic.bandwidth_bytes_per_s / 1e9,
                _DESCRIBE,
            )
        groups.append(group)
    libraries = sorted({profile.library for profile in profiles.values()})
    if len(libraries) > 1:
        raise RuntimeMismatchError(
            f"The ranks of this job communicate by several libraries ({', '.join(libraries)})", fix=_DESCRIBE
        )
    shape = " + ".join(f"{group.num_nodes}x{group.devices_per_node}" for group in groups)
    name = "local" if len(nodes) == 1 else f"local ({shape})"
    return Cluster(name=name, groups=tuple(groups), library=load_library(libraries[0]))


def _nodes(places: Sequence[Place]) -> list[list[Place]]:
    """Return the ranks of each node, node by node.

    Raises:
        RuntimeMismatchError: see :func:`cluster_at`.
    """
    nodes = [list(ranks) for _, ranks in groupby(places, lambda place: place.host)]
    hosts = [ranks[0].host for ranks in nodes]
    for host in hosts:
        if hosts.count(host) > 1:
            found = ", ".join(str(rank) for rank, place in enumerate(places) if place.host == host)
            raise RuntimeMismatchError(
                f"The ranks {found} of one node are not numbered one after the other",
                where=f"host {host[0]}",
                fix="Start them with torchrun, or let the launcher fill node after node (srun --distribution=block, "
                "mpirun --map-by slot)",
            )
    for ranks in nodes:
        models = sorted({name for name, _ in (place.model for place in ranks)})
        if len(models) > 1:
            raise RuntimeMismatchError(
                f"The devices of this node differ ({', '.join(models)})",
                where=f"host {ranks[0].host[0]}",
                fix="Run ranks on one kind of them (CUDA_VISIBLE_DEVICES)",
            )
    return nodes


def _profile(model: tuple[str, bool], places: Sequence[Place]) -> MachineProfile:
    name, is_shipped = model
    if is_shipped:
        return load_profile(name)
    alike, first = [place for place in places if place.model == model], places[0]
    for place in alike:
        if first.model != model or not has_memory(place.memory_bytes, first.memory_bytes):
            raise RuntimeMismatchError(
                f"No shipped profile of {name} with {place.memory_bytes / 2**30:.1f} GiB, and rank 0, which is measured, is on "
                f"{first.device} with {first.memory_bytes / 2**30:.1f} GiB",
                where=f"host {place.host[0]}",
                fix=_DESCRIBE,
            )
    return machine_profile()

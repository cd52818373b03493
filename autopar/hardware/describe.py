"""Clusters described in one line: ``DEVICE:NODESxPER_NODE?options``, ``local``, or a file with options."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from autopar.errors import UsageError, closest
from autopar.hardware.cluster import Cluster
from autopar.hardware.read import (
    MachineProfile,
    known_devices,
    load_cluster,
    load_library,
    load_profile,
    with_links,
)

_SHAPE = re.compile(r"^(?P<device>[^?]+):(?P<nodes>\d+)x(?P<per_node>\d+)$")
_BYTES = re.compile(r"^(?P<number>[0-9.]+(?:e[+-]?\d+)?)\s*(?P<unit>[kmgt]i?b|b)?$", re.IGNORECASE)
_UNIT_BYTES = {"": 1, "b": 1} | {
    f"{letter}{kind}": base ** (power + 1)
    for kind, base in (("b", 1000), ("ib", 1024))
    for power, letter in enumerate("kmgt")
}
_OPTIONS = ("memory", "host_memory", "nics", "nic_bandwidth", "cores", "ranks", "links")


def parse_cluster(text: str, *, cache_dir: Path | None = None) -> Cluster:
    """See :meth:`Cluster.parse`."""
    base, _, query = text.partition("?")
    options = _options(text, query)
    if base == "local":
        from autopar.hardware.detect import machine as detect  # only measuring needs torch

        found = detect.detect(num_ranks=_whole(text, options, "ranks"), cache_dir=cache_dir)
        cores = _whole(text, options, "cores")
        if cores is not None:
            profile = detect.machine_profile(cache_dir=cache_dir)
            found = replace(found, groups=(profile.group(1, found.world_size, num_cores=cores),))
    elif shape := _SHAPE.match(base):
        num_nodes, per_node = int(shape["nodes"]), int(shape["per_node"])
        if shape["device"] == "local":
            raise UsageError(
                f"'{text}' is not a cluster: 'local' is this one machine",
                fix=f"Give 'local?ranks={per_node}', or measure several nodes with 'autopar profile all' under torchrun",
            )
        if num_nodes < 1 or per_node < 1:
            raise UsageError(f"The cluster '{text}' has no device", fix="Give at least 1 node and 1 device a node")
        profile = load_profile(shape["device"])
        group = profile.group(num_nodes, per_node, num_cores=_whole(text, options, "cores"))
        found = Cluster(name=text, groups=(group,), library=load_library(profile.library))
    elif base.endswith(".toml") or Path(base).is_file():
        found = load_cluster(Path(base))
    else:
        raise UsageError(
            f"'{text}' is not a cluster: neither DEVICE:NODESxPER_NODE, 'local' nor a TOML file",
            fix=f"Give nodes and devices of a node as in '{base}:1x8'"
            if base.lower() in known_devices()
            else closest(base.split(":")[0].lower(), known_devices()),
        )
    return _overridden(found, text, options)


def machine_of(text: str, *, cache_dir: Path | None = None) -> MachineProfile:
    """The machine that a cluster's description names, at full speed and with all of its memory.

    Raises:
        UsageError: as :func:`parse_cluster`; of a cluster's file the first group counts.
    """
    base = text.partition("?")[0]
    if base == "local":
        from autopar.hardware.detect import machine as detect

        return detect.machine_profile(cache_dir=cache_dir)
    if shape := _SHAPE.match(base):
        return load_profile(shape["device"])
    cluster = parse_cluster(text, cache_dir=cache_dir)
    group = cluster.groups[0]
    return MachineProfile(
        device=group.device,
        intra_node=group.intra_node,
        nic=group.nic,
        num_devices=group.devices_per_node,
        num_nics=group.nics_per_node,
        num_cores=None,
        shares_memory=False,
        library=cluster.library.name,
        node_provenance=f"the first group of {cluster.name}",
    )


def _overridden(cluster: Cluster, text: str, options: dict[str, str]) -> Cluster:
    if "links" in options:
        cluster = with_links(cluster, Path(options["links"]))
    nics = _whole(text, options, "nics")
    if nics is not None:
        cluster = replace(cluster, groups=tuple(replace(group, nics_per_node=nics) for group in cluster.groups))
    if "nic_bandwidth" in options:
        bandwidth = _bytes(text, "nic_bandwidth", options["nic_bandwidth"])
        groups = (
            replace(
                group, nic=replace(group.nic, bandwidth_bytes_per_s=float(bandwidth), provenance="stated by the user")
            )
            for group in cluster.groups
        )
        cluster = replace(cluster, groups=tuple(groups))
    if "memory" in options:
        cluster = cluster.with_memory(_bytes(text, "memory", options["memory"]))
    if "host_memory" in options:
        cluster = _with_host_memory(cluster, _bytes(text, "host_memory", options["host_memory"]), text)
    return replace(cluster, name=text)


def _with_host_memory(cluster: Cluster, num_bytes: int, text: str) -> Cluster:
    """The same cluster with this much host memory for every device.

    Raises:
        UsageError: a device's profile knows no host.
    """
    groups = []
    for group in cluster.groups:
        host = group.device.host
        if host is None:
            raise UsageError(
                f"The profile of {group.device.name} has no link to the host, so it has no host memory to set",
                where=f"cluster '{text}'",
                fix="Add [device.host] to the profile (profiles/README.md)",
            )
        host = replace(host, memory_bytes=num_bytes, provenance=f"{host.provenance}; memory stated by the user")
        groups.append(replace(group, device=replace(group.device, host=host)))
    return replace(cluster, groups=tuple(groups))


def _options(text: str, query: str) -> dict[str, str]:
    options = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        if key not in _OPTIONS or not value:
            raise UsageError.unknown("option", key, _OPTIONS, where=f"cluster '{text}'")
        options[key] = value
    return options


def _whole(text: str, options: dict[str, str], key: str) -> int | None:
    value = options.get(key)
    if value is None:
        return None
    if not value.isdecimal() or int(value) < 1:
        raise UsageError(f"'{key}' is '{value}'", where=f"cluster '{text}'", fix="Give a whole number from 1")
    return int(value)


def _bytes(text: str, key: str, value: str) -> int:
    found = _BYTES.match(value)
    if found is None or float(found["number"]) <= 0:
        raise UsageError(
            f"'{key}' is '{value}'",
            where=f"cluster '{text}'",
            fix="Give a number of bytes above zero, with a unit if you like (1e9, 80GB, 80GiB)",
        )
    return int(float(found["number"]) * _UNIT_BYTES[(found["unit"] or "").lower()])

"""Devices and clusters by name (``DEVICE:NODESxPER_NODE?options``, ``local``, a file, a GPU's reported name), and scaled clusters."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autopar.errors import UsageError, closest
from autopar.hardware.cluster import Cluster, NodeGroup
from autopar.hardware.device import Device, times
from autopar.hardware.link import Link
from autopar.hardware.read import (
    Links,
    MachineProfile,
    Node,
    known_devices,
    load_cluster,
    load_library,
    load_profile,
)
from autopar.util.formatting import SIZE, bytes_of, num_bytes, plain_table

_SHAPE = re.compile(r"^(?P<device>[^?]+):(?P<nodes>\d+)x(?P<per_node>\d+)$")
_OPTIONS = ("memory", "host_memory", "nics", "nic_bandwidth", "cores", "ranks", "links")


def parse_cluster(text: str, *, cache_dir: Path | None = None) -> Cluster:
    """Implement :meth:`Cluster.parse`."""
    base, _, query = text.partition("?")
    options = _options(text, query)
    if base == "local":
        from autopar.hardware import machine as detect  # only measuring needs torch

        ranks, cores = _whole(text, options, "ranks"), _whole(text, options, "cores")
        found = detect.detect(num_ranks=ranks, cores=cores, cache_dir=cache_dir)
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
        device = base.split(":")[0].lower()
        raise UsageError(
            f"'{text}' is not a cluster: neither DEVICE:NODESxPER_NODE, 'local' nor a TOML file",
            fix=f"Give nodes and devices of a node as in '{device}:1x8'"
            if device in known_devices()
            else closest(device, known_devices()),
        )
    is_cpu = _SHAPE.match(base) and found.devices[0].kind == "cpu"
    for key in () if base == "local" else ("ranks",) if is_cpu else ("ranks", "cores"):
        if key in options:
            raise UsageError(f"'{key}' does not go with '{base}'", where=f"cluster '{text}'", fix="Leave it out")
    return _overridden(found, text, options)


def machine_of(text: str, *, cache_dir: Path | None = None) -> MachineProfile:
    """Return the machine that a cluster's description names, at full speed and with all of its memory.

    Raises:
        UsageError: as :func:`parse_cluster`; of a cluster's file the first group is used.
    """
    base = text.partition("?")[0]
    if base == "local":
        from autopar.hardware import machine as detect

        return detect.machine_profile(cache_dir=cache_dir)
    if shape := _SHAPE.match(base):
        return load_profile(shape["device"])
    cluster = parse_cluster(text, cache_dir=cache_dir)
    group = cluster.groups[0]
    return MachineProfile(
        device=group.device,
        intra_node=group.intra_node,
        nic=group.nic,
        node=Node(
            num_devices=group.devices_per_node,
            num_nics=group.nics_per_node,
            provenance=f"the first group of {cluster.name}",
        ),
        library=cluster.library.name,
    )


def _overridden(cluster: Cluster, text: str, options: dict[str, str]) -> Cluster:
    if "links" in options:
        cluster = Links.load(Path(options["links"])).on(cluster)
    nics = _whole(text, options, "nics")
    if nics is not None:
        cluster = cluster.with_groups(lambda group: replace(group, nics_per_node=nics))
    if "nic_bandwidth" in options:
        rate = float(_bytes(text, "nic_bandwidth", options["nic_bandwidth"]))
        stated = partial(replace, bandwidth_bytes_per_s=rate, provenance="stated by the user")
        cluster = cluster.with_groups(lambda group: replace(group, nic=stated(group.nic)))
    if "memory" in options:
        memory = _bytes(text, "memory", options["memory"])
        cluster = cluster.with_groups(lambda group: group.with_memory(memory))
    if "host_memory" in options:
        num_bytes = _bytes(text, "host_memory", options["host_memory"])
        cluster = cluster.with_groups(lambda group: _with_host_memory(group, num_bytes, text))
    return replace(cluster, name=text)


def _with_host_memory(group: NodeGroup, num_bytes: int, text: str) -> NodeGroup:
    """Return the same nodes with so much host memory for every device.

    Raises:
        UsageError: the device's profile has no link to a host.
    """
    host = group.device.host
    if host is None:
        raise UsageError(
            f"The profile of {group.device.name} has no link to the host, so it has no host memory to set",
            where=f"cluster '{text}'",
            fix="Add [device.host] to the profile (profiles/README.md)",
        )
    host = replace(host, memory_bytes=num_bytes, provenance=f"{host.provenance}; memory stated by the user")
    return replace(group, device=replace(group.device, host=host))


def _options(text: str, query: str) -> dict[str, str]:
    options = {}
    for part in filter(None, query.split("&")):
        key, _, value = part.partition("=")
        if key not in _OPTIONS or not value:
            raise UsageError.unknown("option", key, _OPTIONS, where=f"cluster '{text}'")
        if key in options:
            raise UsageError(f"The option '{key}' is given twice", where=f"cluster '{text}'", fix="Keep one of them")
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
    size = bytes_of(value)
    if size is None:
        raise UsageError(f"'{key}' is '{value}'", where=f"cluster '{text}'", fix=f"Give {SIZE}")
    return size


def _with_links(
    cluster: Cluster, change: Callable[[Link], Link], *, node: bool = True, network: bool = True
) -> Cluster:
    """Return the cluster with changed links inside nodes, and changed cards and uplinks."""
    changed = cluster.with_groups(
        lambda group: replace(
            group,
            intra_node=change(group.intra_node) if node else group.intra_node,
            nic=change(group.nic) if network else group.nic,
        )
    )
    return replace(changed, tiers=tuple(replace(t, uplink=change(t.uplink)) if network else t for t in cluster.tiers))


def _links(field: str, *, node: bool = True, network: bool = True) -> Callable[[Cluster, float], Cluster]:
    def scaled(cluster: Cluster, factor: float) -> Cluster:
        def change(link: Link) -> Link:
            return replace(times(link, factor, field), provenance=f"{factor:g} times: {link.provenance}")

        return _with_links(cluster, change, node=node, network=network)

    return scaled


def _latency(cluster: Cluster, factor: float) -> Cluster:
    """Delay are stated in links or in steps of the collective library: both are scaled."""
    cluster = _links("latency_s")(cluster, factor)
    steps = ("base_s", "intra_step_s", "inter_step_s")
    algorithms = tuple(times(algorithm, factor, *steps) for algorithm in cluster.library.algorithms)
    return replace(cluster, library=replace(cluster.library, algorithms=algorithms))


def _devices(change: Callable[[Device, float], Device]) -> Callable[[Cluster, float], Cluster]:
    return lambda cluster, factor: cluster.with_groups(
        lambda group: replace(group, device=change(group.device, factor))
    )


def _matmul(device: Device, factor: float) -> Device:
    return replace(device, matmul=tuple(times(rate, factor, "ceiling_flops_per_s") for rate in device.matmul))


SCALES: dict[str, tuple[str, Callable[[Cluster, float], Cluster]]] = {
    "link.bandwidth": ("every link, inside nodes and between them", _links("bandwidth_bytes_per_s")),
    "link.latency": ("delays of links and of a collective's steps", _latency),
    "node.bandwidth": ("the links inside nodes", _links("bandwidth_bytes_per_s", network=False)),
    "network.bandwidth": ("cards and uplinks", _links("bandwidth_bytes_per_s", node=False)),
    "device.memory": ("bytes of a device", _devices(lambda d, f: replace(d, memory_bytes=round(d.memory_bytes * f)))),
    "device.bandwidth": ("of the device's memory", _devices(lambda d, f: times(d, f, "memory_bandwidth_bytes_per_s"))),
    "device.matmul": ("ceilings of products", _devices(_matmul)),
    "device.launch": ("overhead of an operator", _devices(lambda d, f: times(d, f, "launch_s"))),
}
"""For each name of a number its description, and a function that returns a cluster with that number times a factor."""


def scaled(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """``cluster`` with each named number times its factor.

    Raises:
        UsageError: a name is unknown, or a factor is not above zero.

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
        try:
            cluster = SCALES[name][1](cluster, factor)
        except OverflowError as error:
            raise UsageError(f"{name} x {factor:g} is no finite number", fix="Scale it by a smaller factor") from error
    changed = ", ".join(f"{name} x {factor:g}" for name, factor in factors.items() if factor != 1)
    return replace(cluster, name=f"{cluster.name} ({changed})") if changed else cluster


def with_free_links(cluster: Cluster) -> Cluster:
    """Return the same devices, with links whose time is negligible."""

    def free(link: Link) -> Link:
        return replace(
            link, bandwidth_bytes_per_s=1e18, latency_s=0.0, half_bandwidth_bytes=0.0, provenance="taken as free"
        )

    return _with_links(cluster, free)


_MAKER = re.compile(r"(?:NVIDIA |AMD )?(?:Tesla |Instinct )?")
_MEMORY_SPREAD = 0.08
"""Relative difference that the reported memory of equal devices may have: error correction and driver versions take some."""


def shipped_profile_name(device_name: str, memory_bytes: int | None = None) -> str | None:
    """Return the shipped profile of a GPU; None if no shipped profile is certain to be of this device.

    Args:
        device_name: as its driver reports it.
        memory_bytes: of the device; if it is None, names that several devices share have no profile.

    >>> shipped_profile_name("NVIDIA H100 80GB HBM3"), shipped_profile_name("A100-SXM4-40GB", 42_300_000_000)
    ('h100-sxm5-80gb', 'a100-sxm4-40gb')
    >>> shipped_profile_name("NVIDIA H100 PCIe") is None
    True
    """
    model = _MAKER.sub("", " ".join(device_name.split()), count=1)
    for name in known_devices():
        profile = load_profile(name)
        if profile.reported and re.fullmatch(profile.reported, model) and _fits(profile, memory_bytes):
            return name
    return None


def _fits(profile: MachineProfile, memory_bytes: int | None) -> bool:
    """Return whether a device with so much memory can be the one of the profile."""
    if memory_bytes is None:
        return not profile.shares_name
    return has_memory(memory_bytes, profile.device.memory_bytes)


def has_memory(memory_bytes: int, of_bytes: int) -> bool:
    """Return whether devices that report these sizes of memory can be equal."""
    return abs(memory_bytes / of_bytes - 1.0) <= _MEMORY_SPREAD


def multiplies_in_tf32() -> bool:
    """Return whether GPUs compute products of float32 in TF32, by whichever of torch's two interfaces (since 2.9) it was set."""
    import torch

    matmul: Any = torch.backends.cuda.matmul
    return bool(matmul.fp32_precision == "tf32")


def convolves_in_tf32() -> bool:
    """Return whether cuDNN computes convolutions of float32 in TF32: a separate mode, which is on by default."""
    import torch  # to list devices needs none

    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.conv.fp32_precision == "tf32")


DTYPES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
"""Columns of the table of devices, with the dtypes of their products."""


def shipped_devices() -> tuple[Device, ...]:
    """Return the devices of the shipped profiles, by name."""
    return tuple(load_profile(name).device for name in known_devices())


def peaks(device: Device) -> dict[str, float]:
    """Return published dense peaks of products by precision, in FLOP/s; of a CPU the measured rate of one core."""
    rates = {rate.dtype: rate.datasheet_flops_per_s for rate in device.matmul}
    return {name: rates[dtype] for name, dtype in DTYPES.items() if dtype in rates}


def render_devices(devices: Sequence[Device]) -> str:
    """Return a text table with a row for each device."""
    head = ("device", "memory", *(f"{name} TFLOP/s" for name in DTYPES))
    rows = [
        (device.name, num_bytes(device.memory_bytes), *(_tera(peaks(device).get(name)) for name in DTYPES))
        for device in devices
    ]
    return plain_table(head, rows, left=("device",), width=120, indent=0)


def devices_summary(devices: Sequence[Device]) -> dict[str, Any]:
    """Return the devices as JSON values."""
    return {device.name: {"memory_bytes": device.memory_bytes, "peak_flops_per_s": peaks(device)} for device in devices}


def _tera(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e12:,.4g}"

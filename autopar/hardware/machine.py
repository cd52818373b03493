"""Measures this machine in a few seconds and keeps the result as a profile file in the user's cache directory."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import convolves_in_tf32, multiplies_in_tf32, shipped_profile_name
from autopar.hardware.read import MachineProfile, load_library, load_profile
from autopar.util.files import check_writable, child_environment, default_cache_dir, write_toml
from autopar.util.toml import Table

_LOGGER = logging.getLogger("autopar")

TIMEOUT_S = 120.0
_CACHE_VERSION = 10

MOST_WORKERS = 8
"""Largest number of processes that measure a CPU at once: each takes seconds to start and 0.3 GiB.

It is assumed, not measured, that cores of larger machines do not get slower if still more of them compute."""

STAND_IN = "l4-24gb"
"""The shipped profile whose links are assumed for a GPU without a profile if there are no two GPUs to measure them.

Its GPUs are connected by PCIe without peer access, and a node has one card of 100 Gb/s."""
_ASSUMED = "assumed"
"""Prefix of the provenance of such a link."""


def detect(
    *, num_ranks: int | None = None, cores: int | None = None, cache_dir: Path | None = None, refresh: bool = False
) -> Cluster:
    """Implement :meth:`autopar.hardware.cluster.Cluster.detect`.

    Args:
        cores: cores of all ranks together; None for those that were measured.

    Raises:
        AutoparError: the measuring processes failed or took longer than ``TIMEOUT_S``.
        UsageError: GPUs differ.
    """
    _check_alike()
    ranks = num_ranks or (torch.cuda.device_count() if torch.cuda.is_available() else num_cores())
    profile = machine_profile(cache_dir=cache_dir, refresh=refresh)
    return Cluster(
        name="local", groups=(profile.group(1, ranks, num_cores=cores),), library=load_library(profile.library)
    )


def _check_alike() -> None:
    """Check that all GPUs that this process sees are of one kind.

    Raises:
        UsageError: they are not; names the kinds.
    """
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    kinds = sorted({(device.name, device.total_memory) for device in found})
    if len(kinds) > 1:
        raise UsageError(
            "This machine has GPUs of several kinds",
            got=", ".join(f"{name} of {num_bytes:,} bytes" for name, num_bytes in kinds),
            fix="Show those of one kind (CUDA_VISIBLE_DEVICES), or describe groups of nodes in a cluster file",
        )


def machine_profile(*, cache_dir: Path | None = None, refresh: bool = False) -> MachineProfile:
    """Return the profile of this machine, from the cache or measured now; a GPU with a shipped profile is not measured."""
    shipped = _shipped_here()
    if shipped is not None:
        return load_profile(shipped)
    path = profile_path(cache_dir)
    assert path is not None
    if refresh or not path.is_file():
        check_writable(path, make_folder=True)
        write_toml(path, profile_dict(_measure()))
    profile = Table.load(path).record(MachineProfile)
    if profile.intra_node.provenance.startswith(_ASSUMED):
        _LOGGER.warning(
            "no shipped profile is of %s, and links take two visible GPUs to measure: between GPUs of a node %.3g GB/s are assumed, "
            "those of %s; 'torchrun --nproc-per-node=N -m autopar profile all' measures the job's own",
            device_name(),
            profile.intra_node.bandwidth_bytes_per_s / 1e9,
            STAND_IN,
        )
    return profile


def profile_path(cache_dir: Path | None = None) -> Path | None:
    """Return the cache file of :func:`machine_profile`; None if it uses a shipped profile."""
    if _shipped_here() is not None:
        return None
    return (cache_dir or default_cache_dir()) / f"machine-{fingerprint()}.toml"


def _shipped_here() -> str | None:
    return shipped_profile_name(device_name(), device_bytes()) if torch.cuda.is_available() else None


def device_name() -> str:
    """Return the GPU's name, or the processor's if there is no GPU."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()


def device_bytes() -> int:
    """Memory of the GPU, or of this machine if there is no GPU."""
    if not torch.cuda.is_available():
        return host_memory_bytes()
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def identity() -> str:
    """Return the device and the software, to which measured times belong."""
    mode = ""
    if torch.cuda.is_available():
        mode += ", products in TF32" if multiplies_in_tf32() else ""
        mode += "" if convolves_in_tf32() else ", convolutions without TF32"
    return f"{device_name()}, torch {torch.__version__}{mode}"


def fingerprint() -> str:
    """Return a hash that identifies a measurement: machine, processor, cores, torch; and for GPUs the number that its links joined."""
    parts: tuple[object, ...] = (platform.node(), device_name(), num_cores(), torch.__version__, _CACHE_VERSION)
    if torch.cuda.is_available():
        parts += (torch.cuda.device_count(), multiplies_in_tf32(), convolves_in_tf32())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def profile_dict(measured: dict[str, Any]) -> dict[str, Any]:
    """Return the profile file, from the measurements of the workers."""
    cuda = torch.cuda.is_available()
    where = f"measured {time.strftime('%Y-%m-%d')} on {device_name()}, torch {torch.__version__}"
    loopback = {"name": "loopback", "provenance": f"{where}: gloo all-reduce over two local processes"}
    intra_node, nic = _gpu_links(measured, where) if cuda else (measured["link"] | loopback,) * 2
    memory = device_bytes()
    node: dict[str, Any] = {"num_devices": 1, "num_nics": 1, "provenance": where}
    if cuda:
        node["num_devices"] = torch.cuda.device_count()
    else:
        node |= {"num_cores": num_cores(), "shares_memory": True}
        node["provenance"] += (
            f", {num_workers()} processes computing at once; more ranks than cores have each its share of the cores' speed"
        )
    host = {"host": measured_host(measured["host"], where)} if "host" in measured else {}
    return {
        "library": "nccl" if cuda else "gloo",
        "device": {
            **host,
            "name": "local",
            "kind": "cuda" if cuda else "cpu",
            "memory": {"num_bytes": memory, "provenance": where},
            "bandwidth": {
                "bytes_per_s": measured["copy_bandwidth_bytes_per_s"],
                "provenance": f"{where}: large copy, read plus write",
            },
            "launch": {
                "time_s": measured["launch_s"],
                "provenance": f"{where}: one of a chain of small operators",
            },
            "fragmentation": {"fraction": 0.05, "provenance": "assumed: not measured"},
            "interference": {"fraction": 0.15 if cuda else 1.0, "provenance": "assumed: as in the shipped profiles"},
            "uncertainty": {"fraction": 0.25 if cuda else 0.6, "provenance": "assumed: as in the shipped profiles"},
            "reserve": _reserves(cuda),
            "matmul": {
                dtype: _rate(points, where) | _attention(points, measured.get("attention", {}).get(dtype, []))
                for dtype, points in measured["matmul"].items()
            },
            "function": [
                {"name": name, "forward_s": forward, "backward_s": backward}
                for name, (forward, backward) in measured.get("functions", {}).items()
            ],
            "overheads": {
                **measured.get("overheads", {}),
                "provenance": f"{where}: autopar/measure/timers.py and worker.py, time of the calling thread"
                if measured.get("overheads")
                else "not measured",
            },
        },
        "intra_node": intra_node,
        "nic": nic,
        "node": node,
    }


def _gpu_links(measured: dict[str, Any], where: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the links inside the node as NCCL was timed with two or more GPUs; otherwise, and between nodes, those of :data:`STAND_IN`."""
    stand_in = load_profile(STAND_IN)
    intra_node, nic = (
        {**asdict(link), "provenance": f"{_ASSUMED}, not measured here: as of {STAND_IN}, {link.provenance}"}
        for link in (stand_in.intra_node, stand_in.nic)
    )
    if "link" in measured:
        timed = f"{where}: NCCL all-gather over {measured['link_ranks']} GPUs of this machine"
        intra_node = {
            "name": "measured",
            "bandwidth_bytes_per_s": measured["link"]["bandwidth_bytes_per_s"],
            "latency_s": 0.0,
            "provenance": f"{timed}; delays stand in links/nccl.toml",
        }
    return intra_node, nic


def measured_host(rates: dict[str, float], where: str) -> dict[str, Any]:
    """Return the table ``[device.host]`` from the result of ``measure.host_link``; the memory is divided among the node's devices."""
    share = host_memory_bytes() // torch.cuda.device_count()
    note = (
        f"{where}: copies of 256 MiB, page-locked, one device and one thread of the host at a time; its memory divided"
    )
    return {**rates, "num_bytes": share, "provenance": note}


def host_memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _reserves(cuda: bool) -> list[dict[str, Any]]:
    if cuda:  # context, communicators and workspaces take about the same on all
        return [
            {**asdict(reserve), "provenance": f"{_ASSUMED}: as of {STAND_IN}, {reserve.provenance}"}
            for reserve in load_profile(STAND_IN).device.reserves
        ]
    note = "assumed: as in the shipped profiles"
    return [{"name": "interpreter and libraries", "num_bytes": 400 * 2**20, "provenance": note}]


def _rate(points: list[dict[str, float]], where: str) -> dict[str, Any]:
    """Return the efficiency curve, made monotonic, so that a disturbed sample cannot make a larger matmul slower than a smaller one."""
    ceiling = max(point["flops_per_s"] for point in points)
    best, best_backward, curve = 0.0, 0.0, []
    for point in points:
        best = max(best, point["flops_per_s"])
        best_backward = max(best_backward, point.get("backward_flops_per_s", 0.0))
        row = {"smallest_dim": int(point["smallest_dim"]), "efficiency": best / ceiling}
        curve.append(row | {"backward_efficiency": min(best_backward / ceiling, 1.0)})
    return {
        "ceiling_flops_per_s": ceiling,
        "calibrated": True,
        "curve": curve,
        "provenance": f"{where}: [m, k] @ [k, n] with n = k fixed, medians of 5, up to five times",
    }


def _attention(points: list[dict[str, float]], measured: list[list[float]]) -> dict[str, float]:
    """Return the fraction of the ceiling and the half width of a head, from two widths; see ``MatmulRate.attention_flops_per_s``."""
    if len(measured) != 2:
        return {}
    ceiling = max(point["flops_per_s"] for point in points)
    (narrow, low, _), (wide, high, _) = measured
    # rate = f * width / (width + half) through both points
    half = narrow * wide * (high - low) / max(low * wide - high * narrow, 1e-9 * high)
    half = min(max(half, 0.0), 1024.0)
    backward = [rate * (width + half) / width / ceiling for width, _, rate in measured]
    return {
        "attention_fraction": high * (wide + half) / wide / ceiling,
        "attention_backward_fraction": sum(backward) / len(backward),
        "attention_half_width": half,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def num_workers() -> int:
    """Return the number of measuring processes: one for each GPU, which measure their links together; on a CPU one for each core, at least two.

    On a CPU all compute at once, as ranks do in training: a single busy core has a higher clock, and caches and memory for itself.
    """
    return torch.cuda.device_count() if torch.cuda.is_available() else max(2, min(num_cores(), MOST_WORKERS))


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure() -> dict[str, Any]:
    """Start the workers, wait at most ``TIMEOUT_S``, and read the result of rank 0."""
    count = num_workers()
    with tempfile.TemporaryDirectory(prefix="autopar-detect-") as name:
        folder = Path(name)
        workers = [_start_worker(rank, count, folder) for rank in range(count)]
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
                if time.monotonic() > deadline:
                    raise AutoparError(
                        f"Measuring this machine took longer than {TIMEOUT_S:.3g} s",
                        fix="Name a device instead of 'local', such as cpu:1x4",
                    )
                time.sleep(0.05)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        path = folder / "result.json"
        if not path.is_file():
            complaints = [(folder / f"rank{rank}.log").read_text(encoding="utf-8").strip() for rank in range(count)]
            raise AutoparError(
                f"Measuring this machine with {count} processes failed",
                got="\n".join(filter(None, complaints))[-2000:] or "no result",
                fix="Name a device instead of 'local', such as cpu:1x4",
            )
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return result


def _start_worker(rank: int, count: int, folder: Path) -> subprocess.Popen[bytes]:
    with (folder / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "autopar.measure.worker", str(rank), str(count), str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=child_environment(),
        )

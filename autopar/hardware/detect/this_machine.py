"""What this machine and this torch can do, and what to do about the rest."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from autopar.errors import AutoparError
from autopar.util import data_files as resources

_OLDEST_TORCH = (2, 11)
_BROKEN = (ImportError, AttributeError, RuntimeError, OSError)
"""What importing a half-installed or too old package raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line: what was looked for, whether it is there, what was found, and the remedy where it is not."""

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True
    """False: autopar works without it."""


def examine(cache_dir: Path | None = None) -> Iterator[Check]:
    """All checks, in the order in which they are printed."""
    yield from _machine()
    yield from _packages()
    yield from _torch()
    yield from _data(cache_dir)


def _machine() -> Iterator[Check]:
    version = platform.python_version()
    yield Check(name="python", ok=sys.version_info >= (3, 11), found=version, remedy="install Python 3.11 or later")
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    yield Check(name="cpu", ok=True, found=f"{cores} cores for this process, {os.cpu_count()} in the machine")
    total = _memory_bytes()
    found = f"{total / 2**30:.1f} GiB" if total else "unknown on this system"
    yield Check(name="memory", ok=total > 0, found=found, needed=False)


def _memory_bytes() -> int:
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" in names and "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _packages() -> Iterator[Check]:
    yield Check(name="autopar", ok=True, found=_version("autopar") or "used from a checkout")
    for name in ("spmd-types", "optuna", "networkx", "numpy", "scipy", "safetensors", "jsonschema"):
        version = _version(name)
        yield Check(name=name, ok=bool(version), found=version or "not installed", remedy=f"pip install {name}")
    version = _version("transformers")
    remedy = "pip install 'autopar[hf]' for models written as hf:..."
    yield Check(name="transformers", ok=bool(version), found=version or "not installed", remedy=remedy, needed=False)


def _torch() -> Iterator[Check]:
    try:
        torch = importlib.import_module("torch")
    except _BROKEN as error:
        yield Check(name="torch", ok=False, found=str(error), remedy="pip install torch")
        return
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    oldest = ".".join(map(str, _OLDEST_TORCH))
    yield Check(
        name="torch",
        ok=numbers >= _OLDEST_TORCH,
        found=torch.__version__,
        remedy=f"install torch {oldest} or later",
    )
    yield from _devices(torch)
    distributed = importlib.import_module("torch.distributed")
    available = distributed.is_available()
    yield Check(name="torch.distributed", ok=available, found=str(available), remedy="install a torch built with it")
    if not available:
        return
    yield _feature("gloo (CPU runs)", distributed.is_gloo_available, "install a torch built with gloo")
    yield _feature("NCCL (GPU runs)", distributed.is_nccl_available, "install a CUDA build of torch", needed=False)
    for name, module, attributes in _FEATURES:
        yield _feature(name, _has(module, attributes), f"install torch {oldest} or later")


_FEATURES = (
    ("model tracing", "torch.export", ("export",)),
    ("data parallel, ZeRO", "torch.distributed.fsdp", ("fully_shard", "FSDPModule", "MixedPrecisionPolicy")),
    ("tensor parallel parameters", "torch.distributed.tensor", ("DTensor", "distribute_tensor")),
    (
        "pipeline schedules",
        "torch.distributed.pipelining.schedules",
        ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"),
    ),
    ("distributed checkpoints", "torch.distributed.checkpoint", ("save", "load")),
    ("fake process group (plan checks)", "torch.testing._internal.distributed.fake_pg", ("FakeStore",)),
    ("typed collectives", "spmd_types", ("all_reduce", "all_gather", "reduce_scatter")),
)
"""What is printed, the module, and what must be in it."""


def _devices(torch: object) -> Iterator[Check]:
    cuda = getattr(torch, "cuda")  # noqa: B009  torch is imported by name: it has no type here
    if not cuda.is_available():
        yield Check(name="gpu", ok=False, found="none", remedy="runs use the CPU; plans need no GPU", needed=False)
        return
    for index in range(cuda.device_count()):
        properties = cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        yield Check(name=f"gpu {index}", ok=True, found=f"{properties.name}, {memory:.0f} GiB", needed=False)


def _data(kept: Path | None) -> Iterator[Check]:
    for name, what in (("profiles", "device profiles"), ("search", "search spaces")):
        try:
            found = ", ".join(resources.files(name))
        except AutoparError as error:
            yield Check(name=what, ok=False, found=str(error))
        else:
            yield Check(name=what, ok=bool(found), found=found or "none", remedy="install autopar again")
    yield Check(name="cache", ok=True, found=f"{kept} (AUTOPAR_CACHE)" if kept else "the user's cache directory")


def _feature(name: str, test: Callable[[], bool], remedy: str, *, needed: bool = True) -> Check:
    try:
        ok, found = test(), ""
    except _BROKEN as error:
        ok, found = False, f" ({error})"
    return Check(name=name, ok=ok, found=("available" if ok else "not available") + found, remedy=remedy, needed=needed)


def _has(module: str, attributes: tuple[str, ...]) -> Callable[[], bool]:
    def test() -> bool:
        found = importlib.import_module(module)
        return all(hasattr(found, attribute) for attribute in attributes)

    return test


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""

"""Commands on machines: ``autopar devices``, ``pins``, ``profile`` (measures a cluster) and ``doctor`` (checks this machine)."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options import (
    Json,
    PlanOptions,
    cache_dir,
    parse_cluster,
    print_json,
    print_result,
    print_text,
    progress,
    takes_plan_options,
    warn,
)
from autopar.errors import AutoparError
from autopar.measure.job_of_ranks import check_output, start_ranks, torchrun_job, under_torchrun
from autopar.util.files import data_files

if TYPE_CHECKING:
    from autopar.measure.profiles import Profiling
    from autopar.planner.search import Progress


def devices(as_json: Json = False) -> None:
    """List the devices that --cluster knows: memory, and the peak of products in each precision."""
    from autopar.hardware.describe import devices_summary, render_devices, shipped_devices

    profiles = shipped_devices()
    print_result(as_json, lambda: devices_summary(profiles), lambda: render_devices(profiles))


def pins(as_json: Json = False) -> None:
    """List the constraints of --pin, with an example of each."""
    from autopar.planner.space.pin_syntax import pins_summary, render_pins

    print_result(as_json, pins_summary, render_pins)


app = typer.Typer(help="Measure operators and links of a cluster.", no_args_is_help=True, rich_markup_mode=None)

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.toml", help="Write the profile here.")]
Batch = Annotated[
    int | None,
    typer.Option("--global-batch", min=1, metavar="N", help="Samples of a step; 8 for each rank if not given."),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        min=2,
        metavar="N",
        help="Local ranks without torchrun; if not given, one for each GPU or core (at least 2).",
    ),
]
Budget = Annotated[float, typer.Option("--budget", min=1, metavar="S", help="Seconds for measuring all collectives.")]
Largest = Annotated[int, typer.Option("--max-bytes", min=1024, metavar="N", help="Bytes of the largest collective.")]
Timeout = Annotated[
    float,
    typer.Option("--collective-timeout", min=1, metavar="S", help="Seconds after which a collective counts as failed."),
]
Nics = Annotated[int | None, typer.Option("--nics", min=1, metavar="N", help="Network cards of a node.")]


MEASURED: dict[str, Any] = {
    "without": ("optimizer", "max_step_time"),
    "defaults": {"global_batch": None, "output": MISSING},
    "global_batch": Batch,
    "output": Output,
}
"""The options of a command that measures operators."""


@app.command("ops")
@takes_plan_options(**MEASURED)
def ops(plan_options: PlanOptions) -> None:
    """Time every operator at every local shape that a search for MODEL can need; an interrupted measurement is continued."""
    output, cluster = _output(plan_options), plan_options.cluster
    check_output(output)
    from autopar.hardware.describe import machine_of
    from autopar.measure.profiles import calls_of, device_of
    from autopar.request import Request

    machine = machine_of(cluster, cache_dir=cache_dir())
    device_of(machine)  # raises before the model is traced
    request = Request(**plan_options.request)
    with progress("timing operators") as advance:
        calls = calls_of(
            plan_options.model, request, parse_cluster(cluster), sequence=plan_options.seq, advance=advance
        )
        summary = _profiling(output, advance).operators(calls, machine)
    _print(summary, plan_options.as_json)


def _output(plan_options: PlanOptions) -> Path:
    """Return the file of the profile."""
    assert plan_options.output is not None
    return plan_options.output


@app.command("links")
def links(
    output: Output,
    ranks: Ranks = None,
    max_bytes: Largest = 2**30,
    budget: Budget = 120.0,
    collective_timeout: Timeout = 30.0,
    nics: Nics = None,
    as_json: Json = False,
) -> None:
    """Time collectives between the ranks of a torchrun job or of this machine; an interrupted measurement is continued."""
    check_output(output)
    with progress("timing collectives") as advance:
        profiling = _profiling(output, advance, nics)
        if not under_torchrun():
            start_ranks(output, ranks, max_bytes=max_bytes, budget=budget, timeout=collective_timeout, nics=nics)
            summary: dict[str, Any] | None = profiling.kept_links()
        else:
            with torchrun_job(max_bytes, budget, collective_timeout) as job:
                summary = profiling.links(job)
    if summary is not None:
        _print(summary, as_json)


@app.command("all")
@takes_plan_options(**(MEASURED | {"without": ("cluster", *MEASURED["without"])}))
def everything(
    plan_options: PlanOptions,
    ranks: Ranks = None,
    max_bytes: Largest = 2**30,
    budget: Budget = 120.0,
    collective_timeout: Timeout = 30.0,
    nics: Nics = None,
) -> None:
    """Links, then operators of MODEL, and a cluster file that names both; under torchrun every rank takes part."""
    output = _output(plan_options)
    check_output(output)
    from autopar.measure.profiles import calls_of
    from autopar.request import Request

    request, sequence = Request(**plan_options.request), plan_options.seq
    with progress("timing collectives") as advance:
        profiling = _profiling(output, advance, nics)
        links, device = profiling.part("links"), profiling.part("device")

        def calls() -> list[str]:
            cluster = parse_cluster(str(output))
            return calls_of(plan_options.model, request, cluster, sequence=sequence, advance=advance)

        if not under_torchrun():
            start_ranks(links.output, ranks, max_bytes=max_bytes, budget=budget, timeout=collective_timeout, nics=nics)
            profiling.cluster()
            operators_found: dict[str, Any] | None = device.operators(calls(), device.machine())
        else:
            with torchrun_job(max_bytes, budget, collective_timeout) as job:
                links_found = links.links(job)
                store, rank, world = job.store, job.rank, job.world
            if links_found is not None:
                profiling.cluster()
            operators_found = device.shared_operators(store, rank, world, calls)
        if operators_found is None:
            return
        summary = {**links.kept_links(), **operators_found, "cluster": str(output)}
    _print(summary, plan_options.as_json)


def _profiling(output: Path, advance: Progress, nics: int | None = None) -> Profiling:
    from autopar.measure.profiles import Profiling

    return Profiling(output=output, say=warn, advance=advance, cache_dir=cache_dir(), nics=nics)


def _print(summary: dict[str, Any], as_json: bool) -> None:
    from autopar.measure.profiles import render

    print_result(as_json, lambda: summary, lambda: render(summary))


_OLDEST_TORCH = (2, 11)
_BROKEN = (ImportError, AttributeError, RuntimeError, OSError)
"""Errors from the import of a half-installed or too old package."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of ``autopar doctor``.

    Attributes:
        name: the thing that is checked.
        ok: whether it is there.
        found: a description of what was found.
        remedy: the remedy if it is missing.
        needed: whether autopar cannot work without it.
    """

    name: str
    ok: bool
    found: str
    remedy: str = ""
    needed: bool = True


def _machine() -> Iterator[Check]:
    """Check Python, cores and memory."""
    version = platform.python_version()
    yield Check(name="python", ok=sys.version_info >= (3, 11), found=version, remedy="install Python 3.11 or later")
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    yield Check(name="cpu", ok=True, found=f"{cores} cores for this process, {os.cpu_count()} in the machine")
    total = _memory_bytes()
    found = f"{total / 2**30:.1f} GiB" if total else "unknown on this system"
    yield Check(name="memory", ok=total > 0, found=found, needed=False)


def _memory_bytes() -> int:
    """Return the memory of the machine in bytes; 0 if it is unknown."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" in names and "SC_PHYS_PAGES" in names:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def _packages() -> Iterator[Check]:
    """Check the packages that autopar imports."""
    yield Check(name="autopar", ok=True, found=_version("autopar") or "used from a checkout")
    for name in ("spmd-types", "optuna", "networkx", "numpy", "scipy", "safetensors"):
        version = _version(name)
        yield Check(name=name, ok=bool(version), found=version or "not installed", remedy=f"pip install {name}")
    version = _version("transformers")
    remedy = "pip install 'autopar[hf]' for models written as hf:..."
    yield Check(name="transformers", ok=bool(version), found=version or "not installed", remedy=remedy, needed=False)


def _torch() -> Iterator[Check]:
    """Check the version of torch, its devices, and the features that autopar uses."""
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
        yield _feature(name, partial(_has, module, attributes), f"install torch {oldest} or later")


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
"""A name to print, a module, and attributes that it must have."""


def _devices(torch: object) -> Iterator[Check]:
    """Check for GPUs."""
    cuda = getattr(torch, "cuda")  # noqa: B009  torch is imported by name: it has no type here
    if not cuda.is_available():
        yield Check(name="gpu", ok=False, found="none", remedy="runs use the CPU; plans need no GPU", needed=False)
        return
    for index in range(cuda.device_count()):
        properties = cuda.get_device_properties(index)
        memory = properties.total_memory / 2**30
        yield Check(name=f"gpu {index}", ok=True, found=f"{properties.name}, {memory:.0f} GiB", needed=False)


def _data(kept: Path | None) -> Iterator[Check]:
    """Check the files that autopar ships, and name the cache directory."""
    for name, what in (("profiles", "device profiles"), ("search", "search spaces")):
        try:
            found = ", ".join(data_files(name))
        except AutoparError as error:
            yield Check(name=what, ok=False, found=str(error))
        else:
            yield Check(name=what, ok=bool(found), found=found or "none", remedy="install autopar again")
    yield Check(name="cache", ok=True, found=f"{kept} (AUTOPAR_CACHE)" if kept else "the user's cache directory")


def _feature(name: str, test: Callable[[], bool], remedy: str, *, needed: bool = True) -> Check:
    """Return the check of one feature; ``test`` may raise an import error."""
    try:
        ok, found = test(), ""
    except _BROKEN as error:
        ok, found = False, f" ({error})"
    return Check(name=name, ok=ok, found=("available" if ok else "not available") + found, remedy=remedy, needed=needed)


def _has(module: str, attributes: tuple[str, ...]) -> bool:
    imported = importlib.import_module(module)
    return all(hasattr(imported, attribute) for attribute in attributes)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def doctor(as_json: Json = False) -> None:
    """Report the capabilities of this machine and of torch; exits with 1 if something that autopar needs is missing."""
    checks = [*_machine(), *_packages(), *_torch(), *_data(cache_dir())]
    healthy = all(check.ok for check in checks if check.needed)
    if as_json:
        print_json({"ok": healthy, "checks": [asdict(check) for check in checks]})
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            word = "ok" if check.ok else "missing" if check.needed else "absent"
            remedy = "" if check.ok or not check.remedy else f"; {check.remedy}"
            print_text(f"{word:<8} {check.name:<{width}}  {check.found}{remedy}")
        print_text("\neverything that autopar needs is here" if healthy else "\nautopar cannot run here: see 'missing'")
    if not healthy:
        raise typer.Exit(1)

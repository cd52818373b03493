"""Commands on machines: ``autopar devices``, ``pins``, ``profile`` (measures a cluster) and ``doctor`` (checks this machine)."""

from __future__ import annotations

import inspect
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.options import (
    Json,
    PlanOptions,
    cache_dir,
    parse_cluster,
    print_result,
    progress,
    takes_plan_options,
    warn,
)
from autopar.measure.job_of_ranks import check_output, start_ranks, torchrun_job, under_torchrun
from autopar.util.files import data_files

if TYPE_CHECKING:
    from autopar.measure.collective_times import LinkJob
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
Batch = Annotated[int | None, typer.Option(min=1, metavar="N", help="Samples of a step; 8 for each rank if not given.")]
Ranks = Annotated[
    int | None,
    typer.Option(
        min=2,
        max=1024,
        metavar="N",
        help="Local ranks without torchrun; if not given, one for each GPU or core (at least 2).",
    ),
]
Budget = Annotated[float, typer.Option(min=1, metavar="S", help="Seconds for measuring all collectives.")]
Largest = Annotated[int, typer.Option(min=1024, metavar="N", help="Bytes of the largest collective.")]
Timeout = Annotated[float, typer.Option(min=1, metavar="S", help="Seconds after which a collective counts as failed.")]
Nics = Annotated[int | None, typer.Option(min=1, metavar="N", help="Network cards of a node.")]


MEASURED: dict[str, Any] = {
    "without": ("optimizer", "max_step_time"),
    "defaults": {"global_batch": None, "output": inspect.Parameter.empty},
    "global_batch": Batch,
    "output": Output,
}
"""The options of a command that measures operators."""


@app.command("ops")
@takes_plan_options(**MEASURED)
def ops(plan_options: PlanOptions) -> None:
    """Time every operator at every local shape that a search for MODEL can need; an interrupted measurement is continued."""
    output = _output(plan_options)
    from autopar.hardware.describe import machine_of

    machine = machine_of(plan_options.cluster, cache_dir=cache_dir())
    with progress("timing operators") as advance:
        calls = _calls(plan_options, plan_options.cluster, advance)
        summary = _profiling(output, advance).operators(machine, calls)
    assert summary is not None
    _print(summary, plan_options.as_json)


def _output(plan_options: PlanOptions) -> Path:
    """Return the file of the profile, after a check that it can be written."""
    assert plan_options.output is not None
    check_output(plan_options.output)
    return plan_options.output


def _calls(plan_options: PlanOptions, cluster: str, advance: Progress) -> Callable[[], list[str]]:
    """Return what lists the operators of a search on a cluster, whose file may be written later."""
    from autopar.measure.profiles import calls_of
    from autopar.request import Request

    model, sequence, request = plan_options.model, plan_options.seq, Request(**plan_options.request)
    return lambda: calls_of(model, request, parse_cluster(cluster), sequence=sequence, advance=advance)


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
        job = _measure_links(profiling, ranks, max_bytes, budget, collective_timeout)
    if job is None or job.rank == 0:
        _print(profiling.kept_links(), as_json)


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
    with progress("timing collectives") as advance:
        profiling, calls = _profiling(output, advance, nics), _calls(plan_options, str(output), advance)
        links, device = profiling.part("links"), profiling.part("device")
        job = _measure_links(links, ranks, max_bytes, budget, collective_timeout)
        is_first = job is None or job.rank == 0
        if is_first:
            profiling.cluster()
        operators_found = device.operators(device.machine() if is_first else None, calls, job)
        if operators_found is None:
            return
        summary = {**links.kept_links(), **operators_found, "cluster": str(output)}
    _print(summary, plan_options.as_json)


def _measure_links(
    profiling: Profiling, ranks: int | None, max_bytes: int, budget: float, timeout: float
) -> LinkJob | None:
    """Measure and write links: as a rank of torchrun, whose job is returned, or on ranks of this machine that are started here."""
    if not under_torchrun():
        start_ranks(profiling.output, ranks, max_bytes=max_bytes, budget=budget, timeout=timeout, nics=profiling.nics)
        return None
    with torchrun_job(max_bytes, budget, timeout) as job:
        profiling.links(job)
    return job


def _profiling(output: Path, advance: Progress, nics: int | None = None) -> Profiling:
    from autopar.measure.profiles import Profiling

    return Profiling(output=output, say=warn, advance=advance, cache_dir=cache_dir(), nics=nics)


def _print(summary: dict[str, Any], as_json: bool) -> None:
    from autopar.measure.profiles import render

    print_result(as_json, lambda: summary, lambda: render(summary))


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


_PACKAGES = ("autopar", "spmd-types", "optuna", "networkx", "numpy", "scipy", "safetensors", "transformers")
_OLDEST_TORCH = "2.11"


def _machine() -> Iterator[Check]:
    """Check Python, cores and memory."""
    version = platform.python_version()
    yield Check(name="python", ok=sys.version_info >= (3, 11), found=version, remedy="install Python 3.11 or later")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check(name="cpu", ok=True, found=f"{cores} cores for this process, {os.cpu_count()} in the machine")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield Check(name="memory", ok=True, found=f"{total / 2**30:.1f} GiB")


def _packages() -> Iterator[Check]:
    """Check the packages that autopar imports, and transformers."""
    for name in _PACKAGES:
        try:
            found, ok = metadata.version(name), True
        except metadata.PackageNotFoundError:
            found, ok = "used from a checkout" if name == "autopar" else "not installed", name == "autopar"
        needed = name != "transformers"
        remedy = f"pip install {name}" if needed else "pip install 'autopar[hf]' for models written as hf:..."
        yield Check(name=name, ok=ok, found=found, remedy=remedy, needed=needed)


def _torch() -> Iterator[Check]:
    """Check the version of torch, its devices, and its backends for process groups."""
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, AttributeError, RuntimeError, OSError) as error:  # half-installed
        yield Check(name="torch", ok=False, found=str(error), remedy="pip install torch")
        return
    version, remedy = torch.__version__, f"install torch {_OLDEST_TORCH} or later"
    yield Check(name="torch", ok=version >= _OLDEST_TORCH, found=version, remedy=remedy)  # not compared as texts
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    found = ", ".join(f"{device.name} of {device.total_memory / 2**30:.0f} GiB" for device in devices)
    remedy = "runs use the CPU; plans need no GPU"
    yield Check(name="gpu", ok=bool(devices), found=found or "none", remedy=remedy, needed=False)
    has_gloo, has_nccl = (dist.is_gloo_available(), dist.is_nccl_available()) if dist.is_available() else (False, False)
    for name, ok, needed in (("gloo (CPU runs)", has_gloo, True), ("NCCL (GPU runs)", has_nccl, False)):
        found = "available" if ok else "not available"
        yield Check(
            name=name, ok=ok, found=found, remedy=f"install a torch built with {name.split()[0]}", needed=needed
        )


def _data(kept: Path | None) -> Iterator[Check]:
    """Name the files that autopar ships, and the cache directory."""
    for name, what in (("profiles", "device profiles"), ("search", "search spaces")):
        yield Check(name=what, ok=True, found=", ".join(data_files(name)))
    yield Check(name="cache", ok=True, found=f"{kept} (AUTOPAR_CACHE)" if kept else "the user's cache directory")


def doctor(as_json: Json = False) -> None:
    """Report the capabilities of this machine and of torch; exits with 1 if something that autopar needs is missing."""
    checks = [*_machine(), *_packages(), *_torch(), *_data(cache_dir())]
    healthy = all(check.ok for check in checks if check.needed)
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        word = "ok" if check.ok else "missing" if check.needed else "absent"
        remedy = "" if check.ok or not check.remedy else f"; {check.remedy}"
        lines.append(f"{word:<8} {check.name:<{width}}  {check.found}{remedy}")
    lines += ["", "everything that autopar needs is here" if healthy else "autopar cannot run here: see 'missing'"]
    summary = {"ok": healthy, "checks": [asdict(check) for check in checks]}
    print_result(as_json, lambda: summary, lambda: "\n".join(lines))
    if not healthy:
        raise typer.Exit(1)

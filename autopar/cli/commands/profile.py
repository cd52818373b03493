"""``autopar profile``: measures operators and links, and writes profiles that ``--cluster`` takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autopar.cli.console import cache_dir, print_json, print_text, progress, warn
from autopar.cli.options import (
    ClusterOption,
    Json,
    Model,
    Opaque,
    Pin,
    PrecisionOption,
    Sequence_,
    Space,
    parse_cluster,
    split_pins,
)
from autopar.measure.job_of_ranks import check_output, start_ranks, torchrun_job, under_torchrun

if TYPE_CHECKING:
    from autopar.measure.profiles import Profiling
    from autopar.planner.task import Progress
    from autopar.request import Request

app = typer.Typer(help="Measure operators and links of a cluster.", no_args_is_help=True, rich_markup_mode=None)

Output = Annotated[Path, typer.Option("-o", "--output", metavar="FILE.toml", help="Write the profile here.")]
Batch = Annotated[
    int | None, typer.Option("--global-batch", min=1, metavar="N", help="Samples of a step; 8 a rank if not given.")
]
Ranks = Annotated[
    int | None,
    typer.Option(
        "--ranks", min=2, metavar="N", help="Without torchrun: local ranks; a GPU or a core each (at least 2)."
    ),
]
Budget = Annotated[float, typer.Option("--budget", min=1, metavar="S", help="Seconds for all collectives.")]
Largest = Annotated[int, typer.Option("--max-bytes", min=1024, metavar="N", help="Of the largest collective.")]
Timeout = Annotated[
    float, typer.Option("--collective-timeout", min=1, metavar="S", help="Seconds until a collective has failed.")
]
Nics = Annotated[int | None, typer.Option("--nics", min=1, metavar="N", help="Network cards of a node.")]


@app.command("ops")
def ops(
    model: Model,
    cluster: ClusterOption,
    output: Output,
    space: Space = "default",
    global_batch: Batch = None,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    pin: Pin = None,
    opaque: Opaque = None,
    as_json: Json = False,
) -> None:
    """Time every operator at every local shape that a search for MODEL can ask for; continues what was begun."""
    check_output(output)
    from autopar.hardware.describe import machine_of
    from autopar.measure.profiles import calls_of, device_of

    machine = machine_of(cluster, cache_dir=cache_dir())
    device_of(machine)  # before the model is traced
    asked = _asked(space, global_batch, precision, pin, opaque)
    with progress("timing operators") as advance:
        calls = calls_of(model, asked, parse_cluster(cluster), sequence=seq, advance=advance)
        found = _profiling(output, advance).operators(calls, machine)
    _give(found, as_json)


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
    """Time collectives between the ranks of a torchrun job, or of this machine; continues what was begun."""
    check_output(output)
    with progress("timing collectives") as advance:
        profiling = _profiling(output, advance, nics)
        if not under_torchrun():
            start_ranks(output, ranks, max_bytes=max_bytes, budget=budget, timeout=collective_timeout, nics=nics)
            found: dict[str, Any] | None = profiling.kept_links()
        else:
            with torchrun_job(max_bytes, budget, collective_timeout) as job:
                found = profiling.links(job)
    if found is not None:
        _give(found, as_json)


@app.command("all")
def everything(
    model: Model,
    output: Output,
    ranks: Ranks = None,
    space: Space = "default",
    global_batch: Batch = None,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    pin: Pin = None,
    opaque: Opaque = None,
    max_bytes: Largest = 2**30,
    budget: Budget = 120.0,
    collective_timeout: Timeout = 30.0,
    nics: Nics = None,
    as_json: Json = False,
) -> None:
    """Links, then operators of MODEL, and a cluster file that names both; under torchrun every rank takes part."""
    check_output(output)
    from autopar.measure.profiles import calls_of

    asked = _asked(space, global_batch, precision, pin, opaque)
    with progress("timing collectives") as advance:
        both = _profiling(output, advance, nics)
        links, device = both.part("links"), both.part("device")

        def calls() -> list[str]:
            return calls_of(model, asked, parse_cluster(str(output)), sequence=seq, advance=advance)

        if not under_torchrun():
            start_ranks(links.output, ranks, max_bytes=max_bytes, budget=budget, timeout=collective_timeout, nics=nics)
            both.cluster()
            found: dict[str, Any] | None = device.operators(calls(), device.machine())
        else:
            with torchrun_job(max_bytes, budget, collective_timeout) as job:
                linked = links.links(job)
                store, rank, world = job.store, job.rank, job.world
            if linked is not None:
                both.cluster()
            found = device.shared_operators(store, rank, world, calls)
        if found is None:
            return
        summary = {**links.kept_links(), **found, "cluster": str(output)}
    _give(summary, as_json)


def _profiling(output: Path, advance: Progress, nics: int | None = None) -> Profiling:
    from autopar.measure.profiles import Profiling

    return Profiling(output=output, say=warn, advance=advance, cache_dir=cache_dir(), nics=nics)


def _asked(
    space: str, global_batch: int | None, precision: str, pin: list[str] | None, opaque: list[str] | None
) -> Request:
    from autopar.request import Request

    pins = split_pins(pin or ())
    return Request(global_batch_size=global_batch, pins=pins, precision=precision, space=space, opaque=opaque or ())


def _give(found: dict[str, Any], as_json: bool) -> None:
    from autopar.measure.profiles import render

    if as_json:
        print_json(found)
    else:
        print_text(render(found))

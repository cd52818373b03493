"""``autopar benchmark local``: plans run on this machine, predictions held against them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.console import cache_dir, print_json, print_text, progress
from autopar.cli.options import GlobalBatch, Json, Model, Optimizer, Pin, PrecisionOption, Sequence_, split_pins
from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.benchmark.batches import Outcome

app = typer.Typer(help="Run plans and hold the predictions against them.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Run plans and hold the predictions against them."""


Ranks = Annotated[int, typer.Option("--ranks", min=1, metavar="N", help="Processes on this machine (CPU).")]
AsRank = Annotated[
    int | None,
    typer.Option(
        "--as-rank",
        min=0,
        metavar="R",
        help="Run this rank of plans for N ranks alone, for its compute and memory; its collectives move nothing.",
    ),
]
Space = Annotated[str, typer.Option(metavar="NAME|FILE", help="What may be chosen: default, quick or a file.")]
Sample = Annotated[
    int | None, typer.Option("--sample", min=1, metavar="N", help="So many candidates, drawn; all if not given.")
]
SampleSeed = Annotated[int, typer.Option("--sample-seed", metavar="N", help="Of the drawn candidates.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each plan.")]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps of a turn.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure this machine's speed now; without it, when that was over 6 hours ago.")
]
RunTimeout = Annotated[
    float, typer.Option("--run-timeout", min=1, metavar="S", help="A batch of plans is killed after it.")
]
Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Keep measurements here; a run that stopped goes on."),
]


@app.command("local")
def local(
    model: Model,
    global_batch: GlobalBatch = 16,
    ranks: Ranks = 4,
    as_rank: AsRank = None,
    space: Space = "default",
    sample: Sample = None,
    sample_seed: SampleSeed = 0,
    seq: Sequence_ = None,
    precision: PrecisionOption = "fp32",
    optimizer: Optimizer = "adamw",
    pin: Pin = None,
    rounds: Rounds = 3,
    steps: Steps = 3,
    fresh: Fresh = False,
    run_timeout: RunTimeout = 300,
    output: Output = None,
    as_json: Json = False,
) -> None:
    """Run every plan of a space, or a sample, on this machine's ranks; print predicted against measured time and memory.

    Says how well predictions rank the plans and what the plan that the search picks loses against the best measured.
    With a GPU: one device, every micro-batch, recompute and precision of the space; or, with --as-rank, one rank of plans
    without a pipeline for --ranks devices.
    """
    from autopar.benchmark.batches import render
    from autopar.benchmark.local import BenchmarkRequest, run_local
    from autopar.benchmark.rank_runs import QUIET_PROFILER
    from autopar.util.files import check_writable

    if output is not None:
        check_writable(output, make_folder=True)
    request = BenchmarkRequest(
        model=model,
        num_ranks=ranks,
        global_batch_size=global_batch,
        space=space,
        sample=sample,
        sample_seed=sample_seed,
        sequence=seq,
        precision=precision,
        optimizer=optimizer,
        pins=tuple(split_pins(pin or ())),
        rounds=rounds,
        steps=steps,
        run_timeout_s=run_timeout,
        fresh=fresh,
        as_rank=as_rank,
    )
    for name, value in QUIET_PROFILER.items():
        os.environ.setdefault(name, value)
    with progress("reading the model") as advance:
        outcome: Outcome = run_local(request, results=output, cache_dir=cache_dir(), advance=advance)
    if as_json:
        print_json(outcome.to_dict())
    else:
        print_text(render(outcome))
    if outcome.rows and all(row.failure for row in outcome.rows):
        raise AutoparError(
            f"All {len(outcome.rows)} plans failed",
            where=model,
            fix="See the reasons in the lines above, or look for them with 'autopar verify'",
        )

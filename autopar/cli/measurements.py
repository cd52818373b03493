"""``autopar benchmark local`` and ``validate``: predictions compared with measurements of this machine, or with runs in files."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.options import (
    Json,
    PlanOptions,
    cache_dir,
    print_result,
    progress,
    refuse_beside,
    takes_plan_options,
    warn,
)
from autopar.errors import AutoparError, UsageError
from autopar.util.files import check_writable

if TYPE_CHECKING:
    from autopar.benchmark.batches import Outcome


app = typer.Typer(help="Run plans and compare them with their predictions.", no_args_is_help=True)


@app.callback()
def root() -> None:
    """Run plans and compare them with their predictions."""


Ranks = Annotated[int, typer.Option(min=1, metavar="N", help="Processes on this machine (CPU).")]
AsRank = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="R",
        help="Run only this rank of plans for N ranks, to measure compute and memory; collectives move no data.",
    ),
]
Space = Annotated[str, typer.Option(metavar="NAME|FILE", help="Search space: default, quick or a TOML file.")]
Sample = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Number of candidates, drawn at random; all if not given.")
]
SampleSeed = Annotated[int, typer.Option(metavar="N", help="Seed of the drawn candidates.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Number of times that each plan runs.")]
Steps = Annotated[int, typer.Option(min=1, metavar="N", help="Timed steps of each run of a plan.")]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh", help="Measure the speed of this machine now, not only if the last time was over 6 hours ago."
    ),
]
RunTimeout = Annotated[float, typer.Option(min=1, metavar="S", help="Seconds after which a batch of plans is killed.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "-o", "--output", metavar="FILE", help="Write measurements here; an interrupted run continues from them."
    ),
]


@app.command("local")
@takes_plan_options(
    without=("cluster", "opaque", "max_step_time"), defaults={"global_batch": 16}, space=Space, output=Output
)
def local(
    plan_options: PlanOptions,
    ranks: Ranks = 4,
    as_rank: AsRank = None,
    sample: Sample = None,
    sample_seed: SampleSeed = 0,
    rounds: Rounds = 3,
    steps: Steps = 3,
    fresh: Fresh = False,
    run_timeout: RunTimeout = 300,
) -> None:
    """Run all plans of a space, or a sample, on ranks of this machine, and print predicted and measured times and memory.

    Reports how well predictions rank the plans, and how much slower the plan of a search is than the best measured plan.
    With a GPU: one device, with every micro-batch, recompute and precision of the space; or, with --as-rank, one rank of
    plans without a pipeline for --ranks devices.
    """
    from autopar.benchmark.batches import render
    from autopar.benchmark.local import BenchmarkRequest, run_local
    from autopar.benchmark.rank_runs import QUIET_PROFILER

    output = plan_options.output
    if output is not None:
        check_writable(output, make_folder=True)
    request = BenchmarkRequest(
        **plan_options.request,
        model=plan_options.model,
        num_ranks=ranks,
        sample=sample,
        sample_seed=sample_seed,
        sequence=plan_options.seq,
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
    print_result(plan_options.as_json, outcome.to_dict, lambda: render(outcome))
    if outcome.rows and all(row.failure for row in outcome.rows):
        raise AutoparError(
            f"All {len(outcome.rows)} plans failed",
            where=plan_options.model,
            fix="See the reasons in the lines above, or look for them with 'autopar verify'",
        )


Files = Annotated[
    list[Path] | None, typer.Argument(metavar="RUNS.csv...", help="Measured runs; see docs/evidence/accuracy.md.")
]
FromRun = Annotated[
    Path | None, typer.Option(metavar="DIR", help="The log_dir of a run of autopar.parallelize, instead of RUNS.csv.")
]
LeaveOneOut = Annotated[
    bool, typer.Option("--leave-one-out", help="Predict each source with parameters fitted on the others.")
]
Calibrate = Annotated[
    list[str] | None, typer.Option(metavar="SOURCE", help="Fit the profiles' free parameters to these sources, or all.")
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="DIR", help="Write calibrated profiles here; they are printed if not given."),
]


def validate(
    files: Files = None,
    from_run: FromRun = None,
    leave_one_out: LeaveOneOut = False,
    calibrate: Calibrate = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Predict measured runs and print the accuracy by source: errors, ranks, intervals and memory.

    A run that cannot be predicted is reported with its error; the others are predicted, and the exit code is 1.
    """
    if from_run is not None:
        refuse_beside("beside --from-run", leave_one_out=leave_one_out, calibrate=calibrate)
        _from_run(from_run, files or [], as_json)
        return
    if out is not None:
        if not calibrate:
            raise UsageError("--out goes with --calibrate alone", fix="Leave it out, or add --calibrate SOURCE")
        check_writable(out / "profile.toml", make_folder=True)
    if not files:
        raise UsageError("No runs to validate with", fix="Give RUNS.csv files, or --from-run DIR")
    from autopar.validate.scores import validated

    with progress("reading runs") as advance:
        report = validated(files, sources=calibrate or (), leave_one_out=leave_one_out, progress=advance)
    if out is not None:
        for path in report.write_profiles(out):
            warn(f"wrote {path}")
        report = replace(report, profiles={})
    print_result(as_json, report.to_dict, report.text)
    if report.outcome.failed:
        raise typer.Exit(1)


def _from_run(folder: Path, files: list[Path], as_json: bool) -> None:
    """Compare the measurements of a run's first steps with its plan's prediction."""
    from autopar.plan.run_log import read_log
    from autopar.report.summaries import render_run, run_summary

    if files:
        raise UsageError(f"--from-run does not go with a file of runs ({files[0]})", fix="Leave one of them out")
    record = read_log(folder)
    print_result(as_json, lambda: run_summary(record), lambda: render_run(record))

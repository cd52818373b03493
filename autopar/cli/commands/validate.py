"""``autopar validate``: predictions against measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text, progress, warn, write_report
from autopar.cli.options import Json
from autopar.errors import UsageError

Files = Annotated[
    list[Path] | None, typer.Argument(metavar="RUNS.csv...", help="Measured runs; see docs/evidence/accuracy.md.")
]
FromRun = Annotated[
    Path | None, typer.Option("--from-run", metavar="DIR", help="Instead: the log_dir of a run of autopar.parallelize.")
]
LeaveOneOut = Annotated[
    bool, typer.Option("--leave-one-out", help="Predict each source with parameters fitted on the others.")
]
Calibrate = Annotated[
    list[str] | None,
    typer.Option("--calibrate", metavar="SOURCE", help="Fit the profiles' free parameters to these sources, or all."),
]
Out = Annotated[
    Path | None,
    typer.Option("-o", "--out", metavar="DIR", help="Write calibrated profiles here; without it they are printed."),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a scatter of all runs.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the figures.")]


def validate(
    files: Files = None,
    from_run: FromRun = None,
    leave_one_out: LeaveOneOut = False,
    calibrate: Calibrate = None,
    out: Out = None,
    html: Html = None,
    markdown: Markdown = None,
    as_json: Json = False,
) -> None:
    """Predict measured runs and print how far off: error, rank, interval, memory, by source.

    A row that cannot be predicted is reported with its error beside the predictions of the others; the exit code is then 1.
    """
    if from_run is not None:
        _from_run(from_run, files or [], as_json)
        return
    if out is not None:
        _check_out(out, calibrate)
    _check(files or (), [path for path in (html, markdown) if path is not None])
    from autopar.validate.report import render_html
    from autopar.validate.validation import validated

    with progress("reading runs") as advance:
        found = validated(files or (), sources=calibrate or (), leave_one_out=leave_one_out, progress=advance)
    session, outcome = found.session, found.outcome
    if html is not None:
        write_report(html, render_html(outcome.scores, session.runs, outcome.predictions, outcome.failed))
    if markdown is not None:
        write_report(markdown, f"{found.text(with_profiles=False)}\n")
    for path in found.write_profiles(out) if out is not None else ():
        warn(f"wrote {path}")
    if as_json:
        print_json(found.to_dict(with_profiles=out is None))
    else:
        print_text(found.text(with_profiles=out is None))
    if outcome.failed:
        raise typer.Exit(1)


def _check_out(folder: Path, calibrate: list[str] | None) -> None:
    """Refuse a folder that is not asked for, or cannot be written.

    Raises:
        UsageError: it is one of these.
    """
    from autopar.util.files import check_writable

    if not calibrate:
        raise UsageError("--out goes with --calibrate alone", fix="Leave it out, or add --calibrate SOURCE")
    check_writable(folder / "profile.toml", make_folder=True)


def _check(files: Sequence[Path], written: Sequence[Path]) -> None:
    """Refuse what cannot end well, before anything is computed.

    Raises:
        UsageError: no runs, or a file that cannot be written.
    """
    from autopar.util.files import check_writable

    if not files:
        raise UsageError("No runs to validate with", fix="Give RUNS.csv files, or --from-run DIR")
    for path in written:
        check_writable(path)


def _from_run(folder: Path, files: list[Path], as_json: bool) -> None:
    """What the first steps of a run measured, against its plan's prediction."""
    from autopar.plan.run_log import read_log
    from autopar.report.compare import render_run, run_summary

    if files:
        raise UsageError(f"--from-run does not go with a file of runs ({files[0]})", fix="Leave one of them out")
    record = read_log(folder)
    if as_json:
        print_json(run_summary(record))
    else:
        print_text(render_run(record))

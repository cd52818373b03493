"""``autopar validate``: predictions against measured runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from autopar.cli.console import print_json, print_text, progress, warn
from autopar.cli.options import Json
from autopar.errors import UsageError


def validate(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="RUNS.csv...", help="Measured runs; see docs/validation.md.")
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option("--from-run", metavar="DIR", help="Instead: the log_dir of a run of autopar.parallelize."),
    ] = None,
    leave_one_out: Annotated[
        bool, typer.Option("--leave-one-out", help="Predict each source with parameters fitted on the others.")
    ] = False,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            "--calibrate", metavar="SOURCE", help="Fit the profiles' free parameters to these sources, or all."
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where calibrated profiles are written.")
    ] = Path("profiles"),
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a scatter of all runs.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the figures.")] = None,
    before: Annotated[
        Path | None,
        typer.Option(
            "--before", metavar="JSON", help="With --markdown: the page of a blind test, beside an earlier --json."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict measured runs and print how far off: error, rank, interval, memory, by source."""
    if from_run is not None:
        _from_run(from_run, files or [], as_json)
        return
    if not files:
        raise UsageError("validate has runs to read", value="none", remedy="give RUNS.csv files, or --from-run DIR")
    if before is not None and (markdown is None or leave_one_out or calibrate):
        raise UsageError(
            "--before compares the profiles as they are with an earlier release, on a page",
            value=f"--before {before} without --markdown, or with --leave-one-out or --calibrate",
            remedy="give --before and --markdown alone",
        )
    from autopar.validate.blind import page, read_before, words_of
    from autopar.validate.command import calibrate as fit_profiles
    from autopar.validate.command import evaluate, write_profile
    from autopar.validate.document import document
    from autopar.validate.report import markdown as table
    from autopar.validate.report import parameters_table, render_html, worst
    from autopar.validate.runs import read_runs
    from autopar.validate.session import Session

    earlier = None if before is None else read_before(before)
    runs = tuple(run for path in files for run in read_runs(path))
    place = ", ".join(str(path) for path in files)
    with progress("reading runs") as advance:
        session = Session(runs, place=place, progress=advance)
        fitted = None
        if calibrate:
            profiles, fitted, rows = fit_profiles(session, calibrate)
            for name, profile in profiles.items():
                path = output / f"{name}.toml"
                write_profile(profile, path)
                warn(f"wrote {path}")
            session = session.under({run.device: profiles[session.profiles[run.device].device.name] for i, run in
                                     enumerate(runs) if i in set(rows)})  # fmt: skip
        outcome = evaluate(session, leave_one_out=leave_one_out)
        compared = None
        if before is not None and earlier is not None:
            compared = page(session, outcome, earlier, advance, words_of(before))
    if html is not None:
        html.write_text(render_html(outcome.scores, runs, outcome.predictions), encoding="utf-8")
        warn(f"wrote {html}")
    if markdown is not None:
        text = compared or document(session, outcome, leave_one_out=leave_one_out)
        markdown.write_text(text, encoding="utf-8")
        warn(f"wrote {markdown}")
    if as_json:
        print_json(outcome.to_dict(session))
        return
    shown = [table(outcome.scores)]
    if fitted is not None:
        shown.append(parameters_table(fitted.values, session.start, fitted.num_seen))
    shown.append("missed most:\n" + "\n".join(worst(runs, outcome.predictions)))
    print_text("\n\n".join(shown))


def _from_run(folder: Path, files: list[Path], as_json: bool) -> None:
    """What the first steps of a run measured, against its plan's prediction."""
    from autopar.report.run import render_run, run_summary
    from autopar.run_log import read_log

    if files:
        raise UsageError("validate reads files or the log of a run", value=f"both: {files[0]}", place="--from-run")
    record = read_log(folder)
    if as_json:
        print_json(run_summary(record))
    else:
        print_text(render_run(record))

"""``autopar validate``: predictions against measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autopar.cli.console import print_json, print_text, progress, warn, write_report
from autopar.cli.options import Json
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.validate.robust_fit import Fit
    from autopar.validate.session import Session

Files = Annotated[
    list[Path] | None, typer.Argument(metavar="RUNS.csv...", help="Measured runs; see docs/validation.md.")
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
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="Where calibrated profiles are written.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a scatter of all runs.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Write the figures.")]
Before = Annotated[
    Path | None,
    typer.Option(
        "--before", metavar="JSON", help="With --markdown: the page of a blind test, beside an earlier --json."
    ),
]


def validate(
    files: Files = None,
    from_run: FromRun = None,
    leave_one_out: LeaveOneOut = False,
    calibrate: Calibrate = None,
    output: Output = Path("profiles"),
    html: Html = None,
    markdown: Markdown = None,
    before: Before = None,
    as_json: Json = False,
) -> None:
    """Predict measured runs and print how far off: error, rank, interval, memory, by source.

    A row that cannot be predicted is reported with its error beside the predictions of the others; the exit code is then 1.
    """
    if from_run is not None:
        _from_run(from_run, files or [], as_json)
        return
    _check(files or (), before, [path for path in (html, markdown) if path is not None],
           is_plain=markdown is not None and not leave_one_out and not calibrate)  # fmt: skip
    from autopar.validate.pages.blind import page, read_before, words_of
    from autopar.validate.pages.document import document
    from autopar.validate.pages.report import failures, parameters_table, render_html, worst
    from autopar.validate.pages.report import markdown as table
    from autopar.validate.runs import read_rows
    from autopar.validate.scores import evaluate
    from autopar.validate.session import predictable

    earlier = None if before is None else read_before(before)
    rows = tuple(row for path in files or () for row in read_rows(path))
    with progress("reading runs") as advance:
        session, failed = predictable(rows, place=", ".join(map(str, files or ())), progress=advance)
        session, fitted = _calibrated(session, calibrate, output) if calibrate else (session, None)
        outcome = evaluate(session, leave_one_out=leave_one_out, failed=failed)
        compared = None
        if before is not None and earlier is not None:
            compared = page(session, outcome, earlier, advance, words_of(before))
    if html is not None:
        write_report(html, render_html(outcome.scores, session.runs, outcome.predictions, failed))
    if markdown is not None:
        write_report(markdown, compared or document(session, outcome, leave_one_out=leave_one_out))
    if as_json:
        print_json(outcome.to_dict(session))
    else:
        shown = [table(outcome.scores)]
        if fitted is not None:
            shown.append(parameters_table(fitted.values, session.start, fitted.num_seen))
        shown.append("missed most:\n" + "\n".join(worst(session.runs, outcome.predictions)))
        shown.append("\n".join(failures(failed, len(rows))))
        print_text("\n\n".join(shown))
    if failed:
        raise typer.Exit(1)


def _check(files: Sequence[Path], before: Path | None, written: Sequence[Path], *, is_plain: bool) -> None:
    """Refuse what cannot end well, before anything is computed.

    Raises:
        UsageError: no runs, options that do not go together, a file that cannot be written.
    """
    from autopar.util.files import check_writable

    if not files:
        raise UsageError("No runs to validate with", fix="Give RUNS.csv files, or --from-run DIR")
    if before is not None and not is_plain:
        raise UsageError(
            f"--before {before} needs --markdown, and goes with neither --leave-one-out nor --calibrate",
            fix="Give --before and --markdown alone",
        )
    for path in written:
        check_writable(path)


def _calibrated(session: Session, sources: Sequence[str], folder: Path) -> tuple[Session, Fit]:
    """Fit, write the profiles to ``folder``, and the session under them."""
    from autopar.util.files import check_writable
    from autopar.validate.scores import calibrate, write_profile

    check_writable(folder / "profile.toml", make_folder=True)
    runs = session.runs
    profiles, fitted, rows = calibrate(session, sources)
    for name, profile in profiles.items():
        path = folder / f"{name}.toml"
        write_profile(profile, path)
        warn(f"wrote {path}")
    devices = {runs[i].device for i in rows}
    return session.under({d: profiles[session.profiles[d].device.name] for d in devices}), fitted


def _from_run(folder: Path, files: list[Path], as_json: bool) -> None:
    """What the first steps of a run measured, against its plan's prediction."""
    from autopar.plan.run_log import read_log
    from autopar.report.run import render_run, run_summary

    if files:
        raise UsageError(f"--from-run does not go with a file of runs ({files[0]})", fix="Leave one of them out")
    record = read_log(folder)
    if as_json:
        print_json(run_summary(record))
    else:
        print_text(render_run(record))

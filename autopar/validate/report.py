"""The report of ``autopar validate``: predictions of measured runs as text, whose tables are Markdown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.hardware.read import MachineProfile
from autopar.plan.prediction import Prediction
from autopar.planner.search import Progress
from autopar.util.files import as_toml, write_toml
from autopar.util.formatting import percent, plain_table
from autopar.util.toml import as_table
from autopar.validate.parameters import Fit
from autopar.validate.runs import FailedRow, Run, read_rows
from autopar.validate.scores import Outcome, Score, calibrate, evaluate
from autopar.validate.session import Session, predictable

HEADER = ("source", "runs", "MAPE", "bias", "scaled", "rho", "inside", "pairs in order", "regret (worst)", "memory",
          "false fits", "false misfits")  # fmt: skip
_WIDTH = 400
"""Columns of the table of scores, in which no cell is wrapped."""
WORST = 12
"""Runs with the largest errors that are listed."""


def row_of(score: Score) -> tuple[str, ...]:
    """Return the cells of :data:`HEADER`."""
    regret = f"{percent(score.regret)} ({percent(score.worst_regret)}) of {score.groups}" if score.groups else "-"
    memory = f"{percent(score.memory_mape)} ({percent(score.memory_bias, sign=True)}) of {score.memory_runs}"
    return (
        score.name,
        str(score.runs),
        percent(score.mape),
        percent(score.bias, sign=True),
        percent(score.scaled_mape),
        "-" if score.rho is None else f"{score.rho:.3f}",
        percent(score.coverage),
        f"{score.ordered} of {score.pairs}" if score.pairs else "-",
        regret,
        memory if score.memory_runs else "-",
        str(score.false_fits),
        str(score.false_misfits),
    )


def markdown(scores: Sequence[Score]) -> str:
    """Return the scores as a Markdown table that is aligned for terminals."""
    return plain_table(HEADER, map(row_of, scores), left=HEADER, width=_WIDTH, indent=0, markdown=True)


def failures(failed: Sequence[FailedRow], count: int) -> str:
    """Return lines that say how many rows failed, and why each did; empty if no row failed.

    Args:
        failed: the rows that failed.
        count: the number of all rows.
    """
    lines = [f"{len(failed)} of {count} rows failed:", *(f"- {row.name}: {row.error}" for row in failed)]
    return "\n".join(lines) if failed else ""


def worst(runs: Sequence[Run], predictions: Sequence[Prediction]) -> list[str]:
    """Return lines for the runs with the largest errors of step time, with the largest parts of their predicted time."""
    timed = [(r, p) for r, p in zip(runs, predictions, strict=True) if r.step_time_s]
    timed.sort(key=lambda pair: -abs(math.log(pair[1].step_time_s / (pair[0].step_time_s or 1.0))))
    lines = []
    for run, prediction in timed[:WORST]:
        parts = prediction.breakdown
        shares = [(name.removesuffix("_s"), getattr(parts, name) / prediction.step_time_s) for name in parts.__slots__]
        largest = ", ".join(f"{name} {100 * part:.0f} %" for name, part in sorted(shares, key=lambda s: -s[1])[:3])
        error = prediction.step_time_s / (run.step_time_s or 1.0) - 1
        lines.append(
            f"{run.name} (row {run.line}): {percent(error, sign=True)}; {run.devices} {run.device}, tp {run.tp}, "
            f"pp {run.pp}, cp {run.cp}, dp {run.dp}, micro-batch {run.micro_batch}, {run.heads} heads, {run.precision}; "
            f"predicted {prediction.step_time_s:.4g} s, measured {run.step_time_s:.4g} s: {largest}"
        )
    return lines


def parameters_table(values: Mapping[str, float], start: Mapping[str, float], seen: Mapping[str, int]) -> str:
    """Return a table of fitted values and priors, with the number of runs whose time depends on each parameter."""
    rows = [(key, f"{start[key]:.4g}", f"{values[key]:.4g}", str(count)) for key, count in seen.items()]
    return plain_table(
        ("parameter", "prior", "fitted", "runs that see it"), rows, left=("parameter",), indent=0, markdown=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """The predictions for the runs of some files.

    Attributes:
        session: the runs, under the profiles of the predictions.
        outcome: predictions and scores.
        fit: the fit of the profiles' parameters; None if profiles are unchanged.
        profiles: the fitted profiles by name.
    """

    session: Session
    outcome: Outcome
    fit: Fit | None = None
    profiles: Mapping[str, MachineProfile] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        fitted = {name: as_table(profile) for name, profile in self.profiles.items()}
        return self.outcome.to_dict(self.session) | ({"profiles": fitted} if fitted else {})

    def text(self) -> str:
        """Return scores, fitted parameters, the largest errors, failed rows, and the fitted profiles as TOML."""
        sections = [markdown(self.outcome.scores)]
        if self.fit is not None:
            sections.append(parameters_table(self.fit.values, self.session.start, self.fit.num_seen))
        sections.append(
            "Missed most:\n\n" + "\n".join(f"- {line}" for line in worst(self.session.runs, self.outcome.predictions))
        )
        sections.append(failures(self.outcome.failed, len(self.session.runs) + len(self.outcome.failed)))
        sections += [as_toml(as_table(p), comment=f"{name}.toml") for name, p in self.profiles.items()]
        return "\n\n".join(filter(None, sections))

    def write_profiles(self, folder: Path) -> list[Path]:
        """Write each profile to a file of its name, and return the files."""
        paths = {folder / f"{name}.toml": profile for name, profile in self.profiles.items()}
        for path, profile in paths.items():
            write_toml(path, as_table(profile))
        return list(paths)


def validated(
    files: Sequence[Path], *, sources: Sequence[str] = (), leave_one_out: bool = False, progress: Progress
) -> Validation:
    """Predict the runs of some files.

    Args:
        files: CSV files of runs.
        sources: the sources that profiles are fitted to first; none leaves the profiles unchanged.
        leave_one_out: whether each source is predicted with parameters that are fitted to the others.
        progress: called with the progress.

    Raises:
        UsageError: a file cannot be read, or no run has one of the sources.
    """
    rows = tuple(row for path in files for row in read_rows(path))
    session, failed = predictable(rows, place=", ".join(map(str, files)), progress=progress)
    fit: Fit | None = None
    profiles: Mapping[str, MachineProfile] = {}
    if sources:
        profiles, fit, fitted = calibrate(session, sources)
        devices = {session.runs[i].device for i in fitted}
        session = session.under({d: profiles[session.profiles[d].device.name] for d in devices})
    outcome = evaluate(session, leave_one_out=leave_one_out, failed=failed)
    return Validation(session=session, outcome=outcome, fit=fit, profiles=profiles)

"""Scores of predictions against measured runs, and the report of ``autopar validate`` with them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from autopar.hardware.read import MachineProfile
from autopar.plan.prediction import Prediction
from autopar.planner.search import Progress
from autopar.util.files import as_toml, write_toml
from autopar.util.formatting import percent, plain_table
from autopar.util.toml import as_table
from autopar.validate.parameters import Fit
from autopar.validate.runs import FailedRow, Run, read_rows
from autopar.validate.session import Session, calibrate, memory_ratios, predictable

NOTABLE = 1.02
"""Ratio of measured times above which two plans of one model count as different."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures of one group of runs. They are fractions, not percent; None where nothing counts.

    Attributes:
        mape, bias: mean absolute and mean signed relative error of step times.
        scaled_mape: mean absolute relative error after one factor for each release.
        rho: Spearman's rank correlation of step times.
        coverage: share of measured times inside the predicted interval.
        pairs, ordered: pairs of plans of one model whose times differ by over 2 %, and those that are predicted in order.
        groups, regret, worst_regret: models with several plans, and the measured time of the plan that is predicted fastest over the
            fastest, less 1.
        memory_runs, memory_mape, memory_bias: the same errors of peak memory, where it was measured.
        false_fits: runs that are predicted to fit and measured above the device's memory.
        false_misfits: runs that are predicted not to fit.
    """

    name: str
    runs: int
    mape: float | None
    bias: float | None
    scaled_mape: float | None
    rho: float | None
    coverage: float | None
    pairs: int
    ordered: int
    groups: int
    regret: float | None
    worst_regret: float | None
    memory_runs: int
    memory_mape: float | None
    memory_bias: float | None
    false_fits: int
    false_misfits: int


def scales(runs: Sequence[Run], predictions: Sequence[Prediction]) -> dict[str, float]:
    """Return one factor for each release: the median of measured over predicted time."""
    ratios: dict[str, list[float]] = {}
    for run, prediction in zip(runs, predictions, strict=True):
        if run.step_time_s is not None:
            ratios.setdefault(run.release, []).append(run.step_time_s / prediction.step_time_s)
    return {release: float(np.median(values)) for release, values in ratios.items()}


def score(name: str, runs: Sequence[Run], predictions: Sequence[Prediction], widths: Sequence[float]) -> Score:
    """Return the figures of a group of runs.

    Args:
        name: the name of the group.
        runs: the runs.
        predictions: their predictions.
        widths: the relative half width of the interval of each one's peak memory.
    """
    timed = [(run, p) for run, p in zip(runs, predictions, strict=True) if run.step_time_s is not None]
    measured = np.array([run.step_time_s for run, _ in timed], dtype=float)
    predicted = np.array([p.step_time_s for _, p in timed], dtype=float)
    factor = scales(runs, predictions)
    scaled = predicted * np.array([factor[run.release] for run, _ in timed])
    inside = [p.step_time_interval_s[0] <= (run.step_time_s or 0) <= p.step_time_interval_s[1] for run, p in timed]
    by_model = _different_plans(timed)
    pairs = [pair for plans in by_model for pair in combinations(plans, 2) if _notable(*pair)]
    regrets = list(map(_regret, by_model))
    errors = np.array(memory_ratios(runs, predictions)) - 1
    return Score(
        name=name,
        runs=len(runs),
        mape=_mean(np.abs(predicted / measured - 1)),
        bias=_mean(predicted / measured - 1),
        scaled_mape=_mean(np.abs(scaled / measured - 1)),
        rho=rank_correlation(predicted.tolist(), measured.tolist()),
        coverage=_mean(np.array(inside, dtype=float)),
        pairs=len(pairs),
        ordered=sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs),
        groups=len(regrets),
        regret=_mean(np.array(regrets)),
        worst_regret=max(regrets, default=None),
        memory_runs=len(errors),
        memory_mape=_mean(np.abs(errors)),
        memory_bias=_mean(errors),
        false_fits=sum(_false_fit(r, p, w) for r, p, w in zip(runs, predictions, widths, strict=True)),
        false_misfits=sum(not may_fit(p, w) for p, w in zip(predictions, widths, strict=True)),
    )


def may_fit(prediction: Prediction, width: float) -> bool:
    """Return whether the lower end of the interval of memory fits; otherwise the plan is predicted to be impossible."""
    return prediction.peak_memory_bytes / (1 + width) <= prediction.memory_limit_bytes


def _false_fit(run: Run, prediction: Prediction, width: float) -> bool:
    """Return whether the upper end of the interval of memory fits and the measured peak does not."""
    fits = prediction.peak_memory_bytes * (1 + width) <= prediction.memory_limit_bytes
    return fits and (run.peak_memory_bytes or 0) > prediction.memory_limit_bytes


_Plan = tuple[float, float]
"""The predicted and the measured time of a plan."""


def _different_plans(timed: Sequence[tuple[Run, Prediction]]) -> list[list[_Plan]]:
    """Return the plans of each model with several plans, of which some differ."""
    by_model: dict[object, list[_Plan]] = {}
    for run, prediction in timed:
        by_model.setdefault(run.model, []).append((prediction.step_time_s, run.step_time_s or 0.0))
    return [plans for plans in by_model.values() if any(_notable(*pair) for pair in combinations(plans, 2))]


def _notable(a: _Plan, b: _Plan) -> bool:
    return max(a[1] / b[1], b[1] / a[1]) > NOTABLE


def _regret(plans: Sequence[_Plan]) -> float:
    """Return the regret of a model; the measured times of plans with equal predictions are averaged."""
    best = min(measured for _, measured in plans)
    least = min(predicted for predicted, _ in plans)
    chosen = [measured for predicted, measured in plans if predicted <= least * (1 + 1e-9)]
    return sum(chosen) / len(chosen) / best - 1


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation; None if there are fewer than three values or all are equal.

    >>> round(rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]), 3)
    0.8
    """
    if len(one) < 3 or len(set(one)) < 2 or len(set(other)) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


# --- tables of runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Predictions and scores of a table of runs.

    Attributes:
        scores: scores of each source and release, then of all.
        predictions: the prediction of each run.
        fitted: values of parameters, by the source that is left out.
        scales: factors by release.
        failed: rows of the table that are not in the session.
    """

    scores: tuple[Score, ...]
    predictions: tuple[Prediction, ...]
    fitted: Mapping[str, Mapping[str, float]]
    scales: Mapping[str, float]
    failed: tuple[FailedRow, ...] = ()

    def to_dict(self, session: Session) -> dict[str, Any]:
        """Return the JSON values of the command, rows in the order of their files."""
        rows = [
            {
                "row": run.line,
                "name": run.name,
                "source": run.release,
                "step_time_s": run.step_time_s,
                "predicted_step_time_s": p.step_time_s,
                "predicted_interval_s": list(p.step_time_interval_s),
                "peak_memory_bytes": run.peak_memory_bytes,
                "predicted_peak_memory_bytes": p.peak_memory_bytes,
                "fits": p.fits,
                "breakdown": {name: getattr(p.breakdown, name) for name in p.breakdown.__slots__},
            }
            for run, p in zip(session.runs, self.predictions, strict=True)
        ]
        rows += [
            {"row": row.line, "name": row.name, "source": row.release, "error": str(row.error)} for row in self.failed
        ]
        files = [run.file for run in session.runs] + [row.file for row in self.failed]
        in_order = sorted(zip(files, rows, strict=True), key=lambda pair: (files.index(pair[0]), pair[1]["row"]))
        return {
            "summary": [asdict(score) for score in self.scores],
            "scales": dict(self.scales),
            "fitted": {group: dict(values) for group, values in self.fitted.items()},
            "failed_rows": len(self.failed),
            "rows": [row for _, row in in_order],
        }


def evaluate(session: Session, *, leave_one_out: bool = False, failed: Sequence[FailedRow] = ()) -> Outcome:
    """Return predictions of all runs, under the profiles as they are, or of each source under a fit to the others.

    All releases of a publisher are left out together.

    Args:
        session: the runs.
        leave_one_out: whether parameters are fitted to the other sources.
        failed: the other rows of the table.
    """
    groups = [run.publisher for run in session.runs]
    fitted: dict[str, dict[str, float]] = session.left_out(groups) if leave_one_out else {}
    by_run: dict[int, Prediction] = {}
    for group in dict.fromkeys(groups):
        rows = [i for i, publisher in enumerate(groups) if publisher == group]
        by_run |= zip(rows, session.predictions(fitted.get(group), rows), strict=True)
    predictions = [by_run[i] for i in range(len(groups))]
    return Outcome(
        scores=tuple(scored(session, predictions)),
        predictions=tuple(predictions),
        fitted=fitted,
        scales=scales(session.runs, predictions),
        failed=tuple(failed),
    )


def scored(session: Session, predictions: Sequence[Prediction]) -> list[Score]:
    """Return the scores of each publisher, of its releases if it has several, and of all runs."""
    scores = []
    names = list(dict.fromkeys(name for run in session.runs for name in (run.publisher, run.release)))
    for name in (*names, "all"):
        rows = [i for i, run in enumerate(session.runs) if name in (run.publisher, run.release, "all")]
        widths = [session.profiles[session.runs[i].device].device.memory_uncertainty for i in rows]
        scores.append(score(name, [session.runs[i] for i in rows], [predictions[i] for i in rows], widths))
    return scores


# --- the report of the command, whose tables are Markdown

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


def failures(failed: Sequence[FailedRow], count: int) -> list[str]:
    """Return lines that say how many rows failed, and why each did; none if no row failed.

    Args:
        failed: the rows that failed.
        count: the number of all rows.
    """
    if not failed:
        return []
    return [f"{len(failed)} of {count} rows failed:", *(f"- {row.name}: {row.error}" for row in failed)]


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
        missing = failures(self.outcome.failed, len(self.session.runs) + len(self.outcome.failed))
        sections += ["\n".join(missing)] if missing else []
        sections += [as_toml(as_table(p), comment=f"{name}.toml") for name, p in self.profiles.items()]
        return "\n\n".join(sections)

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

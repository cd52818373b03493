"""Scores of predictions against measured runs, tables of scores, and profiles that are calibrated to runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from autopar.errors import UsageError
from autopar.hardware.device import Device
from autopar.hardware.read import MachineProfile, known_devices, load_profile
from autopar.plan.prediction import Prediction
from autopar.validate import parameters as free
from autopar.validate.parameters import Fit
from autopar.validate.runs import FailedRow, Run
from autopar.validate.session import LEAST_SEEN, Session

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
    errors = np.array(_memory_ratios(runs, predictions)) - 1
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


def as_read(run: Run, prediction: Prediction) -> float:
    """Return the predicted peak as the run measured it: an allocator does not see the context and the buffers of libraries."""
    if run.memory_kind == "allocator":
        return max(m.total - m.reserved for m in prediction.memory)
    return float(prediction.peak_memory_bytes)


def may_fit(prediction: Prediction, width: float) -> bool:
    """Return whether the lower end of the interval of memory fits; otherwise the plan is predicted to be impossible."""
    return prediction.peak_memory_bytes / (1 + width) <= prediction.memory_limit_bytes


def _false_fit(run: Run, prediction: Prediction, width: float) -> bool:
    """Return whether the upper end of the interval of memory fits and the measured peak does not."""
    fits = prediction.peak_memory_bytes * (1 + width) <= prediction.memory_limit_bytes
    return fits and (run.peak_memory_bytes or 0) > prediction.memory_limit_bytes


def _memory_ratios(runs: Sequence[Run], predictions: Sequence[Prediction]) -> list[float]:
    """Return predicted over measured peak memory of the runs in which it was measured."""
    pairs = zip(runs, predictions, strict=True)
    return [as_read(run, p) / run.peak_memory_bytes for run, p in pairs if run.peak_memory_bytes]


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


# --- tables of runs, and profiles that are fitted to them


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


def calibrate(session: Session, sources: Sequence[str]) -> tuple[dict[str, MachineProfile], Fit, list[int]]:
    """Return profiles of the devices of some runs, with parameters fitted to these runs.

    Args:
        session: all runs.
        sources: parts of the column ``source``, or ``all`` for every run. With ``all``, shipped profiles of devices without runs also get
            the parameters that all devices or their chip share.

    Returns:
        Profiles by name, the fit, and the indices of the runs that it was fitted to.

    Raises:
        UsageError: no run has one of the sources, or too few runs do.
    """
    for source in sources:
        if source != "all" and not any(source in run.source for run in session.runs):
            raise UsageError(
                f"No run has a source that contains '{source}'",
                where=session.place,
                fix="Known: " + "; ".join(dict.fromkeys(run.release for run in session.runs)),
            )
    rows = [i for i in session.timed if any(s == "all" or s in session.runs[i].source for s in sources)]
    fit = session.fitted(rows)
    releases = Counter(session.runs[i].release for i in rows)
    text = "fitted on: " + ", ".join(f"{name} ({count} runs)" for name, count in releases.items())
    values = {key: float(f"{value:.4g}") for key, value in fit.values.items() if key in fit.num_seen}
    devices = {session.runs[i].device for i in rows}
    read = [i for i in rows if session.runs[i].peak_memory_bytes]
    width = memory_width([session.runs[i] for i in read], session.predictions(fit.values, read))
    if not fit.num_seen and width is None:
        raise UsageError(
            f"{len(rows)} runs of these sources are too few to calibrate: each number needs {LEAST_SEEN} timed runs that see it",
            where=session.place,
            fix="Add runs, or calibrate to more sources (--calibrate all)",
        )
    profiles = {}
    for name in sorted(devices):
        profile = free.write(session.profiles[name], values, provenance=f"{text}; by autopar validate --calibrate")
        profile = replace(profile, device=_with_width(profile.device, width, len(read)))
        profiles[profile.device.name] = profile
    if "all" in sources:
        profiles |= others(profiles, values, f"{text}; none on this device; by autopar validate --calibrate")
    return profiles, fit, rows


def others(
    fitted: Mapping[str, MachineProfile], values: Mapping[str, float], provenance: str
) -> dict[str, MachineProfile]:
    """Return shipped profiles of accelerators without runs, with the shared values."""
    shipped = (load_profile(name) for name in known_devices() if name not in fitted)
    return {
        profile.device.name: free.write(profile, values, provenance=provenance)
        for profile in shipped
        if profile.device.kind == "cuda"
    }


def memory_width(runs: Sequence[Run], predictions: Sequence[Prediction]) -> float | None:
    """Return the half width of the interval of peak memory that holds 19 of 20 runs; None if too few have a measured peak."""
    errors = sorted(max(ratio, 1 / ratio) - 1 for ratio in _memory_ratios(runs, predictions))
    return errors[math.ceil(0.95 * len(errors)) - 1] if len(errors) >= LEAST_SEEN else None


def _with_width(device: Device, width: float | None, num_runs: int) -> Device:
    """Return a device with the interval of peak memory."""
    if width is None:
        return device
    text = f"fitted on: memory_fraction by {num_runs} measured peaks, of which 19 in 20 lie inside"
    note = free.noted(device.provenance["uncertainty"], f"{text}; by autopar validate --calibrate")
    return replace(
        device, memory_uncertainty=float(f"{width:.3g}"), provenance={**device.provenance, "uncertainty": note}
    )

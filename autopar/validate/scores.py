"""How good predictions are: errors, ranks, intervals, pairs of plans, regret, fits that were none."""

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
"""Two plans of one model are told apart when their measured times differ by more than 2 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures of one group of runs; fractions, not percent; None where there is nothing to count.

    Attributes:
        mape, bias: mean absolute and mean signed relative error of step time.
        scaled_mape: after one factor for each release.
        rho: Spearman's rank correlation of step times.
        coverage: of measured times inside the predicted interval.
        pairs, ordered: pairs of plans of one model that differ by over 2 %, and those that are predicted in order.
        groups, regret, worst_regret: models with several plans; measured time of the plan predicted best over the best.
        memory_runs, memory_mape, memory_bias: of peak memory where measured.
        false_fits: predicted to fit, and measured above the device; false_misfits: ran, and predicted impossible.
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
    """One factor for each release: the median of measured over predicted time."""
    ratios: dict[str, list[float]] = {}
    for run, prediction in zip(runs, predictions, strict=True):
        if run.step_time_s is not None:
            ratios.setdefault(run.release, []).append(run.step_time_s / prediction.step_time_s)
    return {release: float(np.median(found)) for release, found in ratios.items()}


def score(name: str, runs: Sequence[Run], predictions: Sequence[Prediction], widths: Sequence[float]) -> Score:
    """The figures of a group of runs; ``widths``: of each one's interval of peak memory, relative to it."""
    timed = [(run, p) for run, p in zip(runs, predictions, strict=True) if run.step_time_s is not None]
    measured = np.array([run.step_time_s for run, _ in timed], dtype=float)
    predicted = np.array([p.step_time_s for _, p in timed], dtype=float)
    factor = scales(runs, predictions)
    scaled = predicted * np.array([factor[run.release] for run, _ in timed])
    inside = [p.step_time_interval_s[0] <= (run.step_time_s or 0) <= p.step_time_interval_s[1] for run, p in timed]
    ordered, pairs = _pairs(timed)
    regrets = _regrets(timed)
    known = [
        (r.peak_memory_bytes, as_read(r, p)) for r, p in zip(runs, predictions, strict=True) if r.peak_memory_bytes
    ]
    off = np.array([found / size - 1 for size, found in known])
    return Score(
        name=name,
        runs=len(runs),
        mape=_mean(np.abs(predicted / measured - 1)),
        bias=_mean(predicted / measured - 1),
        scaled_mape=_mean(np.abs(scaled / measured - 1)),
        rho=rank_correlation(predicted.tolist(), measured.tolist()),
        coverage=_mean(np.array(inside, dtype=float)),
        pairs=pairs,
        ordered=ordered,
        groups=len(regrets),
        regret=_mean(np.array(regrets)),
        worst_regret=max(regrets, default=None),
        memory_runs=len(known),
        memory_mape=_mean(np.abs(off)),
        memory_bias=_mean(off),
        false_fits=sum(_false_fit(r, p, w) for r, p, w in zip(runs, predictions, widths, strict=True)),
        false_misfits=sum(not may_fit(p, w) for p, w in zip(predictions, widths, strict=True)),
    )


def as_read(run: Run, prediction: Prediction) -> float:
    """The predicted peak as the run read it: an allocator's peak knows no context and no libraries' buffers."""
    if run.memory_kind == "allocator":
        return max(m.total - m.reserved for m in prediction.memory)
    return float(prediction.peak_memory_bytes)


def may_fit(prediction: Prediction, width: float) -> bool:
    """Whether the lower end of the interval of memory fits: else the plan is called impossible."""
    return prediction.peak_memory_bytes / (1 + width) <= prediction.memory_limit_bytes


def _false_fit(run: Run, prediction: Prediction, width: float) -> bool:
    """Whether the upper end of the interval of memory fits, and what was measured does not."""
    fits = prediction.peak_memory_bytes * (1 + width) <= prediction.memory_limit_bytes
    return fits and (run.peak_memory_bytes or 0) > prediction.memory_limit_bytes


def _groups(timed: Sequence[tuple[Run, Prediction]]) -> list[list[tuple[float, float]]]:
    """(predicted, measured) of the plans of each model."""
    found: dict[object, list[tuple[float, float]]] = {}
    for run, prediction in timed:
        found.setdefault(run.model, []).append((prediction.step_time_s, run.step_time_s or 0.0))
    return [plans for plans in found.values() if len(plans) > 1]


def _notable(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return max(a[1] / b[1], b[1] / a[1]) > NOTABLE


def _pairs(timed: Sequence[tuple[Run, Prediction]]) -> tuple[int, int]:
    pairs = [pair for plans in _groups(timed) for pair in combinations(plans, 2) if _notable(*pair)]
    return sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs), len(pairs)


def _regrets(timed: Sequence[tuple[Run, Prediction]]) -> list[float]:
    """Of models whose plans differ; of plans with one prediction the mean of their measured times counts."""
    regrets = []
    for plans in _groups(timed):
        best = min(measured for _, measured in plans)
        if any(_notable(a, b) for a in plans for b in plans):
            least = min(predicted for predicted, _ in plans)
            chosen = [measured for predicted, measured in plans if predicted <= least * (1 + 1e-9)]
            regrets.append(sum(chosen) / len(chosen) / best - 1)
    return regrets


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; None where there are fewer than three values, or all are equal.

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
    """What is known of a table of runs.

    Attributes:
        scores: of each release, then of all.
        predictions: of each run.
        fitted: values, by left out source.
        failed: rows of the table that are no runs of the session.
    """

    scores: tuple[Score, ...]
    predictions: tuple[Prediction, ...]
    fitted: Mapping[str, Mapping[str, float]]
    scales: Mapping[str, float]
    failed: tuple[FailedRow, ...] = ()

    def to_dict(self, session: Session) -> dict[str, Any]:
        """The JSON of the command."""
        predicted = [
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
        failed = [
            {"row": row.line, "name": row.name, "source": row.release, "error": str(row.error)} for row in self.failed
        ]
        given = [*((run.file, run.line) for run in session.runs), *((row.file, row.line) for row in self.failed)]
        files = list(dict.fromkeys(file for file, _ in given))
        places = [(files.index(file), line) for file, line in given]
        rows = sorted(zip(places, (*predicted, *failed), strict=True), key=lambda pair: pair[0])
        return {
            "summary": [asdict(found) for found in self.scores],
            "scales": dict(self.scales),
            "fitted": {group: dict(values) for group, values in self.fitted.items()},
            "failed_rows": len(self.failed),
            "rows": [row for _, row in rows],
        }


def evaluate(session: Session, *, leave_one_out: bool = False, failed: Sequence[FailedRow] = ()) -> Outcome:
    """Predictions of all runs: under the profiles as they are, or each source under what the others tell.

    Sources are left out whole: all releases of a publisher together.

    Args:
        failed: the other rows of the table.
    """
    groups = [run.publisher for run in session.runs]
    fitted: dict[str, dict[str, float]] = session.left_out(groups) if leave_one_out else {}
    made: dict[int, Prediction] = {}
    for group in dict.fromkeys(groups):
        rows = [i for i, found in enumerate(groups) if found == group]
        made |= zip(rows, session.predictions(fitted.get(group), rows), strict=True)
    predictions = [made[i] for i in range(len(groups))]
    return Outcome(
        scores=tuple(scored(session, predictions)),
        predictions=tuple(predictions),
        fitted=fitted,
        scales=scales(session.runs, predictions),
        failed=tuple(failed),
    )


def scored(session: Session, predictions: Sequence[Prediction]) -> list[Score]:
    """Scores of each publisher, of its releases where there are several, and of all."""
    found = []
    names = list(dict.fromkeys(name for run in session.runs for name in (run.publisher, run.release)))
    for name in (*names, "all"):
        rows = [i for i, run in enumerate(session.runs) if name in (run.publisher, run.release, "all")]
        widths = [session.profiles[session.runs[i].device].device.memory_uncertainty for i in rows]
        found.append(score(name, [session.runs[i] for i in rows], [predictions[i] for i in rows], widths))
    return found


def calibrate(session: Session, sources: Sequence[str]) -> tuple[dict[str, MachineProfile], Fit, list[int]]:
    """Profiles of the devices that the runs of ``sources`` ran on, with parameters fitted to these runs.

    Args:
        sources: parts of the column ``source``; ``all`` for every run: shipped profiles of devices that none of them ran
            on then get what is told of all devices, or of their chip.

    Returns:
        Profiles by name, the fit, and the runs that it was made of.

    Raises:
        UsageError: a source names no run.
    """
    for source in sources:
        if source != "all" and not any(source in run.source for run in session.runs):
            raise UsageError(
                f"No run has a source that contains '{source}'",
                where=session.place,
                fix="Known: " + "; ".join(dict.fromkeys(run.release for run in session.runs)),
            )
    rows = [i for i in session.timed if any(s == "all" or s in session.runs[i].source for s in sources)]
    found, chosen = session.fitted(rows)
    releases = Counter(session.runs[i].release for i in rows)
    text = "fitted on: " + ", ".join(f"{name} ({count} runs)" for name, count in releases.items())
    keys = {p.key for p in chosen}
    values = {key: float(f"{value:.4g}") for key, value in found.values.items() if key in keys}
    devices = {session.runs[i].device for i in rows}
    read = [i for i in rows if session.runs[i].peak_memory_bytes]
    width = memory_width([session.runs[i] for i in read], session.predictions(found.values, read))
    if not chosen and width is None:
        raise UsageError(
            f"{len(rows)} runs of these sources are too few to calibrate: each number needs {LEAST_SEEN} timed runs that see it",
            where=session.place,
            fix="Add runs, or calibrate to more sources (--calibrate all)",
        )
    profiles = {}
    for name in sorted(devices):
        made = free.write(session.profiles[name], values, provenance=f"{text}; by autopar validate --calibrate")
        made = replace(made, device=_with_width(made.device, width, len(read)))
        profiles[made.device.name] = made
    if "all" in sources:
        profiles |= others(profiles, values, f"{text}; none on this device; by autopar validate --calibrate")
    return profiles, found, rows


def others(
    fitted: Mapping[str, MachineProfile], values: Mapping[str, float], provenance: str
) -> dict[str, MachineProfile]:
    """Shipped profiles of accelerators without runs, with those of ``values`` that all devices or their chip share."""
    shipped = (load_profile(name) for name in known_devices() if name not in fitted)
    return {
        profile.device.name: free.write(profile, values, provenance=provenance)
        for profile in shipped
        if profile.device.kind == "cuda"
    }


def memory_width(runs: Sequence[Run], predictions: Sequence[Prediction]) -> float | None:
    """The half width of the interval of peak memory that holds 19 of 20 runs; None: too few have a measured peak."""
    ratios = [
        as_read(r, p) / r.peak_memory_bytes for r, p in zip(runs, predictions, strict=True) if r.peak_memory_bytes
    ]
    off = sorted(max(ratio, 1 / ratio) - 1 for ratio in ratios)
    return off[math.ceil(0.95 * len(off)) - 1] if len(off) >= LEAST_SEEN else None


def _with_width(device: Device, width: float | None, num_runs: int) -> Device:
    if width is None:
        return device
    notes = dict(device.provenance)
    text = f"fitted on: memory_fraction by {num_runs} measured peaks, of which 19 in 20 lie inside"
    notes["uncertainty"] = free.noted(notes["uncertainty"], f"{text}; by autopar validate --calibrate")
    return replace(device, memory_uncertainty=float(f"{width:.3g}"), provenance=tuple(notes.items()))

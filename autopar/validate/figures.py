"""How good predictions are: errors, ranks, intervals, pairs of plans, regret, fits that were none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autopar.plan.prediction import Prediction
from autopar.validate.runs import Run

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

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


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
        rho=_rho(predicted, measured),
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


def fits(prediction: Prediction, width: float) -> bool:
    """Whether the upper end of the interval of memory fits."""
    return prediction.peak_memory_bytes * (1 + width) <= prediction.memory_limit_bytes


def may_fit(prediction: Prediction, width: float) -> bool:
    """Whether the lower end of the interval of memory fits: else the plan is called impossible."""
    return prediction.peak_memory_bytes / (1 + width) <= prediction.memory_limit_bytes


def _false_fit(run: Run, prediction: Prediction, width: float) -> bool:
    return fits(prediction, width) and (run.peak_memory_bytes or 0) > prediction.memory_limit_bytes


def _groups(timed: Sequence[tuple[Run, Prediction]]) -> list[list[tuple[float, float]]]:
    """(predicted, measured) of the plans of each model."""
    found: dict[object, list[tuple[float, float]]] = {}
    for run, prediction in timed:
        found.setdefault(run.model, []).append((prediction.step_time_s, run.step_time_s or 0.0))
    return [plans for plans in found.values() if len(plans) > 1]


def _notable(a: tuple[float, float], b: tuple[float, float]) -> bool:
    return max(a[1] / b[1], b[1] / a[1]) > NOTABLE


def _pairs(timed: Sequence[tuple[Run, Prediction]]) -> tuple[int, int]:
    ordered = total = 0
    for plans in _groups(timed):
        for i, a in enumerate(plans):
            for b in plans[:i]:
                if _notable(a, b):
                    total += 1
                    ordered += (a[0] - b[0]) * (a[1] - b[1]) > 0
    return ordered, total


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


def _rho(predicted: np.ndarray, measured: np.ndarray) -> float | None:
    if len(measured) < 3 or len(set(measured)) < 2 or len(set(predicted)) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(predicted, measured).statistic)


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None

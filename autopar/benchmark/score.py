"""How good predictions were: rank correlation, regret of the plan picked, errors, coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan, predicted and measured; seconds and bytes.

    Attributes:
        measured_s: median over all timed steps of the slowest rank's time; None where it failed.
        spread: half the distance between the quartiles, relative to the median: how far to trust it.
        layers_s: of a pass of ``autopar.measure.timers.Layers`` between its steps: how fast the machine was; 0: not taken.
        predicted_bytes, measured_bytes: peak of tensors on the fullest rank, reserves left out.
        predicted_parts, measured_parts: by category (``autopar.plan.run_log.CATEGORIES``).
        failure: why there is no measurement.
    """

    key: str
    name: str
    predicted_s: float
    interval_s: tuple[float, float]
    predicted_bytes: int
    predicted_parts: dict[str, float]
    measured_s: float | None = None
    spread: float = 0.0
    layers_s: float = 0.0
    measured_bytes: int | None = None
    measured_parts: dict[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures of one benchmark.

    Attributes:
        plans, failures: how many were measured, and how many could not be.
        rho: Spearman's rank correlation of predicted and measured step time; None for fewer than three plans.
        regret: measured time of the picked plan over the best measured one; None where the picked one failed.
        best, picked: keys.
        mape, bias: of the step time, relative to the measured one.
        coverage: share of measured times inside of the predicted interval.
        memory_mape: of the peak.
        spread: median of the rows' spreads.
    """

    plans: int
    failures: int
    rho: float | None
    regret: float | None
    best: str
    picked: str
    mape: float | None
    bias: float | None
    coverage: float | None
    memory_mape: float | None
    spread: float

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


def measured(ranks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Step time and spread of one plan from the times of each rank, step by step.

    >>> measured([[1.0, 2.0, 3.0, 9.0, 2.0], [2.0, 1.0, 1.0, 1.0, 2.0]])[0]
    2.0
    """
    slowest = [max(step) for step in zip(*ranks, strict=True)]
    middle = median(slowest)
    if len(slowest) < 2:
        return middle, 0.0
    low, _, high = quantiles(slowest, n=4, method="inclusive")
    return middle, (high - low) / 2 / middle


def score(rows: Sequence[Row], picked: str) -> Score:
    """The figures of some rows, of which the search picked one."""
    known = [(row, row.measured_s) for row in rows if row.measured_s is not None]
    ratios = [row.predicted_s / time_s - 1 for row, time_s in known]
    chosen = next((time_s for row, time_s in known if row.key == picked), None)
    best = min(known, key=lambda pair: pair[1]) if known else None
    sizes = [(row.predicted_bytes, row.measured_bytes) for row, _ in known if row.measured_bytes]
    return Score(
        plans=len(known),
        failures=sum(bool(row.failure) for row in rows),
        rho=rank_correlation([row.predicted_s for row, _ in known], [time_s for _, time_s in known]),
        regret=chosen / best[1] if chosen is not None and best is not None else None,
        best=best[0].key if best is not None else "",
        picked=picked,
        mape=_mean([abs(ratio) for ratio in ratios]),
        bias=_mean(ratios),
        coverage=_mean([float(row.interval_s[0] <= t <= row.interval_s[1]) for row, t in known]),
        memory_mape=_mean([abs(a / b - 1) for a, b in sizes if b]),
        spread=median([row.spread for row, _ in known]) if known else 0.0,
    )


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's; None where there are fewer than three values, or all are equal.

    >>> round(rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]), 3)
    0.8
    """
    if len(one) < 3 or len(set(one)) < 2 or len(set(other)) < 2:
        return None
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

"""What repeated runs say of the order that any model can reach: that of one that knew every configuration's true time.

Rows of one configuration differ by noise alone. Equal times count once: they are one run printed twice. The bootstrap:
a configuration's true time is the mean of its rows, drawn to the mean of its plans by the share of noise in how far these
lie apart; each row gets the noise of a repeated one, picked at random; what the true times put in order of the rows so
made is counted as :mod:`autopar.validate.scores` counts predictions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from autopar.validate.runs import Run
from autopar.validate.scores import NOTABLE

DRAWS = 500
LEAST_REPEATS = 4
INTERVAL = (0.05, 0.95)

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What true times reach; fractions, mean and interval of 90 %.

    Attributes:
        repeats: rows beyond the first of each configuration.
        spread: standard deviation of one run, relative.
        pairs: of plans that are told apart in the rows as measured.
        ordered: share of the pairs in order.
        rho: Spearman's rank correlation of all rows.
    """

    repeats: int
    spread: float
    pairs: int
    ordered: tuple[float, float, float]
    rho: tuple[float, float, float]


def bound(
    runs: Sequence[Run], *, releases: bool = False, without_worst: bool = False, draws: int = DRAWS
) -> Bound | None:
    """The bound of timed runs; None with fewer than :data:`LEAST_REPEATS` repeats.

    Args:
        releases: runs of different releases of a source are different configurations.
        without_worst: the configuration whose rows lie farthest apart says nothing of noise.
    """
    from scipy.stats import spearmanr

    timed = [run for run in runs if run.step_time_s]
    measured = np.log(np.array([run.step_time_s for run in timed], dtype=float))
    configurations = _rows([_configuration(run, releases) for run in timed])
    residuals, repeats, spread = _noise(measured, configurations, without_worst)
    plans = _rows([run.model for run in timed])
    pairs = [pair for rows in plans for pair in combinations(rows, 2)]
    if repeats < LEAST_REPEATS or not pairs:
        return None
    left, right = np.array(pairs).T
    truth = _truth(measured, configurations, plans, spread)
    generator = np.random.default_rng(0)
    shares, ranks = [], []
    for _ in range(draws):
        made = truth + generator.choice(residuals, len(timed))
        apart = made[left] - made[right]
        told = np.abs(apart) > math.log(NOTABLE)
        shares.append(float(np.mean((apart * (truth[left] - truth[right]) > 0)[told])) if told.any() else 1.0)
        ranks.append(float(spearmanr(made, truth).statistic))
    told = np.abs(measured[left] - measured[right]) > math.log(NOTABLE)
    return Bound(repeats=repeats, spread=spread, pairs=int(told.sum()), ordered=_summary(shares), rho=_summary(ranks))


def _configuration(run: Run, releases: bool) -> Run:
    """The run without what tells it from a repeat."""
    source = run.release if releases else run.publisher
    return replace(run, line=0, name="", step_time_s=None, peak_memory_bytes=None, memory_kind="", source=source)


def _rows(keys: Sequence[object]) -> list[list[int]]:
    found: dict[object, list[int]] = {}
    for i, key in enumerate(keys):
        found.setdefault(key, []).append(i)
    return list(found.values())


def _noise(measured: Array, configurations: Sequence[Sequence[int]], without_worst: bool) -> tuple[Array, int, float]:
    """Residuals of repeated rows, of either sign and of the size of one row's noise; how many tell it; its deviation."""
    repeated = [np.unique(measured[list(rows)]) for rows in configurations]
    repeated = sorted((times for times in repeated if len(times) > 1), key=lambda times: float(np.ptp(times)))
    if without_worst:
        repeated = repeated[:-1]
    freedom = sum(len(times) - 1 for times in repeated)
    if not freedom:
        return np.zeros(1), 0, 0.0
    parts = [(times - times.mean()) * math.sqrt(len(times) / (len(times) - 1)) for times in repeated]
    squares = sum(float(np.sum((times - times.mean()) ** 2)) for times in repeated)
    residuals = np.concatenate(parts)
    return np.concatenate([residuals, -residuals]), freedom, math.sqrt(squares / freedom)


def _truth(
    measured: Array, configurations: Sequence[Sequence[int]], plans: Sequence[Sequence[int]], spread: float
) -> Array:
    """The mean of each configuration, drawn to that of its plans so that the variance of these means loses that of noise."""
    truth, noise = measured.copy(), np.full(len(measured), spread**2)
    for rows in configurations:
        truth[list(rows)] = measured[list(rows)].mean()
        noise[list(rows)] /= len(rows)
    for rows in plans:
        own = list(rows)
        variance = float(np.var(truth[own]))
        if variance > 0:
            center, kept = truth[own].mean(), math.sqrt(max(0.0, 1.0 - float(noise[own].mean()) / variance))
            truth[own] = center + kept * (truth[own] - center)
    return truth


def _summary(values: Sequence[float]) -> tuple[float, float, float]:
    low, high = np.quantile(np.array(values), INTERVAL)
    return float(np.mean(values)), float(low), float(high)


CASES = (
    ("repeats of a configuration", False, False),
    ("of a configuration and release", True, False),
    ("the same, without the one that differs most", True, True),
)


def bounds_table(runs: Sequence[Run]) -> str:
    """Bounds of every publisher with enough repeats, as a Markdown table; empty where there is none."""
    lines = []
    for name in dict.fromkeys(run.publisher for run in runs):
        own = [run for run in runs if run.publisher == name]
        for text, releases, without_worst in CASES:
            found = bound(own, releases=releases, without_worst=without_worst)
            if found is not None:
                mean, low, high = (round(share * found.pairs) for share in found.ordered)
                rho = f"{found.rho[0]:.2f} ({found.rho[1]:.2f} to {found.rho[2]:.2f})"
                lines.append(
                    f"| {name} | {text} | {found.repeats} | {100 * found.spread:.1f} % | "
                    f"{mean} ({low} to {high}) of {found.pairs} | {rho} |"
                )
    if not lines:
        return ""
    header = "| source | noise by | repeats | of one run | pairs in order | rho |\n|---|---|---|---|---|---|"
    return "\n".join([header, *lines])

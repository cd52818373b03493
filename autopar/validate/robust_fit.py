"""The fit of declared parameters to measured runs: Gauss-Newton on logarithms, robust, bounded, drawn to where it began.

Minimises the sum over runs of rho(log(predicted / measured)) + sum over parameters of (log(x / start) / width)^2, where
rho is the soft L1 loss (linear past :data:`OUTLIER`), by reweighted least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.validate.parameters import Parameter

OUTLIER = 0.05
"""Relative error from which a run counts linearly: identical published runs differ by 4.6 % in the median."""

STEP = 0.03
ROUNDS = 30
FAR = 0.5
"""Relative change of a parameter as far as which times are taken to be linear in logarithms."""

CLOSE = 1e-4
"""Relative change of all parameters at which a fit has ended."""

SEEN = 1e-3
"""Relative change of a run's time, by a parameter that changes by a factor e, from which the run sees it."""

DRAW = 0.03
"""Relative error of one run that a change of a parameter by a factor e must be worth."""

Array = NDArray[np.float64]
Predictor = Callable[[Mapping[str, float], Sequence[int]], Sequence[float]]
"""Predicted step times of runs by their indices, under values of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """``values`` by parameter key; ``num_seen``: runs whose time each one changes."""

    values: dict[str, float]
    num_seen: dict[str, int]


def sensitivities(
    predict: Predictor,
    values: Mapping[str, float],
    parameters: Sequence[Parameter],
    runs: Sequence[int],
    touches: Callable[[Parameter, int], bool],
    log_times: Array,
) -> Array:
    """Derivative of the logarithm of each run's time by that of each parameter, by finite differences.

    Args:
        log_times: of ``runs`` at ``values``.
    """
    result = np.zeros((len(runs), len(parameters)))
    for j, parameter in enumerate(parameters):
        rows = [k for k, run in enumerate(runs) if touches(parameter, run)]
        if not rows:
            continue
        here = values[parameter.key]
        step = STEP if here * math.exp(STEP) <= parameter.upper else -STEP
        there = dict(values) | {parameter.key: here * math.exp(step)}
        moved = np.log(np.array(predict(there, [runs[k] for k in rows])))
        result[rows, j] = (moved - log_times[rows]) / step
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearized:
    """Step times near a point, linear in logarithms: what a fit steps on; the model itself judges the result.

    Attributes:
        values: of the parameters at the point.
        log_times: of each run there.
        slopes: of each run (row) by each parameter (column), as :func:`sensitivities` gives them.
    """

    values: dict[str, float]
    log_times: Array
    slopes: Array


def fit(
    near: Linearized,
    measured: Sequence[float],
    start: Mapping[str, float],
    parameters: Sequence[Parameter],
) -> Fit:
    """The values that fit runs best.

    Args:
        near: the runs' times, rows as ``measured``, columns as ``parameters``.
        measured: step time of each run.
        start: values to which the fit is drawn.
    """
    target = np.log(np.array(measured))
    center = np.array([math.log(near.values[p.key]) for p in parameters])
    origin = np.array([math.log(start[p.key]) for p in parameters])
    low = np.array([math.log(p.lower) for p in parameters])
    high = np.array([math.log(p.upper) for p in parameters])
    low, high = np.maximum(low, center - FAR), np.minimum(high, center + FAR)
    low, high = np.minimum(low, high), np.maximum(low, high)
    here = np.clip(center, low, high)
    for _ in range(ROUNDS):
        error = near.log_times + near.slopes @ (here - center) - target
        moved = _step(here, origin, low, high, near.slopes, error)
        if np.max(np.abs(moved - here), initial=0.0) < CLOSE:
            break
        here = moved
    values = {**start, **{p.key: math.exp(x) for p, x in zip(parameters, here, strict=True)}}
    seen = {p.key: int(np.sum(np.abs(near.slopes[:, j]) > SEEN)) for j, p in enumerate(parameters)}
    return Fit(values=values, num_seen=seen)


def corrected(
    near: Linearized, values: Mapping[str, float], log_times: Array, parameters: Sequence[Parameter]
) -> Linearized:
    """Times near another point: slopes are those known, and agree with what the step there changed (Broyden 1965).

    Args:
        values, log_times: of the point and there.
        parameters: of the columns; those that ``values`` lack do not move.
    """
    step = np.array([math.log(values[p.key] / near.values[p.key]) if p.key in near.values else 0.0 for p in parameters])
    length = float(step @ step)
    if length < CLOSE**2:
        return Linearized(values=dict(values), log_times=log_times, slopes=near.slopes)
    missed = log_times - near.log_times - near.slopes @ step
    slopes = near.slopes + np.outer(missed, step) / length
    return Linearized(values=dict(values), log_times=log_times, slopes=slopes)


def robust_loss(error: Array) -> float:
    """The sum of soft L1 losses of logarithmic errors."""
    return float(2 * OUTLIER**2 * np.sum(np.sqrt(1 + (error / OUTLIER) ** 2) - 1))


def _step(here: Array, origin: Array, low: Array, high: Array, slopes: Array, error: Array) -> Array:
    """One step of reweighted least squares inside the bounds (``scipy.optimize.lsq_linear``)."""
    from scipy.optimize import lsq_linear

    weight = (1 + (error / OUTLIER) ** 2) ** -0.25
    matrix = np.vstack([slopes * weight[:, None], DRAW * np.eye(len(here))])
    right = np.concatenate([-error * weight, DRAW * (origin - here)])
    step = lsq_linear(matrix, right, bounds=(low - here - 1e-9, high - here + 1e-9)).x
    moved: Array = np.clip(here + step, low, high)
    return moved

"""The fit: planted values come back, what nothing tells stays, bounds hold, outliers do not pull."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from autopar.validate.parameters import Fit, Linearized, Parameter, fit, sensitivity

WORK = [(1.0, 0.2, 0.0), (0.5, 2.0, 0.0), (3.0, 1.0, 0.0), (0.1, 0.3, 0.0), (2.0, 4.0, 0.0), (5.0, 0.1, 0.0)]
"""Seconds of each run that scale with one over the first, with the second, and with the third parameter."""


def _parameter(name: str, lower: float = 0.05, upper: float = 20.0) -> Parameter:
    return Parameter(name=name, architecture="", prior=1.0, lower=lower, upper=upper, meaning="")


PLANTED = tuple(_parameter(name) for name in ("speed", "overhead", "unseen"))
START = {"speed": 1.0, "overhead": 1.0, "unseen": 2.0}


def _times(values: Mapping[str, float], runs: Sequence[int]) -> list[float]:
    return [WORK[i][0] / values["speed"] + WORK[i][1] * values["overhead"] for i in runs]


def _fitted(measured: Sequence[float], parameters: Sequence[Parameter]) -> Fit:
    """From the start, and three times more from what was found: the times are not linear in logarithms."""
    runs = range(len(WORK))
    values: Mapping[str, float] = START
    for _ in range(4):
        log_times = np.log(np.array(_times(values, runs)))
        slopes = np.stack([sensitivity(_times, values, p, runs, log_times) for p in parameters], axis=1)
        found = fit(Linearized(values=dict(values), log_times=log_times, slopes=slopes), measured, START, parameters)
        values = found.values
    return found


@pytest.mark.parametrize(("speed", "overhead"), [(0.6, 1.5), (1.7, 0.4), (0.9, 1.1)])
def test_planted_values_come_back(speed: float, overhead: float) -> None:
    found = _fitted(_times({"speed": speed, "overhead": overhead}, range(len(WORK))), PLANTED)
    assert found.values["speed"] == pytest.approx(speed, rel=0.02)
    assert found.values["overhead"] == pytest.approx(overhead, rel=0.02)
    assert found.values["unseen"] == pytest.approx(2.0)
    assert found.num_seen == {"speed": 6, "overhead": 6, "unseen": 0}


def test_bounds_hold() -> None:
    narrow = (_parameter("speed", lower=0.9, upper=1.2), PLANTED[1])
    found = _fitted(_times({"speed": 4.0, "overhead": 1.0}, range(len(WORK))), narrow)
    assert found.values["speed"] == pytest.approx(1.2)


def test_one_wrong_run_does_not_pull() -> None:
    measured = _times({"speed": 0.6, "overhead": 1.5}, range(len(WORK)))
    measured[3] *= 3
    found = _fitted(measured, PLANTED)
    error = [abs(math.log(t / m)) for t, m in zip(_times(found.values, range(len(WORK))), measured, strict=True)]
    assert max(error[:3] + error[4:]) < 0.08

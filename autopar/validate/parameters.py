"""The free parameters of profiles, and their fit by Gauss-Newton on logarithms.

Parameters are few, named and bounded, and many runs depend on each. One belongs to an architecture (all devices with the same chip) or is
shared by all. Profiles hold the values. A fit starts from priors and is regularised towards them, so that earlier fits of the profiles do
not matter.

The fit minimises the sum over runs of rho(log(predicted / measured)) + sum over parameters of (DRAW * log(x / start))^2, where rho is the
soft L1 loss (linear above :data:`OUTLIER`), by reweighted least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autopar.hardware.device import TOPICS, CurvePoint, Device, MatmulRate
from autopar.hardware.read import MachineProfile
from autopar.util.files import data_files
from autopar.util.toml import Table

ARCHITECTURES = {"v100": "volta", "a100": "ampere", "h100": "hopper", "h200": "hopper", "b200": "blackwell",
                 "gb200": "blackwell"}  # fmt: skip
FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A number of profiles that can be fitted to measured runs.

    Attributes:
        name: the name in ``--calibrate`` and in provenances.
        architecture: the architecture; empty if all share the parameter.
        prior: the value that every fit is drawn to, whatever profiles have, so that a source that is left out has no effect.
        lower, upper: bounds.
        meaning: what it is, as a text.
    """

    name: str
    architecture: str = ""
    prior: float
    lower: float
    upper: float
    meaning: str

    @property
    def key(self) -> str:
        """Name and architecture, such as ``matmul@hopper``."""
        return f"{self.name}@{self.architecture}" if self.architecture else self.name


PARAMETERS = tuple(
    table.record(Parameter) for table in Table.load(data_files("profiles/fit")["parameters"]).tables("parameter")
)
"""All parameters. Priors are round values that were assumed before any fit; the file says why."""

_RATE_FIELDS = {
    "wave_loss": "wave_loss",
    "fill_depth": "fill_depth",
    "attention": "attention_fraction",
    "attention_backward": "attention_backward_fraction",
    "triton": "triton_fraction",
    "triton_backward": "triton_backward_fraction",
    "unaligned": "unaligned_batched_fraction",
}
HALVES = ("bfloat16", "float16")


def architecture_of(name: str) -> str:
    """Return the architecture of a device by its profile's name; empty if it is unknown."""
    return next((chip for prefix, chip in ARCHITECTURES.items() if name.lower().startswith(prefix)), "")


def parameters_of(name: str) -> tuple[Parameter, ...]:
    """Return the parameters that the profile of a device has."""
    return tuple(p for p in PARAMETERS if p.architecture in ("", architecture_of(name)))


def write(profile: MachineProfile, values: Mapping[str, float], *, provenance: str = "") -> MachineProfile:
    """Return a profile with other values of its parameters; values of other profiles' parameters are ignored.

    Args:
        profile: the profile.
        values: values by parameter key.
        provenance: is appended to the provenance of each number that changes.
    """
    by_name = {p.name: values[p.key] for p in parameters_of(profile.device.name) if p.key in values}
    device = _device(profile.device, by_name, provenance)
    link = profile.intra_node
    if "link_fraction" in by_name:
        link = replace(link, step_fraction=by_name["link_fraction"], provenance=noted(link.provenance, provenance))
    return replace(profile, device=device, intra_node=link)


def _device(device: Device, by_name: Mapping[str, float], provenance: str) -> Device:
    """Return a device with other values of its parameters."""
    topics = {name: topic for topic, keys in TOPICS.items() for name in keys.values()}
    notes = dict(device.provenance)
    for topic in {topics[name] for name in topics if name in by_name}:
        notes[topic] = noted(notes[topic], provenance)
    return replace(
        device,
        matmul=tuple(_rate(rate, by_name, provenance) for rate in device.matmul),
        provenance=notes,
        **cast("dict[str, Any]", {name: by_name[name] for name in topics if name in by_name}),
    )


def _rate(rate: MatmulRate, by_name: Mapping[str, float], provenance: str) -> MatmulRate:
    """Return a rate of products with other values of its parameters."""
    if rate.dtype not in (*HALVES, FLOAT8):
        return rate
    changed: dict[str, float] = {field: by_name[name] for name, field in _RATE_FIELDS.items() if name in by_name}
    efficiency = by_name.get("float8" if rate.dtype == FLOAT8 else "matmul")
    curve = rate.curve
    if efficiency is not None:
        curve = (*curve[:-1], CurvePoint(smallest_dim=curve[-1].smallest_dim, efficiency=min(efficiency, 1.0)))
    if not changed and curve == rate.curve:
        return rate
    updated = replace(rate, curve=curve, provenance=noted(rate.provenance, provenance), **changed)  # type: ignore[arg-type]
    return replace(updated, calibrated=updated.calibrated or (bool(provenance) and efficiency is not None))


def noted(text: str, provenance: str) -> str:
    """Return a provenance with a note that replaces that of an earlier fit.

    >>> noted("measured; fitted on: a", "fitted on: b")
    'measured; fitted on: b'
    """
    base = text.split("; fitted on: ", maxsplit=1)[0]
    return f"{base}; {provenance}" if provenance else text


OUTLIER = 0.05
"""Relative error from which the loss of a run is linear: identical published runs differ by 4.6 % in the median."""

STEP = 0.03
"""Relative change of a parameter in finite differences."""
ROUNDS = 30
FAR = 0.5
"""Relative change of a parameter up to which log times are taken to be linear (a trust region)."""

CLOSE = 1e-4
"""Relative change of all parameters below which a fit has converged."""

SEEN = 1e-3
"""Relative change of a run's time per factor e of a parameter, from which the run counts as depending on the parameter."""

DRAW = 0.03
"""Weight of the priors: a change of a parameter by a factor e costs as much as this relative error of one run."""

Array = NDArray[np.float64]
Predictor = Callable[[Mapping[str, float], Sequence[int]], Sequence[float]]
"""Returns the predicted step times of runs, given by index, under values of parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The result of a fit.

    Attributes:
        values: values by parameter key, also of parameters that were not fitted.
        num_seen: the number of runs whose time depends on each fitted parameter.
    """

    values: dict[str, float]
    num_seen: dict[str, int]


def sensitivity(
    predict: Predictor, values: Mapping[str, float], parameter: Parameter, runs: Sequence[int], log_times: Array
) -> Array:
    """Return the derivative of the log time of each run with respect to the log of a parameter, by a finite difference.

    Args:
        predict: the model.
        values: values of all parameters.
        parameter: the parameter that is changed.
        runs: indices of runs.
        log_times: log times of ``runs`` at ``values``.
    """
    value = values[parameter.key]
    step = STEP if value * math.exp(STEP) <= parameter.upper else -STEP
    moved = np.log(np.array(predict({**values, parameter.key: value * math.exp(step)}, runs)))
    slopes: Array = (moved - log_times) / step
    return slopes


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearized:
    """Log step times near a point, linear in the log parameters. A fit steps on them; the model itself judges the result.

    Attributes:
        values: the parameters at the point.
        log_times: log times of the runs at the point.
        slopes: derivatives, runs by parameters, as :func:`sensitivity` returns them.
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
    """Return the values that fit runs best within the trust region.

    Args:
        near: the linear model, rows as ``measured``, columns as ``parameters``.
        measured: the step time of each run.
        start: values that the fit is drawn to.
        parameters: the fitted parameters.
    """
    target = np.log(np.array(measured))
    center = np.array([math.log(near.values[p.key]) for p in parameters])
    origin = np.array([math.log(start[p.key]) for p in parameters])
    low = np.array([math.log(p.lower) for p in parameters])
    high = np.array([math.log(p.upper) for p in parameters])
    low, high = np.maximum(low, center - FAR), np.minimum(high, center + FAR)
    low, high = np.minimum(low, high), np.maximum(low, high)
    point = np.clip(center, low, high)
    for _ in range(ROUNDS):
        error = near.log_times + near.slopes @ (point - center) - target
        next_point = _step(point, origin, low, high, near.slopes, error)
        if np.max(np.abs(next_point - point), initial=0.0) < CLOSE:
            break
        point = next_point
    values = {**start, **{p.key: math.exp(x) for p, x in zip(parameters, point, strict=True)}}
    seen = {p.key: int(np.sum(np.abs(near.slopes[:, j]) > SEEN)) for j, p in enumerate(parameters)}
    return Fit(values=values, num_seen=seen)


def corrected(
    near: Linearized, values: Mapping[str, float], log_times: Array, parameters: Sequence[Parameter]
) -> Linearized:
    """Return a linear model at another point, with slopes that are updated by the change of times there (Broyden 1965).

    Args:
        near: the linear model so far.
        values: the parameters at the other point.
        log_times: the times there.
        parameters: the columns; a parameter that ``near`` has no value of does not move.
    """
    step = np.array([math.log(values[p.key] / near.values[p.key]) if p.key in near.values else 0.0 for p in parameters])
    length = float(step @ step)
    if length < CLOSE**2:
        return Linearized(values=dict(values), log_times=log_times, slopes=near.slopes)
    residuals = log_times - near.log_times - near.slopes @ step
    slopes = near.slopes + np.outer(residuals, step) / length
    return Linearized(values=dict(values), log_times=log_times, slopes=slopes)


def robust_loss(error: Array) -> float:
    """Return the sum of soft L1 losses of log errors."""
    return float(2 * OUTLIER**2 * np.sum(np.sqrt(1 + (error / OUTLIER) ** 2) - 1))


def _step(point: Array, origin: Array, low: Array, high: Array, slopes: Array, error: Array) -> Array:
    """Return the next point by one step of reweighted least squares within the bounds (``scipy.optimize.lsq_linear``)."""
    from scipy.optimize import lsq_linear

    weight = (1 + (error / OUTLIER) ** 2) ** -0.25
    matrix = np.vstack([slopes * weight[:, None], DRAW * np.eye(len(point))])
    right = np.concatenate([-error * weight, DRAW * (origin - point)])
    step = lsq_linear(matrix, right, bounds=(low - point - 1e-9, high - point + 1e-9)).x
    next_point: Array = np.clip(point + step, low, high)
    return next_point

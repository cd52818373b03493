"""The free parameters of profiles, few, named, bounded, each seen by many runs; and their fit: Gauss-Newton on logarithms.

A parameter belongs to an architecture (all devices with the same chip) or to all of them. Profiles hold the values; a
fit starts from priors and is drawn back to them, so that it is the same whatever the profiles were fitted on before.

Minimises the sum over runs of rho(log(predicted / measured)) + sum over parameters of (log(x / start) / width)^2, where
rho is the soft L1 loss (linear past :data:`OUTLIER`), by reweighted least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autopar.hardware.device import TOPICS, Device
from autopar.hardware.device_rates import CurvePoint, MatmulRate
from autopar.hardware.read import MachineProfile

ARCHITECTURES = {"v100": "volta", "a100": "ampere", "h100": "hopper", "h200": "hopper", "b200": "blackwell",
                 "gb200": "blackwell"}  # fmt: skip
FLOAT8 = "float8_e4m3fn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One number of profiles that measured runs may tell.

    Attributes:
        name: as ``--calibrate`` and the provenance print it.
        architecture: empty: shared by all.
        prior: to which every fit is drawn, whatever profiles say: a source left out leaves no trace.
        lower, upper: bounds.
        meaning: for people.
    """

    name: str
    architecture: str
    prior: float
    lower: float
    upper: float
    meaning: str

    @property
    def key(self) -> str:
        """Name and architecture: ``matmul@hopper``."""
        return f"{self.name}@{self.architecture}" if self.architecture else self.name


_SHARED = (
    ("launch_s", 4e-6, 5e-7, 3e-5, "host and device overhead of one kernel"),
    ("blocking_launch_s", 4e-5, 2e-6, 1.5e-4, "the same where the host waits for each"),
    ("kernel_fraction", 0.85, 0.4, 1.0, "of the memory bandwidth that operators other than copies reach"),
    ("wave_loss", 0.3, 0.02, 3.0, "of one wave of tiles that stands idle on average"),
    ("interference", 0.15, 0.02, 1.0, "compute lost to communication beside it"),
)
_BY_ARCHITECTURE = (
    (
        "matmul",
        (0.9, 0.85, 0.85),
        0.5,
        1.0,
        "of the matmul ceiling that products without end effects sustain in a step",
    ),
    ("fill_depth", (128.0, 192.0, 192.0), 16.0, 400.0, "depth of a product that takes as long as filling the units"),
    ("attention", (0.75, 0.666, 0.6), 0.15, 0.85, "of the ceiling that fused attention reaches forward"),
    ("attention_backward", (0.65, 0.575, 0.5), 0.15, 0.75, "and backward"),
    (
        "triton",
        (0.41, 0.233, 0.115),
        0.05,
        1.0,
        "of the ceiling that the first fused attention in Triton reaches forward",
    ),
    ("triton_backward", (0.36, 0.2, 0.094), 0.05, 1.0, "and backward"),
    ("link_fraction", (1.0, 1.0, 1.0), 0.4, 1.0, "of a node link's benchmark bandwidth, in a step"),
)
PARAMETERS = (
    *(Parameter(name=n, architecture="", prior=x, lower=a, upper=b, meaning=m) for n, x, a, b, m in _SHARED),
    *(
        Parameter(name=n, architecture=chip, prior=x[i], lower=a, upper=b, meaning=m)
        for i, chip in enumerate(("ampere", "hopper", "blackwell"))
        for n, x, a, b, m in _BY_ARCHITECTURE
    ),
    Parameter(
        name="unaligned",
        architecture="ampere",
        prior=0.07,
        lower=0.02,
        upper=1.0,
        meaning="of the rate of batched products whose rows are no multiple of 16 bytes",
    ),
    Parameter(name="float8", architecture="hopper", prior=0.8, lower=0.3, upper=1.0, meaning="as matmul, in float8"),
)
"""Priors are round values assumed before any fit (their reasons stand in the provenance of uncalibrated profiles).

Where the host waits for each kernel nothing hides what eager PyTorch does between two of them: about 10 us of dispatch
and autograd, as much of a module's Python, and as much again for launch, completion and wake-up, more on a busy node.
Checked since: 80 A100s ran 200B parameters at 91.04 TFLOP/s where the host waited and at 97.20 where it did not
(bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md; none of the runs of the table), which is
39.5 us for each kernel that the model counts; at 160 they saw no difference.

Rows that matrix units cannot load, in batched products (heads of 108 with written attention): sums of half precision are in single precision in PyTorch, so that the units beside
them multiply in it: 19.5 TFLOP/s of an A100 (datasheet) over the ceiling of 271. Single products lose less, by measurements that no run of the
table repeats (``unaligned_fraction`` of the profiles).

Fused attention on Hopper: that of cuDNN, causal, at 128 and 8192 tokens (Shah et al. 2024, arXiv 2407.08608, figures 5
and 6); backward without a mask there, times what a mask leaves forward.

No kernel published reaches more of the ceiling than FlashAttention-3 with causal masks, heads of 128 and 8192 tokens on an
H100: 660 TFLOP/s forward and 575 backward of 795 (Dao-AILab/flash-attention, pull request 1893); bounds are these, rounded up.

The first fused attention in Triton: that of FlashAttention-2 on the same chip over 1.8, the middle of "1.3-2.5x faster than
FlashAttention in Triton" (Dao 2023, arXiv 2307.08691, section 4.1); ``flash2_fraction`` of the profiles has FlashAttention-2's.
"""

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
    """The architecture of a device by its profile's name; empty where not known."""
    return next((chip for prefix, chip in ARCHITECTURES.items() if name.lower().startswith(prefix)), "")


def parameters_of(name: str) -> tuple[Parameter, ...]:
    """The parameters that the profile of a device takes."""
    return tuple(p for p in PARAMETERS if p.architecture in ("", architecture_of(name)))


def write(profile: MachineProfile, values: Mapping[str, float], *, provenance: str = "") -> MachineProfile:
    """A profile with other values of its parameters; others of ``values`` are left out.

    Args:
        provenance: what each number that changes says of where it comes from; appended to what is there.
    """
    own = {p.name: values[p.key] for p in parameters_of(profile.device.name) if p.key in values}
    device = _device(profile.device, own, provenance)
    link = profile.intra_node
    if "link_fraction" in own:
        link = replace(link, step_fraction=own["link_fraction"], provenance=noted(link.provenance, provenance))
    return replace(profile, device=device, intra_node=link)


def _device(device: Device, own: Mapping[str, float], provenance: str) -> Device:
    topics = {name: topic for topic, keys in TOPICS.items() for name in keys.values()}
    notes = dict(device.provenance)
    for topic in {topics[name] for name in topics if name in own}:
        notes[topic] = noted(notes[topic], provenance)
    return replace(
        device,
        matmul=tuple(_rate(rate, own, provenance) for rate in device.matmul),
        provenance=tuple(notes.items()),
        **cast("dict[str, Any]", {name: own[name] for name in topics if name in own}),
    )


def _rate(rate: MatmulRate, own: Mapping[str, float], provenance: str) -> MatmulRate:
    if rate.dtype not in (*HALVES, FLOAT8):
        return rate
    changed: dict[str, float] = {field: own[name] for name, field in _RATE_FIELDS.items() if name in own}
    efficiency = own.get("float8" if rate.dtype == FLOAT8 else "matmul")
    curve = rate.curve
    if efficiency is not None:
        curve = (*curve[:-1], CurvePoint(smallest_dim=curve[-1].smallest_dim, efficiency=min(efficiency, 1.0)))
    if not changed and curve == rate.curve:
        return rate
    made = replace(rate, curve=curve, provenance=noted(rate.provenance, provenance), **changed)  # type: ignore[arg-type]
    return replace(made, calibrated=made.calibrated or (bool(provenance) and efficiency is not None))


def noted(text: str, provenance: str) -> str:
    """A provenance with another in place of the last fit's.

    >>> noted("measured; fitted on: a", "fitted on: b")
    'measured; fitted on: b'
    """
    kept = text.split("; fitted on: ", maxsplit=1)[0]
    return f"{kept}; {provenance}" if provenance else text


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


def sensitivity(
    predict: Predictor, values: Mapping[str, float], parameter: Parameter, runs: Sequence[int], log_times: Array
) -> Array:
    """Derivative of the logarithm of each run's time by that of a parameter, by a finite difference.

    Args:
        log_times: of ``runs`` at ``values``.
    """
    here = values[parameter.key]
    step = STEP if here * math.exp(STEP) <= parameter.upper else -STEP
    moved = np.log(np.array(predict({**values, parameter.key: here * math.exp(step)}, runs)))
    found: Array = (moved - log_times) / step
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Linearized:
    """Step times near a point, linear in logarithms: what a fit steps on; the model itself judges the result.

    Attributes:
        values: of the parameters at the point.
        log_times: of each run there.
        slopes: of each run (row) by each parameter (column), as :func:`sensitivity` gives them.
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

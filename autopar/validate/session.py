"""A table of runs, their predictions under profiles that may change, and profiles that are calibrated to them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property

import numpy as np

from autopar.errors import AutoparError, UsageError
from autopar.hardware.device import ALIGNED_ELEMENTS, Device
from autopar.hardware.read import MachineProfile, known_devices, load_profile
from autopar.plan.prediction import Prediction
from autopar.planner.search import Progress
from autopar.validate import parameters as free
from autopar.validate.express import Solved, Structure, predict, structures_of
from autopar.validate.parameters import PARAMETERS, Array, Fit, Linearized, Parameter
from autopar.validate.practice import Site, cluster_of, load_sites, released, site_of
from autopar.validate.runs import FailedRow, Run

ROUNDS = 8
"""Most rounds of a fit."""
MEASURED_ROUNDS = (0, 1)
"""Rounds of a fit after which slopes are measured anew, not corrected."""
SETTLED = 1e-3
"""Relative gain of a round below which the fit ends."""

LEAST_SEEN = 4
"""Fewest runs that must depend on a parameter for it to be fitted."""


def predictable(
    rows: Sequence[Run | FailedRow], *, place: str = "runs", progress: Progress = lambda *_: None
) -> tuple[Session, tuple[FailedRow, ...]]:
    """Return a session of the runs that can be predicted, and the other rows with their errors."""
    failed = [row for row in rows if isinstance(row, FailedRow)]
    profiles: dict[str, MachineProfile] = {}
    runs = []
    for run in (row for row in rows if isinstance(row, Run)):
        try:
            profiles[run.device] = profiles.get(run.device) or profile_of(run)
            runs.append(run)
        except UsageError as error:
            failed.append(FailedRow.of(run, error))
    session = Session(runs, place=place, profiles=profiles, progress=progress)
    structures: dict[int, tuple[Structure, ...]] = {}
    for i, run in enumerate(runs):
        try:
            structures[i] = session.tried(i)
        except AutoparError as error:
            failed.append(FailedRow.of(run, error))
    return session.keeping(structures), tuple(failed)


def profile_of(run: Run) -> MachineProfile:
    """Return the profile of a run's device.

    Raises:
        UsageError: there is none; the error names file and row.
    """
    try:
        return load_profile(run.device)
    except UsageError as error:
        raise error.becoming(UsageError, where=f"{run.place}, column device") from error


class Session:
    """Runs with their layouts and predictions.

    Args:
        runs: runs of one or several files.
        place: the file, for errors.
        sites: facts on clusters; the shipped ones if None.
        profiles: profiles by device name; missing ones are shipped ones or files.
        progress: takes a text, the number done and the total.

    Raises:
        UsageError: a run names a device without a profile; the error names file and row.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        place: str = "runs",
        sites: Sequence[Site] | None = None,
        profiles: Mapping[str, MachineProfile] | None = None,
        progress: Progress = lambda *_: None,
    ) -> None:
        self.place, self.progress = place, progress
        sites = tuple(load_sites() if sites is None else sites)
        self.sites = tuple(site_of(run, sites) for run in runs)
        self.runs = tuple(released(run, site) for run, site in zip(runs, self.sites, strict=True))
        self._solved: Solved = {}
        self.profiles: dict[str, MachineProfile] = dict(profiles or {})
        self.profiles |= {run.device: profile_of(run) for run in self.runs if run.device not in self.profiles}

    def under(self, profiles: Mapping[str, MachineProfile]) -> Session:
        """Return the same runs and layouts under other profiles of some devices; layouts are not chosen again."""
        session = self.keeping(dict(enumerate(self.structures)))
        session.profiles = {**self.profiles, **profiles}
        return session

    @cached_property
    def structures(self) -> tuple[tuple[Structure, ...], ...]:
        """The layouts of every run, traced and solved once."""
        return tuple([self.laid_out(i) for i in range(len(self.runs))])

    def laid_out(self, index: int) -> tuple[Structure, ...]:
        """Return the layouts of one run.

        Raises:
            UsageError: the planner cannot express its layout; the error names file and row.
        """
        run = self.runs[index]
        self.progress("laying out runs", index, len(self.runs))
        try:
            return structures_of(run, self.sites[index], self.profiles[run.device], self._solved)
        except AutoparError as error:
            raise UsageError(
                "The planner does not know the layout of this run",
                where=f"{run.place} ({run.name})",
                got=error.short,
                fix="Correct the row",
            ) from error

    def keeping(self, structures: Mapping[int, tuple[Structure, ...]]) -> Session:
        """Return a session of some runs, which are given by index with their layouts."""
        session = copy(self)
        session.runs = tuple(self.runs[i] for i in structures)
        session.sites = tuple(self.sites[i] for i in structures)
        session.structures = tuple(structures.values())
        return session

    # --- predictions

    @cached_property
    def start(self) -> dict[str, float]:
        """The priors of the parameters that the profiles of the runs have."""
        return {p.key: p.prior for name in self.profiles.values() for p in free.parameters_of(name.device.name)}

    def predictions(
        self, values: Mapping[str, float] | None = None, runs: Sequence[int] | None = None
    ) -> list[Prediction]:
        """Return predictions of runs.

        Args:
            values: values of parameters; those of the profiles if None.
            runs: indices; all runs if None.
        """
        profiles = self.profiles
        if values is not None:
            profiles = {name: free.write(profile, values) for name, profile in profiles.items()}
        chosen = range(len(self.runs)) if runs is None else runs
        return [self._predicted(i, self.structures[i], profiles) for i in chosen]

    def _predicted(
        self, index: int, structures: Sequence[Structure], profiles: Mapping[str, MachineProfile]
    ) -> Prediction:
        """Return the prediction of one run under some profiles."""
        run = self.runs[index]
        cluster = cluster_of(run, profiles[run.device], self.sites[index])
        return predict(run, structures, cluster, self.sites[index])

    def tried(self, index: int) -> tuple[Structure, ...]:
        """Return the layouts of one run, after a prediction has succeeded.

        Raises:
            AutoparError: the run cannot be expressed, or not be predicted under the profiles; the error names file and row.
        """
        structures = self.laid_out(index)
        try:
            self._predicted(index, structures, self.profiles)
        except AutoparError as error:
            raise error.within(self.runs[index].place) from error
        return structures

    def times_s(self, values: Mapping[str, float], runs: Sequence[int]) -> list[float]:
        """Return predicted step times."""
        return [prediction.step_time_s for prediction in self.predictions(values, runs)]

    # --- fits

    @property
    def timed(self) -> list[int]:
        """Indices of the runs with a measured step time."""
        return [i for i, run in enumerate(self.runs) if run.step_time_s is not None]

    def touches(self, parameter: Parameter, index: int) -> bool:
        """Return whether the time of a run can depend on a parameter."""
        run, site = self.runs[index], self.sites[index]
        if parameter.architecture not in ("", free.architecture_of(self.profiles[run.device].device.name)):
            return False
        match parameter.name:
            case "launch_s":
                return "blocking_launches" not in site.practices
            case "blocking_launch_s":
                return "blocking_launches" in site.practices
            case "triton" | "triton_backward":
                return "triton_attention" in site.practices
            case "attention" | "attention_backward":
                return run.attention == "flash" and not site.practices & {"triton_attention", "flash2_attention"}
            case "unaligned":
                return run.attention == "scores" and bool(run.hidden // run.heads % ALIGNED_ELEMENTS)
            case "float8":
                return run.precision == "fp8"
            case _:
                return True

    def log_times(self, values: Mapping[str, float], runs: Sequence[int]) -> Array:
        """Return log step times of ``runs`` as a column for all runs, zero for the others."""
        column = np.zeros(len(self.runs))
        column[list(runs)] = np.log(self.times_s(values, runs))
        return column

    def linearized(self, values: Mapping[str, float], runs: Sequence[int]) -> Linearized:
        """Return the linear model of ``runs`` near ``values``; rows of other runs are zero."""
        columns = [j for j, p in enumerate(PARAMETERS) if p.key in self.start]
        log_times, slopes = self.log_times(values, runs), np.zeros((len(self.runs), len(PARAMETERS)))
        for done, j in enumerate(columns):
            parameter = PARAMETERS[j]
            self.progress(f"measuring what {parameter.key} changes", done, len(columns))
            rows = [i for i in runs if self.touches(parameter, i)]
            slopes[rows, j] = free.sensitivity(self.times_s, values, parameter, rows, log_times[rows])
        return Linearized(values=dict(values), log_times=log_times, slopes=slopes)

    def fitted(self, runs: Sequence[int], *, near: Linearized | None = None) -> Fit:
        """Return a fit to ``runs`` alone of the parameters that at least :data:`LEAST_SEEN` of the runs depend on.

        Each round steps on the linear model and predicts the runs at the new point. Slopes are measured at the start and in
        :data:`MEASURED_ROUNDS`; in other rounds they are corrected by the change of times (:func:`~autopar.validate.parameters.corrected`). The values with the least
        loss by the model itself are returned.

        Args:
            runs: indices.
            near: the linear model at the start, if it is known.
        """
        rows = list(runs)
        chosen = tuple(
            p for p in PARAMETERS if p.key in self.start and sum(self.touches(p, i) for i in rows) >= LEAST_SEEN
        )
        measured = [self.runs[i].step_time_s or 1.0 for i in rows]
        columns = [PARAMETERS.index(p) for p in chosen]
        point = near or self.linearized(self.start, rows)
        best: tuple[float, Fit] | None = None
        for round_number in range(ROUNDS):
            part = Linearized(
                values=point.values, log_times=point.log_times[rows], slopes=point.slopes[np.ix_(rows, columns)]
            )
            step_fit = free.fit(part, measured, self.start, chosen)
            if round_number in MEASURED_ROUNDS:
                point = self.linearized(step_fit.values, rows)
            else:
                point = free.corrected(point, step_fit.values, self.log_times(step_fit.values, rows), PARAMETERS)
            loss = free.robust_loss(point.log_times[rows] - np.log(np.array(measured)))
            if best is None or loss < best[0]:
                best = (loss, step_fit)
            elif loss > best[0] * (1 - SETTLED):
                break
        assert best is not None
        return best[1]

    def left_out(self, groups: Sequence[str]) -> dict[str, dict[str, float]]:
        """Return for each distinct group the values fitted to the timed runs of all other groups.

        Args:
            groups: the group of each run.
        """
        near = self.linearized(self.start, self.timed)
        result = {}
        for group in dict.fromkeys(groups):
            others = [i for i in self.timed if groups[i] != group]
            result[group] = self.fitted(others, near=near).values if others else dict(self.start)
        return result


# --- profiles that are fitted to runs


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
    for name in known_devices() if "all" in sources else ():
        if name not in profiles and (profile := load_profile(name)).device.kind == "cuda":
            note = f"{text}; none on this device; by autopar validate --calibrate"
            profiles[profile.device.name] = free.write(profile, values, provenance=note)
    return profiles, fit, rows


def memory_width(runs: Sequence[Run], predictions: Sequence[Prediction]) -> float | None:
    """Return the half width of the interval of peak memory that holds 19 of 20 runs; None if too few have a measured peak."""
    errors = sorted(max(ratio, 1 / ratio) - 1 for ratio in memory_ratios(runs, predictions))
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


def as_read(run: Run, prediction: Prediction) -> float:
    """Return the predicted peak as the run measured it: an allocator does not see the context and the buffers of libraries."""
    if run.memory_kind == "allocator":
        return max(m.total - m.reserved for m in prediction.memory)
    return float(prediction.peak_memory_bytes)


def memory_ratios(runs: Sequence[Run], predictions: Sequence[Prediction]) -> list[float]:
    """Return predicted over measured peak memory of the runs in which it was measured."""
    pairs = zip(runs, predictions, strict=True)
    return [as_read(run, p) / run.peak_memory_bytes for run, p in pairs if run.peak_memory_bytes]

"""A table of runs predicted under profiles that may change: what the command, the fit and the tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from autopar.cluster import Cluster
from autopar.device import ALIGNED_ELEMENTS
from autopar.errors import AutoparError, UsageError
from autopar.links import CollectiveLibrary
from autopar.plan import Prediction
from autopar.profile.store import MachineProfile, load_library, load_profile
from autopar.validate import parameters as free
from autopar.validate.express import Expressed, Structure, predict
from autopar.validate.fit import Fit, Linearized, fit, robust_loss, sensitivities
from autopar.validate.parameters import PARAMETERS, Parameter
from autopar.validate.runs import Run
from autopar.validate.sites import Site, cluster_of, load_sites, site_of

ROUNDS = 6
LEAST_SEEN = 4
"""Runs that a parameter must be seen by, in order that it is fitted."""


class Session:
    """Runs with their layouts, and predictions of them.

    Args:
        runs: of one or several files.
        place: of the file, for errors.
        sites: facts of clusters; the shipped ones where None.
        profiles: by device name; shipped ones or files where left out.
        progress: told (text, done, total).

    Raises:
        UsageError: a run names a device without a profile, or cannot be laid out; names file and row.
    """

    def __init__(
        self,
        runs: Sequence[Run],
        *,
        place: str = "runs",
        sites: Sequence[Site] | None = None,
        profiles: Mapping[str, MachineProfile] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.runs, self.place, self.progress = tuple(runs), place, progress
        sites = tuple(load_sites() if sites is None else sites)
        self.sites = tuple(site_of(run, sites) for run in self.runs)
        self._libraries: dict[str, CollectiveLibrary] = {}
        self.profiles: dict[str, MachineProfile] = dict(profiles or {})
        for run in self.runs:
            if run.device not in self.profiles:
                self.profiles[run.device] = self._profile(run)

    def under(self, profiles: Mapping[str, MachineProfile]) -> Session:
        """The same runs and layouts under other profiles of the devices named; layouts are those chosen here."""
        other = Session(self.runs, place=self.place, profiles={**self.profiles, **profiles}, progress=self.progress)
        other.sites = self.sites
        other.__dict__["structures"] = self.structures
        return other

    def _profile(self, run: Run) -> MachineProfile:
        try:
            return load_profile(run.device, relative_to=Path())
        except UsageError as error:
            place = f"{self.place}, row {run.line}, column device"
            raise UsageError(error.law, value=error.value, place=place, remedy=error.remedy) from error

    @cached_property
    def structures(self) -> tuple[tuple[Structure, ...], ...]:
        """The layouts of every run; traced and solved once."""
        sites = {run.source: site for run, site in zip(self.runs, self.sites, strict=True)}
        expressed = Expressed(
            lambda run, site: cluster_of(run, self.profiles[run.device], site), lambda run: sites[run.source]
        )
        found = []
        for i, run in enumerate(self.runs):
            if self.progress is not None:
                self.progress("laying out runs", i, len(self.runs))
            try:
                found.append(expressed.structures(run))
            except AutoparError as error:
                raise UsageError(
                    "every run is a layout that the planner knows",
                    value=str(error),
                    place=f"{self.place}, row {run.line} ({run.name})",
                    remedy="mend the row",
                ) from error
        return tuple(found)

    # --- predictions

    @cached_property
    def start(self) -> dict[str, float]:
        """The priors of the parameters that the profiles of the runs take."""
        return {p.key: p.prior for name in self.profiles.values() for p in free.parameters_of(name.device.name)}

    def predictions(
        self, values: Mapping[str, float] | None = None, runs: Sequence[int] | None = None
    ) -> list[Prediction]:
        """Predictions of runs, by index; of all where None. ``values``: of parameters; the profiles' where None."""
        profiles = self.profiles
        if values is not None:
            profiles = {name: free.write(profile, values) for name, profile in profiles.items()}
        chosen = range(len(self.runs)) if runs is None else runs
        return [
            predict(
                self.runs[i],
                self.structures[i],
                self._cluster(i, profiles[self.runs[i].device]),
                self.sites[i],
            )
            for i in chosen
        ]

    def _cluster(self, index: int, profile: MachineProfile) -> Cluster:
        if profile.library not in self._libraries:
            self._libraries[profile.library] = load_library(profile.library)
        return cluster_of(self.runs[index], profile, self.sites[index], self._libraries[profile.library])

    def times_s(self, values: Mapping[str, float], runs: Sequence[int]) -> list[float]:
        """Predicted step times."""
        return [prediction.step_time_s for prediction in self.predictions(values, runs)]

    # --- fits

    @property
    def timed(self) -> list[int]:
        """Runs whose step time is known."""
        return [i for i, run in enumerate(self.runs) if run.step_time_s is not None]

    def touches(self, parameter: Parameter, index: int) -> bool:
        """Whether a parameter can change the time of a run."""
        run, site = self.runs[index], self.sites[index]
        if parameter.architecture not in ("", free.architecture_of(self.profiles[run.device].device.name)):
            return False
        match parameter.name:
            case "launch_s":
                return not site.blocking_launches
            case "blocking_launch_s":
                return site.blocking_launches
            case "triton":
                return site.triton_attention
            case "attention" | "attention_backward":
                return run.attention == "flash"
            case "unaligned":
                return run.attention == "scores" and bool(run.hidden // run.heads % ALIGNED_ELEMENTS)
            case "float8":
                return run.precision == "fp8"
            case _:
                return True

    def linearized(self, values: Mapping[str, float], *, slopes: bool = True) -> Linearized:
        """The step times of all runs near ``values``; rows of runs without a time are zero, and so is all without ``slopes``."""
        timed, wanted = self.timed, slopes
        log_times, slopes_of = np.zeros(len(self.runs)), np.zeros((len(self.runs), len(PARAMETERS)))
        known = [j for j, p in enumerate(PARAMETERS) if p.key in self.start and wanted]
        log_times[timed] = np.log(self.times_s(values, timed))
        for done, j in enumerate(known):
            if self.progress is not None:
                self.progress(f"measuring what {PARAMETERS[j].key} changes", done, len(known))
            column = sensitivities(self.times_s, values, [PARAMETERS[j]], timed, self.touches, log_times[timed])
            slopes_of[timed, j] = column[:, 0]
        return Linearized(values=dict(values), log_times=log_times, slopes=slopes_of)

    def fitted(
        self, runs: Sequence[int], *, near: Linearized | None = None, rounds: int = ROUNDS
    ) -> tuple[Fit, tuple[Parameter, ...]]:
        """Parameters fitted to ``runs`` alone: those that at least :data:`LEAST_SEEN` of them see.

        Args:
            near: of all runs at the point to begin with; at the start where None.
            rounds: steps, each from what the one before found; the best by the model itself counts.
        """
        chosen = tuple(
            p for p in PARAMETERS if p.key in self.start and sum(self.touches(p, i) for i in runs) >= LEAST_SEEN
        )
        measured = [self.runs[i].step_time_s or 1.0 for i in runs]
        columns = [PARAMETERS.index(p) for p in chosen]

        def solved(whole: Linearized) -> Fit:
            rows = list(runs)
            part = Linearized(
                values=whole.values, log_times=whole.log_times[rows], slopes=whole.slopes[np.ix_(rows, columns)]
            )
            return fit(part, measured, self.start, chosen)

        here = near or self.linearized(self.start)
        best: tuple[float, Fit] | None = None
        for turn in range(rounds):
            found = solved(here)
            if rounds == 1:
                return found, chosen
            here = self.linearized(found.values, slopes=turn < rounds - 1)
            loss = robust_loss(here.log_times[list(runs)] - np.log(np.array(measured)))
            if best is None or loss < best[0]:
                best = (loss, found)
        assert best is not None
        return best[1], chosen

    def left_out(self, groups: Sequence[str]) -> dict[str, dict[str, float]]:
        """For each distinct group of runs the values fitted to the timed runs of all others.

        Args:
            groups: of each run.
        """
        near = self.linearized(self.fitted(self.timed)[0].values)
        result = {}
        for group in dict.fromkeys(groups):
            others = [i for i in self.timed if groups[i] != group]
            result[group] = self.fitted(others, near=near, rounds=3)[0].values if others else dict(self.start)
        return result

"""Optuna's samplers over the candidates of a search: they name candidates of the pool and learn from the results.

Every process has its own Optuna study in memory. What it asks for is a function of its seed and of what it was told, in that order, so
that processes that tell it the same results get the same candidates (:mod:`autopar.planner.branch_and_bound.sampling`).

A sampler asks for one value of each choice, and most combinations are no candidate. Such a trial fails, and the nearest open candidate is
enqueued in its place, so that the sampler learns at the values of the candidate that was evaluated.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from optuna.samplers import BaseSampler, CmaEsSampler, NSGAIISampler, TPESampler
from optuna.trial import Trial, TrialState, create_trial

from autopar.errors import UsageError
from autopar.planner.branch_and_bound.sampling import POPULATION
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.space import SamplerName
from autopar.planner.studies.study import KEYS, Value, params

NUMERIC = ("cmaes", "tpe")
"""The samplers that take numeric choices as numbers: from a dozen categories for each choice they would learn little in few trials."""

STARTUP = 4
"""The number of results from which on TPE uses its model: it gets few trials, and bounds have chosen most of the others well."""

NEAR = 1e-6
"""The distance below which values are those of a candidate."""

Values = dict[str, Value | float]
"""The parameters of an Optuna trial: the value of each choice by its name."""


class Encoding:
    """The candidates of a pool as values of :data:`autopar.planner.studies.study.KEYS`.

    Args:
        is_numeric: encode numbers on a logarithmic scale of base 2; else every choice is a category, as in shared studies.
    """

    def __init__(self, pool: Sequence[Candidate], *, is_numeric: bool) -> None:
        self._params = [params(candidate) for candidate in pool]
        columns: dict[str, list[Value]] = {key: [row[key] for row in self._params] for key in KEYS}
        self._texts = {key: any(isinstance(v, str) for v in column) for key, column in columns.items()}
        self._columns = {
            key: np.array(column) if self._texts[key] else doublings(column) for key, column in columns.items()
        }
        self._floats = {key for key in KEYS if is_numeric and not self._texts[key]}
        self.distributions: dict[str, BaseDistribution] = {
            key: FloatDistribution(float(self._columns[key].min()), float(self._columns[key].max()))
            if key in self._floats
            else CategoricalDistribution(sorted(set(column), key=str))
            for key, column in columns.items()
        }

    def params(self, index: int) -> Values:
        """Return the parameters of a candidate as a trial has them."""
        row = self._params[index]
        return {key: float(self._columns[key][index]) if key in self._floats else row[key] for key in KEYS}

    def distances(self, values: Values) -> NDArray[np.float64]:
        """Return the distance of every candidate from ``values``: doublings between numbers, plus one for each name that differs."""
        distances = np.zeros(len(self._params))
        for key in KEYS:
            value = values[key]
            if self._texts[key]:
                distances += self._columns[key] != value
            else:
                coordinate = float(value) if key in self._floats else float(doublings([value])[0])
                distances += np.abs(self._columns[key] - coordinate)
        return distances


def doublings(numbers: Sequence[Value | float]) -> NDArray[np.float64]:
    """Return numbers from zero on a scale where twice as many is about one more; the offset of 0.5 admits ZeRO stage 0."""
    scaled: NDArray[np.float64] = np.log2(np.array(numbers, dtype=np.float64) + 0.5)
    return scaled


class Sampler:
    """An Optuna sampler that asks for candidates by position.

    Args:
        kind: which of Optuna's samplers.
        seed: the seed of its random numbers.
        objectives: the number of values of a result.

    Raises:
        UsageError: the package that it needs is not installed.
    """

    def __init__(self, kind: SamplerName, pool: Sequence[Candidate], *, seed: int, objectives: int = 1) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.kind, self.objectives = kind, objectives
        self.encoding = Encoding(pool, is_numeric=kind in NUMERIC)
        self.study = optuna.create_study(directions=["minimize"] * objectives, sampler=make_sampler(kind, seed))
        self._open: dict[int, Trial] = {}
        self.asked = np.zeros(len(pool), dtype=bool)
        """Flags of the candidates that were asked for and are never asked for again, by position."""

    def enqueue(self, index: int, why: str) -> None:
        """Ask for a candidate before those that the sampler chooses; ``why`` is the reason."""
        self.study.enqueue_trial(self.encoding.params(index), user_attrs={"why": why})

    def ask(self, bounds_s: NDArray[np.float64], below_s: float) -> int | None:
        """Return the next candidate that was not asked for and whose bound is below ``below_s``; None if there is none."""
        is_open = ~self.asked & (bounds_s < below_s)
        while is_open.any():
            trial = self.study.ask(self.encoding.distributions)
            distances = self.encoding.distances(trial.params)
            exact = int(distances.argmin())
            index = int(np.where(is_open, distances, np.inf).argmin())
            if distances[index] <= distances[exact] and distances[index] < NEAR:
                self.asked[index] = True
                self._open[index] = trial
                return index
            self._refuse(trial, float(bounds_s[exact]) if distances[exact] < NEAR and not self.asked[exact] else None)
            self.enqueue(index, "nearest")
        return None

    def _refuse(self, trial: Trial, bound_s: float | None) -> None:
        """End a trial that is not evaluated; ``bound_s`` is the bound of its candidate, None if it is no open candidate."""
        if bound_s is not None and np.isfinite(bound_s) and self.objectives == 1:
            trial.report(bound_s, 0)
            self.study.tell(trial, state=TrialState.PRUNED)
            return
        trial.set_user_attr("reason", "no candidate of the pool" if bound_s is None else "fits in no layout")
        self.study.tell(trial, state=TrialState.FAIL)

    def tell(self, index: int, values: Sequence[float] | None, at_least_s: float) -> None:
        """Tell the sampler the result of a candidate that it asked for.

        Args:
            index: the candidate's position.
            values: one for each objective; None if there is no plan below ``at_least_s``.
            at_least_s: infinite if there is no plan at all. CMA-ES and NSGA-II learn from finished trials alone: they get it as the value, since
                most trials end so.
        """
        trial = self._open.pop(index)
        if values is not None:
            self.study.tell(trial, list(values))
        elif np.isinf(at_least_s):
            self.study.tell(trial, state=TrialState.FAIL)
        elif self.kind == "tpe":
            trial.report(at_least_s, 0)
            self.study.tell(trial, state=TrialState.PRUNED)
        else:
            self.study.tell(trial, [at_least_s] * self.objectives)

    def learn(self, index: int, time_s: float | None, at_least_s: float) -> None:
        """Tell the sampler the result of a candidate that the order of bounds asked for; for the arguments see :meth:`tell`."""
        if time_s is None and np.isinf(at_least_s):
            return
        is_complete = time_s is not None or self.kind != "tpe"
        known_s = at_least_s if time_s is None else time_s
        self.study.add_trial(
            create_trial(
                state=TrialState.COMPLETE if is_complete else TrialState.PRUNED,
                params=self.encoding.params(index),
                distributions=self.encoding.distributions,
                value=known_s,
                intermediate_values={} if is_complete else {0: known_s},
            )
        )


def make_sampler(kind: SamplerName, seed: int) -> BaseSampler:
    """Return one of Optuna's samplers.

    Raises:
        UsageError: the package that it needs is not installed.
    """
    if kind == "cmaes" and find_spec("cmaes") is None:
        raise UsageError.missing(
            "package cmaes, which the sampler needs",
            where="sampler",
            fix="Run: pip install 'autopar[cmaes]', or take tpe or nsga2",
        )
    with warnings.catch_warnings():  # the arguments below are marked as experimental in some versions
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if kind == "tpe":
            return TPESampler(seed=seed, multivariate=True, constant_liar=True, n_startup_trials=STARTUP)
        if kind == "cmaes":
            return CmaEsSampler(seed=seed, warn_independent_sampling=False, n_startup_trials=1)
        return NSGAIISampler(seed=seed, population_size=POPULATION)

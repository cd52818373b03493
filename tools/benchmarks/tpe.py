"""Optuna's TPE over candidates, as it would be used without bounds: it asks for numbers, the nearest candidate is evaluated."""

from __future__ import annotations

import math
from collections.abc import Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState

from autopar.planner.search import Evaluation, Misfit
from autopar.planner.space.candidates import Candidate
from autopar.planner.studies.study import KEYS, Value, params


class Sampler:
    """Ask for a candidate, tell how it went."""

    def __init__(self, pool: Sequence[Candidate], *, seed: int) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.values = {candidate: params(candidate) for candidate in pool}
        self.distributions: dict[str, BaseDistribution] = {
            key: CategoricalDistribution(sorted({v[key] for v in self.values.values()}, key=str)) for key in KEYS
        }
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=16)
        self.study = optuna.create_study(direction="minimize", sampler=sampler)

    def ask(self) -> Candidate:
        self.trial = self.study.ask(self.distributions)
        return min(self.values, key=lambda c: _distance(self.values[c], self.trial.params))

    def tell(self, found: Evaluation | Misfit) -> None:
        if isinstance(found, Evaluation):
            self.study.tell(self.trial, found.prediction.step_time_s)
        else:
            self.study.tell(self.trial, state=TrialState.FAIL)


def _distance(own: dict[str, Value], asked: dict[str, Value]) -> float:
    """Doublings between numbers, one for each name that differs."""
    total = 0.0
    for key in KEYS:
        mine, wanted = own[key], asked[key]
        if isinstance(mine, int) and isinstance(wanted, int):
            total += abs(math.log2((mine + 0.5) / (wanted + 0.5)))
        else:
            total += mine != wanted
    return total

"""Optuna behind three verbs: enqueue what is known to be good, ask for a candidate, tell how it went."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState
from sqlalchemy.exc import SQLAlchemyError

from autopar.errors import UsageError
from autopar.search.candidates import Candidate
from autopar.search.evaluate import Evaluation, Misfit

_KEYS = ("pp", "dp_shard", "cp", "tp", "ep_data", "micro_batch", "zero", "schedule")
Value = int | str


class Study:
    """A study over a fixed pool of candidates.

    Args:
        storage: an Optuna URL, shared by machines; None for memory.
        seed: of the sampler.

    Raises:
        UsageError: the storage cannot be opened.
    """

    def __init__(self, pool: Sequence[Candidate], *, storage: str | None, seed: int, name: str) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.pool = tuple(pool)
        self.values = {candidate: _values(candidate) for candidate in self.pool}
        self.distributions: dict[str, BaseDistribution] = {
            key: CategoricalDistribution(sorted({v[key] for v in self.values.values()}, key=str)) for key in _KEYS
        }
        try:
            self.study = optuna.create_study(
                study_name=name,
                storage=storage,
                load_if_exists=True,
                direction="minimize",
                sampler=optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=16),
            )
        except (SQLAlchemyError, ImportError, optuna.exceptions.StorageInternalError) as error:
            raise UsageError(
                "the storage is a database URL that can be opened",
                value=f"{storage!r}: {str(error).splitlines()[0]}",
                place="--storage",
                remedy="write for example sqlite:///study.db",
            ) from error
        self.asked: dict[Candidate, optuna.trial.Trial] = {}
        self.last: optuna.trial.Trial | None = None

    def enqueue(self, candidates: Iterable[Candidate]) -> None:
        """Ask for these first."""
        for candidate in candidates:
            self.study.enqueue_trial(dict(self.values[candidate]))

    def ask(self) -> Candidate:
        """The candidate nearest to what the sampler suggests."""
        trial = self.study.ask(self.distributions)
        nearest = min(self.pool, key=lambda c: _distance(self.values[c], trial.params))
        self.asked[nearest], self.last = trial, trial
        trial.set_user_attr("candidate", str(nearest))
        return nearest

    def tell(self, candidate: Candidate, found: Evaluation | Misfit) -> None:
        """How it went; a candidate that nobody asked for becomes a trial of its own."""
        trial = self.asked.pop(candidate, None)
        if trial is None:
            self.study.enqueue_trial(dict(self.values[candidate]))
            trial = self.study.ask(self.distributions)
            trial.set_user_attr("candidate", str(candidate))
        if isinstance(found, Evaluation):
            trial.set_user_attr("peak_memory_bytes", found.prediction.peak_memory_bytes)
            self.study.tell(trial, found.prediction.step_time_s)
        else:
            trial.set_user_attr("reason", found.reason)
            self.study.tell(trial, state=TrialState.FAIL)

    def tell_slow(self, candidate: Candidate, bound_s: float) -> None:
        """A candidate whose lower bound is above the best plan."""
        trial = self.asked.pop(candidate)
        trial.set_user_attr("reason", f"no faster than {bound_s:.4g} s by its lower bound")
        self.study.tell(trial, bound_s)

    def tell_again(self, candidate: Candidate) -> None:
        """A candidate that was evaluated before."""
        trial = self.asked.pop(candidate)
        trial.set_user_attr("reason", "evaluated before")
        self.study.tell(trial, state=TrialState.PRUNED)


def _values(candidate: Candidate) -> dict[str, Value]:
    return {
        "pp": candidate.mesh.pp,
        "dp_shard": candidate.mesh.dp_shard,
        "cp": candidate.mesh.cp,
        "tp": candidate.mesh.tp,
        "ep_data": candidate.mesh.ep_data,
        "micro_batch": candidate.micro_batch_size,
        "zero": candidate.zero_stage,
        "schedule": f"{candidate.schedule} v={candidate.virtual_stages}",
    }


def _distance(own: dict[str, Value], asked: dict[str, Value]) -> float:
    """Doublings between numbers, one for each name that differs."""
    total = 0.0
    for key in _KEYS:
        mine, wanted = own[key], asked[key]
        if isinstance(mine, int) and isinstance(wanted, int):
            total += abs(math.log2((mine + 0.5) / (wanted + 0.5)))
        else:
            total += mine != wanted
    return total

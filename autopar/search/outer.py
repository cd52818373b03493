"""The outer search: which candidates are evaluated, in which order, and when it may stop.

A space that is small enough is searched to the end by branch and bound: after the defaults of practice, candidates
come in order of their lower bound, and the search stops when no bound is below the best plan found. A larger one
goes to Optuna (TPE, ask and tell), which is seeded with the same defaults; a trial asks for numbers, and the nearest
candidate is what is evaluated. Either way every trial stands in the study, failed ones with their reason, where a
storage is given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.schedule import SCHEDULES
from autopar.search.candidates import Candidate
from autopar.search.evaluate import Evaluation, Evaluator, Misfit

if TYPE_CHECKING:
    from autopar.search.study import Study

Progress = Callable[[str, int, int], None]
"""``(what, done, total)``; ``total`` 0 while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search stops: after so many trials or seconds; None for no limit."""

    trials: int | None = None
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a search found.

    Attributes:
        best: the fastest plan that fits; None when none of those evaluated does.
        candidates: how many there were.
        evaluated: how many of them were looked at; the others cannot fit in any layout, or are slower by a bound.
        lower_bound_s: no candidate that may fit is faster.
        misfits: those that failed, with their reasons.
        finished: False where a limit stopped the search.
    """

    best: Evaluation | None
    candidates: int
    evaluated: int
    lower_bound_s: float
    misfits: tuple[Misfit, ...]
    finished: bool


class OuterSearch:
    """One search over candidates.

    Args:
        evaluator: evaluates them.
        pool: the candidates.
        exhaustive: up to so many are searched to the end.
        trials: of a larger pool, where ``limits`` says nothing.
        study: where trials are recorded; a pool that is not searched to the end needs one.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        pool: Sequence[Candidate],
        *,
        exhaustive: int,
        trials: int,
        limits: Limits,
        study: Study | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.evaluator, self.pool = evaluator, tuple(pool)
        self.limits, self.progress = limits, progress
        self.is_exhaustive = len(self.pool) <= exhaustive or study is None
        self.trials = limits.trials or (len(self.pool) if self.is_exhaustive else trials)
        self.start = time.monotonic()
        self.best: Evaluation | None = None
        self.seen: dict[Candidate, None] = {}
        self.misfits: list[Misfit] = []
        self.open: list[Candidate] = []
        self.finished = True
        self.study = study

    def run(self) -> Outcome:
        """Search until the end or a limit."""
        self._drop_hopeless()
        if self.is_exhaustive:
            self._branch_and_bound()
        else:
            self._sample()
        bounds = (self.evaluator.lower_bound_s(c) for c in self.open)
        return Outcome(
            best=self.best,
            candidates=len(self.pool),
            evaluated=len(self.seen),
            lower_bound_s=min(bounds, default=0.0),
            misfits=tuple(self.misfits),
            finished=self.finished,
        )

    def _drop_hopeless(self) -> None:
        """What cannot fit in any layout is neither bounded nor evaluated."""
        for candidate in self.pool:
            found = self.evaluator.hopeless(candidate)
            if found is None:
                self.open.append(candidate)
            else:
                self.misfits.append(found)

    def _branch_and_bound(self) -> None:
        for candidate in defaults(self.open):
            if self._is_over():
                return
            self._try(candidate)
        bounds = {c: self.evaluator.lower_bound_s(c) for c in self.open}
        for candidate in sorted(self.open, key=bounds.__getitem__):
            if bounds[candidate] >= self._best_s():
                return
            if candidate not in self.seen:
                if self._is_over():
                    return
                self._try(candidate)

    def _sample(self) -> None:
        assert self.study is not None
        self.study.enqueue(defaults(self.open))
        allowed = set(self.open)
        while not self._is_over():
            candidate = self.study.ask()
            if candidate not in allowed or candidate in self.seen:
                self.study.tell_again(candidate)
                self.trials -= 1  # a repeated question costs no evaluation, and must end too
            elif self.evaluator.lower_bound_s(candidate) >= self._best_s():
                self.seen[candidate] = None
                self.study.tell_slow(candidate, self.evaluator.lower_bound_s(candidate))
            else:
                self._try(candidate)
        self.finished = False

    def _try(self, candidate: Candidate) -> None:
        found = self.evaluator.evaluate(candidate, at_most_s=self._best_s())
        self.seen[candidate] = None
        if isinstance(found, Evaluation):
            if found.prediction.step_time_s < self._best_s():
                self.best = found
        else:
            self.misfits.append(found)
        if self.study is not None:
            self.study.tell(candidate, found)
        if self.progress is not None:
            best = f", best {self.best.prediction.step_time_s:.3g} s" if self.best else ""
            self.progress(f"searching{best}", len(self.seen), len(self.open) if self.is_exhaustive else self.trials)

    def _best_s(self) -> float:
        return self.best.prediction.step_time_s if self.best is not None else math.inf

    def _is_over(self) -> bool:
        late = self.limits.timeout_s is not None and time.monotonic() - self.start >= self.limits.timeout_s
        if late or len(self.seen) >= self.trials:
            self.finished = len(self.seen) >= len(self.open)
            return True
        return False


def defaults(pool: Sequence[Candidate]) -> Iterator[Candidate]:
    """What practice starts from.

    ZeRO-1 with the smallest micro-batch under every tensor and pipeline degree, then ZeRO-3 over everything.
    """
    best: dict[tuple[int, int], Candidate] = {}
    for candidate in pool:
        key = (candidate.mesh.cp * candidate.mesh.tp, candidate.mesh.pp)
        if key not in best or usual(candidate) < usual(best[key]):
            best[key] = candidate
    yield from sorted(best.values(), key=lambda c: (c.mesh.cp * c.mesh.tp * c.mesh.pp, usual(c)))
    whole = [c for c in pool if c.zero_stage == 3 and c.mesh.pp == 1 and c.mesh.dp_replicate == 1]
    yield from sorted(whole, key=usual)[:4]


def usual(candidate: Candidate) -> tuple[int, ...]:
    """Orders candidates by how usual they are; the first of these is what an unpinned choice means in an estimate."""
    mesh = candidate.mesh
    order = {"none": 0, "1F1B": 0, "Interleaved1F1B": 1, "GPipe": 2}
    zero = 0 if candidate.zero_stage == (1 if mesh.data > 1 else 0) else 1 + candidate.zero_stage
    return (
        mesh.cp * mesh.tp * mesh.pp,
        mesh.cp,
        mesh.pp,
        zero,
        min(mesh.dp_replicate, mesh.dp_shard),
        order[candidate.schedule],
        candidate.micro_batch_size,
        candidate.virtual_stages,
        mesh.dp_replicate,
        mesh.ep_data,
        SCHEDULES.index(candidate.schedule),
    )

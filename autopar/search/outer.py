"""The outer search: which candidates are evaluated, in which order, and when it may stop.

A space that is small enough is searched to the end by branch and bound, best first: candidates come in order of their
lower bound (:mod:`autopar.search.bounds`), and the search stops when none is below the best plan found. A larger one
goes to Optuna (TPE, ask and tell), which is seeded with the same defaults; a trial asks for numbers, and the nearest
candidate is what is evaluated. Either way every trial stands in the study, failed ones with their reason, where a
storage is given.
"""

from __future__ import annotations

import heapq
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

MAX_EXPLAINED = 24
"""Candidates of which it is worked out what memory they would need, where no plan fits."""

LEVELS = 2
"""Bounds that a candidate can have after its first one."""

Progress = Callable[[str, int, int], None]
"""``(what, done, total)``; ``total`` 0 while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search stops: after so many trials or seconds; None for no limit.

    ``max_step_time_s``: slower plans do not count, and what cannot be faster by its bound is not looked at.
    """

    trials: int | None = None
    timeout_s: float | None = None
    max_step_time_s: float | None = None


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
        self.bounds: dict[Candidate, float] = {}
        self.finished = True
        self.study = study

    def run(self) -> Outcome:
        """Search until the end or a limit."""
        self.bounds = dict(zip(self.pool, self.evaluator.ideal_bounds_s(self.pool), strict=True))
        if self.is_exhaustive:
            self._branch_and_bound()
        else:
            self._sample()
        if self.best is None and self.finished and self.limits.max_step_time_s is None:
            self._explain_misfits()
        return Outcome(
            best=self.best,
            candidates=len(self.pool),
            evaluated=len(self.seen),
            lower_bound_s=min(self.bounds.values(), default=0.0),
            misfits=tuple(self.misfits),
            finished=self.finished,
        )

    @property
    def open(self) -> list[Candidate]:
        """Candidates that may have a plan."""
        return [c for c in self.pool if math.isfinite(self.bounds[c])]

    def _explain_misfits(self) -> None:
        """What the least of the candidates that cannot fit would need."""
        lost = [c for c in self.pool if c not in self.seen]
        found = [self.evaluator.hopeless(c) for c in lost]
        self.misfits += [misfit for misfit in found if misfit is not None]
        for candidate in [c for c, misfit in zip(lost, found, strict=True) if misfit is None][:MAX_EXPLAINED]:
            self._try(candidate)

    def _branch_and_bound(self) -> None:
        """Best first.

        The first bound of a candidate needs no layout, the second the quickest one of each block, the third those that
        the prices of memory make best: each is asked for only when the one before it is the least of all.
        """
        heap = [(self.bounds[c], 0, i) for i, c in enumerate(self.pool) if math.isfinite(self.bounds[c])]
        heapq.heapify(heap)
        level = {i: 0 for _, _, i in heap}
        alike: dict[tuple[int, ...], list[int]] = {}
        for i in sorted(level):
            alike.setdefault(_split(self.pool[i]), []).append(i)
        for split, own in alike.items():
            if split[2:] == (1, 1):  # nothing to solve: a first plan to be faster than costs little
                self._raise(own, 0, level, heap)
                self._raise(own, 1, level, heap)
                self._dive(own)
        while heap:
            bound, made, i = heapq.heappop(heap)
            if bound >= self._best_s():
                return
            if made < level[i] or self.pool[i] in self.seen:
                continue
            if made < LEVELS:
                mine = alike[_split(self.pool[i])]
                self._raise(mine, made, level, heap)
                if made + 1 == LEVELS:
                    self._dive(mine)
            elif self._is_over():
                return
            else:
                self._try(self.pool[i])

    def _raise(
        self, places: Sequence[int], made: int, level: dict[int, int], heap: list[tuple[float, int, int]]
    ) -> None:
        """The next bound of those of these candidates that have ``made`` and may still be the best."""
        asked = [k for k in places if level[k] == made and self.bounds[self.pool[k]] < self._best_s()]
        some = [self.pool[k] for k in asked]
        found = self.evaluator.least_bounds_s(some) if made == 0 else self.evaluator.bounds_s(some, self._best_s())
        for k, bound in zip(asked, found, strict=True):
            level[k] = made + 1
            self.bounds[self.pool[k]] = max(self.bounds[self.pool[k]], bound)
            if math.isfinite(bound):
                heapq.heappush(heap, (self.bounds[self.pool[k]], made + 1, k))

    def _dive(self, places: Sequence[int]) -> None:
        """Try the one that may be the best of these: the sooner there is a good plan, the fewer bounds are asked for."""
        first = min((self.pool[k] for k in places), key=self.bounds.__getitem__)
        if self.bounds[first] < self._best_s() and first not in self.seen and not self._is_over():
            self._try(first)

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
        """What a plan has to be faster than."""
        if self.best is not None:
            return self.best.prediction.step_time_s
        most = self.limits.max_step_time_s
        return math.inf if most is None else math.nextafter(most, math.inf)

    def _is_over(self) -> bool:
        late = self.limits.timeout_s is not None and time.monotonic() - self.start >= self.limits.timeout_s
        if late or len(self.seen) >= self.trials:
            self.finished = len(self.seen) >= len(self.open)
            return True
        return False


def _split(candidate: Candidate) -> tuple[int, ...]:
    """Equal for candidates that share their layouts."""
    return candidate.micro_batch_size, candidate.mesh.ep_data, candidate.mesh.cp, candidate.mesh.tp


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

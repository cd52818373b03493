"""A pool that is too large to be searched to the end: a part of it is asked for, in rounds of questions.

Most questions of a round are the next candidates in the order of their dual bounds, the others are a sampler's (one of
Optuna's: :mod:`autopar.planner.branch_and_bound.optuna_sampler`). What is asked in a round is a function of what came of the
rounds before and of nothing else: not of what else is known by then, who evaluated it, or in which order. So every process
works out the same rounds, whatever the others have got to, and one that was stopped begins anew and finds what it had in the
ledger. For the same reason a result counts up to the limit of its round alone: whether a slower candidate was evaluated to
its end depends on what was known when it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.frontier import Result
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.search import Evaluation, peak_bytes
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.preferences import seeds
from autopar.planner.space.space import SamplerName

if TYPE_CHECKING:
    from autopar.planner.branch_and_bound.optuna_sampler import Sampler

BY_BOUNDS, BY_SAMPLER = 6, 2
"""Questions of a round: bounds decide on most (``docs/evidence/samplers.md`` says what other shares find)."""

TRIES = 4
"""Candidates that a sampler may name for each of its questions; those that a bound excludes are no question."""

SLACK = 1.25
"""Times the best time up to which those of a sampler are worked out to the end: it learns from differences between slower ones."""

POPULATION = 16
"""Candidates of a generation of NSGA-II."""


class HasBounds(Protocol):
    """What rounds need of an evaluator."""

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """Lower bounds of a level; see :class:`autopar.planner.bounds.cascade.Cascade`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A candidate by its position in the pool; only a time below ``limit_s`` is an answer.

    ``bound_s``: it takes no less, where a bound excludes it, which is then not evaluated.
    """

    index: int
    limit_s: float
    is_sampled: bool
    bound_s: float | None = None

    def is_answered(self, result: Result | None) -> bool:
        """Whether what is known of the candidate says all that is asked."""
        if result is None:
            return False
        return self.bound_s is not None or result.at_least_s is None or result.at_least_s >= self.limit_s

    def answer_s(self, result: Result | None) -> float | None:
        """Its time; None where there is none below the limit."""
        time_s = None if result is None or self.bound_s is not None else result.time_s
        return time_s if time_s is not None and time_s < self.limit_s else None


class Rounds:
    """The questions of one search.

    Args:
        pool: the candidates.
        evaluator: bounds a candidate.
        sampler: over the same pool.
        max_s: slower plans do not count.
        rounding: part of the best time by which a bound is above it where it excludes.
        by_bounds, by_sampler: questions of a round.
    """

    def __init__(
        self,
        pool: Sequence[Candidate],
        evaluator: HasBounds,
        sampler: Sampler,
        *,
        max_s: float,
        rounding: float,
        by_bounds: int,
        by_sampler: int,
    ) -> None:
        self.pool, self.evaluator, self.sampler = pool, evaluator, sampler
        self.by_bounds, self.by_sampler = by_bounds, by_sampler
        self.is_done = False
        """Whether bounds exclude all that was not asked."""
        self._least_s, self._max_s, self._rounding = math.inf, max_s, rounding
        self._in_order: Iterator[int] = iter(())
        self._bounds: NDArray[np.float64] = np.zeros(len(pool))
        self._num_seeds = 0

    def cutoff_s(self) -> float:
        """What a plan has to be faster than, by the rounds before."""
        return min(self._least_s * (1 + self._rounding), self._max_s)

    def begin(self, bounds_s: Mapping[Candidate, float], seeds: Mapping[int, str], in_order: Iterator[int]) -> None:
        """Begin.

        Args:
            bounds_s: first ones.
            seeds: what the sampler asks first, with reasons.
            in_order: positions in the order of their bounds; it asks :meth:`cutoff_s` for what they have to be below.
        """
        self._bounds = np.array([bounds_s[candidate] for candidate in self.pool])
        for index, why in seeds.items():
            self.sampler.enqueue(index, why)
        self._num_seeds = min(len(seeds), self.by_sampler)
        self._in_order = in_order

    def ask(self, most: int) -> list[Question]:
        """The questions of the next round, at most so many that are to be evaluated; none where the search is over.

        The first round has seeds alone, as bounds cost less where there is a time to be below.
        """
        num_seeds, self._num_seeds = self._num_seeds, 0
        found = self._of_sampler(min(num_seeds, most))
        if found or not most:
            return found
        found += self._by_bounds(min(self.by_bounds, most))
        if self.by_bounds and not found:
            self.is_done = True
            return []
        found += self._of_sampler(min(self.by_sampler, most - len(found)))
        self.is_done = not found
        return found

    def _by_bounds(self, count: int) -> list[Question]:
        """The next candidates in the order of their bounds that were not asked."""
        found: list[Question] = []
        while len(found) < count and (index := next(self._in_order, None)) is not None:
            if not self.sampler.asked[index]:
                self.sampler.asked[index] = True
                found.append(Question(index=index, limit_s=self.cutoff_s(), is_sampled=False))
        return found

    def _of_sampler(self, count: int) -> list[Question]:
        """So many questions of the sampler, with what it named before each that a bound excludes."""
        return [question for _ in range(count) for question in self._one_of_sampler()]

    def _one_of_sampler(self) -> list[Question]:
        found: list[Question] = []
        cutoff_s = self.cutoff_s()
        while len(found) < TRIES:
            index = self.sampler.ask(self._bounds, cutoff_s)
            if index is None:
                return found
            bound_s = 0.0
            if math.isfinite(cutoff_s):
                (bound_s,) = self.evaluator.bounds_s(LEVELS - 1, [self.pool[index]], cutoff_s)
            limit_s = min(SLACK * cutoff_s, self._max_s)
            excluded = bound_s if bound_s >= cutoff_s else None
            found.append(Question(index=index, limit_s=limit_s, is_sampled=True, bound_s=excluded))
            if excluded is None:
                return found
        return found

    def tell(self, questions: Sequence[Question], results: Mapping[int, Result]) -> None:
        """What came of a round."""
        for question in questions:
            time_s = question.answer_s(results.get(question.index))
            if question.is_sampled:
                at_least_s = question.limit_s if question.bound_s is None else question.bound_s
                self.sampler.tell(question.index, None if time_s is None else [time_s], at_least_s)
            else:
                self.sampler.learn(question.index, time_s, question.limit_s)
            self._least_s = min(self._least_s, math.inf if time_s is None else time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a pool is sampled that is too large to be searched to the end.

    Attributes:
        kind: of the sampler; ``none``: the pool is searched by bounds alone.
        seed: of the sampler's random numbers.
        devices_per_node: for what experts would try.
        by_bounds, by_sampler: questions of a round.
    """

    kind: SamplerName
    seed: int = 0
    devices_per_node: int = 1
    by_bounds: int = BY_BOUNDS
    by_sampler: int = BY_SAMPLER

    def seeds(self, pool: Sequence[Candidate], may_fit: Callable[[int], bool]) -> dict[int, str]:
        """What experts would try, by position, with reasons."""
        return seeds(pool, self.devices_per_node, may_fit)

    def rounds(self, pool: Sequence[Candidate], evaluator: HasBounds, max_s: float, rounding: float) -> Rounds:
        """The questions of a search; arguments and errors as of :class:`Rounds` and of its sampler."""
        from autopar.planner.branch_and_bound.optuna_sampler import Sampler  # optuna is slow to import

        return Rounds(
            pool, evaluator, Sampler(self.kind, pool, seed=self.seed),
            max_s=max_s, rounding=rounding, by_bounds=self.by_bounds, by_sampler=self.by_sampler,
        )  # fmt: skip


def front(
    evaluator: Evaluator, pool: Sequence[Candidate], first: Mapping[int, str], *, trials: int, seed: int, max_s: float
) -> list[Evaluation]:
    """Plans of which no other one is better in time and memory, of those that NSGA-II asks for; the fastest first.

    A candidate has two values: the time of its fastest plan and the memory that this one takes. No bound excludes a candidate for
    being slow, as it may take less memory; those that fit in no layout are never asked. (Deb et al. 2002 for the method.)

    Args:
        first: what is asked first, by position, with reasons.
        trials: candidates that are evaluated at most.
        seed: of the sampler.
        max_s: slower plans do not count.
    """
    from autopar.planner.branch_and_bound.optuna_sampler import Sampler  # optuna is slow to import

    sampler = Sampler("nsga2", pool, seed=seed, objectives=2)
    for index, why in first.items():
        sampler.enqueue(index, why)
    bounds = np.array(evaluator.bounds_s(0, pool))
    found: dict[int, Evaluation] = {}
    while trials:
        asked: list[int] = []
        while len(asked) < min(POPULATION, trials) and (named := sampler.ask(bounds, max_s)) is not None:
            asked.append(named)
        for index in asked:
            plan, values = evaluator.evaluate(pool[index], at_most_s=max_s), None
            if isinstance(plan, Evaluation) and plan.prediction.step_time_s < max_s:
                found[index] = plan
                values = [plan.prediction.step_time_s, float(peak_bytes(plan.prediction))]
            sampler.tell(index, values, np.inf)
        trials = trials - len(asked) if asked else 0
    order = sorted(found, key=lambda i: (found[i].prediction.step_time_s, peak_bytes(found[i].prediction), i))
    kept: list[Evaluation] = []
    for index in order:  # of equals the first of the pool
        if not kept or peak_bytes(found[index].prediction) < peak_bytes(kept[-1].prediction):
            kept.append(found[index])
    return kept

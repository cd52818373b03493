"""Search of a pool that is too large to be searched to the end: a part of it is evaluated, in rounds of questions.

Most questions of a round are the next candidates in the order of their dual bounds; the others come from one of Optuna's samplers
(:mod:`autopar.planner.branch_and_bound.optuna_sampler`). The questions of a round are a function of the results of the earlier rounds
alone, not of other results, of who evaluated a candidate or of the order. So every process computes the same rounds, and a search that
was stopped starts from the first round and finds its results in the ledger.

For the same reason a result counts only up to the limit of its round: whether a slower candidate was evaluated to its end depends on
which incumbent was known at that moment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
"""The numbers of questions of a round by bounds and by the sampler; ``docs/evidence/samplers.md`` compares other shares."""

TRIES = 4
"""The number of candidates that a sampler may name for each of its questions; those that a bound excludes are not evaluated."""

SLACK = 1.25
"""The ratio to the best time up to which a sampler's candidates are worked out to the end: it learns from differences between slower ones."""

POPULATION = 16
"""The number of candidates of a generation of NSGA-II."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request for the time of one candidate.

    Attributes:
        index: the candidate's position in the pool.
        limit_s: only a time below this, in seconds, counts.
        is_sampled: whether the sampler asked, not the order of bounds.
        bound_s: the bound in seconds that excludes the candidate, which is then not evaluated; None: no bound does.
    """

    index: int
    limit_s: float
    is_sampled: bool
    bound_s: float | None = None

    def is_answered(self, result: Result | None) -> bool:
        """Return whether a result of the candidate answers the question."""
        if result is None:
            return False
        return self.bound_s is not None or result.at_least_s is None or result.at_least_s >= self.limit_s

    def answer_s(self, result: Result | None) -> float | None:
        """Return the candidate's time in seconds; None if it has none below the limit."""
        time_s = None if result is None or self.bound_s is not None else result.time_s
        return time_s if time_s is not None and time_s < self.limit_s else None


class Rounds:
    """The rounds of questions of one search.

    Args:
        pool: the candidates.
        evaluator: bounds candidates.
        sampler: a sampler over the same pool.
        max_s: plans that take this many seconds or more do not count.
        rounding: the part of the best time by which a bound must exceed it to exclude.
        by_bounds, by_sampler: the numbers of questions of a round.
    """

    def __init__(
        self,
        pool: Sequence[Candidate],
        evaluator: Evaluator,
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
        """Whether bounds exclude every candidate that was not asked for."""
        self._least_s, self._max_s, self._rounding = math.inf, max_s, rounding
        self._in_order: Iterator[int] = iter(())
        self._bounds: NDArray[np.float64] = np.zeros(len(pool))
        self._num_seeds = 0

    def cutoff_s(self) -> float:
        """Return the seconds that a plan must be below, by the results of earlier rounds."""
        return min(self._least_s * (1 + self._rounding), self._max_s)

    def begin(self, bounds_s: Mapping[Candidate, float], seeds: Mapping[int, str], in_order: Iterator[int]) -> None:
        """Set the first bounds, the seeds and the order.

        Args:
            bounds_s: the first bound of each candidate in seconds.
            seeds: the candidates that the sampler asks for first, with reasons.
            in_order: positions in the order of their bounds; the iterator calls :meth:`cutoff_s` for the time that they must be below.
        """
        self._bounds = np.array([bounds_s[candidate] for candidate in self.pool])
        for index, why in seeds.items():
            self.sampler.enqueue(index, why)
        self._num_seeds = min(len(seeds), self.by_sampler)
        self._in_order = in_order

    def ask(self, most: int) -> list[Question]:
        """Return the questions of the next round, at most ``most`` of which are to be evaluated; none if the search is over.

        The first round has the seeds alone, if there are any: bounds cost less once there is an incumbent.
        """
        num_seeds, self._num_seeds = self._num_seeds, 0
        questions = self._of_sampler(min(num_seeds, most))
        if questions or not most:
            return questions
        questions += self._by_bounds(min(self.by_bounds, most))
        if self.by_bounds and not questions:
            self.is_done = True
            return []
        questions += self._of_sampler(min(self.by_sampler, most - len(questions)))
        self.is_done = not questions
        return questions

    def _by_bounds(self, count: int) -> list[Question]:
        """Return the next candidates in the order of their bounds that were not asked for."""
        questions: list[Question] = []
        while len(questions) < count and (index := next(self._in_order, None)) is not None:
            if not self.sampler.asked[index]:
                self.sampler.asked[index] = True
                questions.append(Question(index=index, limit_s=self.cutoff_s(), is_sampled=False))
        return questions

    def _of_sampler(self, count: int) -> list[Question]:
        """Return ``count`` questions of the sampler, each after the candidates that it named first and that a bound excludes."""
        return [question for _ in range(count) for question in self._next_of_sampler()]

    def _next_of_sampler(self) -> list[Question]:
        questions: list[Question] = []
        cutoff_s = self.cutoff_s()
        while len(questions) < TRIES:
            index = self.sampler.ask(self._bounds, cutoff_s)
            if index is None:
                return questions
            bound_s = 0.0
            if math.isfinite(cutoff_s):
                (bound_s,) = self.evaluator.bounds_s(LEVELS - 1, [self.pool[index]], cutoff_s)
            limit_s = min(SLACK * cutoff_s, self._max_s)
            excluded = bound_s if bound_s >= cutoff_s else None
            questions.append(Question(index=index, limit_s=limit_s, is_sampled=True, bound_s=excluded))
            if excluded is None:
                return questions
        return questions

    def tell(self, questions: Sequence[Question], results: Mapping[int, Result]) -> None:
        """Tell the sampler the results of a round."""
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
        kind: the sampler; ``none``: the pool is searched by bounds alone.
        seed: the seed of the sampler's random numbers.
        devices_per_node: the size of a node, on which the candidates that experts would try depend.
        by_bounds, by_sampler: the numbers of questions of a round.
    """

    kind: SamplerName
    seed: int = 0
    devices_per_node: int = 1
    by_bounds: int = BY_BOUNDS
    by_sampler: int = BY_SAMPLER

    def seeds(self, pool: Sequence[Candidate], may_fit: Callable[[int], bool]) -> dict[int, str]:
        """Return the positions of the candidates that experts would try, with reasons."""
        return seeds(pool, self.devices_per_node, may_fit)

    def rounds(self, pool: Sequence[Candidate], evaluator: Evaluator, max_s: float, rounding: float) -> Rounds:
        """Return the rounds of a search; for arguments and errors see :class:`Rounds` and its sampler."""
        from autopar.planner.branch_and_bound.optuna_sampler import Sampler  # optuna is slow to import

        return Rounds(
            pool, evaluator, Sampler(self.kind, pool, seed=self.seed),
            max_s=max_s, rounding=rounding, by_bounds=self.by_bounds, by_sampler=self.by_sampler,
        )  # fmt: skip


def front(
    evaluator: Evaluator, pool: Sequence[Candidate], first: Mapping[int, str], *, trials: int, seed: int, max_s: float
) -> list[Evaluation]:
    """Return the Pareto front in time and memory among the candidates that NSGA-II asks for, the fastest plan first.

    A candidate has two objectives: the step time of its fastest plan and the peak memory of that plan. No bound excludes a candidate as slow,
    since it may take less memory; those that fit in no layout are never asked for. The method is that of Deb et al. 2002.

    Args:
        first: positions that are asked for first, with reasons.
        trials: the number of candidates that are evaluated at most.
        seed: the seed of the sampler.
        max_s: plans that take this many seconds or more do not count.
    """
    from autopar.planner.branch_and_bound.optuna_sampler import Sampler  # optuna is slow to import

    sampler = Sampler("nsga2", pool, seed=seed, objectives=2)
    for index, why in first.items():
        sampler.enqueue(index, why)
    bounds = np.array(evaluator.bounds_s(0, pool))
    plans: dict[int, Evaluation] = {}
    while trials:
        generation: list[int] = []
        while len(generation) < min(POPULATION, trials) and (next_index := sampler.ask(bounds, max_s)) is not None:
            generation.append(next_index)
        for index in generation:
            plan, values = evaluator.evaluate(pool[index], at_most_s=max_s), None
            if isinstance(plan, Evaluation) and plan.prediction.step_time_s < max_s:
                plans[index] = plan
                values = [plan.prediction.step_time_s, float(peak_bytes(plan.prediction))]
            sampler.tell(index, values, np.inf)
        trials = trials - len(generation) if generation else 0
    order = sorted(plans, key=lambda i: (plans[i].prediction.step_time_s, peak_bytes(plans[i].prediction), i))
    kept: list[Evaluation] = []
    for index in order:  # among equal plans the first of the pool stays
        if not kept or peak_bytes(plans[index].prediction) < peak_bytes(kept[-1].prediction):
            kept.append(plans[index])
    return kept

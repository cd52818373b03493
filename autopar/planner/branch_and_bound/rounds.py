"""A pool that is too large to be searched to the end: turns in order of bounds and turns of a sampler, in rounds.

What is asked in a round is a function of what came of the rounds before and of nothing else: not of what else is known by then, who
evaluated it, or in which order. So every process works out the same rounds, whatever the others have got to, and one that was
stopped begins anew and finds what it had in the ledger (``docs/adr/0019-samplers.md``). For the same reason an outcome counts up
to the limit of its round alone: whether a slower candidate was evaluated to its end depends on what was known when it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.ledger import Told
from autopar.planner.branch_and_bound.rules_of_thumb import seeds
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.space import Sampling

if TYPE_CHECKING:
    from autopar.planner.branch_and_bound.sampler import Sampler

BY_BOUNDS, BY_SAMPLER = 6, 2
"""Questions of a round: bounds decide on most (docs/search.md says what other shares find)."""

TRIES = 4
"""Candidates that a sampler may name for each of its questions; those that a bound excludes are no question."""

SLACK = 1.25
"""Times the best time up to which those of a sampler are worked out to the end: it learns from differences between slower ones."""


class Bounds(Protocol):
    """What an evaluator has for it."""

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """Lower bounds of a level; see :class:`autopar.planner.bounds.cascade.Cascade`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Questions of a round."""

    by_bounds: int = BY_BOUNDS
    by_sampler: int = BY_SAMPLER


SHARE = Share()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A candidate by its position; only a time below ``limit_s`` is an answer.

    ``bound_s``: it takes no less, where a bound excludes it, which is then not evaluated.
    """

    index: int
    limit_s: float
    is_sampled: bool
    bound_s: float | None = None

    def is_answered(self, told: Told | None) -> bool:
        """Whether what is known of the candidate says all that is asked."""
        if told is not None and self.bound_s is not None:
            return True
        return told is not None and (told.at_least_s is None or told.at_least_s >= self.limit_s)

    def answer_s(self, told: Told | None) -> float | None:
        """Its time; None where there is none below the limit."""
        time_s = None if told is None or self.bound_s is not None else told.time_s
        return time_s if time_s is not None and time_s < self.limit_s else None


class Rounds:
    """What one search asks.

    Args:
        pool: the candidates.
        evaluator: bounds one.
        sampler: over the same pool, with what it is to ask first.
        most_s: slower plans do not count.
        rounding: part of the best time by which a bound is above it where it excludes.
    """

    def __init__(
        self,
        pool: Sequence[Candidate],
        evaluator: Bounds,
        sampler: Sampler,
        *,
        most_s: float,
        rounding: float,
        share: Share,
    ) -> None:
        self.pool, self.evaluator, self.sampler, self.share = pool, evaluator, sampler, share
        self.is_done = False
        """Whether bounds exclude all that was not asked."""
        self._least_s, self._most_s, self._rounding = math.inf, most_s, rounding
        self._turns: Iterator[int] = iter(())
        self._bounds: NDArray[np.float64] = np.zeros(len(pool))
        self._seeds = 0

    def below_s(self) -> float:
        """What a plan has to be faster than, by the rounds before."""
        return min(self._least_s * (1 + self._rounding), self._most_s)

    def begin(self, bounds_s: Mapping[Candidate, float], first: Mapping[int, str], turns: Iterator[int]) -> None:
        """Begin.

        Args:
            bounds_s: first ones.
            first: what the sampler asks first, with reasons.
            turns: positions in order of their bounds; it asks :meth:`below_s` for what they have to be below.
        """
        self._bounds = np.array([bounds_s[candidate] for candidate in self.pool])
        for index, why in first.items():
            self.sampler.enqueue(index, why)
        self._seeds = min(len(first), self.share.by_sampler)
        self._turns = turns

    def ask(self, most: int) -> list[Question]:
        """The questions of the next round, at most so many that are to be evaluated; none where the search is over.

        Of the first round seeds alone, as bounds cost less where there is a time to be below.
        """
        first, self._seeds = self._seeds, 0
        found = self._named(min(first, most))
        if found or not most:
            return found
        found += self._walked(min(self.share.by_bounds, most))
        if self.share.by_bounds and not found:
            self.is_done = True
            return []
        found += self._named(min(self.share.by_sampler, most - len(found)))
        self.is_done = not found
        return found

    def _walked(self, count: int) -> list[Question]:
        """The next ones in order of their bounds that were not asked."""
        found: list[Question] = []
        while len(found) < count and (index := next(self._turns, None)) is not None:
            if not self.sampler.asked[index]:
                self.sampler.asked[index] = True
                found.append(Question(index=index, limit_s=self.below_s(), is_sampled=False))
        return found

    def _named(self, count: int) -> list[Question]:
        """So many questions of the sampler, with what it named before each that a bound excludes."""
        return [question for _ in range(count) for question in self._sampled()]

    def _sampled(self) -> list[Question]:
        found: list[Question] = []
        below_s = self.below_s()
        while len(found) < TRIES:
            index = self.sampler.ask(self._bounds, below_s)
            if index is None:
                return found
            bound_s = (
                self.evaluator.bounds_s(LEVELS - 1, [self.pool[index]], below_s)[0] if math.isfinite(below_s) else 0.0
            )
            limit_s = min(SLACK * below_s, self._most_s)
            excluded = bound_s if bound_s >= below_s else None
            found.append(Question(index=index, limit_s=limit_s, is_sampled=True, bound_s=excluded))
            if excluded is None:
                return found
        return found

    def tell(self, questions: Sequence[Question], found: Mapping[int, Told]) -> None:
        """What came of a round."""
        for question in questions:
            time_s = question.answer_s(found.get(question.index))
            if question.is_sampled:
                at_least_s = question.limit_s if question.bound_s is None else question.bound_s
                self.sampler.tell(question.index, None if time_s is None else [time_s], at_least_s)
            else:
                self.sampler.learn(question.index, time_s, question.limit_s)
            self._least_s = min(self._least_s, math.inf if time_s is None else time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """How a pool is sampled that is too large to be searched to the end.

    Attributes:
        seed: of the sampler.
        node: devices of one, for what experts would try.
        share: questions of a round.
    """

    kind: Sampling
    seed: int = 0
    node: int = 1
    share: Share = SHARE

    def seeds(self, pool: Sequence[Candidate], may_fit: Callable[[int], bool]) -> dict[int, str]:
        """What is asked first, with reasons."""
        return seeds(pool, self.node, may_fit)

    def rounds(self, pool: Sequence[Candidate], evaluator: Bounds, most_s: float, rounding: float) -> Rounds:
        """What a search asks; see there for errors."""
        from autopar.planner.branch_and_bound.sampler import Sampler  # optuna is slow to import

        sampler = Sampler(self.kind, pool, seed=self.seed)
        return Rounds(pool, evaluator, sampler, most_s=most_s, rounding=rounding, share=self.share)

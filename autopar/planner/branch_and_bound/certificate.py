"""Bounds that are worked out for one candidate at a time, beside those that decide the order of a search.

They say of a candidate whose turn it is whether it has to be evaluated at all, and in the end how much faster than the best
plan another may be. The first is asked only where devices differ, and depends on what was looked at before, so that it
decides on no order and is no part of what is stated in the end.

The second, the certificate, is the same for any number of processes and any timing. A candidate's bound is raised step by
step, and what each step gives is a function of the candidate and the best time alone: it is worked out for that candidate
by itself, from nothing that the search has learned on its way. The candidate of the least bound is always the next one. Where
two searches begin with other bounds, as those that are found in bulk differ within their precision, all that may be the least
are settled before any of them is raised.

Where devices differ many candidates are raised at once, those of one schedule together (:mod:`autopar.planner.branch_and_bound.mixed_closing`): first
up to a time that is close enough to the best one, then, if that took no whole blocks, up to the best one itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Hashable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Protocol

from autopar.planner.branch_and_bound.ledger import Result
from autopar.planner.branch_and_bound.mixed_closing import Closing, Opened, grouped
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.space.candidates import Candidate

SETTLED, SHARPEST = 1, 2
"""How far a candidate's bound has been raised."""

MOST = 32
"""Candidates of which the sharpest bounds are worked out in the end: the last ones cost as much as the search itself."""

CLOSE = 0.05
"""Of a bound, up to which the best time above it is close enough to ask for no sharpest one."""

NEAR = 1 + 1e-3
"""Times the least bound of all, within which what decides is which bounds were asked for together: these are settled."""


class HasCloser(Protocol):
    """What :class:`autopar.planner.bounds.closer.Closer` has for it."""

    @property
    def differs(self) -> bool: ...

    def settled_s(self, candidate: Candidate, best_s: float) -> float: ...

    def closest_s(self, candidate: Candidate, at_most_s: float) -> float: ...

    def sharper_bound_s(self, candidate: Candidate, goal_s: float) -> float: ...

    def opened(self, candidates: Sequence[Candidate], goal_s: float) -> list[Opened]: ...


class Closest:
    """Closer bounds of the candidates of a search, by position."""

    def __init__(self, evaluator: HasCloser, pool: Sequence[Candidate]) -> None:
        self.evaluator, self.pool = evaluator, pool
        self._slow: dict[int, float] = {}
        """Those found on the way."""
        self._raised: dict[int, float] = {}
        """Those of the certificate."""
        self._certified_s = math.inf
        """Where devices differ, what the certificate was worked out up to."""

    def is_slow(self, index: int, best_s: float) -> bool:
        """Whether a candidate takes no less than ``best_s``."""
        if self.evaluator.differs and math.isfinite(best_s) and self._slow.get(index, 0.0) < best_s:
            self._slow[index] = self.evaluator.closest_s(self.pool[index], best_s)
        return self._slow.get(index, 0.0) >= best_s

    def least_s(self, bounds: Mapping[Candidate, float], found: Mapping[int, Result]) -> float:
        """What no candidate goes below that may fit.

        Args:
            bounds: those that decided the order.
            found: what came of those that were evaluated.
        """
        every = (self._lower_s(i, bounds, found) for i in range(len(self.pool)))
        return min(self._certified_s, min(every, default=0.0))

    def raise_least(
        self,
        bounds: MutableMapping[Candidate, float],
        found: Mapping[int, Result],
        best_s: float,
        asked: Container[Candidate],
        of_owner: Callable[[int, Callable[[], float]], float],
    ) -> None:
        """Where devices are alike closer bounds for the candidates of the least ones, until these are close to ``best_s``.

        Args:
            bounds, found: as for :meth:`least_s`.
            best_s: of the best plan.
            asked: those that the search came to; of others nothing is known to be close to.
            of_owner: has the bound of a position worked out where its layouts are known.
        """
        goal_s, level, made = best_s / (1 + CLOSE), dict[int, int](), 0
        lower = [self._lower_s(i, bounds, found) for i in range(len(self.pool))]
        while math.isfinite(best_s):
            before_s = min(lower)
            least = lower.index(before_s)
            if before_s >= best_s or self.pool[least] not in asked:
                return
            if least not in level:
                near = [i for i, bound_s in enumerate(lower) if bound_s < before_s * NEAR and self.pool[i] in asked]
                for i in [i for i in near if i not in level]:
                    bounds[self.pool[i]] = of_owner(i, partial(self.evaluator.settled_s, self.pool[i], best_s))
                    level[i] = SETTLED
                    lower[i] = self._lower_s(i, bounds, found)
                continue
            if level[least] == SHARPEST or before_s >= goal_s or made == MOST:
                return
            level[least] = SHARPEST
            made += 1
            ask = partial(self.evaluator.sharper_bound_s, self.pool[least], goal_s)
            self._raised[least] = max(self._raised.get(least, 0.0), of_owner(least, ask))
            lower[least] = self._lower_s(least, bounds, found)

    def raise_together(
        self,
        bounds: Mapping[Candidate, float],
        found: Mapping[int, Result],
        best_s: float,
        asked: Collection[int],
        group: ProcessGroup,
        part_of: Callable[[int], Hashable],
    ) -> None:
        """Where devices differ a bound of all candidates, up to ``best_s``.

        Args:
            bounds, found, best_s: as for :meth:`raise_least`.
            asked: positions of those that the search came to.
            group: the processes of the search.
            part_of: which part of the work a candidate is.
        """
        closing = Closing()
        for goal_s, whole_s in ((best_s / (1 + CLOSE), best_s / (1 + CLOSE)), (best_s, 0.0)):
            below = [i for i in asked if self._lower_s(i, bounds, found) < goal_s * NEAR]
            mine = [i for i in below if group.owner(part_of(i)) == group.rank]
            made = self.evaluator.opened([self.pool[i] for i in mine], goal_s)
            opened: dict[int, Opened] = {}
            for some in group.allgather(dict(zip(mine, made, strict=True))):
                opened |= some
            least_s, is_whole = min((own.bound_s for own in opened.values()), default=goal_s), False
            told = [
                closing.least_s(key, [opened[i] for i in alike], goal_s, whole_s=whole_s)
                for key, alike in grouped(opened).items()
                if group.claim(key)
            ]
            for bound_s, is_raised in (own for some in group.allgather(told) for own in some):
                least_s, is_whole = min(least_s, bound_s), is_whole or is_raised
            self._certified_s = least_s
            self._raised |= dict.fromkeys(below, least_s)
            if is_whole or least_s < goal_s:
                return

    def _lower_s(self, index: int, bounds: Mapping[Candidate, float], found: Mapping[int, Result]) -> float:
        candidate, told = self.pool[index], found.get(index)
        if self.evaluator.differs and told is not None and told.needs_bytes and candidate.mesh.pp == 1:
            return math.inf  # without stages there is nothing to cut: it was found that nothing fits
        return max(bounds.get(candidate, 0.0), self._raised.get(index, 0.0))

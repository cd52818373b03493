"""Bounds that are worked out for one candidate at a time, beside those that decide the order of a search.

They say of a candidate whose turn it is whether it has to be evaluated at all, and in the end how much faster than the best
plan another may be. What they are depends on what was looked at before, so that they decide on no order. The first is asked
only where devices differ: elsewhere searches that share their results state the same gap to the last digit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Protocol

from autopar.search.candidates import Candidate
from autopar.search.ledger import Told

MOST = 32
"""Candidates of which closer bounds are worked out in the end."""

CLOSE = 0.05
"""Of a bound, up to which the best time above it is close enough: more costs as much as the search itself."""

NEAR = 1 + 1e-3
"""Times the least bound of all, within which what decides is which bounds were asked for together: these are settled."""

PRECISION = 0.02
"""Of these bounds."""


class HasCloser(Protocol):
    """What :class:`autopar.search.closer.Closer` has for it."""

    @property
    def differs(self) -> bool: ...

    def settled_s(self, candidate: Candidate, best_s: float) -> float: ...

    def closest_s(self, candidate: Candidate, at_most_s: float, *, precision: float | None = None) -> float: ...


class Closest:
    """Closer bounds of the candidates of a search, by position."""

    def __init__(self, evaluator: HasCloser, pool: Sequence[Candidate]) -> None:
        self.evaluator, self.pool = evaluator, pool
        self.known: dict[int, float] = {}
        """Those found, by position."""

    def is_slow(self, index: int, best_s: float) -> bool:
        """Whether a candidate takes no less than ``best_s``."""
        if self.evaluator.differs and math.isfinite(best_s) and self.known.get(index, 0.0) < best_s:
            self._raise(index, self.evaluator.closest_s(self.pool[index], best_s))
        return self.known.get(index, 0.0) >= best_s

    def least_s(self, bounds: Mapping[Candidate, float], found: Mapping[int, Told]) -> float:
        """What no candidate goes below that may fit.

        Args:
            bounds: those that decided the order.
            found: what came of those that were evaluated.
        """
        return min((self._lower_s(i, bounds, found) for i in range(len(self.pool))), default=0.0)

    def raise_least(
        self,
        bounds: MutableMapping[Candidate, float],
        found: Mapping[int, Told],
        best_s: float,
        asked: Container[Candidate],
        of_owner: Callable[[int, Callable[[], float]], float],
    ) -> None:
        """Closer bounds for the candidates of the least ones, until these are close to ``best_s``.

        Bounds that were found together depend within their precision on which ones were: the least are first settled
        alone, so that searches by any number of processes state the same.

        Args:
            bounds, found: as for :meth:`least_s`.
            best_s: of the best plan.
            asked: those that the search came to; of others nothing is known to be close to.
            of_owner: has the bound of a position worked out where its layouts are known.
        """
        goal_s, raised, settled = best_s / (1 + CLOSE), set[int](), set[int]()
        lower = [self._lower_s(i, bounds, found) for i in range(len(self.pool))]
        while math.isfinite(best_s):
            before_s = min(lower)
            least = lower.index(before_s)
            if before_s >= best_s or self.pool[least] not in asked:
                return
            if least not in settled:
                near = [i for i, bound_s in enumerate(lower) if bound_s < before_s * NEAR and self.pool[i] in asked]
                for i in [i for i in near if i not in settled]:
                    bounds[self.pool[i]] = of_owner(i, partial(self.evaluator.settled_s, self.pool[i], best_s))
                    settled.add(i)
                    lower[i] = self._lower_s(i, bounds, found)
                continue
            if before_s >= goal_s or least in raised or len(raised) == MOST:
                return
            raised.add(least)
            closer = partial(self.evaluator.closest_s, self.pool[least], goal_s, precision=PRECISION)
            self._raise(least, of_owner(least, closer))
            lower[least] = self._lower_s(least, bounds, found)

    def _raise(self, index: int, bound_s: float) -> None:
        self.known[index] = max(self.known.get(index, 0.0), bound_s)

    def _lower_s(self, index: int, bounds: Mapping[Candidate, float], found: Mapping[int, Told]) -> float:
        candidate, told = self.pool[index], found.get(index)
        if self.evaluator.differs and told is not None and told.needs_bytes and candidate.mesh.pp == 1:
            return math.inf  # without stages there is nothing to cut: it was found that nothing fits
        return max(bounds.get(candidate, 0.0), self.known.get(index, 0.0))

"""The candidates that are open, best first: each with a dual bound, and how tight that bound is.

The candidate of least bound is taken. If a tighter bound is left, it is worked out, in bulk for all open candidates that share its
layouts and are as far; else the candidate is given, to be evaluated. It ends where the least bound is not below the best plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.layout import LayoutKey, layout_key_of
from autopar.planner.space.candidates import Candidate

LAST = LEVELS - 1

SCOUTS = 8
"""Candidates of which the best by the last bound gives an early incumbent: bounds cost many times less where there is a time to
be below."""


class Frontier:
    """The open candidates of one search.

    Args:
        evaluator: gives the bounds.
        pool: the candidates.
        group: the processes of the search.
        best_s: what a plan has to be faster than.
        scouts: whether early incumbents are sought; not where searches share their order, which would then depend on timing.

    Attributes:
        bounds: so far.
        given: positions of those that have come to their turn.
        parts: positions of candidates that share their layouts and may have a plan; none before :meth:`begin`.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        pool: Sequence[Candidate],
        group: ProcessGroup,
        best_s: Callable[[], float],
        *,
        scouts: bool,
    ) -> None:
        self.evaluator, self.pool, self.group, self.best_s, self.scouts = evaluator, pool, group, best_s, scouts
        self.keys = [layout_key_of(candidate) for candidate in pool]
        self.bounds: dict[Candidate, float] = {}
        self.parts: dict[LayoutKey, list[int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._level: dict[int, int] = {}
        self.given: set[int] = set()

    def begin(self) -> None:
        """First bounds of all."""
        alike: dict[LayoutKey, list[int]] = {}
        for i, key in enumerate(self.keys):
            alike.setdefault(key.unsplit, []).append(i)
        largest_first = sorted(alike.values(), key=len, reverse=True)
        mine = sorted(i for own in largest_first[self.group.rank :: self.group.size] for i in own)
        found = dict(zip(mine, self.evaluator.bounds_s(0, [self.pool[i] for i in mine]), strict=True))
        first: dict[int, float] = {}
        for own, unsplit in self.group.allgather((found, self.evaluator.layouts.memos())):
            first |= own
            self.evaluator.layouts.learn(unsplit)
        self.bounds |= {candidate: first[i] for i, candidate in enumerate(self.pool)}
        for i, candidate in enumerate(self.pool):
            if math.isfinite(self.bounds[candidate]):
                self.parts.setdefault(self.keys[i], []).append(i)

    def walk(self) -> Iterator[int]:
        """Positions of candidates that may be faster than the best plan, in order of their bounds and then of the pool."""
        self._level |= {i: 0 for own in self.parts.values() for i in own}
        self._heap += [(self.bounds[self.pool[i]], 0, i) for i in self._level]
        heapq.heapify(self._heap)
        if self.scouts:
            yield from self._scout()
        while self._heap:
            bound_s, level, i = heapq.heappop(self._heap)
            if bound_s >= self.best_s():
                return
            if level < self._level[i] or i in self.given or not self.group.claim(self.keys[i]):
                continue
            if level == LAST:
                self.given.add(i)
                if self.evaluator.chained_s(self.pool[i], self.best_s()) < self.best_s():
                    yield i
            elif level == 0 and not self.group.is_forked:  # no layout is asked for: all at once
                self._raise([k for own in self.parts.values() for k in own], level)
            else:
                self._raise(self.parts[self.keys[i]], level)

    def _scout(self) -> Iterator[int]:
        """A primal heuristic for an early incumbent: of the smallest micro-batches, whose bounds are nearest to their plans.

        Of the few of least bound the best one by the last bound is evaluated; where none of them fits, ever more are looked at, and
        then larger micro-batches.
        """
        for size in sorted({key.micro_batch_size for key in self.parts}):
            own = [k for key, part in self.parts.items() if key.micro_batch_size == size for k in part]
            rest, count = (k for k in sorted(own, key=self._place) if self.group.claim(self.keys[k])), SCOUTS
            while some := [*islice(rest, count)]:
                self._raise(some, 0)
                few = sorted(some, key=self._place)[:SCOUTS]
                for made in range(1, LAST):
                    self._raise([k for k in few if math.isfinite(self.bounds[self.pool[k]])], made)
                first = min(few, key=self._place)
                if self._level[first] == LAST and math.isfinite(self.bounds[self.pool[first]]):
                    self.given.add(first)
                    yield first
                if math.isfinite(self.best_s()):
                    yield from self._quickest_by_chains(self.parts[self.keys[first]])
                    return
                count *= 2

    def _quickest_by_chains(self, places: Sequence[int]) -> Iterator[int]:
        """Where ranks differ plans are far above their last bounds: of those that share a first plan's layouts the quickest by chains."""
        if not self.evaluator.model.is_mixed:
            return
        for made in range(LAST):
            self._raise(places, made)
        least_s, first = self.best_s(), -1
        for k in sorted(places, key=self._place):
            if k not in self.given and self.bounds[self.pool[k]] < least_s:
                bound_s = self.evaluator.chained_s(self.pool[k], least_s, whole_s=0.0)
                least_s, first = (bound_s, k) if 0 < bound_s < least_s else (least_s, first)
        if first >= 0:
            self.given.add(first)
            yield first

    def _place(self, index: int) -> tuple[float, int]:
        return self.bounds[self.pool[index]], index

    def _raise(self, places: Sequence[int], level: int) -> None:
        """The next bound of those of these candidates that have that of ``level`` and may still be the best."""
        best_s = self.best_s()
        asked = [k for k in places if self._level[k] == level and self.bounds[self.pool[k]] < best_s]
        found = self.evaluator.bounds_s(level + 1, [self.pool[k] for k in asked], best_s)
        for k, bound_s in zip(asked, found, strict=True):
            self._level[k] = level + 1
            self.bounds[self.pool[k]] = max(self.bounds[self.pool[k]], bound_s)
            if math.isfinite(bound_s):
                heapq.heappush(self._heap, (self.bounds[self.pool[k]], level + 1, k))

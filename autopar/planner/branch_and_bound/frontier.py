"""The candidates that are open, best first: each with a dual bound, and how tight that bound is.

The candidate of least bound is taken. If a tighter bound is left, it is worked out, in bulk for all open candidates that share its
layouts and are as far; else the candidate is given, to be evaluated. It ends where the least bound is not below the best plan.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.layouts.types import LayoutKey, layout_key_of
from autopar.planner.space.candidates import Candidate

LAST = LEVELS - 1

SCOUTS = 8
"""Candidates of which the best by the last bound gives an early incumbent where ranks have different devices: bounds there cost
many times less where there is a time to be below."""


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
        self._given: set[int] = set()

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
        if self.scouts and self.evaluator.model.is_mixed:
            yield from self._scout()
        while self._heap:
            bound_s, level, i = heapq.heappop(self._heap)
            if bound_s >= self.best_s():
                return
            if level < self._level[i] or i in self._given or not self.group.claim(self.keys[i]):
                continue
            if level == LAST:
                self._given.add(i)
                yield i
            else:
                self._raise(self.parts[self.keys[i]], level)

    def _scout(self) -> Iterator[int]:
        """A primal heuristic: of the smallest micro-batches, whose pipelines fill best, the candidate of the least bound."""
        few = min((key.micro_batch_size for key in self.parts), default=0)
        for key, own in self.parts.items():
            if key.micro_batch_size == few and self.group.claim(key):
                self._raise(own, 0)
                some = heapq.nsmallest(SCOUTS, own, key=self._place)
                self._raise(some, 1)
                first = min(some, key=self._place)
                if self.bounds[self.pool[first]] < self.best_s():
                    self._given.add(first)
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

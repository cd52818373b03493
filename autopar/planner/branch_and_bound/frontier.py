"""The order in which candidates have their turn: that of their bounds, each of which is worked out when it decides.

The first bound of a candidate needs no layout, the second the quickest one of each block, the third those that the prices
of memory make best.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence

from autopar.planner.branch_and_bound.process_group import Crew
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.types import LayoutKey, layout_key_of
from autopar.planner.space.candidates import Candidate

LEVELS = 2
"""Bounds that a candidate can have after its first one."""

FAR = 3.0
"""Times the least bound of all from which on layouts that need no solving are not looked at first."""

EARLY = 3
"""Candidates that are tried by their second bounds while there is no plan: third bounds are found sooner with a time to be below."""

SCOUTS = 8
"""Candidates by whose best one there is a first plan before the bounds of those of the same layouts are worked out, where
pipeline ranks differ: bounds cost many times less where there is a time to be below."""

FEW_SAMPLES = 2
"""Of a micro-batch, up to which all layouts are looked at first where pipeline ranks differ."""


class BestFirst:
    """The turns of one search.

    Args:
        evaluator: gives the bounds.
        pool: the candidates.
        crew: the processes of the search.
        best_s: what a plan has to be faster than.
        dives: whether the best of those that share their layouts is tried as soon as it has its last bound; not where searches
            share their order, which would then depend on timing.

    Attributes:
        bounds: so far.
        parts: positions of candidates that share their layouts and may have a plan; none before :meth:`begin`.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        pool: Sequence[Candidate],
        crew: Crew,
        best_s: Callable[[], float],
        *,
        dives: bool,
    ) -> None:
        self.evaluator, self.pool, self.crew, self.best_s, self.dives = evaluator, pool, crew, best_s, dives
        self.bounds: dict[Candidate, float] = {}
        self.parts: dict[LayoutKey, list[int]] = {}
        self._splits: dict[int, LayoutKey] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._level: dict[int, int] = {}
        self._given: set[int] = set()

    def split(self, index: int) -> LayoutKey:
        """Equal for candidates that share their layouts."""
        if index not in self._splits:
            self._splits[index] = layout_key_of(self.pool[index].micro_batch_size, self.pool[index].mesh)
        return self._splits[index]

    def begin(self) -> None:
        """First bounds of all."""
        whole: dict[tuple[int, int], list[int]] = {}
        for i, candidate in enumerate(self.pool):
            whole.setdefault((candidate.micro_batch_size, candidate.mesh.ep_data), []).append(i)
        mine = sorted(i for own in self.crew.share(list(whole.values()), len) for i in own)
        found = dict(zip(mine, self.evaluator.ideal_bounds_s([self.pool[i] for i in mine]), strict=True))
        first: dict[int, float] = {}
        for own, options in self.crew.gather((found, self.evaluator.layouts.wholes)):
            first |= own
            self.evaluator.layouts.know(options)
        self.bounds |= {candidate: first[i] for i, candidate in enumerate(self.pool)}
        self.evaluator.know_ideal_bounds({self.pool[i]: first[i] for i in first})
        alike: dict[LayoutKey, list[int]] = {}
        for i, candidate in enumerate(self.pool):
            if math.isfinite(self.bounds[candidate]):
                alike.setdefault(self.split(i), []).append(i)
        least_s = {split: min(self.bounds[self.pool[k]] for k in own) for split, own in alike.items()}
        tells = not self.evaluator.differs  # first bounds, of what is quick
        order = sorted(alike, key=lambda split: (not split.cp == split.tp == 1, tells * least_s[split]))
        self.parts |= {split: alike[split] for split in order}

    def walk(self) -> Iterator[int]:
        """Candidates that may be faster than the best plan, in order of their bounds and then of the pool.

        A bound is asked for only when the one before it is the least of all. A search that is alone also tries the best of
        those that share their layouts as soon as it has their last bounds: the sooner there is a good plan, the fewer bounds
        are asked for. What is chosen in the end is the same.
        """
        first = [(self.bounds[c], i) for i, c in enumerate(self.pool) if math.isfinite(self.bounds[c])]
        self._level |= {i: 0 for _, i in first}
        self._heap += [(bound, self._level[i], i) for bound, i in first]
        heapq.heapify(self._heap)
        yield from self._first(FAR * min((bound for bound, _ in first), default=0.0))
        tried = 0
        while self._heap:
            bound, made, i = heapq.heappop(self._heap)
            if bound >= self.best_s():
                return
            if made < self._level[i] or i in self._given or not self.crew.takes(self.split(i)):
                continue
            if made == LEVELS:
                self._given.add(i)
                yield i
                continue
            mine = self.parts[self.split(i)]
            self._raise(mine, made)
            early = self._level[i] == 1 and math.isinf(self.best_s()) and tried < EARLY
            tried += early
            if early or self._level[i] == LEVELS:
                yield from self._dive(mine)

    def _first(self, far_s: float) -> Iterator[int]:
        """Those with nothing to solve: a first plan to be faster than costs little.

        Where ranks differ, first bounds tell too little, and the pipelines with the most micro-batches give a good one.
        """
        for split, own in self.parts.items():
            near = split.cp == split.tp == 1 and min(self.bounds[self.pool[k]] for k in own) < far_s
            first = near or (split.micro_batch_size <= FEW_SAMPLES and self.evaluator.differs)
            if first and self.crew.takes(split):
                if math.isinf(self.best_s()):
                    yield from self._scout(own) if self.evaluator.differs else self._unstaged(own)
                self._raise_least(own)
                yield from self._dive(own)
                if self.evaluator.differs:
                    # the next one is often its twin, with the node groups in another order
                    yield from self._dive([k for k in own if k not in self._given])
                if near and math.isfinite(self.best_s()):  # the next one costs little too, and is often faster
                    left = [k for k in own if k not in self._given]
                    self._raise_least(left)
                    yield from self._dive(left)
        if not self.evaluator.differs:
            yield from self._fewest()

    def _fewest(self) -> Iterator[int]:
        """Of splits of the model with the fewest samples, whose pipelines have the most micro-batches, the one of the least second bound.

        First bounds of these are the closest to their plans, and those of many samples, which memory rules out, the farthest.
        """
        few = min((split.micro_batch_size for split in self.parts), default=0)
        mine: list[list[int]] = []
        for split, own in self.parts.items():
            may = min(self.bounds[self.pool[k]] for k in own) < self.best_s()
            if may and split.micro_batch_size == few and split.cp * split.tp > 1 and self.crew.takes(split):
                self._raise(own, 0)
                mine.append(own)
        if mine:
            least = min(mine, key=lambda own: min(map(self._place, own)))
            self._raise(least, 1)
            yield from self._dive(least)

    def _unstaged(self, places: Sequence[int]) -> Iterator[int]:
        """A first plan of those without a pipeline, which take the least to evaluate, by their first bounds."""
        yield from self._dive([k for k in places if self.pool[k].mesh.pp == 1])

    def _scout(self, places: Sequence[int]) -> Iterator[int]:
        """A first plan of those of the least second bounds."""
        self._raise(places, 0)
        few = heapq.nsmallest(SCOUTS, places, key=self._place)
        self._raise(few, 1)
        yield from self._dive(few)

    def _raise_least(self, places: Sequence[int]) -> None:
        """Last bounds of these."""
        for made in range(LEVELS):
            self._raise(places, made)

    def _place(self, index: int) -> tuple[float, int]:
        return self.bounds[self.pool[index]], index

    def _raise(self, places: Sequence[int], made: int) -> None:
        """The next bound of those of these candidates that have ``made`` and may still be the best."""
        best_s = self.best_s()
        asked = [k for k in places if self._level[k] == made and self.bounds[self.pool[k]] < best_s]
        if not asked:
            return
        some = [self.pool[k] for k in asked]
        if made == 0:
            found, after = self.evaluator.least_bounds_s(some, best_s), 1
        else:
            found, after = self.evaluator.bounds_s(some, best_s), LEVELS
        for k, bound in zip(asked, found, strict=True):
            self._level[k] = after
            self.bounds[self.pool[k]] = max(self.bounds[self.pool[k]], bound)
            if math.isfinite(bound):
                heapq.heappush(self._heap, (self.bounds[self.pool[k]], after, k))

    def _dive(self, places: Sequence[int]) -> Iterator[int]:
        """The one that may be the best of these."""
        first = min(places, key=self._place, default=-1)
        if first < 0:
            return
        if self.dives and first not in self._given and self.bounds[self.pool[first]] < self.best_s():
            self._given.add(first)
            yield first

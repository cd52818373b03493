"""What is known of the candidates of one search: what came of some, which are open with what dual bounds, and the certificate.

The processes of one search keep this to themselves (:class:`LocalLedger`); searches that share a storage see each other's
(:mod:`autopar.planner.studies.study`).

The candidate of least bound is taken. If a tighter bound is left, it is worked out, in bulk for all open candidates that share its layouts
and are as far; else the candidate is given, to be evaluated. It ends where the least bound is not below the best plan.

The certificate: how much faster than the best plan another plan may be. The least dual bound of all candidates says it. It is raised where
that costs little: the candidate of the least bound gets the tightest relaxation that there is, until the least bound is that of the best
plan, or cannot be raised. What each step gives is a function of the candidate, the goal and the proofs before it alone, so that the
certificate is the same for any number of processes and any timing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.bounds.chain_program import KEPT
from autopar.planner.bounds.chain_proof import ChainProof, Key, key_of
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.layout import LayoutKey, layout_key_of
from autopar.planner.space.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one candidate: a time, or that it takes no less than one that was known, or why it has no plan.

    Attributes:
        time_s: of the step of its best plan.
        at_least_s: it was left unfinished because it takes no less.
        reason: why it has no plan.
        needs_bytes: of the leanest plan that was tried, 0 where not known.
        peak_memory_bytes: of its best plan; for people.
    """

    time_s: float | None = None
    at_least_s: float | None = None
    reason: str = ""
    needs_bytes: int = 0
    peak_memory_bytes: int = 0

    def settles(self, best_s: float) -> bool:
        """Whether nothing more has to be known of the candidate to say if it takes less than ``best_s``."""
        return self.at_least_s is None or self.at_least_s > best_s


class Ledger(Protocol):
    """Results and claims of candidates, by their position in the pool."""

    is_shared: bool
    """Whether other searches write into it."""

    @property
    def results(self) -> Mapping[int, Result]:
        """What came of the candidates that were evaluated."""

    @property
    def incumbent_s(self) -> float:
        """The least time found so far; infinite before there is one."""

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Say which candidates experts would try, with reasons; for people."""

    def read(self) -> None:
        """Take in what others have written."""

    def is_claimed(self, index: int) -> bool:
        """Whether another search evaluates a candidate and has not recorded a result: it may be dead."""

    def claim(self, index: int, bound_s: float) -> None:
        """Say that this search evaluates a candidate, or takes it over from another; ``bound_s``: its dual bound."""

    def release(self, index: int) -> None:
        """Give a claim back without a result."""

    def record(self, index: int, result: Result) -> None:
        """Say what came of a candidate that this search has claimed."""

    def finish(self, excluded_s: Callable[[int], float | None]) -> None:
        """Leave nothing open that is decided.

        Args:
            excluded_s: what a candidate takes at least where it need not be evaluated any more; None where it may have to be.
        """


class LocalLedger:
    """The results of one process of a search, and the incumbent of all of them."""

    is_shared = False

    def __init__(self, group: ProcessGroup) -> None:
        self.results: dict[int, Result] = {}
        self._group, self._least_s = group, math.inf

    @property
    def incumbent_s(self) -> float:
        return min(self._least_s, self._group.incumbent_s)

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Nobody looks."""

    def read(self) -> None:
        """Others write nothing here."""

    def is_claimed(self, index: int) -> bool:
        return False  # no other process comes to the same candidates

    def claim(self, index: int, bound_s: float) -> None:
        """Nobody else asks."""

    def release(self, index: int) -> None:
        """Nobody else asks."""

    def record(self, index: int, result: Result) -> None:
        self.results[index] = result
        if result.time_s is not None:
            self._least_s = min(self._least_s, result.time_s)
            self._group.offer(result.time_s)

    def finish(self, excluded_s: Callable[[int], float | None]) -> None:
        """Nothing is open."""


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


MOST = 256
"""Candidates whose bounds are raised at most."""


def close_gap(
    pool: Sequence[Candidate],
    bounds: MutableMapping[Candidate, float],
    best_s: float,
    asked: Collection[int],
    closest_s: Callable[[int, float, Sequence[ChainProof]], tuple[float, tuple[ChainProof, ...]]],
) -> None:
    """Raise the least of some bounds, until it comes to ``best_s``, or cannot be raised.

    Args:
        bounds: of each candidate of the pool; raised in place.
        best_s: of the best plan; infinite: there is none, and nothing to raise.
        asked: positions of those that the search came to, whose bounds are of their priced layouts.
        closest_s: the tightest bound of the candidate at a position, up to a goal, from proofs of its schedule; and new proofs.
    """
    if math.isinf(best_s):
        return
    goal_s, made = best_s, 0
    proofs: dict[Key, list[ChainProof]] = {}
    heap = [(bounds[candidate], i) for i, candidate in enumerate(pool) if bounds[candidate] < goal_s]
    heapq.heapify(heap)
    while heap and made < MOST:
        before_s, i = heapq.heappop(heap)
        if i not in asked or before_s >= goal_s:
            return
        made += 1
        known = proofs.setdefault(key_of(pool[i]), [])
        bound_s, more = closest_s(i, goal_s, known)
        known += more
        del known[: len(known) - KEPT]
        bounds[pool[i]] = max(bound_s, before_s)
        goal_s = min(goal_s, bounds[pool[i]])  # which is the least of all if no other one is below

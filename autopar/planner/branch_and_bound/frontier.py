"""The frontier: results and dual bounds of a search's candidates, the next candidate to evaluate, and the certificate.

Results are in a :class:`Ledger`: in memory for the processes of one search (:class:`LocalLedger`), in a storage for searches that share
it (:mod:`autopar.planner.studies.study`).

:class:`Frontier` takes the candidate of the least bound. If a tighter relaxation is left, it computes that for all open candidates of the
same layouts and level at once; otherwise the candidate is evaluated. It ends when the least bound is not below the incumbent.

:func:`close_gap` is the certificate. The least dual bound of all candidates says how much faster than the incumbent another plan may be.
The candidate of the least bound gets the tightest relaxation, until the least bound reaches the incumbent or cannot be raised. Each step
is a function of the candidate, the goal and the proofs before it alone, so the certificate does not depend on processes or timing.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from autopar.planner.bounds.cascade import COARSE, LEVELS
from autopar.planner.bounds.chain_program import KEPT
from autopar.planner.bounds.chain_proof import ChainProof, Key, key_of
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.layout import LayoutKey, layout_key_of
from autopar.planner.space.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one candidate: its time, or a time that it does not beat, or the reason why it has no plan.

    Attributes:
        time_s: the step time of its best plan in seconds.
        at_least_s: a lower bound in seconds at which the evaluation was cut off.
        reason: why it has no plan.
        needs_bytes: the bytes of the leanest plan that was tried; 0 if unknown.
        peak_memory_bytes: the peak of its best plan in bytes, for display.
    """

    time_s: float | None = None
    at_least_s: float | None = None
    reason: str = ""
    needs_bytes: int = 0
    peak_memory_bytes: int = 0

    def settles(self, cutoff_s: float) -> bool:
        """Return whether the result decides if the candidate takes less than ``cutoff_s`` seconds."""
        return self.at_least_s is None or self.at_least_s > cutoff_s


class Ledger(Protocol):
    """Results and claims of candidates, by position in the pool."""

    is_shared: bool
    """Whether other searches write into it."""

    @property
    def results(self) -> Mapping[int, Result]:
        """The results of the candidates that were evaluated."""

    @property
    def incumbent_s(self) -> float:
        """The least step time so far in seconds; infinite before there is one."""

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Record which candidates experts would try and why, for display."""

    def read(self) -> None:
        """Read the results that other searches have written."""

    def is_claimed(self, index: int) -> bool:
        """Return whether another search has claimed a candidate and recorded no result; that search may be dead."""

    def claim(self, index: int, bound_s: float) -> None:
        """Claim a candidate for this search, whether or not another has claimed it; ``bound_s`` is its dual bound in seconds."""

    def release(self, index: int) -> None:
        """Withdraw a claim without a result."""

    def record(self, index: int, result: Result) -> None:
        """Record the result of a candidate that this search has claimed."""

    def finish(self, excluded_s: Callable[[int], float | None]) -> None:
        """Close the candidates that need no evaluation any more.

        Args:
            excluded_s: returns a lower bound of a candidate in seconds where that excludes it; None where it may still have to be evaluated.
        """


class LocalLedger:
    """The results of one process of a search, and the incumbent of all its processes."""

    is_shared = False

    def __init__(self, group: ProcessGroup) -> None:
        self.results: dict[int, Result] = {}
        self._group, self._least_s = group, math.inf

    @property
    def incumbent_s(self) -> float:
        return min(self._least_s, self._group.incumbent_s)

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Nothing to do: the ledger is not displayed."""

    def read(self) -> None:
        """Nothing to do: no other search writes here."""

    def is_claimed(self, index: int) -> bool:
        return False  # processes of one group never reach the same candidate

    def claim(self, index: int, bound_s: float) -> None:
        """Nothing to do: no other search reads claims here."""

    def release(self, index: int) -> None:
        """Nothing to do: no other search reads claims here."""

    def record(self, index: int, result: Result) -> None:
        self.results[index] = result
        if result.time_s is not None:
            self._least_s = min(self._least_s, result.time_s)
            self._group.offer(result.time_s)

    def finish(self, excluded_s: Callable[[int], float | None]) -> None:
        """Nothing to do: no candidate is open here."""


LAST_LEVEL = LEVELS - 1
"""The level of the tightest bound before a candidate is evaluated."""

NUM_TRIED = 8
"""The number of candidates of least bound among which the primal heuristic chooses.

Its plan is the first incumbent; bounds cost many times less once there is a time that they only have to reach.
"""


class Frontier:
    """The open candidates of one search.

    Args:
        evaluator: computes the bounds.
        pool: the candidates.
        group: the processes of the search.
        cutoff_s: returns the seconds that a plan must be below.
        primal: whether a primal heuristic looks for an early incumbent. False where searches share their order, which would then depend
            on timing.

    Attributes:
        bounds: the dual bound of each candidate so far, in seconds.
        visited: positions of the candidates whose turn has come, with bounds of the last level.
        parts: positions of the candidates that may fit, by the layouts that they share; empty before :meth:`begin`.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        pool: Sequence[Candidate],
        group: ProcessGroup,
        cutoff_s: Callable[[], float],
        *,
        primal: bool,
    ) -> None:
        self.evaluator, self.pool, self.group, self.cutoff_s, self.primal = evaluator, pool, group, cutoff_s, primal
        self.keys = [layout_key_of(candidate) for candidate in pool]
        self.bounds: dict[Candidate, float] = {}
        self.parts: dict[LayoutKey, list[int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._level: dict[int, int] = {}
        self.visited: set[int] = set()

    def begin(self) -> None:
        """Compute the first bounds of all candidates."""
        self.bounds |= zip(self.pool, self.evaluator.bounds_s(0, self.pool), strict=True)
        for i, candidate in enumerate(self.pool):
            if math.isfinite(self.bounds[candidate]):
                self.parts.setdefault(self.keys[i], []).append(i)

    def walk(self) -> Iterator[int]:
        """Yield the positions of candidates that may be faster than the incumbent, in the order of their bounds and then of the pool."""
        self._level |= {i: 0 for members in self.parts.values() for i in members}
        self._heap += [(self.bounds[self.pool[i]], 0, i) for i in self._level]
        heapq.heapify(self._heap)
        if self.primal:
            yield from self._primal_heuristic()
        while self._heap:
            bound_s, level, i = heapq.heappop(self._heap)
            if bound_s >= self.cutoff_s():
                return
            if level < self._level[i] or i in self.visited or not self.group.claim(self.keys[i]):
                continue
            if level == LAST_LEVEL:
                self.visited.add(i)
                if self.evaluator.chained_s(self.pool[i], self.cutoff_s()) < self.cutoff_s():
                    yield i
            elif level == 0 and not self.group.is_forked:  # the next bound needs no layouts: all candidates at once
                self._raise([k for members in self.parts.values() for k in members], level)
            else:
                yield from self._raised(self.keys[i], level)

    def _raised(self, key: LayoutKey, level: int) -> Iterator[int]:
        """Raise the bounds of all candidates that share a key, and yield their best one where it may improve the incumbent much.

        Bounds take the longer the further the incumbent is above them. So where layouts have just been priced, the candidate of their least
        bound is evaluated out of turn if that bound is below the incumbent by more than :data:`~autopar.planner.bounds.cascade.COARSE`.
        """
        self._raise(self.parts[key], level)
        open_ = [k for k in self.parts[key] if self._level[k] == LAST_LEVEL and k not in self.visited]
        first = min(open_, key=self._order, default=None)
        if self.primal and first is not None and self.bounds[self.pool[first]] < self.cutoff_s() * (1 - COARSE):
            self.visited.add(first)
            yield first

    def _primal_heuristic(self) -> Iterator[int]:
        """Yield the candidates of a primal heuristic, which gives an early incumbent.

        It tries the smallest micro-batches first, whose bounds are nearest to their plans. Among the candidates of least bound it evaluates the
        best one by the last level. If none fits, it takes ever more of them, and then larger micro-batches.
        """
        for size in sorted({key.micro_batch_size for key in self.parts}):
            members = [k for key, part in self.parts.items() if key.micro_batch_size == size for k in part]
            queue, count = (k for k in sorted(members, key=self._order) if self.group.claim(self.keys[k])), NUM_TRIED
            while batch := [*islice(queue, count)]:
                self._raise(batch, 0)
                least = sorted(batch, key=self._order)[:NUM_TRIED]
                for level in range(1, LAST_LEVEL):
                    self._raise([k for k in least if math.isfinite(self.bounds[self.pool[k]])], level)
                first = min(least, key=self._order)
                if self._level[first] == LAST_LEVEL and math.isfinite(self.bounds[self.pool[first]]):
                    self.visited.add(first)
                    yield first
                if math.isfinite(self.cutoff_s()):
                    return
                count *= 2

    def _order(self, index: int) -> tuple[float, int]:
        return self.bounds[self.pool[index]], index

    def _raise(self, places: Sequence[int], level: int) -> None:
        """Compute the next bound of those candidates that are at ``level`` and are not excluded."""
        cutoff_s = self.cutoff_s()
        raisable = [k for k in places if self._level[k] == level and self.bounds[self.pool[k]] < cutoff_s]
        bounds_s = self.evaluator.bounds_s(level + 1, [self.pool[k] for k in raisable], cutoff_s)
        for k, bound_s in zip(raisable, bounds_s, strict=True):
            self._level[k] = level + 1
            self.bounds[self.pool[k]] = max(self.bounds[self.pool[k]], bound_s)
            if math.isfinite(bound_s):
                heapq.heappush(self._heap, (self.bounds[self.pool[k]], level + 1, k))


MAX_RAISED = 256
"""The number of candidates whose bounds the certificate raises at most."""


def close_gap(
    pool: Sequence[Candidate],
    bounds: MutableMapping[Candidate, float],
    best_s: float,
    visited: Collection[int],
    closest_s: Callable[[int, float, Sequence[ChainProof]], tuple[float, tuple[ChainProof, ...]]],
) -> None:
    """Raise the least of all bounds until it reaches ``best_s`` or cannot be raised.

    Args:
        bounds: the bound of each candidate of the pool in seconds; raised in place.
        best_s: the step time of the incumbent in seconds; infinite: there is none, and nothing is raised.
        visited: positions of the candidates that the search visited; the bounds of others are not of priced layouts.
        closest_s: returns the tightest bound of the candidate at a position, up to a goal and from known proofs of its schedule, and the
            new proofs.
    """
    if math.isinf(best_s):
        return
    goal_s, num_raised = best_s, 0
    proofs: dict[Key, list[ChainProof]] = {}
    heap = [(bounds[candidate], i) for i, candidate in enumerate(pool) if bounds[candidate] < goal_s]
    heapq.heapify(heap)
    while heap and num_raised < MAX_RAISED:
        before_s, i = heapq.heappop(heap)
        if i not in visited or before_s >= goal_s:
            return
        num_raised += 1
        known = proofs.setdefault(key_of(pool[i]), [])
        bound_s, new_proofs = closest_s(i, goal_s, known)
        known += new_proofs
        del known[: len(known) - KEPT]
        bounds[pool[i]] = max(bound_s, before_s)
        goal_s = min(goal_s, bounds[pool[i]])  # raising others above this bound would not raise the least one

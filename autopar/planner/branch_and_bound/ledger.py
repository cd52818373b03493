"""What is known of the candidates of one search: what came of them, and which are being evaluated.

The processes of one search keep this to themselves (:class:`LocalLedger`); searches that share a storage see each other's
(:mod:`autopar.planner.studies.study`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from autopar.planner.branch_and_bound.process_group import ProcessGroup


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

"""What is known of the candidates of one search: what came of them, and which are being worked on.

The processes of one search keep this to themselves (:mod:`autopar.planner.branch_and_bound.process_group`); searches that share a storage see each other's
(:mod:`autopar.planner.studies.study`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
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
    """Candidates by their position in the pool."""

    is_shared: bool

    def expect(self, seeds: Mapping[int, str]) -> None:
        """Say which candidates experts would try, with reasons; for people."""

    def tidy(self, excluded_s: Callable[[int], float | None]) -> None:
        """Leave nothing open that is decided.

        Args:
            excluded_s: what a candidate takes at least where it need not be evaluated any more; None where it may have to be.
        """

    def read(self) -> None:
        """Take in what others have written."""

    @property
    def found(self) -> Mapping[int, Told]:
        """What came of the candidates that were evaluated."""

    @property
    def least_s(self) -> float:
        """The least time found so far; infinite before there is one."""

    def is_running(self, index: int) -> bool:
        """Whether another search has claimed a candidate and has not said what came of it: it may be dead."""

    def claim(self, index: int, bound_s: float) -> None:
        """Say that this search evaluates a candidate, or takes it over from another."""

    def release(self, index: int) -> None:
        """Say that it does so no more."""

    def tell(self, index: int, told: Told) -> None:
        """Say what came of it."""

"""What a search is told of when to stop, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.search.evaluate import Evaluation, Misfit

Progress = Callable[[str, int, int], None]
"""``(what, done, total)``; ``total`` 0 while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search stops: after so many trials or seconds; None for no limit.

    ``trials``: of all searches that share a ledger together, those that were made before among them.
    ``max_step_time_s``: slower plans do not count, and what cannot be faster by its bound is not looked at.
    """

    trials: int | None = None
    timeout_s: float | None = None
    max_step_time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a search found.

    Attributes:
        best: the fastest plan that fits; None when none of those evaluated does.
        candidates: how many there were.
        evaluated: how many of them were looked at; the others cannot fit in any layout, or are slower by a bound.
        lower_bound_s: no candidate that may fit is faster.
        misfits: those that failed, with their reasons.
        finished: False where a limit or an interrupt stopped the search.
        interrupted: by the user.
    """

    best: Evaluation | None
    candidates: int
    evaluated: int
    lower_bound_s: float
    misfits: tuple[Misfit, ...]
    finished: bool
    interrupted: bool = False

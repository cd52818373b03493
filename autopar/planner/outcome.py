"""What a search is told of when to stop, and what it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.plan import Prediction
from autopar.planner.evaluate.evaluation import Evaluation, Misfit

Progress = Callable[[str, int, int], None]
"""``(what, done, total)``; ``total`` 0 while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a search stops: after so many trials or seconds; None for no limit.

    ``trials``: of all searches that share a ledger together, those that were made before among them.
    ``max_step_time_s``: slower plans do not count, and what cannot be faster by its bound is not looked at.

    Raises:
        UsageError: less than one trial, or negative seconds.
    """

    trials: int | None = None
    timeout_s: float | None = None
    max_step_time_s: float | None = None

    def __post_init__(self) -> None:
        """Nothing is searched by such limits."""
        if self.trials is not None and self.trials < 1:
            raise UsageError("a search has at least one trial", value=self.trials, place="trials",
                             remedy="leave it out for no limit")  # fmt: skip
        for name in ("timeout_s", "max_step_time_s"):
            if (seconds := getattr(self, name)) is not None and seconds < 0:
                raise UsageError("a limit of time is not negative", value=seconds, place=name)


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


def peak_bytes(prediction: Prediction) -> int:
    """The upper end of the predicted peak."""
    return int(max((prediction.peak_memory_bytes, *prediction.peak_memory_interval_bytes)))

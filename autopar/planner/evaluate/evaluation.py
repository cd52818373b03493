"""What an evaluation of a candidate says: its best plan, or why it has none."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.plan import BUCKET_BYTES, Prediction
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.activation_modes import Way

SLOW = "slower than the best plan by a bound"
"""The reason of a candidate that was left unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """A candidate that fits.

    Attributes:
        option: the layout.
        stops: where each stage ends.
        modes: how each block recomputes, or that it keeps on the host what it needs.
        prediction: of its step.
        bucket_bytes: of gradients that are summed together.
    """

    candidate: Candidate
    option: PricedLayout
    stops: tuple[int, ...]
    modes: tuple[Way, ...]
    prediction: Prediction
    bucket_bytes: int = BUCKET_BYTES

    @property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.prediction.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate without a plan, and why; ``needs_bytes``: of the leanest that was tried, 0 where not known."""

    candidate: Candidate
    reason: str
    needs_bytes: int = 0

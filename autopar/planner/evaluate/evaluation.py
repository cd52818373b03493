"""What an evaluation of a candidate says: its best plan, or why it has none."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost.model import CostModel
from autopar.plan.plan import BUCKET_BYTES
from autopar.plan.prediction import Prediction
from autopar.planner.context import readable
from autopar.planner.layouts.layout import PricedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.recompute import Way

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


def needs_text(model: CostModel, predicted_bytes: int) -> str:
    """The upper end of a predicted peak, which has to fit, and what there is."""
    return f"{readable(predicted_bytes * model.memory_spread)} of {memory_of_devices(model)}"


def memory_of_devices(model: CostModel) -> str:
    """What a device has, for people; from the smallest to the largest where they differ."""
    sizes = {device.memory_bytes for device in model.devices}
    return " to ".join(readable(size) for size in sorted({min(sizes), max(sizes)}))

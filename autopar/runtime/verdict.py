"""What a comparison with one device found, and what it means: right, rounding or wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.errors import VerificationError

if TYPE_CHECKING:
    from autopar.runtime.bisect import Bisection

LOSS_TOLERANCE = 1e-5
TENSOR_TOLERANCE = 1e-4
DOUBLE_LOSS_TOLERANCE = 1e-10
DOUBLE_TENSOR_TOLERANCE = 1e-9
"""In fp64, whose rounding is 1e-16: of a tensor that is nothing but rounding that is 1e-10 of what it is measured against
(see ``_worst``), and a few times as much after sums in another order."""
_TOLERANCES = {
    "fp32": (LOSS_TOLERANCE, TENSOR_TOLERANCE),
    "fp64": (DOUBLE_LOSS_TOLERANCE, DOUBLE_TENSOR_TOLERANCE),
}
AMPLIFIED = 10.0
"""By how much the fp32 error of a plan may exceed one device's own, fp32 against fp64, and count as rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankErrors:
    """The largest relative errors (largest difference over largest reference, by tensor) on one rank."""

    rank: int
    losses: tuple[float, ...]
    loss: float
    gradient: float
    gradient_name: str
    parameter: float
    parameter_name: str
    precision: str = "fp32"

    @property
    def tolerances(self) -> tuple[float, float]:
        """Of losses, and of gradients and parameters."""
        return _TOLERANCES[self.precision]

    @property
    def passed(self) -> bool:
        """Within the tolerances."""
        loss, tensor = self.tolerances
        return self.loss <= loss and max(self.gradient, self.parameter) <= tensor

    @property
    def error(self) -> float:
        """The largest of the three."""
        return max(self.loss, self.gradient, self.parameter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """What a plan that is past the limits in fp32 does in fp64.

    Attributes:
        rows: errors of the same plan in fp64 by rank; empty where it could not be run so.
        alone: one device, fp32 against fp64.
        why: what kept it from running.
    """

    rows: tuple[RankErrors, ...]
    alone: RankErrors
    why: str = ""

    @property
    def error(self) -> float:
        """The largest in fp64."""
        return max((row.error for row in self.rows), default=math.inf)

    def is_rounding(self, rows: Sequence[RankErrors]) -> bool:
        """Whether fp64 agrees, and what ``rows`` are off by in fp32 is what one device is off by as well."""
        if not self.rows or not all(row.passed for row in self.rows):
            return False
        return all(
            found <= max(limit, AMPLIFIED * own)
            for row in rows
            for found, own, limit in zip(
                (row.loss, row.gradient, row.parameter),
                (self.alone.loss, self.alone.gradient, self.alone.parameter),
                (LOSS_TOLERANCE, TENSOR_TOLERANCE, TENSOR_TOLERANCE),
                strict=True,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """A row for each rank; ``reference_losses`` are those of one device.

    ``confirmation``: of a report in fp32 that is past the limits; ``bisection``: where it differs, if sought.
    """

    steps: int
    reference_losses: tuple[float, ...]
    rows: tuple[RankErrors, ...]
    confirmation: Confirmation | None = None
    bisection: Bisection | None = None

    @property
    def is_within(self) -> bool:
        """Every rank is within the tolerances."""
        return all(row.passed for row in self.rows)

    @property
    def passed(self) -> bool:
        """Every rank is within the tolerances, or fp64 has shown that what is past them is rounding."""
        return self.is_within or (self.confirmation is not None and self.confirmation.is_rounding(self.rows))

    @property
    def verdict(self) -> str:
        """One sentence, without its full stop."""
        found = self.confirmation
        if self.is_within:
            return "every rank agrees"
        if found is None or not found.rows:
            why = "" if found is None or not found.why else f"; float64 cannot tell: {found.why}"
            return f"wrong: the parallel program DIFFERS from one device{why}"
        if self.passed:
            return f"rounding: the same plan agrees in float64 to {found.error:.0e}"
        if all(row.passed for row in found.rows):
            return (
                f"wrong in float32: the same plan agrees in float64 to {found.error:.0e}, but differs in float32 by "
                "more than the rounding of one device"
            )
        return f"wrong: the parallel program DIFFERS from one device, in float64 too, by {found.error:.0e}"

    def check(self) -> None:
        """Nothing when all is well.

        Raises:
            VerificationError: names the worst rank and tensor.
        """
        if self.passed:
            return
        for row in self.rows:
            if row.loss > row.tolerances[0]:
                raise VerificationError(
                    f"losses agree with one device within {row.tolerances[0]:g}",
                    value=f"{row.loss:.2e}: {row.losses} for {self.reference_losses}",
                    place=self._place(row),
                )
        worst = max(self.rows, key=lambda row: max(row.gradient, row.parameter))
        for what, error, name in (
            ("gradients of the first step", worst.gradient, worst.gradient_name),
            (f"parameters after {self.steps} AdamW steps", worst.parameter, worst.parameter_name),
        ):
            if error > worst.tolerances[1]:
                raise VerificationError(
                    f"{what} agree with one device within {worst.tolerances[1]:g}",
                    value=f"{error:.2e} for {name}",
                    place=self._place(worst),
                )

    def _place(self, row: RankErrors) -> str:
        """The rank, and the first operator that differs where it was found."""
        first = self.bisection.difference if self.bisection is not None else None
        return f"rank {row.rank}" + (f", first in {first.place}" if first is not None and first.place else "")

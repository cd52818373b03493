"""What a comparison with one device found, what it means (right, rounding or wrong), and the same as text, a row for each rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from torch.utils import _pytree as pytree

from autopar.errors import VerificationError
from autopar.plan.text import micro_batch_text
from autopar.util.formatting import plain_table

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.verification.first_difference import Bisection, Difference
    from autopar.verification.slices import Mismatch


_WRONG = "Please report it with the plan file, and pin other degrees until it is corrected"
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
NUDGES = 16
"""Runs of one device with parameters moved by a rounding of fp32 each, where its own error explains too little."""
DOUBLE_NUDGES = 4
DOUBLE_CEILING = 1e-7
"""No error in fp64 above it is rounding, whatever one device does: faults are a thousand times as large and more."""


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
        nudged: one device in fp32, against fp64, from parameters that are moved by a rounding of fp32: where a unit lies
            on a kink, a rounding decides on which side, and ``alone`` may lie on the right one by luck.
        nudged_double: one device in fp64, against itself, from parameters that are moved by a rounding of fp64, where ``rows``
            are past a tolerance: a tensor that is nothing but rounding has no other measure.
    """

    rows: tuple[RankErrors, ...]
    alone: RankErrors
    why: str = ""
    nudged: tuple[RankErrors, ...] = ()
    nudged_double: tuple[RankErrors, ...] = ()

    @property
    def error(self) -> float:
        """The largest in fp64."""
        return max((row.error for row in self.rows), default=math.inf)

    @property
    def own(self) -> RankErrors:
        """One device, fp32 against fp64: the largest of each error in all its runs, each with its tensor."""
        runs = (self.alone, *self.nudged)
        gradient, parameter = (max(runs, key=lambda run: getattr(run, name)) for name in ("gradient", "parameter"))
        return replace(
            self.alone,
            loss=max(run.loss for run in runs),
            gradient=gradient.gradient,
            gradient_name=gradient.gradient_name,
            parameter=parameter.parameter,
            parameter_name=parameter.parameter_name,
        )

    @property
    def agrees(self) -> bool:
        """The plan ran in fp64, and is within the tolerances there, or off by what one device is off by in fp64."""
        own = AMPLIFIED * max((run.error for run in self.nudged_double), default=0.0)
        return bool(self.rows) and all(row.passed or row.error <= min(own, DOUBLE_CEILING) for row in self.rows)

    def is_rounding(self, rows: Sequence[RankErrors]) -> bool:
        """Whether fp64 agrees, and what ``rows`` are off by in fp32 is what one device is off by as well."""
        own = self.own
        return self.agrees and all(
            found <= max(limit, AMPLIFIED * mine)
            for row in rows
            for found, mine, limit in zip(
                (row.loss, row.gradient, row.parameter),
                (own.loss, own.gradient, own.parameter),
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

    def __str__(self) -> str:
        return render_report(self)

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
            moved = "; one device is off by as much when its parameters move by a rounding" if found.nudged else ""
            return f"rounding: the same plan agrees in float64 to {found.error:.0e}{moved}"
        if found.agrees:
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
                    f"The loss differs from one device by {row.loss:.2e}, more than {row.tolerances[0]:g}",
                    where=self._place(row),
                    got=f"{row.losses} for {self.reference_losses}",
                    fix=_WRONG,
                )
        worst = max(self.rows, key=lambda row: max(row.gradient, row.parameter))
        for what, error, name in (
            ("gradients of the first step", worst.gradient, worst.gradient_name),
            (f"parameters after {self.steps} AdamW steps", worst.parameter, worst.parameter_name),
        ):
            if error > worst.tolerances[1]:
                raise VerificationError(
                    f"{what} differ from one device by {error:.2e} (in {name}), more than {worst.tolerances[1]:g}",
                    where=self._place(worst),
                    fix=_WRONG,
                )

    def _place(self, row: RankErrors) -> str:
        """The rank, and the first operator that differs where it was found."""
        first = self.bisection.difference if self.bisection is not None else None
        return f"rank {row.rank}" + (f", first in {first.place}" if first is not None and first.place else "")


GRAPH_TOLERANCE = 1e-5
"""Between the losses of the model in float32 and of its graph in float64, both on one device."""


def render_verification(report: VerifyReport, plan: Plan) -> str:
    """The plan in two lines, and :func:`render_report`."""
    schedule = "" if plan.schedule == "none" else f", {plan.schedule}"
    batches = f"{plan.num_micro_batches} micro-batches of {micro_batch_text(plan)}"
    head = f"{plan.model.name} on {plan.cluster}: {plan.mesh}, ZeRO {plan.zero_stage}{schedule}, {batches}"
    return "\n".join((head, *_splits(plan), render_report(report)))


def render_report(report: VerifyReport) -> str:
    """Relative errors by rank against one device; where they are past the limits, the same in float64."""
    head = ("rank", "loss", "gradient", "worst gradient", "parameter", "worst parameter", "")
    losses = ", ".join(f"{loss:.6f}" for loss in report.reference_losses)
    lines = [
        f"relative errors against one device over {report.steps} AdamW steps (losses {losses})",
        plain_table(head, [_cells(row) for row in report.rows], left=_LEFT, width=120),
    ]
    found = report.confirmation
    if found is not None:
        if found.rows:
            lines.append("the same plan in float64, against one device in float64")
            lines.append(plain_table(head, [_cells(row) for row in found.rows], left=_LEFT, width=120))
        moved = (
            f": the most in {1 + len(found.nudged)} runs, its parameters moved by a rounding" if found.nudged else ""
        )
        lines.append(f"one device alone, float32 against float64{moved}")
        lines.append(plain_table(head[1:-1], [_cells(found.own)[1:-1]], left=_LEFT, width=120))
    loss, tensor = report.rows[0].tolerances
    lines.append(f"{report.verdict} (allowed: loss {loss:g}, gradients and parameters {tensor:g})")
    if report.bisection is not None:
        lines += ["", *_bisection(report.bisection, report.passed)]
    return "\n".join(lines)


_LEFT = ("worst gradient", "worst parameter", "")


def _cells(row: RankErrors) -> tuple[str, ...]:
    return (
        str(row.rank),
        f"{row.loss:.1e}",
        f"{row.gradient:.1e}",
        row.gradient_name,
        f"{row.parameter:.1e}",
        row.parameter_name,
        "ok" if row.passed else "past",
    )


def _bisection(found: Bisection, passed: bool) -> list[str]:
    """Where the program first differs, in float64."""
    difference = found.difference
    if difference is not None:
        return _difference(difference)
    lines = [f"in float64 no loss, gradient or parameter differs in {found.steps} steps"]
    if not passed and found.graph_loss > GRAPH_TOLERANCE:
        lines.append(
            f"but the traced graph's own loss is {found.graph_loss:.1e} off the model's: the trace differs, not the plan"
        )
    elif not passed:
        lines.append("what differs above is rounding: see whether it grows with the depth of the model")
    return lines


def _difference(found: Difference) -> list[str]:
    at = f"block {found.block} ({found.label or '-'}), stage {found.stage}" if found.block is not None else "no block"
    rows = [
        (
            "first difference",
            f"step {found.step}, {at}" if found.op or found.block is not None else f"step {found.step}",
        )
    ]
    if found.op:
        code = ", ".join(part for part in (found.module, found.source) if part)
        rows.append(("operator", f"{found.op}: {found.target}{f' ({code})' if code else ''}"))
    rows += [("wrong", found.what), ("right", found.while_right)]
    rows.append(("strategies", ", ".join(f"{axis}: {name}" for axis, name in found.strategies)))
    rows += [("reads" if i == 0 else "", text) for i, text in enumerate(found.reads)]
    rows += [("makes" if i == 0 else "", text) for i, text in enumerate(found.makes)]
    rows += [*_mismatch(found.mismatch), ("next", found.remedy)]
    return [f"{name:<17} {text}" for name, text in rows if text]


def _mismatch(found: Mismatch) -> list[tuple[str, str]]:
    ranks = ", ".join(map(str, found.ranks))
    if found.micro_batches:
        ranks += f" (micro-batch {', '.join(map(str, found.micro_batches))})"
    shapes = f"{list(found.local_shape)} on a rank, {list(found.shape)} in all"
    samples = "; ".join(f"{list(s.index)}: {s.found:.6g} instead of {s.expected:.6g}" for s in found.samples)
    return [("ranks", ranks), ("shape", shapes), ("error", f"{found.error:.1e}"), ("elements", samples)]


def verification(report: VerifyReport) -> dict[str, Any]:
    """The same as JSON values; numbers that JSON has not, which wrong programs give, as the texts ``inf`` and ``nan``."""
    found = report.confirmation
    said: dict[str, Any] = {
        "passed": report.passed,
        "verdict": report.verdict,
        "steps": report.steps,
        "reference_losses": list(report.reference_losses),
        "bisection": None if report.bisection is None else asdict(report.bisection),
        "ranks": [_row(row) for row in report.rows],
    }
    if found is not None:
        said["float64_ranks"] = [_row(row) for row in found.rows]
        said |= {"alone": _row(found.alone), "nudged": [_row(row) for row in found.nudged]}
    finite: dict[str, Any] = pytree.tree_map_only(float, lambda x: x if math.isfinite(x) else str(x), said)
    return finite


def _row(row: RankErrors) -> dict[str, Any]:
    return {**asdict(row), "losses": list(row.losses), "passed": row.passed}


def _splits(plan: Plan) -> list[str]:
    """How much the plan splits on each axis inside the model: nothing split would verify nothing."""
    typings = [typing for block in plan.blocks for typing in plan.layouts[block.layout].typings]
    lines = []
    if plan.mesh.cp > 1:
        names = [name for typing in typings if typing.axis == "cp" for name in typing.strategies]
        split = sum(name not in ("invariant", "replicate") for name in names)
        lines.append(f"cp={plan.mesh.cp} splits {split} of {len(names)} operators along the sequence")
    lines += [note for note in plan.notes if note.startswith("mixtures of experts (")]
    if plan.mesh.tp > 1:
        kinds = [kind for typing in typings if typing.axis == "tp" for kind in typing.parameters]
        lines.append(f"tp={plan.mesh.tp} splits {sum(k.is_split for k in kinds)} of {len(kinds)} parameters")
    return lines

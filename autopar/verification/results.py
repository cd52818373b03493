"""The results of a comparison with one device, the verdict (right, rounding or wrong), and both as text and as JSON values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import le
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
"""Relative error up to which losses in fp32 agree."""
TENSOR_TOLERANCE = 1e-4
"""Relative error up to which gradients and parameters in fp32 agree."""
DOUBLE_LOSS_TOLERANCE = 1e-10
"""Relative error up to which losses in fp64 agree."""
DOUBLE_TENSOR_TOLERANCE = 1e-9
"""Relative error up to which gradients and parameters in fp64 agree.

Rounding in fp64 is 1e-16. The errors of a tensor of nothing but rounding are relative to 1e-6 of the largest one (see :func:`~autopar.verification.reference.worst`), so
that its rounding counts as 1e-10, and as a few times that after sums in another order."""
_TOLERANCES = {
    "fp32": (LOSS_TOLERANCE, TENSOR_TOLERANCE, TENSOR_TOLERANCE),
    "fp64": (DOUBLE_LOSS_TOLERANCE, DOUBLE_TENSOR_TOLERANCE, DOUBLE_TENSOR_TOLERANCE),
}
"""The tolerance of each of :attr:`RankErrors.errors`, by precision."""
AMPLIFIED = 10.0
"""Factor by which a plan's error in fp32 may exceed that of one device (fp32 against fp64) and still count as rounding."""
NUDGES = 16
"""Most runs of one device in fp32 with parameters moved by a rounding each, where its error without explains too little."""
DOUBLE_NUDGES = 4
"""Most such runs in fp64."""
DOUBLE_CEILING = 1e-7
"""Error in fp64 above which nothing counts as rounding, whatever the error of one device: faults are a thousand times as large and more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankErrors:
    """The largest relative errors on one rank: largest difference over largest element of the reference, by tensor.

    Attributes:
        rank: the rank.
        losses: its loss in each step.
        loss: the largest error of a loss.
        gradient, gradient_name: the largest error of a gradient, and its parameter.
        parameter, parameter_name: the largest error of a parameter or buffer, and its name.
        precision: ``fp32`` or ``fp64``; it determines the tolerances.
    """

    rank: int
    losses: tuple[float, ...]
    loss: float
    gradient: float
    gradient_name: str
    parameter: float
    parameter_name: str
    precision: str = "fp32"

    @property
    def errors(self) -> tuple[float, float, float]:
        """The largest error of a loss, of a gradient and of a parameter."""
        return self.loss, self.gradient, self.parameter

    @property
    def tolerances(self) -> tuple[float, float, float]:
        """The tolerances of losses, gradients and parameters."""
        return _TOLERANCES[self.precision]

    @property
    def passed(self) -> bool:
        """Whether all errors are within the tolerances."""
        return all(map(le, self.errors, self.tolerances))

    @property
    def error(self) -> float:
        """The largest of the three errors."""
        return max(self.errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Runs that tell rounding from a fault, after a comparison that exceeds a tolerance. Where that was in fp64, all of them are.

    Attributes:
        rows: errors of the same plan in fp64, by rank; empty if it could not run.
        alone: errors of one device in fp32 against fp64.
        why: the reason why the plan could not run in fp64.
        nudged: errors of one device in fp32 against fp64, from parameters moved by a rounding of fp32, one for each run. Where a unit lies
            on a kink, rounding decides on which side, and ``alone`` may be on the right side by luck.
        nudged_double: errors of one device in fp64 against itself, from parameters moved by a rounding of fp64. They are measured where
            ``rows`` exceed a tolerance, since a tensor of nothing but rounding has no other scale.
    """

    rows: tuple[RankErrors, ...]
    alone: RankErrors
    why: str = ""
    nudged: tuple[RankErrors, ...] = ()
    nudged_double: tuple[RankErrors, ...] = ()

    @property
    def error(self) -> float:
        """The largest error in fp64."""
        return max((row.error for row in self.rows), default=math.inf)

    @property
    def one_device(self) -> RankErrors:
        """The largest of each error of one device, fp32 against fp64, over all its runs, with its tensor."""
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
        """Whether the plan ran in fp64, and is within the tolerances there or off by at most :data:`AMPLIFIED` times what one device is."""
        rounding = AMPLIFIED * max((run.error for run in self.nudged_double), default=0.0)
        return bool(self.rows) and all(row.passed or row.error <= min(rounding, DOUBLE_CEILING) for row in self.rows)

    def explains(self, rows: Sequence[RankErrors]) -> bool:
        """Return whether one device has errors in fp32 as large as those in ``rows``, up to :data:`AMPLIFIED`."""
        rounding = self.one_device.errors
        limits = [max(limit, AMPLIFIED * r) for limit, r in zip(_TOLERANCES["fp32"], rounding, strict=True)]
        return all(all(map(le, row.errors, limits)) for row in rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a comparison with one device.

    Attributes:
        steps: steps of AdamW.
        reference_losses: the losses of one device.
        rows: errors by rank.
        confirmation: runs in fp64, if the comparison exceeded a tolerance; if it was in fp64 itself, of one device alone.
        bisection: the result of a search for the first difference, if there was one.
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
        """Whether every rank is within the tolerances."""
        return all(row.passed for row in self.rows)

    @property
    def passed(self) -> bool:
        """Whether every rank is within the tolerances, or fp64 has shown that the excess is rounding."""
        double = self.confirmation
        return self.is_within or (
            double is not None and (double.agrees or self._graph_agrees) and double.explains(self.rows)
        )

    @property
    def _graph_agrees(self) -> bool:
        """Whether the plan could not run as the model in fp64, but agrees with the model's graph there, whose losses are the model's."""
        found = self.bisection
        is_same = found is not None and found.difference is None and found.graph_loss <= GRAPH_TOLERANCE
        return is_same and self.confirmation is not None and not self.confirmation.rows

    @property
    def verdict(self) -> str:
        """The result in one sentence, without its full stop."""
        double = self.confirmation
        if self.is_within:
            return "every rank agrees"
        if self.passed and self._graph_agrees:
            return "rounding: the same plan agrees in float64 with the traced graph on one device"
        if double is None or not double.rows:
            why = "" if double is None or not double.why else f"; float64 cannot tell: {double.why}"
            return f"wrong: the parallel program DIFFERS from one device{why}"
        if self.passed:
            moved = "; one device is off by as much when its parameters move by a rounding" if double.nudged else ""
            return f"rounding: the same plan agrees in float64 to {double.error:.0e}{moved}"
        if double.agrees:
            return (
                f"wrong in float32: the same plan agrees in float64 to {double.error:.0e}, but differs in float32 by "
                "more than the rounding of one device"
            )
        return f"wrong: the parallel program DIFFERS from one device, in float64 too, by {double.error:.0e}"

    def check(self) -> None:
        """Do nothing if the report has passed.

        Raises:
            VerificationError: the report has not passed; the error names the rank and tensor with the largest error.
        """
        if self.passed:
            return
        loss_limit, limit, _ = self.rows[0].tolerances
        worst = next((row for row in self.rows if row.loss > loss_limit), None)
        if worst is not None:
            problem = f"The loss differs from one device by {worst.loss:.2e}, more than {loss_limit:g}"
            got = f"{worst.losses} for {self.reference_losses}"
        else:
            worst, got = max(self.rows, key=lambda row: max(row.gradient, row.parameter)), ""
            what, error, name = "gradients of the first step", worst.gradient, worst.gradient_name
            if error <= limit:
                what, error, name = f"parameters after {self.steps} AdamW steps", worst.parameter, worst.parameter_name
            problem = f"{what} differ from one device by {error:.2e} (in {name}), more than {limit:g}"
        raise VerificationError(problem, where=self._place(worst), got=got, fix=_WRONG)

    def _place(self, row: RankErrors) -> str:
        """Return the rank, with the first operator that differs if it is known."""
        first = self.bisection.difference if self.bisection is not None else None
        return f"rank {row.rank}" + (f", first in {first.place}" if first is not None and first.place else "")


GRAPH_TOLERANCE = 1e-5
"""Relative error up to which the losses of the model in float32 and of its graph in float64 agree, both on one device."""


def render_verification(report: VerifyReport, plan: Plan) -> str:
    """Return the plan in a few lines, followed by :func:`render_report`."""
    schedule = "" if plan.schedule == "none" else f", {plan.schedule}"
    batches = f"{plan.num_micro_batches} micro-batch{'es' * (plan.num_micro_batches > 1)} of {micro_batch_text(plan)}"
    head = f"{plan.model.name} on {plan.cluster}: {plan.mesh}, ZeRO {plan.zero_stage}{schedule}, {batches}"
    return "\n".join((head, *_splits(plan), render_report(report)))


def render_report(report: VerifyReport) -> str:
    """Return a table of relative errors by rank against one device, with the runs in float64 if there were any."""
    head = ("rank", "loss", "gradient", "worst gradient", "parameter", "worst parameter", "")
    losses = ", ".join(f"{loss:.6f}" for loss in report.reference_losses)
    lines = [
        f"relative errors against one device over {report.steps} AdamW steps (losses {losses})",
        plain_table(head, [_cells(row) for row in report.rows], left=_LEFT, width=120),
    ]
    double = report.confirmation
    if double is not None:
        if double.rows and double.rows != report.rows:
            lines.append("the same plan in float64, against one device in float64")
            lines.append(plain_table(head, [_cells(row) for row in double.rows], left=_LEFT, width=120))
        kinds = "float64" if double.rows == report.rows else "float32 against float64"
        if double.nudged:
            kinds += f": the most in {1 + len(double.nudged)} runs, its parameters moved by a rounding"
        lines.append(f"one device alone, {kinds}")
        lines.append(plain_table(head[1:-1], [_cells(double.one_device)[1:-1]], left=_LEFT, width=120))
    loss, tensor, _ = report.rows[0].tolerances
    lines.append(f"{report.verdict} (allowed: loss {loss:g}, gradients and parameters {tensor:g})")
    if report.bisection is not None:
        lines += ["", *_bisection(report.bisection, report.passed)]
    return "\n".join(lines)


_LEFT = ("worst gradient", "worst parameter", "")
"""Columns with text."""


def _cells(row: RankErrors) -> tuple[str, ...]:
    """Return a table's row."""
    return (
        str(row.rank),
        f"{row.loss:.1e}",
        f"{row.gradient:.1e}",
        row.gradient_name,
        f"{row.parameter:.1e}",
        row.parameter_name,
        "ok" if row.passed else "past",
    )


def _bisection(bisection: Bisection, passed: bool) -> list[str]:
    """Return lines that say where the program first differs in float64."""
    difference = bisection.difference
    if difference is not None:
        return _difference(difference)
    lines = [f"in float64 no loss, gradient or parameter differs in {bisection.steps} steps"]
    if not passed and bisection.graph_loss > GRAPH_TOLERANCE:
        lines.append(
            f"but the traced graph's own loss is {bisection.graph_loss:.1e} off the model's: the trace differs, not the plan"
        )
    elif not passed:
        lines.append("what differs above is rounding: see whether it grows with the depth of the model")
    return lines


def _difference(first: Difference) -> list[str]:
    """Return the first difference as lines with a name and a text each."""
    at = ", no block" if first.op else ""
    if first.block is not None:
        at = f", block {first.block} ({first.label or '-'}), stage {first.stage}"
    rows = [("first difference", f"step {first.step}{at}")]
    if first.op:
        code = ", ".join(part for part in (first.module, first.source) if part)
        rows.append(("operator", f"{first.op}: {first.target}{f' ({code})' if code else ''}"))
    rows += [("wrong", first.what), ("right", first.while_right)]
    rows.append(("strategies", ", ".join(f"{axis}: {name}" for axis, name in first.strategies)))
    rows += [("reads" if i == 0 else "", text) for i, text in enumerate(first.reads)]
    rows += [("makes" if i == 0 else "", text) for i, text in enumerate(first.makes)]
    rows += [*_mismatch(first.mismatch), ("next", first.remedy)]
    return [f"{name:<17} {text}" for name, text in rows if text]


def _mismatch(mismatch: Mismatch) -> list[tuple[str, str]]:
    """Return rows for the ranks, shape, error and elements of a mismatch."""
    ranks = ", ".join(map(str, mismatch.ranks))
    if mismatch.micro_batches:
        ranks += f" (micro-batch {', '.join(map(str, mismatch.micro_batches))})"
    shapes = f"{list(mismatch.local_shape)} on a rank, {list(mismatch.shape)} in all"
    samples = "; ".join(f"{list(s.index)}: {s.found:.6g} instead of {s.expected:.6g}" for s in mismatch.samples)
    return [("ranks", ranks), ("shape", shapes), ("error", f"{mismatch.error:.1e}"), ("elements", samples)]


def verification(report: VerifyReport) -> dict[str, Any]:
    """Return a report as JSON values.

    Wrong programs may give infinity and NaN, which JSON does not have; they are the texts ``inf`` and ``nan``.
    """
    confirmation = report.confirmation
    values: dict[str, Any] = {
        "passed": report.passed,
        "verdict": report.verdict,
        "steps": report.steps,
        "reference_losses": list(report.reference_losses),
        "bisection": None if report.bisection is None else asdict(report.bisection),
        "ranks": [_row(row) for row in report.rows],
    }
    if confirmation is not None:
        values["float64_ranks"] = [_row(row) for row in confirmation.rows]
        values |= {"alone": _row(confirmation.alone), "nudged": [_row(row) for row in confirmation.nudged]}
    finite: dict[str, Any] = pytree.tree_map_only(float, lambda x: x if math.isfinite(x) else str(x), values)
    return finite


def _row(row: RankErrors) -> dict[str, Any]:
    """Return the errors of a rank as JSON values."""
    return {**asdict(row), "losses": list(row.losses), "passed": row.passed}


def _splits(plan: Plan) -> list[str]:
    """Return lines that say how many operators and parameters the plan splits: a plan that splits nothing verifies nothing."""
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

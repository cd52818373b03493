"""What ``autopar verify`` found: a row for each rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.plan.text import micro_batch_text
from autopar.util.formatting import plain_table

if TYPE_CHECKING:
    from autopar.plan.plan import Plan
    from autopar.verification.against_one_device import Confirmation, RankErrors, VerifyReport
    from autopar.verification.first_difference import Bisection, Difference
    from autopar.verification.slices import Mismatch

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
    """The same as JSON values."""
    found = report.confirmation
    return {
        "passed": report.passed,
        "verdict": report.verdict,
        "steps": report.steps,
        "reference_losses": list(report.reference_losses),
        "bisection": None if report.bisection is None else asdict(report.bisection),
        "ranks": [_row(row) for row in report.rows],
        **({} if found is None else _confirmed(found)),
    }


def _confirmed(found: Confirmation) -> dict[str, Any]:
    return {
        "float64_ranks": [_row(row) for row in found.rows],
        "alone": _row(found.alone),
        "nudged": [_row(row) for row in found.nudged],
    }


def _row(row: RankErrors) -> dict[str, Any]:
    return {**asdict(row), "losses": list(row.losses), "passed": row.passed}


def _splits(plan: Plan) -> list[str]:
    """How much the plan splits on each axis inside the model: nothing split would verify nothing."""
    lines = []
    if plan.mesh.cp > 1:
        names = [
            name
            for block in plan.blocks
            for typing in plan.layouts[block.layout].typings
            if typing.axis == "cp"
            for name in typing.strategies
        ]
        split = sum(name not in ("invariant", "replicate") for name in names)
        lines.append(f"cp={plan.mesh.cp} splits {split} of {len(names)} operators along the sequence")
    lines += [note for note in plan.notes if note.startswith("mixtures of experts (")]
    for axis in ("tp",):
        if getattr(plan.mesh, axis) > 1:
            kinds = [
                kind
                for block in plan.blocks
                for typing in plan.layouts[block.layout].typings
                if typing.axis == axis
                for kind in typing.parameters
            ]
            lines.append(
                f"{axis}={getattr(plan.mesh, axis)} splits {sum(k.is_split for k in kinds)} of {len(kinds)} parameters"
            )
    return lines

"""What ``autopar verify`` found: a row for each rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.report.table import plain_table

if TYPE_CHECKING:
    from autopar.plan import Plan
    from autopar.runtime.verify import VerifyReport


def render_verification(report: VerifyReport, plan: Plan, *, tolerances: tuple[float, float]) -> str:
    """Relative errors by rank against one device.

    Args:
        tolerances: of losses, and of gradients and parameters.
    """
    head = ("rank", "loss", "gradient", "worst gradient", "parameter", "worst parameter", "")
    rows = [
        (
            str(row.rank),
            f"{row.loss:.1e}",
            f"{row.gradient:.1e}",
            row.gradient_name,
            f"{row.parameter:.1e}",
            row.parameter_name,
            "ok" if row.passed else "DIFFERS",
        )
        for row in report.rows
    ]
    losses = ", ".join(f"{loss:.6f}" for loss in report.reference_losses)
    schedule = "" if plan.schedule == "none" else f", {plan.schedule}"
    batches = f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size}"
    lines = [
        f"{plan.model.name} on {plan.cluster}: {plan.mesh}, ZeRO {plan.zero_stage}{schedule}, {batches}",
        *_splits(plan),
        f"relative errors against one device over {report.steps} AdamW steps (losses {losses})",
        plain_table(head, rows, left=("worst gradient", "worst parameter", ""), width=120),
    ]
    verdict = "every rank agrees" if report.passed else "the parallel program DIFFERS from one device"
    lines.append(f"{verdict} (allowed: loss {tolerances[0]:g}, gradients and parameters {tolerances[1]:g})")
    return "\n".join(lines)


def verification(report: VerifyReport) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        "passed": report.passed,
        "steps": report.steps,
        "reference_losses": list(report.reference_losses),
        "ranks": [{**asdict(row), "losses": list(row.losses), "passed": row.passed} for row in report.rows],
    }


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

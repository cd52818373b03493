"""What a run measured beside what its plan predicted, for ``autopar validate --from-run``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from autopar.plan.run_log import RunRecord
from autopar.util.text_table import plain_table
from autopar.util.units import num_bytes, seconds


def render_run(record: RunRecord) -> str:
    """A table by category, and the verdict."""
    rows = [_row("step", record.predicted_s, record.measured_s)]
    rows += [
        _row(f"  {part.name}", part.predicted_s, part.measured_s)
        for part in record.parts
        if part.predicted_s or part.measured_s
    ]
    peak = "not measured" if record.measured_bytes is None else num_bytes(record.measured_bytes)
    change = "" if record.measured_bytes is None else _change(record.predicted_bytes, record.measured_bytes)
    rows.append((f"peak memory ({record.memory_kind})", num_bytes(record.predicted_bytes), peak, change))
    low, high = record.interval_s
    lines = [
        f"{record.model} on {record.cluster}, {record.mesh}; medians of {record.num_steps} steps of {record.num_ranks} ranks",
        plain_table(("", "predicted", "measured", "change"), rows, left=("",)),
        f"interval of the step: {seconds(low)} to {seconds(high)}; between steps: {seconds(record.between_s)}",
        record.warning() or "the measured step lies inside the predicted interval",
    ]
    return "\n".join(lines)


def run_summary(record: RunRecord) -> dict[str, Any]:
    """The same as JSON values."""
    return {
        **asdict(record),
        "is_outside": record.is_outside,
        "worst": record.worst.name,
        "is_over_memory": record.is_over_memory,
    }


def _row(name: str, predicted_s: float, measured_s: float) -> tuple[str, str, str, str]:
    return name, seconds(predicted_s), seconds(measured_s), _change(predicted_s, measured_s)


def _change(predicted: float, measured: float) -> str:
    return f"{100 * (measured / predicted - 1):+.0f} %" if predicted else "-" if not measured else "new"

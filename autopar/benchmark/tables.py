"""Tables of a benchmark."""

from __future__ import annotations

from autopar.benchmark.batches import Outcome
from autopar.benchmark.score import Row
from autopar.util.text_table import plain_table
from autopar.util.units import num_bytes, seconds


def render(outcome: Outcome, *, most: int = 40) -> str:
    """The score, then plans by measured time."""
    rows = [_cells(row, outcome.score.picked) for row in outcome.rows[:most]]
    head = ("plan", "predicted", "measured", "off", "spread", "memory", "measured", "off")
    lines = [outcome.title, *filter(None, [outcome.machine]), score_line(outcome), ""]
    lines += [plain_table(head, rows, left=("plan",), width=130, indent=0)]
    if len(outcome.rows) > most:
        lines.append(f"and {len(outcome.rows) - most} more: see --json")
    lines += [f"failed: {row.name}: {_last_line(row.failure)}" for row in outcome.rows if row.failure]
    if outcome.misfits:
        lines.append(f"{len(outcome.misfits)} candidates have no plan that fits")
    return "\n".join(lines)


def score_line(outcome: Outcome) -> str:
    """Rank correlation, regret and errors in one line."""
    found = outcome.score
    return (
        f"{found.plans} plans of {outcome.num_candidates} candidates, {found.failures} failed: "
        f"rank correlation {_number(found.rho)}, regret {_number(found.regret)}, "
        f"step time off by {_percent(found.mape)} (bias {_percent(found.bias, signed=True)}), "
        f"{_percent(found.coverage)} inside the interval, memory off by {_percent(found.memory_mape)}, "
        f"spread {_percent(found.spread)}"
    )


def _cells(row: Row, picked: str) -> tuple[str, ...]:
    name = ("* " if row.key == picked else "  ") + row.name
    predicted = seconds(row.predicted_s), num_bytes(row.predicted_bytes)
    if row.measured_s is None:
        return name, predicted[0], "failed", "", "", predicted[1], "", ""
    size = row.measured_bytes or 0
    return (
        name,
        predicted[0],
        seconds(row.measured_s),
        _percent(row.predicted_s / row.measured_s - 1, signed=True),
        _percent(row.spread),
        predicted[1],
        num_bytes(size) if size else "-",
        _percent(row.predicted_bytes / size - 1, signed=True) if size else "-",
    )


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.0f} %" if signed else f"{100 * value:.0f} %"

"""The page that holds predictions against one device's measurements."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from autopar.benchmark.gpu.one_device import Comparison, false_fits
from autopar.benchmark.score import Row
from autopar.util.units import num_bytes, seconds
from autopar.validate.pages.report import percent

_HEAD = """# Predicted against measured on one device

Written by `make gpu`; do not edit. {device}. One optimizer step of every micro-batch and recompute (medians of the timed steps)
and the allocator's peak, beside predictions by the shipped profile, which was fitted to other runs, and by one of the
measured ceilings, bandwidth and operators of this device. Off: predicted over measured.

| setting | profile | plans | failed | false fits | step time off by | bias | inside the interval | memory off by | rank correlation | regret |
|---|---|---|---|---|---|---|---|---|---|---|
"""


def page(found: Sequence[Comparison], device: str) -> str:
    """Markdown: the scores, then every plan.

    Args:
        device: its name and the software, for people.
    """
    lines = [_HEAD.format(device=device).rstrip("\n")]
    for one in found:
        for name, outcome in one.outcomes.items():
            score = outcome.score
            cells = [
                one.setting.name, name, str(score.plans), str(score.failures), str(len(false_fits(outcome.rows))),
                percent(score.mape), percent(score.bias, sign=True), percent(score.coverage),
                percent(score.memory_mape), _number(score.rho), _number(score.regret),
            ]  # fmt: skip
            lines.append(_row(cells))
    lines += ["", _summary(found)]
    for one in found:
        lines += ["", f"## {one.setting.model}, {one.setting.sequence} tokens, {one.setting.precision}", ""]
        lines += _plans(one)
    return "\n".join(lines) + "\n"


def _summary(found: Sequence[Comparison]) -> str:
    """Over all settings, by profile."""
    parts = []
    for name in found[0].outcomes if found else ():
        rows = [row for one in found for row in one.outcomes[name].rows if row.measured_s is not None]
        sized = [row for row in rows if row.measured_bytes]
        if rows:
            time_off = fmean(abs(row.predicted_s / (row.measured_s or 1.0) - 1) for row in rows)
            text = f"{name}: {len(rows)} plans, step time off by {percent(time_off)}"
            if sized:
                text += f", memory by {percent(fmean(abs(_bytes_off(row)) for row in sized))}"
            parts.append(text)
    return "All settings: " + "; ".join(parts) + "."


def _plans(one: Comparison) -> list[str]:
    names = list(one.outcomes)
    head = ["plan", "measured", "spread", *(f"{name}, off" for name in names), "memory", *(f"{n}, off" for n in names)]
    lines = [_row(head), "|" + "---|" * len(head)]
    by_key = [{row.key: row for row in outcome.rows} for outcome in one.outcomes.values()]
    for row in next(iter(one.outcomes.values())).rows:
        others = [rows[row.key] for rows in by_key]
        if row.measured_s is None:
            last = next((line.strip() for line in reversed(row.failure.splitlines()) if line.strip()), "")
            lines.append(_row([row.name, f"failed: {last}".replace("|", "/"), *[""] * (len(head) - 2)]))
            continue
        size = row.measured_bytes or 0
        lines.append(
            _row(
                [
                    row.name,
                    seconds(row.measured_s),
                    percent(row.spread),
                    *(percent(other.predicted_s / row.measured_s - 1, sign=True) for other in others),
                    num_bytes(size) if size else "-",
                    *(percent(_bytes_off(other), sign=True) if size else "-" for other in others),
                ]
            )
        )
    return lines


def _bytes_off(row: Row) -> float:
    return row.predicted_bytes / row.measured_bytes - 1 if row.measured_bytes else 0.0


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

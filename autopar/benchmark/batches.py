"""Runs plans batch by batch, keeps what is measured in a file, scores the predictions of it, and prints that as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from autopar.benchmark import rank_runs as ranks
from autopar.benchmark.rank_links import LinkTask
from autopar.benchmark.rank_runs import Job
from autopar.errors import AutoparError
from autopar.hardware.link import load_json
from autopar.plan.plan import Plan
from autopar.plan.run_log import COMPUTE, OPTIMIZER, predicted_parts
from autopar.util.files import check_same, write_text
from autopar.util.formatting import num_bytes, percent, plain_table, seconds
from autopar.validate.scores import rank_correlation
from autopar.verification.rank_pool import WorkerPool

Advance = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One plan to run; ``key`` is equal for plans that run the same program, ``name`` is for people."""

    key: str
    name: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Plans of a space.

    Attributes:
        entries: to run, the picked one among them, in a shuffled order.
        picked: key of the plan that the search picks.
        num_candidates: in the space.
        misfits: names of those sampled that do not fit or are too slow to run, and why.
    """

    entries: tuple[Entry, ...]
    picked: str
    num_candidates: int
    misfits: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan, predicted and measured; seconds and bytes.

    Attributes:
        measured_s: median over all timed steps of the slowest rank's time; None where it failed.
        spread: half the distance between the quartiles, relative to the median: how far to trust it.
        layers_s: of a pass of ``autopar.measure.timers.Layers`` between its steps: how fast the machine was; 0: not taken.
        predicted_bytes, measured_bytes: peak of tensors on the fullest rank, reserves left out.
        predicted_parts, measured_parts: by category (``autopar.plan.run_log.CATEGORIES``).
        failure: why there is no measurement.
    """

    key: str
    name: str
    predicted_s: float
    interval_s: tuple[float, float]
    predicted_bytes: int
    predicted_parts: dict[str, float]
    measured_s: float | None = None
    spread: float = 0.0
    layers_s: float = 0.0
    measured_bytes: int | None = None
    measured_parts: dict[str, float] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Figures of one benchmark.

    Attributes:
        plans, failures: how many were measured, and how many could not be.
        rho: Spearman's rank correlation of predicted and measured step time; None for fewer than three plans.
        regret: measured time of the picked plan over the best measured one; None where the picked one failed.
        best, picked: keys.
        mape, bias: of the step time, relative to the measured one.
        coverage: share of measured times inside of the predicted interval.
        memory_mape: of the peak.
        spread: median of the rows' spreads.
    """

    plans: int
    failures: int
    rho: float | None
    regret: float | None
    best: str
    picked: str
    mape: float | None
    bias: float | None
    coverage: float | None
    memory_mape: float | None
    spread: float


def measured(ranks: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Step time and spread of one plan from the times of each rank, step by step.

    >>> measured([[1.0, 2.0, 3.0, 9.0, 2.0], [2.0, 1.0, 1.0, 1.0, 2.0]])[0]
    2.0
    """
    slowest = [max(step) for step in zip(*ranks, strict=True)]
    middle = median(slowest)
    if len(slowest) < 2:
        return middle, 0.0
    low, _, high = quantiles(slowest, n=4, method="inclusive")
    return middle, (high - low) / 2 / middle


def score(rows: Sequence[Row], picked: str) -> Score:
    """The figures of some rows, of which the search picked one."""
    known = [(row, row.measured_s) for row in rows if row.measured_s is not None]
    ratios = [row.predicted_s / time_s - 1 for row, time_s in known]
    chosen = next((time_s for row, time_s in known if row.key == picked), None)
    best = min(known, key=lambda pair: pair[1]) if known else None
    sizes = [(row.predicted_bytes, row.measured_bytes) for row, _ in known if row.measured_bytes]
    return Score(
        plans=len(known),
        failures=sum(bool(row.failure) for row in rows),
        rho=rank_correlation([row.predicted_s for row, _ in known], [time_s for _, time_s in known]),
        regret=chosen / best[1] if chosen is not None and best is not None else None,
        best=best[0].key if best is not None else "",
        picked=picked,
        mape=_mean([abs(ratio) for ratio in ratios]),
        bias=_mean(ratios),
        coverage=_mean([float(row.interval_s[0] <= t <= row.interval_s[1]) for row, t in known]),
        memory_mape=_mean([abs(a / b - 1) for a, b in sizes if b]),
        spread=median([row.spread for row, _ in known]) if known else 0.0,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


PRELOAD = ("torch", "transformers", "autopar.benchmark.rank_runs")
BATCH = 8
"""Plans whose steps take turns: what else the machine does then meets all of them."""

Launch = Callable[[Job | LinkTask], Sequence[Mapping[str, Mapping[str, Any]]]]
"""Runs a job on all its ranks; for each rank what :func:`autopar.benchmark.rank_runs.run` gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Rows in order of the measured time (failures last), and their score; ``title`` says what of.

    ``machine``: when the speed of the machine was measured that predictions are for.
    """

    title: str
    rows: tuple[Row, ...]
    score: Score
    num_candidates: int
    misfits: tuple[tuple[str, str], ...]
    machine: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "title": self.title,
            "machine": self.machine,
            "score": asdict(self.score),
            "num_candidates": self.num_candidates,
            "plans": [asdict(row) for row in self.rows],
            "misfits": [{"plan": name, "reason": reason} for name, reason in self.misfits],
        }


@contextmanager
def local_ranks(num_ranks: int, *, run_timeout_s: float) -> Iterator[Launch]:
    """Worker processes on this machine, new ones for each job; one that takes longer than ``run_timeout_s`` is killed.

    Torch's caches hold on to groups of earlier jobs, whose threads wake up a hundred times a second each: in its third
    job of nine plans a rank was seen to spend 8 % of a core while it slept.
    """
    with WorkerPool(num_ranks, preload=PRELOAD) as pool:

        def launch(job: Job | LinkTask) -> Sequence[Mapping[str, Mapping[str, Any]]]:
            try:
                return pool.run(ranks.run, job, timeout_s=run_timeout_s)
            finally:
                pool.close()

        yield launch


def benchmark(
    job: Job,
    choice: Choice,
    launch: Launch,
    *,
    title: str,
    results: Path | None = None,
    batch: int = BATCH,
    advance: Advance | None = None,
) -> Outcome:
    """Measures the plans of ``choice`` that ``results`` has not yet, and scores all.

    Args:
        job: with everything but the plans.
        results: a file that is read first and written after every batch, so that a run that was stopped goes on;
            measurements stay when predictions change. None: nothing is kept.
        launch: what fails for several plans is tried once more for each alone.
        batch: plans that are launched together.

    Raises:
        UsageError: the file is of another benchmark.
    """
    known = _read(results, title) if results is not None else {}
    left = [entry for entry in choice.entries if entry.key not in known]
    for done in range(0, len(left), batch):
        if advance is not None:
            advance("running plans", done, len(left))
        known |= _measure(job, left[done : done + batch], launch)
        if results is not None:
            write_text(results, json.dumps({"title": title, "measured": known}, indent=1), make_folder=True)
    rows = [_row(entry, known[entry.key], job.as_rank) for entry in choice.entries]
    rows.sort(key=lambda row: (row.measured_s is None, row.measured_s or row.predicted_s))
    return Outcome(
        title=title,
        rows=tuple(rows),
        score=score(rows, choice.picked),
        num_candidates=choice.num_candidates,
        misfits=choice.misfits,
    )


def _measure(job: Job, entries: Sequence[Entry], launch: Launch) -> dict[str, dict[str, Any]]:
    """Of each plan the median step, its spread, memory and categories, or why there is none."""
    try:
        found = launch(replace(job, plans={entry.key: entry.plan for entry in entries}))
    except AutoparError as error:
        if len(entries) == 1:
            return {entries[0].key: {"failure": str(error)[-2000:]}}
        return {key: value for entry in entries for key, value in _measure(job, [entry], launch).items()}
    return {entry.key: _joined([rank[entry.key] for rank in found]) for entry in entries}


def _joined(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    failure = next((rank["failure"] for rank in found if "failure" in rank), None)
    if failure is not None:
        return {"failure": failure}
    time_s, spread = measured([rank["seconds"] for rank in found])
    return {
        "measured_s": time_s,
        "spread": spread,
        "layers_s": fmean(rank["layers_s"] for rank in found),
        "measured_bytes": max(rank["memory_bytes"] for rank in found),
        "measured_parts": dict(found[0]["parts"]),
    }


def _row(entry: Entry, found: Mapping[str, Any], as_rank: int | None) -> Row:
    predicted = entry.plan.predicted
    whole, parts = predicted.step_time_s, predicted_parts(predicted.breakdown)
    num_bytes = max(m.total - m.reserved for m in predicted.memory)
    if as_rank is not None:  # collectives of fakes take no time, and nobody waits
        parts = {name: parts[name] for name in (COMPUTE, OPTIMIZER)}
    time_s = whole if as_rank is None else sum(parts.values())
    low, high = (time_s * edge / whole for edge in predicted.step_time_interval_s)
    return Row(
        key=entry.key,
        name=entry.name,
        predicted_s=time_s,
        interval_s=(low, high),
        predicted_bytes=num_bytes,
        predicted_parts=parts,
        **found,
    )


def _read(path: Path, title: str) -> dict[str, dict[str, Any]]:
    if not path.is_file():
        return {}
    data = load_json(path)
    what, fix = "The benchmark of this file of results", "Name another file, or remove this one"
    check_same(what, path, expected=title, got=data.get("title"), fix=fix)
    return dict(data["measured"])


# --- Tables of a benchmark.

MOST_SHOWN = 40
_percent = partial(percent, digits=0)


def render(outcome: Outcome) -> str:
    """The score, then plans by measured time."""
    rows = [_cells(row, outcome.score.picked) for row in outcome.rows[:MOST_SHOWN]]
    head = ("plan", "predicted", "measured", "off", "spread", "memory", "measured", "off")
    lines = [outcome.title, *filter(None, [outcome.machine]), score_line(outcome), ""]
    lines += [plain_table(head, rows, left=("plan",), width=130, indent=0)]
    if len(outcome.rows) > MOST_SHOWN:
        lines.append(f"and {len(outcome.rows) - MOST_SHOWN} more: see --json")
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
        f"step time off by {_percent(found.mape)} (bias {_percent(found.bias, sign=True)}), "
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
        _percent(row.predicted_s / row.measured_s - 1, sign=True),
        _percent(row.spread),
        predicted[1],
        num_bytes(size) if size else "-",
        _percent(row.predicted_bytes / size - 1, sign=True) if size else "-",
    )


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

"""Measurement of plans in batches, kept in a file; scores of their predictions; and the result as a table."""

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
from autopar.benchmark.rank_runs import Job, LinkTask
from autopar.errors import AutoparError
from autopar.hardware.link import load_json
from autopar.plan.plan import Plan
from autopar.plan.run_log import COMPUTE, OPTIMIZER, predicted_parts
from autopar.util.files import check_same, write_text
from autopar.util.formatting import num_bytes, percent, plain_table, seconds
from autopar.util.toml import Table
from autopar.validate.scores import rank_correlation
from autopar.verification.rank_pool import WorkerPool

Advance = Callable[[str, int, int], None]
"""Takes what is done, the number done and the total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A plan to run. Plans that run the same program have equal keys; the name is for texts."""

    key: str
    name: str
    plan: Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The plans of a space that are run.

    Attributes:
        entries: the plans, the picked one among them, in a shuffled order.
        picked: key of the plan that the search picks.
        num_candidates: candidates of the space.
        misfits: names of sampled candidates that do not fit or are too slow to run, with the reasons.
    """

    entries: tuple[Entry, ...]
    picked: str
    num_candidates: int
    misfits: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One plan with its prediction and measurement, in seconds and bytes.

    Attributes:
        key, name: as in :class:`Entry`.
        predicted_s, interval_s: the predicted step time and its interval.
        measured_s: the median over timed steps of the slowest rank's time; None if the plan failed.
        spread: half the distance of the quartiles over the median.
        layers_s: seconds of a pass of ``autopar.measure.timers.Layers`` between steps, which shows the speed of the machine; 0 if not
            measured.
        predicted_bytes, measured_bytes: peak of tensors on the rank with the most, without reserves.
        predicted_parts, measured_parts: seconds by category (``autopar.plan.run_log.CATEGORIES``).
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
        plans, failures: plans that were measured, and plans that failed.
        rho: Spearman's rank correlation of predicted and measured step times; None for fewer than three plans.
        regret: measured time of the picked plan over the least measured time, less 1; None if the picked plan failed.
        best, picked: keys.
        mape, bias: mean absolute and mean signed error of the step time, relative to the measured one.
        coverage: share of measured times inside the predicted interval.
        memory_mape: mean absolute relative error of the peak.
        spread: median of the spreads of rows.
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
    """Return the step time and spread of one plan, given the times of its steps on each rank.

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
    """Return the figures of some rows, of which the search picked one."""
    timed = [(row, row.measured_s) for row in rows if row.measured_s is not None]
    ratios = [row.predicted_s / time_s - 1 for row, time_s in timed]
    chosen = next((time_s for row, time_s in timed if row.key == picked), None)
    best = min(timed, key=lambda pair: pair[1]) if timed else None
    sizes = [(row.predicted_bytes, row.measured_bytes) for row, _ in timed if row.measured_bytes]
    return Score(
        plans=len(timed),
        failures=sum(bool(row.failure) for row in rows),
        rho=rank_correlation([row.predicted_s for row, _ in timed], [time_s for _, time_s in timed]),
        regret=chosen / best[1] - 1 if chosen is not None and best is not None else None,
        best=best[0].key if best is not None else "",
        picked=picked,
        mape=_mean([abs(ratio) for ratio in ratios]),
        bias=_mean(ratios),
        coverage=_mean([float(row.interval_s[0] <= t <= row.interval_s[1]) for row, t in timed]),
        memory_mape=_mean([abs(a / b - 1) for a, b in sizes if b]),
        spread=median([row.spread for row, _ in timed]) if timed else 0.0,
    )


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


PRELOAD = ("torch", "transformers", "autopar.benchmark.rank_runs")
BATCH = 8
"""Plans whose steps take turns, so that other load of the machine affects all of them."""

Launch = Callable[[Job | LinkTask], Sequence[Mapping[str, Mapping[str, Any]]]]
"""Runs a job on all its ranks, and return what :func:`autopar.benchmark.rank_runs.run` returns on each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a benchmark.

    Attributes:
        title: the model and options of the benchmark.
        rows: rows by measured time, failures last.
        score: their score.
        num_candidates, misfits: as in :class:`Choice`.
        machine: says when the speed of the machine was measured that predictions assume.
    """

    title: str
    rows: tuple[Row, ...]
    score: Score
    num_candidates: int
    misfits: tuple[tuple[str, str], ...]
    machine: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
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
    """Give worker processes on this machine; a job that exceeds ``run_timeout_s`` is killed."""
    with WorkerPool(num_ranks, preload=PRELOAD) as pool:
        yield lambda job: pool.run(ranks.run, job, timeout_s=run_timeout_s)


def benchmark(
    job: Job,
    choice: Choice,
    launch: Launch,
    *,
    title: str,
    results: Path | None = None,
    batch: int = BATCH,
    advance: Advance = lambda *_: None,
) -> Outcome:
    """Measure the plans of ``choice`` that ``results`` does not have, and score all.

    Args:
        job: a job without plans.
        choice: the plans.
        launch: runs a job. If a batch fails, each of its plans is tried once more alone.
        title: the title in the file.
        results: a file that is read first and written after every batch, so that an interrupted run continues. Measurements stay valid when
            predictions change. None keeps nothing.
        batch: plans that are launched together.
        advance: called with the progress.

    Raises:
        UsageError: the file is of another benchmark.
    """
    records = _read(results, title) if results is not None else {}
    missing = [entry for entry in choice.entries if entry.key not in records]
    for done in range(0, len(missing), batch):
        advance("running plans", done, len(missing))
        records |= _measure(job, missing[done : done + batch], launch)
        if results is not None:
            write_text(results, json.dumps({"title": title, "measured": records}, indent=1), make_folder=True)
    rows = [_row(entry, records[entry.key], job.as_rank) for entry in choice.entries]
    rows.sort(key=lambda row: (row.measured_s is None, row.measured_s or row.predicted_s))
    return Outcome(
        title=title,
        rows=tuple(rows),
        score=score(rows, choice.picked),
        num_candidates=choice.num_candidates,
        misfits=choice.misfits,
    )


def _measure(job: Job, entries: Sequence[Entry], launch: Launch) -> dict[str, dict[str, Any]]:
    """Return the median step, its spread, memory and categories of each plan, or why there is none."""
    try:
        by_rank = launch(replace(job, plans={entry.key: entry.plan for entry in entries}))
    except AutoparError as error:
        if len(entries) == 1:
            return {entries[0].key: {"failure": str(error)[-2000:]}}
        return {key: value for entry in entries for key, value in _measure(job, [entry], launch).items()}
    return {entry.key: _joined([rank[entry.key] for rank in by_rank]) for entry in entries}


def _joined(by_rank: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the measurement of a plan from those of its ranks."""
    failure = next((rank["failure"] for rank in by_rank if "failure" in rank), None)
    if failure is not None:
        return {"failure": failure}
    time_s, spread = measured([rank["seconds"] for rank in by_rank])
    return {
        "measured_s": time_s,
        "spread": spread,
        "layers_s": fmean(rank["layers_s"] for rank in by_rank),
        "measured_bytes": max(rank["memory_bytes"] for rank in by_rank),
        "measured_parts": dict(by_rank[0]["parts"]),
    }


def _row(entry: Entry, measurement: Mapping[str, Any], as_rank: int | None) -> Row:
    """Return the row of a plan with its measurement."""
    predicted = entry.plan.predicted
    step_time_s, parts = predicted.step_time_s, predicted_parts(predicted.breakdown)
    num_bytes = max(m.total - m.reserved for m in predicted.memory)
    if as_rank is not None:  # in a fake group collectives take no time, and nothing waits
        parts = {name: parts[name] for name in (COMPUTE, OPTIMIZER)}
    time_s = step_time_s if as_rank is None else sum(parts.values())
    low, high = (time_s * edge / step_time_s for edge in predicted.step_time_interval_s)
    return Row(
        key=entry.key,
        name=entry.name,
        predicted_s=time_s,
        interval_s=(low, high),
        predicted_bytes=num_bytes,
        predicted_parts=parts,
        **measurement,
    )


def _read(path: Path, title: str) -> dict[str, dict[str, Any]]:
    """Return the measurements in a file; none if it does not exist."""
    if not path.is_file():
        return {}
    data = load_json(path)
    what, fix = "The benchmark of this file of results", "Name another file, or remove this one"
    check_same(what, path, expected=title, got=data.get("title"), fix=fix)
    Table(data, file=str(path)).table("measured")  # raises where it is none
    return dict(data["measured"])


# --- the result as a table

MOST_SHOWN = 40
_percent = partial(percent, digits=0)


def render(outcome: Outcome) -> str:
    """Return the score, then plans by measured time."""
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
    """Return rank correlation, regret and errors in one line."""
    score = outcome.score
    return (
        f"{score.plans} plans of {outcome.num_candidates} candidates, {score.failures} failed: "
        f"rank correlation {'-' if score.rho is None else f'{score.rho:.3f}'}, regret {percent(score.regret)}, "
        f"step time off by {_percent(score.mape)} (bias {_percent(score.bias, sign=True)}), "
        f"{_percent(score.coverage)} inside the interval, memory off by {_percent(score.memory_mape)}, "
        f"spread {_percent(score.spread)}"
    )


def _cells(row: Row, picked: str) -> tuple[str, ...]:
    """Return a row of the table; the picked plan has a star."""
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

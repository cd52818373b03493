"""Runs plans batch by batch, keeps what is measured in a file, scores it, and prints that as a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from autopar.benchmark import rank_runs as ranks
from autopar.benchmark.chosen_plans import Advance, Choice, Entry
from autopar.benchmark.rank_links import LinkTask
from autopar.benchmark.rank_runs import Job
from autopar.benchmark.score import Row, Score, measured, score
from autopar.errors import AutoparError, UsageError
from autopar.plan.run_log import COMPUTE, OPTIMIZER, predicted_parts
from autopar.util.files import write_text
from autopar.util.formatting import num_bytes, plain_table, seconds
from autopar.verification.rank_pool import WorkerPool

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
            "score": self.score.to_dict(),
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
        batch: plans that take turns; one whose batch fails is tried once more alone.

    Raises:
        UsageError: the file is of another benchmark.
    """
    known = _read(results, title) if results is not None else {}
    left = [entry for entry in choice.entries if entry.key not in known]
    batches = [left[i : i + batch] for i in range(0, len(left), batch)]
    for i, entries in enumerate(batches):
        if advance is not None:
            advance("running plans", i * batch, len(left))
        known |= _measure(job, entries, launch)
        if results is not None:
            _write(results, title, known)
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
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("title") != title:
        raise UsageError.mismatch(
            "The benchmark of this file of results",
            where=str(path),
            expected=repr(title),
            got=repr(data.get("title")),
            fix="Name another file, or remove this one",
        )
    return dict(data["measured"])


def _write(path: Path, title: str, known: Mapping[str, Any]) -> None:
    write_text(path, json.dumps({"title": title, "measured": known}, indent=1), make_folder=True)


# --- Tables of a benchmark.


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

"""``docs/evidence/blind.md``: published runs that no fit has seen, in six tests.

``python -m tools.evidence.blind TEST ...`` predicts tests again (first to sixth), keeps their figures in ``tests/data/blind_since.json``
and writes the page of all of them; without a TEST it writes the page from the figures that are kept.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from autopar.cli.options import progress
from autopar.errors import UsageError
from autopar.util.formatting import percent
from autopar.validate.runs import Run
from autopar.validate.scores import Outcome, Score, evaluate, failures, validated, worst
from autopar.validate.session import Session
from tools.revision import revision

ROOT = Path(__file__).parents[2]
DATA, PAGE = ROOT / "tests" / "data", ROOT / "docs" / "evidence" / "blind.md"
TESTS = {
    "first": "blind_before.json",
    "second": "blind_before_2.json",
    "third": "blind_before_3.json",
    "fourth": "blind_before_4.json",
    "fifth": "blind_before_5.json",
    "sixth": "blind_before_6.json",
}
"""What each test's runs were predicted to take before anything was changed for them."""
SINCE, NOTES = "blind_since.json", "blind_notes.md"
"""The figures of the latest run of each test, and what was changed and is still missed, in words."""

_HEAD = """# Blind tests

Written by `python -m tools.evidence.blind TEST`, a test at a time; do not edit.
The tests were run at these revisions: {revisions}. Code that is newer than these may predict other times.

Each test takes published runs that are neither in the table of [accuracy.md](accuracy.md) nor in an earlier test, and predicts
them by the profiles and the model as they were (*before*). Then causes were looked for wherever a source was missed by more than
15 %, and the same runs were predicted again (*since*); that is no blind test any more, because people had seen the first.
*Names hidden* predicts the runs as if nobody had described their source: this is what your own runs get. Nothing was fitted to
these runs. What the runs are and how their columns were derived is in [tests/data/README.md](../../tests/data/README.md).

MAPE is the mean absolute error of predicted step times, bias the mean signed error, *scaled* the error after one factor for each
source and release, *inside* the measured times that lie inside of the predicted interval, memory the mean absolute error of
peak memory over the runs that state it.

"""
_HEADER = ("test", "source", "runs", "MAPE before", "MAPE", "bias", "scaled", "inside", "memory before", "memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What came of one test when it was run last.

    Attributes:
        revision: of the code that ran.
        since, hidden: scores by source, and of all runs with their names hidden.
        worst, failed: single rows in words.
    """

    revision: str
    since: tuple[Score, ...]
    hidden: Score
    worst: tuple[str, ...]
    failed: tuple[str, ...] = ()


def read_before(path: Path) -> tuple[Score, ...]:
    """The scores that an earlier ``autopar validate --json`` printed; older releases called them ``scores``.

    Raises:
        UsageError: the file has none.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return tuple(Score(**score) for score in found["summary" if "summary" in found else "scores"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "This is not what 'autopar validate --json' printed of these runs",
            where=str(path),
            got=str(error),
            fix="Print it with the release to compare with",
        ) from error


def hidden(runs: Sequence[Run]) -> tuple[Run, ...]:
    """The runs as if their sources were not known: each release has a number for its name."""
    numbers = {release: i + 1 for i, release in enumerate(dict.fromkeys(run.release for run in runs))}
    return tuple(replace(run, source=f"unnamed {numbers[run.release]}", name=f"row {run.line}") for run in runs)


def figures(session: Session, outcome: Outcome, progress: Callable[[str, int, int], None] = lambda *_: None) -> Figures:
    """The figures of one test; lays out and predicts its runs once more with their names hidden."""
    unnamed = evaluate(Session(hidden(session.runs), place=session.place, progress=progress))
    return Figures(
        revision=revision(),
        since=tuple(outcome.scores),
        hidden=unnamed.scores[-1],
        worst=tuple(worst(session.runs, outcome.predictions)),
        failed=tuple(failures(outcome.failed, len(session.runs) + len(outcome.failed))),
    )


def read_figures(folder: Path) -> dict[str, Figures]:
    """The figures that are kept, by test."""
    found: dict[str, dict[str, Any]] = json.loads((folder / SINCE).read_text(encoding="utf-8"))
    return {
        name: Figures(
            revision=one["revision"],
            since=tuple(Score(**score) for score in one["since"]),
            hidden=Score(**one["hidden"]),
            worst=tuple(one["worst"]),
            failed=tuple(one.get("failed", ())),
        )
        for name, one in found.items()
    }


def write_figures(folder: Path, kept: Mapping[str, Figures]) -> None:
    """Keep the figures of all tests."""
    text = json.dumps({name: asdict(one) for name, one in kept.items()}, indent=1)
    (folder / SINCE).write_text(text + "\n", encoding="utf-8")


def page(folder: Path, kept: Mapping[str, Figures]) -> str:
    """The page of all tests: one table, then the words and the worst rows of each test.

    Args:
        folder: that has the earlier predictions and the words.
        kept: the figures of each test.
    """
    rows = [row for name, one in kept.items() for row in _rows(name, read_before(folder / TESTS[name]), one)]
    table = ["| " + " | ".join(_HEADER) + " |", "|" + " --- |" * len(_HEADER)]
    table += ["| " + " | ".join(row) + " |" for row in rows]
    notes = (folder / NOTES).read_text(encoding="utf-8").strip()
    for name, one in kept.items():
        missed = ["### Single rows, missed most", "", *(f"- {line}" for line in one.worst)]
        if one.failed:
            missed += ["", *one.failed]
        notes = _after(notes, name, "\n".join(missed))
    revisions = ", ".join(f"{name} {one.revision}" for name, one in kept.items())
    return _HEAD.format(revisions=revisions) + "\n".join(table) + "\n\n" + notes + "\n"


def _after(notes: str, name: str, text: str) -> str:
    """The words with a text at the end of the section of one test."""
    begin = notes.index(f"## {name.capitalize()} test")
    end = notes.find("\n## ", begin)
    end = len(notes) if end < 0 else end
    return notes[:end].rstrip() + "\n\n" + text + "\n" + notes[end:]


def _rows(name: str, before: Sequence[Score], one: Figures) -> list[tuple[str, ...]]:
    """One row for each publisher, all of them, and all with names hidden; releases of a publisher are left out."""
    earlier = {score.name: score for score in before}
    names = [score.name for score in one.since]
    shown = [s for s in one.since if not any(s.name.startswith(f"{other} (") for other in names)]
    rows = [_row(name, score.name, earlier.get(score.name), score) for score in shown]
    return [*rows, _row(name, "all, names hidden", None, one.hidden)]


def _row(test: str, source: str, before: Score | None, score: Score) -> tuple[str, ...]:
    return (
        test,
        f"**{source}**" if source.startswith("all") else source,
        str(score.runs),
        percent(before.mape) if before else "",
        percent(score.mape),
        percent(score.bias, sign=True),
        percent(score.scaled_mape),
        percent(score.coverage),
        percent(before.memory_mape) if before and before.memory_runs else "",
        f"{percent(score.memory_mape)} of {score.memory_runs}" if score.memory_runs else "",
    )


def again(name: str) -> Figures:
    """The figures of a test that is predicted now."""
    table = DATA / TESTS[name].replace("before", "runs").replace(".json", ".csv")
    with progress("reading runs") as advance:
        found = validated([table], progress=advance)
        return figures(found.session, found.outcome, advance)


def main(names: Sequence[str]) -> None:
    """Predict these tests again, and write the page.

    Raises:
        UsageError: there is no such test.
    """
    for name in names:
        if name not in TESTS:
            raise UsageError.unknown("blind test", name, TESTS)
    kept = read_figures(DATA) | {name: again(name) for name in names}
    write_figures(DATA, kept)
    PAGE.write_text(page(DATA, kept), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

"""``docs/evidence/accuracy.md``: ``python -m tools.evidence.accuracy RUNS.csv`` predicts each source by what the others tell.

What is said in words beside the figures stands in ``accuracy_notes.md``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from autopar.cli.options import progress
from autopar.util.formatting import percent
from autopar.validate.parameters import PARAMETERS
from autopar.validate.scores import Outcome, Score, failures, markdown, score, scored, validated, worst
from autopar.validate.session import LEAST_SEEN, Session
from tools.evidence.noise import bounds_table
from tools.revision import revision

ROOT = Path(__file__).parents[2]
PAGE, NOTES = ROOT / "docs" / "evidence" / "accuracy.md", Path(__file__).parent / "accuracy_notes.md"

ERRATA = {
    ("BigScience BLOOM A100 topology benchmarks", "bloom-181B#61"): (
        "its source printed 120.29 s and 134.02 TFLOP/s where the same table has 134.02 s and 120.29 TFLOP/s for the same layout with the\n"
        "same memory (chronicles-prequel.md, 'Trying with ZeRO_STAGE=0/1' and '48 node contenders', both of 21 February 2022)"
    ),
}
"""Rows that their source printed wrong, by publisher and name, with what tells so; they stay in the table as they are."""


def document(session: Session, outcome: Outcome, *, leave_one_out: bool) -> str:
    """The page."""
    how = (
        "Each source was predicted with parameters fitted on the other sources alone (all releases of a publisher are left\n"
        "out together)"
        if leave_one_out
        else "Predicted with the profiles as they are"
    )
    scaled = "; ".join(f"{name} {1 / factor:.3f}" for name, factor in outcome.scales.items())
    words = (
        f"{how}; `scaled`: after one software-efficiency factor for each source and release. Pairs are plans of one\n"
        "model, batch and precision that differ by over 2 % measured; regret is the measured time of the plan predicted\n"
        "best over the best measured. Memory: mean error (bias) where it was measured. A false fit ran out of memory\n"
        "although predicted to fit; a false misfit ran although called impossible."
    )
    lines = [
        "# Accuracy of predictions",
        f"Written by `python -m tools.evidence.accuracy RUNS.csv`; do not edit. Run at revision {revision()}.",
        "How runs that nobody had seen are predicted, before and after: [blind.md](blind.md).",
        "## Predicted and measured",
        words,
        markdown(outcome.scores),
        f"Factors (predicted over measured time, median): {scaled}.",
        *_without_slowdowns(session, outcome),
        *_without_errata(session, outcome),
        "## What is missed most",
        "\n".join(f"- {line}" for line in worst(session.runs, outcome.predictions)),
    ]
    missing = failures(outcome.failed, len(session.runs) + len(outcome.failed))
    if missing:
        lines += ["## Rows without a prediction", missing[0], "\n".join(missing[1:])]
    notes, bounds = sections(NOTES.read_text(encoding="utf-8")), bounds_table(session.runs)
    if bounds:
        lines += [notes["What noise leaves"], bounds]
    lines.append(notes["What was chosen with the table in view"])
    if outcome.fitted:
        lines += ["## Parameters", _parameters(session, outcome)]
    lines.append(notes["The table of runs"])
    return "\n\n".join(lines) + "\n"


def sections(text: str) -> dict[str, str]:
    """The parts of a Markdown text with their headings, by these."""
    parts = [part.strip() for part in text.split("## ") if part.strip()]
    return {part.splitlines()[0]: f"## {part}" for part in parts}


def unslowed(session: Session, outcome: Outcome) -> list[Score]:
    """Scores of the runs that their site slows, of their publishers and of all, as predicted without that; same fits."""
    plain = session.under({})
    plain.sites = tuple(replace(site, slowdown=0.0) for site in session.sites)
    predictions = list(outcome.predictions)
    slowed = [i for i, site in enumerate(session.sites) if site.slowdown]
    for i in slowed:  # not divided: equal plans are to stay equal
        (predictions[i],) = plain.predictions(outcome.fitted.get(session.runs[i].publisher), [i])
    names = {name for i in slowed for name in (session.runs[i].publisher, session.runs[i].release)} | {"all"}
    return [found for found in scored(session, predictions) if found.name in names]


def _without_slowdowns(session: Session, outcome: Outcome) -> list[str]:
    """The same figures without what sources say of how much slower some of their runs were."""
    stated = {(run.release, site.slowdown) for run, site in zip(session.runs, session.sites, strict=True)}
    texts = [f"{name}, {percent(slowdown)}" for name, slowdown in sorted(stated) if slowdown]
    if not texts:
        return []
    words = (
        f"Some sources state by how much slower their machines were (`slowdown` in `profiles/sites`: {'; '.join(texts)}).\n"
        "What they state they saw in their runs, these among them. Without it the same parameters give:"
    )
    return [words, markdown(unslowed(session, outcome))]


def without_errata(session: Session, outcome: Outcome) -> list[Score]:
    """Scores of publishers and releases with rows in :data:`ERRATA`, without these rows; same fits."""
    wrong = [i for i, run in enumerate(session.runs) if (run.publisher, run.name) in ERRATA]
    names = {name for i in wrong for name in (session.runs[i].publisher, session.runs[i].release)}
    found = []
    for name in dict.fromkeys(name for run in session.runs for name in (run.publisher, run.release)):
        rows = [
            i
            for i, run in enumerate(session.runs)
            if name in names and name in (run.publisher, run.release) and i not in wrong
        ]
        if rows:
            widths = [session.profiles[session.runs[i].device].device.memory_uncertainty for i in rows]
            found.append(score(name, [session.runs[i] for i in rows], [outcome.predictions[i] for i in rows], widths))
    return found


def _without_errata(session: Session, outcome: Outcome) -> list[str]:
    """The same figures without rows that their source printed wrong."""
    told = [(run, ERRATA[run.publisher, run.name]) for run in session.runs if (run.publisher, run.name) in ERRATA]
    if not told:
        return []
    texts = "; ".join(f"{run.name} (row {run.line}): {text}" for run, text in told)
    words = f"All figures above have these rows as they were printed: {texts}.\nWithout them (fits as above):"
    return [words, markdown(without_errata(session, outcome))]


def _parameters(session: Session, outcome: Outcome) -> str:
    """What each fit gave, one column for each source left out."""
    groups = list(outcome.fitted)
    used = {run.device for run in session.runs}
    known = [p for p in PARAMETERS if p.key in session.start and used]
    head = "| parameter | bounds | runs that see it | prior | " + " | ".join(f"without {g}" for g in groups) + " |"
    lines = [head, "|" + "---|" * (4 + len(groups))]
    for p in known:
        seen = sum(session.touches(p, i) for i in session.timed)
        cells = " | ".join(f"{outcome.fitted[g][p.key]:.3g}" for g in groups)
        lines.append(
            f"| `{p.key}`: {p.meaning} | {p.lower:g} to {p.upper:g} | {seen} | {session.start[p.key]:.3g} | {cells} |"
        )
    note = f"A parameter that fewer than {LEAST_SEEN} runs of a fit see stays at its prior."
    return "\n".join(lines) + f"\n\n{note} Errors of {percent(0.046)} separate equal runs in the table."


def main(files: list[str]) -> None:
    """Write the page of these tables."""
    with progress("reading runs") as advance:
        found = validated([Path(file) for file in files], leave_one_out=True, progress=advance)
    PAGE.write_text(document(found.session, found.outcome, leave_one_out=True), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

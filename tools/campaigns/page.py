"""``docs/evidence/models.md`` from what :mod:`tools.campaigns.models` found."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autopar.verification.results import DOUBLE_TENSOR_TOLERANCE, LOSS_TOLERANCE, TENSOR_TOLERANCE
from tools.campaigns.models import EXPERT_LAYOUTS, LAYOUTS, SEQUENCE_LAYOUTS, Result, Row
from tools.revision import revision

_HEAD = """# Model families

Written by `python -m tools.campaigns.models`; do not edit. Run at revision {revision}. Each family at a small size, traced with a padding mask
where it knows one, is searched as `autopar verify MODEL --cluster cpu:1x4` does (float32, links as if free), run on
four local ranks for three AdamW steps and compared with the same model on one device. The number is the largest
relative error on any rank of losses, first gradients and parameters in the end; the limits are {loss:g} for losses and
{tensor:g} for the others. Where float32 is past a limit, the same plan is run in float64 against one device in
float64, where all errors must stay below {double:g}, and one device alone is compared between the two: `f64` stands
before the largest error in float64. A layout leaves open what its name does not say; the meshes stand below.
{count} layouts of {families} families took {minutes:.0f} minutes on two busy cores.

"""
_WORDS = (
    (r"cp divides the sequence of (\d+)", r"\1 tokens"),
    (r"attention is written out", "attention is written out"),
    (r"cp divides (\d+) heads", r"\1 heads"),
)
"""What an error is called in a cell; the whole of it stands below."""


def page(rows: Mapping[str, Row]) -> str:
    """The tables, what does not work and why, and the operators that only replicate."""
    results = [result for row in rows.values() for result in row.results.values()]
    minutes = sum(row.wall_s for row in rows.values()) / 60
    head = _HEAD.format(
        revision=revision(),
        loss=LOSS_TOLERANCE,
        tensor=TENSOR_TOLERANCE,
        double=DOUBLE_TENSOR_TOLERANCE,
        count=len(results),
        families=len(rows),
        minutes=max(minutes, 1),
    )
    lines = [head, *_table(rows, (*LAYOUTS, *EXPERT_LAYOUTS))]
    lines += [
        "\n## Context parallelism\n\nModels with attention, by the kind of attention over a split sequence.\n\n",
        *_table({name: row for name, row in rows.items() if row.has_attention}, tuple(SEQUENCE_LAYOUTS)),
        "\n## Operators that split\n\n",
        *_operators(rows),
        "\n## Rounding\n\n",
        *(_roundings(rows) or ["Nothing is past a limit.\n"]),
        "\n## What does not work\n\n",
        *(_failures(rows) or ["Everything in the tables works.\n"]),
        "\n## Meshes\n\n",
        *(f"- {name}: {_meshes(row)}\n" for name, row in rows.items()),
        "\n## Descriptions\n\n",
        *(f"- {name}: `{row.spec}`\n" for name, row in rows.items()),
    ]
    return "".join(lines)


def _table(rows: Mapping[str, Row], layouts: tuple[str, ...]) -> list[str]:
    lines = [f"| family | {' | '.join(layouts)} |\n", "|---" * (len(layouts) + 1) + "|\n"]
    for name, row in rows.items():
        cells = [_cell(row.results[layout]) if layout in row.results else "" for layout in layouts]
        lines.append(f"| {name} | {' | '.join(cells)} |\n")
    return lines


def _cell(result: Result) -> str:
    if result.error:
        found = next((re.sub(".*?" + p + ".*", w, result.error) for p, w in _WORDS if re.search(p, result.error)), "")
        return f"no: {found}" if found else "no"
    numbers = f"{result.loss:.0e}, {result.gradient:.0e}, {result.parameter:.0e}"
    if result.is_within:
        return numbers
    return f"{numbers}; f64 {result.double:.0e}" if result.passed else f"**wrong** {numbers}"


def _operators(rows: Mapping[str, Row]) -> list[str]:
    split, total = sum(row.num_split for row in rows.values()), sum(row.num_operators for row in rows.values())
    share = 100 * split / max(total, 1)
    lines = [f"Of all {total} live operators {split} ({share:.1f}%) have a strategy that splits them. The others:\n\n"]
    for name, row in rows.items():
        others = ", ".join(f"`{target}` ({count})" for target, count in row.whole.items()) or "none"
        lines.append(f"- {name}: {row.num_split} of {row.num_operators}; {others}\n")
    reasons = sorted({target for row in rows.values() for target in row.whole})
    lines += ["\n"] + [f"`{target}`: {_REASONS.get(target, 'no rule')}.\n" for target in reasons]
    return lines


_REASONS = {"aten.div.Tensor": "the loss, one number, divided by the count of labels: there is nothing to split"}


def _roundings(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        for layout, found in row.results.items():
            if not found.error and not found.is_within:
                numbers = f"{found.loss:.0e}, {found.gradient:.0e}, {found.parameter:.0e}"
                lines.append(
                    f"- {name}, {layout}: {numbers} in float32, where one device alone is off by {found.alone} from "
                    f"itself in float64. {found.verdict[:1].upper() + found.verdict[1:]}.\n"
                )
    return lines


def _failures(rows: Mapping[str, Row]) -> list[str]:
    lines = []
    for name, row in rows.items():
        reasons: dict[str, list[str]] = {}
        for layout, result in row.results.items():
            if result.error:
                reasons.setdefault(result.error, []).append(layout)
        lines += [f"- {name}, {', '.join(layouts)}: {reason}\n" for reason, layouts in reasons.items()]
    return lines


def _meshes(row: Row) -> str:
    meshes: dict[str, list[str]] = {}
    for layout, result in row.results.items():
        if not result.error:
            meshes.setdefault(result.mesh, []).append(layout)
    return "; ".join(f"{', '.join(layouts)}: {mesh}" for mesh, layouts in meshes.items()) or "none"

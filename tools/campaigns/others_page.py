"""``docs/evidence/families.md``: written from what :mod:`tools.campaigns.others` found, and read back from it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.graph.graph import Graph
from autopar.plan.plan import Plan
from autopar.verification.results import DOUBLE_TENSOR_TOLERANCE, LOSS_TOLERANCE, TENSOR_TOLERANCE
from tools.campaigns.models import SEQUENCE_LAYOUTS, Result
from tools.campaigns.types import TYPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "evidence" / "families.md"
LIMIT_S, HANG_S, VERIFY_LIMIT_S = 120.0, 900.0, 600.0
"""Seconds of work of a process that plans, and of the clock for it and for one comparison."""
USED = ("tp2 x dp2", "pp2 x tp2", "pp2 x dp2")


@dataclass(slots=True)
class Outcome:
    """What came of one type: a refusal, or the plans by layout (or what was said instead of one).

    Attributes:
        traceback: of an error that is not autopar's own, which is a defect.
        whole: targets of operators that no strategy splits.
        notes: of the plans: opaque regions, samples that meet.
        wall_s: seconds that it all took.
        version: the commit that it ran at.
    """

    error: str = ""
    traceback: str = ""
    graph: Graph | None = None
    plans: dict[str, Plan | str] = field(default_factory=dict)
    num_operators: int = 0
    num_split: int = 0
    whole: tuple[str, ...] = ()
    results: dict[str, Result] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    wall_s: float = 0.0
    version: str = ""


def spec_of(kind: str) -> str:
    """The MODEL description."""
    return f"hf:{kind}?{TYPES[kind]}"


_HEAD = """# Further model types

Written by `python -m tools.campaigns.others --results FILE`; do not edit. Model types of transformers besides those of
[models.md](models.md), at small sizes, each planned under three layouts and verified on four local ranks in the same
way: the largest relative error of losses, of the first gradients, and of the parameters after three AdamW steps; the
limits are {loss:g} for losses and {tensor:g} for the others. Where float32 is past a limit the same plan is run in
float64 against one device in float64, where all errors must stay below {double:g}: `f64` stands before the largest.
A type or layout that is refused says why under the table. Tracing and planning may take {limit:.0f} s of a core, the
comparison of one layout {verify:.0f} s of the clock.

{summary}

| type | {layouts} | operators that split |
|---|{bars}---|
"""


def cell(found: Outcome, layout: str) -> str:
    """What the table says of one layout."""
    result = found.results.get(layout)
    if result is None:
        plan = found.plans.get(layout)
        return "refused" if found.error or not isinstance(plan, Plan) else f"planned ({plan.mesh})"
    if result.error:
        return "refused"
    numbers = f"{result.loss:.0e}, {result.gradient:.0e}, {result.parameter:.0e}"
    if result.is_within:
        return numbers
    return f"{numbers}; f64 {result.double:.0e}" if result.passed else f"**wrong** {numbers}"


def remarks(kind: str, found: Outcome, layouts: Sequence[str] = USED) -> list[str]:
    """Refusals, each once, and what is past the limits."""
    lines = [f"- {kind}: {found.error}\n"] if found.error else []
    reasons: dict[str, list[str]] = {}
    for layout in layouts:
        plan, result = found.plans.get(layout), found.results.get(layout)
        said_here = plan if isinstance(plan, str) else result.error if result else ""
        if result is not None and not result.error and not result.passed:
            said_here = result.verdict
        if said_here:
            reasons.setdefault(said_here, []).append(layout)
    lines += [f"- {kind}, {', '.join(where)}: {reason}\n" for reason, where in reasons.items()]
    return lines


def roundings(kind: str, found: Outcome) -> list[str]:
    """What float64 has shown to be rounding."""
    return [
        f"- {kind}, {layout}: one device alone, float32 against float64, is off by {result.alone}. "
        f"{result.verdict[:1].upper() + result.verdict[1:]}.\n"
        for layout, result in found.results.items()
        if result.passed and not result.is_within
    ]


def summary(outcomes: Mapping[str, Outcome]) -> str:
    """How many types came to what, each counted once by its worst layout."""
    kinds: dict[str, list[str]] = {}
    for kind, found in outcomes.items():
        kinds.setdefault(standing(found), []).append(kind)
    total = len(outcomes)
    lines = [f"{total} of {len(TYPES)} types were run:\n\n"]
    lines += [
        f"- {what}: {len(kinds[what])}" + ("" if what == _RIGHT else f" ({', '.join(kinds[what])})") + "\n"
        for what in (_RIGHT, _ROUNDED, _PARTLY, _REFUSED, BROKEN, WRONG)
        if what in kinds
    ]
    missing = [kind for kind in TYPES if kind not in outcomes]
    versions: dict[str, list[str]] = {}
    for kind, found in outcomes.items():
        versions.setdefault(found.version or "unknown", []).append(kind)
    if missing:
        lines.append(f"- not run: {len(missing)} ({', '.join(missing)})\n")
    lines.append(f"\n{_VERSIONS}\n\n")
    lines += [f"- {version}: {', '.join(kinds)}\n" for version, kinds in versions.items()]
    return "".join(lines)


_VERSIONS = "The commit of the code that they ran at:"
_RIGHT = "right under all three layouts, within the limits in float32"
_ROUNDED = "right under all three, shown in float64 where float32 is past a limit"
_PARTLY = "right under some layouts, the others refused with a reason"
_REFUSED = "refused with a reason"
BROKEN = "**no answer**: killed, or an error that is not autopar's own"
WRONG = "**wrong numbers** under some layout"


def standing(found: Outcome) -> str:
    """Which of these a type is."""
    results = list(found.results.values())
    if any(not r.error and not r.passed for r in results):
        return WRONG
    if found.traceback:
        return BROKEN
    if not any(not r.error for r in results):
        return _REFUSED
    if any(r.error for r in results):
        return _PARTLY
    return _RIGHT if all(r.is_within for r in results) else _ROUNDED


SEQUENCE_PAGE = PAGE.with_name("sequence.md")
_SEQUENCE_HEAD = f"""# Further model types with the sequence split

Written by `python -m tools.campaigns.others --sequence TYPE ...`; do not edit. Types of [families.md](families.md), verified as
there on four local ranks, under context parallelism of 2 and 4 ranks by gathering, Ulysses and ring attention. The last
column is the commit that they ran at.

| type | {" | ".join(SEQUENCE_LAYOUTS)} | commit |
|---|{"---|" * len(SEQUENCE_LAYOUTS)}---|
"""


def sequence_page(text: str, fresh: Mapping[str, Outcome]) -> str:
    """The page ``text`` of layouts that split the sequence, with the rows of ``fresh`` in place of those of the same types."""
    lines = text.splitlines(keepends=True)
    rows = {line.split()[1]: line for line in lines if line.startswith("| ") and line.split()[1] in TYPES}
    said = [line for line in lines if line.startswith("- ") and re.split("[:,]", line[2:])[0] not in fresh]
    for kind, found in fresh.items():
        cells = " | ".join(cell(found, layout) for layout in SEQUENCE_LAYOUTS)
        rows[kind] = f"| {kind} | {cells} | {found.version} |\n"
        said += [shortened(line.rstrip()) + "\n" for line in remarks(kind, found, [*SEQUENCE_LAYOUTS])]
    return _SEQUENCE_HEAD + "".join(rows[kind] for kind in TYPES if kind in rows) + "\n## Refused\n\n" + "".join(said)


def shortened(text: str) -> str:
    """At most 400 characters, and no path of this machine."""
    text = re.sub(r"/\S*?/site-packages/", "", text)
    return text if len(text) <= 400 else text[:400] + " ..."


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The whole page."""
    outcomes = {kind: outcomes[kind] for kind in TYPES if kind in outcomes}
    head = _HEAD.format(
        loss=LOSS_TOLERANCE,
        tensor=TENSOR_TOLERANCE,
        double=DOUBLE_TENSOR_TOLERANCE,
        limit=LIMIT_S,
        verify=VERIFY_LIMIT_S,
        summary=summary(outcomes),
        layouts=" | ".join(USED),
        bars="---|" * len(USED),
    )
    lines = [head]
    for kind, found in outcomes.items():
        share = f"{found.num_split} of {found.num_operators}" if found.num_operators else "not traced"
        lines.append(f"| {kind} | {' | '.join(cell(found, layout) for layout in USED)} | {share} |\n")
    lines.append("\n## What does not work\n\n")
    refused = [line for kind, found in outcomes.items() for line in remarks(kind, found)]
    lines += [re.sub(r"/\S*?/site-packages/", "", line) for line in refused] or ["Nothing in the table.\n"]
    lines.append("\n## Rounding\n\n")
    lines += [line for kind, o in outcomes.items() for line in roundings(kind, o)] or ["Nothing is past a limit.\n"]
    lines.append(
        "\n## Notes of the plans\n\nOpaque regions (see [opaque.md](../supported-models.md)) and samples that meet.\n\n"
    )
    lines += [f"- {kind}: {shortened(note)}\n" for kind, o in outcomes.items() for note in o.notes]
    lines.append("\n## Operators that are repeated on every rank\n\n")
    repeated = {kind: [t for t in o.whole if t != "aten.div.Tensor"] for kind, o in outcomes.items()}
    lines.append("Beside the division of the loss by its count, a number:\n\n")
    lines += [f"- {kind}: {', '.join(f'`{t}`' for t in targets)}\n" for kind, targets in repeated.items() if targets]
    lines.append("\n## Descriptions\n\n")
    lines += [f"- {kind}: `{spec_of(kind)}`\n" for kind in outcomes]
    return "".join(lines)


# --- the page, read back --------------------------------------------------------------------------


def kept(text: str) -> dict[str, Outcome]:
    """The rows of an earlier page; those whose description is another one by now are left out.

    What a page does not say is not there: meshes, seconds, the digits beside the first.
    """
    top, *rest = text.split("\n## ")
    sections = {name: body for name, _, body in (section.partition("\n") for section in rest)}
    outcomes = {kind: _row(cells) for kind, *cells in re.findall(_ROW, top, re.MULTILINE)}
    for line in top.splitlines():
        broken = re.fullmatch(rf"- {re.escape(BROKEN)}: \d+ \((.*)\)", line)
        for kind in broken[1].split(", ") if broken else ():
            outcomes[kind].traceback = "kept"
    for version, kinds in re.findall(r"^- ([^:\n]+): (.*)$", top.partition(_VERSIONS)[2], re.MULTILINE):
        for kind in kinds.split(", "):
            outcomes[kind].version = version
    for kind, layouts, reason in re.findall(_SAID, sections["What does not work"], re.MULTILINE):
        if not layouts:
            outcomes[kind].error = reason
        for layout in filter(None, layouts.split(", ")):
            _reason(outcomes[kind].results, layout, reason)
    for kind, layout, alone, verdict in re.findall(_ROUNDING, sections["Rounding"], re.MULTILINE):
        results = outcomes[kind].results
        results[layout] = replace(results[layout], alone=alone, verdict=verdict[:1].lower() + verdict[1:])
    for kind, _, note in re.findall(_SAID, sections["Notes of the plans"], re.MULTILINE):
        outcomes[kind].notes += (note,)
    for kind, _, targets in re.findall(_SAID, sections["Operators that are repeated on every rank"], re.MULTILINE):
        outcomes[kind].whole = tuple(targets.replace("`", "").split(", "))
    described = {kind: spec for kind, _, spec in re.findall(_SAID, sections["Descriptions"], re.MULTILINE)}
    return {k: o for k, o in outcomes.items() if k in TYPES and described.get(k) == f"`{spec_of(k)}`"}


_ROW = rf"^\| ([a-z][\w.-]*) {'[|] ([^|]*) ' * len(USED)}\| (\d+ of \d+|not traced) \|$"
_SAID = rf"^- ([\w.-]+)((?:, (?:{'|'.join(USED)}))*): (.*)$"
_ROUNDING = rf"^- ([\w.-]+), ({'|'.join(USED)}): one device alone, float32 against float64, is off by ([^.]*)\. (.*)\.$"


def _row(cells: list[str]) -> Outcome:
    found = Outcome()
    *layouts, share = cells
    if share != "not traced":
        found.num_split, found.num_operators = (int(n) for n in share.split(" of "))
    found.results = {n: _numbers(c) for n, c in zip(USED, layouts, strict=True) if c != "refused"}
    return found


def _numbers(text: str) -> Result:
    numbers, _, double = text.removeprefix("**wrong** ").partition("; f64 ")
    loss, gradient, parameter = (float(n) for n in numbers.split(", "))
    result = Result(loss=loss, gradient=gradient, parameter=parameter, double=float(double or -1.0))
    if result.is_within and numbers != text:  # the digit that is shown is the limit, what it stands for is past it
        result = replace(
            result,
            loss=math.nextafter(loss, 1.0) if loss == LOSS_TOLERANCE else loss,
            gradient=math.nextafter(gradient, 1.0) if gradient == TENSOR_TOLERANCE else gradient,
            parameter=math.nextafter(parameter, 1.0) if parameter == TENSOR_TOLERANCE else parameter,
        )
    return result


def _reason(results: dict[str, Result], layout: str, reason: str) -> None:
    results[layout] = replace(results[layout], verdict=reason) if layout in results else Result(error=reason)

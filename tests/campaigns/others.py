"""Which further model types of transformers get a right plan, and what the others are told.

Run: ``python -m tests.campaigns.others --results FILE [TYPE ...]``. Each type is traced and planned in a process of its
own that is killed after a while, then verified as :mod:`tests.campaigns.models` does, in float64 as well where float32 is
past a limit. FILE keeps what came out, type by type: a run that was stopped goes on where it was, types that are named
run again. ``--page`` writes ``docs/families.md`` from FILE alone and runs nothing. With ``--plan`` nothing is verified.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from autopar import api
from autopar.cli.models import DEFAULT_SAMPLES, VerifiedModel, with_free_links
from autopar.cluster import Cluster
from autopar.errors import AutoparError, VerificationError
from autopar.graph.ir import Graph
from autopar.models import resolve_model
from autopar.plan import Plan
from autopar.runtime.verdict import DOUBLE_TENSOR_TOLERANCE
from autopar.runtime.verify import LOSS_TOLERANCE, PRELOAD, TENSOR_TOLERANCE, verify
from autopar.runtime.workers import WorkerPool
from tests.campaigns.models import LAYOUTS, RANKS, USER_FAILURES, Result, result_of, said, splits
from tests.campaigns.types import TYPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
TOKENS = 16
LIMIT_S, VERIFY_LIMIT_S = 120.0, 90.0
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


def subject_of(kind: str) -> VerifiedModel:
    """The model as ``autopar verify`` makes it: with a padding mask where it knows one."""
    try:
        source = resolve_model(spec_of(kind), sequence_length=TOKENS)
    except USER_FAILURES as error:
        raise AssertionError(f"describing {kind} failed otherwise than by an error of autopar") from error
    return VerifiedModel(source, masked=True)


def planned(kind: str, layouts: Sequence[str]) -> Outcome:
    """Traces and searches."""
    found = Outcome()
    try:
        graph = subject_of(kind).trace(global_batch_size=DEFAULT_SAMPLES * RANKS)
        whole = [op for op in graph.ops if not splits(graph, op)]
        found.graph = graph
        found.num_operators, found.num_split = len(graph.ops), len(graph.ops) - len(whole)
        found.whole = tuple(sorted({op.target for op in whole}))
        found.notes = graph.notes
        for layout in layouts:
            found.plans[layout] = _plan(graph, layout)
    except AutoparError as error:
        found.error = said(error)
    except (MemoryError, RecursionError, *USER_FAILURES) as error:
        found.error, found.traceback = f"{type(error).__name__}: {said(error)}", traceback.format_exc()
    return found


def _plan(graph: Graph, layout: str) -> Plan | str:
    try:
        return api.search(
            graph,
            cluster=with_free_links(Cluster.parse(f"cpu:1x{RANKS}")),
            global_batch_size=DEFAULT_SAMPLES * RANKS,
            pins=LAYOUTS[layout],
            trials=64,
        )
    except AutoparError as error:
        return said(error)


def _child(pipe: Connection, kind: str, layouts: Sequence[str]) -> None:
    pipe.send_bytes(pickle.dumps(planned(kind, layouts)))


def planned_apart(kind: str, layouts: Sequence[str], limit_s: float = LIMIT_S) -> Outcome:
    """:func:`planned` in a process that is killed when it takes too long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.campaigns.models", "transformers"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, kind, layouts), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(limit_s):
            return pickle.loads(ours.recv_bytes())  # type: ignore[no-any-return]
        return Outcome(error=f"no plan after {limit_s:.0f} s", traceback="killed")
    except EOFError:
        return Outcome(error="the process died", traceback="died")
    finally:
        process.kill()
        process.join()


def run_type(kind: str, pool: WorkerPool | None) -> Outcome:
    """Every layout of one type."""
    found = planned_apart(kind, USED)
    if pool is None or found.graph is None:
        return found
    subject = subject_of(kind)
    for layout, plan in found.plans.items():
        if isinstance(plan, str):
            found.results[layout] = Result(error=plan)
            continue
        try:
            report = verify(subject, plan, found.graph, pool=pool, timeout_s=VERIFY_LIMIT_S, find="never")
            found.results[layout] = result_of(plan, report)
        except AutoparError as error:
            found.results[layout] = Result(error=said(error))
            if not isinstance(error, VerificationError):  # of a rank, or a program that cannot be made: a defect
                found.traceback = str(error)
        except USER_FAILURES as error:
            found.results[layout] = Result(error=f"{type(error).__name__}: {said(error)}")
            found.traceback = traceback.format_exc()
    return found


# --- the page -------------------------------------------------------------------------------------

_HEAD = """# Further model types

Written by `python -m tests.campaigns.others --results FILE`; do not edit. Model types of transformers besides those of
[models.md](models.md), at small sizes, each planned under three layouts and verified on four local ranks in the same
way: the largest relative error of losses, of the first gradients, and of the parameters after three AdamW steps; the
limits are {loss:g} for losses and {tensor:g} for the others. Where float32 is past a limit the same plan is run in
float64 against one device in float64, where all errors must stay below {double:g}: `f64` stands before the largest.
A type or layout that is refused says why under the table. Tracing and planning may take {limit:.0f} s, the comparison of
one layout {verify:.0f} s.

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


def remarks(kind: str, found: Outcome) -> list[str]:
    """Refusals, each once, and what is past the limits."""
    lines = [f"- {kind}: {found.error}\n"] if found.error else []
    reasons: dict[str, list[str]] = {}
    for layout in USED:
        plan, result = found.plans.get(layout), found.results.get(layout)
        said_here = plan if isinstance(plan, str) else result.error if result else ""
        if result is not None and not result.error and not result.passed:
            said_here = result.verdict
        if said_here:
            reasons.setdefault(said_here, []).append(layout)
    lines += [f"- {kind}, {', '.join(layouts)}: {reason}\n" for reason, layouts in reasons.items()]
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
        for what in (_RIGHT, _ROUNDED, _PARTLY, _REFUSED, _BROKEN, _WRONG)
        if what in kinds
    ]
    missing = [kind for kind in TYPES if kind not in outcomes]
    versions: dict[str, list[str]] = {}
    for kind, found in outcomes.items():
        versions.setdefault(found.version or "unknown", []).append(kind)
    if missing:
        lines.append(f"- not run: {len(missing)} ({', '.join(missing)})\n")
    lines.append("\nThe commit of the code that they ran at:\n\n")
    lines += [f"- {version}: {', '.join(kinds)}\n" for version, kinds in versions.items()]
    return "".join(lines)


_RIGHT = "right under all three layouts, within the limits in float32"
_ROUNDED = "right under all three, shown in float64 where float32 is past a limit"
_PARTLY = "right under some layouts, the others refused with a reason"
_REFUSED = "refused with a reason"
_BROKEN = "**no answer**: killed, or an error that is not autopar's own"
_WRONG = "**wrong numbers** under some layout"


def standing(found: Outcome) -> str:
    """Which of these a type is."""
    results = list(found.results.values())
    if any(not r.error and not r.passed for r in results):
        return _WRONG
    if found.traceback:
        return _BROKEN
    if not any(not r.error for r in results):
        return _REFUSED
    if any(r.error for r in results):
        return _PARTLY
    return _RIGHT if all(r.is_within for r in results) else _ROUNDED


def _loaded(path: Path) -> dict[str, Outcome]:
    """What earlier runs wrote by :func:`_saved`."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        kind: Outcome(**entry | {"results": {name: Result(**r) for name, r in entry["results"].items()}})
        for kind, entry in known.items()
    }


def _saved(outcomes: Mapping[str, Outcome], path: Path) -> None:
    kept = ("error", "traceback", "num_operators", "num_split", "whole", "notes", "wall_s", "version")
    entries = {
        kind: {name: getattr(found, name) for name in kept}
        | {"results": {layout: asdict(result) for layout, result in found.results.items()}}
        for kind, found in outcomes.items()
    }
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


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
    lines.append("\n## Notes of the plans\n\nOpaque regions (see [opaque.md](opaque.md)) and samples that meet.\n\n")
    lines += [f"- {kind}: {shortened(note)}\n" for kind, o in outcomes.items() for note in o.notes]
    lines.append("\n## Operators that are repeated on every rank\n\n")
    repeated = {kind: [t for t in o.whole if t != "aten.div.Tensor"] for kind, o in outcomes.items()}
    lines.append("Beside the division of the loss by its count, a number:\n\n")
    lines += [f"- {kind}: {', '.join(f'`{t}`' for t in targets)}\n" for kind, targets in repeated.items() if targets]
    lines.append("\n## Descriptions\n\n")
    lines += [f"- {kind}: `{spec_of(kind)}`\n" for kind in outcomes]
    return "".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help=", ".join(TYPES))
    parser.add_argument("--plan", action="store_true", help="trace and search, verify nothing")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON of what is known, read and written")
    parser.add_argument("--page", action="store_true", help="write the page from the results, run nothing")
    options = parser.parse_args(arguments)
    unknown = [kind for kind in options.types if kind not in TYPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(TYPES)}")
    outcomes = _loaded(options.results) if options.results else {}
    if options.page:
        PAGE.write_text(page(outcomes), encoding="utf-8")
        return 0
    version = _version()
    with nullcontext() if options.plan else WorkerPool(RANKS, preload=PRELOAD) as pool:
        for kind in options.types or [kind for kind in TYPES if kind not in outcomes]:
            start = time.perf_counter()
            found = outcomes[kind] = run_type(kind, pool)
            found.graph, found.wall_s, found.version = None, time.perf_counter() - start, version
            sys.stdout.write(shown(kind, found))
            sys.stdout.flush()
            if options.results and not options.plan:
                _saved(outcomes, options.results)
    if options.results and not options.types and not options.plan:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return int(any(standing(o) in (_BROKEN, _WRONG) for o in outcomes.values()))


def _version() -> str:
    """The commit of the checkout; empty where git does not know."""
    call = ("git", "-C", str(PAGE.parent), "rev-parse", "--short=7", "HEAD")
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()


def shown(kind: str, found: Outcome) -> str:
    """What came of a type, for a terminal."""
    cells = " | ".join(cell(found, layout) for layout in USED)
    lines = [f"{kind:20} {cells} | {found.num_split} of {found.num_operators} | {found.wall_s:.0f} s\n"]
    lines += [f"    {line}" for line in remarks(kind, found)]
    lines += [f"    ! {line}\n" for line in found.traceback.splitlines()[-9:]]
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""Which further model types of transformers get a right plan, and what the others are told.

Run: ``python -m tests.campaigns.others [TYPE ...]``; without arguments it writes ``docs/families.md``. Each type is
traced and planned in a process of its own that is killed after a while, then verified as
:mod:`tests.campaigns.models` does. With ``--plan`` nothing is verified. ``--results FILE`` keeps what came out, so that a
run that was stopped goes on where it was; the page is then written from all of it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from autopar import api
from autopar.cli.models import DEFAULT_SAMPLES, VerifiedModel, with_free_links
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.graph.ir import Graph
from autopar.models import resolve_model
from autopar.plan import Plan
from autopar.runtime.verify import LOSS_TOLERANCE, PRELOAD, TENSOR_TOLERANCE, verify
from autopar.runtime.workers import WorkerPool
from tests.campaigns.models import LAYOUTS, RANKS, USER_FAILURES, Result, own_rounding, said, splits
from tests.campaigns.types import TYPES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "families.md"
TOKENS = 16
LIMIT_S = 150.0
USED = ("tp2 x dp2", "pp2 x tp2", "pp2 x dp2")


@dataclass(slots=True)
class Outcome:
    """What came of one type: a refusal, or the plans by layout (or what was said instead of one).

    ``traceback``: of an error that is not autopar's own, which is a defect.
    """

    error: str = ""
    traceback: str = ""
    graph: Graph | None = None
    plans: dict[str, Plan | str] = field(default_factory=dict)
    num_operators: int = 0
    num_split: int = 0
    whole: tuple[str, ...] = ()
    results: dict[str, Result] = field(default_factory=dict)
    rounding: str = ""


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
        graph = subject_of(kind).trace()
        whole = [op for op in graph.ops if not splits(graph, op)]
        found.graph = graph
        found.num_operators, found.num_split = len(graph.ops), len(graph.ops) - len(whole)
        found.whole = tuple(sorted({op.target for op in whole}))
        for layout in layouts:
            found.plans[layout] = _plan(graph, layout)
    except AutoparError as error:
        found.error = said(error)
    except (ArithmeticError, AssertionError, AttributeError, LookupError, NotImplementedError, *USER_FAILURES) as error:
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
            report = verify(subject, plan, found.graph, pool=pool, timeout_s=90.0)
        except (AutoparError, *USER_FAILURES) as error:
            found.results[layout] = Result(error=said(error))
            continue
        found.results[layout] = Result(
            mesh=str(plan.mesh),
            loss=max(row.loss for row in report.rows),
            gradient=max(row.gradient for row in report.rows),
            parameter=max(row.parameter for row in report.rows),
        )
    if any(not result.error and not result.passed for result in found.results.values()):
        found.rounding = own_rounding(subject)
    return found


# --- the page -------------------------------------------------------------------------------------

_HEAD = """# Further model types

Written by `python -m tests.campaigns.others`; do not edit. Model types of transformers besides those of
[models.md](models.md), at small sizes, each planned under three layouts and verified on four local ranks in the same
way: the largest relative error of losses, of the first gradients, and of the parameters after three AdamW steps; the
limits are {loss:g} for losses and {tensor:g} for the others. A type that is refused says why under the table.

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
    return numbers if result.passed else f"**past** {numbers}"


def remarks(kind: str, found: Outcome) -> list[str]:
    """Refusals, each once, and rounding where a layout is past the limits."""
    lines = [f"- {kind}: {found.error}\n"] if found.error else []
    reasons: dict[str, list[str]] = {}
    for layout, plan in found.plans.items():
        result = found.results.get(layout)
        said_here = plan if isinstance(plan, str) else result.error if result else ""
        if said_here:
            reasons.setdefault(said_here, []).append(layout)
    lines += [f"- {kind}, {', '.join(layouts)}: {reason}\n" for reason, layouts in reasons.items()]
    if found.rounding:
        lines.append(
            f"- {kind}: past the limits; one device alone, float32 against float64, is off by {found.rounding} in the"
            " first gradients and in the parameters\n"
        )
    return lines


def _loaded(path: Path) -> dict[str, Outcome]:
    """What earlier runs wrote by :func:`_saved`."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {
        kind: Outcome(**entry | {"results": {name: Result(**r) for name, r in entry["results"].items()}})
        for kind, entry in known.items()
    }


def _saved(outcomes: Mapping[str, Outcome], path: Path) -> None:
    kept = ("error", "traceback", "num_operators", "num_split", "whole", "rounding")
    entries = {
        kind: {name: getattr(found, name) for name in kept}
        | {"results": {layout: asdict(result) for layout, result in found.results.items()}}
        for kind, found in outcomes.items()
    }
    path.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The whole page."""
    head = _HEAD.format(loss=LOSS_TOLERANCE, tensor=TENSOR_TOLERANCE, layouts=" | ".join(USED), bars="---|" * len(USED))
    lines = [head]
    for kind in [kind for kind in TYPES if kind in outcomes]:
        found = outcomes[kind]
        share = f"{found.num_split} of {found.num_operators}" if found.num_operators else "not traced"
        lines.append(f"| {kind} | {' | '.join(cell(found, layout) for layout in USED)} | {share} |\n")
    right = sum(bool(o.results) and all(r.passed for r in o.results.values()) for o in outcomes.values())
    lines.append(f"\n{right} of {len(outcomes)} types are within the limits under every layout.\n")
    missing = [kind for kind in TYPES if kind not in outcomes]
    if missing:
        lines.append(f"\n{len(missing)} of {len(TYPES)} types have not been run: {', '.join(missing)}.\n")
    lines.append("\n## What does not work\n\n")
    lines += [line for kind, found in outcomes.items() for line in remarks(kind, found)] or ["Nothing in the table.\n"]
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
    options = parser.parse_args(arguments)
    unknown = [kind for kind in options.types if kind not in TYPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(TYPES)}")
    outcomes = _loaded(options.results) if options.results else {}
    pool = None if options.plan else WorkerPool(RANKS, preload=PRELOAD).__enter__()
    try:
        for kind in options.types or [kind for kind in TYPES if kind not in outcomes]:
            start = time.perf_counter()
            found = outcomes[kind] = run_type(kind, pool)
            found.graph = None
            cells = " | ".join(cell(found, layout) for layout in USED)
            seconds = time.perf_counter() - start
            sys.stdout.write(f"{kind:20} {cells} | {found.num_split} of {found.num_operators} | {seconds:.0f} s\n")
            sys.stdout.write("".join(f"    {line}" for line in remarks(kind, found)))
            sys.stdout.write("".join(f"    ! {line}\n" for line in found.traceback.splitlines()[-9:]))
            sys.stdout.flush()
            if options.results and not options.plan:
                _saved(outcomes, options.results)
            if (options.results or not options.types) and not options.plan:
                PAGE.write_text(page(outcomes), encoding="utf-8")
    finally:
        if pool is not None:
            pool.__exit__(None, None, None)
    wrong = any(r.error == "" and not r.passed for o in outcomes.values() for r in o.results.values())
    return int(wrong or any(o.traceback for o in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())

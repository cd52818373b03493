"""Which further model types of transformers get a right plan, and what the others are told.

Run: ``python -m tools.campaigns.others --results FILE [TYPE ...]``. Each type is traced and planned in a process of its
own that is killed after a while, then verified as :mod:`tools.campaigns.models` does, in float64 as well where float32 is
past a limit. FILE keeps what came out, type by type: a run that was stopped goes on where it was, types that are named
run again. Rows of ``docs/evidence/families.md`` that are not in FILE are kept as they stand there, with the commit that they ran
at. ``--page`` writes that page and runs nothing. With ``--plan`` nothing is verified. ``--sequence`` verifies the types that are named
under layouts that split the sequence, and writes their rows of ``docs/evidence/sequence.md``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import pickle
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path

from autopar import api
from autopar.errors import AutoparError, VerificationError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.models.resolve import USER_FAILURES, resolve_model
from autopar.plan.plan import Plan
from autopar.verification.against_one_device import PRELOAD, verify
from autopar.verification.compared_models import DEFAULT_SAMPLES, VerifiedModel
from autopar.verification.rank_pool import WorkerPool
from tools.campaigns.models import LAYOUTS, RANKS, SEQUENCE_LAYOUTS, Result, result_of, said, splits
from tools.campaigns.others_page import (
    BROKEN,
    HANG_S,
    LIMIT_S,
    PAGE,
    SEQUENCE_PAGE,
    USED,
    VERIFY_LIMIT_S,
    WRONG,
    Outcome,
    cell,
    kept,
    page,
    remarks,
    sequence_page,
    spec_of,
    standing,
)
from tools.campaigns.types import TYPES

TOKENS = 16


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
            pins=(LAYOUTS | SEQUENCE_LAYOUTS)[layout],
            trials=64,
        )
    except AutoparError as error:
        return said(error)


def _child(pipe: Connection, kind: str, layouts: Sequence[str], limit_s: float) -> None:
    end_s = math.ceil(time.process_time() + limit_s)  # of its own work: a busy machine is no reason for no answer
    resource.setrlimit(resource.RLIMIT_CPU, (end_s, end_s + 1))
    pipe.send_bytes(pickle.dumps(planned(kind, layouts)))


def planned_apart(kind: str, layouts: Sequence[str], limit_s: float = LIMIT_S) -> Outcome:
    """:func:`planned` in a process that is killed when it works for too long."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tools.campaigns.models", "transformers"])
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, kind, layouts, limit_s), daemon=True)
    process.start()
    theirs.close()
    try:
        if ours.poll(HANG_S):
            return pickle.loads(ours.recv_bytes())
        return Outcome(error=f"no plan and no end after {HANG_S:.0f} s", traceback="killed")
    except EOFError:
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Outcome(error=f"no plan after {limit_s:.0f} s of work", traceback="killed")
        return Outcome(error=f"the process died of {process.exitcode}", traceback="died")
    finally:
        process.kill()
        process.join()


def run_type(kind: str, pool: WorkerPool | None, layouts: Sequence[str] = USED) -> Outcome:
    """Every layout of one type."""
    found = planned_apart(kind, layouts)
    if pool is None or found.graph is None:
        return found
    subject = subject_of(kind)
    for layout, plan in found.plans.items():
        if isinstance(plan, str):
            found.results[layout] = Result(error=plan)
            continue
        try:
            report = verify(subject, plan, found.graph, pool=pool, run_timeout_s=VERIFY_LIMIT_S, find="never")
            found.results[layout] = result_of(plan, report)
        except AutoparError as error:
            found.results[layout] = Result(error=said(error))
            if not isinstance(error, VerificationError):  # of a rank, or a program that cannot be made: a defect
                found.traceback = str(error)
        except USER_FAILURES as error:
            found.results[layout] = Result(error=f"{type(error).__name__}: {said(error)}")
            found.traceback = traceback.format_exc()
    return found


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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help=", ".join(TYPES))
    parser.add_argument("--plan", action="store_true", help="trace and search, verify nothing")
    parser.add_argument("--results", type=Path, metavar="FILE", help="JSON of what is known, read and written")
    parser.add_argument("--page", action="store_true", help="write the page from the results, run nothing")
    parser.add_argument("--sequence", action="store_true", help="layouts that split the sequence")
    options = parser.parse_args(arguments)
    unknown = [kind for kind in options.types if kind not in TYPES]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(TYPES)}")
    if options.sequence and not options.types:
        parser.error("--sequence needs the types to verify")
    outcomes = kept(PAGE.read_text(encoding="utf-8")) if PAGE.is_file() else {}
    fresh = _loaded(options.results) if options.results else {}
    outcomes |= fresh
    if options.page:
        PAGE.write_text(page(outcomes), encoding="utf-8")
        return 0
    version = _version()
    if options.sequence:
        with WorkerPool(RANKS, preload=PRELOAD) as pool:
            for kind in options.types:
                start = time.perf_counter()
                outcomes[kind] = found = run_type(kind, pool, [*SEQUENCE_LAYOUTS])
                found.wall_s, found.version = time.perf_counter() - start, version
                sys.stdout.write(shown(kind, found, [*SEQUENCE_LAYOUTS]))
                sys.stdout.flush()
                before = SEQUENCE_PAGE.read_text(encoding="utf-8") if SEQUENCE_PAGE.is_file() else ""
                SEQUENCE_PAGE.write_text(sequence_page(before, {kind: found}), encoding="utf-8")
        return int(any(standing(outcomes[kind]) in (BROKEN, WRONG) for kind in options.types))
    version = _version()
    with nullcontext() if options.plan else WorkerPool(RANKS, preload=PRELOAD) as pool:
        for kind in options.types or [kind for kind in TYPES if kind not in outcomes]:
            start = time.perf_counter()
            found = outcomes[kind] = fresh[kind] = run_type(kind, pool)
            found.graph, found.wall_s, found.version = None, time.perf_counter() - start, version
            sys.stdout.write(shown(kind, found))
            sys.stdout.flush()
            if options.results and not options.plan:
                _saved(fresh, options.results)
    if options.results and not options.plan:
        PAGE.write_text(page(outcomes), encoding="utf-8")
    return int(any(standing(o) in (BROKEN, WRONG) for o in outcomes.values()))


def _version() -> str:
    """The commit of the checkout; empty where git does not know."""
    call = ("git", "-C", str(PAGE.parent), "rev-parse", "--short=7", "HEAD")
    return subprocess.run(call, capture_output=True, text=True, check=False).stdout.strip()


def shown(kind: str, found: Outcome, layouts: Sequence[str] = USED) -> str:
    """What came of a type, for a terminal."""
    cells = " | ".join(cell(found, layout) for layout in layouts)
    lines = [f"{kind:20} {cells} | {found.num_split} of {found.num_operators} | {found.wall_s:.0f} s\n"]
    lines += [f"    {line}" for line in remarks(kind, found, layouts)]
    lines += [f"    ! {line}\n" for line in found.traceback.splitlines()[-9:]]
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())

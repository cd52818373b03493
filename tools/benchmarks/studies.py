"""Published layouts beside ours: every shipped study, as a page.

``python -m tools.benchmarks.studies [--only NAME] [--results FILE] [--page docs/evidence/studies.md]``. Results are kept in FILE study
by study, so that a run goes on after a stop. Ends with 1 where a published layout is faster than ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from autopar.plan.plan import Plan
from autopar.questions.comparisons import load_study, run_study, study_files
from autopar.util.files import write_text
from tools.revision import revision

HEAD = """# Published layouts

Written by `python -m tools.benchmarks.studies --page docs/evidence/studies.md`; do not edit. Run at revision {revision}. Published layouts as problems
(`search/studies/*.toml`, each with its source and what is not sure about it). `autopar published NAME` searches a plan for
the same model, cluster and batch in the default space, lets the search fill in what the published layout leaves open, and
prints both under one cost model. The gap is between our plan and the lower bound on every plan of the space.

| study | published layout | ours | published over ours | gap | CPU s, tracing and both searches |
|---|---|---|---|---|---|
"""

TAIL = """
How far to trust this:

- Both columns are predictions for autopar's runtime. What the sources measured stands below. Where a source ran faster than
  its layout is predicted here, its kernels or its overlap are not autopar's; eager operators keep more activations, so that
  more is recomputed.
- Most of what is won over the older runs is memory: they recompute everything and shard no optimizer states; autopar
  recomputes what has to be and shards. Plans that gather parameters over more than 500 ranks rest on the profile's statement
  that gathers run beside computation on a network without contention, which no run at that size has confirmed.
- DeepSeek-V3 is without FP8, DualPipe and its own all-to-all kernels; H800 is an H100 with a slower NVLink.

| study | what it is, and where it stands | measured by the source | not said by the source |
|---|---|---|---|
"""


def layout(plan: Plan) -> str:
    schedule = f", {plan.schedule}" + (f" v={plan.virtual_stages}" if plan.virtual_stages > 1 else "")
    counts = {kind: sum(block.recompute == kind for block in plan.blocks) for kind in ("selective", "full")}
    again = "".join(f", {kind} recompute of {n} blocks" for kind, n in counts.items() if n)
    return f"{plan.mesh}, ZeRO {plan.zero_stage}, micro-batch {plan.micro_batch_size}{schedule * (plan.mesh.pp > 1)}{again}"


def run(name: str) -> dict[str, Any]:
    start = time.process_time()
    result = run_study(load_study(name), workers=1)
    return {
        "ours_s": result.ours.predicted.step_time_s,
        "ours": layout(result.ours),
        "gap": result.ours.search.gap,
        "published_s": result.published.predicted.step_time_s if result.published else None,
        "published": layout(result.published) if result.published else result.reason,
        "cpu_s": time.process_time() - start,
    }


def page(results: dict[str, dict[str, Any]]) -> str:
    rows, notes = [], []
    for name, row in results.items():
        theirs = "does not fit" if row["published_s"] is None else f"{row['published_s']:.4g} s: {row['published']}"
        ratio = "" if row["published_s"] is None else f"{row['published_s'] / row['ours_s']:.2f}"
        rows.append(
            f"| {name} | {theirs} | {row['ours_s']:.4g} s: {row['ours']} | {ratio} | {100 * row['gap']:.1f} % "
            f"| {row['cpu_s']:.1f} |\n"
        )
        study = load_study(name)
        notes.append(f"| {name} | {study.title}; {study.source} | {study.measured} | {'; '.join(study.unsure)} |\n")
    return HEAD.format(revision=revision()) + "".join(rows) + TAIL + "".join(notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=sorted(study_files()), action="append")
    parser.add_argument("--results", type=Path, default=Path("out/studies.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    kept = json.loads(options.results.read_text()) if options.results.exists() else {}
    for name in options.only or sorted(study_files()):
        if name not in kept:
            kept[name] = run(name)
            print(f"{name}: {kept[name]}", flush=True)
            write_text(options.results, json.dumps(kept, indent=1), make_folder=True)
    text = page({name: kept[name] for name in sorted(kept)})
    if options.page is not None:
        write_text(options.page, text, make_folder=True)
    else:
        print(text)
    slower = [
        n for n, r in kept.items() if r["published_s"] is not None and r["published_s"] < r["ours_s"] * (1 - 1e-9)
    ]
    for name in slower:
        print(f"SLOWER: {name}: the published layout takes {kept[name]['published_s']:.6g} s")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())

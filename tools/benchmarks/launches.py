"""Writes ``docs/evidence/launches.md``: how much a host launches in a step, and where it waits; ``python -m tools.benchmarks.launches``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tools.fakes.build import build
from tools.fakes.cases import LISTED, PLANS, Case, wrong
from tools.revision import revision

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "launches.md"

HEAD = """# What a host launches in a step

Written by `python -m tools.benchmarks.launches`; do not edit. Run at revision {revision}, with torch {version} and no GPU: plans are run on fake CUDA tensors among fake ranks
(`tools/fakes`), and every operator that launches a kernel is counted. Models are small (two blocks, four in the interleaved
pipeline; 4 samples), so that a count says what one block of one micro-batch launches, not how long it takes. `step` is forward and
backward of all micro-batches with their collectives; `clip` is `clip_grad_norm_`; the optimizer is AdamW.

| plan | rank | micro-batches | step | a block and micro-batch | clip | optimizer | evaluate | waits in a step |
|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def row(name: str, case: Case, rank: int, found: dict[str, Any]) -> str:
    """One rank of a plan: ``found`` is what the driver wrote of it."""
    launched, batches = found["launches"], found["micro_batches"]
    waits = sum(seen[-1] for seen in found["seen"] if seen[0] in {"step", "clip"} and seen[1] == "host waits")
    blocks = case.layers / (2 if "pp=2" in case.pins else 1)
    numbers = [launched.get(phase, "") for phase in ("clip", "optimizer", "evaluate")]
    cells = [name, rank, batches, launched["step"], round(launched["step"] / batches / blocks), *numbers, waits]
    return "| " + " | ".join(map(str, cells)) + " |\n"


def listed() -> str:
    """Where a host may wait, and why."""
    lines = [f"- `{place}`, {what}: {why}.\n" for (_, what, place), why in LISTED.items()]
    return "\nWhere a host may wait for its device:\n\n" + "".join(lines)


def main() -> None:
    """See the module."""
    lines, faults = [HEAD.format(version=torch.__version__.partition("+")[0], revision=revision())], list[str]()
    with tempfile.TemporaryDirectory() as folder:
        guard = build(Path(folder), Path(torch.__file__).parent)
        for group, cases in PLANS.items():
            output = Path(folder) / f"{group}.json"
            subprocess.run([sys.executable, "-m", "tools.fakes.driver", str(guard), str(output), *cases], check=True)
            found = json.loads(output.read_text())
            for name, case in cases.items():
                lines += [row(name, case, rank, found[f"{name} rank {rank}"]) for rank in case.run]
                faults += [
                    f"{name} rank {rank}: {fault}" for rank in case.run for fault in wrong(found[f"{name} rank {rank}"])
                ]
    if faults:
        raise SystemExit("\n".join(faults))
    PAGE.write_text("".join([*lines, listed()]))


if __name__ == "__main__":
    main()

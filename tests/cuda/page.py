"""Writes ``docs/launches.md``: how much a host launches in a step, and where it waits; ``python -m tests.cuda.page``."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.cuda.build import build
from tests.cuda.cases import LISTED, PLANS

PAGE = Path(__file__).parents[2] / "docs" / "launches.md"

HEAD = """# What a host launches in a step

`python -m tests.cuda.page` writes this page, with torch {version} and no GPU: plans are run on fake CUDA tensors among fake ranks
(`tests/cuda`), and every operator that launches a kernel is counted. Models are small (two blocks, four in the interleaved
pipeline; 4 samples), so that a count says what one block of one micro-batch launches, not how long it takes. `step` is forward and
backward of all micro-batches with their collectives; `clip` is `clip_grad_norm_`; the optimizer is AdamW.

| plan | rank | micro-batches | step | a block and micro-batch | clip | optimizer | evaluate | waits in a step |
|---|--:|--:|--:|--:|--:|--:|--:|--:|
"""


def main() -> None:
    """See the module."""
    lines = [HEAD.format(version=torch.__version__.partition("+")[0])]
    with tempfile.TemporaryDirectory() as folder:
        guard = build(Path(folder), Path(torch.__file__).parent)
        for group, cases in PLANS.items():
            output = Path(folder) / f"{group}.json"
            subprocess.run([sys.executable, "-m", "tests.cuda.driver", str(guard), str(output), group], check=True)
            found = json.loads(output.read_text())
            for name, case in cases.items():
                for rank in case.run:
                    row = found[f"{name} rank {rank}"]
                    launched, batches = row["launches"], row["micro_batches"]
                    waits = sum(r[-1] for r in row["seen"] if r[0] in {"step", "clip"} and r[1] == "host waits")
                    blocks = case.layers / (2 if "pp=2" in case.pins else 1)
                    numbers = [launched.get(phase, "") for phase in ("clip", "optimizer", "evaluate")]
                    each = round(launched["step"] / batches / blocks)
                    cells = [name, rank, batches, launched["step"], each, *numbers, waits]
                    lines.append("| " + " | ".join(map(str, cells)) + " |\n")
    lines.append("\nWhere a host may wait for its device, or keeps the state of a generator:\n\n")
    lines += [f"- `{place}`, {what}: {why}.\n" for (_, what, place), why in LISTED.items()]
    PAGE.write_text("".join(lines))


if __name__ == "__main__":
    main()

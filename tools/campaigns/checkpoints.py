"""Checkpoints from each of eight plans to each, bit for bit, and a thousand damaged ones: written to a page of ``docs/evidence/``.

``python -m tools.campaigns.checkpoints --page docs/evidence/checkpoints.md [--damages 1000]``
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from autopar import api
from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model
from autopar.plan.plan import Plan
from autopar.runtime.checkpoint.checkpoint_index import as_bytes
from autopar.runtime.checkpoint.load import Folder, whole
from autopar.verification.against_one_device import PRELOAD
from autopar.verification.rank_pool import WorkerPool
from tests.support.damage import KINDS
from tests.support.distributed import checkpoints as jobs
from tests.support.distributed.layouts import on_ranks
from tests.support.distributed.plans import estimated
from tools.revision import revision

MODEL = "hf:gpt2?n_embd=32&n_layer=4&n_head=4&vocab_size=257&n_positions=16"
PLANS: dict[str, tuple[int, list[str]]] = {
    "one rank": (1, []),
    "tp4, padded": (4, ["tp=4", "vocab_multiple=16"]),
    "tp2 x dp2 ZeRO 3": (4, ["tp=2", "dp_shard=2", "zero=3"]),
    "pp2 x dp2 ZeRO 1": (4, ["pp=2", "dp_shard=2", "zero=1"]),
    "HSDP 2 x 2": (4, ["dp_replicate=2", "dp_shard=2", "zero=3"]),
    "cp2 x dp2": (4, ["cp=2", "dp_replicate=2", "zero=0"]),
    "pp2 interleaved": (2, ["pp=2", "schedule=Interleaved1F1B", "virtual_stages=2"]),
    "dp3 ZeRO 3, optimizer on the host": (3, ["dp_shard=3", "zero=3"]),
}


@cache
def traced() -> tuple[Any, Graph]:
    subject = resolve_model(MODEL)
    return subject, api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0, padded=False))


@cache
def planned(name: str) -> Plan:
    ranks, pins = PLANS[name]
    batch = 24 if ranks == 3 else 8
    plan = estimated(traced()[1], cluster=f"cpu:1x{ranks}", global_batch_size=batch, pins=pins)
    return replace(plan, offload=("optimizer",)) if name.endswith("on the host") else plan


def save(pool: WorkerPool, name: str, folder: Path, other: Path | None = None) -> None:
    """A checkpoint of a step or two under a plan, and of one more."""
    subject, graph = traced()
    plan = planned(name)
    batches = [subject.make_batch(plan.global_batch_size, seed=seed, padded=False) for seed in range(2)]
    folders = [str(folder), *([str(other)] if other else [])]
    on_ranks(pool, jobs.saved, subject, plan, graph, batches, folders)


def move(pool: WorkerPool, source: Path, name: str, target: Path) -> None:
    """Loads under a plan, and saves."""
    subject, graph = traced()
    on_ranks(pool, jobs.moved, subject, planned(name), graph, str(source), str(target))


def difference(one: Path, other: Path) -> str:
    """What two checkpoints have that is not the same bits; empty where there is nothing. Parts may be others."""
    first, second = Folder(one), Folder(other)
    if first.tensors.keys() != second.tensors.keys():
        names = {name for name in first.tensors.keys() ^ second.tensors.keys() if not name.startswith("state.random")}
        if names:
            return f"{sorted(names)[0]} is in one alone"
    for name in first.tensors:
        if not name.startswith("state.random"):
            mine, theirs = whole(first, name), whole(second, name)
            if mine.dtype != theirs.dtype or as_bytes(mine) != as_bytes(theirs):
                return name
    return next((key for key in ("progress", "optimizer") if first.values[key] != second.values[key]), "")


def matrix(pool: WorkerPool, folder: Path, pairs: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """What differs after a move from the first plan to the second of each pair."""
    names, found = list(PLANS), {}
    for before, after in pairs:
        source = folder / f"from{names.index(before)}"
        if not source.exists():
            save(pool, before, source)
        target = folder / f"{source.name}to{names.index(after)}"
        move(pool, source, after, target)
        found[before, after] = difference(source, target)
    return found


def damages(pool: WorkerPool, folder: Path, name: str, seeds: Sequence[int]) -> list[jobs.Outcome]:
    """Outcomes of damaged checkpoints of a plan; all ranks load each."""
    subject, graph = traced()
    run, other = folder / "run", folder / "other"
    save(pool, name, run, other)
    given = (subject, planned(name), graph, str(run), str(other), str(folder / "copy"), list(seeds))
    return on_ranks(pool, jobs.damaged, *given, timeout_s=30.0 + 2.0 * len(seeds))[0]


def is_refused_alike(outcome: jobs.Outcome) -> bool:
    """By one error of all ranks, that names the file or the one where the damage shows."""
    said = outcome.said[0]
    names = (*outcome.what.replace(" and ", " ").split(" at ")[0].split(), "checkpoint.json")
    return len(set(outcome.said)) == 1 and said.startswith("CheckpointError") and any(name in said for name in names)


def page(moves: dict[tuple[str, str], str], outcomes: Sequence[jobs.Outcome], seconds: float) -> str:
    """Both as Markdown."""
    names = list(PLANS)
    lines = [
        "# Checkpoints: from plan to plan, and damaged",
        "",
        (
            "Written by `python -m tools.campaigns.checkpoints --page docs/evidence/checkpoints.md`; do not edit. Run at revision "
            f"{revision()}, in {seconds:.0f} s on the CPU ranks of one machine. The model is `{MODEL}` with AdamW after a step."
        ),
        "",
        "## From each plan to each",
        "",
        (
            "Saved under the plan of the row, loaded into other weights under that of the column and saved there: **=** where every bit of "
            "parameters, optimizer states, hyperparameters, seed and step is the same in both checkpoints."
        ),
        "",
        "| | " + " | ".join(f"{i + 1}" for i in range(len(names))) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for i, before in enumerate(names):
        cells = [("=" if not moves[before, after] else moves[before, after]) for after in names]
        lines.append(f"| {i + 1} {before} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Damaged",
        "",
        (
            "Each is one random damage to a copy of a checkpoint, which all ranks then load. *Refused*: all ranks raise the same "
            "CheckpointError, it names a file, and nothing of the job is changed. *The same*: it loads, and every bit is as it was "
            "saved (the damage was to `plan.json`, which the index has once more, or the bytes were zeros before)."
        ),
        "",
        "| damage | tried | refused | the same | anything else |",
        "|---|---|---|---|---|",
    ]
    for kind in (*KINDS, "all"):
        own = [o for o in outcomes if kind in {o.kind, "all"}]
        count = Counter("refused" if is_refused_alike(o) and o.is_right else _else(o) for o in own)
        lines.append(f"| {kind} | {len(own)} | {count['refused']} | {count['the same']} | {count['else']} |")
    return "\n".join(lines) + "\n"


def _else(outcome: jobs.Outcome) -> str:
    return "the same" if outcome.is_right and not any(outcome.said) else "else"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--page", type=Path, required=True)
    parser.add_argument("--damages", type=int, default=1000)
    given = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work, WorkerPool(4, preload=PRELOAD) as pool:
        folder = Path(work)
        outcomes: list[jobs.Outcome] = []
        for first in range(0, given.damages, 100):
            seeds = range(first, min(first + 100, given.damages))
            outcomes += damages(pool, folder, "tp2 x dp2 ZeRO 3", seeds)
            print(f"{len(outcomes)} damages", flush=True)
        moves = matrix(pool, folder, [(before, after) for before in PLANS for after in PLANS])
        for pair, text in moves.items():
            print(*pair, text or "equal", flush=True)
    given.page.write_text(page(moves, outcomes, time.monotonic() - begun), encoding="utf-8")


if __name__ == "__main__":
    main()

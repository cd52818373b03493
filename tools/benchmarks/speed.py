"""Seconds and memory of the search alone, and how they grow with devices and with layers.

``python -m tools.benchmarks.speed [--only NAME] [--rounds N] [--page docs/evidence/speed.md]``: each search is a command of its own, in turn by
one process and by two on as many cores; the model is traced before and not counted, and its trace is kept for the next round.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch

from autopar import api
from autopar.graph.graph import Graph
from autopar.models.resolve import resolve_model
from autopar.util.files import write_text
from tools.revision import revision

SELF = "tools.benchmarks.speed"
WORKERS = 2
"""Processes of the searches that are compared with those by one."""

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Case:
    """A search, and the seconds on two cores that it is allowed where some are demanded of it."""

    model: str
    sequence: int
    cluster: str
    global_batch_size: int
    most_s: float | None = None


def llama(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> str:
    return (
        f"hf:llama?hidden_size={hidden}&intermediate_size={ffn}&num_hidden_layers={layers}&num_attention_heads={heads}"
        f"&num_key_value_heads={kv_heads}&vocab_size={vocabulary}&max_position_embeddings=8192"
    )


def llama70(layers: int) -> str:
    return llama(8192, 28672, layers, 64, 8, 32000)


GPT_175B = (
    "hf:gpt2?n_embd=12288&n_layer=96&n_head=96&vocab_size=51200&n_positions=2048&attn_pdrop=0.0&embd_pdrop=0.0"
    "&resid_pdrop=0.0&bos_token_id=0&eos_token_id=0"
)
MIXTURE = (
    "hf:mixtral?hidden_size=8192&intermediate_size=28672&num_hidden_layers=80&num_attention_heads=64"
    "&num_key_value_heads=8&vocab_size=32000&max_position_embeddings=4096&num_local_experts=32&num_experts_per_tok=2"
)

SIZES = {
    "7B on 8": Case(
        model=llama(4096, 11008, 32, 32, 32, 32000), sequence=2048, cluster="h100-sxm5-80gb:1x8",
        global_batch_size=128, most_s=0.5,
    ),
    "70B on 64": Case(
        model=llama70(80), sequence=4096, cluster="h100-sxm5-80gb:8x8", global_batch_size=512, most_s=1.0
    ),
    "175B on 1024": Case(
        model=GPT_175B, sequence=2048, cluster="a100-sxm4-80gb:128x8", global_batch_size=1536, most_s=2.0
    ),
    "405B on 16,384": Case(
        model=llama(16384, 53248, 126, 128, 8, 128256), sequence=8192, cluster="h100-sxm5-80gb:2048x8",
        global_batch_size=2048, most_s=5.0,
    ),
    "1.8T mixture of experts on 100,000": Case(
        model=MIXTURE, sequence=4096, cluster="h100-sxm5-80gb:12500x8", global_batch_size=50000, most_s=20.0
    ),
}  # fmt: skip
DEVICES = {
    f"70B on {nodes * 8}": Case(
        model=llama70(80), sequence=4096, cluster=f"h100-sxm5-80gb:{nodes}x8", global_batch_size=max(512, nodes * 8)
    )
    for nodes in (4, 16, 64, 256, 1024)
}
LAYERS = {
    f"{layers} layers on 64": Case(
        model=llama70(layers), sequence=4096, cluster="h100-sxm5-80gb:8x8", global_batch_size=512
    )
    for layers in (10, 20, 40, 80, 160)
}
PARTS = {
    "Sizes that are met": SIZES,
    "The same model on more devices": DEVICES,
    "More of the same layers": LAYERS,
}
CASES = {name: case for part in PARTS.values() for name, case in part.items()}


def traced(name: str, folder: Path) -> tuple[Path, float]:
    """Where the trace of a case's model is kept, and the CPU seconds that it took (0 where it was there)."""
    case = CASES[name]
    path = folder / f"{name.replace(' ', '_').replace(',', '')}.graph"
    start = time.process_time()
    if not path.exists():
        source = resolve_model(case.model, sequence_length=case.sequence, batch_size=2, dtype=torch.bfloat16)
        made = path.with_suffix(".new")
        made.write_bytes(pickle.dumps((source.trace(), time.process_time() - start)))
        made.replace(path)
    return path, cast("tuple[Graph, float]", pickle.loads(path.read_bytes()))[1]


def search_one(name: str, path: Path, workers: int) -> dict[str, Any]:
    """One search in this process and its copies."""
    torch.set_num_threads(1)
    case = CASES[name]
    graph = cast("tuple[Graph, float]", pickle.loads(path.read_bytes()))[0]
    start, began = time.process_time(), time.perf_counter()
    plan = api.search(
        graph, cluster=case.cluster, global_batch_size=case.global_batch_size, precision="bf16", space="default",
        workers=workers,
    )  # fmt: skip
    wall_s, own_s = time.perf_counter() - began, time.process_time() - start
    own, copies = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "wall_s": wall_s,
        "cpu_s": own_s + copies.ru_utime + copies.ru_stime,
        "num_bytes": (own.ru_maxrss + copies.ru_maxrss) * 1024,
        "step_time_s": plan.predicted.step_time_s,
        "gap": plan.search.gap,
        "candidates": plan.search.candidates,
        "evaluated": plan.search.evaluated,
        "plan": f"{plan.mesh}, zero={plan.zero_stage}, micro_batch={plan.micro_batch_size}",
    }


def rounds_of(name: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Medians over searches in processes of their own, by one and by :data:`WORKERS` in turn."""
    path, trace_s = traced(name, folder)
    runs: dict[int, list[dict[str, Any]]] = {1: [], WORKERS: []}
    for _ in range(rounds):
        for workers, own in runs.items():
            done = subprocess.run(
                [sys.executable, "-m", SELF, "--search", name, "--graph", str(path), "--workers", str(workers)],
                check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            own.append(json.loads(done.stdout.splitlines()[-1]))
    every = [run for own in runs.values() for run in own]
    found = {key: {json.dumps(run[key]) for run in every} for key in ("step_time_s", "gap", "plan")}
    assert all(len(values) == 1 for values in found.values()), f"{name}: searches differ: {found}"
    return runs[1][0] | {
        "wall_s": median(run["wall_s"] for run in runs[WORKERS]),
        "one_s": median(run["wall_s"] for run in runs[1]),
        "cpu_s": median(run["cpu_s"] for run in runs[WORKERS]),
        "num_bytes": max(run["num_bytes"] for run in every),
        "trace_s": trace_s,
    }


HEAD = """# How long the search takes

Written by `python -m tools.benchmarks.speed --page docs/evidence/speed.md`; do not edit. Run at revision {revision}. Seconds by the clock of a search on two cores
(`--workers 2`, the default there) and by one process, and CPU seconds of the two together: medians of {rounds}, in turn, without tracing,
whose CPU seconds stand beside. The memory is the sum of the largest that each process had, torch and the traced model counted in both.
The default space, bf16, no pins. Gaps are between a plan and the lower bound on every plan of the space; plans and gaps are the same by
one process and by two. Step times are predictions.

"""


def lines_of(part: str, results: dict[str, dict[str, Any]]) -> Iterator[str]:
    yield f"## {part}\n\n"
    yield "| model | s, two cores | allowed | s, one | CPU s | tracing, CPU s | memory | candidates | evaluated | gap | step | plan |\n"
    yield "|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    for name, case in PARTS[part].items():
        if (row := results.get(name)) is not None:
            allowed = "" if case.most_s is None else f"{case.most_s:g}"
            yield (
                f"| {name} | {row['wall_s']:.2f} | {allowed} | {row['one_s']:.2f} | {row['cpu_s']:.2f} | {row['trace_s']:.1f} | {row['num_bytes'] / GIB:.2f} GiB "
                f"| {row['candidates']} | {row['evaluated']} | {100 * row['gap']:.1f} % | {row['step_time_s']:.4g} s "
                f"| {row['plan']} |\n"
            )
    yield "\n"


def page(results: dict[str, dict[str, Any]], rounds: int) -> str:
    text = HEAD.format(rounds=rounds, revision=revision()) + "".join(
        line for part in PARTS for line in lines_of(part, results)
    )
    return text.rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--traces", type=Path, help="keep traces here")
    parser.add_argument("--page", type=Path)
    parser.add_argument("--search", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--graph", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.search:
        print(json.dumps(search_one(options.search, options.graph, options.workers)))
        return 0
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.traces or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only or CASES:
            results[name] = rounds_of(name, folder, options.rounds)
            print(
                f"{name}: {results[name]['wall_s']:.2f} s, one process {results[name]['one_s']:.2f} s, gap {100 * results[name]['gap']:.1f} %",
                flush=True,
            )
    text = page(results, options.rounds)
    if options.page is None:
        print(text)
    else:
        write_text(options.page, text, make_folder=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

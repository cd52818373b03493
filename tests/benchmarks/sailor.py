"""The small space of a planner for mixed clusters (Sailor, SOSP 2025), searched by autopar: ``search/sailor.toml``.

``python -m tests.benchmarks.sailor [--rounds N] [--case MODEL CLUSTER] [--page docs/mixed.md]`` plans the two models of its evaluation for 8 and
512 A100 and for 128 A100 with 384 V100, in that space and in the default one, by the same cost model. Seconds are of the
CPU, without the trace of the model, medians of N, of the first search of a traced model and of the next one; those of Sailor are the
published ones. With ``--page`` the table goes into its part of that page.
"""

from __future__ import annotations

import argparse
import pickle
import time
from pathlib import Path
from statistics import median

import torch

from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.graph.ir import Graph
from autopar.models import resolve_model
from autopar.plan import Plan
from autopar.report.units import micro_batch_text, seconds

from .mixed import A100_V100, FP16, cluster_from, markdown, search, write_part

MODELS = {
    "OPT-350M": "gpt:layers=24,hidden=1024,heads=16,vocab=50272",
    "GPT-Neo-2.7B": "gpt:layers=32,hidden=2560,heads=20,vocab=50257",
}
CLUSTERS = {"8": "a100-sxm4-40gb:1x8", "512": "a100-sxm4-40gb:64x8", "128+384": A100_V100}
DEVICES = {"8": "8 A100", "512": "512 A100", "128+384": "128 A100, 384 V100"}
PUBLISHED_S = {"8": 0.02, "512": 0.11, "128+384": 3.3}
"""Search time of Sailor, for OPT-350M (its table of search times)."""

BATCH = 2048


def cluster_of(name: str) -> Cluster:
    text = CLUSTERS[name]
    return cluster_from(text) if "[[group]]" in text else Cluster.parse(text)


def planned(graph: Graph, cluster: Cluster, space: str, rounds: int) -> tuple[Plan | None, float, float]:
    """The plan, None where none fits, and medians of the CPU seconds of the first search of a graph and of the next."""
    spent: tuple[list[float], list[float]] = ([], [])
    plan = None
    for _ in range(rounds):
        fresh = pickle.loads(pickle.dumps(graph))  # without what a search keeps with it
        for own in spent:
            begin = time.process_time()
            try:
                plan = search(fresh, cluster, BATCH, FP16, (), space=space)
            except InfeasibleError:
                plan = None
            own.append(time.process_time() - begin)
    return plan, median(spent[0]), median(spent[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", nargs=2, metavar=("MODEL", "CLUSTER"), help="one of them alone")
    parser.add_argument("--page", type=Path, help="write the part of this page")
    wish = parser.parse_args()
    rows = []
    for model, spec in MODELS.items():
        graph = resolve_model(spec, sequence_length=2048, dtype=torch.float16).trace()
        for name in CLUSTERS:
            if wish.case and wish.case != [model, name]:
                continue
            cluster, row = cluster_of(name), [model, DEVICES[name]]
            for space in ("sailor", "default"):
                plan, first_s, next_s = planned(graph, cluster, space, wish.rounds)
                row += [f"{first_s:.3f}, {next_s:.3f}" if space == "sailor" else f"{first_s:.2f}", *_told(plan)]
                if space == "sailor":
                    row.insert(3, f"{PUBLISHED_S[name]:g}" if model == "OPT-350M" else "")
            rows.append(row)
            print("; ".join(row), flush=True)
    head = ("model", "devices", "its space: CPU s", "Sailor", "step", "gap", "plan",
            "default: CPU s", "step", "gap", "plan")  # fmt: skip
    text = (
        f"CPU seconds are medians of {wish.rounds}, in its space of the first search of a traced model and of the next one; "
        "Sailor's are the published ones, on another\nmachine.\n\n"
    )
    text += markdown(head, rows)
    print(text)
    if wish.page is not None:
        write_part(wish.page, "sailor", text)


def _told(plan: Plan | None) -> tuple[str, str, str]:
    if plan is None:
        return "none", "", ""
    pipeline = f", {plan.schedule}" if plan.mesh.pp > 1 else ""
    choices = f"{plan.mesh}{pipeline}, ZeRO {plan.zero_stage}, micro-batch {micro_batch_text(plan)}"
    return seconds(plan.predicted.step_time_s), f"{plan.search.gap:.1%}", choices


if __name__ == "__main__":
    main()

"""Bounds alone, a sampler alone, and both, at the same number of trials, in spaces that are too large to be searched to the end.

Run: ``python -m tools.benchmarks.samplers [--only NAME] [--page docs/evidence/samplers.md]`` (minutes). The spaces are shipped ones, of
which so few candidates count as searchable to the end that none is; each row begins with an evaluator that has seen nothing.
Ends with 1 where both together find a slower plan than bounds alone do at the most trials of a problem, which are fewer than any
shipped space has; where they do so at fewer, the page says it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from autopar.api import PRECISIONS
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.planner.branch_and_bound.branch_and_bound import BranchAndBound
from autopar.planner.branch_and_bound.sampling import BY_BOUNDS, BY_SAMPLER, Sampling
from autopar.planner.planner import Planner, Task
from autopar.planner.search import Limits
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import SamplerName, load_space
from tools.benchmarks import baselines
from tools.revision import revision

ROUND = BY_BOUNDS + BY_SAMPLER
METHODS: dict[str, tuple[SamplerName, int, int]] = {
    "bounds alone": ("none", BY_BOUNDS, BY_SAMPLER),
    "TPE alone": ("tpe", 0, ROUND),
    "both, TPE": ("tpe", BY_BOUNDS, BY_SAMPLER),
    "both, NSGA-II": ("nsga2", BY_BOUNDS, BY_SAMPLER),
    "both, CMA-ES": ("cmaes", BY_BOUNDS, BY_SAMPLER),
}
CASES = {
    "GPT 1.3B, 16 A10G of 4 nodes": ("default", (16, 48)),
    "Llama 7B, 8 H100": ("exhaustive", (16, 48)),
    "GPT 13B, 16 A100": ("exhaustive", (16, 48)),
    "Llama 8B at 32k tokens, 32 H100": ("exhaustive", (48,)),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """``step_time_s``: None where nothing that was asked fits."""

    method: str
    trials: int
    step_time_s: float | None
    asked: int
    lower_bound_s: float
    cpu_s: float
    plan: str


def run(problem: baselines.Problem, graph: Graph, space: str, method: str, trials: int) -> Row:
    start = time.process_time()
    task = Task(
        graph=graph, cluster=Cluster.parse(problem.cluster), global_batch_size=problem.global_batch_size,
        precision=PRECISIONS["bf16"], optimizer="adamw", pins=Pins.parse(()), space=replace(load_space(space), exhaustive=1),
    )  # fmt: skip
    made, (kind, by_bounds, by_sampler) = Planner(task), METHODS[method]
    sampling = Sampling(
        kind=kind, devices_per_node=task.cluster.devices_per_node, by_bounds=by_bounds, by_sampler=by_sampler
    )
    search = BranchAndBound(made.evaluator, made.pool, limits=Limits(trials=trials), sampling=sampling)
    found = search.run()
    return Row(
        method=method,
        trials=trials,
        step_time_s=found.best.prediction.step_time_s if found.best else None,
        asked=len(search.order),
        lower_bound_s=found.lower_bound_s,
        cpu_s=time.process_time() - start,
        plan=str(found.best.candidate) if found.best else "",
    )


HEAD = """# Bounds, a sampler, and both

Written by `python -m tools.benchmarks.samplers --page docs/evidence/samplers.md`; do not edit. Run at revision {revision}. Spaces of which every candidate is more than
is searched to the end, at the same number of trials: in order of bounds alone, by Optuna's TPE alone (with the experts' choices
first, and candidates that a bound excludes left out), and in rounds of {bounds} questions in order of bounds and {sampler} of a sampler
([why](../adr/0019-samplers.md)). Step times are predictions; "over the best" is over the least of all rows of the problem; `asked` is
below `trials` where bounds exclude all else, and the plan is then the best there is. CPU seconds on two busy cores, without tracing.

"""


def page(results: Mapping[str, list[Row]]) -> str:
    lines = [HEAD.format(bounds=BY_BOUNDS, sampler=BY_SAMPLER, revision=revision())]
    for name, rows in results.items():
        best_s = min(row.step_time_s for row in rows if row.step_time_s is not None)
        lines.append(f"## {name}, space `{CASES[name][0]}`\n\n")
        lines.append("| trials | method | step time | over the best | asked | lower bound | CPU s | outer choice |\n")
        lines.append("|---|---|---|---|---|---|---|---|\n")
        for row in rows:
            took = "none fits" if row.step_time_s is None else f"{row.step_time_s:.4g} s"
            over = "" if row.step_time_s is None else f"{row.step_time_s / best_s:.3f}"
            lines.append(
                f"| {row.trials} | {row.method} | {took} | {over} | {row.asked} | {row.lower_bound_s:.4g} s | {row.cpu_s:.1f} "
                f"| {row.plan} |\n"
            )
        lines.append("\n")
    return "".join(lines).rstrip("\n") + "\n"


def worse(results: Mapping[str, list[Row]]) -> list[str]:
    """Where both, in the shipped share, find a slower plan than bounds alone at the most trials."""
    found = []
    for name, rows in results.items():
        most = max(row.trials for row in rows)
        times = {(row.trials, row.method): row.step_time_s or float("inf") for row in rows}
        for (trials, method), ours_s in times.items():
            plain_s = times[trials, "bounds alone"]
            if method == "both, TPE" and trials == most and ours_s > plain_s * (1 + 1e-9):
                found.append(f"{name}: {trials} trials with TPE {ours_s:.6g} s, by bounds alone {plain_s:.6g} s")
    return found


def compare(name: str) -> list[Row]:
    problem = baselines.PROBLEMS[name]
    graph, rows, (space, budgets) = problem.graph(name), list[Row](), CASES[name]
    for trials in budgets:
        for method, (kind, *_) in METHODS.items():
            if kind != "cmaes" or find_spec("cmaes") is not None:
                rows.append(run(problem, graph, space, method, trials))
                print(f"{name}: {rows[-1]}", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=CASES, action="append")
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    results = {name: compare(name) for name in options.only or CASES}
    return baselines.give(page(results), options.page, worse(results))


if __name__ == "__main__":
    sys.exit(main())

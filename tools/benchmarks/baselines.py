"""autopar's plan beside expert rules, random search and plain TPE over the same candidates, priced by the same evaluator.

Random search and TPE (Optuna's, multivariate, without seeds of ours) have ten times the evaluations that autopar made, at
least 100; each asks for outer choices and has layouts, stage cut and recompute solved as well as autopar's are. Expert rules
are pins, of which the most usual candidate that fits is taken. Ends with 1 where autopar is slower than any of them.

Run: ``python -m tools.benchmarks.baselines [--only NAME] [--results FILE] [--page docs/evidence/search.md]``. Results are kept in
FILE problem by problem, so that a run goes on after a stop.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autopar.api import PRECISIONS
from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.models.transformer import Sizes, build
from autopar.planner.planner import Planner, Task
from autopar.planner.search import Evaluation, Limits
from autopar.planner.space import preferences as experts
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from autopar.tracing.trace import trace
from autopar.util.files import write_text
from tools.benchmarks.tpe import Sampler
from tools.revision import revision

TIMES, LEAST_TRIALS, SEED = 10, 100, 0


@dataclass(frozen=True, kw_only=True)
class Problem:
    cluster: str
    global_batch_size: int
    layers: int
    sizes: Sizes

    def graph(self, name: str) -> Graph:
        model, batch = build(self.sizes, self.layers)
        return trace(model, (), batch, name=name)


def llama(hidden: int, ffn: int, heads: int, kv_heads: int, vocabulary: int, sequence: int) -> Sizes:
    return Sizes(family="llama", hidden=hidden, ffn=ffn, heads=heads, kv_heads=kv_heads, vocabulary=vocabulary,
                 sequence=sequence, attention="flash", dtype="bfloat16")  # fmt: skip


def gpt(hidden: int, heads: int, sequence: int = 2048) -> Sizes:
    return Sizes(family="gpt", hidden=hidden, ffn=4 * hidden, heads=heads, kv_heads=heads, vocabulary=51200,
                 sequence=sequence, attention="flash", dtype="bfloat16")  # fmt: skip


PROBLEMS = {
    "Llama 7B, 8 H100": Problem(
        cluster="h100-sxm5-80gb:1x8", global_batch_size=64, layers=32, sizes=llama(4096, 11008, 32, 32, 32000, 4096)
    ),
    "GPT 13B, 16 A100": Problem(cluster="a100-sxm4-80gb:2x8", global_batch_size=128, layers=40, sizes=gpt(5120, 40)),
    "GPT 1.3B, 16 A10G of 4 nodes": Problem(
        cluster="a10g-24gb:4x4", global_batch_size=64, layers=24, sizes=gpt(2048, 16)
    ),
    "Llama 8B at 32k tokens, 32 H100": Problem(
        cluster="h100-sxm5-80gb:4x8", global_batch_size=32, layers=32, sizes=llama(4096, 14336, 32, 8, 128256, 32768)
    ),
    "Llama 70B, 64 H100": Problem(
        cluster="h100-sxm5-80gb:8x8", global_batch_size=256, layers=80, sizes=llama(8192, 28672, 64, 8, 128256, 4096)
    ),
    "GPT 175B, 256 A100": Problem(
        cluster="a100-sxm4-80gb:32x8", global_batch_size=512, layers=96, sizes=gpt(12288, 96)
    ),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a method found: None where nothing fits; ``cpu_s`` without tracing."""

    method: str
    step_time_s: float | None
    evaluations: int
    cpu_s: float
    plan: str


def planner(problem: Problem, graph: Graph, pins: tuple[str, ...] = ()) -> Planner:
    task = Task(
        graph=graph,
        cluster=Cluster.parse(problem.cluster),
        global_batch_size=problem.global_batch_size,
        precision=PRECISIONS["bf16"],
        optimizer="adamw",
        pins=Pins.parse(pins),
        space=load_space("default"),
    )
    return Planner(task, explains=False)


def autopar(problem: Problem, graph: Graph) -> Row:
    start = time.process_time()
    plan = planner(problem, graph).search(limits=Limits())
    schedule = f", {plan.schedule}" + (f" v={plan.virtual_stages}" if plan.virtual_stages > 1 else "")
    return Row(
        method="autopar",
        step_time_s=plan.predicted.step_time_s,
        evaluations=plan.search.evaluated,
        cpu_s=time.process_time() - start,
        plan=f"{plan.mesh}, zero={plan.zero_stage}, micro_batch={plan.micro_batch_size}{schedule * (plan.mesh.pp > 1)}",
    )


def rules(problem: Problem) -> Iterator[tuple[str, list[tuple[str, ...]]]]:
    """Names, and pins to try one after the other until something fits."""
    for rule in experts.rules(Cluster.parse(problem.cluster).devices_per_node):
        yield rule.name, list(rule.tries)


def expert(problem: Problem, graph: Graph, method: str, tries: list[tuple[str, ...]]) -> Row:
    start, looked_at = time.process_time(), 0
    for pins in tries:
        found = planner(problem, graph, pins)
        if not found.pool:
            continue
        try:
            plan = found.estimate()
        except InfeasibleError:
            looked_at += len(found.pool)
            continue
        looked_at += plan.search.evaluated
        text = f"{plan.mesh}, zero={plan.zero_stage}, micro_batch={plan.micro_batch_size}"
        return Row(method=method, step_time_s=plan.predicted.step_time_s, evaluations=looked_at,
                   cpu_s=time.process_time() - start, plan=text)  # fmt: skip
    return Row(method=method, step_time_s=None, evaluations=looked_at, cpu_s=time.process_time() - start, plan="")


def random_search(problem: Problem, graph: Graph, trials: int) -> Row:
    start = time.process_time()
    found = planner(problem, graph)
    drawn = random.Random(SEED).sample(found.pool, min(trials, len(found.pool)))
    made = [e for c in drawn if isinstance(e := found.evaluator.evaluate(c), Evaluation)]
    return _row("random search", made, len(drawn), start)


def plain_tpe(problem: Problem, graph: Graph, trials: int) -> Row:
    start = time.process_time()
    found = planner(problem, graph)
    study, made, seen = Sampler(found.pool, seed=SEED), [], set()
    for _ in range(trials):
        candidate = study.ask()
        evaluation = found.evaluator.evaluate(candidate)
        study.tell(evaluation)
        seen.add(candidate)
        if isinstance(evaluation, Evaluation):
            made.append(evaluation)
    return _row("plain TPE", made, len(seen), start)


def _row(method: str, made: list[Evaluation], evaluations: int, start: float) -> Row:
    best = min(made, key=lambda e: e.prediction.step_time_s, default=None)
    return Row(
        method=method,
        step_time_s=best.prediction.step_time_s if best else None,
        evaluations=evaluations,
        cpu_s=time.process_time() - start,
        plan=str(best.candidate) if best else "",
    )


def compare(name: str, say: Callable[[str], None]) -> list[Row]:
    problem = PROBLEMS[name]
    graph = problem.graph(name)
    rows = [autopar(problem, graph)]
    rows += [expert(problem, graph, method, tries) for method, tries in rules(problem)]
    trials = max(TIMES * rows[0].evaluations, LEAST_TRIALS)
    for method in (random_search, plain_tpe):
        rows.append(method(problem, graph, trials))
        say(f"{name}: {rows[-1].method} {rows[-1].step_time_s} s after {rows[-1].cpu_s:.1f} CPU-s")
    return rows


HEAD = """# The search beside rules and samplers

Written by `python -m tools.benchmarks.baselines`; do not edit. Run at revision {revision}. One evaluator prices every row, and solves layouts, stage
cut and recompute for every outer choice that a method asks for. Rules are pins, of which the most usual candidate that fits
is taken; random search draws candidates without putting back; plain TPE is Optuna's, multivariate, without our seeds. Both
have {times} times autopar's evaluations as trials, at least {least}, or all candidates where there are fewer; the column
counts different candidates, and TPE asks again for some that it has seen. CPU seconds on two busy cores, without tracing.
Step times are predictions.

"""


def page(results: dict[str, list[Row]]) -> str:
    lines = [HEAD.format(times=TIMES, least=LEAST_TRIALS, revision=revision())]
    for name, rows in results.items():
        best_s = rows[0].step_time_s
        assert best_s is not None
        lines.append(f"## {name}\n\n| method | step time | over autopar | evaluations | CPU s | outer choice |\n")
        lines.append("|---|---|---|---|---|---|\n")
        for row in rows:
            took = "does not fit" if row.step_time_s is None else f"{row.step_time_s:.4g} s"
            ratio = "" if row.step_time_s is None else f"{row.step_time_s / best_s:.3f}"
            lines.append(f"| {row.method} | {took} | {ratio} | {row.evaluations} | {row.cpu_s:.1f} | {row.plan} |\n")
        lines.append("\n")
    return "".join(lines).rstrip("\n") + "\n"


def worse(results: dict[str, list[Row]]) -> list[str]:
    """Where a method beat autopar, by more than rounding."""
    found = []
    for name, (ours, *others) in results.items():
        assert ours.step_time_s is not None
        found += [
            f"{name}: {row.method} takes {row.step_time_s:.6g} s, autopar {ours.step_time_s:.6g} s"
            for row in others
            if row.step_time_s is not None and row.step_time_s < ours.step_time_s * (1 - 1e-9)
        ]
    return found


def give(text: str, path: Path | None, found_worse: Sequence[str]) -> int:
    """Write a page, or print it; the exit code says whether anything was worse."""
    if path is not None:
        write_text(path, text, make_folder=True)
    else:
        print(text)
    for line in found_worse:
        print(f"WORSE: {line}")
    return 1 if found_worse else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PROBLEMS, action="append")
    parser.add_argument("--results", type=Path, default=Path("out/baselines.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    kept: dict[str, list[Row]] = {}
    if options.results.exists():
        kept = {k: [Row(**row) for row in rows] for k, rows in json.loads(options.results.read_text()).items()}
    for name in options.only or PROBLEMS:
        if name not in kept:
            kept[name] = compare(name, lambda text: print(text, flush=True))
            write_text(
                options.results,
                json.dumps({k: [asdict(row) for row in rows] for k, rows in kept.items()}, indent=1),
                make_folder=True,
            )
    results = {name: kept[name] for name in PROBLEMS if name in kept}
    return give(page(results), options.page, worse(results))


if __name__ == "__main__":
    sys.exit(main())

"""CPU time of a training step of autopar's program over the same model and plan by other means.

Two ranks on this machine, both programs in the same processes, their steps in turn, losses equal first.
Prints the ratio of the medians, and each median. Run: ``python -m tools.benchmarks.bench [--steps N]``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.plan.mesh import I, Mesh, S, Type
from autopar.plan.plan import Plan
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.tracing.trace import trace
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.plans import make_plan
from tools.benchmarks import rivals

BATCH, SEQUENCE, VOCABULARY = 8, 128, 1024
LIMIT = 1.10
WARM_UP = 3
MICRO_BATCHES = 4
PLANS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "DDP": (Mesh(dp_replicate=2), {"micro_batch_size": BATCH // 2}),
    "FSDP2 ZeRO-3": (Mesh(dp_shard=2), {"micro_batch_size": BATCH // 2, "zero_stage": 3}),
    "tensor parallel": (
        Mesh(tp=2),
        {"micro_batch_size": BATCH // 2, "global_batch_size": BATCH // 2, "byte_price": 10.0},
    ),
    "pipeline 1F1B": (Mesh(pp=2), {"micro_batch_size": BATCH // MICRO_BATCHES}),
}


def build_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4,
        n_embd=384,
        n_head=8,
        vocab_size=VOCABULARY,
        n_positions=SEQUENCE,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def make_batch(seed: int, size: int = BATCH) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def megatron(graph: Graph) -> dict[str, tuple[Type, ...]]:
    """Types at rest of the plan that tensor parallelism by hand has."""
    split = {
        "attn.c_attn.weight": S(1),
        "attn.c_attn.bias": S(0),
        "attn.c_proj.weight": S(0),
        "mlp.c_fc.weight": S(1),
        "mlp.c_fc.bias": S(0),
        "mlp.c_proj.weight": S(0),
    }
    return {p.name: (next((t for end, t in split.items() if p.fqn.endswith(end)), I),) for p in graph.parameters}


def ours(plan: Plan, graph: Graph) -> rivals.Step:
    parallel = ParallelModel(lower(plan, graph), World(plan.mesh, "cpu"), ModelWeights(build_model(), 0))
    return parallel.train_step, rivals.updater(parallel.parameters())


def rival(name: str) -> rivals.Step:
    makers: dict[str, Callable[[Any], rivals.Step]] = {
        "DDP": rivals.ddp,
        "FSDP2 ZeRO-3": rivals.fsdp,
        "tensor parallel": rivals.tensor_parallel,
        "pipeline 1F1B": lambda model: rivals.pipeline(model, MICRO_BATCHES),
    }
    return makers[name](build_model())


def contest(name: str, plan: Plan, graph: Graph, steps: int) -> dict[str, Any]:
    """On every rank: losses of both, then CPU seconds of forward and backward, and of the update, of each step."""
    size = plan.global_batch_size
    programs = {"autopar": ours(plan, graph), name: rival(name)}
    losses: dict[str, list[float]] = {key: [] for key in programs}
    times: dict[str, list[tuple[float, float]]] = {key: [] for key in programs}
    for seed in range(steps + WARM_UP):
        batch = make_batch(seed, size)
        for key, (work, update) in programs.items() if seed % 2 else reversed(programs.items()):
            start = time.process_time()
            loss = work(batch)
            worked = time.process_time()
            update()
            times[key].append((worked - start, time.process_time() - worked))
            losses[key].append(loss.item())
    return {"losses": losses, "times": {key: found[WARM_UP:] for key, found in times.items()}}


def plan_of(name: str, graph: Graph) -> Plan:
    mesh, options = PLANS[name]
    rests = megatron(graph) if mesh.tp > 1 else None
    return make_plan(graph, mesh, rests=rests, **{"global_batch_size": BATCH, **options})


def report(name: str, ranks: Sequence[dict[str, Any]]) -> float:
    """Prints one line; gives the ratio of whole steps."""
    for rank in ranks:
        for step, (mine, theirs) in enumerate(zip(rank["losses"]["autopar"], rank["losses"][name], strict=True)):
            assert abs(mine - theirs) <= 1e-4 * abs(theirs), f"{name}: losses of step {step}: {mine} and {theirs}"
    whole, work = {}, {}
    for key in ("autopar", name):
        steps = list(zip(*(rank["times"][key] for rank in ranks), strict=True))
        whole[key] = median(sum(w + u for w, u in step) for step in steps)
        work[key] = median(sum(w for w, _ in step) for step in steps)
    ratio = whole["autopar"] / whole[name]
    print(
        f"{name:16} {ratio:.3f} ({whole['autopar']:.3f} s over {whole[name]:.3f} s), "
        f"without the optimizer {work['autopar'] / work[name]:.3f}",
        flush=True,
    )
    return ratio


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=PLANS, help="one contest")
    options = parser.parse_args()
    graph = trace(build_model(), kwargs=make_batch(0))
    print("CPU time of a step on both ranks, autopar over ...")
    ratios = []
    with WorkerPool(2, preload=("torch", "transformers", "tools.benchmarks.rivals")) as pool:
        for name in [options.only] if options.only else PLANS:
            ranks = pool.run(contest, name, plan_of(name, graph), graph, options.steps, timeout_s=600.0)
            ratios.append(report(name, ranks))
    print(f"worst ratio {max(ratios):.3f}, limit {LIMIT}")
    return int(max(ratios) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())

"""Time and memory of a training step of autopar's program on one device over the same model by torch alone.

``python -m tools.benchmarks.device --model MODEL [--out FILE] [--sequence N] [--batch N] [--micro-batch N] [--steps N]``: on
the GPU where there is one. In fp32 the rival is the plain model, in bf16 FSDP2 with its mixed precision on one rank, and
``torch.autocast`` over weights in fp32. Steps in turn; losses have to be equal first.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from autopar import api
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.models.resolve import ModelSource, resolve_model
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, FP32, Precision
from autopar.runtime.job import start, stop
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import ModelWeights
from autopar.runtime.world import World
from autopar.util.files import write_json
from tests.support.distributed.plans import make_plan
from tools.benchmarks.rivals import Step, updater

WARM_UP = 2
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}
"""Of a loss, relative: of sums in fp32, and of values rounded to bf16."""


def ours(source: ModelSource, graph: Graph, precision: Precision, batch: int, micro_batch: int, device: str) -> Step:
    plan = make_plan(
        graph, Mesh(), global_batch_size=batch, micro_batch_size=micro_batch, precision=precision, recompute="none"
    )
    world = World(plan.mesh, device)
    program = lower(plan, graph, device=world.device, rank=world.rank)
    parallel = ParallelModel(program, world, ModelWeights(source.build(), 0))
    return parallel.train_step, updater(parallel.parameters())


def torch_alone(source: ModelSource, micro_batch: int, device: str, *, autocast: bool) -> Step:
    """The plain model; with ``autocast`` its products in bf16."""
    model = source.build().to(device)
    return _accumulated(model, micro_batch, device, autocast=autocast), updater(model.parameters())


def fsdp(source: ModelSource, micro_batch: int, device: str) -> Step:
    """FSDP2 around every layer, parameters in bf16 for computing, gradients in fp32."""
    model: Any = source.build().to(device)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return _accumulated(model, micro_batch, device, autocast=False), updater(model.parameters())


def _accumulated(model: Any, micro_batch: int, device: str, *, autocast: bool) -> Callable[[dict[str, Tensor]], Tensor]:
    def step(batch: dict[str, Tensor]) -> Tensor:
        parts = [{k: v[i : i + micro_batch] for k, v in batch.items()} for i in range(0, _size(batch), micro_batch)]
        total = torch.zeros((), device=device)
        for part in parts:
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = model(**part).loss / len(parts)
            loss.backward()
            total += loss.detach()
        return total

    return step


def _size(batch: dict[str, Tensor]) -> int:
    return len(next(iter(batch.values())))


def contest(steps: dict[str, Step], batches: Sequence[dict[str, Tensor]], device: str) -> dict[str, Any]:
    """Losses and seconds of each program's steps, in turn, and its peak of memory beside what the others hold."""
    losses: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn, batch in enumerate(batches):
        for name, (work, update) in list(steps.items())[:: 1 if turn % 2 else -1]:
            _synchronize(device)
            begin = time.perf_counter()
            loss = work(batch)
            update()
            _synchronize(device)
            seconds[name].append(time.perf_counter() - begin)
            losses[name].append(loss.item())
    peaks = {}
    for name, (work, update) in steps.items() if device == "cuda" else ():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work(batches[0])
        update()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    return {
        "losses": losses,
        "step_s": {name: median(found[WARM_UP:]) for name, found in seconds.items()},
        "peak_bytes_over_parameters_and_states": peaks,
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def check_losses(losses: dict[str, list[float]], tolerance: float) -> None:
    """All programs compute the same, step by step."""
    first, *others = losses
    for name in others:
        for step, (mine, theirs) in enumerate(zip(losses[first], losses[name], strict=True)):
            assert abs(mine - theirs) <= tolerance * abs(theirs), f"{name}: losses of step {step}: {mine} and {theirs}"


def run(options: argparse.Namespace, device: str) -> dict[str, Any]:
    source = resolve_model(options.model, sequence_length=options.sequence)
    found = {}
    for precision in (FP32, BF16):
        graph = api.trace(
            source.model,
            example_inputs=source.example_inputs,
            precision="fp32" if precision is FP32 else "bf16",
            name=source.name,
            global_batch_size=options.batch,
        )
        programs = {"autopar": ours(source, graph, precision, options.batch, options.micro_batch, device)}
        if precision is FP32:
            programs["torch"] = torch_alone(source, options.micro_batch, device, autocast=False)
        else:
            programs["FSDP2"] = fsdp(source, options.micro_batch, device)
            programs["torch.autocast"] = torch_alone(source, options.micro_batch, device, autocast=True)
        batches = [
            {k: v.to(device) for k, v in source.make_batch(options.batch, seed=seed).items()}
            for seed in range(options.steps + WARM_UP)
        ]
        result = contest(programs, batches, device)
        check_losses(result["losses"], TOLERANCE[precision.name])
        found[precision.name] = result
        mine = result["step_s"]["autopar"]
        for name, theirs in result["step_s"].items():
            if name != "autopar":
                print(f"{precision.name} {name:15} {mine / theirs:.3f} ({mine:.4f} s over {theirs:.4f} s)", flush=True)
        programs.clear()
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start(device)
    try:
        found = run(options, device)
    finally:
        stop()
    if options.out is not None:
        write_json(options.out, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

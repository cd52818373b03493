"""One rank of a job that ``make gpus`` starts under torchrun: ``-m tools.gpus.ranks WHAT RESULT DEVICE [CASE]``."""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.api import parallelize
from autopar.models.resolve import ModelSource, resolve_model
from autopar.runtime.job import start, stop
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.step.local_batch import EVERY
from autopar.util.files import write_json
from autopar.verification.reference import adamw, loss_of

STEPS, TIMED = 3, 7

PATIENCE_S = 90.0
"""How long a rank that has failed stays alive: what ends the others is the alarm, not the end of its process."""

BATCH = 16
"""Samples of a step; whatever ranks take samples divide it."""

LLAMA = (
    "hf:llama?hidden_size=128&intermediate_size=256&num_hidden_layers=4&num_attention_heads=8&num_key_value_heads=8&"
    "vocab_size=512&max_position_embeddings=64"
)
GPT2 = "hf:gpt2?n_embd=128&n_layer=4&n_head=8&vocab_size=512&n_positions=64"
MIXTRAL = LLAMA.replace("hf:llama", "hf:mixtral") + "&num_local_experts=8&num_experts_per_tok=2"
LENGTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan: its model, what is pinned, and the precision."""

    name: str
    pins: tuple[str, ...]
    model: str = LLAMA
    precision: str = "fp32"


def cases_of(num_ranks: int) -> tuple[Case, ...]:
    """Those for 2, 4 or 8 ranks: every axis alone, and where there are enough ranks two together."""
    n, half = num_ranks, num_ranks // 2
    ring, gather, ulysses = (("cp=" + str(n), f"cp_attention={way}") for way in ("ring", "gather", "ulysses"))
    found = [
        Case(name="tensor parallel", pins=(f"tp={n}",)),
        Case(name="tensor parallel, GPT-2", pins=(f"tp={n}",), model=GPT2),
        Case(name="data parallel", pins=(f"dp_replicate={n}",)),
        Case(name="ZeRO 1", pins=(f"dp_shard={n}", "zero=1")),
        Case(name="ZeRO 2", pins=(f"dp_shard={n}", "zero=2", "recompute=selective")),
        Case(name="ZeRO 3", pins=(f"dp_shard={n}", "zero=3", "recompute=full")),
        Case(name="ZeRO 3 in bf16", pins=(f"dp_shard={n}", "zero=3"), precision="bf16"),
        Case(name="pipeline", pins=("pp=2", f"dp_shard={half}", "micro_batch=1")),
        Case(name="interleaved pipeline", pins=("pp=2", "virtual_stages=2", f"dp_replicate={half}", "micro_batch=1")),
        Case(name="context parallel, ring", pins=ring),
        Case(name="context parallel, ring in bf16", pins=ring, precision="bf16"),
        Case(name="context parallel, gather in bf16", pins=gather, precision="bf16"),
        Case(name="context parallel, Ulysses in bf16", pins=ulysses, precision="bf16"),
        Case(name="experts on the tensor axis", pins=(f"tp={n}", f"ep={n}", "ep_data=1"), model=MIXTRAL),
        Case(name="experts over data", pins=(f"ep={n}", f"dp_shard={n}"), model=MIXTRAL),
        Case(name="experts over data in bf16", pins=(f"ep={n}", f"dp_shard={n}"), model=MIXTRAL, precision="bf16"),
    ]
    if half > 1:
        found += [
            Case(name="tensor and data parallel", pins=("tp=2", f"dp_shard={half}", "zero=3")),
            Case(name="pipeline and tensor parallel", pins=("pp=2", f"tp={half}", "micro_batch=1")),
        ]
    return tuple(found)


def train(result: Path, device: str, case: Case) -> None:
    """Steps of a plan against those of the model on this rank's device alone; then steps that are timed, and syncs."""
    source = resolve_model(case.model, sequence_length=LENGTH)
    parallel = _parallel(source, device, case)
    model = _model(source).to(parallel._world.device)
    mine, theirs = adamw(parallel.parameters()), adamw(model.parameters())
    losses: list[tuple[float, float]] = []
    for seed in range(STEPS):
        batch = source.make_batch(BATCH, seed=seed)
        loss = loss_of(model(**{name: value.to(parallel._world.device) for name, value in batch.items()}))
        loss.backward()
        losses.append((parallel.train_step(batch).item(), loss.item()))
        for optimizer in (mine, theirs):
            optimizer.step()
            optimizer.zero_grad()
    found = parallel.full_state_dict()
    wanted = {name: value.detach().cpu() for name, value in model.state_dict().items() if name in found}
    loss_error = max(abs(a - b) / abs(b) for a, b in losses)
    errors = {name: _error(found[name], value) for name, value in wanted.items()}
    parallel.monitor.close()
    batch = source.make_batch(BATCH, seed=STEPS)
    syncs = _syncs(parallel, batch)
    seconds = _step_s(parallel, mine, batch)
    row = {
        "losses": losses,
        "loss_error": loss_error,
        "parameter_error": max(errors.values()),
        "worst": max(errors, key=lambda name: errors[name]),
        "num_parameters": len(errors),
        "step_s": seconds,
        "predicted_s": parallel.plan.predicted.step_time_s,
        "syncs": syncs,
        "mesh": str(parallel.plan.mesh),
        "cluster": parallel.plan.cluster,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, row)
    if dist.get_rank() == 0:
        slowest = max(one["step_s"] for one in everyone)
        worst = max(everyone, key=lambda one: (one["parameter_error"], one["loss_error"]))
        write_json(result, worst | {"step_s": slowest, "syncs": [one["syncs"] for one in everyone]})


def fail(result: Path, device: str) -> None:
    """The second rank fails in its third step and stays alive; the others wait for the loss of theirs."""
    case = Case(name="failure", pins=(f"dp_replicate={job_size(device)}",))
    source = resolve_model(case.model, sequence_length=LENGTH)
    parallel = _parallel(source, device, case)
    batch, rank = source.make_batch(BATCH), dist.get_rank()
    for step in range(3):
        if step == 2 and rank == 1:
            parallel._runner = _Failing()  # type: ignore[assignment]
            write_json(result, {"began": time.time()})
        try:
            loss = parallel.train_step(batch)
        except RuntimeError as error:
            if rank != 1:
                raise
            print(f"rank 1 stays alive with its error: {error}", file=sys.stderr, flush=True)
            time.sleep(PATIENCE_S)
            return
        loss.item()


class _Failing:
    """In place of what runs a step's micro-batches."""

    def run(self, batch: object, count: int) -> Tensor:
        raise RuntimeError("a failure made on purpose")

    evaluate = run


def job_size(device: str) -> int:
    """Ranks of the job, which is begun on ``device`` where it is not yet."""
    start(device)
    return dist.get_world_size()


def _parallel(source: ModelSource, device: str, case: Case) -> ParallelModel:
    """The plan is for what the ranks stand on."""
    size = job_size(device)
    return parallelize(
        _model(source),
        cluster=f"cpu:1x{size}" if device == "cpu" else None,
        example_inputs=source.make_batch(2),
        global_batch_size=BATCH,
        pins=case.pins,
        precision=case.precision,  # type: ignore[arg-type]
    )


def _model(source: ModelSource) -> nn.Module:
    """No parameter is zero: of such the optimizer's first steps are those of their gradients' signs, which rounding may turn."""
    model, generator = source.build(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.02)
    return model


def _error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest element."""
    wide = wanted.double()
    return float((found.double() - wide).abs().max() / wide.abs().max().clamp(min=1e-30))


def _syncs(parallel: ParallelModel, batch: dict[str, Tensor]) -> int | None:
    """How often the host waits for the device in a step whose batch is compared with those of other ranks; None without a GPU.

    Of a batch on the host and of one on the device, the larger number.
    """
    device = parallel._world.device
    if device.type != "cuda":
        return None
    there = {name: value.to(device) for name, value in batch.items()}
    return max(_waits(parallel, given) for given in (batch, there))


def _waits(parallel: ParallelModel, batch: dict[str, Tensor]) -> int:
    parallel._shared._calls = EVERY
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            parallel.train_step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(one.message) for one in said)


def _step_s(parallel: ParallelModel, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    """The median of a few steps, optimizer included."""
    found = []
    for _ in range(TIMED):
        optimizer.zero_grad()
        dist.barrier()
        start_s = time.perf_counter()
        parallel.train_step(batch).item()
        optimizer.step()
        if parallel._world.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start_s)
    return statistics.median(found[2:])


def main(arguments: list[str]) -> None:
    """See the module."""
    what, result, device = arguments[:3]
    if device == "cpu":
        torch.set_num_threads(1)
    if what == "fail":
        fail(Path(result), device)
    else:
        train(Path(result), device, cases_of(job_size(device))[int(arguments[3])])


if __name__ == "__main__":
    main(sys.argv[1:])
    stop()

"""Layouts of four ranks by name, and small models planned and trained under them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import api
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, Plan, Recompute
from autopar.tracing.trace import trace
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import adamw, loss_of
from tests.support.close import assert_close
from tests.support.distributed import jobs
from tests.support.distributed.plans import make_plan, micro_batch_size
from tests.support.distributed.subjects import HfSubject, graph_of

CHEAP_MEMORY = {"memory_price": 0.01}
"""Then parameters stay whole where that saves communication, and their gradients are summed over tp."""
LAYOUTS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "dp4": (Mesh(dp_replicate=4), {}),
    "dp4 ZeRO 1": (Mesh(dp_shard=4), {"zero_stage": 1}),
    "dp4 ZeRO 2": (Mesh(dp_shard=4), {"zero_stage": 2}),
    "dp4 ZeRO 3": (Mesh(dp_shard=4), {"zero_stage": 3}),
    "HSDP 2x2": (Mesh(dp_replicate=2, dp_shard=2), {"zero_stage": 3}),
    "HSDP 2x2 ZeRO 2": (Mesh(dp_replicate=2, dp_shard=2), {"zero_stage": 2}),
    "tp2": (Mesh(tp=2), {}),
    "tp2 whole parameters": (Mesh(tp=2), CHEAP_MEMORY),
    "tp4": (Mesh(tp=4), {}),
    "tp2 x dp2": (Mesh(tp=2, dp_replicate=2), {}),
    "tp2 x dp2 whole parameters": (Mesh(tp=2, dp_replicate=2), CHEAP_MEMORY),
    "tp2 x dp2 ZeRO 1": (Mesh(tp=2, dp_shard=2), {"zero_stage": 1, **CHEAP_MEMORY}),
    "tp2 x dp2 ZeRO 3": (Mesh(tp=2, dp_shard=2), {"zero_stage": 3}),
    "pp2 x dp2": (Mesh(pp=2, dp_replicate=2), {}),
    "pp2 x dp2 ZeRO 1": (Mesh(pp=2, dp_shard=2), {"zero_stage": 1}),
    "pp2 x dp2 ZeRO 3": (Mesh(pp=2, dp_shard=2), {"zero_stage": 3}),
    "pp2 x tp2": (Mesh(pp=2, tp=2), {}),
    "pp4": (Mesh(pp=4), {}),
    "pp2 GPipe": (Mesh(pp=2), {"schedule": "GPipe"}),
    "pp2 two virtual stages": (Mesh(pp=2), {"schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "dp2 ZeRO 3 recomputed": (Mesh(dp_shard=2), {"zero_stage": 3, "recompute": "full"}),
    "tp2 recomputed": (Mesh(tp=2), {"recompute": "full"}),
    "pp2 recomputed": (Mesh(pp=2), {"recompute": "full"}),
    "pp2 x dp2 ZeRO 3 made again": (Mesh(pp=2, dp_shard=2), {"zero_stage": 3, "recompute": "selective"}),
}


def traced(kind: str, dropout: float = 0.0) -> tuple[HfSubject, Any]:
    subject = HfSubject(kind, dropout=dropout)
    return subject, graph_of(subject)


@cache
def traced_in_half(kind: str) -> Any:
    """For plans in float16."""
    subject = HfSubject(kind)
    return api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), precision="fp16", name="half")


def planned(layout: str, kind: str, dropout: float = 0.0, **changes: Any) -> tuple[HfSubject, Any, Any]:
    mesh, options = LAYOUTS[layout]
    return planned_on(mesh, kind, dropout, **{**options, **changes})


def planned_on(mesh: Mesh, kind: str = "gpt2", dropout: float = 0.0, **options: Any) -> tuple[HfSubject, Any, Any]:
    subject, graph = traced(kind, dropout)
    plan = make_plan(graph, mesh, global_batch_size=16, micro_batch_size=micro_batch_size(mesh, 16), **options)
    return subject, plan, graph


def batches(subject: HfSubject, count: int) -> list[dict[str, Tensor]]:
    return [subject.make_batch(16, seed=seed) for seed in range(count)]


def on_ranks(
    pool: WorkerPool, job: Any, subject: Any, plan: Plan, graph: Any, *given: Any, timeout_s: float = 60.0
) -> tuple[Any, ...]:
    """What each rank of the plan finds of its parallel model."""
    return pool.run(jobs.on_model, job, subject, plan, graph, *given, size=plan.mesh.world_size, timeout_s=timeout_s)


def on_batch(pool: WorkerPool, job: Any, subject: Any, plan: Plan, graph: Any, *given: Any) -> tuple[Any, ...]:
    """What each rank of the plan finds that is given a global batch."""
    return on_ranks(pool, job, subject, plan, graph, subject.make_batch(plan.global_batch_size, seed=0), *given)


@cache
def clipped(subject: Any, batch_size: int) -> tuple[list[float], dict[str, Tensor]]:
    """Norms before they are clipped to 0.1, and parameters after two steps of one device."""
    model = subject.build()
    optimizer = adamw(model.parameters())
    norms = []
    for seed in range(2):
        batch = subject.make_batch(batch_size, seed=seed)
        optimizer.zero_grad()
        loss_of(model(**batch)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
    return norms, dict(model.named_parameters())


def clips_as_one_device(pool: WorkerPool, subject: Any, plan: Plan, graph: Any, *, alone: bool = False) -> None:
    """Norms and parameters on every rank, over two steps; ``alone``: each parameter is measured by its own largest element."""
    norms, parameters = clipped(subject, plan.global_batch_size)
    data = [subject.make_batch(plan.global_batch_size, seed=seed) for seed in range(2)]
    for rank in on_ranks(pool, jobs.train, subject, plan, graph, data, 0.1):
        assert rank["norms"] == pytest.approx(norms, rel=1e-5)
        for some in [{name: value} for name, value in parameters.items()] if alone else [parameters]:
            assert_close(rank["parameters"], some, 1e-4)


LAYOUTS_OF_CASTS = {**LAYOUTS, "pp2 x dp2 ZeRO 3 without shards": (Mesh(pp=2, dp_replicate=2), {"zero_stage": 3})}
"""Where FSDP casts, it may free what it has cast though there is nothing to shard."""


@cache
def traced_low() -> Any:
    subject = HfSubject("llama")
    return trace(subject.build().bfloat16(), kwargs=subject.make_batch(2, seed=0), name="llama")


def bf16_plan(layout: str) -> tuple[Any, Any]:
    graph, (mesh, options) = traced_low(), LAYOUTS_OF_CASTS[layout]
    micro = micro_batch_size(mesh, 16)
    return make_plan(graph, mesh, global_batch_size=16, micro_batch_size=micro, precision=BF16, **options), graph


def goes_on(pool: WorkerPool, subject: Any, graph: Any, data: Sequence[Any], folder: Path, *plans: Plan) -> None:
    """A run saved under the first plan has the same losses under each other one, which loads what the one before it has saved."""
    (losses, *_) = on_ranks(pool, jobs.save_run, subject, plans[0], graph, data, str(folder / "0"))
    for number, plan in enumerate(plans[1:]):
        folders = str(folder / f"{number}"), str(folder / f"{number + 1}")
        for found in on_ranks(pool, jobs.load_run, subject, plan, graph, data, *folders):
            assert found == (1, pytest.approx(losses, rel=1e-5)), f"{plan.mesh} after {plans[number].mesh}"


def stays_near_fp32(pool: WorkerPool, subject: HfSubject, plan: Plan, graph: Any) -> None:
    """Of a plan in bfloat16: the first loss is near to that of one device in float32, and parameters rest in float32."""
    data = batches(subject, 2)
    exact = loss_of(subject.build()(**data[0])).item()
    found = on_ranks(pool, jobs.train, subject, plan, graph, data)
    for rank in found:
        assert rank["losses"] == found[0]["losses"]
        assert rank["losses"][0] == pytest.approx(exact, rel=1e-2)
        assert all(tensor.dtype == torch.float32 for tensor in rank["parameters"].values())


def drops_the_same_again(pool: WorkerPool, subject: HfSubject, graph: Any, plans: Mapping[Recompute, Plan]) -> None:
    """Training with dropout under plans that differ in what they recompute."""
    data = batches(subject, 2)
    found = {mode: on_ranks(pool, jobs.train, subject, plan, graph, data) for mode, plan in plans.items()}
    plain = found["none"][0]
    dry = loss_of(HfSubject(subject.kind).build()(**data[0])).item()
    assert plain["losses"][0] != pytest.approx(dry, rel=1e-5)
    for mode, ranks in found.items():
        for rank in ranks:
            assert rank["losses"] == pytest.approx(plain["losses"], rel=1e-6)
            if mode == "full":
                assert_close(rank["parameters"], plain["parameters"], 1e-5)

"""Layouts of four ranks by name, and small models planned and trained under them."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from autopar import api
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP32, Plan, Precision, PrecisionName
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import loss_of
from autopar.verification.results import VerifyReport
from tests.support.close import assert_close
from tests.support.distributed import jobs
from tests.support.distributed.plans import estimated, make_plan, micro_batch_size
from tests.support.distributed.subjects import HfSubject, Unpadded, graph_of

CHEAP_MEMORY = {"memory_price": 0.01}
"""Then parameters stay whole where that saves communication, and their gradients are summed over tp."""
LAYOUTS: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "dp4": (Mesh(dp_replicate=4), {}), "dp2 ZeRO 1": (Mesh(dp_shard=2), {"zero_stage": 1}),
    "dp2 ZeRO 2": (Mesh(dp_shard=2), {"zero_stage": 2}), "dp4 ZeRO 3": (Mesh(dp_shard=4), {"zero_stage": 3}),
    "HSDP 2x2": (Mesh(dp_replicate=2, dp_shard=2), {"zero_stage": 3}),
    "HSDP 2x2 ZeRO 2": (Mesh(dp_replicate=2, dp_shard=2), {"zero_stage": 2}), "tp2": (Mesh(tp=2), {}),
    "tp2 whole parameters": (Mesh(tp=2), CHEAP_MEMORY), "tp4": (Mesh(tp=4), {}),
    "tp2 x dp2": (Mesh(tp=2, dp_replicate=2), {}),
    "tp2 x dp2 whole parameters": (Mesh(tp=2, dp_replicate=2), CHEAP_MEMORY),
    "tp2 x dp2 ZeRO 1": (Mesh(tp=2, dp_shard=2), {"zero_stage": 1, **CHEAP_MEMORY}),
    "tp2 x dp2 ZeRO 3": (Mesh(tp=2, dp_shard=2), {"zero_stage": 3}), "pp2 x dp2": (Mesh(pp=2, dp_replicate=2), {}),
    "pp2 x dp2 ZeRO 1": (Mesh(pp=2, dp_shard=2), {"zero_stage": 1}),
    "pp2 x dp2 ZeRO 3": (Mesh(pp=2, dp_shard=2), {"zero_stage": 3}), "pp2 x tp2": (Mesh(pp=2, tp=2), {}),
    "pp4": (Mesh(pp=4), {}), "pp2 GPipe": (Mesh(pp=2), {"schedule": "GPipe"}),
    "pp2 two virtual stages": (Mesh(pp=2), {"schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "dp2 ZeRO 3 recomputed": (Mesh(dp_shard=2), {"zero_stage": 3, "recompute": "full"}),
    "tp2 recomputed": (Mesh(tp=2), {"recompute": "full"}), "pp2 recomputed": (Mesh(pp=2), {"recompute": "full"}),
    "pp2 x dp2 ZeRO 3 made again": (Mesh(pp=2, dp_shard=2), {"zero_stage": 3, "recompute": "selective"}),
}  # fmt: skip


SEQUENCES = {
    "cp4 gather": "cp=4 cp_attention=gather zero=0", "cp2 x tp2 gather": "cp=2 tp=2 cp_attention=gather",
    "cp2 x dp2 ZeRO 3 gather": "cp=2 dp_shard=2 cp_attention=gather zero=3",
    "pp2 x cp2 gather": "pp=2 cp=2 cp_attention=gather zero=0", "cp2 x tp2 ulysses": "cp=2 tp=2 cp_attention=ulysses",
    "cp2 x dp2 ZeRO 3 ulysses": "cp=2 dp_shard=2 cp_attention=ulysses zero=3",
    "cp4 ring": "cp=4 cp_attention=ring zero=0", "cp2 x tp2 ring": "cp=2 tp=2 cp_attention=ring",
    "cp2 x tp2 ring made again": "cp=2 tp=2 cp_attention=ring recompute=selective",
    "cp2 x dp2 ZeRO 1 ring": "cp=2 dp_shard=2 cp_attention=ring zero=1",
}  # fmt: skip
"""Those that split sequences, by their pins."""


@cache
def traced(kind: str, dropout: float = 0.0, precision: PrecisionName = "fp32") -> tuple[HfSubject, Any]:
    """``kind``: of a subject with a padding mask, or ``unmasked`` behind it."""
    name, _, unmasked = kind.partition(" ")
    subject = (Unpadded if unmasked else HfSubject)(name, dropout=dropout)
    if precision == "fp32":
        return subject, graph_of(subject)
    example = subject.make_batch(2, seed=0)
    return subject, api.trace(subject.build(), example_inputs=example, precision=precision, name=name)


Planned = tuple[HfSubject, Any, Any]
"""A subject, a plan, and the graph that it is for."""


def planned(layout: str, kind: str, dropout: float = 0.0, precision: Precision = FP32, **changes: Any) -> Planned:
    """``changes``: of the plan, or pins where it splits sequences."""
    if layout not in SEQUENCES:
        mesh, options = LAYOUTS[layout]
        return planned_on(mesh, kind, dropout, precision, **{**options, **changes})
    subject, graph = traced(kind, dropout, precision.name)
    pins = [*SEQUENCES[layout].split(), "num_micro_batches=2", *(f"{name}={value}" for name, value in changes.items())]
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=16, pins=pins, precision=precision.name)
    return subject, plan, graph


def planned_on(
    mesh: Mesh, kind: str = "gpt2", dropout: float = 0.0, precision: Precision = FP32, **options: Any
) -> Planned:
    subject, graph = traced(kind, dropout, precision.name)
    sizes = {"global_batch_size": 16, "micro_batch_size": micro_batch_size(mesh, 16)}
    return subject, make_plan(graph, mesh, precision=precision, **sizes, **options), graph


def batches(subject: HfSubject, count: int) -> list[dict[str, Tensor]]:
    return [subject.make_batch(16, seed=seed) for seed in range(count)]


@cache
def loss_alone(kind: str) -> float:
    """Of the first batch, on one device that drops nothing."""
    subject = HfSubject(kind)
    return loss_of(subject.build()(**batches(subject, 1)[0])).item()


def on_ranks(
    pool: WorkerPool, job: Any, subject: Any, plan: Plan, graph: Any, *given: Any, timeout_s: float = 300.0
) -> tuple[Any, ...]:
    return pool.run(jobs.on_model, job, subject, plan, graph, *given, size=plan.mesh.world_size, timeout_s=timeout_s)


def on_batch(pool: WorkerPool, job: Any, subject: Any, plan: Plan, graph: Any, *given: Any) -> tuple[Any, ...]:
    """What each rank of the plan finds that is given a global batch."""
    return on_ranks(pool, job, subject, plan, graph, subject.make_batch(plan.global_batch_size, seed=0), *given)


@cache
def clipped(subject: Any, batch_size: int) -> dict[str, Any]:
    """Losses, norms before they are clipped to 0.1, and parameters after two steps of one device."""
    return jobs.train(subject.build(), [subject.make_batch(batch_size, seed=seed) for seed in range(2)], 0.1)


def clips_as_one_device(pool: WorkerPool, subject: Any, plan: Plan, graph: Any, *, alone: bool = False) -> None:
    """Losses, norms and parameters on every rank, over two steps; ``alone``: each parameter is measured by its own largest element."""
    wanted = clipped(subject, plan.global_batch_size)
    own = wanted["parameters"]
    data = [subject.make_batch(plan.global_batch_size, seed=seed) for seed in range(2)]
    for rank in on_ranks(pool, jobs.train, subject, plan, graph, data, 0.1):
        assert rank["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(wanted["norms"], rel=1e-5)
        for some in [{name: value} for name, value in own.items()] if alone else [own]:
            assert_close(rank["parameters"], some, 1e-4)


def equals_one_device(pool: Any, subject: Any, plan: Plan, graph: Any, *, steps: int = 2, **how: Any) -> VerifyReport:
    """Verified on every rank; no two steps have one loss."""
    report = verify(subject, plan, graph, steps=steps, pool=pool, run_timeout_s=300.0, **how)
    report.check()
    assert len(report.rows) == plan.mesh.world_size
    assert len(set(report.reference_losses)) == steps
    return report


def goes_on(
    pool: WorkerPool, subject: Any, graph: Any, data: Sequence[Any], folder: Path, *plans: Plan, by: str = "autopar"
) -> None:
    """A run saved under the first plan has the same losses under each other one, which loads what the one before it has saved."""
    wanted = None
    for number, plan in enumerate(plans):
        folders = str(folder / f"{number - 1}") if number else "", str(folder / f"{number}")
        for found in on_ranks(pool, jobs.go_on, subject, plan, graph, data, *folders, by):
            wanted = wanted or found[1]
            assert found == (1, pytest.approx(wanted, rel=1e-6 if by == "torch" else 1e-5)), f"{plan.mesh} in {folders}"

"""Programs of all layouts against one device: losses, gradients, parameters after AdamW, on every rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar.plan.mesh import Mesh
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.plans import make_plan, micro_batch_size
from tests.support.distributed.subjects import HfSubject

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

GLOBAL_BATCH = 16
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


@cache
def traced(kind: str) -> tuple[HfSubject, Any]:
    subject = HfSubject(kind)
    return subject, subject.trace()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama-untied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    subject, graph = traced(kind)
    mesh, options = LAYOUTS[layout]
    plan = make_plan(
        graph, mesh, global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size(mesh, GLOBAL_BATCH), **options
    )
    steps = 3 if kind == "llama" else 2  # the second one has what the first one left behind
    report = verify(subject, plan, graph, steps=steps, pool=pool, timeout_s=60.0)
    report.check()
    assert len(report.rows) == mesh.world_size
    assert len(set(report.reference_losses)) == steps

"""Programs of all layouts against one device: losses, gradients, parameters after AdamW, on every rank."""

from __future__ import annotations

import pytest

from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.layouts import LAYOUTS, traced
from tests.support.distributed.plans import make_plan, micro_batch_size

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

GLOBAL_BATCH = 16


KINDS = ["gpt2", "llama", "llama-untied"]
CASES = [
    (layout, KINDS[(number + turn) % 3])
    for number, (layout, (mesh, _)) in enumerate(LAYOUTS.items())
    for turn in range(1 + (mesh.pp > 1))
]
"""Kinds in turn: of pipelines two each, one of which is tied, as tied tables concern stages."""


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_equals_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    subject, graph = traced(kind)
    mesh, options = LAYOUTS[layout]
    plan = make_plan(
        graph, mesh, global_batch_size=GLOBAL_BATCH, micro_batch_size=micro_batch_size(mesh, GLOBAL_BATCH), **options
    )
    steps = 3 if kind == "llama" else 2  # the second one has what the first one left behind
    report = verify(subject, plan, graph, steps=steps, pool=pool, run_timeout_s=60.0)
    report.check()
    assert len(report.rows) == mesh.world_size
    assert len(set(report.reference_losses)) == steps

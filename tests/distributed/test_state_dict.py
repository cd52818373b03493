"""What ``torch.distributed.checkpoint`` saves of a parallel model under one plan it loads under another."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import api
from autopar.models.resolve import resolve_model
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import using
from tests.support.distributed.layouts import batches, planned

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

PADDED = "hf:gpt2?n_embd=32&n_layer=2&n_head=4&vocab_size=257&n_positions=17"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2 x dp2 ZeRO 3", "pp2 x dp2"),
        ("pp2 two virtual stages", "dp4 ZeRO 3"),
        ("pp2 x dp2 ZeRO 3", "pp2 two virtual stages"),
    ],
)
def test_under_another_plan(pool: WorkerPool, tmp_path: Path, before: str, after: str) -> None:
    subject, first, graph = planned(before, "gpt2")
    _, second, _ = planned(after, "gpt2")
    (batch,) = batches(subject, 1)
    for plan, call in ((first, using.saved_by_torch), (second, using.loaded_by_torch)):
        size = plan.mesh.world_size
        found = pool.run(call, subject, plan, graph, batch, str(tmp_path), size=size, timeout_s=60.0)
        if plan is first:
            wanted = found
    assert found[0] == (1, pytest.approx(wanted[0], rel=1e-6))


@pytest.mark.parametrize("pins", [["pp=2", "tp=2"], ["tp=2", "dp_shard=2", "zero=3"], ["dp_replicate=4"]])
def test_lengthened_vocabularies_have_the_models_length(pool: WorkerPool, tmp_path: Path, pins: list[str]) -> None:
    subject = resolve_model(PADDED)
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0, padded=True))
    plan, other = (
        api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=one)
        for one in (["tp=4", "transformer.wte.weight=tp:S(0)"], pins)
    )
    assert plan.padding
    batch = subject.make_batch(8, seed=0, padded=True)
    wanted = pool.run(using.saved_by_torch, subject, plan, graph, batch, str(tmp_path), timeout_s=60.0)
    found = pool.run(using.loaded_by_torch, subject, other, graph, batch, str(tmp_path), timeout_s=60.0)
    assert found[0] == (1, pytest.approx(wanted[0], rel=1e-6))

"""What ``torch.distributed.checkpoint`` saves of a parallel model under one plan it loads under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar import api
from autopar.models.resolve import resolve_model
from autopar.plan.plan import Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import using
from tests.support.distributed.layouts import batches, on_ranks, planned, traced

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

PADDED = "hf:gpt2?n_embd=32&n_layer=2&n_head=4&vocab_size=257&n_positions=17"


def ranks(pool: WorkerPool, job: Any, subject: Any, plan: Plan, *more: Any) -> Any:
    """What the first one of them finds."""
    return on_ranks(pool, job, subject, plan, *more)[0]


def test_under_other_plans(pool: WorkerPool, tmp_path: Path) -> None:
    """Each of them loads what the one before it has saved."""
    layouts = ("tp2 x dp2 ZeRO 3", "pp2 x dp2", "pp2 x dp2 ZeRO 3", "pp2 two virtual stages", "dp4 ZeRO 3")
    subject, graph = traced("gpt2")
    (batch,), (first, *others) = batches(subject, 1), [planned(layout, "gpt2")[1] for layout in layouts]
    wanted = ranks(pool, using.saved_by_torch, subject, first, graph, batch, str(tmp_path / "0"))
    for number, plan in enumerate(others):
        folders = str(tmp_path / f"{number}"), str(tmp_path / f"{number + 1}")
        found = ranks(pool, using.loaded_by_torch, subject, plan, graph, batch, *folders)
        assert found == (1, pytest.approx(wanted, rel=1e-6)), f"{layouts[number + 1]} after {layouts[number]}"


def test_lengthened_vocabularies_have_the_models_length(pool: WorkerPool, tmp_path: Path) -> None:
    subject = resolve_model(PADDED)
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0, padded=True))
    pins = (
        ["tp=4", "transformer.wte.weight=tp:S(0)"],
        ["pp=2", "tp=2"],
        ["tp=2", "dp_shard=2", "zero=3"],
        ["dp_replicate=4"],
    )
    first, *others = [api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=one) for one in pins]
    assert first.padding
    batch = subject.make_batch(8, seed=0, padded=True)
    wanted = ranks(pool, using.saved_by_torch, subject, first, graph, batch, str(tmp_path))
    for plan in others:
        found = ranks(pool, using.loaded_by_torch, subject, plan, graph, batch, str(tmp_path))
        assert found == (1, pytest.approx(wanted, rel=1e-6)), plan.mesh

"""Regions that run as they are written and samples that meet, on ranks that are processes, against one device."""

from __future__ import annotations

import pytest

from autopar import api
from autopar.plan.plan import FP64
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.oddities import UnusualSubject

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


@pytest.mark.parametrize(
    ("kind", "pins"),
    [
        ("pairs", ["tp=2", "dp_shard=2"]),
        ("pairs", ["dp_replicate=2", "dp_shard=2", "zero=3"]),
        ("routers", ["pp=2", "dp_replicate=2"]),
        ("resting", ["tp=2", "dp_replicate=2"]),
        ("resting", ["dp_shard=4", "zero=3", "recompute=full"]),
        ("checkpointed", ["pp=2", "tp=2"]),
        ("spectral", ["pp=2", "dp_shard=2", "zero=3"]),  # complex numbers go from stage to stage
    ],
    ids=[
        "pairs tp2 x dp2", "pairs HSDP", "routers pp2 x dp2", "eval tp2 x dp2", "eval ZeRO 3", "checkpoints pp2 x tp2",
        "complex pp2 x dp2",
    ],
)  # fmt: skip
def test_unusual_models_equal_one_device(pool: WorkerPool, kind: str, pins: list[str]) -> None:
    subject = UnusualSubject(kind)
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), global_batch_size=8)
    assert bool(graph.mixing) == (kind == "pairs")
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=pins)
    verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0).check()


def test_what_is_not_traced_runs_in_float64_too(pool: WorkerPool) -> None:
    """Its casts to float32 made every comparison in float64 fail, and hid how its samples meet."""
    subject = UnusualSubject("rolls")
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), global_batch_size=8)
    assert any("the outputs of a batch are not those of its halves" in note for note in graph.notes)
    plan = api.estimate(graph, cluster="cpu:1x2", global_batch_size=8, pins=["dp_shard=2"])
    report = verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0, precision=FP64)
    assert report.verdict == "every rank agrees"
    assert all(row.error < 1e-10 for row in report.rows)

"""Buffers that change in training equal those of one device, whatever the plan; checkpoints keep them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.plan.plan import Plan
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.distributed.layouts import goes_on, on_ranks
from tests.support.distributed.remembering import RememberingSubject

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

LAYOUTS = {
    "tp2 x dp2": ["tp=2", "dp_replicate=2"],
    "dp4 ZeRO 3 recomputed": ["dp_shard=4", "zero=3", "recompute=full"],
    "pp2 x tp2": ["pp=2", "tp=2"],
    "pp2 x dp2 recomputed": ["pp=2", "dp_replicate=2", "recompute=full"],
}


@cache
def traced(statistics: bool) -> tuple[RememberingSubject, Graph]:
    subject = RememberingSubject(statistics)
    return subject, api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0))


def planned(graph: Graph, layout: str, *pins: str) -> Plan:
    return api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=[*LAYOUTS[layout], *pins])


CASES = [*((layout, 1) for layout in LAYOUTS), ("tp2 x dp2", 4), ("pp2 x dp2 recomputed", 4)]


@pytest.mark.parametrize(("layout", "micro_batches"), CASES)
def test_what_is_remembered_equals_one_device(pool: WorkerPool, layout: str, micro_batches: int) -> None:
    """Of one micro-batch statistics too; a step of several changes the other buffers once."""
    subject, graph = traced(statistics=micro_batches == 1)
    plan = planned(graph, layout, *([f"num_micro_batches={micro_batches}"] if micro_batches > 1 else []))
    assert plan.num_micro_batches == micro_batches
    verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0).check()


def test_every_rank_gives_the_buffers_and_a_checkpoint_keeps_them(pool: WorkerPool, tmp_path: Path) -> None:
    subject, graph = traced(statistics=True)
    batches = [subject.make_batch(8, seed=seed) for seed in range(3)]
    for rank in on_ranks(pool, jobs.train, subject, planned(graph, "pp2 x tp2"), graph, batches):
        assert rank["parameters"]["steps"].item() == 3
        assert rank["parameters"]["norm.num_batches_tracked"].item() == 6, "one batch norm, twice a step"
    goes_on(pool, subject, graph, batches, tmp_path, planned(graph, "pp2 x tp2"), planned(graph, "tp2 x dp2"))

"""Batches of fewer samples than the plan's: losses and gradients are those of one device on them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.plan.mesh import Mesh
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed import smaller
from tests.support.distributed.layouts import LAYOUTS
from tests.support.distributed.plans import make_plan
from tests.support.distributed.smaller import CountingSubject
from tests.support.distributed.subjects import HfSubject
from tests.support.mixed_clusters import two_kinds

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SUBJECTS = {"gpt2": HfSubject("gpt2"), "counting": CountingSubject("counting")}
SIZES = (16, 15, 7, 8, 1)
"""Of a plan's 16: complete, odd, less than a sample for each rank, and as many as a rank may take of a complete one."""

PLANS: dict[str, dict[str, Any]] = {
    "dp4": {"micro_batch_size": 4},
    "dp4 ZeRO 3": {"micro_batch_size": 2},
    "HSDP 2x2": {"micro_batch_size": 4},
    "tp2 x dp2": {"micro_batch_size": 4},
    "tp2 x dp2 ZeRO 1": {"micro_batch_size": 8},
    "pp2 x dp2": {"micro_batch_size": 2},
    "pp2 two virtual stages": {"micro_batch_size": 4},
    "pp2 x dp2 ZeRO 3 made again": {"micro_batch_size": 4},
}


@cache
def traced(kind: str) -> tuple[HfSubject, Graph]:
    return SUBJECTS[kind], SUBJECTS[kind].trace()


def held_against_one_device(subject: HfSubject, batches: list[Any], ranks: list[Any]) -> None:
    wanted = smaller.on_one_device(subject, batches)
    for rank in ranks:
        for found, one, size in zip(rank, wanted, SIZES, strict=True):
            assert found["losses"] == pytest.approx(one["losses"], rel=1e-5), size
            assert_close(found["gradients"], one["gradients"], 1e-4, place=f"{size} samples")


@pytest.mark.parametrize("kind", SUBJECTS)
@pytest.mark.parametrize("layout", PLANS)
def test_smaller_batches_equal_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    subject, graph = traced(kind)
    mesh, options = LAYOUTS[layout]
    if kind == "counting" and mesh.pp > 1:
        pytest.skip("a model of one block has no stages")
    plan = make_plan(graph, mesh, global_batch_size=16, **{**options, **PLANS[layout]})
    batches = [subject.make_batch(size, seed=size) for size in SIZES]
    ranks = pool.run(smaller.trained, subject, plan, graph, batches, size=mesh.world_size, timeout_s=100.0)
    held_against_one_device(subject, batches, ranks)


def test_a_called_backward_of_smaller_batches_equals_one_device(pool: WorkerPool) -> None:
    subject, graph = traced("counting")
    plan = make_plan(graph, Mesh(dp_replicate=2), global_batch_size=16, micro_batch_size=4)
    batches = [subject.make_batch(size, seed=size) for size in SIZES]
    ranks = pool.run(smaller.called, subject, plan, graph, batches, size=2, timeout_s=100.0)
    held_against_one_device(subject, batches, ranks)


@pytest.mark.parametrize("zero", [0, 3])
def test_smaller_batches_of_unequal_shares_equal_one_device(pool: WorkerPool, zero: int) -> None:
    subject, graph = traced("gpt2")
    pins = ["data_shares=3-1", f"zero={zero}"]
    plan = api.estimate(graph, cluster=two_kinds(1, 1, factor=3.0), global_batch_size=16, pins=pins)
    batches = [subject.make_batch(size, seed=size) for size in SIZES]
    ranks = pool.run(smaller.trained, subject, plan, graph, batches, size=2, timeout_s=100.0)
    held_against_one_device(subject, batches, ranks)

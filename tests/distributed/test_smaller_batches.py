"""Batches of fewer samples than the plan's: losses and gradients are those of one device on them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from autopar import api
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.clusters import two_kinds
from tests.support.distributed import smaller
from tests.support.distributed.layouts import LAYOUTS, on_ranks
from tests.support.distributed.plans import make_plan
from tests.support.distributed.smaller import CountingSubject
from tests.support.distributed.subjects import HfSubject, graph_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

SUBJECTS = {"gpt2": HfSubject("gpt2"), "counting": CountingSubject("counting")}
SIZES = (16, 15, 7, 8, 1)
"""Of a plan's 16: complete, odd, less than a sample for each rank, and as many as a rank may take of a complete one."""

MICRO_BATCHES = {
    "dp4": 4, "dp4 ZeRO 3": 2, "HSDP 2x2": 4, "tp2 x dp2": 4, "tp2 x dp2 ZeRO 1": 8, "pp2 x dp2": 2,
    "pp2 two virtual stages": 4, "pp2 x dp2 ZeRO 3 made again": 4,
}  # fmt: skip


@cache
def of_one_device(kind: str) -> tuple[list[Any], list[Any]]:
    """Batches, and what it makes of them."""
    batches = [SUBJECTS[kind].make_batch(size, seed=size) for size in SIZES]
    return batches, smaller.on_one_device(SUBJECTS[kind], batches)


def check(pool: WorkerPool, kind: str, plan: Plan, called: bool = False) -> None:
    subject, (batches, wanted) = SUBJECTS[kind], of_one_device(kind)
    ranks = on_ranks(pool, smaller.trained, subject, plan, graph_of(subject), batches, called, timeout_s=100.0)
    for rank in ranks:
        for found, one, size in zip(rank, wanted, SIZES, strict=True):
            assert found["losses"] == pytest.approx(one["losses"], rel=1e-5), size
            assert_close(found["gradients"], one["gradients"], 1e-4, place=f"{size} samples")


CASES = [
    (layout, kind) for layout in MICRO_BATCHES for kind in SUBJECTS if kind == "gpt2" or LAYOUTS[layout][0].pp == 1
]
"""The other model is one block, which makes no stages."""


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_smaller_batches_equal_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    mesh, options = LAYOUTS[layout]
    micro_batch_size, graph = MICRO_BATCHES[layout], graph_of(SUBJECTS[kind])
    check(pool, kind, make_plan(graph, mesh, global_batch_size=16, micro_batch_size=micro_batch_size, **options))


def test_a_called_backward_of_smaller_batches_equals_one_device(pool: WorkerPool) -> None:
    graph = graph_of(SUBJECTS["counting"])
    plan = make_plan(graph, Mesh(dp_replicate=2), global_batch_size=16, micro_batch_size=4)
    check(pool, "counting", plan, called=True)


@pytest.mark.parametrize("zero", [0, 3])
def test_smaller_batches_of_unequal_shares_equal_one_device(pool: WorkerPool, zero: int) -> None:
    graph, pins = graph_of(SUBJECTS["gpt2"]), ["data_shares=3-1", f"zero={zero}"]
    check(pool, "gpt2", api.estimate(graph, cluster=two_kinds(1, 1, factor=3.0), global_batch_size=16, pins=pins))

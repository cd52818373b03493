"""A fault planted in one operator is found, in its block; a right program has no operator that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from autopar import api
from autopar.errors import VerificationError
from autopar.graph.graph import Graph, Op
from autopar.lower.read_plan import local_graph
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.verification.against_one_device import PRELOAD, VerifyReport, verify
from autopar.verification.as_text import GRAPH_TOLERANCE, render_verification, verification
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.faults import Fault, Faulty
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject, Unpadded

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def workers() -> Iterator[WorkerPool]:
    """Workers of their own: faults stay where they are planted."""
    with WorkerPool(4, preload=PRELOAD) as pool:
        yield pool


@cache
def traced(kind: str) -> tuple[HfSubject, Graph]:
    subject = HfSubject(kind) if kind == "gpt2" else Unpadded(kind)
    return subject, subject.trace()


def made(mesh: Mesh, **options: Any) -> tuple[HfSubject, Graph, Plan]:
    subject, graph = traced("gpt2")
    micro_batch = 8 // (2 * mesh.data)
    return subject, graph, make_plan(graph, mesh, global_batch_size=8, micro_batch_size=micro_batch, **options)


def with_ring() -> tuple[HfSubject, Graph, Plan]:
    subject, graph = traced("llama")
    pins = ["cp=2", "zero=0", "cp_attention=ring", "micro_batch=2"]
    return subject, graph, api.estimate(graph, cluster="cpu:1x2", global_batch_size=4, pins=pins)


def the(local: Graph, block: int, target: str, number: int = 0) -> Op:
    """The ``number``-th operator of a block whose target contains ``target``."""
    return [op for op in local.block_ops(local.blocks[block]) if target in op.target][number]


@dataclass(frozen=True)
class Case:
    """A plan, a fault, and what must be said of it."""

    plan: Any
    block: int
    target: str
    fault: str
    wrong: str
    ranks: tuple[int, ...]
    strategy: str


CASES = {
    "a sum forgotten forward": Case(
        plan=lambda: made(Mesh(tp=2)),
        block=2,
        target="reduce_scatter",
        fault="no_sum",
        wrong="the value that it makes",
        ranks=(0, 1),
        strategy="tp: change of type P to S(0)",
    ),
    "one rank": Case(
        plan=lambda: made(Mesh(dp_shard=2, tp=2), zero_stage=3, recompute="full"),
        block=1,
        target="gelu",
        fault="one_rank",
        wrong="the value that it makes",
        ranks=(3,),
        strategy="tp: ",
    ),
    "a sum forgotten backward": Case(
        plan=lambda: made(Mesh(tp=2)),
        block=1,
        target="all_gather",
        fault="no_gradient_sum",
        wrong="the gradient that it passes back to layer_norm_1",
        ranks=(0, 1),
        strategy="tp: change of type S(0) to R",
    ),
    "the second stage, backward": Case(
        plan=lambda: made(Mesh(pp=2, dp_replicate=2)),
        block=3,
        target="layer_norm",
        fault="gradient",
        wrong="the gradient that it passes back to add_11",
        ranks=(2, 3),
        strategy="batch: ",
    ),
    "a split sequence": Case(
        plan=with_ring,
        block=2,
        target="attention_ring",
        fault="value",
        wrong="the value that it makes",
        ranks=(0, 1),
        strategy="cp: ring",
    ),
    "a split sequence, backward": Case(
        plan=with_ring,
        block=1,
        target="attention_ring",
        fault="gradient",
        wrong="the gradient that it passes back to ",
        ranks=(0, 1),
        strategy="cp: ring",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found(workers: WorkerPool, name: str) -> None:
    case = CASES[name]
    subject, graph, plan = case.plan()
    number = -1 if case.fault == "no_gradient_sum" else 0  # the last all-gather of a block is of activations
    op = the(local_graph(plan, graph), case.block, case.target, number)
    report = verify(Faulty(subject, Fault(op.name, case.fault)), plan, graph, steps=1, pool=workers, run_timeout_s=90.0)
    assert not report.passed
    difference = found(report)
    assert (difference.block, difference.op, difference.target) == (case.block, op.name, op.target)
    assert difference.what.startswith(case.wrong)
    assert difference.mismatch.ranks == case.ranks
    assert difference.mismatch.micro_batches == tuple(range(plan.num_micro_batches))
    text = render_verification(report, plan)
    stage = next(s.index for s in plan.stages if s.start <= case.block < s.stop)
    assert f"first difference  step 1, block {case.block} ({graph.blocks[case.block].label}), stage {stage}" in text
    assert f"operator          {op.name}: {op.target}" in text
    assert op.source in text
    assert case.strategy in text
    with pytest.raises(VerificationError, match=f"first in block {case.block} .*operator {op.name} "):
        report.check()


def test_a_forgotten_gradient_sum_is_no_operators_fault(workers: WorkerPool) -> None:
    subject, graph, plan = made(Mesh(tp=2), memory_price=0.01)
    local = local_graph(plan, graph)
    op = the(local, 2, "layer_norm")
    report = verify(Faulty(subject, Fault(op.name, "sum")), plan, graph, steps=1, pool=workers, run_timeout_s=90.0)
    difference = found(report)
    assert "the sum of the gradient of parameter transformer.h.1.ln_1." in difference.what
    assert "(over tp)" in difference.what
    assert (difference.block, difference.op) == (2, op.name)


def test_a_right_program_is_not_bisected(workers: WorkerPool) -> None:
    subject, graph, plan = made(Mesh(pp=2, tp=2))
    report = verify(Faulty(subject, None), plan, graph, steps=1, pool=workers, run_timeout_s=90.0)
    assert report.passed
    assert report.bisection is None
    assert "first difference" not in render_verification(report, plan)


def test_nothing_is_found_where_nothing_differs(workers: WorkerPool) -> None:
    subject, graph, plan = made(Mesh(dp_shard=2), zero_stage=2)
    report = verify(Faulty(subject, None), plan, graph, steps=2, pool=workers, run_timeout_s=90.0, find="always")
    assert report.bisection is not None
    assert report.bisection.difference is None
    assert report.bisection.steps == 2
    assert report.bisection.graph_loss < GRAPH_TOLERANCE
    assert verification(report)["bisection"]["difference"] is None
    text = render_verification(report, plan)
    assert "in float64 no loss, gradient or parameter differs in 2 steps" in text


def found(report: VerifyReport) -> Any:
    assert report.bisection is not None
    assert report.bisection.difference is not None
    return report.bisection.difference

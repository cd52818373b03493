"""Plans as users get them, priced and pinned, against one device: layouts, losses, gradients, parameters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.distributed.test_layouts import CASES
from tests.support.distributed.layouts import planned, traced
from tests.support.distributed.oddities import UnusualSubject
from tests.support.distributed.plans import micro_batch_size

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

PINNED: dict[str, tuple[Mesh, list[str]]] = {
    "dp4": (Mesh(dp_replicate=4), ["zero=0"]),
    "dp4 ZeRO 1": (Mesh(dp_shard=4), ["zero=1"]),
    "dp4 ZeRO 2": (Mesh(dp_shard=4), ["zero=2"]),
    "dp4 ZeRO 3": (Mesh(dp_shard=4), ["zero=3"]),
    "HSDP 2x2": (Mesh(dp_replicate=2, dp_shard=2), ["zero=3"]),
    "tp2": (Mesh(tp=2), ["zero=0"]),
    "tp4": (Mesh(tp=4), []),
    "tp2 x dp2": (Mesh(tp=2, dp_replicate=2), ["zero=0"]),
    "pp2 x dp2 ZeRO 1": (Mesh(pp=2, dp_shard=2), ["zero=1", "schedule=1F1B"]),
    "pp2 x dp2 ZeRO 3": (Mesh(pp=2, dp_shard=2), ["zero=3", "schedule=1F1B"]),
    "pp2 x tp2": (Mesh(pp=2, tp=2), []),
    "pp4": (Mesh(pp=4), []),
    "pp2 two virtual stages": (Mesh(pp=2), ["schedule=Interleaved1F1B", "virtual_stages=2"]),
    "pp2 x tp2 recomputed": (Mesh(pp=2, tp=2), ["recompute=full"]),
}


def pinned(layout: str, graph: Graph) -> Plan:
    mesh, pins = PINNED[layout]
    degrees = [f"{axis}={getattr(mesh, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "tp")]
    wanted = [*degrees, f"micro_batch={micro_batch_size(mesh, 16)}", *pins]
    plan = api.estimate(graph, cluster=f"cpu:1x{mesh.world_size}", global_batch_size=16, pins=wanted)
    assert plan.mesh == mesh
    return plan


WITH_TP = [layout for layout, (mesh, _) in PINNED.items() if mesh.tp > 1]


@pytest.mark.parametrize(("layout", "kind"), [(name, ["llama", "gpt2"][n % 2]) for n, name in enumerate(WITH_TP)])
def test_a_pinned_plan_equals_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    subject, graph = traced(kind)
    verify(subject, pinned(layout, graph), graph, steps=2, pool=pool, run_timeout_s=60.0).check()


@pytest.mark.parametrize("layout", sorted(PINNED.keys() - WITH_TP))
def test_a_pinned_plan_that_leaves_nothing_to_a_price_is_one_that_equals_one_device(layout: str) -> None:
    """That of ``test_layouts``, whose layouts are solved with simple prices, but for what was predicted."""
    kind = dict(reversed(CASES))[layout]
    _, other, graph = planned(layout, kind)
    plan = pinned(layout, graph)
    assert lower(plan, graph).code == lower(other, graph).code
    assert [block.recompute for block in plan.blocks] == [block.recompute for block in other.blocks]
    same = {name: getattr(plan, name) for name in ("model", "layouts", "blocks", "predicted", "search", "pins")}
    assert replace(other, **same) == plan


def test_weights_of_two_stages_of_one_rank_learn_from_both(pool: WorkerPool) -> None:
    subject = UnusualSubject("shared")
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), global_batch_size=8)
    pins = ["pp=2", "micro_batch=2", "schedule=Interleaved1F1B", "virtual_stages=2"]
    plan = api.estimate(graph, cluster="cpu:1x2", global_batch_size=8, pins=pins)
    assert {stages for _, stages in lower(plan, graph).tied} == {(1, 3)}
    verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0).check()

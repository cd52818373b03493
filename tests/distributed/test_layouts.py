from dataclasses import replace

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.lower.program import lower
from autopar.plan.plan import Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.layouts import LAYOUTS, equals_one_device, planned, traced
from tests.support.distributed.plans import micro_batch_size

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

KINDS = ["gpt2", "llama", "llama-untied"]
CASES = [
    (layout, KINDS[(number + turn) % 3])
    for number, (layout, (mesh, _)) in enumerate(LAYOUTS.items())
    for turn in range(1 + (mesh.pp > 1))
]
"""Kinds in turn: of pipelines two each, one of which is tied, as tied tables concern stages."""


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_equals_one_device(pool: WorkerPool, layout: str, kind: str) -> None:
    subject, plan, graph = planned(layout, kind)
    steps = 3 if kind == "llama" else 2  # the second one has what the first one left behind
    equals_one_device(pool, subject, plan, graph, steps=steps)


@pytest.mark.parametrize(
    ("layout", "kind", "code"),
    [
        ("cp4 gather", "gpt2 unmasked", "attention_gathered("),
        ("pp2 x cp2 gather", "llama", "all_gather("),
        ("cp2 x dp2 ZeRO 3 ulysses", "gpt2", "all_to_all("),
        ("cp2 x tp2 ulysses", "llama unmasked", "all_to_all("),
        ("cp4 ring", "llama", "attention_ring("),
        ("cp2 x tp2 ring made again", "gpt2 unmasked", "attention_ring("),
        ("cp2 x dp2 ZeRO 1 ring", "llama unmasked", "attention_ring("),
    ],
)
def test_a_split_sequence_equals_one_device(pool: WorkerPool, layout: str, kind: str, code: str) -> None:
    """Padding masks, ignored labels, grouped heads, causal masks."""
    subject, plan, graph = planned(layout, kind)
    assert code in lower(plan, graph).code
    equals_one_device(pool, subject, plan, graph)


WITH_TP = [
    ("tp2", "zero=0"), ("tp4", ""), ("tp2 x dp2", "zero=0"), ("pp2 x tp2", ""), ("pp2 x tp2", "recompute=full"),
]  # fmt: skip
WITHOUT_TP = {
    "dp4": "zero=0",
    "dp4 ZeRO 1": "zero=1",
    "dp4 ZeRO 2": "zero=2",
    "dp4 ZeRO 3": "zero=3",
    "HSDP 2x2": "zero=3",
    "pp2 x dp2 ZeRO 1": "zero=1 schedule=1F1B",
    "pp2 x dp2 ZeRO 3": "zero=3 schedule=1F1B",
    "pp4": "",
    "pp2 two virtual stages": "schedule=Interleaved1F1B virtual_stages=2",
}
"""Plans as users get them, priced and pinned."""


def pinned(layout: str, pins: str, graph: Graph) -> Plan:
    mesh, _ = LAYOUTS[layout]
    degrees = [f"{axis}={getattr(mesh, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "tp")]
    wanted = [*degrees, f"micro_batch={micro_batch_size(mesh, 16)}", *pins.split()]
    plan = api.estimate(graph, cluster=f"cpu:1x{mesh.world_size}", global_batch_size=16, pins=wanted)
    assert plan.mesh == mesh
    return plan


@pytest.mark.parametrize(
    ("layout", "pins", "kind"), [(*one, ["llama", "gpt2"][n % 2]) for n, one in enumerate(WITH_TP)]
)
def test_a_pinned_plan_equals_one_device(pool: WorkerPool, layout: str, pins: str, kind: str) -> None:
    subject, graph = traced(kind)
    equals_one_device(pool, subject, pinned(layout, pins, graph), graph)


@pytest.mark.parametrize("layout", WITHOUT_TP)
def test_a_pinned_plan_that_leaves_nothing_to_a_price_is_one_that_equals_one_device(layout: str) -> None:
    """That of the first test, whose layouts are solved with simple prices, but for what was predicted."""
    _, other, graph = planned(layout, dict(reversed(CASES))[layout])
    plan = pinned(layout, WITHOUT_TP[layout], graph)
    assert lower(plan, graph).code == lower(other, graph).code
    assert [block.recompute for block in plan.blocks] == [block.recompute for block in other.blocks]
    same = {name: getattr(plan, name) for name in ("model", "layouts", "blocks", "predicted", "search", "pins")}
    assert replace(other, **same) == plan

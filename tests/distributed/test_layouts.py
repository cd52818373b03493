import pytest

from autopar.lower.program import lower
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.layouts import LAYOUTS, equals_one_device, planned

pytestmark = pytest.mark.distributed

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


@pytest.mark.parametrize(("layout", "kind", "code"), [
    ("cp4 gather", "gpt2 unmasked", "attention_gathered("),
    ("pp2 x cp2 gather", "llama", "all_gather("),
    ("cp2 x dp2 ZeRO 3 ulysses", "gpt2", "all_to_all("),
    ("cp2 x tp2 ulysses", "llama unmasked", "all_to_all("),
    ("cp4 ring", "llama", "attention_ring("),
    ("cp2 x tp2 ring made again", "gpt2 unmasked", "attention_ring("),
    ("cp2 x dp2 ZeRO 1 ring", "llama unmasked", "attention_ring("),
])  # fmt: skip
def test_a_split_sequence_equals_one_device(pool: WorkerPool, layout: str, kind: str, code: str) -> None:
    subject, plan, graph = planned(layout, kind)
    assert code in lower(plan, graph).code
    equals_one_device(pool, subject, plan, graph)

"""Context parallelism of each kind against one device: padding masks, ignored labels, grouped heads, causal masks."""

from __future__ import annotations

import pytest

from autopar import api
from autopar.lower.program import lower
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.subjects import HfSubject, Unpadded, graph_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


@pytest.mark.parametrize(
    ("kind", "padded", "attention", "pins"),
    [
        ("gpt2", False, "gather", "cp=4 zero=0"),
        ("llama", True, "gather", "pp=2 cp=2 zero=0"),
        ("gpt2", True, "ulysses", "cp=2 dp_shard=2 zero=3"),
        ("llama", False, "ulysses", "cp=2 tp=2"),
        ("llama", True, "ring", "cp=4 zero=0"),
        ("gpt2", False, "ring", "cp=2 tp=2 recompute=selective"),
        ("llama", False, "ring", "cp=2 dp_shard=2 zero=1"),
    ],
)
def test_a_split_sequence_equals_one_device(
    pool: WorkerPool, kind: str, padded: bool, attention: str, pins: str
) -> None:
    subject = HfSubject(kind) if padded else Unpadded(kind)
    graph = graph_of(subject)
    wanted = [*pins.split(), f"cp_attention={attention}", "num_micro_batches=2"]
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=wanted)
    name = {"gather": "attention_gathered(" if not padded else "all_gather(", "ulysses": "all_to_all("}
    assert name.get(attention, "attention_ring(") in lower(plan, graph).code
    verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0).check()

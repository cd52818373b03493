"""Training over a split sequence beyond plain steps: clipping, precision, dropout, checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autopar import api
from autopar.plan.mesh import Mesh
from autopar.plan.plan import Plan
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.layouts import (
    batches,
    clips_as_one_device,
    drops_the_same_again,
    goes_on,
    stays_near_fp32,
)
from tests.support.distributed.oddities import SinksSubject
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject, Unpadded, graph_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

KINDS = ("gather", "ulysses", "ring")


def planned(graph: Any, kind: str, *pins: str, **options: Any) -> Plan:
    wanted = [f"cp_attention={kind}", "micro_batch=4", *pins]
    return api.estimate(graph, cluster="cpu:1x4", global_batch_size=16, pins=wanted, **options)


@pytest.mark.parametrize(("kind", "pins"), [("ring", "cp=2 tp=2"), ("ulysses", "cp=2 dp_shard=2 zero=3")])
def test_clipping_counts_what_cp_repeats_once(pool: WorkerPool, kind: str, pins: str) -> None:
    subject = HfSubject("llama")
    clips_as_one_device(pool, subject, planned(graph_of(subject), kind, *pins.split()), graph_of(subject))


@pytest.mark.parametrize(("kind", "pins"), [("gather", "cp=2 tp=2"), ("ulysses", "cp=2 dp_shard=2")])
def test_attention_with_a_column_more_than_keys_is_split(pool: WorkerPool, kind: str, pins: str) -> None:
    """As the sinks of GPT-OSS are: it was refused for a sequence that is one longer than the model's."""
    subject = SinksSubject()
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0))
    verify(subject, planned(graph, kind, *pins.split()), graph, steps=2, pool=pool, run_timeout_s=60.0).check()


@pytest.mark.parametrize(("kind", "pins"), [("gather", "cp=4"), ("ulysses", "cp=2 tp=2"), ("ring", "cp=2 dp_shard=2")])
def test_bf16_stays_near_fp32(pool: WorkerPool, kind: str, pins: str) -> None:
    subject = Unpadded("llama")
    graph = api.trace(subject.build(), example_inputs=batches(subject, 1)[0], precision="bf16", name="llama")
    stays_near_fp32(pool, subject, planned(graph, kind, *pins.split(), precision="bf16"), graph)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_repeats_itself_under_recompute(pool: WorkerPool, kind: str) -> None:
    subject, modes = HfSubject("gpt2", dropout=0.2), ("none", "full")
    graph = graph_of(subject)
    plans = {mode: planned(graph, kind, "cp=2", "tp=2", f"recompute={mode}") for mode in modes}
    drops_the_same_again(pool, subject, graph, plans)


def test_checkpoint_goes_on_without_cp_and_back(pool: WorkerPool, tmp_path: Path) -> None:
    subject = HfSubject("llama")
    graph = graph_of(subject)
    ring, gather = planned(graph, "ring", "cp=2", "tp=2"), planned(graph, "gather", "cp=2", "dp_shard=2", "zero=3")
    other = make_plan(graph, Mesh(dp_shard=2, tp=2), global_batch_size=16, micro_batch_size=2, zero_stage=1)
    goes_on(pool, subject, graph, batches(subject, 3), tmp_path, ring, other, gather, ring)

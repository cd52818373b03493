"""Predicted bytes of parameters, gradients and optimizer states are those that the ranks hold, to the byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from autopar import api
from autopar.graph.graph import Graph
from autopar.plan.plan import Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.distributed.layouts import on_batch, traced, traced_in_half
from tests.support.distributed.mixtures import Subject
from tests.support.distributed.subjects import graph_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


def largest_of(rows: Sequence[Mapping[str, int]], pp_rank: int) -> dict[str, int]:
    """Bytes of states on that rank of a pipeline rank which has most of each."""
    ranks = [row for row in rows if row["pp_rank"] == pp_rank]
    return {key: max(row[key] for row in ranks) for key in ("parameters", "gradients", "optimizer")}


def check_states(pool: WorkerPool, subject: Any, graph: Graph, plan: Plan, *, shards: int = 1) -> None:
    """``shards``: of whole gradients that every data rank holds until the last micro-batch, and a shard of them after the step."""
    rows = on_batch(pool, jobs.held_bytes, subject, plan, graph)
    for predicted in plan.predicted.memory:
        largest = largest_of(rows, predicted.pp_rank)
        assert shards * largest.pop("gradients") == predicted.gradients
        assert largest == {key: getattr(predicted, key) for key in largest}


@pytest.mark.parametrize(
    ("kind", "pins", "shards"),
    [
        ("gpt2", "dp_replicate=2 tp=2 zero=0 num_micro_batches=2", 1),
        ("llama-untied", "tp=4 num_micro_batches=2", 1),
        ("gpt2", "pp=2 tp=2 num_micro_batches=2", 1),
        ("llama-untied", "dp_shard=4 zero=1 num_micro_batches=1", 1),
        ("gpt2", "dp_shard=4 zero=2 num_micro_batches=2", 1),
        ("gpt2", "dp_shard=2 tp=2 zero=3 num_micro_batches=2", 1),
        ("llama-untied", "dp_shard=2 dp_replicate=2 zero=3 num_micro_batches=2", 1),
        ("gpt2", "dp_shard=2 cp=2 zero=2 num_micro_batches=2", 1),
        # whole gradients accumulate
        ("gpt2", "pp=2 dp_shard=2 zero=3 num_micro_batches=4", 2),
        ("llama-untied", "pp=2 dp_shard=2 zero=1 num_micro_batches=2", 2),
        ("llama-untied", "dp_shard=2 tp=2 zero=1 num_micro_batches=2", 2),
    ],
)
def test_states_are_those_predicted(pool: WorkerPool, kind: str, pins: str, shards: int) -> None:
    subject, graph = traced(kind)
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=16, pins=pins.split())
    check_states(pool, subject, graph, plan, shards=shards)


@pytest.mark.parametrize("pins", ["dp_shard=2 tp=2 zero=3 num_micro_batches=2", "pp=2 tp=2 num_micro_batches=2"])
def test_states_in_float16(pool: WorkerPool, pins: str) -> None:
    (subject, _), graph = traced("gpt2"), traced_in_half("gpt2")
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=16, pins=pins.split(), precision="fp16")
    check_states(pool, subject, graph, plan)


@pytest.mark.parametrize("optimizer", ["momentum", "adafactor"])
def test_states_of_other_optimizers(pool: WorkerPool, optimizer: str) -> None:
    subject, graph = traced("gpt2")
    pins = ["dp_replicate=2", "tp=2", "zero=0", "num_micro_batches=2"]
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=16, pins=pins, optimizer=optimizer)
    rows = on_batch(pool, jobs.held_bytes, subject, plan, graph, optimizer)
    assert max(row["optimizer"] for row in rows) == plan.predicted.memory[0].optimizer


@pytest.mark.parametrize(
    "pins",
    [
        "ep=2 dp_replicate=4",
        "ep=4 dp_shard=4 zero=3",
        "ep=4 dp_replicate=2 dp_shard=2 zero=2",
        "ep=4 ep_data=2 tp=2 num_micro_batches=1",
    ],
)
def test_states_of_experts_over_data_ranks(pool: WorkerPool, pins: str) -> None:
    subject, graph = Subject(), graph_of(Subject())
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=pins.split())
    assert len(plan.predicted.memory) == 1
    check_states(pool, subject, graph, plan)

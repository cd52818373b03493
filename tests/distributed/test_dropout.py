"""The laws of random numbers on a mesh of processes: other ones on shards, the same on replicas and under recompute."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch

from autopar import api
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed import jobs
from tests.support.distributed.layouts import on_ranks
from tests.support.distributed.oddities import MASKED, SAMPLES, TOKENS, WIDTH

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


@pytest.mark.parametrize(
    "pins",
    [
        ["tp=2", "dp_replicate=2", "table.weight=tp:S(1)"],
        ["tp=2", "dp_replicate=2", "table.weight=tp:I", "num_micro_batches=2"],
        ["cp=2", "tp=2", "cp_attention=gather", "table.weight=tp:S(1)", "num_micro_batches=2"],
        ["cp=4", "cp_attention=ulysses"],
        ["cp=2", "dp_shard=2", "cp_attention=ring"],
    ],
    ids=["shards", "replicas", "cp and shards", "ulysses", "ring"],
)
def test_streams_are_distinct_on_shards_and_equal_on_replicas_and_in_recompute(
    pool: WorkerPool, pins: list[str]
) -> None:
    graph, batch = MASKED.trace(), MASKED.make_batch(SAMPLES, seed=0)
    found: dict[str, list[Any]] = {}
    for mode in ("none", "full"):
        plan = api.estimate(
            graph, cluster="cpu:1x4", global_batch_size=SAMPLES, pins=[*pins, "pp=1", f"recompute={mode}"]
        )
        found[mode] = list(on_ranks(pool, jobs.gradients_both_ways, MASKED, plan, graph, batch))
    first = found["none"][0]["step"]["table.weight"]
    for rank in (*found["none"], *found["full"]):
        assert torch.equal(rank["step"]["table.weight"], first)
    mask = first.view(SAMPLES, TOKENS, WIDTH) * first.numel()
    assert_close(mask, 2.0 * (mask > 0))
    assert 0.45 < (mask > 0).float().mean() < 0.55
    parts = [*mask.chunk(SAMPLES, 0), *mask.chunk(2, 0), *mask.chunk(2, 1), *mask.chunk(2, 2)]
    if "cp_attention=ring" in pins or "cp=4" in pins:
        parts += mask.chunk(4, 1)
    for a, b in combinations(parts, 2):
        assert a.shape != b.shape or not torch.equal(a, b)
    again = found["none"][0]["twice"]["table.weight"] - first
    assert not torch.allclose(again, first), "another step draws other numbers"

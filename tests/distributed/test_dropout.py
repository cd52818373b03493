"""The laws of random numbers on a mesh of processes: other ones on shards, the same on replicas and under recompute."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar import api
from autopar.runtime.workers import WorkerPool
from tests.distributed import jobs
from tests.distributed.subjects import HfSubject

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

SAMPLES, TOKENS, WIDTH = 4, 16, 32


class Masked(nn.Module):
    """Every token of a batch has a row of its own in the table, whose gradient is what dropout left of it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(SAMPLES * TOKENS, WIDTH)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.table(input_ids)
        heads = x.detach().unflatten(-1, (4, 8)).transpose(1, 2)
        seen = functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return functional.dropout(x + 1e-3 * seen.transpose(1, 2).flatten(2), 0.5).mean()


class MaskedSubject(HfSubject):
    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return Masked()

    def make_batch(self, batch_size: int, *, seed: int, padded: bool = True) -> dict[str, Tensor]:
        return {"input_ids": torch.arange(batch_size * TOKENS).view(batch_size, TOKENS)}


@pytest.mark.parametrize(
    "pins",
    [
        ["tp=2", "dp_replicate=2", "table.weight=tp:S(1)"],
        ["tp=2", "dp_replicate=2", "table.weight=tp:I", "num_micro_batches=2"],
        ["cp=2", "tp=2", "cp_attention=gather", "table.weight=tp:S(1)", "num_micro_batches=2"],
        ["cp=2", "dp_shard=2", "cp_attention=ring"],
    ],
    ids=["shards", "replicas", "cp and shards", "ring"],
)
def test_streams_are_distinct_on_shards_and_equal_on_replicas_and_in_recompute(
    pool: WorkerPool, pins: list[str]
) -> None:
    subject = MaskedSubject("masked")
    graph, batch = subject.trace(), subject.make_batch(SAMPLES, seed=0)
    found: dict[str, list[Any]] = {}
    for mode in ("none", "full"):
        plan = api.estimate(
            graph, cluster="cpu:1x4", global_batch_size=SAMPLES, pins=[*pins, "pp=1", f"recompute={mode}"]
        )
        found[mode] = list(pool.run(jobs.gradients_both_ways, subject, plan, graph, batch, timeout_s=60.0))
    first = found["none"][0]["step"]["table.weight"]
    for rank in (*found["none"], *found["full"]):
        assert torch.equal(rank["step"]["table.weight"], first)
    mask = first.view(SAMPLES, TOKENS, WIDTH) * first.numel()
    assert ((mask == 0) | ((mask - 2).abs() < 1e-5)).all()
    assert 0.45 < (mask > 0).float().mean() < 0.55
    parts = [*mask.chunk(SAMPLES, 0), *mask.chunk(2, 0), *mask.chunk(2, 1), *mask.chunk(2, 2)]
    if "cp_attention=ring" in pins:
        parts += mask.chunk(4, 1)
    for a, b in combinations(parts, 2):
        assert a.shape != b.shape or not torch.equal(a, b)
    again = found["none"][0]["twice"]["table.weight"] - first
    assert not torch.allclose(again, first), "another step draws other numbers"

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.distributed import jobs
from tests.support.distributed.layouts import on_batch, on_ranks, planned
from tests.support.distributed.oddities import MASKED, SAMPLES, TOKENS, WIDTH
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import graph_of

LAYOUTS = ["dp4", "tp2 whole parameters", "tp2 x dp2 whole parameters", "HSDP 2x2", "tp2 x dp2 ZeRO 1", "pp2 x dp2"]


@pytest.mark.parametrize(("layout", "where"), [
    *((name, ["step", "save"][n % 2]) for n, name in enumerate(LAYOUTS)), ("tp2 x dp2 whole parameters", "never"),
])  # fmt: skip
def test_drifted_copies_have_the_first_ranks_values(pool: WorkerPool, tmp_path: Path, layout: str, where: str) -> None:
    found = on_batch(pool, jobs.drifting, *planned(layout, "llama"), where, str(tmp_path))
    name = found[-1]["changed"]
    if where == "never":
        assert not any(rank["said"] for rank in found)
        return
    assert name
    assert found[-1]["was_other"]
    said = " ".join(text for rank in found for text in rank["said"])
    assert f"copies of {name} differed" in said, said
    assert "torch.use_deterministic_algorithms(True)" in said
    assert sum(len(rank["said"]) for rank in found) <= len(found)  # once each, though it drifts twice
    for rank in found:
        for key, value in rank["copies"].items():
            others = [other["copies"][key] for other in found if key in other["copies"]]
            assert len(others) > 1, key
            assert all(torch.equal(value, other) for other in others), key


@pytest.mark.parametrize("pins", [
    ["tp=2", "dp_replicate=2", "table.weight=tp:S(1)"],
    ["tp=2", "dp_replicate=2", "table.weight=tp:I", "num_micro_batches=2"],
    ["cp=2", "tp=2", "cp_attention=gather", "table.weight=tp:S(1)", "num_micro_batches=2"],
    ["cp=4", "cp_attention=ulysses"],
    ["cp=2", "dp_shard=2", "cp_attention=ring"],
], ids=["shards", "replicas", "cp and shards", "ulysses", "ring"])  # fmt: skip
def test_streams_differ_on_shards_and_are_equal_on_replicas_and_in_recompute(pool: WorkerPool, pins: list[str]) -> None:
    graph, batch = graph_of(MASKED), MASKED.make_batch(SAMPLES, seed=0)
    found: dict[str, list[Any]] = {}
    for mode in ("none", "full"):
        plan = estimated(graph, cluster="cpu:1x4", global_batch_size=SAMPLES, pins=[*pins, "pp=1", f"recompute={mode}"])
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


@pytest.mark.parametrize("layout", LAYOUTS[1::2])
def test_no_parameters_stay_of_a_model_that_is_left(pool: WorkerPool, layout: str) -> None:
    subject, plan, graph = planned(layout, "llama")
    batch = subject.make_batch(plan.global_batch_size, seed=0)
    left = pool.run(jobs.parameters_left, subject, plan, graph, batch, size=plan.mesh.world_size)
    assert set(left) == {0}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="no /proc here that lists threads")
def test_no_process_groups_stay_of_earlier_jobs(pool: WorkerPool) -> None:
    before = pool.run(jobs.num_threads)
    on_batch(pool, jobs.evaluated, *planned("tp2 x dp2 ZeRO 1", "llama"))
    assert pool.run(jobs.num_threads) == before

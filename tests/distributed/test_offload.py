from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.cost.model import CostModel
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import BF16
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.clusters import HOST, with_device
from tests.support.distributed import jobs
from tests.support.distributed.layouts import batches, clips_as_one_device, goes_on, on_batch, on_ranks, planned, traced
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import SEQUENCE
from tests.support.step_traffic import stages_of

CLUSTER = with_device(Cluster.parse("cpu:1x4"), host=replace(HOST, memory_bytes=10**9))
"""CPU ranks that take part of their memory for a host's."""


@pytest.mark.parametrize("layout", ["dp4", "dp2 ZeRO 2", "tp2 x dp2 ZeRO 3", "pp2 two virtual stages"])
def test_steps_on_the_host_are_those_of_one_device(pool: WorkerPool, layout: str) -> None:
    subject, plan, graph = planned(layout, "llama")
    clips_as_one_device(pool, subject, replace(plan, offload=("optimizer",)), graph)


def test_in_mixed_precision_steps_are_the_same_wherever_they_are_made(pool: WorkerPool) -> None:
    subject, plan, graph = planned("dp4 ZeRO 3", "llama", precision=BF16)
    data = batches(subject, 2)
    there, here = (
        on_ranks(pool, jobs.train, subject, replace(plan, offload=offload), graph, data, 0.1)[0]
        for offload in (("optimizer",), ())
    )
    # one kernel steps there, which rounds float32 in other places, and bfloat16 of what it steps may round to the next number
    assert there["losses"] == pytest.approx(here["losses"], rel=1e-3)
    assert_close(there["parameters"], here["parameters"], 1e-5)


def test_checkpoints_go_on_wherever_states_live(pool: WorkerPool, tmp_path: Path) -> None:
    subject, device, graph = planned("dp4 ZeRO 3", "llama")
    other = planned("pp2 x dp2 ZeRO 1", "llama")[1]
    host, other_host = (replace(plan, offload=("optimizer",)) for plan in (device, other))
    goes_on(pool, subject, graph, batches(subject, 3), tmp_path, host, other, device, other_host)


@pytest.mark.parametrize("pins", ["dp_replicate=2 tp=2 zero=0", "dp_shard=4 zero=3", "pp=2 dp_shard=2 zero=1"])
def test_bytes_on_the_host_are_those_predicted(pool: WorkerPool, pins: str) -> None:
    subject, graph = traced("gpt2")
    wish = [*pins.split(), "num_micro_batches=2", "offload=optimizer"]
    plan = estimated(graph, cluster=CLUSTER, global_batch_size=16, pins=wish)
    assert plan.offload == ("optimizer",)
    rows = on_batch(pool, jobs.host_bytes, subject, plan, graph)
    for predicted in plan.predicted.memory:
        largest = max(row["copies"] + row["states"] for row in rows if row["pp_rank"] == predicted.pp_rank)
        assert (predicted.host, predicted.optimizer) == (largest, 0)


@pytest.mark.parametrize(("layout", "dropout"), [
    ("tp2 x dp2 ZeRO 3", 0.0), ("tp2 x dp2 whole parameters", 0.2), ("pp2 two virtual stages", 0.0),
    ("dp2 ZeRO 3 recomputed", 0.2),
])  # fmt: skip
def test_blocks_that_keep_on_the_host_train_the_same(pool: WorkerPool, layout: str, dropout: float) -> None:
    subject, plan, graph = planned(layout, "gpt2", dropout=dropout)
    moved = replace(plan, blocks=tuple(replace(b, offload=b.index != 1) for b in plan.blocks))
    data = batches(subject, 2)
    here, there = (on_ranks(pool, jobs.train, subject, one, graph, data)[0] for one in (plan, moved))
    assert here["losses"] == there["losses"]
    assert all(torch.equal(value, there["parameters"][name]) for name, value in here["parameters"].items())


@pytest.mark.parametrize("pins", [
    "dp_replicate=2 tp=2 offload=activations@h.* recompute=none",
    "dp_shard=4 zero=3 offload=activations@h.1 recompute=none",
    "dp_shard=2 tp=2 zero=2 offload=activations recompute=full",
    "pp=2 dp_shard=2 zero=1 offload=activations recompute=full",
])  # fmt: skip
def test_bytes_that_move_are_those_predicted(pool: WorkerPool, pins: str) -> None:
    subject, graph = traced("gpt2")
    wish = [*pins.split(), "num_micro_batches=2", "offload!=optimizer"]
    plan = estimated(graph, cluster=CLUSTER, global_batch_size=16, pins=wish)
    assert any(block.offload for block in plan.blocks)
    model = CostModel(CLUSTER, plan.precision, plan.optimizer)
    stages = stages_of(model, plan, graph)
    rows = on_batch(pool, jobs.moved_bytes, subject, plan, graph)
    for pp_rank, down, up in rows:
        own = [(b, r) for s in stages[pp_rank :: plan.mesh.pp] for b, r in zip(s.blocks, s.recompute, strict=True)]
        predicted = sum(block.moved_bytes(mode) for block, mode in own)
        assert predicted
        # torch's attention keeps the boolean mask as numbers, which the cost model does not count
        plain = sum(block.offloads and mode == "none" for block, mode in own)
        predicted += plain * plan.micro_batch_size * SEQUENCE**2 * 4
        assert (down, up) == (2 * predicted, 2 * predicted)

"""Plans for two kinds of devices against one device: ranks that take 3 samples and 1 of each micro-batch, unequal stages."""

from pathlib import Path

import pytest

from autopar import api
from autopar.hardware.cluster import Cluster
from autopar.plan.file import load_plan, save_plan
from autopar.plan.plan import Plan
from autopar.util.files import write_toml
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import loss_of
from tests.support.clusters import two_kinds
from tests.support.distributed import jobs
from tests.support.distributed.layouts import clips_as_one_device, equals_one_device, on_batch
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import HfSubject, graph_of

pytestmark = pytest.mark.distributed

SUBJECT = HfSubject("gpt2")


def planned(zero: int) -> Plan:
    pins = ["data_shares=3-1", f"zero={zero}"]
    plan = estimated(graph_of(SUBJECT), cluster=two_kinds(1, 1, factor=3.0), global_batch_size=8, pins=pins)
    assert plan.num_micro_batches == 2
    assert [plan.samples_of(rank) for rank in range(2)] == [range(6), range(6, 8)]
    return plan


@pytest.mark.parametrize("zero", range(4))
def test_unequal_shares_equal_one_device(pool: WorkerPool, zero: int) -> None:
    equals_one_device(pool, SUBJECT, planned(zero), graph_of(SUBJECT))


@pytest.mark.parametrize("zero", [1, 3])
def test_unequal_shares_of_a_padded_vocabulary_equal_one_device(pool: WorkerPool, zero: int) -> None:
    """As a search plans them: node groups of two ranks each, one kind three times as fast, and rows that are aligned."""
    pins = ["data_shares=3-1", f"zero={zero}", "vocab_multiple=64"]
    plan = estimated(graph_of(SUBJECT), cluster=two_kinds(2, 2, factor=3.0), global_batch_size=16, pins=pins)
    assert plan.padding
    assert [len(plan.samples_of(rank)) for rank in range(4)] == [6, 6, 2, 2]
    equals_one_device(pool, SUBJECT, plan, graph_of(SUBJECT))


@pytest.mark.parametrize("zero", [0, 3])
def test_the_norm_is_that_of_one_device(pool: WorkerPool, zero: int) -> None:
    clips_as_one_device(pool, SUBJECT, planned(zero), graph_of(SUBJECT))


def test_a_launched_job_trains_with_its_shares(pool: WorkerPool) -> None:
    batch = SUBJECT.make_batch(8, seed=0, padded=True)
    expected = loss_of(SUBJECT.build()(**batch)).item()
    for loss in pool.run(jobs.launched_loss, SUBJECT, planned(0), graph_of(SUBJECT), batch, size=2, timeout_s=300.0):
        assert loss == pytest.approx(expected, rel=1e-6)


def test_a_rank_may_bring_its_own_samples(pool: WorkerPool) -> None:
    for whole, own in on_batch(pool, jobs.local_batches, SUBJECT, planned(3), graph_of(SUBJECT)):
        assert whole == pytest.approx(own, rel=1e-6)


PINS = {
    "two stages": ["pp=2", "dp_replicate=2", "zero=0", "schedule=1F1B"],
    "virtual stages": ["pp=2", "dp_shard=2", "zero=1", "schedule=Interleaved1F1B", "virtual_stages=2"],
}


@pytest.mark.parametrize("pins", PINS)
def test_a_plan_with_unequal_stages_equals_one_device(pool: WorkerPool, pins: str, tmp_path: Path) -> None:
    subject = HfSubject("gpt2", depth=6)
    graph = subject.trace()
    write_toml(tmp_path / "cluster.toml", two_kinds(factor=4.0).to_dict())
    cluster = Cluster.parse(str(tmp_path / "cluster.toml"))
    plan = api.search(graph, cluster=cluster, global_batch_size=16, pins=["tp=1", "micro_batch=2", *PINS[pins]])
    layers = {"cpu": 0, "cpu-slow": 0}
    for stage in plan.stages:
        (device,) = plan.devices_of(stage.pp_rank)
        layers[device] += stage.stop - stage.start
    assert layers["cpu"] > 2 * layers["cpu-slow"]
    save_plan(plan, tmp_path / "plan.json")
    equals_one_device(pool, subject, load_plan(tmp_path / "plan.json"), graph)

"""A plan for two kinds of devices, as it is read from a cluster's file, against one device."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar import api
from autopar.hardware.cluster import Cluster
from autopar.plan.file import load_plan, save_plan
from autopar.util.files import write_toml
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.clusters import two_kinds
from tests.support.distributed.subjects import HfSubject

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

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
    verify(subject, load_plan(tmp_path / "plan.json"), graph, steps=2, pool=pool, run_timeout_s=60.0).check()

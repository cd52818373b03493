"""The first steps of a run are held against the plan's prediction: by category, on all ranks, and told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar import api
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.plan.plan import Plan
from autopar.plan.run_log import CATEGORIES, DATA, OPTIMIZER, PIPELINE, TENSOR, read_log
from autopar.runtime.monitor import MEASURED_STEPS
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.distributed.layouts import traced

FREE = with_free_links(Cluster.parse("cpu:1x4"))
"""So that ``tp`` splits something of so small a model."""

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


@pytest.mark.parametrize(
    ("pins", "called", "present"),
    [
        ("dp_replicate=2 tp=2 num_micro_batches=2", False, {TENSOR, DATA, OPTIMIZER}),
        ("pp=2 dp_shard=2 zero=1 num_micro_batches=2", False, {PIPELINE, DATA, OPTIMIZER}),
        ("tp=4 num_micro_batches=1", True, {TENSOR, OPTIMIZER}),
    ],
)
def test_categories_and_warnings(pool: WorkerPool, tmp_path: Path, pins: str, called: bool, present: set[str]) -> None:
    subject, graph = traced("gpt2")
    plan = api.estimate(graph, cluster=FREE, global_batch_size=8, pins=pins.split())
    wide = replace(plan.predicted, step_time_interval_s=(1e-9, 1e9))
    quiet = replace(plan, predicted=wide)
    batch = subject.make_batch(8, seed=0)
    rows = pool.run(jobs.watched, subject, quiet, graph, batch, str(tmp_path), called, timeout_s=60.0)
    assert len({row["measured_s"] for row in rows}) == 1  # ranks agree
    assert not any(row["active"] for row in rows)
    assert all(row["restored"] for row in rows)
    assert all(row["warnings"] == [] for row in rows)  # inside of the interval
    parts = rows[0]["parts"]
    assert set(parts) == set(CATEGORIES)
    assert {name for name in CATEGORIES if parts[name] > 0} == {"compute"} | present
    record = read_log(tmp_path)
    assert record.measured_s == rows[0]["measured_s"]
    assert record.num_steps == MEASURED_STEPS and record.num_ranks == 4
    assert record.predicted_s == plan.predicted.step_time_s


def test_an_altered_prediction_is_warned_of_once(pool: WorkerPool, tmp_path: Path) -> None:
    """The step is measured first; predictions that are ten times off it, and intervals around them."""
    subject, graph = traced("gpt2")
    plan = api.estimate(graph, cluster="cpu:1x4", global_batch_size=8, pins=["tp=2", "dp_replicate=2"])

    def rows(plan: Plan) -> Any:
        batch = subject.make_batch(8, seed=0)
        return pool.run(jobs.watched, subject, plan, graph, batch, str(tmp_path), False, timeout_s=60.0)

    measured = rows(plan)[0]["measured_s"]
    for factor in (0.1, 10.0):
        off = measured * factor
        breakdown = replace(plan.predicted.breakdown, compute_s=off)
        wrong = replace(plan.predicted, step_time_s=off, step_time_interval_s=(off / 2, off * 2), breakdown=breakdown)
        said = [row["warnings"] for row in rows(replace(plan, predicted=wrong))]
        assert [len(texts) for texts in said] == [1, 0, 0, 0], factor
        text = said[0][0]
        assert "predicted" in text and f"autopar validate --from-run {tmp_path}" in text and "autopar profile" in text
    assert "most of it is compute" in text

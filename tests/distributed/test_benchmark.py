"""``autopar benchmark local`` on two ranks: plans run in turns, what fails is said, measurements are kept."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from autopar.benchmark import local
from autopar.benchmark import rank_runs as ranks
from autopar.benchmark.batches import Choice, benchmark
from autopar.benchmark.local import BenchmarkRequest, on_cluster, run_local, task_of
from autopar.benchmark.rank_runs import KINDS, LIMITS, Job, LinkTask
from autopar.cost.step.memory import OPTIMIZERS
from autopar.errors import UsageError
from autopar.hardware.cluster import Cluster
from autopar.models.resolve import resolve_model
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.plans import estimated
from tests.support.said import refuses

MODEL = "gpt:layers=2,hidden=32,heads=4,vocab=96,seq=16"
MIXTURE = (
    "hf:mixtral?num_hidden_layers=1&hidden_size=32&num_attention_heads=2&num_key_value_heads=2&intermediate_size=64"
    "&vocab_size=96&num_local_experts=4"
)
CPU4 = Cluster.parse("cpu:1x4")
REQUEST = BenchmarkRequest(
    model=MODEL, num_ranks=2, global_batch_size=4, space="quick", sample=1, rounds=1, steps=2, run_timeout_s=300.0
)


@cache
def task(model: str = MODEL, cluster: str = "cpu:1x2", precision: str = "fp32") -> tuple[Any, Any]:
    source = resolve_model(model, sequence_length=16)
    return source, task_of(replace(REQUEST, model=model), source, Cluster.parse(cluster), precision)


def test_two_plans_on_two_ranks(pool: WorkerPool, tmp_path: Path) -> None:
    jobs: list[Job] = []

    def launch(job: Job) -> Any:
        jobs.append(job)
        return pool.run(ranks.run, job, size=2, timeout_s=300.0)

    kept, cluster = tmp_path / "results.json", Cluster.parse("cpu:1x2")
    request = replace(REQUEST, pins=("pp=1", "micro_batch=2"), sample_seed=1)
    source = resolve_model(MODEL)
    outcome = on_cluster(request, source, cluster, launch, results=kept)
    assert outcome.score.plans == len(outcome.rows) == len(jobs[0].plans) >= 2
    assert outcome.score.failures == 0
    for row in outcome.rows:
        assert row.measured_s is not None and row.measured_s > 0
        assert row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.5)
    assert outcome.score.regret is not None and outcome.score.regret >= 0.0
    assert json.loads(json.dumps(outcome.to_dict()))["score"]["plans"] == outcome.score.plans
    again = on_cluster(request, source, cluster, launch, results=kept)  # nothing is left to run
    assert len(jobs) == 1
    assert [row.measured_s for row in again.rows] == [row.measured_s for row in outcome.rows]
    with pytest.raises(UsageError, match="benchmark of this file of results does not match"):
        on_cluster(replace(request, optimizer="sgd"), source, cluster, launch, results=kept)
    kept.write_text(kept.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    refuses(UsageError, r"Cannot read .*results\.json", on_cluster, request, source, cluster, launch, results=kept)


def test_a_plan_that_fails_is_recorded_and_the_others_are_measured(pool: WorkerPool) -> None:
    source, asked = task()
    good, bad = (
        local.entry_of(estimated(asked.graph, cluster="cpu:1x2", global_batch_size=4, pins=pins))
        for pins in (["dp_replicate=2", "micro_batch=1"], ["dp_replicate=2", "micro_batch=2"])
    )
    bad = replace(bad, plan=replace(bad.plan, mesh=replace(bad.plan.mesh, dp_replicate=4)))  # of another job
    job = Job(source=source, graphs={"fp32": asked.graph}, plans={}, rounds=1, steps=1)
    choice = Choice(entries=(good, bad), picked=good.key, num_candidates=2, misfits=())
    outcome = benchmark(job, choice, lambda job: pool.run(ranks.run, job, size=2, timeout_s=300.0), title="t")
    assert [bool(row.failure) for row in outcome.rows] == [False, True]
    assert outcome.score.failures == 1 and outcome.score.regret == 0.0


def test_one_device_runs_every_micro_batch_recompute_and_precision(pool: WorkerPool) -> None:
    (source, one), (_, other) = (task(cluster="cpu:1x1", precision=precision) for precision in ("fp32", "bf16"))
    tasks = [one, other]
    pins = [p for p in local.one_device_pins(tasks[0].space, REQUEST) if "micro_batch=2" in p]
    choice = local.variants(tasks, pins)
    assert [entry.plan.precision.name for entry in choice.entries] == ["fp32"] * 2 + ["bf16"] * 2
    assert {entry.plan.recompute for entry in choice.entries} == {"none", "full"}
    job = Job(source=source, graphs={t.precision.name: t.graph for t in tasks}, plans={}, rounds=1, steps=1)
    outcome = benchmark(job, choice, lambda job: pool.run(ranks.run, job, size=1, timeout_s=300.0), title="t")
    assert outcome.score.plans == 4


def test_the_optimizer_of_the_plan_is_run(pool: WorkerPool) -> None:
    """Its states show which it is: two for each element, one, none, or a row and a column of a matrix."""
    assert ranks.OPTIMIZERS.keys() == OPTIMIZERS.keys()
    source, asked = task(cluster="cpu:1x1")
    names = ("adamw", "Momentum", "adafactor", "sgd")
    options: dict[str, Any] = {"cluster": "cpu:1x1", "global_batch_size": 4, "pins": ["micro_batch=4"]}
    plans = {name: estimated(asked.graph, optimizer=name, **options) for name in names}
    job = Job(source=source, graphs={"fp32": asked.graph}, plans=plans, rounds=1, steps=1)
    (found,) = pool.run(ranks.run, job, size=1, timeout_s=300.0)
    held = [found[name]["memory_bytes"] for name in names]
    assert held == sorted(held, reverse=True) and len(set(held)) == 4


@pytest.mark.parametrize(("model", "pins", "batch", "rank"), [
    (MODEL, "tp=2 dp_shard=2 zero=3", 4, 3),
    *((MIXTURE, pins, 8, 1) for pins in ("ep=2 dp_shard=4", "ep=4 ep_data=2 tp=2")),
])  # fmt: skip
def test_a_rank_of_a_larger_plan_among_fakes(pool: WorkerPool, model: str, pins: str, batch: int, rank: int) -> None:
    """One of experts gets as many tokens as it sends."""
    source, asked = task(model, "cpu:1x4")
    plan = estimated(asked.graph, cluster="cpu:1x4", global_batch_size=batch, pins=pins.split())
    job = Job(source=source, graphs={"fp32": asked.graph}, plans={"it": plan}, rounds=1, steps=1, as_rank=rank)
    ((found,),) = (one.values() for one in pool.run(ranks.run, job, size=1, timeout_s=300.0))
    assert "failure" not in found, found["failure"]
    predicted = max(m.total - m.reserved for m in plan.predicted.memory)
    assert found["memory_bytes"] == pytest.approx(predicted, rel=0.5)
    assert len(found["seconds"]) == 1


def test_one_rank_is_held_against_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pool: WorkerPool) -> None:
    monkeypatch.setattr(Cluster, "parse", lambda text, cache_dir=None: CPU4)  # nothing is measured
    monkeypatch.setattr("autopar.benchmark.local.machine_profile", lambda **options: None)
    monkeypatch.setattr(
        "autopar.benchmark.local.local_ranks",
        lambda count, run_timeout_s: nullcontext(partial(pool.run, ranks.run, size=count, timeout_s=run_timeout_s)),
    )
    request = replace(REQUEST, num_ranks=4, as_rank=3, pins=("tp=2", "micro_batch=2"), sample=1, rounds=1, steps=1)
    outcome = run_local(request, cache_dir=tmp_path)
    assert outcome.title.endswith(f"rank 3 alone, {CPU4.name}")
    assert not [row.failure for row in outcome.rows if row.failure]
    for row in outcome.rows:
        assert set(row.predicted_parts) == {"compute", "optimizer"}
        assert row.predicted_s == pytest.approx(sum(row.predicted_parts.values()))
        assert row.interval_s[0] < row.predicted_s < row.interval_s[1]
        assert row.measured_bytes == pytest.approx(row.predicted_bytes, rel=0.5)
    with pytest.raises(UsageError, match=r"no rank 4: they are for 4 ranks.*--ranks"):
        run_local(replace(request, as_rank=4), cache_dir=tmp_path)


def test_an_unknown_model_is_refused_before_the_machine_is_measured(tmp_path: Path) -> None:
    refuses(UsageError, "Unknown kind of model", run_local, replace(REQUEST, model="nosuch"), cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ranks_measure_collectives_between_work(pool: WorkerPool) -> None:
    task = LinkTask(nodes=(0, 0), limits=replace(LIMITS, budget_s=0.2, max_bytes=2**13))
    found, other = pool.run(ranks.run, task, size=2, timeout_s=300.0)
    assert other == {}
    links = found["links"]
    assert links["failed"] == []
    assert links["crowding"] >= 1.0
    assert links["layers_s"] > 0
    assert {(kind, size) for _, kind, size, *_ in links["points"]} >= {(kind, 1024) for kind in KINDS}
    assert all(time_s > 0 for *_, time_s, _ in links["points"])

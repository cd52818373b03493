"""Models that a trace or a pipeline has trouble with, on ranks that are processes, against one device.

Up to torch 2.11 pipelines ask of all that stages pass on for what activations have (``autopar/runtime/step/stage.py``); 2.13 does not.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.graph.graph import Graph, Ref
from autopar.lower.emit import str_name
from autopar.lower.program import Program, lower
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP64, Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.distributed.layouts import equals_one_device, goes_on, on_ranks
from tests.support.distributed.oddities import REMEMBERING, UNUSUAL, WITHOUT_STATISTICS
from tests.support.distributed.plans import estimated, make_plan, micro_batch_size
from tests.support.distributed.subjects import OwnSubject

pytestmark = pytest.mark.distributed

BATCH = 8


@cache
def traced(subject: OwnSubject) -> Graph:
    return subject.trace(global_batch_size=BATCH)


def planned(subject: OwnSubject, pins: str, ranks: int = 4) -> tuple[Plan, Graph]:
    graph = traced(subject)
    return estimated(graph, cluster=f"cpu:1x{ranks}", global_batch_size=BATCH, pins=pins.split()), graph


@pytest.mark.parametrize(("kind", "pins"), [
    ("pairs", "tp=2 dp_shard=2"),
    ("pairs", "dp_replicate=2 dp_shard=2 zero=3"),
    ("routers", "pp=2 dp_replicate=2"),
    ("resting", "tp=2 dp_replicate=2"),
    ("resting", "dp_shard=4 zero=3 recompute=full"),
    ("indexed", "tp=2 dp_shard=2 zero=3"),
    ("checkpointed", "pp=2 tp=2"),
    # as of GPT-OSS: refused once for a sequence that is one longer than the model's
    ("sinks", "cp=2 tp=2 cp_attention=gather"),
    ("sinks", "cp=2 dp_shard=2 cp_attention=ulysses"),
    ("spectral", "pp=2 dp_shard=2 zero=3"),  # complex numbers go from stage to stage
])  # fmt: skip
def test_unusual_models_equal_one_device(pool: WorkerPool, kind: str, pins: str) -> None:
    plan, graph = planned(UNUSUAL[kind], pins)
    assert bool(graph.mixing) == (kind == "pairs")
    equals_one_device(pool, UNUSUAL[kind], plan, graph)


def test_what_is_not_traced_runs_in_float64_too(pool: WorkerPool) -> None:
    plan, graph = planned(UNUSUAL["rolling"], "dp_shard=2", ranks=2)
    assert any("the outputs of a batch are not those of its halves" in note for note in graph.notes)
    report = equals_one_device(pool, UNUSUAL["rolling"], plan, graph, precision=FP64)
    assert report.verdict == "every rank agrees"
    assert all(row.error < 1e-10 for row in report.rows)


def test_weights_of_two_stages_of_one_rank_learn_from_both(pool: WorkerPool) -> None:
    plan, graph = planned(UNUSUAL["shared"], "pp=2 micro_batch=2 schedule=Interleaved1F1B virtual_stages=2", ranks=2)
    assert {stages for _, stages in lower(plan, graph).tied} == {(1, 3)}
    equals_one_device(pool, UNUSUAL["shared"], plan, graph)


PIPELINES: dict[str, tuple[Mesh, dict[str, Any]]] = {
    "pp4": (Mesh(pp=4), {}),
    "pp2 x dp2 ZeRO 3 GPipe": (Mesh(pp=2, dp_shard=2), {"zero_stage": 3, "schedule": "GPipe"}),
    "pp2 two virtual stages": (Mesh(pp=2), {"schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "pp2 x tp2 recomputed": (Mesh(pp=2, tp=2), {"recompute": "full"}),
}


def program(kind: str, layout: str) -> Program:
    mesh, options = PIPELINES[layout]
    graph, each = traced(UNUSUAL[kind]), micro_batch_size(mesh, BATCH)
    return lower(make_plan(graph, mesh, global_batch_size=BATCH, micro_batch_size=each, **options), graph)


@pytest.mark.parametrize("layout", PIPELINES)
def test_whatever_stages_pass_on_training_equals_one_device(pool: WorkerPool, layout: str) -> None:
    lowered = program("passing", layout)
    specs = {str_name(Ref(op.name, i)): spec for op in lowered.graph.ops for i, spec in enumerate(op.outputs)}
    passed = [specs[name] for stage in lowered.stages for name in stage.sends]
    assert {torch.int64, torch.bool, torch.float32} <= {spec.dtype for spec in passed}
    assert any(spec.dtype == torch.float32 and not spec.requires_grad for spec in passed)
    equals_one_device(pool, UNUSUAL["passing"], lowered.plan, traced(UNUSUAL["passing"]))


@pytest.mark.parametrize(("layout", "kind"), [(name, ["unread", "frozen"][n % 2]) for n, name in enumerate(PIPELINES)])
def test_stages_train_beside_some_without_a_gradient(pool: WorkerPool, layout: str, kind: str) -> None:
    equals_one_device(pool, UNUSUAL[kind], program(kind, layout).plan, traced(UNUSUAL[kind]))


@pytest.mark.parametrize(("pins", "micro_batches"), [
    ("tp=2 dp_replicate=2", 1),
    ("dp_shard=4 zero=3 recompute=full", 1),
    ("pp=2 tp=2", 1),
    ("pp=2 dp_replicate=2 recompute=full", 1),
    ("tp=2 dp_replicate=2 num_micro_batches=4", 4),
    ("pp=2 dp_replicate=2 recompute=full num_micro_batches=4", 4),
])  # fmt: skip
def test_buffers_that_steps_change_equal_those_of_one_device(pool: WorkerPool, pins: str, micro_batches: int) -> None:
    """Of one micro-batch statistics too; a step of several changes the other buffers once."""
    subject = REMEMBERING if micro_batches == 1 else WITHOUT_STATISTICS
    plan, graph = planned(subject, pins)
    assert plan.num_micro_batches == micro_batches
    equals_one_device(pool, subject, plan, graph)


def test_every_rank_gives_the_buffers_and_a_checkpoint_keeps_them(pool: WorkerPool, tmp_path: Path) -> None:
    batches = [REMEMBERING.make_batch(BATCH, seed=seed) for seed in range(3)]
    (plan, graph), (other, _) = (planned(REMEMBERING, pins) for pins in ("pp=2 tp=2", "tp=2 dp_replicate=2"))
    for rank in on_ranks(pool, jobs.train, REMEMBERING, plan, graph, batches):
        assert rank["parameters"]["steps"].item() == 3
        assert rank["parameters"]["norm.num_batches_tracked"].item() == 6, "one batch norm, twice a step"
    goes_on(pool, REMEMBERING, graph, batches, tmp_path, plan, other)

"""What stages of a pipeline pass to each other beside activations with gradients, against one device.

Up to torch 2.11 pipelines ask of all of it for what activations have (``autopar/runtime/step/stage.py``); 2.13 does not.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from autopar import api
from autopar.graph.graph import Graph, Ref
from autopar.lower.emit import str_name
from autopar.lower.program import Program, lower
from autopar.plan.mesh import Mesh
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.oddities import UnusualSubject
from tests.support.distributed.plans import make_plan, micro_batch_size

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]

BATCH = 8


@cache
def traced(kind: str) -> Graph:
    subject = UnusualSubject(kind)
    return api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), global_batch_size=BATCH)


LAYOUTS = {
    "pp4": (Mesh(pp=4), {}),
    "pp2 x dp2 ZeRO 3 GPipe": (Mesh(pp=2, dp_shard=2), {"zero_stage": 3, "schedule": "GPipe"}),
    "pp2 two virtual stages": (Mesh(pp=2), {"schedule": "Interleaved1F1B", "virtual_stages": 2}),
    "pp2 x tp2 recomputed": (Mesh(pp=2, tp=2), {"recompute": "full"}),
}


def program(kind: str, layout: str) -> Program:
    mesh, options = LAYOUTS[layout]
    each = micro_batch_size(mesh, BATCH)
    plan = make_plan(traced(kind), mesh, global_batch_size=BATCH, micro_batch_size=each, **options)  # type: ignore[arg-type]
    return lower(plan, traced(kind))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whatever_stages_pass_on_training_equals_one_device(pool: WorkerPool, layout: str) -> None:
    lowered = program("passing", layout)
    specs = {str_name(Ref(op.name, i)): spec for op in lowered.graph.ops for i, spec in enumerate(op.outputs)}
    passed = [specs[name] for stage in lowered.stages for name in stage.sends]
    assert {torch.int64, torch.bool, torch.float32} <= {spec.dtype for spec in passed}
    assert any(spec.dtype == torch.float32 and not spec.requires_grad for spec in passed)
    verify(UnusualSubject("passing"), lowered.plan, traced("passing"), steps=2, pool=pool, run_timeout_s=60.0).check()


@pytest.mark.parametrize(("layout", "kind"), [(name, ["unread", "frozen"][n % 2]) for n, name in enumerate(LAYOUTS)])
def test_stages_train_beside_some_without_a_gradient(pool: WorkerPool, layout: str, kind: str) -> None:
    lowered = program(kind, layout)
    verify(UnusualSubject(kind), lowered.plan, traced(kind), steps=2, pool=pool, run_timeout_s=60.0).check()

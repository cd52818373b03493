"""The scaler of a parallel model: torch's own numbers on one device, and what is refused."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar import api
from autopar.errors import UsageError
from autopar.ops.sharded import partial_mean
from autopar.plan.mesh import Mesh
from autopar.plan.plan import BF16, FP16, Precision
from autopar.runtime.parallel_model import ParallelModel
from tests.support.distributed import scaled
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject
from tests.support.parallel import on_rank

pytestmark = pytest.mark.usefixtures("one_rank")

SUBJECT = HfSubject("llama", depth=1)


@cache
def planned(precision: Precision = FP16) -> Any:
    graph = api.trace(SUBJECT.build(), example_inputs=SUBJECT.make_batch(2, seed=0), precision=precision.name)
    return make_plan(graph, Mesh(), global_batch_size=8, micro_batch_size=8, precision=precision), graph


def build(precision: Precision = FP16) -> ParallelModel:
    plan, graph = planned(precision)
    return on_rank(SUBJECT.build(), plan, graph)


def test_the_scale_falls_and_grows_as_torchs() -> None:
    """From a scale that overflows in float16 by itself, down to one that does not, and up again."""
    data = [SUBJECT.make_batch(8, seed=seed) for seed in range(10)]
    scaling = {"init_scale": 2.0**25, "growth_interval": 2, "growth_factor": 8.0, "backoff_factor": 0.125}
    found, wanted = (
        run(data, scaling=scaling) for run in (partial(scaled.steps, build()), partial(scaled.alone, SUBJECT.build()))
    )
    assert found["states"] == wanted["states"]
    scales = [state["scale"] for state in found["states"]]
    changes = [b / a for a, b in pairwise(scales)]
    assert 0.125 in changes and 8.0 in changes, scales
    assert found["losses"] == pytest.approx(wanted["losses"], rel=1e-4)


def test_gradients_that_are_still_scaled_are_not_stepped_by_or_clipped() -> None:
    parallel, batch = build(), SUBJECT.make_batch(8, seed=0)
    with pytest.raises(UsageError, match=r"most gradients would be zero.* scaler = par\.grad_scaler\(\) before"):
        parallel.train_step(batch)
    scaler, optimizer = parallel.grad_scaler(), scaled.sgd(parallel.parameters())
    with pytest.raises(UsageError, match="second scaler"):
        parallel.grad_scaler()
    with pytest.raises(
        UsageError,
        match=r"the scaler of this model has not scaled.*scaler\.scale\(loss\)\.backward\(\), where loss is that of par",
    ):
        torch.amp.GradScaler("cpu").scale(parallel(**batch).loss).backward()
    before = parallel.full_state_dict()
    loss = parallel.train_step(batch)
    with pytest.raises(UsageError, match=r"has been scaled already.*Leave scaler\.scale\(loss\)\.backward\(\) out"):
        scaler.scale(loss)
    with pytest.raises(
        UsageError, match=r"would step by the gradients of the scaled loss.*Call scaler\.step\(optimizer\)"
    ):
        optimizer.step()
    with pytest.raises(
        UsageError, match=r"still times the scale of the loss.*Call scaler\.unscale_\(optimizer\) before"
    ):
        parallel.clip_grad_norm_(1.0)
    assert all(torch.equal(p, before[name]) for name, p in parallel.full_state_dict().items())
    scaler.unscale_(optimizer)
    parallel.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert not any(torch.equal(p, before[name]) for name, p in parallel.full_state_dict().items())


@pytest.mark.parametrize(("precision", "options"), [(BF16, {}), (FP16, {"enabled": False})], ids=["bf16", "fp16 off"])
def test_a_scaler_that_is_off_does_nothing(precision: Precision, options: dict[str, bool]) -> None:
    """So that one loop is for all precisions, and a model may be trained in float16 at scale one."""
    parallel, batch = build(precision), SUBJECT.make_batch(8, seed=0)
    scaler, optimizer = parallel.grad_scaler(**options), scaled.sgd(parallel.parameters())
    before = parallel.full_state_dict()
    parallel.train_step(batch)
    norm = parallel.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    assert 0.01 < norm < 100
    assert not any(torch.equal(p, before[name]) for name, p in parallel.full_state_dict().items())


def test_a_mean_over_a_split_dim_stays_in_float16s_range() -> None:
    half = torch.full((256, 256), 2.0, dtype=torch.float16)
    assert partial_mean(half, (0, 1), False, 2 * half.numel()).item() == 1.0


def test_a_load_that_is_refused_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    """Between a step and its ``scaler.step``: states are made by a step, which scaled gradients do not allow."""
    parallel, batch = build(), SUBJECT.make_batch(8, seed=0)
    parallel.grad_scaler()
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.25)
    parallel.save(tmp_path / "saved")
    parallel.train_step(batch)
    before = [p.grad for p in parallel.parameters()]
    with pytest.raises(UsageError, match="would step by the gradients of the scaled loss"):
        parallel.load(tmp_path / "saved", optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]
    assert all(p.grad is grad for p, grad in zip(parallel.parameters(), before, strict=True))

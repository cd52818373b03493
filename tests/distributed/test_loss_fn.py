"""A loss given beside the model: planned for, run and verified."""

from __future__ import annotations

import pytest
import torch

from autopar import api
from autopar.plan.plan import FP64
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.tagger import TaggerSubject, doubled, parallelized, tagging_loss

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(90)]


@pytest.mark.parametrize("pins", [["tp=2", "dp_shard=2"], ["dp_shard=4", "zero=3"]], ids=["tp2 x dp2", "dp4 ZeRO 3"])
def test_a_plan_for_a_loss_beside_the_model_is_verified(pool: WorkerPool, pins: list[str]) -> None:
    subject = TaggerSubject()
    options = {"example_inputs": subject.make_batch(8, seed=0), "loss_fn": tagging_loss, "global_batch_size": 8}
    plan = api.estimate(subject.build(), cluster="cpu:1x4", pins=pins, **options)  # type: ignore[arg-type]
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), loss_fn=tagging_loss)
    assert graph.fingerprint == plan.model.fingerprint
    verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0, loss_fn=tagging_loss).check()
    if "tp=2" in pins:
        exact = verify(
            subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0, loss_fn=tagging_loss, precision=FP64
        )
        exact.check()
        assert exact.rows[0].precision == "fp64"


def test_another_loss_is_found_out(pool: WorkerPool) -> None:
    subject = TaggerSubject()
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), loss_fn=doubled)
    plan = api.estimate(graph, cluster="cpu:1x2", global_batch_size=8, pins=["tp=2"])
    report = verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=60.0, loss_fn=tagging_loss, find="never")
    assert not report.passed


@pytest.mark.parametrize(("precision", "limit"), [("fp32", 1e-5), ("fp64", 1e-12)])
@pytest.mark.parametrize("pins", [[], ["tp=2", "pp=1", "hidden.weight=tp:S(0)"]], ids=["free", "tp2"])
def test_parallelize_searches_and_runs_with_it(pool: WorkerPool, precision: str, limit: float, pins: list[str]) -> None:
    subject = TaggerSubject(torch.float64)
    model, batch = subject.build(), subject.make_batch(8, seed=1)
    wanted = tagging_loss(model(batch["tokens"]), batch)
    wanted.backward()
    for loss, gradients in pool.run(parallelized, precision, pins, timeout_s=60.0):
        assert loss == pytest.approx(wanted.item(), rel=limit)
        assert all(g.dtype == (torch.float32 if precision == "fp32" else torch.float64) for g in gradients.values())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert (gradients[name] - parameter.grad).abs().max() <= 10 * limit * parameter.grad.abs().max()

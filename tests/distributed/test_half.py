"""float16 on several ranks: what one device computes with the same casts and scale, and the same steps skipped everywhere."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from autopar import api
from autopar.plan.plan import FP16
from autopar.verification.rank_pool import WorkerPool
from autopar.verification.reference import loss_of
from tests.support.distributed import scaled
from tests.support.distributed.layouts import batches, on_ranks, planned
from tests.support.distributed.mixtures import mixture
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import HfSubject, Unpadded

EPSILON = 2.0**-10
FIXED = {"init_scale": 65536.0}
SUBJECT = HfSubject("llama")


@cache
def stepped(pool: WorkerPool, layout: str, called: bool = False) -> tuple[dict[str, Any], ...]:
    """What each rank finds in the two steps of :func:`one_device`."""
    job = partial(scaled.steps, scaling=FIXED, called=called)
    return on_ranks(pool, job, *planned(layout, "llama", precision=FP16), batches(SUBJECT, 2))


@cache
def one_device() -> tuple[dict[str, list[Any]], dict[str, Tensor]]:
    model = SUBJECT.build()
    loss_of(model(**batches(SUBJECT, 1)[0])).backward()
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return scaled.alone(SUBJECT.build(), batches(SUBJECT, 2), scaling=FIXED), exact


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest of any tensor's, in units of float16's epsilon."""
    assert found.keys() >= wanted.keys()
    return max(((found[n] - w).norm() / w.norm()).item() for n, w in wanted.items()) / EPSILON


def moved(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: parameters[name] - p.detach() for name, p in SUBJECT.build().named_parameters()}


@pytest.mark.parametrize("layout", [
    *("tp2 x dp2 ZeRO 3", "dp4", "dp2 ZeRO 2", "HSDP 2x2", "pp2 two virtual stages", "pp2 x dp2 ZeRO 3 made again"),
    "pp2 x dp2 ZeRO 3",  # where FSDP casts, it may free what it has cast though nothing is sharded
])  # fmt: skip
def test_equals_one_device_with_the_same_casts_and_scale(pool: WorkerPool, layout: str) -> None:
    """One device is off float32 by 1.6 epsilons here. A plan rounds elsewhere: it is off by no more than twice that, and so
    the two are 5 apart at most, gradients and what momentum makes of them; losses are sums in float32."""
    alone, exact = one_device()
    rounding = error(alone["gradients"][0], exact)
    assert rounding < 2
    for found in stepped(pool, layout):
        assert found["losses"] == pytest.approx(alone["losses"], rel=EPSILON / 8)
        assert found["norms"] == pytest.approx(alone["norms"], rel=EPSILON)
        assert error(found["gradients"][0], exact) <= 2 * rounding
        for mine, theirs in zip(found["gradients"], alone["gradients"], strict=True):
            assert error(mine, theirs) <= 3 * rounding
        assert error(moved(found["parameters"][-1]), moved(alone["parameters"][-1])) <= 3 * rounding
        assert all(p.dtype == torch.float32 for p in found["parameters"][-1].values())
        assert found["states"] == alone["states"]


@pytest.mark.parametrize("layout", ["dp2 ZeRO 2", "tp2 x dp2 ZeRO 1"])
def test_scaling_what_a_call_returns_equals_a_train_step(pool: WorkerPool, layout: str) -> None:
    """One backward adds what several micro-batches leave in float16, where ``train_step`` adds in float32: a rounding more."""
    alone, exact = one_device()
    for step, call in zip(stepped(pool, layout), stepped(pool, layout, called=True), strict=True):
        assert call["losses"] == pytest.approx(step["losses"], rel=EPSILON / 8)
        assert error(call["gradients"][0], exact) <= 2 * error(alone["gradients"][0], exact)
        assert call["states"] == step["states"]


@pytest.mark.parametrize(
    ("layout", "fused"),
    [("tp2", False), ("pp2 GPipe", True), ("HSDP 2x2", True)],
)
def test_an_infinity_on_one_rank_skips_the_step_on_all(pool: WorkerPool, layout: str, fused: bool) -> None:
    """Of a rank's own part of a gradient, which no other rank has: torch's scaler would step everywhere else."""
    subject, plan, graph = planned(layout, "llama", precision=FP16)
    job = partial(scaled.steps, scaling=FIXED, fused=fused, infinite=(1, plan.mesh.world_size - 1))
    for found in on_ranks(pool, job, subject, plan, graph, batches(subject, 3)):
        before, skipped, after = found["parameters"]
        assert all(torch.equal(skipped[name], p) for name, p in before.items())
        assert not any(torch.equal(after[name], p) for name, p in before.items())
        assert [(s["scale"], s["_growth_tracker"]) for s in found["states"]] == [(65536, 1), (32768, 0), (32768, 1)]


@pytest.mark.parametrize(("before", "after", "late"), [("pp2 x dp2 ZeRO 1", "tp2", False), ("tp2", "dp4 ZeRO 3", True)])
def test_a_checkpoint_keeps_the_scale(pool: WorkerPool, tmp_path: Path, before: str, after: str, late: bool) -> None:
    (batch,), folder = batches(SUBJECT, 1), str(tmp_path)
    first, second = [
        on_ranks(pool, job, *planned(layout, "llama", precision=FP16), batch, folder)
        for job, layout in ((scaled.save, before), (partial(scaled.load, late=late), after))
    ]
    state, loss = first[0]
    assert (state["scale"], state["growth_interval"], state["_growth_tracker"]) == (1024.0, 3, 1)
    for found, again in second:
        assert found == state
        assert again == pytest.approx(loss, rel=EPSILON / 8)


@cache
def in_half(subject: Any) -> Any:
    return api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), precision="fp16")


@pytest.mark.parametrize(("subject", "pins"), [
    (Unpadded("llama"), "cp=2 dp_shard=2 zero=3 cp_attention=ring micro_batch=4"),
    (Unpadded("llama"), "cp=2 tp=2 cp_attention=ulysses micro_batch=4"),
    (mixture(), "ep=2 dp_replicate=4"),
    (mixture(), "ep=4 ep_data=2 tp=2"),
], ids=["ring", "ulysses", "ep over data", "ep over both"])  # fmt: skip
def test_split_sequences_and_experts(pool: WorkerPool, subject: Any, pins: str) -> None:
    """The loss of the mixture alone is in float16, whose gradient 65536 is none."""
    data, scaling = [subject.make_batch(16, seed=0)], {"init_scale": 1024.0}
    graph = in_half(subject)
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=16, pins=pins.split(), precision="fp16")
    model = subject.build()
    loss_of(model(**data[0])).backward()
    exact = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    alone = scaled.alone(subject.build(), data, scaling=scaling)
    rounding = error(alone["gradients"][0], exact)
    for found in on_ranks(pool, partial(scaled.steps, scaling=scaling), subject, plan, graph, data):
        assert found["losses"] == pytest.approx(alone["losses"], rel=EPSILON)
        assert error(found["gradients"][0], exact) <= 2 * rounding
        assert found["states"] == alone["states"]

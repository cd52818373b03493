from pathlib import Path

import pytest
import torch

from autopar import api
from autopar.plan.plan import Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed import jobs
from tests.support.distributed.layouts import clips_as_one_device, equals_one_device, goes_on, on_ranks
from tests.support.distributed.mixtures import mixture
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import OwnSubject, graph_of

pytestmark = pytest.mark.distributed


def planned(subject: OwnSubject, *pins: str) -> Plan:
    return estimated(graph_of(subject), cluster="cpu:1x4", global_batch_size=8, pins=pins)


CASES: dict[str, tuple[OwnSubject, tuple[str, ...]]] = {
    "ep2 of dp4": (mixture(), ("ep=2", "dp_replicate=4")),
    "ep4 of dp4 ZeRO 3": (mixture(), ("ep=4", "dp_shard=4", "zero=3")),
    "ep4 of HSDP": (mixture(), ("ep=4", "dp_replicate=2", "dp_shard=2", "zero=2")),
    "ep2 of HSDP": (mixture(), ("ep=2", "dp_replicate=2", "dp_shard=2", "zero=3", "recompute=selective")),
    "ep4 of dp2 x tp2": (mixture(), ("ep=4", "ep_data=2", "tp=2")),
    "ep2 of dp2, width on tp2": (mixture(), ("ep=2", "ep_data=2", "tp=2")),
    "ep4 of tp4": (mixture(), ("ep=4", "ep_data=1", "tp=4")),
    "pp2 x ep2": (mixture(), ("pp=2", "ep=2", "tp=1", "schedule=1F1B")),
    "all experts of every token": (mixture(top_k=4), ("ep=4", "dp_shard=4")),
    "an expert without tokens": (mixture(skewed=True), ("ep=4", "dp_replicate=4")),
    "an expert without tokens, twice split": (mixture(top_k=1, skewed=True), ("ep=4", "ep_data=2", "tp=2")),
    "auxiliary loss on dp4": (mixture(balanced=True), ("ep=1", "dp_replicate=4")),
    "auxiliary loss with ep2 x pp2": (mixture(balanced=True), ("ep=2", "pp=2", "tp=1")),
    "auxiliary loss of a skewed router": (mixture(balanced=True, skewed=True), ("ep=4", "ep_data=2", "tp=2")),
}


@pytest.mark.parametrize("case", CASES)
def test_experts_on_ranks_equal_one_device(pool: WorkerPool, case: str) -> None:
    subject, pins = CASES[case]
    plan = planned(subject, *pins)
    wanted = {key: int(value) for key, _, value in (pin.partition("=") for pin in pins) if key in ("ep", "ep_data")}
    assert all(getattr(plan.mesh, key) == value for key, value in wanted.items())
    assert plan.num_micro_batches == 1 or "auxiliary" not in case
    equals_one_device(pool, subject, plan, graph_of(subject))


def test_the_norm_counts_every_expert_once_and_clips_them_all(pool: WorkerPool) -> None:
    subject = mixture()
    for pins in (("ep=2", "dp_shard=4"), ("ep=4", "ep_data=2", "tp=2")):
        clips_as_one_device(pool, subject, planned(subject, *pins), graph_of(subject), alone=True)


def test_a_checkpoint_of_spread_experts_loads_under_another_plan(pool: WorkerPool, tmp_path: Path) -> None:
    subject, graph = mixture(), graph_of(mixture())
    data = [subject.make_batch(8, seed=seed) for seed in range(3)]
    here, there = planned(subject, "ep=4", "ep_data=2", "tp=2"), planned(subject, "ep=2", "dp_shard=4", "zero=3")
    goes_on(pool, subject, graph, data, tmp_path, here, there, here)


def test_mixed_precision_keeps_spread_experts_in_float32_at_rest(pool: WorkerPool) -> None:
    """Computed in bfloat16, summed in float32: the gradients of experts are those of one device but for rounding."""
    subject = mixture()
    graph = api.trace(subject.build(), example_inputs=subject.make_batch(2, seed=0), precision="bf16")
    plan = estimated(graph, cluster="cpu:1x4", global_batch_size=8, pins=["ep=2", "dp_replicate=4"], precision="bf16")
    batch = subject.make_batch(8, seed=0)
    model = subject.build()
    model(**batch).backward()
    name = "layers.1.experts.down"
    wanted = model.get_parameter(name).grad
    for rank in on_ranks(pool, jobs.gradients_both_ways, subject, plan, graph, batch):
        for way in ("step", "call"):
            assert rank[way][name].dtype == torch.float32
            assert (rank[way][name] - wanted).norm() <= 0.05 * wanted.norm()

from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch

from autopar import api
from autopar.errors import RuntimeMismatchError, UsageError
from autopar.graph.graph import Graph
from autopar.hardware.describe import multiplies_in_tf32
from autopar.hardware.read import load_profile
from autopar.plan.file import plan_from_dict, plan_to_dict
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP8, FP32, TF32, Plan, PrecisionName
from autopar.runtime.checks import check_can_run, check_modes
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject
from tests.support.distributed.subjects import graph_of as graph_of_subject
from tests.support.said import refuses

MODEL = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device="meta") for _ in range(4)))


def loss(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output.float().square().mean()


@cache
def graph_of(precision: PrecisionName) -> Graph:
    example = {"input": torch.zeros(2, 4096, device="meta", dtype=torch.float32)}
    return api.trace(MODEL, example_inputs=example, loss_fn=loss, precision=precision)


def planned(precision: PrecisionName, cluster: str = "h100-sxm5-80gb:1x1") -> Plan:
    options = {"global_batch_size": 16384, "pins": ["micro_batch=16384"], "precision": precision}
    return api.estimate(graph_of(precision), cluster=cluster, **options)


def test_lower_precisions_are_priced_at_their_rates() -> None:
    names: tuple[PrecisionName, ...] = ("fp32", "bf16", "fp16", "fp8")
    seconds = {name: planned(name).predicted.breakdown.compute_s for name in names}
    assert seconds["fp16"] == pytest.approx(seconds["bf16"], rel=0.1)
    assert seconds["fp8"] < 0.75 * seconds["bf16"] < 0.3 * seconds["fp32"]


def test_what_needs_scales_for_each_tensor_is_planned_and_not_run() -> None:
    plan, said = planned("fp8"), "fp8 plans can be estimated but not run yet"
    assert plan.precision == FP8
    assert plan_from_dict(plan_to_dict(plan)) == plan
    assert "products" not in plan_to_dict(planned("bf16"))["precision"]
    refuses(RuntimeMismatchError, said, check_can_run, plan.precision)
    check_can_run(planned("fp16").precision)
    given = {"example_inputs": {"input": torch.zeros(2, 4096)}, "loss_fn": loss, "global_batch_size": 2}
    refuses(RuntimeMismatchError, said, api.parallelize, MODEL, cluster="cpu:1x1", precision="fp8", **given)


# --- products of float32 in TF32: a precision of its own, priced by the profile and held against the process's mode

CUDA = torch.device("cuda", 0)


def estimated(cluster: str, precision: Any) -> Plan:
    graph = graph_of_subject(HfSubject("llama"))
    return api.estimate(graph, cluster=cluster, global_batch_size=8, precision=precision, pins=["tp=2"])


def test_a_device_multiplies_as_fast_as_its_profile_says_of_tf32() -> None:
    own = load_profile("h100-sxm5-80gb").device
    fast = own.multiplying("float32", "tf32")
    assert fast.rate("float32").ceiling_flops_per_s == own.rate("tf32").ceiling_flops_per_s
    rates = [own.rate(name).ceiling_flops_per_s for name in ("float32", "tf32", "bfloat16")]
    assert rates == sorted(set(rates))
    assert {rate.dtype for rate in fast.matmul} == {rate.dtype for rate in own.matmul}
    assert own.multiplying("float32", "float32") is own


def test_a_profile_without_its_rate_is_refused_by_name() -> None:
    said, volta = r"No matmul rate for tf32.*\[device\.matmul\.tf32\]", load_profile("v100-sxm2-16gb").device
    refuses(UsageError, said, volta.multiplying, "float32", "tf32")
    refuses(UsageError, "tf32", estimated, "cpu:1x2", "tf32")


@pytest.mark.slow
def test_a_plan_keeps_its_products_and_takes_no_longer_than_that_of_float32() -> None:
    fast, exact = (estimated("h100-sxm5-80gb:1x2", name) for name in ("tf32", "fp32"))
    assert fast.precision == TF32 and exact.precision == FP32
    assert plan_from_dict(plan_to_dict(fast)) == fast
    assert fast.predicted.step_time_s <= exact.predicted.step_time_s
    assert fast.predicted.mfu < exact.predicted.mfu  # of a higher peak
    check_can_run(fast.precision)


@pytest.mark.parametrize("mode", ["highest", "high", "medium"])
@pytest.mark.parametrize("precision", [FP32, TF32], ids=["fp32", "tf32"])
def test_steps_on_a_gpu_multiply_as_the_plan_says(mode: str, precision: Any) -> None:
    graph = graph_of_subject(HfSubject("llama"))
    plan = make_plan(graph, Mesh(), global_batch_size=8, micro_batch_size=4, precision=precision)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(mode)
    try:
        assert multiplies_in_tf32() == (mode != "highest")
        with mock.patch("torch.is_autocast_enabled", return_value=False):
            check_modes(plan, torch.device("cpu"), learns=True)
            if multiplies_in_tf32() == (precision is TF32):
                check_modes(plan, CUDA, learns=True)
            else:
                said = r"set_float32_matmul_precision.*or make the plan with precision="
                refuses(UsageError, said, check_modes, plan, CUDA, learns=True)
            check_modes(replace(plan, precision=api.PRECISIONS["bf16"]), CUDA, learns=True)
    finally:
        torch.set_float32_matmul_precision(before)

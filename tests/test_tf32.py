"""Products of float32 in TF32: a precision of its own, priced by the profile's rate and held against the process's mode."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from autopar import api
from autopar.errors import UsageError
from autopar.hardware.describe import multiplies_in_tf32
from autopar.hardware.device import Device
from autopar.hardware.machine import _check_alike, fingerprint, identity
from autopar.hardware.read import load_profile
from autopar.plan.file import plan_from_dict, plan_to_dict
from autopar.plan.mesh import Mesh
from autopar.plan.plan import FP32, TF32, Plan
from autopar.runtime.checks import check_can_run, check_modes
from tests.support.distributed.plans import make_plan
from tests.support.distributed.subjects import HfSubject, graph_of

CUDA = torch.device("cuda", 0)


def device(name: str) -> Device:
    return load_profile(name).device


def estimated(cluster: str, precision: Any) -> Plan:
    graph = graph_of(HfSubject("llama"))
    return api.estimate(graph, cluster=cluster, global_batch_size=8, precision=precision, pins=["tp=2"])


def test_a_device_multiplies_as_fast_as_its_profile_says_of_tf32() -> None:
    own = device("h100-sxm5-80gb")
    fast = own.multiplying("float32", "tf32")
    assert fast.rate("float32").ceiling_flops_per_s == own.rate("tf32").ceiling_flops_per_s
    rates = [own.rate(name).ceiling_flops_per_s for name in ("float32", "tf32", "bfloat16")]
    assert rates == sorted(set(rates))
    assert {rate.dtype for rate in fast.matmul} == {rate.dtype for rate in own.matmul}
    assert own.multiplying("float32", "float32") is own


def test_a_profile_without_its_rate_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"No matmul rate for tf32.*\[device\.matmul\.tf32\]"):
        device("v100-sxm2-16gb").multiplying("float32", "tf32")
    with pytest.raises(UsageError, match="tf32"):
        estimated("cpu:1x2", "tf32")


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
    graph = graph_of(HfSubject("llama"))
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
                with pytest.raises(UsageError, match=r"set_float32_matmul_precision.*or make the plan with precision="):
                    check_modes(plan, CUDA, learns=True)
            check_modes(replace(plan, precision=api.PRECISIONS["bf16"]), CUDA, learns=True)
    finally:
        torch.set_float32_matmul_precision(before)


def test_measurements_belong_to_a_mode() -> None:
    properties = mock.Mock(total_memory=10**9)
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.device_count", return_value=2),
        mock.patch("torch.cuda.get_device_name", return_value="a device"),
        mock.patch("torch.cuda.get_device_properties", return_value=properties),
    ):
        exact = identity(), fingerprint()
        torch.set_float32_matmul_precision("high")
        try:
            fast = identity(), fingerprint()
        finally:
            torch.set_float32_matmul_precision("highest")
        before, torch.backends.cudnn.conv.fp32_precision = torch.backends.cudnn.conv.fp32_precision, "ieee"
        try:
            slow = identity(), fingerprint()
        finally:
            torch.backends.cudnn.conv.fp32_precision = before
    assert len({exact[0], fast[0], slow[0]}) == len({exact[1], fast[1], slow[1]}) == 3
    assert "products in TF32" in fast[0] and "TF32" not in exact[0]
    assert slow[0].endswith(", convolutions without TF32")


def test_gpus_of_several_kinds_are_not_taken_for_the_first() -> None:
    kinds = [mock.Mock(total_memory=memory) for memory in (80, 80, 40)]
    for kind, name in zip(kinds, ("A", "A", "B"), strict=True):
        kind.name = name
    with (
        mock.patch("torch.cuda.device_count", return_value=3),
        mock.patch("torch.cuda.get_device_properties", side_effect=lambda i: kinds[i]),
        pytest.raises(UsageError, match=r"A of 80 bytes, B of 40 bytes.*CUDA_VISIBLE_DEVICES"),
    ):
        _check_alike()

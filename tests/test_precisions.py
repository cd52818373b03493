from functools import cache

import pytest
import torch

from autopar import api
from autopar.errors import RuntimeMismatchError, UsageError
from autopar.graph.graph import Graph
from autopar.plan.file import plan_from_dict, plan_to_dict
from autopar.plan.plan import FP8, Plan, PrecisionName
from autopar.runtime.checks import check_can_run

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


def test_a_plan_in_eight_bits_keeps_its_precision() -> None:
    plan = planned("fp8")
    assert plan.precision == FP8
    again = plan_from_dict(plan_to_dict(plan))
    assert again == plan
    assert "products" not in plan_to_dict(planned("bf16"))["precision"]


def test_what_needs_scales_for_each_tensor_is_planned_and_not_run() -> None:
    with pytest.raises(RuntimeMismatchError, match=r"fp8 plans can be estimated but not run yet"):
        check_can_run(planned("fp8").precision)
    check_can_run(planned("fp16").precision)
    with pytest.raises(RuntimeMismatchError, match="fp8 plans can be estimated but not run"):
        api.parallelize(
            MODEL, cluster="cpu:1x1", example_inputs={"input": torch.zeros(2, 4096)}, loss_fn=loss, global_batch_size=2,
            precision="fp8",
        )  # fmt: skip


def test_a_device_without_a_rate_is_named() -> None:
    with pytest.raises(UsageError, match=r"device 'a100-sxm4-80gb'.*float8_e4m3fn"):
        planned("fp8", "a100-sxm4-80gb:1x1")

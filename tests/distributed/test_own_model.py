"""A model of one's own verified in one line, and what is said of one that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, PlanError, UsageError, VerificationError
from autopar.plan.plan import Plan
from tests.distributed.own_models import Ranker, Restless, examples, ranker, ranking_loss

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(150)]

GIVEN: dict[str, Any] = {"example_inputs": examples(), "loss_fn": ranking_loss}


def planned(model: nn.Module | None = None, **options: Any) -> Plan:
    asked = {"cluster": "cpu:1x2", "global_batch_size": 8, "pins": ["tp=2"], **GIVEN, **options}
    return autopar.estimate(model or Ranker(), **asked)


def test_a_module_with_nested_inputs_and_dropout_is_verified_and_stays_as_it_is() -> None:
    model = Ranker()
    before = [parameter.clone() for parameter in model.parameters()]
    report = autopar.verify(model, planned(model), steps=2, **GIVEN)
    report.check()
    assert len(report.rows) == 2
    assert "every rank agrees (allowed:" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.drop.p == 0.5


def test_a_function_that_builds_it_does_as_well_and_a_plan_in_a_file(tmp_path: Path) -> None:
    plan = planned(precision="bf16", pins=["dp_shard=2"])
    plan.save(tmp_path / "plan.json")
    report = autopar.verify(ranker, tmp_path / "plan.json", steps=1, compare_in="fp64", **GIVEN)
    report.check()
    assert report.rows[0].precision == "fp64"


def test_a_model_that_draws_noise_of_its_own_is_not_compared() -> None:
    plan = planned(Restless())
    with pytest.raises(VerificationError, match="random"):
        autopar.verify(Restless(), plan, **GIVEN)


def lambda_in(model: nn.Module) -> nn.Module:
    model.activation = lambda x: x
    return model


def parametrized(model: nn.Module) -> nn.Module:
    first = next(m for m in model.modules() if isinstance(m, nn.Linear))
    torch.nn.utils.parametrizations.weight_norm(first)
    return model


@pytest.mark.parametrize(
    ("model", "changes", "message"),
    [
        (lambda: lambda_in(Ranker()), {}, "cannot be sent to the processes"),
        (lambda: parametrized(Ranker()), {}, "give a function of a module that builds it"),
        (lambda: Ranker().to("meta"), {}, "on the meta device"),
        (lambda: "ranker", {}, "A str is no model"),
        (lambda: examples, {}, "The function examples returns a tuple"),
    ],
)
def test_what_cannot_be_verified_is_said(model: Callable[[], Any], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        autopar.verify(model(), planned(), **{**GIVEN, **changes})


def test_one_sample_does_not_stand_for_those_of_two_ranks() -> None:
    one = tuple(torch.utils._pytree.tree_map(lambda value: value[:1], examples()))
    with pytest.raises(UsageError, match="One example is too few for 2 data ranks"):
        autopar.verify(Ranker(), planned(pins=["dp_shard=2"]), example_inputs=one, loss_fn=ranking_loss)


def test_a_plan_with_more_ranks_than_processes_are_started_is_refused() -> None:
    with pytest.raises(UsageError, match="has 64 ranks, and verify starts at most 32"):
        autopar.verify(Ranker(), planned(cluster="cpu:8x8", global_batch_size=64, pins=["dp_shard=64"]), **GIVEN)


def test_a_plan_of_another_model_is_refused() -> None:
    plan = planned()
    other = replace(plan, model=replace(plan.model, fingerprint="0" * 16))
    with pytest.raises(AutoparError) as refused:
        autopar.verify(Ranker(), other, **GIVEN)
    assert isinstance(refused.value, PlanError)

"""Sums of gradients that FSDP does not do."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.step import gradients
from autopar.runtime.step.gradients import Group, Held, sum_in_place


def held(name: str, value: float) -> Held:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), value)
    return Held(name=name, key=name, parameter=parameter, tie_group=cast("Group", "both stages"))


def test_stages_that_share_parameters_in_another_order_sum_each_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Tensor] = []

    def all_reduce(flat: Tensor, group: Any = None) -> None:
        sent.append(flat.clone())
        flat.mul_(2.0)

    monkeypatch.setattr(gradients.dist, "all_reduce", all_reduce)
    first, second = [held("table", 1.0), held("weight", 2.0)], [held("weight", 2.0), held("table", 1.0)]
    for stage in (first, second):
        sum_in_place(stage, lambda one: one.tie_group)
    assert torch.equal(sent[0], sent[1])
    assert [one.parameter.grad[0].item() for one in second if one.parameter.grad is not None] == [4.0, 2.0]

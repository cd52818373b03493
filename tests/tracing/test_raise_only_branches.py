"""Branches on values that only raise are no obstacle to a trace; whatever else a branch may be is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.tracing.trace import trace
from tests.support import checked as c


@pytest.mark.parametrize("check", [c.asserted, c.asserted_tensors, c.raised, c.raised_otherwise, c.cleaned_up])
def test_a_check_that_only_raises_is_left_out_and_said_to_be(check: Callable[[Tensor], None]) -> None:
    graph = trace(c.Checked(check), (torch.ones(2, 4),))
    (note,) = graph.notes
    assert "are not made in the program" in note
    assert "checked.py:" in note
    assert [op.target for op in (*graph.prelude, *graph.ops)] == ["aten.linear.default", "aten.sum.default", "aten.mul.Tensor"]  # fmt: skip


@pytest.mark.parametrize("check", [c.caught, c.caught_here, c.branched, c.numbered, c.numbered_or_not, c.either])
def test_a_branch_that_does_more_than_raise_is_refused(check: Callable[[Tensor], object]) -> None:
    with pytest.raises(TraceError, match="depends on the values of tensors"):
        trace(c.Checked(check), (torch.ones(2, 4),))

"""What steps leave to later ones is seen in a trace: refused where numbers depend on it, noted where it only counts."""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.tracing.trace import trace
from tests.support.lower import unusual as u
from tests.support.small_models import model_of

COUNT = {"steps": 0}


class Counter(nn.Module):
    """Multiplies by what ``count`` gives, which counts up by each step."""

    def __init__(self, state: Any, count: Callable[[Any], Any]) -> None:
        super().__init__()
        self.state, self.count = state, count

    def forward(self, x: Tensor) -> Tensor:
        return x * self.count(self)


def up(module: Any) -> int:
    module.state += 1
    return int(module.state)


def up_in_dict(module: Any) -> int:
    module.state["a"]["steps"] += 1
    return int(module.state["a"]["steps"])


def up_in_object(module: Any) -> int:
    module.state.steps += 1
    return int(module.state.steps)


def up_globally(module: Any) -> int:
    COUNT["steps"] += 1
    return COUNT["steps"]


def up_in_class(module: Any) -> int:
    Counter.total = getattr(Counter, "total", 0) + 1
    return int(Counter.total)


@pytest.mark.parametrize(
    ("state", "count", "named"),
    [
        (0, up, "forward sets inner.state"),
        ({"a": {"steps": 0}}, up_in_dict, "forward sets inner.state"),
        (types.SimpleNamespace(steps=0), up_in_object, "forward sets inner.state"),
        (0, up_globally, "return x"),
        (0, up_in_class, "return x"),
        (iter(range(1, 100)), lambda module: next(module.state), "return x"),
        (random.Random(0), lambda module: module.state.random(), "return x"),
    ],
    ids=["attribute", "dictionary", "object", "global", "class", "iterator", "random"],
)
def test_a_number_that_changes_from_step_to_step_is_refused(
    state: Any, count: Callable[[Any], Any], named: str
) -> None:
    model = u.Around(lambda: Counter(state, count))
    with pytest.raises(
        TraceError, match=rf"test_repeated_steps.py:\d+: A second step does not run.*mul.*{named}.*register_buffer"
    ):
        trace(model, (), u.batch())


class Lucky(nn.Module):
    """A branch that a drawn number decides, if it ``decides``."""

    def __init__(self, draws: Callable[[], bool], decides: bool) -> None:
        super().__init__()
        self.draws, self.decides = draws, decides

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() if self.draws() and self.decides else x


@pytest.mark.parametrize(
    "draws",
    [
        lambda: random.random() < 1e-7,
        lambda: random.random() > 1 - 1e-9,
        lambda: 0.4 < random.random() < 0.65,
        lambda: random.randint(0, 3) == 1,
        lambda: random.choice("abc") == "c",
        lambda: random.random() < random.random(),
        lambda: np.random.rand() < 1e-7,
        lambda: np.random.uniform(0.0, 2.0) > 1.999,
        lambda: np.random.randint(4) == 2,
    ],
    ids=["least", "most", "between", "whole", "choice", "two", "numpy least", "numpy most", "numpy whole"],
)
def test_a_branch_that_is_seldom_taken_is_refused_where_it_is_drawn(draws: Callable[[], bool]) -> None:
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(TraceError, match=r"A second step does not run.*draw random numbers with torch"):
        trace(u.Around(lambda: Lucky(draws, True)), (), u.batch())
    trace(u.Around(lambda: Lucky(draws, False)), (), u.batch())


@pytest.mark.parametrize(
    "draws", [lambda: random.random() <= 0.0, lambda: np.random.rand() >= 1.0, lambda: np.random.randint(4) > 3]
)
def test_a_branch_that_no_number_takes_is_not_refused(draws: Callable[[], bool]) -> None:
    trace(u.Around(lambda: Lucky(draws, True)), (), u.batch())


def test_what_is_drawn_after_a_trace_is_what_the_passes_have_left() -> None:
    """Numbers that lie at one part of their range are of the passes that look for branches alone; what is drawn until it fits ends there."""

    def draws() -> bool:
        return random.gauss(0.0, 1.0) + np.random.normal() + random.randrange(1000) > 1e9

    def after(make: Callable[[], Any]) -> tuple[float, float]:
        random.seed(5)
        np.random.seed(5)
        make()
        return random.random(), float(np.random.rand())

    found = after(lambda: trace(u.Around(lambda: Lucky(draws, True)), (), u.batch()))
    wanted = {after(lambda n=n: [draws() for _ in range(n)]) for n in range(1, 12)}  # type: ignore[misc]
    assert found in wanted


def _average(self: Any, x: Tensor) -> Tensor:
    self.kept = 0.9 * self.kept + 0.1 * x.detach().mean()
    return x * (1.0 + self.kept)


def _last_batch(self: Any, x: Tensor) -> Tensor:
    made = x if self.kept is None else x + self.kept.mean()
    self.kept = x
    return made


@pytest.mark.parametrize(("forward", "kept"), [(_average, torch.zeros(())), (_last_batch, None)])
def test_a_tensor_of_an_earlier_step_is_refused(forward: Callable[..., Tensor], kept: Tensor | None) -> None:
    with pytest.raises(
        TraceError, match=r"test_repeated_steps.py:\d+: .*reads what an earlier step has computed.*self.*buffer"
    ):
        trace(u.Around(lambda: model_of(forward, kept=kept)), (), u.batch())


def _warm_up(self: Any, x: Tensor) -> Tensor:
    """Another branch, but only later."""
    self.steps += 1
    return 2.0 * x if self.steps > 1000 else x


def test_a_counter_that_has_no_effect_yet_is_noted() -> None:
    model = u.Around(lambda: model_of(_warm_up, steps=0))
    (note,) = trace(model, (), u.batch()).notes
    assert "inner.steps (Model)" in note
    assert "register_buffer" in note
    assert model.inner.steps == 0


def _cached(self: Any, x: Tensor) -> Tensor:
    """A table made by the first step, and what is kept for whoever looks at it."""
    if self.table is None or self.length < x.shape[-1]:
        self.length = x.shape[-1]
        self.table = torch.arange(x.shape[-1], dtype=x.dtype).cos() + torch.zeros_like(x[0])
    self.logged = x.detach()
    return x * self.table


def _buffered(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return x * self.steps


def _blank(self: Any, x: Tensor) -> Tensor:
    """With a number that equals nothing, itself included."""
    return torch.where(x > 0, x, float("nan")).nan_to_num()


@pytest.mark.parametrize("forward", [_cached, _buffered, _blank])
def test_caches_and_buffers_are_no_fault(forward: Callable[..., Tensor]) -> None:
    parts: dict[str, Any] = {"table": None, "length": 0, "logged": None}
    inner = lambda: model_of(forward, **parts, steps=nn.Buffer(torch.zeros(())))
    assert trace(u.Around(inner), (), u.batch()).notes == ()

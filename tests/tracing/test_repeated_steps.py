import random
import types
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.errors import TraceError
from autopar.models.graph_for_plan import trace_model
from autopar.plan.plan import FP32
from autopar.planner.sharding.input_axes import samples_apart
from autopar.tracing import repeated_steps
from autopar.tracing.sample_counts import CountError
from autopar.tracing.trace import trace
from tests.support.lower import unusual as u
from tests.support.said import refuses
from tests.support.small_models import model_of, same_as_the_model

COUNT = {"steps": 0}


def up(module: Any) -> int:
    module.state += 1
    return int(module.state)


def up_in_object(module: Any) -> int:
    module.state.steps += 1
    return int(module.state.steps)


def up_globally(module: Any) -> int:
    COUNT["steps"] += 1
    return COUNT["steps"]


@pytest.mark.parametrize(("state", "count", "named"), [
    (0, up, "forward sets inner.state"),
    (types.SimpleNamespace(steps=0), up_in_object, "forward sets inner.state"),
    (0, up_globally, "x . count"),
    (iter(range(1, 100)), lambda module: next(module.state), "x . count"),
    (random.Random(0), lambda module: module.state.random(), "x . count"),
])  # fmt: skip
def test_a_number_that_changes_by_steps_is_refused(state: Any, count: Callable[[Any], Any], named: str) -> None:
    model = u.Around(lambda: model_of(lambda self, x: x * count(self), state=state))
    said = rf"test_repeated_steps.py:\d+: A second step does not run.*mul.*{named}.*register_buffer"
    refuses(TraceError, said, trace, model, (), u.batch())


def lucky(draws: Callable[[], bool], decides: bool = True) -> u.Around:
    """A branch that a drawn number decides, if it ``decides``."""
    return u.Around(lambda: model_of(lambda self, x: x.tanh() if draws() and decides else x))


SELDOM: list[Callable[[], bool]] = [
    lambda: random.random() < 1e-7, lambda: random.random() > 1 - 1e-9, lambda: 0.4 < random.random() < 0.65,
    lambda: random.randint(0, 3) == 1, lambda: random.choice("abc") == "c", lambda: random.random() < random.random(),
    lambda: np.random.rand() < 1e-7, lambda: np.random.uniform(0.0, 2.0) > 1.999, lambda: np.random.randint(4) == 2,
]  # fmt: skip


@pytest.mark.parametrize("draws", SELDOM)
def test_a_branch_that_is_seldom_taken_is_refused_where_it_is_drawn(draws: Callable[[], bool]) -> None:
    random.seed(3)
    np.random.seed(3)
    with pytest.raises(TraceError, match=r"A second step does not run.*draw random numbers with torch"):
        trace(lucky(draws), (), u.batch())


def test_draws_that_decide_nothing_are_not_refused() -> None:
    trace(lucky(lambda: sum(draws() for draws in SELDOM) > 0, False), (), u.batch())


def test_words_of_the_state_become_the_numbers_that_a_pass_draws() -> None:
    state = repeated_steps._random_state()
    drawn = []
    for word in repeated_steps._WORDS:
        repeated_steps._set_next_words(word, state)
        drawn.append((random.getrandbits(32), int(np.random.randint(2**32, dtype=np.uint32))))
    repeated_steps._set_random_state(state)
    expected = [0x40, *(fifths * 0x33333333 for fifths in (5, 2, 3, 1, 4))]
    assert drawn == [(number, number) for number in expected]


@pytest.mark.parametrize(
    "draws", [lambda: random.random() <= 0.0, lambda: np.random.rand() >= 1.0, lambda: np.random.randint(4) > 3]
)
def test_a_branch_that_no_number_takes_is_not_refused(draws: Callable[[], bool]) -> None:
    trace(lucky(draws), (), u.batch())


def test_what_is_drawn_after_a_trace_is_what_the_passes_have_left() -> None:
    """Numbers that lie at one part of their range are of the passes that look for branches alone; what is drawn until it fits ends there."""

    def draws() -> bool:
        return random.gauss(0.0, 1.0) + np.random.normal() + random.randrange(1000) > 1e9

    def after(make: Callable[[], Any]) -> tuple[float, float]:
        random.seed(5)
        np.random.seed(5)
        make()
        return random.random(), float(np.random.rand())

    found = after(lambda: trace(lucky(draws), (), u.batch()))
    wanted = {after(lambda n=n: [draws() for _ in range(n)]) for n in range(1, 12)}
    assert found in wanted


def _average(self: Any, x: Tensor) -> Tensor:
    self.kept = 0.9 * self.kept + 0.1 * x.detach().mean()
    return x * (1.0 + self.kept)


def _last_batch(self: Any, x: Tensor) -> Tensor:
    made = x if self.kept is None else x + self.kept.mean()
    self.kept = x
    return made


def _warmer(self: Any, x: Tensor) -> Tensor:
    """Of no batch and no parameter: constants make each next one."""
    self.kept = 0.5 * self.kept + 0.5
    return x * self.kept.mean()


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


def _cached_of_a_buffer(self: Any, x: Tensor) -> Tensor:
    """As rotary embeddings do with their frequencies."""
    if self.table is None:
        self.table = torch.outer(torch.arange(x.shape[-1], dtype=x.dtype), self.steps.view(1)).cos().squeeze(-1)
    return x * self.table


def _cached_of_a_counter(self: Any, x: Tensor) -> Tensor:
    made = _cached_of_a_buffer(self, x)
    self.steps += 1
    return made


def _of_the_last_batch(self: Any, x: Tensor) -> Tensor:
    before, self.table = self.table, x.detach().mean(0)
    return x if before is None else x * before


def _buffered(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return x * self.steps


def _blank(self: Any, x: Tensor) -> Tensor:
    """With a number that equals nothing, itself included."""
    return torch.where(x > 0, x, float("nan")).nan_to_num()


def _with_table(forward: Callable[..., Tensor], is_buffer: bool) -> nn.Module:
    model = model_of(forward, length=0, logged=None, steps=nn.Buffer(torch.zeros(())), table=None)
    if is_buffer:
        del model.table
        model.register_buffer("table", None, persistent=False)
    return model


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("forward", [_cached, _cached_of_a_buffer, _buffered, _blank])
def test_caches_and_buffers_are_no_fault(forward: Callable[..., Tensor], is_buffer: bool) -> None:
    assert same_as_the_model(u.Around(partial(_with_table, forward, is_buffer)), u.batch()).notes == ()


@pytest.mark.parametrize("inner", [
    partial(model_of, _average, kept=torch.zeros(())), partial(model_of, _last_batch, kept=None),
    *(partial(model_of, _warmer, kept=torch.zeros(size)) for size in (8, 100)),
    *(partial(_with_table, made, of) for made in (_cached_of_a_counter, _of_the_last_batch) for of in (False, True)),
])  # fmt: skip
def test_a_tensor_of_an_earlier_step_is_refused(inner: Callable[[], nn.Module]) -> None:
    said = r"test_repeated_steps.py:\d+: .*reads what an earlier step has computed.*(self|before).*buffer"
    refuses(TraceError, said, trace, u.Around(inner), (), u.batch())


# --- numbers that count samples


def _loss(self: Any, ids: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), ids.flatten(), **options)


def _shares(self: Any, ids: Tensor) -> Tensor:
    logits = self.head(self.embed(ids)).flatten(0, 1)
    shares = logits.softmax(-1).sum(0) / logits.shape[0]
    return (shares * shares.detach()).sum()


SCALED: dict[str, tuple[Callable[[Any, Tensor], Tensor], int]] = {
    "mean": (lambda self, ids: 0.5 * _loss(self, ids), 1),
    "tensor": (lambda self, ids: _loss(self, ids, reduction="sum") / (ids != -100).sum(), 1),
    "by sequence": (lambda self, ids: _loss(self, ids, reduction="sum") / ids.shape[1], 1),
    "one beside places": (lambda self, ids: _loss(self, ids) * torch.arange(len(ids)).new_ones(()), 1),
    "count beside places": (lambda self, ids: _loss(self, ids) / torch.arange(len(ids)).new_full((), len(ids)), 2),
    "numel": (lambda self, ids: _loss(self, ids, reduction="sum") / ids.numel(), 2),
    "ones": (lambda self, ids: _loss(self, ids, reduction="sum") * (1.0 / torch.ones_like(ids).sum()), 2),
    "by expert": (_shares, 2),
    "passes differ": (lambda self, ids: _loss(self, ids) / (2.0 if len(ids) == 4 else 3.0), 2),
}
"""Losses, with how often they are exported: once where no number counts samples."""


@pytest.mark.parametrize("kind", SCALED)
def test_a_count_of_the_example_is_refused_and_other_numbers_cost_no_second_export(kind: str) -> None:
    loss, exports = SCALED[kind]

    def forward(self: Any, ids: Tensor) -> Tensor:
        return loss(self, ids)

    model, batch = model_of(forward, embed=nn.Embedding(16, 8), head=nn.Linear(8, 16)), torch.zeros(4, 8).long()
    with mock.patch.object(torch.export, "export", wraps=torch.export.export) as export:
        if exports == 1:
            assert trace(model, (batch,)).batch_size == 4
        else:
            refuses(TraceError, r"test_repeated_steps\.py.*depends on the batch size", trace, model, (batch,))
    assert export.call_count == exports


Statistic = Callable[[Tensor, int], Tensor]

COUNTING: dict[str, Statistic] = {
    "by sum": lambda x, n: ((x - x.sum(0) / n) ** 2).sum(0) / (n - 1),  # which is 1 in a trace of two samples
    "by power": lambda x, n: x.square().sum(0) * n**-1,
    "by exponent": lambda x, n: x.square().mean(0) ** (1 / n),
    "by limit": lambda x, n: x.square().sum(0).clamp(max=n / 2),
    "shifted": lambda x, n: x.square().mean(0) + 0.01 * n,
    "by constant": lambda x, n: x.square().sum(0) / torch.tensor(float(n)),
    "by filled row": lambda x, n: (torch.full((1, n), 1 / n) @ x).square().squeeze(0),
    "by constant sum": lambda x, n: x.square().mean(0) + torch.arange(n).sum(),
    "by soft weights": lambda x, n: x.square().sum(0) * torch.zeros(n).softmax(0)[0],
    "by last place": lambda x, n: x.square().mean(0) + torch.arange(n)[-1],
    "turned": lambda x, n: x.square().mean(0).roll(n // 2),
}


def deep(statistic: Statistic) -> nn.Module:
    """Statistics of the batch in each of three layers, far from the loss."""

    def forward(self: Any, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + (y * (statistic(y, len(y)) + 1e-3).rsqrt()).relu()
        return F.cross_entropy(self.head(x), target)

    return model_of(forward, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), head=nn.Linear(8, 3))


@pytest.mark.parametrize(("statistic", "samples"), [("by sum", 3), *((statistic, 2) for statistic in COUNTING)])
def test_numbers_in_layers_are_seen_as_well(statistic: str, samples: int) -> None:
    with pytest.raises(CountError, match="depends on the batch size"):
        trace(deep(COUNTING[statistic]), (torch.randn(samples, 8), torch.zeros(samples, dtype=torch.int64)))


def test_a_model_of_one_batch_size_is_told_so() -> None:
    with pytest.raises(CountError, match="runs with 2 samples, but not with 4"):
        trace(deep(lambda x, n: x.view(2, 8).mean(0)), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64)))


@pytest.mark.parametrize("statistic", [
    lambda x, n: (torch.ones(1, n) @ x).square().squeeze(0),
    lambda x, n: x[torch.arange(n), 0].square().mean(0, keepdim=True).expand(8),
])  # fmt: skip
def test_constants_with_a_place_for_each_sample_pass(statistic: Statistic) -> None:
    assert trace(deep(statistic), (torch.randn(2, 8), torch.zeros(2, dtype=torch.int64))).batch_size == 2


def test_where_numbers_count_samples_the_trace_is_of_the_global_batch() -> None:
    model, batch = deep(COUNTING["by sum"]), [torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)]
    graph = trace_model(model, batch, FP32, global_batch_size=8, samples_apart=samples_apart)
    divisors = [op.args[1] for op in graph.ops if op.target == "aten.div.Tensor" and op.spec.shape == (8,)]
    assert (graph.exact, graph.batch_size, divisors) == (True, 8, [8, 7] * 3)


def test_a_loop_over_samples_is_of_one_batch_size() -> None:
    """Its steps are alike but for their number."""
    unrolled = lambda self, x: sum((self.head(x[i]).tanh().sum() for i in range(len(x))), start=torch.zeros(()))
    said = "depends on the batch size: .* for a batch of 2"
    refuses(CountError, said, trace, model_of(unrolled, head=nn.Linear(8, 8)), (torch.randn(2, 8),))


@pytest.mark.parametrize("code", [
    lambda y: y[:2].square().mean(),
    lambda y: y.view(2, -1).square().mean(1).sqrt().sum(),
    lambda y: torch.cat((y, y.sin()), 1).view(-1, 4).view(2, -1).square().mean(1).sqrt().sum(),
])  # fmt: skip
def test_a_size_that_the_batch_of_a_trace_has_by_chance_counts_no_samples(code: Callable[[Tensor], Tensor]) -> None:
    model = model_of(lambda self, x: code(self.linear(x)), linear=nn.Linear(4, 4))
    graph = trace_model(model, {"x": torch.ones(2, 6, 4)}, FP32, global_batch_size=8, samples_apart=samples_apart)
    assert graph.mixing, "the first two samples are not all, and two halves are not two samples"

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.errors import TraceError
from autopar.lower.program import lower
from autopar.tracing.trace import trace
from tests.support import checked as c
from tests.support.close import assert_close
from tests.support.lower import unusual as u
from tests.support.lower.against_model import check
from tests.support.small_models import calling, evaluate, in_double, model_of

Code = Callable[[Tensor], Tensor]
INF = float("inf")


def of_transformers(x: Tensor) -> Tensor:
    if x.dtype == torch.float32 and not torch.isfinite(x).all():
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-limit, max=limit)
    return x


def nested(x: Tensor) -> Tensor:
    if x.dim() > 1:  # noqa: SIM102  as models are written
        if not torch.isfinite(x).all():
            x = torch.clamp(x, min=-2.0, max=2.0)
    return x


def infinite(x: Tensor) -> Tensor:
    if torch.isinf(x).any():
        limit = 2.0
        x = torch.clamp(x, -limit, limit)
    return 3.0 * x


def twice(x: Tensor) -> Tensor:
    if torch.any(torch.isinf(x)):
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-2.0, max=limit)
    if x.isfinite().all():
        limit = 2.0
        x = torch.clamp(x, min=-limit)
    return x


def of_t5(x: Tensor) -> Tensor:
    clamp_value = torch.where(torch.isinf(x).any(), torch.finfo(x.dtype).max - 1000, torch.finfo(x.dtype).max)
    return torch.clamp(x, min=-clamp_value, max=clamp_value)


def chosen_twice(x: Tensor) -> Tensor:
    is_infinite = torch.where(torch.any(torch.isinf(x)), True, False)
    return torch.clamp(x, min=torch.where(is_infinite, -2, -4), max=torch.where(is_infinite, 3.0, 7.0))


def within(x: Tensor, limit: Tensor) -> Tensor:
    return torch.clamp(x, min=-limit, max=limit)


CHOSEN: dict[str, Code] = {
    "of T5": of_t5,
    "all": lambda x: 3.0 * within(x, torch.where(x.isfinite().all(), 7.0, 2.0)),
    "negated": lambda x: torch.clamp(x, min=-torch.where(~torch.all(torch.isfinite(x)), 2.0, 7.0)).clamp(max=4.0),
    "twice": chosen_twice,
}
TAKEN: dict[str, Code] = {"of transformers": of_transformers, "nested": nested, "infinite": infinite, "in a row": twice}


def summed(code: Code, shape: tuple[int, ...] = (3,)) -> nn.Module:
    """A sum over samples, so that each sample stands for itself."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        y = self.inner(x + self.scale)
        return (y / (1.0 + y.abs())).sum()

    return model_of(forward, inner=calling(code), scale=nn.Parameter(torch.ones(shape)))


@pytest.mark.parametrize("kind", [*TAKEN, *CHOSEN])
def test_each_sample_is_clamped_as_a_batch_of_one(kind: str) -> None:
    model = summed((TAKEN | CHOSEN)[kind])
    batch = torch.tensor([[1.0, 9.0, -9.0], [INF, 9.0, -9.0], [5.0, -INF, 1.0], [3.0, 3.0, 3.0]])
    graph = trace(model, (batch,))
    assert not graph.mixing
    (note,) = graph.notes
    assert note.startswith("values that are not finite are clamped for each sample by itself")
    assert "test_value_branches.py:" in note
    found = evaluate(graph, {"x": batch}, {"scale": model.scale}, {}, model)
    wanted = torch.stack([model(sample[None]) for sample in batch]).sum()
    assert found.isfinite()
    assert_close(found, wanted)
    mine, theirs = (torch.autograd.grad(loss, model.scale)[0] for loss in (found, wanted))
    assert_close(mine, theirs)


@pytest.mark.parametrize("code", [nested, CHOSEN["all"]])
def test_samples_may_lie_in_the_second_dim(code: Code) -> None:
    batch = torch.ones(3, 4, 2)
    batch[1, 2, 0] = INF
    batch[0] = 9.0
    model = summed(code, (2,))
    turned = model_of(lambda self, x: x.transpose(0, 1))
    graph = trace(nn.Sequential(turned, model), (batch.transpose(0, 1),))
    assert not graph.mixing
    found = evaluate(graph, {"input": batch.transpose(0, 1)}, {"1.scale": model.scale}, {}, model)
    assert_close(found, sum(model(batch[:, n : n + 1]) for n in range(4)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("worst", [1.0, INF, -INF, float("nan")])
def test_chosen_limits_are_to_the_last_bit_those_of_the_model(dtype: torch.dtype, worst: float) -> None:
    """For samples that are all finite, at the edge of what is, and for each that is not."""
    model = summed(of_t5, (5, 3)).to(dtype)
    largest = torch.finfo(dtype).max
    batch = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    batch[0, 1, 0], batch[0, 2, 1], batch[0, 4, 2] = largest, -largest, worst
    graph = trace(model, (batch[:1],))
    for given in (batch[:1], batch[1:]):
        found = evaluate(graph, {"x": given}, {"scale": model.scale}, {}, model)
        wanted = model(given)
        mine, theirs = (torch.autograd.grad(loss, model.scale)[0] for loss in (found, wanted))
        assert torch.equal(found.nan_to_num(3.0), wanted.nan_to_num(3.0))
        assert torch.equal(mine.nan_to_num(3.0), theirs.nan_to_num(3.0))


@pytest.mark.parametrize("code", [of_transformers, of_t5])
@pytest.mark.parametrize("pins", [["tp=2", "dp_replicate=2", "num_micro_batches=2"], ["dp_shard=2"]])
def test_ranks_and_micro_batches_clamp_their_samples(code: Code, pins: list[str]) -> None:
    model = u.Around(lambda: calling(code))
    plan = check(model, u.batch(), pins, precision="fp32")  # limits of float64 are infinite in it
    assert not any(note.startswith(("opaque", "samples meet")) for note in plan.notes)


def overflowing(x: Tensor, least: float) -> Tensor:
    x = x.masked_fill(x >= least, INF)
    limit = torch.where(torch.isinf(x).any(), 0.2, 7.0)
    return torch.clamp(x, min=-limit, max=limit)


def test_a_rank_clamps_by_what_overflows_on_another() -> None:
    model = u.Around()
    model.first, model.last = nn.Linear(8, 2**15), nn.Linear(2**15, 4)
    batch = in_double(model, u.batch())
    wide = model.first(batch["x"]).detach()
    least = wide.amax(1).min().item()  # in each sample something overflows, in one of them a single element
    assert not (wide >= least).view(8, 2, -1).any(-1).all()
    model.inner = calling(partial(overflowing, least=least))
    pins = ["tp=2", "num_micro_batches=2", "first.weight=tp:S(0)", "last.weight=tp:S(1)"]
    plan = check(model, batch, pins)
    code = lower(plan, api.trace(model, example_inputs=batch, precision="fp64")).code
    (asks,) = (line for line in code.splitlines() if " isinf = " in line)
    assert "tp: S(1)" in asks


def of_values(x: Tensor) -> Tensor:
    if (x > 2.0).any():
        x = torch.clamp(x, max=2.0)
    return x


def of_another(x: Tensor) -> Tensor:
    y = x + 1.0
    if not torch.isfinite(y).all():
        x = torch.clamp(x, max=2.0)
    return x + y


def into_another(x: Tensor) -> Tensor:
    y = x
    if not torch.isfinite(x).all():
        y = torch.clamp(x, max=2.0)
    return x + y


def read_later(x: Tensor) -> Tensor:
    limit = 1.0
    if not torch.isfinite(x).all():
        limit = 2.0
        x = torch.clamp(x, max=limit)
    return limit * x


def with_else(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():  # noqa: SIM108
        x = torch.clamp(x, max=2.0)
    else:
        x = 2.0 * x
    return x


def doing_more(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.clamp(x, max=2.0) + 1.0
    return x


def by_method(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = x.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
    return x


def twice_in_a_row(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.clamp(torch.clamp(x, max=2.0), min=-2.0)
    return x


def another_torch(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = other.clamp(x, torch.finfo(x.dtype).max)
    return x


def largest(x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        x = torch.max(torch.clamp(x, max=2.0), x)
    return x


class other:  # noqa: N801  stands for a module
    @staticmethod
    def clamp(x: Tensor, limit: float) -> Tensor:
        return 2.0 * x


@pytest.mark.parametrize("code", [
    of_values, of_another, into_another, read_later, with_else, doing_more, by_method, twice_in_a_row, another_torch,
    largest, lambda x: x * bool(torch.isfinite(x).all()),
])  # fmt: skip
def test_a_branch_that_does_anything_else_runs_as_it_is_written(code: Code) -> None:
    (note,) = trace(summed(code), (torch.ones(4, 3),)).notes
    assert note.startswith("opaque") and "inner" in note


CHOSEN_OTHERWISE: dict[str, Code] = {
    "by values": lambda x: within(x, torch.where((x > 2.0).any(), 2.0, 7.0)),
    "by another": lambda x: within(x, torch.where(torch.isinf(x + 1.0).any(), 2.0, 7.0)),
    "read beside": lambda x: within(x, torch.where((own := torch.isinf(x).any()), 2.0, 7.0)) * own,
    "limit read beside": lambda x: within(x, (limit := torch.where(torch.isinf(x).any(), 2.0, 7.0))) + limit,
    "clamps the limit": lambda x: torch.clamp(torch.where(torch.isinf(x).any(), 2.0, 7.0), max=x),
    "among tensors": lambda x: within(x, torch.where(torch.isinf(x).any(), x.mean(), 7.0)),
    "of a part": lambda x: within(x, torch.where(torch.isinf(x).any(0, keepdim=True), 2.0, 7.0)),
    "masked": lambda x: torch.where(torch.isinf(x).any(), 0.0, x),
}


@pytest.mark.parametrize("kind", CHOSEN_OTHERWISE)
def test_a_choice_that_is_for_anything_else_stays_one_of_all_samples(kind: str) -> None:
    code = CHOSEN_OTHERWISE[kind]
    model = summed(code)
    graph = trace(model, (torch.ones(4, 3),))
    assert not graph.notes
    assert [op.target for op in graph.ops if ".any." in op.target]
    batch = torch.tensor([[1.0, 9.0, -9.0], [5.0, INF, 1.0], [3.0, 3.0, 3.0], [3.0, -8.0, 3.0]])
    found = evaluate(graph, {"x": batch}, {"scale": model.scale}, {}, model)
    assert_close(found.nan_to_num(3.0), model(batch).nan_to_num(3.0))


# --- branches that only raise


@pytest.mark.parametrize("check", [c.asserted, c.asserted_tensors, c.raised, c.raised_otherwise, c.cleaned_up])
def test_a_check_that_only_raises_is_left_out_and_said_to_be(check: Callable[[Tensor], None]) -> None:
    graph = trace(c.Checked(check), (torch.ones(2, 4),))
    (note,) = graph.notes
    assert "are not made in the program" in note
    assert "checked.py:" in note
    targets = [op.target for op in (*graph.prelude, *graph.ops)]
    assert targets == ["aten.linear.default", "aten.sum.default", "aten.mul.Tensor"]


@pytest.mark.parametrize("check", [c.caught, c.caught_here, c.branched, c.numbered, c.numbered_or_not, c.either])
def test_a_branch_that_does_more_than_raise_is_not_traced(check: Callable[[Tensor], object]) -> None:
    try:
        (said,) = trace(c.Checked(check), (torch.ones(2, 4),)).notes
    except TraceError as error:
        said = str(error)
    assert "depends on the values of tensors" in said

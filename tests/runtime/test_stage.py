"""What stages pass on has the form that pipelines of torch 2.11 take and comes out as it went in; sums of gradients over stages."""

from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.runtime.step import gradients
from autopar.runtime.step.gradients import RankParameter, sum_in_place
from autopar.runtime.step.stage import Passed, enter, leave

DTYPES = (
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
)


def passed(*values: Tensor, returns: int | None = None) -> tuple[Passed, ...]:
    needs = [x.requires_grad for x in values]
    return tuple(
        Passed(shape=tuple(x.shape), dtype=x.dtype, requires_grad=need, returns=need or i == returns)
        for i, (x, need) in enumerate(zip(values, needs, strict=True))
    )


def sent(*values: Tensor, returns: int | None = None) -> tuple[Tensor, ...]:
    """What the first of several stages gives."""
    return leave(passed(*values, returns=returns), None, values)


def through(takes: tuple[Passed, ...], gives: tuple[Passed, ...], received: list[Tensor], work: Any) -> Tensor:
    """What another stage gives of what it has received."""
    values, link = enter(takes, received)
    return leave(gives, link, [work(*values)])[0]


@given(shape=st.lists(st.sampled_from([0, 1, 1, 2, 3]), max_size=4), order=st.integers(0, 23), data=st.data())
def test_strides_under_way_are_those_of_a_new_tensor(shape: list[int], order: int, data: st.DataObject) -> None:
    x = torch.empty(shape)
    orders = list(permutations(range(len(shape))))
    x = x.permute(orders[order % len(orders)])
    if x.ndim and data.draw(st.booleans()):
        x = x.narrow(-1, 0, min(1, x.shape[-1]))
    (given_,) = sent(x, returns=0)
    assert given_.shape == x.shape
    assert given_.stride() == passed(x)[0].example().stride() == torch.empty(x.shape).stride()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype_come_out_as_they_went_in(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 1 if dtype == torch.bool else dtype.itemsize
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (6, size), dtype=torch.uint8, generator=generator)
    x = bits.view(dtype).squeeze(-1)
    takes = passed(x)
    (under_way,) = sent(x)
    assert under_way.dtype == takes[0].carrier and under_way.nbytes == x.nbytes
    received = under_way.detach().clone().requires_grad_()  # as the buffers of torch 2.11
    (out,), _ = enter(takes, [received])
    assert out.dtype == dtype
    assert torch.equal(out.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8))


def test_each_tensor_that_asks_for_a_gradient_gets_one() -> None:
    """torch 2.11 asks for one of each that a stage receives, and fails where there is none."""
    whole, number, still = torch.ones(2, 3, requires_grad=True), torch.tensor([1, 2]), torch.ones(2)
    unread = torch.ones(4, dtype=torch.float64, requires_grad=True)
    receives = passed(whole, number, still, unread)
    received = [torch.ones(p.shape).to(p.carrier).requires_grad_() for p in receives]

    def work(h: Tensor, n: Tensor, s: Tensor, _: Tensor) -> Tensor:
        assert [x.requires_grad for x in (h, n, s)] == [True, False, False]
        return ((2.0 * h).sum(1) * s * (n != 0)).sum()

    made = through(receives, passed(torch.zeros((), requires_grad=True)), received, work)
    made.backward()
    for x, p in zip(received, receives, strict=True):
        assert x.grad is not None and x.grad.dtype == p.carrier and x.grad.shape == p.shape
    assert [float(x.grad.double().sum()) for x in received if x.grad is not None] == [12.0, 0.0, 0.0, 0.0]


def test_gradients_pass_as_they_are_and_reach_stages_behind_one_without_any() -> None:
    x, dead = torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)
    received = [t.detach().requires_grad_() for t in (x, dead)]
    given_ = through(passed(x, dead), passed(torch.zeros(3), returns=0), received, lambda h, _: h.detach())
    assert given_.requires_grad, "a gradient comes back, so that this stage runs backward"
    given_.backward(torch.ones(3))
    assert [t.grad is not None and not t.grad.any() for t in received] == [True, True]
    received = [t.detach().requires_grad_() for t in (x, dead)]
    through(passed(x, dead), passed(x), received, lambda h, _: 3.0 * h).backward(torch.tensor([1.0, 2.0, 4.0]))
    assert received[0].grad is not None and received[0].grad.tolist() == [3.0, 6.0, 12.0]


def test_without_gradients_nothing_is_recorded() -> None:
    x = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        given_ = through(passed(x), passed(x), [x], lambda h: 2.0 * h)
    assert not given_.requires_grad and torch.equal(given_, 2.0 * x)


def held(name: str, value: float) -> RankParameter:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.full((2,), value)
    return RankParameter(name=name, key=name, parameter=parameter, tie_group="both stages")


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

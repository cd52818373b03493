"""Optimizers step on the plain tensors inside of DTensors, and nobody sees it but the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.local_step import ELEMENTWISE, LocalSteps
from autopar.runtime.world import start, stop

ELEMENTWISE_BY_NAME = sorted(ELEMENTWISE, key=lambda kind: kind.__name__)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    start("cpu")
    yield
    stop()


def parameters() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(4, 3), (5,), ()]
    return [
        nn.Parameter(DTensor.from_local(torch.randn(s), mesh, [Shard(0) if s else Replicate()], run_check=False))
        for s in shapes
    ]


def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], seen: list[type] | None = None) -> Any:
    """Three steps; the parameters, the optimizer."""
    held = parameters()
    optimizer = make(held)
    step = optimizer._optimizer_step_code

    def look() -> None:
        if seen is not None:
            seen.extend(type(p) for group in optimizer.param_groups for p in group["params"])
        step()

    optimizer._optimizer_step_code = look  # type: ignore[method-assign]  # the end of a step, before hooks
    for number in range(3):
        for p in held:
            p.grad = torch.full_like(p, 0.5 + number)
        optimizer.step()
        optimizer.zero_grad()
    return held, optimizer


@pytest.mark.parametrize("kind", ELEMENTWISE_BY_NAME, ids=lambda kind: kind.__name__)
def test_a_step_is_that_on_dtensors(kind: Any) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    expected, theirs = trained(lambda held: kind(held, lr=0.1, **options))
    seen: list[type] = []
    made: list[LocalSteps] = []

    def with_steps(held: list[nn.Parameter]) -> torch.optim.Optimizer:
        made.append(LocalSteps(held))
        return kind(held, lr=0.1, **options)  # type: ignore[no-any-return]

    found, mine = trained(with_steps, seen)
    made[0].remove()
    assert set(seen) == {nn.Parameter}
    assert [p for group in mine.param_groups for p in group["params"]] == found
    for a, b in zip(found, expected, strict=True):
        assert a.grad is None
        assert torch.equal(a.full_tensor(), b.full_tensor())
        states, others = mine.state[a], theirs.state[b]
        assert {name: type(value) for name, value in states.items()} == {n: type(v) for n, v in others.items()}
        for name, value in states.items():
            if isinstance(value, DTensor):
                assert value.placements == a.placements
                value, others[name] = value.full_tensor(), others[name].full_tensor()
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(others[name])), name


class _OwnAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("how", ["derived", "hook", "closure", "other parameters"])
def test_what_might_notice_steps_as_before(how: str) -> None:
    held = parameters()
    steps = LocalSteps(held[:2] if how == "other parameters" else held)
    kinds: dict[str, Any] = {"derived": _OwnAdamW}
    optimizer = kinds.get(how, torch.optim.AdamW)(held)
    seen: list[Any] = []
    if how == "hook":
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0]))
    look = optimizer._optimizer_step_code
    optimizer._optimizer_step_code = lambda: (seen.append(optimizer.param_groups[0]["params"][0]), look())
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step(*([lambda: torch.zeros(())] if how == "closure" else []))
    steps.remove()
    assert seen
    assert all(p is held[0] for p in seen)


def test_a_step_that_fails_leaves_no_trace_in_the_next() -> None:
    held = parameters()
    steps = LocalSteps(held)
    optimizer = torch.optim.AdamW(held)
    held[0].grad = torch.ones_like(held[0])
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    steps.restore()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], held, strict=True))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    steps.remove()
    assert isinstance(optimizer.state[held[0]]["exp_avg"], DTensor)

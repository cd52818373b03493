from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.errors import UsageError
from autopar.runtime.local_optimizer import ELEMENTWISE, LocalSteps
from tests.support.close import assert_close, error_of
from tests.support.said import refuses

pytestmark = pytest.mark.usefixtures("one_rank")

ELEMENTWISE_BY_NAME = sorted(ELEMENTWISE - {torch.optim.Rprop}, key=lambda kind: kind.__name__)


def parameters() -> list[nn.Parameter]:
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)
    shapes: list[tuple[int, ...]] = [(4, 3), (5,), ()]
    return [
        nn.Parameter(DTensor.from_local(torch.randn(s), mesh, [Shard(0) if s else Replicate()], run_check=False))
        for s in shapes
    ]


def step(optimizer: torch.optim.Optimizer, held: Sequence[nn.Parameter], gradient: float = 1.0) -> None:
    for p in held:
        p.grad = torch.full_like(p, gradient)
    optimizer.step()


def trained(make: Callable[..., torch.optim.Optimizer], local: bool = False, on_host: bool = False) -> Any:
    """Three steps, ``local`` ones by plain tensors; the parameters, the optimizer, types of what the steps saw."""
    held, seen = parameters(), set[type]()
    steps = LocalSteps(held, on_host=on_host) if local else None
    optimizer = make(held)
    own = optimizer._optimizer_step_code

    def look() -> None:
        seen.update(type(p) for group in optimizer.param_groups for p in group["params"])
        own()

    optimizer._optimizer_step_code = look  # the end of a step, before hooks
    for number in range(3):
        step(optimizer, held, 0.5 + number)
        optimizer.zero_grad()
    if steps is not None:
        steps.remove()
    return held, optimizer, seen


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return error_of(found, wanted) <= 2e-6


@pytest.mark.parametrize("on_host", [False, True], ids=["here", "on the host"])
@pytest.mark.parametrize("kind", ELEMENTWISE_BY_NAME, ids=lambda kind: kind.__name__)
def test_a_step_is_that_on_dtensors(kind: Any, on_host: bool) -> None:
    options: dict[str, Any] = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    make = partial(kind, lr=0.1, **options)
    (expected, theirs, _), (found, mine, seen) = trained(make), trained(make, local=True, on_host=on_host)
    # one kernel of torch's on the host rounds in other places than a kernel for each operation
    same = close if on_host else torch.equal
    assert seen == {nn.Parameter}
    assert [p for group in mine.param_groups for p in group["params"]] == found
    for a, b in zip(found, expected, strict=True):
        assert a.grad is None
        assert same(a.full_tensor(), b.full_tensor())
        states, others = mine.state[a], theirs.state[b]
        assert {name: type(value) for name, value in states.items()} == {n: type(v) for n, v in others.items()}
        for name, value in states.items():
            if isinstance(value, DTensor):
                assert value.placements == a.placements
                value, others[name] = value.full_tensor(), others[name].full_tensor()
            assert same(torch.as_tensor(value), torch.as_tensor(others[name])), name


def test_rprop_which_does_not_step_on_dtensors_steps_on_plain_tensors() -> None:
    found, _, _ = trained(partial(torch.optim.Rprop, lr=0.1), local=True)
    plain = [nn.Parameter(p.to_local().detach().clone()) for p in parameters()]
    optimizer = torch.optim.Rprop(plain, lr=0.1)
    for number in range(3):
        step(optimizer, plain, 0.5 + number)
    for mine, theirs in zip(found, plain, strict=True):
        assert torch.equal(mine.to_local(), theirs)


@pytest.mark.parametrize("how", ["derived", "hook", "closure", "other parameters"])
def test_what_might_notice_steps_as_before(how: str) -> None:
    held = parameters()
    steps = LocalSteps(held[:2] if how == "other parameters" else held)
    own = type("OwnAdamW", (torch.optim.AdamW,), {})
    optimizer: Any = (own if how == "derived" else torch.optim.AdamW)(held)
    given = [lambda: torch.zeros(())] if how == "closure" else []
    seen: list[Any] = []
    if how == "hook":
        optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["params"][0]))
    look = optimizer._optimizer_step_code
    on_host = LocalSteps(held[:2] if how == "other parameters" else held, on_host=True)
    refuses(UsageError, r"\w*AdamW cannot step .*[Pp]in offload=none", optimizer.step, *given)
    on_host.remove()
    seen.clear()
    optimizer._optimizer_step_code = lambda: (seen.append(optimizer.param_groups[0]["params"][0]), look())
    for p in held:
        p.grad = torch.ones_like(p)
    optimizer.step(*given)
    steps.remove()
    assert seen
    assert all(p is held[0] for p in seen)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS, torch.optim.Adafactor])
@pytest.mark.parametrize("on_host", [False, True])
def test_optimizers_of_others_are_left_alone(kind: Any, on_host: bool) -> None:
    """Neither asked nor changed, whatever this model's would have to be."""
    asked, inside = list[torch.optim.Optimizer](), list[bool]()
    steps = LocalSteps(parameters(), on_host=on_host, is_staged=True, check=asked.append)
    plain = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(5))]
    other = kind(plain, lr=0.1)
    groups, lists, state = other.param_groups, [group["params"] for group in other.param_groups], other.state

    def closure() -> torch.Tensor:
        same = other.param_groups is groups and other.state is state
        inside.append(same and all(a["params"] is b for a, b in zip(groups, lists, strict=True)))
        for p in plain:
            p.grad = torch.ones_like(p)
        return torch.ones(())

    other.step(closure)
    steps.remove()
    assert inside and all(inside)
    assert not asked
    assert other.param_groups is groups
    assert not other._optimizer_step_pre_hooks
    assert not other._optimizer_step_post_hooks


@pytest.mark.parametrize("kind", [torch.optim.Muon, torch.optim.Adafactor])
def test_optimizers_of_whole_matrices_refuse_one_that_is_lengthened(kind: Any) -> None:
    """Its means would count rows of zeros, which the model has not."""
    mesh = init_device_mesh("cpu", (1,))
    held = nn.Parameter(DTensor.from_local(torch.randn(4, 3), mesh, [Replicate()], run_check=False))
    for is_longer in (False, True):
        steps = LocalSteps([held], parts=[(held, "table.weight", is_longer)])
        held.grad = torch.ones_like(held)
        if is_longer:
            refuses(UsageError, rf"{kind.__name__} needs each matrix as .*shape \(4, 3\)", kind([held], lr=0.1).step)
        else:
            kind([held], lr=0.1).step()
        steps.remove()


def test_copies_on_the_host_follow_what_else_writes_parameters() -> None:
    """Loading a checkpoint, scaling weights: the next step begins from what the device has, not from what it had."""
    results = []
    for on_host in (False, True):
        held = parameters()
        steps = LocalSteps(held, on_host=on_host)
        optimizer = torch.optim.AdamW(held, lr=0.1)
        for number in range(3):
            step(optimizer, held[:2], 1.0 + number)
            with torch.no_grad():
                held[0].mul_(0.5)
                held[1].data.add_(1.0)
            optimizer.load_state_dict(optimizer.state_dict())
        memory = held[0]._local_tensor.data_ptr()
        assert (steps.plain(held[0]).data_ptr() == memory) != on_host
        steps.remove()
        assert held[2] not in optimizer.state
        results.append([p.full_tensor() for p in held])
    assert all(close(a, b) for a, b in zip(*results, strict=True))


def test_parameters_go_down_only_where_they_were_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in the first step; then those that somebody wrote, whatever way, also by moving elements about."""
    held, down = parameters(), list[int]()
    copy = torch.Tensor.copy_
    steps = LocalSteps(held, on_host=True)
    optimizer = torch.optim.AdamW(held, lr=0.1)
    hosts = [steps.plain(p) for p in held]

    def counted(target: torch.Tensor, source: torch.Tensor, **options: Any) -> torch.Tensor:
        down.extend(i for i, host in enumerate(hosts) if target is host)
        return copy(target, source, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    writes: list[Callable[[], object]] = [
        lambda: None, lambda: None, lambda: held[1].data.add_(1.0),
        lambda: held[0]._local_tensor.data.copy_(held[0]._local_tensor.flip(0).clone()),
        lambda: held[2]._local_tensor.detach().mul_(2.0),
    ]  # fmt: skip
    found = []
    for write in writes:
        write()
        down.clear()
        step(optimizer, held)
        found.append(sorted(down))
    steps.remove()
    assert found == [[0, 1, 2], [], [1], [0], [2]]


@pytest.mark.parametrize("given", [{}, {"foreach": True}, {"fused": False}], ids=str)
def test_one_kernel_steps_on_the_host_unless_the_user_says_how(given: dict[str, bool]) -> None:
    held, seen = parameters(), list[Any]()
    steps = LocalSteps(held, on_host=True, threads=2)
    optimizer = torch.optim.AdamW(held, lr=0.1, **given)
    own, threads = optimizer._optimizer_step_code, torch.get_num_threads()
    look = lambda: seen.append((optimizer.param_groups[0]["fused"], torch.get_num_threads()))
    optimizer._optimizer_step_code = lambda: (look(), own())
    step(optimizer, held)
    steps.remove()
    assert seen == [(given.get("fused") if given else True, max(threads, 2))]
    assert optimizer.param_groups[0]["fused"] == given.get("fused")
    assert torch.get_num_threads() == threads


@pytest.mark.gpu
def test_states_of_a_gpu_live_in_page_locked_memory() -> None:
    mesh = init_device_mesh("cuda", (1,))
    results = []
    for on_host in (False, True):
        torch.manual_seed(0)
        values = [torch.randn(2**20, device="cuda") for _ in range(4)]
        held = [nn.Parameter(DTensor.from_local(v, mesh, [Shard(0)], run_check=False)) for v in values]
        steps = LocalSteps(held, on_host=on_host)
        optimizer = torch.optim.AdamW(held, lr=0.1)
        for number in range(5):
            for p in held:
                p.grad = torch.sin(p.detach() * number)
            optimizer.step()
            optimizer.zero_grad()
        state = optimizer.state[held[0]]["exp_avg"]._local_tensor
        assert state.device.type == ("cpu" if on_host else "cuda")
        if on_host:
            assert steps.plain(held[0]).is_pinned()
        steps.remove()
        results.append([p._local_tensor.clone() for p in held])
    for a, b in zip(*results, strict=True):
        assert_close(a, b)


def test_a_step_that_fails_leaves_no_trace_in_the_next() -> None:
    held = parameters()
    steps = LocalSteps(held)
    optimizer = torch.optim.AdamW(held)
    held[0].grad = torch.ones_like(held[0])
    optimizer.param_groups[0]["betas"] = None
    refuses(TypeError, "", optimizer.step)
    steps.restore()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], held, strict=True))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    steps.remove()
    assert isinstance(optimizer.state[held[0]]["exp_avg"], DTensor)

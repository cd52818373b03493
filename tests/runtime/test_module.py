"""A parallel model is a ``torch.nn.Module``: what code asks of one it answers, or refuses in one sentence."""

import copy
import math
import pickle
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from autopar import api
from autopar.errors import UsageError
from autopar.runtime.parallel_model import ParallelModel
from autopar.verification.reference import adamw, loss_of
from tests.support.distributed.subjects import graph_of
from tests.support.parallel import SMALL, alone, small
from tests.support.said import refuses
from tests.support.small_models import model_of

pytestmark = pytest.mark.usefixtures("one_rank")

Batch = dict[str, Tensor]


def _counted(self: Any, x: Tensor) -> Tensor:
    self.steps += 1
    return (x * self.weight * self.ones).square().mean()


def counting() -> ParallelModel:
    """Of a model with a buffer that steps change, and one that they do not."""
    kept = {"steps": nn.Buffer(torch.zeros(())), "ones": nn.Buffer(torch.ones(4))}
    model = model_of(_counted, weight=nn.Parameter(torch.ones(4)), **kept)
    return alone(model, api.trace(model, example_inputs={"x": torch.ones(4, 4)}))


def around_of(inside: nn.Module) -> nn.Module:
    """What a framework makes of a model: a module that holds it."""
    return model_of(lambda self, **batch: self.inside(**batch), inside=inside)


def test_parameters_and_modules_are_listed_as_of_any_module(parallel: ParallelModel) -> None:
    assert isinstance(parallel, nn.Module)
    assert list(parallel.named_modules()) == [("", parallel)]
    named = dict(parallel.named_parameters(prefix="par"))
    assert "par.transformer.h.0.attn.c_attn.weight[32:64]" in named
    assert [id(p) for p in named.values()] == [id(p) for p in parallel.parameters()]
    assert len(named) == len(list(parallel.named_parameters())) == len(graph_of(SMALL).parameters)
    around = dict(around_of(parallel).named_parameters())
    assert [id(p) for p in around.values()] == [id(p) for p in named.values()]
    assert (parallel.device, parallel.rank, parallel.world_size) == (torch.device("cpu"), 0, 1)
    assert parallel.is_main_process


def test_gradients_are_cleared_and_parameters_frozen_as_of_any_module(parallel: ParallelModel, batch: Batch) -> None:
    parallel.train_step(batch)
    parallel.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.full_tensor().any() for p in parallel.parameters())
    parallel.zero_grad()
    assert all(p.grad is None for p in parallel.parameters())
    assert parallel.requires_grad_(False) is parallel
    assert not any(p.requires_grad for p in parallel.parameters())
    parallel.requires_grad_(True)
    parallel.train_step(batch)
    assert all(p.grad is not None for p in parallel.parameters())


def test_modes(parallel: ParallelModel, batch: Batch) -> None:
    assert parallel.training
    assert parallel.eval() is parallel
    assert not parallel.training
    with pytest.raises(UsageError, match=r"A training step was asked for in par\.eval\(\)\. Call par\.train\(\)"):
        parallel.train_step(batch)
    assert parallel.step_count == 0
    parallel.train()
    parallel.train_step(batch)
    assert parallel.step_count == 1


@pytest.mark.parametrize("same", [
    lambda m: m.to("cpu"), lambda m: m.to(torch.device("cpu"), torch.float32), lambda m: m.to(dtype=torch.float32),
    lambda m: m.cpu(), lambda m: m.float(),
])  # fmt: skip
def test_a_move_to_the_same_place_is_none(parallel: ParallelModel, same: Callable[[nn.Module], nn.Module]) -> None:
    assert same(parallel) is parallel
    around = around_of(parallel)
    assert same(around) is around


@pytest.mark.parametrize("other", [
    lambda m: m.to("meta"), lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16(),
    lambda m: m.double(), lambda m: m.type(torch.float64), lambda m: m.to_empty(device="cpu"),
    pytest.param(lambda m: m.cuda(), marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is a move then")),
])  # fmt: skip
def test_moves_and_casts_are_refused(parallel: ParallelModel, other: Callable[[nn.Module], nn.Module]) -> None:
    for module in (parallel, around_of(parallel)):
        refuses(UsageError, r"cannot be moved, cast or replaced: its plan has them in float32 on cpu", other, module)


def around_it(wrap: Callable[[nn.Module], object]) -> Callable[[nn.Module], object]:
    return lambda module: wrap(around_of(module))


@pytest.mark.parametrize("wrap", [
    DistributedDataParallel, fully_shard, around_it(fully_shard), FullyShardedDataParallel,
    around_it(FullyShardedDataParallel), replicate,
])  # fmt: skip
def test_wrappers_are_refused_and_leave_the_model_as_it_was(parallel: ParallelModel, batch: Batch, wrap: Any) -> None:
    refuses(UsageError, r"cannot be wrapped in .*: its plan has distributed parameters .* already", wrap, parallel)
    assert type(parallel) is ParallelModel
    assert parallel.train_step(batch).item() == pytest.approx(loss_of(SMALL.build()(**batch)).item(), rel=1e-6)


def test_torchs_state_dict_functions_walk_its_names(parallel: ParallelModel, batch: Batch) -> None:
    optimizer = adamw(parallel.parameters())
    parallel.train_step(batch)
    optimizer.step()
    model, states = get_state_dict(parallel, optimizer)
    assert model.keys() == parallel.state_dict().keys()
    assert states["state"].keys() == dict(parallel.named_parameters()).keys()
    assert get_model_state_dict(around_of(parallel)).keys() == {f"inside.{name}" for name in model}
    other = small(SMALL.build())
    own = adamw(other.parameters())
    set_state_dict(other, own, model_state_dict=copy.deepcopy(model), optim_state_dict=copy.deepcopy(states))
    for _ in range(2):
        for each in (optimizer, own):
            each.zero_grad()
        losses = [one.train_step(batch).item() for one in (parallel, other)]
        assert losses[0] == losses[1]
        optimizer.step()
        own.step()


def test_tensors_are_found_by_their_names_and_buffers_are_those_of_the_last_step(parallel: ParallelModel) -> None:
    for name, parameter in parallel.named_parameters():
        assert parallel.get_parameter(name) is parameter
    said = r"This rank has no 'wte\.weight'\. It has transformer\.\S+weight, .* more"
    refuses(AttributeError, said, parallel.get_parameter, "wte.weight")
    other = counting()
    for step in (1, 2):
        other.train_step({"x": torch.ones(4, 4)})
        assert {name: value.item() for name, value in other.named_buffers()} == {"steps": step}
    assert list(dict(around_of(other).named_buffers())) == ["inside.steps"]
    assert other.get_buffer("steps") is dict(other.named_buffers())["steps"]
    refuses(AttributeError, r"This rank has no 'ones'\. It has steps", other.get_buffer, "ones")


def test_what_cannot_be_is_refused_in_one_sentence() -> None:
    model = SMALL.build()
    parallel = small(model)
    linear, parameter = nn.Linear(1, 1), nn.Parameter(torch.ones(1))
    trace, example = partial(api.trace, example_inputs=SMALL.make_batch(2, seed=0)), "Write for example max_norm=1.0"
    not_copied, not_put = r"be copied, pickled.*par\.save\(DIR, optimizer\)", r"cannot be put into a parallel model as"
    norms = ("1", None, -1.0, math.nan, True, torch.ones(3), parallel.parameters())
    for said, call, *given in (
        *((not_copied, take, parallel) for take in (copy.copy, copy.deepcopy, pickle.dumps)),
        *((f"{not_put} par.head", setattr, parallel, "head", value) for value in (linear, parameter)),
        *((f"A Linear {not_put}", add, "head", linear) for add in (parallel.add_module, parallel.register_parameter)),
        (r"no layers that apply\(\.\.\.\) could reach.*before autopar\.parallelize", parallel.apply, print),
        ("A backward hook on a parallel model is not supported", parallel.register_full_backward_hook, print),
        *((re.escape(f"The max_norm is {n!r}. {example}"), parallel.clip_grad_norm_, n, 2.0) for n in norms),
        ("A clipping by norm_type=inf is not supported", parallel.clip_grad_norm_, 1.0, math.inf),
        (r"is a DTensor already\. Pass the model before it is made parallel", trace, parallel),
    ):  # fmt: skip
        refuses(UsageError, said, call, *given)
    for name, said in (
        ("transformer", r"it has no layers.*named_parameters\(\)"), ("name_or_path", r"Instead: model\.name_or_path"),
        ("generate", r"Instead: put par\.full_state_dict\(\)"),
    ):  # fmt: skip
        refuses(AttributeError, rf"no attribute '{name}'(\.|:) {said}", getattr, parallel, name)
    assert not hasattr(parallel, "anything")


def test_forward_hooks_are_called_and_torch_compile_leaves_calls_and_steps_as_they_are() -> None:
    parallel, batch, seen, compiled = small(), SMALL.make_batch(8, seed=0), list[float](), list[object]()
    backend = lambda module, _: (compiled.append(module), module.forward)[1]
    wanted = parallel(**batch).loss.item()
    handle = parallel.register_forward_hook(lambda _, __, output: seen.append(output.loss.item()))
    parallel(**batch)
    handle.remove()
    whole = torch.compile(parallel, backend=backend)
    assert [id(p) for p in whole.parameters()] == [id(p) for p in parallel.parameters()]
    step, evaluate = (torch.compile(call, backend=backend) for call in (parallel.train_step, parallel.evaluate))
    assert [whole(**batch).loss.item(), step(batch).item(), step(batch).item()] == [wanted] * 3
    assert evaluate(batch).item() == pytest.approx(wanted)
    parallel.compile(backend=backend)
    assert parallel(**batch).loss.item() == wanted
    assert (seen, compiled, parallel.step_count) == ([wanted], [], 6)


def test_a_state_dict_is_put_back_under_its_own_names_and_the_models(parallel: ParallelModel, batch: Batch) -> None:
    parallel.train_step(batch)
    adamw(parallel.parameters()).step()
    model = SMALL.build()
    model.load_state_dict(parallel.full_state_dict(), strict=False)
    for state in (parallel.state_dict(), parallel.full_state_dict(), model.state_dict()):
        other = small()
        found = other.load_state_dict(state)
        assert (found.missing_keys, found.unexpected_keys) == ([], [])
        for (name, mine), (_, theirs) in zip(parallel.named_parameters(), other.named_parameters(), strict=True):
            assert torch.equal(mine.full_tensor(), theirs.full_tensor()), name
    around = around_of(small())
    around.load_state_dict(around_of(parallel).state_dict())
    assert torch.equal(next(around.parameters()), next(parallel.parameters()))


def test_a_state_dict_that_does_not_fit_is_refused_by_name(parallel: ParallelModel) -> None:
    state = parallel.state_dict()
    weight = state.pop("transformer.wpe.weight")
    for changed, message in (
        (state, r'Missing key.*"transformer\.wpe\.weight"'),
        ({**state, "transformer.wpe.weight": weight, "other": weight}, r'Unexpected key.*"other"'),
        ({**state, "transformer.wpe.weight": torch.ones(3, 3)}, r"wpe\.weight: it has shape \(3, 3\), not"),
    ):
        refuses(RuntimeError, message, parallel.load_state_dict, changed)
    parallel.load_state_dict(state, strict=False)
    refuses(RuntimeError, "leave assign out", parallel.load_state_dict, parallel.state_dict(), assign=True)


def _normed(self: nn.Module, x: Tensor) -> Tensor:
    return ((x - self.mean) * self.scale * self.weight).square().mean()


def test_a_state_dict_with_some_of_what_does_not_learn_is_put_too() -> None:
    """A step reads it, as on one device; what is missing or does not fit is named."""
    kept = {"mean": nn.Buffer(torch.zeros(4)), "scale": nn.Buffer(torch.ones(4)), "unread": nn.Parameter(torch.ones(2))}
    model, x = model_of(_normed, weight=nn.Parameter(torch.ones(4)), **kept), torch.ones(4, 4)
    parallel = alone(model, api.trace(model, example_inputs={"x": x}))
    found = parallel.load_state_dict({"mean": torch.full((4,), 3.0)}, strict=False)
    assert (sorted(found.missing_keys), found.unexpected_keys) == (["scale", "unread", "weight"], [])
    assert parallel.train_step({"x": x}).item() == 4.0
    assert {name: value.sum().item() for name, value in parallel.full_state_dict().items()} == {
        "mean": 12.0, "scale": 4.0, "unread": 2.0, "weight": 4.0,
    }  # fmt: skip
    state = parallel.full_state_dict()
    other = {**state, "scale": torch.ones(3)}
    refuses(RuntimeError, r"scale: it has shape \(3,\), not \(4,\)", parallel.load_state_dict, other)
    del state["unread"]
    refuses(RuntimeError, r'Missing key.*"unread"', parallel.load_state_dict, state)

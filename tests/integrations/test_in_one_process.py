import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.integrations import hf
from autopar.integrations.accelerate import Accelerator
from autopar.integrations.loss import parts_are_explained, step_loss
from tests.support.parallel import gradients
from tests.support.said import refuses
from tests.support.small_models import model_of

BATCHES = [{"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))} for seed in range(3)]


def pair(**options: Any) -> tuple[nn.Module, autopar.ParallelModel]:
    torch.manual_seed(0)
    forward = lambda self, x: {"loss": self.down(self.up(x).tanh()).square().mean()}
    model = model_of(forward, up=nn.Linear(4, 8), down=nn.Linear(8, 1))
    return model, autopar.parallelize(model, cluster="cpu:1x1", example_inputs=BATCHES[0], **options)


def accumulated(model: nn.Module) -> dict[str, Tensor]:
    """With gradients set to None between a loss and its backward, as Lightning does, and one loss that counts twice."""
    losses = [step_loss(model, batch) for batch in BATCHES]
    for p in model.parameters():
        p.grad = None
    (losses[0] / 3).backward()
    (losses[1].square() + 2 * losses[2]).backward()
    return gradients(model)


def test_gradients_are_those_of_an_ordinary_loss() -> None:
    model, par = pair()
    wanted, found = accumulated(model), accumulated(par)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    assert par.step_count == 3


def test_a_loss_without_backward_leaves_gradients_as_they_are() -> None:
    _, par = pair()
    step_loss(par, BATCHES[0]).backward()
    before = gradients(par)
    step_loss(par, BATCHES[1])
    assert all(torch.equal(value, before[name]) for name, value in gradients(par).items())


def test_backward_is_called_once() -> None:
    _, par = pair()
    loss = step_loss(par, BATCHES[0])
    loss.backward(retain_graph=True)
    refuses(UsageError, "A second backward", loss.backward)


def test_a_loss_in_fp16_is_given_to_the_scaler() -> None:
    """Which takes what comes for its own loss: gradients are scaled once."""
    model, par = pair(precision="fp16")
    refuses(UsageError, r"Write scaler = par\.grad_scaler\(\) before the first step", step_loss, par, BATCHES[0])
    scaler = par.grad_scaler(init_scale=1024.0)
    refuses(UsageError, "a loss that the scaler of this model has not scaled", step_loss(par, BATCHES[0]).backward)
    scaler.scale(step_loss(par, BATCHES[1]) / 2).backward()
    optimizer = torch.optim.SGD(par.parameters(), lr=0.1)
    refuses(UsageError, "still times the scale", par.clip_grad_norm_, 1.0)
    scaler.unscale_(optimizer)
    (step_loss(model, BATCHES[1]) / 2).backward()
    for name, value in gradients(model).items():
        torch.testing.assert_close(gradients(par)[name], value, rtol=1e-2, atol=1e-3)


def test_outputs_that_meet_ordinary_tensors_are_explained() -> None:
    with pytest.raises(UsageError, match="Give the loss to the plan"), parts_are_explained():
        raise RuntimeError("aten.add.Tensor got mixed torch.Tensor and DTensor, need to convert all")
    with pytest.raises(RuntimeError, match="another"), parts_are_explained():
        raise RuntimeError("another")


@pytest.mark.parametrize("called", [False, True])
def test_gradients_that_would_not_be_those_of_all_ranks_are_refused(called: bool) -> None:
    _, par = pair()

    def loss() -> Tensor:
        return par(**BATCHES[0])["loss"] if called else step_loss(par, BATCHES[0])

    parameters = list(par.parameters())
    with pytest.raises(UsageError, match=r"gradient of gradients \(create_graph=True\) is not supported"):
        loss().backward(create_graph=True)
    refuses(UsageError, r"torch\.autograd\.grad or backward\(inputs=\.\.\.\)", torch.autograd.grad, loss(), parameters)
    penalty = sum((p.abs().sum() for p in parameters), torch.zeros(()))
    refuses(UsageError, "The loss was added to a DTensor, as a penalty", (loss() + penalty).backward)


def test_resuming_takes_the_last_numbered_checkpoint_that_is_complete(tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-best"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").touch()
    (tmp_path / "checkpoint-11").mkdir()
    assert hf._last_complete(tmp_path) == str(tmp_path / "checkpoint-10")


@pytest.mark.parametrize(("extra", "problem"), [
    (None, "was not written by accelerator.save_state"),
    ({"epoch": 1}, "was not written by accelerator.save_state"),
    ({"step": 3, "custom": [{}, {}]}, "number of objects registered for checkpointing"),
])  # fmt: skip
def test_a_checkpoint_of_another_loop_is_refused_by_name(extra: Any, problem: str) -> None:
    model = SimpleNamespace(load=lambda *_, **__: extra)
    loop = SimpleNamespace(parallel_model=model, _optimizer=lambda: 0, _other_states=dict, _custom_objects=[], step=0)
    refuses(UsageError, problem, Accelerator.load_state, loop, "folder")
    assert loop.step == 0


def test_weights_are_written_in_files_of_the_size_that_was_asked_for() -> None:
    asked: dict[str, Any] = {}
    model = SimpleNamespace(save_pretrained=lambda _, **options: asked.update(options))
    loop = SimpleNamespace(parallel_model=model)
    Accelerator.save_model(loop, torch.nn.Linear(1, 1), "folder", max_shard_size="1GB")
    assert asked == {"max_shard_size": "1GB"}


NEEDS = {
    "autopar.integrations.accelerate": ("accelerate", "autopar[hf]"),
    "autopar.integrations.hf": ("transformers", "autopar[hf]"),
    "autopar.integrations.lightning": ("lightning", "autopar[lightning]"),
}


@pytest.mark.parametrize("module", NEEDS)
def test_a_missing_package_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, extra = NEEDS[module]
    for name in [name for name in sys.modules if name == module or name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    caught = refuses(UsageError, package, importlib.import_module, module)
    assert f'Run: pip install "{extra}"' in str(caught)

"""Values from safetensors files: parameters and buffers of the model, and nothing that is not theirs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import UsageError
from autopar.graph.graph import Graph, Parameter, TensorSpec
from autopar.plan.plan import Plan
from autopar.runtime.launch import launch
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import FileWeights
from tests.support.close import assert_close

pytestmark = pytest.mark.usefixtures("one_rank")


class Head(nn.Module):
    """With buffers that are saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("order", torch.tensor([3, 1, 2, 0]))
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("shift", torch.tensor([0.5]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x[:, self.order].transpose(1, 2)).transpose(1, 2) * self.scale + self.shift


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 16), Head()

    def forward(self, x: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(self.table(x)).flatten(0, 1), x.flatten())


BATCH = {"x": torch.arange(32).view(8, 4) % 16}


def saved(folder: Path, **changes: Tensor | None) -> Net:
    """A model whose weights and buffers are its own, in a file, but for ``changes`` (dots as ``__``; None: left out)."""
    torch.manual_seed(3)
    model = Net()
    with torch.no_grad():
        model.head.order.copy_(torch.tensor([0, 0, 1, 2]))
        model.head.scale.fill_(5.0)
        model.head.norm.running_mean.fill_(0.25)
    values = model.state_dict() | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in values.items() if value is not None}, folder / "model.safetensors")
    return model


@cache
def planned() -> tuple[Plan, Graph]:
    graph = autopar.trace(Net(), example_inputs=BATCH, global_batch_size=8)
    return autopar.search(graph, cluster="cpu:1x1", global_batch_size=8), graph


def parallel(model: nn.Module, weights: Path) -> ParallelModel:
    return launch(model, planned, device_type="cpu", weights=weights)


def test_buffers_of_a_state_dict_come_from_the_files(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    given = {"cluster": "cpu:1x1", "example_inputs": BATCH, "global_batch_size": 8}
    model = autopar.parallelize(Net(), weights=tmp_path, **given)
    assert model.train_step(BATCH).item() == pytest.approx(expected(**BATCH).item(), rel=1e-6)
    found = model.full_state_dict()
    assert_close(found["head.norm.running_mean"], expected.head.norm.running_mean)


def test_buffers_that_the_files_lack_are_the_models(tmp_path: Path) -> None:
    expected = saved(tmp_path, head__scale=None)
    expected.head.scale.fill_(2.0)
    assert parallel(Net(), tmp_path).train_step(BATCH).item() == pytest.approx(expected(**BATCH).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"table__weight": torch.zeros(20, 16)}, r"table\.weight\. Expected \(16, 16\) of float32, got \(20, 16\)"),
        ({"table__weight": torch.zeros(10, 16)}, r"got \(10, 16\) of float32"),
        ({"table__weight": torch.zeros(16, 16, dtype=torch.int8)}, r"got \(16, 16\) of int8"),
        ({"head__scale": torch.ones(3)}, r"head\.scale\. Expected \(1,\) of float32, got \(3,\)"),
        ({"table__weight": None}, r"No parameter 'table\.weight' in the files"),
    ],
)  # fmt: skip
def test_weights_of_another_model_are_refused(tmp_path: Path, changes: dict[str, Tensor | None], said: str) -> None:
    saved(tmp_path, **changes)
    with pytest.raises(UsageError, match=said):
        parallel(Net(), tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.safetensors", "garbage"),
        ("model.safetensors.index.json", "{"),
        ("model.safetensors.index.json", "{}"),
        ("model.safetensors.index.json", '{"weight_map": {"table.weight": "none.safetensors"}}'),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=r"Cannot read the weights .*safetensors.*: "):
        parallel(Net(), tmp_path)


def _parameter(fqn: str) -> Parameter:
    return Parameter(name="p", fqn=fqn, spec=TensorSpec(shape=(16, 16), dtype=torch.float32))


def test_names_without_the_prefix_of_a_head_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Net()

    table = saved(tmp_path, other=torch.ones(1)).table.weight
    weights = FileWeights(tmp_path, Wrapped(), 0)
    index = slice(4, 8), slice(0, 16)
    assert torch.equal(weights.parameter(_parameter("model.table.weight"), index), table[4:8])
    assert weights.buffer("model.head.scale").item() == 5.0
    assert "holds tensors that the model has not, 1 of 9: other" in caplog.text


def test_a_tensor_is_not_taken_for_one_of_another_module(tmp_path: Path) -> None:
    saved(tmp_path, head__norm__weight=None, norm__weight=torch.ones(16))
    with pytest.raises(UsageError, match=r"No parameter 'head\.norm\.weight'"):
        parallel(Net(), tmp_path)

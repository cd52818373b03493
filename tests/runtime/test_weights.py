from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import RuntimeMismatchError, UsageError
from autopar.graph.graph import Graph, Parameter, TensorSpec
from autopar.plan.plan import Plan
from autopar.runtime.launch import launch
from autopar.runtime.parallel_model import ParallelModel
from autopar.runtime.weights import FileWeights, initialise, local_index
from tests.support.close import assert_close
from tests.support.said import refuses
from tests.support.small_models import model_of

pytestmark = pytest.mark.usefixtures("one_rank")


def parameter(shape: tuple[int, ...], **options: object) -> Parameter:
    spec = TensorSpec(shape=shape, dtype=torch.float32, requires_grad=True)
    return Parameter(name="w", fqn="0.weight", spec=spec, **options)


def test_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeMismatchError, match=r"0\.weight: .*\(5, 12\)"):
        local_index(parameter((6, 12)), torch.Size((5, 12)), {}, {})


def on_meta() -> nn.Module:
    with torch.device("meta"):
        bare = model_of(None, scale=nn.Parameter(torch.ones(3)))
        return nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 4), bare))


def test_modules_on_meta_are_initialised_one_by_one_and_leave_the_random_generator() -> None:
    model, wanted = on_meta(), torch.rand(3)
    torch.manual_seed(0)
    made = initialise(model, "1.0", seed=1)
    assert torch.equal(torch.rand(3), wanted)
    assert made.weight.shape == (4, 5)
    assert not made.weight.is_meta
    assert all(p.is_meta for p in model.parameters())
    assert torch.equal(made.weight, initialise(model, "1.0", seed=1).weight)
    assert not torch.equal(made.weight, initialise(model, "1.0", seed=2).weight)


def test_a_module_without_initialiser_is_named() -> None:
    refuses(UsageError, r"1\.1\.scale: A Model .*reset_parameters", initialise, on_meta(), "1.1", seed=0)


def test_initialisers_of_parents_see_the_names_of_their_children() -> None:
    def init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
        for name, p in module.named_parameters():
            if name == "inner.weight":
                p.data.mul_(3.0)

    with torch.device("meta"):
        model = model_of(None, inner=nn.Linear(4, 4), other=nn.Linear(4, 4), _init_weights=init_weights)
    assert torch.equal(initialise(model, "inner", 0).weight, torch.full((4, 4), 3.0))
    assert torch.equal(initialise(model, "other", 0).weight, torch.ones(4, 4))


class Choice(nn.Module):
    """An integer buffer, of which the initialiser may leave elements out."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first
        self.register_buffer("order", torch.tensor([2, 0, 1]))

    def reset_parameters(self) -> None:
        self.order[self.first :] = torch.tensor([2, 0, 1])[self.first :]


def test_integers_that_an_initialiser_leaves_out_are_found() -> None:
    with torch.device("meta"):
        whole, partial = Choice(), Choice(first=1)
    assert initialise(whole, "", 0).order.tolist() == [2, 0, 1]
    refuses(UsageError, r"order: A Choice on meta has no initialiser", initialise, partial, "", 0)


def _head(self: nn.Module, x: Tensor) -> Tensor:
    return self.norm(x[:, self.order].transpose(1, 2)).transpose(1, 2) * self.scale + self.shift


def net() -> nn.Module:
    """With buffers that are saved, and one that is not."""
    loss = lambda self, x: functional.cross_entropy(self.head(self.table(x)).flatten(0, 1), x.flatten())
    kept = {"order": nn.Buffer(torch.tensor([3, 1, 2, 0])), "scale": nn.Buffer(torch.tensor([2.0]))}
    shift = nn.Buffer(torch.tensor([0.5]), persistent=False)
    head = model_of(_head, norm=nn.BatchNorm1d(16), shift=shift, **kept)
    return model_of(loss, table=nn.Embedding(16, 16), head=head)


BATCH = {"x": torch.arange(32).view(8, 4) % 16}


def saved(folder: Path, **changes: Tensor | None) -> nn.Module:
    """A model whose weights and buffers are its own, in a file, but for ``changes`` (dots as ``__``; None: left out)."""
    torch.manual_seed(3)
    model = net()
    with torch.no_grad():
        model.head.order.copy_(torch.tensor([0, 0, 1, 2]))
        model.head.scale.fill_(5.0)
        model.head.norm.running_mean.fill_(0.25)
    values = model.state_dict() | {name.replace("__", "."): value for name, value in changes.items()}
    save_file({name: value for name, value in values.items() if value is not None}, folder / "model.safetensors")
    return model


@cache
def planned() -> tuple[Plan, Graph]:
    graph = autopar.trace(net(), example_inputs=BATCH, global_batch_size=8)
    return autopar.search(graph, cluster="cpu:1x1", global_batch_size=8), graph


def parallel(weights: Path) -> ParallelModel:
    return launch(net(), planned, device_type="cpu", weights=weights)


@pytest.mark.parametrize("lacks", [False, True])
def test_buffers_of_a_state_dict_come_from_the_files_and_what_these_lack_from_the_model(
    tmp_path: Path, lacks: bool
) -> None:
    expected = saved(tmp_path, **({"head__scale": None} if lacks else {}))
    expected.head.scale.fill_(2.0 if lacks else 5.0)
    given = {"cluster": "cpu:1x1", "example_inputs": BATCH, "global_batch_size": 8}
    model = autopar.parallelize(net(), weights=tmp_path, **given)
    assert model.train_step(BATCH).item() == pytest.approx(expected(**BATCH).item(), rel=1e-6)
    assert_close(model.full_state_dict()["head.norm.running_mean"], expected.head.norm.running_mean)


@pytest.mark.parametrize(("changes", "said"), [
    ({"table__weight": torch.zeros(20, 16)}, r"table\.weight\. Expected \(16, 16\) of float32, got \(20, 16\)"),
    ({"table__weight": torch.zeros(10, 16)}, r"got \(10, 16\) of float32"),
    ({"table__weight": torch.zeros(16, 16, dtype=torch.int8)}, r"got \(16, 16\) of int8"),
    ({"head__scale": torch.ones(3)}, r"head\.scale\. Expected \(1,\) of float32, got \(3,\)"),
    ({"table__weight": None}, r"No parameter 'table\.weight' in the files"),
])  # fmt: skip
def test_weights_of_another_model_are_refused(tmp_path: Path, changes: dict[str, Tensor | None], said: str) -> None:
    saved(tmp_path, **changes)
    refuses(UsageError, said, parallel, tmp_path)


@pytest.mark.parametrize(("name", "text"), [
    ("model.safetensors", "garbage"),
    ("model.safetensors.index.json", "{"),
    ("model.safetensors.index.json", "{}"),
    pytest.param("model.safetensors.index.json", 100_000 * "[", id="nested"),
    ("model.safetensors.index.json", '{"weight_map": {"table.weight": "none.safetensors"}}'),
])  # fmt: skip
def test_files_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    refuses(UsageError, r"Cannot read the weights .*safetensors.*: ", parallel, tmp_path)


def test_names_without_the_prefix_of_a_head_are_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table = saved(tmp_path, other=torch.ones(1)).table.weight
    weights = FileWeights(tmp_path, model_of(None, model=net()), 0)
    wanted = replace(parameter((16, 16)), fqn="model.table.weight")
    assert torch.equal(weights.parameter(wanted, (slice(4, 8), slice(0, 16))), table[4:8])
    assert weights.buffer("model.head.scale").item() == 5.0
    assert "holds tensors that the model has not, 1 of 9: other" in caplog.text


def test_a_tensor_is_not_taken_for_one_of_another_module(tmp_path: Path) -> None:
    saved(tmp_path, head__norm__weight=None, norm__weight=torch.ones(16))
    refuses(UsageError, r"No parameter 'head\.norm\.weight'", parallel, tmp_path)

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autopar.errors import TraceError
from autopar.graph.graph import Graph
from autopar.ops.kernels import Region, region_of
from autopar.tracing import convert, opaque_probe, opaque_trials
from autopar.tracing.trace import trace
from tests.support.distributed.oddities import Checkpointed, Force, Resting
from tests.support.lower import unusual as u
from tests.support.said import refuses
from tests.support.small_models import model_of, same_as_the_model


def test_what_is_checkpointed_is_traced_as_it_is() -> None:
    same_as_the_model(Checkpointed(), u.batch())


class Rotated(u.Around):
    """Takes only the shape of a slice into a block without autocast, as rotary embeddings do."""

    @torch.autocast("cuda", enabled=False)
    def angles(self, x: Tensor) -> Tensor:
        return torch.linspace(-1.0, 1.0, x.shape[1]).unsqueeze(-1).mul(self.scales).sin()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.cat((self.first(x), x), 1).unflatten(1, (2, 8))
        angles = self.angles(x[:, 1:])
        x = F.layer_norm(x, (8,))
        return F.cross_entropy(self.last(x[:, 1:] * angles).mean(1), y)


def test_an_unused_line_before_a_block_without_autocast_is_left_out() -> None:
    model = Rotated()
    model.register_buffer("scales", torch.ones(8))
    graph = same_as_the_model(model, u.batch())
    assert not graph.notes


class Forces(u.Around):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.first(x).square().sum(), x, create_graph=True)
        return super().forward(force, y)


def test_a_gradient_that_the_model_itself_takes_is_refused_and_one_of_a_module_is_a_region() -> None:
    batch = u.batch()
    batch["x"].requires_grad_()
    said = r"gradient that forward takes itself.*autograd\.grad.*a separate module"
    refuses(TraceError, said, trace, Forces(), (), batch)
    graph = same_as_the_model(u.Around(Force), u.batch())
    assert "opaque" in graph.notes[0] and "inner" in graph.notes[0] and not graph.mixing


def _packed(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=x.shape[1])[0].mean(1)


def test_packed_sequences_of_a_module_run_as_written_though_no_length_may_be_0() -> None:
    inner = model_of(_packed, cells=nn.GRU(8, 4, batch_first=True))
    model = model_of(lambda self, x, lengths: self.inner(x, lengths).square().mean(), inner=inner)
    graph = same_as_the_model(model, {"x": torch.randn(4, 6, 8), "lengths": torch.tensor([3, 6, 1, 2])})
    assert "opaque" in graph.notes[0] and not graph.mixing


def test_a_batch_norm_in_eval_reads_its_statistics_and_keeps_samples_apart_unless_the_model_is_in_eval_itself() -> None:
    graph = same_as_the_model(Resting(), u.batch())
    assert "modules in eval() stay so while the others train: inner.1, inner.3" in graph.notes
    targets = [op.target for op in graph.ops]
    assert "aten.batch_norm.default" in targets
    assert not graph.mixing and "autopar.dropout" not in targets
    model = Resting().eval()
    before = {name: (p, p.detach().clone()) for name, p in model.named_parameters()}
    whole = trace(model, (), u.batch())
    assert not model.training, "it is left as it is"
    assert all(p is before[name][0] and torch.equal(p, before[name][1]) for name, p in model.named_parameters())
    targets = [op.target for op in whole.ops]
    assert "autopar.batch_norm_running" in targets and "autopar.dropout" in targets
    assert not any("eval()" in note for note in whole.notes)


@pytest.mark.parametrize(("norm", "shape"), [
    (nn.BatchNorm1d(4), (6, 4)),
    *((nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=m), (6, 4, 5)) for m in (0.1, None)),
])  # fmt: skip
def test_norms_are_one_operator_and_give_their_running_statistics(norm: nn.Module, shape: tuple[int, ...]) -> None:
    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        y = self.norm(x)
        return {"y": y, "loss": y.pow(3).mean()}

    graph = same_as_the_model(model_of(forward, norm=norm), {"x": torch.randn(shape)}, steps=2)
    names = [m.buffer.removeprefix("b_norm_") for m in graph.mutations]
    targets = [op.target for op in graph.ops if "norm" in op.target]
    if isinstance(norm, nn.BatchNorm1d):
        assert targets == ["autopar.batch_norm_running"]
        assert names == ["running_mean", "running_var", "num_batches_tracked"]
    else:
        assert names == ["running_mean", "running_var"]
        assert not graph.mixing


def picked() -> nn.Module:
    """The row of each sample at a place of its own, counted from the front or from the end."""

    def forward(self: Any, x: Tensor, place: Tensor) -> Tensor:
        return self.linear(x)[torch.arange(x.shape[0]), place].square().sum()

    return model_of(forward, linear=nn.Linear(4, 4))


def test_a_row_of_each_sample_is_a_gather() -> None:
    batch = {"x": torch.randn(3, 5, 4, dtype=torch.float64), "place": torch.tensor([0, -1, 3])}
    graph = same_as_the_model(picked().double(), batch)
    targets = [op.target for op in graph.ops]
    assert "aten.gather.default" in targets
    assert "aten.index.Tensor" not in targets


def test_a_call_that_no_form_fits_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    fails = mock.Mock(side_effect=RuntimeError("no such form"))
    monkeypatch.setitem(convert._ALL_HANDLERS, "aten.index.Tensor", fails)
    batch = {"x": torch.ones(3, 5, 4), "place": torch.tensor([0, 1, 3])}
    caught = refuses(TraceError, "no such form", trace, picked(), (), batch)
    assert "test_regions.py" in caught.where
    assert "aten.index.Tensor" in caught.problem


# --- samples of regions that are not traced


def noted(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, said: Callable[[Any], Any]) -> list[Any]:
    """What is said of the first argument of each call of a function."""
    found: list[Any] = []
    usual = getattr(module, name)
    monkeypatch.setattr(
        module, name, lambda first, *args, **options: (found.append(said(first)), usual(first, *args, **options))[1]
    )
    return found


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the regions whose samples are tried."""
    return noted(monkeypatch, opaque_trials, "_samples", lambda trial: trial.region.name)


@pytest.fixture
def examined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Names of the regions that are run, with the lengths of their first inputs."""
    said = lambda subject: (subject.region.name, subject.inputs[0].shape[0])
    return noted(monkeypatch, opaque_probe, "examine", said)


def regions_of(graph: Graph) -> list[Region]:
    return [region_of(str(op.args[0])) for op in graph.ops if op.target == "autopar.opaque"]


def layers(*each: Callable[[], nn.Module]) -> u.Around:
    return u.Around(lambda: nn.Sequential(*(make() for make in each)))


class Numbered(nn.Module):
    """A layer that knows its number, with a branch on values that every sample takes by itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.router = number, u.Router()

    def forward(self, x: Tensor) -> Tensor:
        return self.router(x) if x.isfinite().all() else x


def test_layers_built_alike_are_tried_once(tried: list[str], examined: list[tuple[str, int]]) -> None:
    with torch.device("meta"):
        model = layers(*(lambda n=n: Numbered(n) for n in range(4)))
    found = regions_of(trace(model, (), u.batch(), opaque=["Numbered"]))
    assert [region.name for region in found] == [f"inner.{n}" for n in range(4)]
    assert all(region.splits == ((0,), (0,)) and region.flops for region in found)
    assert tried == ["inner.0"]
    assert sorted(set(examined)) == sorted(examined) == [(f"inner.{n}", size) for n in range(4) for size in (8, 16)]


@pytest.mark.parametrize("shared", ["first", "inner"])
def test_a_region_of_a_model_that_shares_modules_is_as_small_as_any(shared: str) -> None:
    model = u.Around(u.Router)
    model.inner = nn.Sequential(model.inner, model.inner if shared == "inner" else model.first)
    graph = same_as_the_model(model, u.batch())
    assert {region.name for region in regions_of(graph)} == {"inner.0"}


class Summed(u.Around):
    """Scales its loss by a number of samples that a batch of another size has to tell apart from any other number."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return 0.5 * super().forward(x, y)


def test_a_region_is_run_once_over_all_exports_and_once_for_a_larger_batch(examined: list[tuple[str, int]]) -> None:
    graph = trace(Summed(lambda: nn.Sequential(*(nn.Sequential(u.Router()) for _ in range(3)))), (), u.batch())
    assert len(regions_of(graph)) == 3, "found by three exports"
    assert sorted(examined) == sorted((f"inner.{n}.0", size) for n in range(3) for size in (8, 16))


class Gated(nn.Module):
    """Mixes samples where a parameter says so, a buffer, a tensor that is neither, or a number."""

    def __init__(self, kind: str, gate: float) -> None:
        super().__init__()
        kinds = {"parameter": nn.Parameter, "buffer": nn.Buffer, "tensor": torch.Tensor.clone, "number": float}
        self.value: Any = kinds[kind](torch.tensor(gate))

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 50 and self.value > 0:  # far from all that the first layer's likeness is taken from
            x = x - x.mean()
        return x + 1.0


class Every(nn.Module):
    """Mixes samples in every second layer, where values are large."""

    def __init__(self, number: int, limit: float) -> None:
        super().__init__()
        self.number, self.limit = number, limit

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean() if x.abs().max() > self.limit and self.number % 2 else x + 1.0


@pytest.mark.parametrize("parts", [
    *([partial(Gated, kind, g) for g in (-1.0, 1.0, -1.0)] for kind in ("parameter", "buffer", "tensor", "number")),
    *([partial(Every, number, limit) for number in range(4)] for limit in (1.0, 15.0)),
])  # fmt: skip
def test_what_differs_in_values_alone_is_tried_by_itself(parts: list[partial[nn.Module]], tried: list[str]) -> None:
    found = regions_of(trace(layers(*parts), (), u.batch(), opaque=[parts[0].func.__name__]))
    assert [region.splits is None for region in found] == [number % 2 == 1 for number in range(len(parts))]
    assert tried == ["inner.0", "inner.1"]


RUNS: list[bool] = []


def noting(self: nn.Module, x: Tensor) -> Tensor:
    RUNS.append(torch._C._get_mkldnn_enabled())
    return x if x.sum() > 0 else 2.0 * x


@pytest.mark.parametrize(
    ("kind", "dtype", "wanted"),
    [(nn.Linear, torch.bfloat16, True), (nn.Linear, torch.float32, False), (nn.LSTM, torch.bfloat16, False)],
)
def test_halves_are_multiplied_by_onednn(kind: type[nn.Module], dtype: torch.dtype, wanted: bool) -> None:
    before = torch._C._get_mkldnn_enabled()
    RUNS.clear()
    model = u.Around(lambda: model_of(noting, cells=kind(8, 8))).to(dtype)
    batch = u.batch()
    trace(model, (), {"x": batch["x"].to(dtype), "y": batch["y"]}, opaque=["inner"])
    assert RUNS[0] is wanted
    assert torch._C._get_mkldnn_enabled() == before

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.graph.graph import Graph
from autopar.ops.kernels import Region, region_of
from autopar.tracing import opaque_probe, opaque_trials
from autopar.tracing.trace import trace
from tests.support.lower import unusual as u
from tests.support.small_models import model_of


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


@pytest.mark.parametrize("kind", ["parameter", "buffer", "tensor", "number"])
def test_what_differs_in_values_alone_is_tried_by_itself(kind: str, tried: list[str]) -> None:
    model = layers(*(lambda g=g: Gated(kind, g) for g in (-1.0, 1.0, -1.0)))
    found = regions_of(trace(model, (), u.batch(), opaque=["Gated"]))
    assert [region.splits is None for region in found] == [False, True, False]
    assert tried == ["inner.0", "inner.1"]


class Every(nn.Module):
    """Mixes samples in every second layer, where values are large."""

    def __init__(self, number: int, limit: float) -> None:
        super().__init__()
        self.number, self.limit = number, limit

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean() if x.abs().max() > self.limit and self.number % 2 else x + 1.0


@pytest.mark.parametrize("limit", [1.0, 15.0])
def test_layers_that_do_something_else_by_their_number_are_tried_by_themselves(limit: float, tried: list[str]) -> None:
    model = layers(*(lambda n=n: Every(n, limit) for n in range(4)))
    found = regions_of(trace(model, (), u.batch(), opaque=["Every"]))
    assert [region.splits is None for region in found] == [False, True, False, True]
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

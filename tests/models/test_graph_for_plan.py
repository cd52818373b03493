import os
from collections import UserDict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from autopar import api
from autopar.errors import TraceError, UsageError
from autopar.models import graph_for_plan
from autopar.models.graph_for_plan import samples_of, traced
from autopar.planner.sharding import input_axes
from autopar.planner.sharding.input_axes import samples_apart
from autopar.tracing.batch import named_inputs
from tests.support.cli_runner import Run
from tests.support.said import refuses
from tests.support.small_models import model_of

X = torch.zeros(6, 4)


def net() -> nn.Module:
    def forward(self: Any, x: Any) -> Tensor:
        made: Tensor = self.linear(x if isinstance(x, Tensor) else x[0] + x[1]) * self.scale
        return made.square().mean()

    return model_of(forward, linear=nn.Linear(4, 4), scale=nn.Buffer(torch.ones(4)))


@pytest.mark.parametrize("inputs", [X, [X], (X,), {"x": X}, UserDict({"x": X}), {"x": [X, X]}])
def test_inputs_of_any_form_are_traced(inputs: Any) -> None:
    assert samples_of(inputs) == 6
    graph = api.trace(net(), example_inputs=inputs)
    assert graph.batch_size == 2
    assert all(one.spec.shape == (2, 4) and one.batch_dim == 0 for one in graph.inputs)


def _pair(self: Any, a: dict[str, Tensor | None], a_b: Tensor) -> Tensor:
    """Of inputs in a dict, one of which may be missing, and one beside it."""
    found: Tensor = self.linear(a_b if a.get("b") is None else a["b"] + a_b)
    return found.square().mean()


def test_inputs_that_are_missing_in_the_example_may_be_missing_in_a_batch() -> None:
    model, batch = model_of(_pair, linear=nn.Linear(4, 4)), {"a": {"c": None}, "a_b": X}
    graph = api.trace(model, example_inputs=batch)
    assert list(named_inputs(batch)) == [one.name for one in graph.inputs] == ["a_b"]
    refuses(TraceError, "Two inputs are called 'a_b'", api.trace, model, example_inputs={"a": {"b": X}, "a_b": X})


@pytest.mark.parametrize("own", [torch.float32, torch.float64, torch.bfloat16])
def test_a_model_is_traced_in_the_dtype_of_the_plan(own: torch.dtype) -> None:
    model = net().to(own)
    graph = api.trace(model, example_inputs={"x": X.to(own)})
    specs = [one.spec for one in (*graph.inputs, *graph.parameters, *graph.buffers)]
    assert {spec.dtype for spec in specs} == {torch.float32}
    assert {p.dtype for p in model.parameters()} == {own}, "the model itself stays as it is"
    low = api.trace(model, example_inputs={"x": X.to(own)}, precision="bf16")
    assert {one.spec.dtype for one in (*low.inputs, *low.parameters)} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_a_normed_weight_does_not_keep_a_model_from_being_copied() -> None:
    """It is no parameter, but made of two, and was made when it was built."""
    linear = nn.utils.weight_norm(nn.Linear(4, 4))
    model = model_of(lambda self, x: self.linear(x).square().mean(), linear=linear)
    graph = api.trace(model, example_inputs={"x": X}, precision="bf16")
    assert {p.fqn for p in graph.parameters} == {"linear.weight_g", "linear.weight_v", "linear.bias"}
    assert {p.spec.dtype for p in graph.parameters} == {torch.bfloat16}


def test_models_that_are_parallel_already_autocast_and_complex_parameters_are_refused() -> None:
    said = "wrapped in DataParallel.*Pass the model before"
    refuses(UsageError, said, api.trace, nn.DataParallel(net()), example_inputs={"x": X})
    said = r"cannot be traced inside torch\.autocast\('cpu', dtype=bfloat16\)"
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=said):
        api.trace(net(), example_inputs={"x": X})
    model = net()
    model.linear.register_parameter("turn", nn.Parameter(torch.zeros(4, dtype=torch.complex64)))
    said = r"linear\.turn: A parameter of dtype complex64 is not supported.*Keep a real parameter"
    refuses(UsageError, said, api.trace, model, example_inputs={"x": X})


def _attending(self: Any, x: Tensor) -> Tensor:
    made = self.linear(x)
    return (torch.softmax(made @ made.t(), -1) @ made).square().mean()


KINDS = {
    "apart": net(),
    "attending": model_of(_attending, linear=nn.Linear(4, 4)),
    # samples meet, and no number or shape of the graph says so
    "centred": model_of(lambda self, x: torch.softmax(self.linear(x), 0).square().mean(), linear=nn.Linear(4, 4)),
    "statistics": model_of(
        lambda self, x: self.norm(self.linear(x)).square().mean(), linear=nn.Linear(4, 4), norm=nn.BatchNorm1d(4)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [2, 6])
def test_a_plan_finds_the_graph_that_it_was_made_for(monkeypatch: pytest.MonkeyPatch, kind: str, batch: int) -> None:
    graph = api.trace(KINDS[kind], example_inputs={"x": X}, global_batch_size=batch)
    plan = api.search(graph, cluster="cpu:1x2", global_batch_size=batch)
    asked = []
    monkeypatch.setattr(input_axes, "samples_apart", lambda graph: (asked.append(graph), samples_apart(graph)))
    found = api._graph_of(plan, KINDS[kind], {"x": X}, None)
    assert (found.prelude, found.ops, found.batch_size) == (graph.prelude, graph.ops, graph.batch_size)
    assert (found.mixing, found.exact, found.notes) == (graph.mixing, graph.exact, graph.notes)
    assert bool(asked) == (kind in ("attending", "centred"))  # the plan itself says of the others that they are apart


# --- kept between commands

MODEL = "gpt:layers=1,hidden=32,heads=2,vocab=64,seq=16"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AUTOPAR_CACHE", os.fspath(tmp_path))
    return tmp_path / "graphs"


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    trace = mock.Mock(wraps=graph_for_plan.trace_model)
    monkeypatch.setattr(graph_for_plan, "trace_model", trace)
    return trace


def fingerprint(model: str = MODEL, **changes: object) -> str:
    given = {"sequence": 16, "precision": "fp32", "opaque": (), "global_batch_size": 8, **changes}
    folder = Path(os.environ["AUTOPAR_CACHE"])
    return traced(model, samples_apart=samples_apart, cache_dir=folder, **given).fingerprint


@pytest.mark.slow
def test_a_graph_is_traced_once_for_all_batches_of_a_command(folder: Path, trace: mock.Mock, run: Run) -> None:
    search = ("search", MODEL, "--cluster", "cpu:1x2", "--space", "quick", "--json")
    first = run(*search, "--global-batch", 8)
    again = run(*search, "--global-batch", 16, "--pin", "tp=2")
    assert (first.code, again.code, trace.call_count) == (0, 0, 1)
    assert len(list(folder.iterdir())) == 1


@pytest.mark.slow
def test_what_a_graph_depends_on_makes_another(folder: Path, trace: mock.Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fingerprint() == fingerprint()
    other = {"model": MODEL.replace("vocab=64", "vocab=128"), "sequence": 8, "precision": "bf16", "opaque": ("*.mlp",)}
    for made, (name, value) in enumerate(other.items(), start=2):
        fingerprint(**{name: value})
        assert trace.call_count == len(list(folder.iterdir())) == made, name
    for package in ("torch", "transformers"):
        monkeypatch.setattr(graph_for_plan, "version", lambda name, own=package: version(name) + "+" * (name == own))
        fingerprint()
        made += 1
        assert trace.call_count == made, package


@pytest.mark.slow
def test_what_cannot_be_read_is_traced_again(folder: Path, trace: mock.Mock) -> None:
    graph = fingerprint()
    (file,) = folder.iterdir()
    for made, broken in enumerate((b"", b"no pickle", b"\x80\x04N."), start=2):
        file.write_bytes(broken)
        assert fingerprint() == graph
        assert trace.call_count == made
        assert file.read_bytes() != broken


def test_what_may_have_changed_is_not_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = tmp_path / "gpt2"
    local.mkdir()
    monkeypatch.chdir(tmp_path)
    assert [graph_for_plan._is_cacheable(text) for text in ("my.models:net", "hf:gpt2", "hf:llama", MODEL)] == [
        False, False, True, True,
    ]  # fmt: skip


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("AUTOPAR_CACHE", os.fspath(tmp_path / "file" / "cache"))
    assert fingerprint() == fingerprint()


@pytest.mark.slow
def test_those_used_last_are_kept(folder: Path, monkeypatch: pytest.MonkeyPatch, trace: mock.Mock) -> None:
    monkeypatch.setattr(graph_for_plan, "MAX_FILES", 2)
    for hidden in (32, 64, 32, 96, 32):  # the first is used again before there are too many
        fingerprint(MODEL.replace("hidden=32", f"hidden={hidden}"))
        for place, file in enumerate(sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)):
            os.utime(file, ns=(place, place))  # file systems tell apart no two moments
    assert trace.call_count == 3
    assert len(list(folder.iterdir())) == 2


def test_a_loop_over_samples_is_told_of_vmap() -> None:
    model = model_of(lambda self, x: torch.stack([self.linear(row).relu() for row in x]).mean(), linear=nn.Linear(4, 4))
    graph = api.trace(model, example_inputs={"x": X}, global_batch_size=4)
    assert any("torch.vmap" in note for note in graph.notes)
    mapped = model_of(lambda self, x: torch.vmap(self.linear)(x).relu().mean(), linear=nn.Linear(4, 4))
    assert not api.trace(mapped, example_inputs={"x": X}, global_batch_size=4).mixing


@pytest.mark.parametrize("layer", [lambda: nn.LSTM(4, 4), lambda: nn.TransformerEncoderLayer(4, 2, 8)])
def test_time_before_samples_in_the_inputs_is_told_of_the_dim_of_samples(layer: Callable[[], nn.Module]) -> None:
    def after_layer(self: Any, x: Tensor) -> Tensor:
        made = self.layer(x)
        return (made[0] if isinstance(made, tuple) else made).square().mean()

    model, example = model_of(after_layer, layer=layer()), {"x": torch.ones(6, 2, 4)}
    graph = api.trace(model, example_inputs=example, global_batch_size=4)
    assert any("give them samples first, and transpose in forward" in note for note in graph.notes)
    turned = model_of(lambda self, x: after_layer(self, x.transpose(0, 1)), layer=layer())
    assert not api.trace(turned, example_inputs={"x": torch.ones(2, 6, 4)}, global_batch_size=4).mixing

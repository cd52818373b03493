import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, TraceError, UsageError
from autopar.plan.file import load_plan, save_plan
from autopar.tracing import opaque_probe, opaque_trials
from autopar.tracing.sample_counts import CountError
from autopar.tracing.trace import trace
from tests.support.lower import unusual as u
from tests.support.lower.against_model import check, check_each
from tests.support.said import refuses
from tests.support.small_models import calling, in_double, model_of

pytestmark = pytest.mark.filterwarnings("ignore:.*_functional_collectives.*:FutureWarning")


def applies(function: type[torch.autograd.Function]) -> Callable[[], nn.Module]:
    return lambda: model_of(lambda self, x: function.apply(x))


CLIPPED, CLIPPED_APART = u.Clipped.apply, u.ClippedApart.apply
"""As people bind functions, before any trace."""


def printed(x: Tensor) -> Tensor:
    print(f"mean {x.mean().item():.3f}")  # noqa: T201  what people do
    return 2.0 * x


def hooked(x: Tensor) -> Tensor:
    y = 2.0 * x
    y.register_hook(lambda gradient: 5.0 * gradient)
    return y


@pytest.mark.parametrize(
    ("inner", "pins"),
    [
        (u.Router, ["tp=2", "dp_shard=2", "recompute=full"]),
        (lambda: calling(lambda x: x + torch.from_numpy(0.5 * x.detach().numpy())),
         ["dp_replicate=2", "num_micro_batches=2"]),
        (lambda: calling(printed), ["tp=2"]),
        (applies(u.StraightThrough), ["tp=2", "dp_replicate=2"]),
        (applies(u.Clipped), ["tp=2"]),
        (lambda: calling(CLIPPED), ["tp=2"]),
        (lambda: calling(lambda x: CLIPPED_APART(x) + u.ClippedApart.forward(x)), ["tp=2"]),
        (lambda: calling(hooked), ["dp_replicate=2"]),
    ],
)  # fmt: skip
def test_a_region_runs_as_it_is_written(inner: Callable[[], nn.Module], pins: list[str]) -> None:
    plan = check(u.Around(inner), u.batch(), pins)
    (note,) = (note for note in plan.notes if note.startswith("opaque"))
    assert "StraightThrough" in note or "Clipped" in note or ".py:" in note


def test_modules_of_a_class_are_found_by_two_exports_that_fail() -> None:
    layers = (nn.Sequential(nn.Linear(8, 8), u.Router()) for _ in range(4))
    with mock.patch.object(torch.export, "export", wraps=torch.export.export) as export:
        graph = trace(u.Around(lambda: nn.Sequential(*layers)), (), u.batch())
    assert (export.call_count, [op.target for op in graph.ops].count("autopar.opaque")) == (3, 4)
    assert "Linear" not in "".join(graph.notes)


@pytest.mark.parametrize(
    "code", [lambda x: F.gelu(x) if x.mean() > 0 else F.relu(x), lambda x: x * x.abs().max().item()]
)
def test_samples_that_meet_in_a_region_are_gathered_for_it(code: Callable[[Tensor], Tensor]) -> None:
    plan = check(u.Around(lambda: calling(code)), u.batch(), ["dp_replicate=2"])
    assert plan.num_micro_batches == 1
    assert any("samples are not known to be apart" in note for note in plan.notes)
    assert any("samples meet in opaque" in note for note in plan.notes)


def _of_tokens(self: Any, ids: Tensor, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Reads values in its outermost forward, which accepts only batches like the example, and averages over the tokens that count."""
    places = (ids == 7).nonzero(as_tuple=True)
    if len(places[0]) != images.shape[0] * images.shape[1]:
        raise ValueError("images and tokens do not match")
    logits = self.head(self.table(ids).index_put(places, images.flatten(0, 1)))
    return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def of_tokens() -> nn.Module:
    return model_of(_of_tokens, table=nn.Embedding(9, 8), head=nn.Linear(8, 9))


def tokens() -> dict[str, Tensor]:
    """A batch whose samples have different numbers of labels."""
    ids = torch.randint(0, 7, (8, 6), generator=torch.Generator().manual_seed(0))
    ids[:, 1:3] = 7
    labels = ids.clone()
    labels[0, 2:], labels[3, 1:4], labels[6, :5] = -100, -100, -100
    images = torch.randn(8, 2, 8, generator=torch.Generator().manual_seed(1))
    return {"ids": ids, "images": images, "labels": labels}


def test_a_model_that_cannot_be_traced_runs_as_a_whole_on_the_samples_of_each_rank() -> None:
    for plan in check_each(of_tokens(), tokens(), ["dp_shard=2", "zero=3", "num_micro_batches=2"], ["tp=2"]):
        assert any("the whole model" in note for note in plan.notes)
        assert not any("samples meet" in note for note in plan.notes)


def test_a_whole_model_returns_its_loss_where_it_has_it_and_a_large_one_is_run_fewer_times(monkeypatch: Any) -> None:
    def runs() -> int:
        with mock.patch.object(opaque_trials, "run", wraps=opaque_trials.run) as run:
            structure = trace(of_tokens(), (), tokens()).outputs.structure
        assert (structure.kind, [item.kind for item in structure.items]) == ("mapping", ["loss", "value"])
        return run.call_count

    usual = runs()
    monkeypatch.setattr(opaque_probe, "_LONG_FLOPS", 1.0)
    assert runs() < usual - 30


def test_a_whole_model_whose_loss_is_no_mean_over_samples_gets_all_of_them() -> None:
    plan = check(u.TopBranch(), u.batch(), ["dp_shard=2", "zero=3"])
    assert any("samples meet in opaque" in note for note in plan.notes)


def angles(x: Tensor) -> Tensor:
    """Of products of unit vectors: nothing finite for inputs that are no such."""
    return printed(x) * torch.acos(x.square().sum(-1, keepdim=True))


@pytest.mark.parametrize(("code", "said"), [
    (angles, ""),
    (lambda x: angles(x) + torch.log(-1.0 - x.square()), "to be apart: .*values that are not finite"),
])  # fmt: skip
def test_a_region_is_tried_where_what_it_gives_is_finite(code: Callable[[Tensor], Tensor], said: str) -> None:
    (note,) = trace(u.Around(lambda: calling(code)), (), u.batch()).notes
    assert re.search(said or r"outside forward\)$", note), note


def test_gradients_of_torch_func_run_as_they_are_written_although_they_refuse_hooks() -> None:
    """A loss on the slopes of a network, as of one that solves a differential equation."""

    def forward(self: Any, x: Tensor) -> Tensor:
        slopes: Tensor = torch.vmap(torch.func.grad(lambda row: self.net(row).sum()))(x)
        return (slopes.sum(-1) - self.net(x).squeeze(-1)).square().mean()

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    plan = check(model_of(forward, net=net), {"x": torch.randn(8, 4)}, ["dp_shard=2", "num_micro_batches=2"])
    assert any("the whole model" in note for note in plan.notes)


def test_a_usual_backward_is_traced_and_tried_at_one_size_and_large_inputs_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = check(u.Around(applies(u.Square)), u.batch(), ["tp=2"])
    assert not any("opaque" in note for note in plan.notes)
    draws: list[int] = []
    usual = opaque_trials.Subject.draw
    monkeypatch.setattr(opaque_trials.Subject, "draw", lambda self, n: (draws.append(n), usual(self, n))[1])
    trace(u.Around(applies(u.Square)), (), u.batch())  # and a second time, with twice as many samples
    assert draws == [0, 1, 2, 3]
    monkeypatch.setattr(opaque_trials, "LARGE", 1)
    trace(u.Around(applies(u.Square)), (), u.batch())
    assert draws == [0, 1, 2, 3, 0]


def test_modules_are_named_and_a_plan_keeps_the_names(tmp_path: Path) -> None:
    model = u.Around(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    plan = check(model, u.batch(), ["tp=2"], opaque=["inner"])
    save_plan(plan, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").opaque == ("inner",)
    assert "it was named so" in plan.notes[0]
    batch = in_double(model, u.batch())
    named = trace(model, (), batch, opaque=["Sequential"])
    assert [op.target for op in named.ops].count("autopar.opaque") == 1
    assert named.fingerprint == plan.model.fingerprint != trace(model, (), batch).fingerprint
    refuses(UsageError, r"'router'.*Sequential", trace, model, (), batch, opaque=["router"])


@pytest.mark.slow
def test_a_module_is_pinned_as_opaque() -> None:
    model = u.Around(lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    options = {"example_inputs": u.batch(), "cluster": "cpu:1x2", "global_batch_size": 8}
    pinned = autopar.estimate(model, pins=["tp=2", "opaque=Sequential"], **options)
    named = autopar.estimate(model, pins=["tp=2"], opaque=["Sequential"], **options)
    assert (pinned.opaque, pinned.notes, pinned.layouts) == (named.opaque, named.notes, named.layouts)
    assert pinned.opaque == ("Sequential",)
    for given in ({"pins": ["opaque=inner"]}, {"opaque": ["inner"]}):
        with pytest.raises(UsageError, match=r"'inner'.*Give the model instead of its graph"):
            autopar.estimate(trace(model, (), u.batch()), cluster="cpu:1x2", global_batch_size=8, **given)
    refuses(UsageError, r"'innner'.*Sequential", autopar.estimate, model, pins=["opaque=innner"], **options)


def skips(self: Any, x: Tensor) -> Tensor:
    """LayerDrop: a number of the batch decides whether a layer runs."""
    return x if torch.rand([]) < 0.3 else x + self.layer(x)


@pytest.mark.parametrize(
    ("inner", "meets"),
    [
        (lambda: model_of(skips, layer=nn.Linear(8, 8)), False),
        (lambda: calling(lambda x: x * torch.rand_like(x) if x.numel() > 0 and x[0, 0] < 9 else x), True),
    ],
)
def test_a_region_that_draws_random_numbers_is_split_if_these_are_of_the_batch_and_else_gathered(
    inner: Callable[[], nn.Module], meets: bool
) -> None:
    options = {"cluster": "cpu:1x2", "global_batch_size": 8, "pins": ["dp_shard=2"]}
    plan = autopar.search(u.Around(inner), example_inputs=u.batch(), **options)
    assert any("random numbers of its own for each sample" in note for note in plan.notes) is meets
    assert any("samples meet" in note for note in plan.notes) is meets


class Largest(nn.Module):
    """Returns a number beside a tensor, and one that no value changes."""

    def forward(self, x: Tensor) -> tuple[Tensor, float, int]:
        return (x if x.sum() > 0 else 2.0 * x), x.abs().max().item(), x.shape[-1]


def scaled() -> nn.Module:
    def forward(self: Any, x: Tensor) -> Tensor:
        x, scale, size = self.largest(x)
        return scale / size * x

    return model_of(forward, largest=Largest())


def test_a_number_that_a_region_returns_is_not_kept_from_where_it_was_tried() -> None:
    graph = trace(u.Around(scaled), (), u.batch())
    (op,) = (op for op in graph.ops if op.target == "autopar.opaque")
    assert op.module == "inner"
    assert not any(isinstance(arg, float) for op in graph.ops if op.target == "aten.mul.Tensor" for arg in op.args)


def counted(self: Any, x: Tensor) -> tuple[Tensor, int]:
    return (x if x.sum() > 0 else 2.0 * x), x.shape[0]


def test_a_number_of_samples_that_a_region_returns_depends_on_the_batch_size() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y, samples = self.counted(self.first(x))
        return y.square().sum() / samples

    model = model_of(forward, first=nn.Linear(8, 8), counted=model_of(counted))
    with pytest.raises(CountError, match="A number in the model depends on the batch size: 6 for a batch of 6, 12 for"):
        trace(model, (torch.randn(6, 8),))


class Reversible(torch.autograd.Function):
    """Keeps no result and computes it once more in backward, which adds to the weight's gradient by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x + x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(x @ weight, gradients)
        return gradients[0] + x.grad, None


LOCAL = type("Local", (u.StraightThrough,), {"__qualname__": "function.<locals>.Local"})


def remembers(self: Any, x: Tensor) -> Tensor:
    self.seen.append(x)
    return x * len(self.seen)


def counts(self: Any, x: Tensor) -> Tensor:
    self.calls += 1
    return x if x.sum().item() > 0 else x / self.calls


def divides(self: Any, x: Tensor, y: Tensor) -> Tensor:
    """Reads in the model itself a buffer that it changes, as the queue of MoCo is written."""
    self.calls += 1
    return (self.layer(x) / int(self.calls) - y).square().mean()


def averages(self: Any, x: Tensor) -> Tensor:
    """A buffer that each forward pass sets, as a moving average is set, beside one that it leaves as it is."""
    self.kept = self.kept.to(x.device)
    self.largest = 0.9 * self.largest + 0.1 * x.detach().max()
    return x if self.largest > 0 else 2.0 * x


def normalizes(self: Any, x: Tensor) -> Tensor:
    """Keeps its rows at length 1, as prototypes of a contrastive loss are kept."""
    if x.abs().sum() > 0:
        self.weight.data = nn.functional.normalize(self.weight.data)
    return F.linear(x, self.weight)


def with_a_hook() -> nn.Module:
    model = u.Around()
    model.last.weight.register_hook(lambda gradient: 5.0 * gradient)
    return model


def inside(forward: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    return lambda: u.Around(lambda: model_of(forward, **parts))


REVERSES = inside(lambda self, x: Reversible.apply(x, self.weight), weight=nn.Parameter(torch.eye(8)))


@pytest.mark.parametrize(("model", "opaque", "said"), [
    (inside(remembers, seen=[]), [],
     r"test_opaque.py:\d+: .*left something in the model.*takes 2 in one step, 3 .*sets inner.seen. .*buffer"),
    (inside(counts, calls=0), [], r"test_opaque.py:\d+: .*item.*depends on the values of tensors.*torch.where"),
    (inside(counts, calls=nn.Buffer(torch.zeros(()))), [],
     r"test_opaque.py:\d+: .*torch.where.*it changes buffers \(inner.calls\)"),
    (lambda: model_of(divides, layer=nn.Linear(8, 8), calls=nn.Buffer(torch.zeros(()))), [],
     r"tensor as index.* a separate module.*\(the whole model cannot run so: it changes buffers \(calls\)"),
    (inside(averages, largest=nn.Buffer(torch.zeros(())), kept=nn.Buffer(torch.ones(()))), [],
     r"test_opaque.py:\d+: .*it changes buffers \(inner.largest\)"),
    (inside(normalizes, weight=nn.Parameter(2 * torch.eye(8))), [],
     r"test_opaque.py:\d+: .*it changes parameters \(inner.weight\)"),
    (lambda: u.Around(lambda: calling(lambda x: x * torch.ones(8, device="cuda"))), [],
     r"test_opaque.py:\d+: .*device.*[Cc]hange that line"),
    (partial(u.Around, partial(nn.LazyLinear, 8)), [],
     r"inner \(LazyLinear\): A lazy parameter has no shape.*one batch"),
    (u.Clamps, [], "changes a parameter by .data.clamp_. Use what the call returns"),
    (u.Yields, [], "Yields: .*no scalar loss: a generator.*loss_fn"),
    (lambda: u.Around(applies(LOCAL)), [], "Local: .*cannot be imported.*top of a module"),
    (with_a_hook, [], "last.weight: .*A hook on a parameter is not supported.*train_step"),
    (REVERSES, [], "adds to gradients by itself"), (REVERSES, ["inner"], "adds to gradients by itself"),
    (inside(lambda self, x: self.inner.requires_grad_(False)(x), inner=nn.Linear(8, 8)), ["inner"],
     "it changes requires_grad of a parameter"),
    (lambda: u.Around(lambda: nn.Sequential(nn.BatchNorm1d(8))), ["inner"],
     r"inner \(Sequential\): .*it changes buffers \(0.running_mean, .*around it"),
    (lambda: u.Around(scaled), ["Largest"], r"inner.largest \(Largest\): .*it returns numbers that depend on values"),
])  # fmt: skip
def test_what_cannot_be_traced_is_named_with_its_remedy(
    model: Callable[[], nn.Module], opaque: list[str], said: str
) -> None:
    assert "\n" not in str(refuses(TraceError, said, trace, model(), (), u.batch(), opaque=opaque))


@pytest.mark.parametrize("model", [u.InPlace, u.ShapeNumber, u.Nested, u.Asserts])
def test_what_only_looks_hard_is_traced(model: Callable[[], nn.Module]) -> None:
    notes = check(model(), u.batch(), ["dp_replicate=2"]).notes
    assert [note.partition(",")[0] for note in notes] == (
        ["checks of values that only raise are taken to hold"] if model is u.Asserts else []
    )


def test_a_contrastive_loss_gathers_its_samples() -> None:
    pins = ["dp_replicate=4"], ["tp=2", "dp_shard=2"], ["dp_replicate=2", "dp_shard=2"]
    for plan in check_each(u.Pairs("contrastive"), u.pairs(), *pins):
        assert plan.num_micro_batches == 1
        assert any("samples meet in" in note and "matmul" in note and "unusual.py" in note for note in plan.notes)


@pytest.mark.slow
def test_a_loss_of_the_whole_batch_and_one_that_counts_it() -> None:
    assert check(u.Pairs("covariance"), u.pairs(), ["dp_shard=2"]).num_micro_batches == 1
    plan = check(u.Pairs("counted"), u.pairs(), ["dp_shard=2", "num_micro_batches=2"])
    assert not any("samples meet" in note for note in plan.notes)


def test_samples_that_meet_take_one_micro_batch() -> None:
    pins = ["dp_shard=2", "num_micro_batches=2"]
    refuses(AutoparError, r"samples that meet .* take one micro-batch", check, u.Pairs("contrastive"), u.pairs(), pins)

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import VerificationError
from autopar.models.resolve import resolve_model
from autopar.tracing.modes import in_double
from autopar.tracing.trace import trace
from autopar.verification import reference
from autopar.verification.against_one_device import _Run, verify
from autopar.verification.compared_models import VerifiedModel
from autopar.verification.first_difference import Bisection
from autopar.verification.reference import Compared, traced_in_double, trained_alone
from autopar.verification.results import NUDGES, Confirmation, RankErrors, VerifyReport
from tests.support.close import assert_close
from tests.support.distributed.subjects import OwnSubject
from tests.support.said import refuses
from tests.support.small_models import evaluate, model_of


def row(**changes: object) -> RankErrors:
    values = {"rank": 1, "losses": (1.0,), "loss": 0.0, "gradient": 0.0, "parameter": 0.0}
    return RankErrors(**{**values, "gradient_name": "g", "parameter_name": "p", **changes})


@pytest.mark.parametrize(("changes", "message"), [
    ({"loss": 2e-5}, r"rank 1: The loss differs .* by 2\.00e-05, more than 1e-05"),
    ({"gradient": 2e-4}, r"rank 1: gradients of the first step .* 2\.00e-04 \(in g\)"),
    ({"parameter": float("inf")}, r"rank 1: parameters after 3 AdamW steps .*inf \(in p\)"),
])  # fmt: skip
def test_what_exceeds_the_tolerance_is_named(changes: dict[str, float], message: str) -> None:
    report = VerifyReport(steps=3, reference_losses=(1.0,), rows=(row(rank=0), row(**changes)))
    assert not report.passed
    refuses(VerificationError, message, report.check)


@pytest.mark.parametrize(("found", "wanted", "name", "error"), [
    ({"a": 1.0}, {"a": 1.0, "b": 1.0}, "b", float("inf")),
    ({"a": 1.0, "b": float("nan")}, {"a": 1.0, "b": 1.0}, "b", float("inf")),
    ({"large": 100.1, "small": 0.101}, {"large": 100.0, "small": 0.1}, "small", 0.01),
    # one that is nothing but rounding is measured against the others
    ({"large": 1.0, "noise": 0.0}, {"large": 1.0, "noise": 1e-9}, "noise", 1e-3),
])  # fmt: skip
def test_the_worst_tensor_is_the_one_with_the_largest_relative_error(
    found: dict[str, float], wanted: dict[str, float], name: str, error: float
) -> None:
    tensors = ({key: torch.full((2,), value) for key, value in some.items()} for some in (found, wanted))
    assert reference.worst(*tensors) == (name, pytest.approx(error, rel=1e-4))


@pytest.mark.parametrize(("loss", "error"), [(3e-17, 2e-14), (1e-5, 1e-2), (-1e-4, 1e-1)])
def test_a_loss_of_rounding_alone_is_measured_by_what_its_gradients_say(loss: float, error: float) -> None:
    tensors = {"weight": torch.full((5,), 0.2)}
    found, wanted = (
        reference.Trained(losses=(x,), gradients={"weight": torch.full((5,), 0.1)}, parameters=tensors)
        for x in (loss, 1e-17)
    )
    assert reference.errors(0, found, wanted).loss == pytest.approx(error, rel=1e-3)


def double(**changes: object) -> RankErrors:
    return row(**{"precision": "fp64", "gradient": 3e-13, **changes})


@pytest.mark.parametrize(("rows", "alone", "verdict"), [
    ((double(),), {"gradient": 1e-3}, "rounding: the same plan agrees in float64 to 3e-13"),
    ((double(gradient=2e-9),), {"gradient": 1e-3}, "wrong: .* in float64 too, by 2e-09"),
    ((double(),), {"gradient": 1e-6}, "wrong in float32: .* by more than the rounding of one device"),
    ((double(),), {"parameter": 1e-3}, "wrong in float32"),
    ((), {"gradient": 1e-3}, "wrong: .*; float64 cannot tell: not run"),
])  # fmt: skip
def test_float64_tells_rounding_from_wrong(rows: tuple[RankErrors, ...], alone: dict[str, float], verdict: str) -> None:
    found = Confirmation(rows=rows, alone=row(**alone), why="" if rows else "not run")
    report = VerifyReport(steps=3, reference_losses=(1.0,), rows=(row(gradient=2e-3),), confirmation=found)
    assert re.match(verdict, report.verdict)
    assert report.passed == verdict.startswith("rounding")
    if not report.passed:
        refuses(VerificationError, r"2\.00e-03 \(in g\)", report.check)
    else:
        report.check()


@pytest.mark.parametrize(("graph_loss", "alone", "right"), [
    (1e-7, 1e-3, True), (1e-7, 1e-6, False), (1e-4, 1e-3, False),
])  # fmt: skip
def test_a_graph_in_float64_tells_where_the_model_has_others(graph_loss: float, alone: float, right: bool) -> None:
    """Positions that are computed in float64 and cast to float32: in float64 nothing is cast."""
    report = VerifyReport(
        steps=3, reference_losses=(1.0,), rows=(row(gradient=2e-3),),
        confirmation=Confirmation(rows=(), alone=row(gradient=alone), why="other operators"),
        bisection=Bisection(difference=None, steps=3, graph_loss=graph_loss),
    )  # fmt: skip
    assert report.passed == right
    assert report.verdict.startswith("rounding: " if right else "wrong: ")
    assert not replace(report, bisection=None).passed


def test_tolerances_of_float64_are_its_own() -> None:
    assert double().passed
    assert not double(loss=2e-10).passed
    assert row(loss=9e-6, gradient=9e-5).passed


def _casts(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Code that names float32: casts, factories, accumulation; an odd sum that float32 rounds."""
    y = x.to(torch.float32) * self.weight.float() * self.scale + torch.arange(7) / torch.tensor(3.0)
    return torch.softmax(y, -1, dtype=torch.float32).square().sum() + torch.ones(1).mean()


def casts() -> nn.Module:
    weight, scale = nn.Parameter(torch.linspace(0.1, 1.0, 7)), nn.Buffer(torch.linspace(0.3, 0.7, 7))
    return model_of(_casts, weight=weight, scale=scale)


def normal(width: int) -> Callable[[int, torch.Generator], dict[str, torch.Tensor]]:
    return lambda size, generator: {"x": torch.randn(size, width, generator=generator)}


CASTS = OwnSubject(casts, normal(7))


def test_grouped_products_have_a_float64() -> None:
    """torch has no kernel: whoever trains experts on it could not be told rounding from wrong."""
    rows, matrices = torch.randn(7, 4, dtype=torch.float64), torch.randn(3, 4, 8, dtype=torch.float64)
    rows.requires_grad_(), matrices.requires_grad_()
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)  # no row for the second, one after the last
    with in_double():
        found = torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    assert_close(found[:2], rows[:2] @ matrices[0])
    assert_close(found[2:6], rows[2:6] @ matrices[2])
    got = torch.autograd.grad(found.sin().sum(), (rows, matrices))
    belongs = torch.tensor([0, 0, 2, 2, 2, 2])
    truth = torch.einsum("sk,skn->sn", rows[:6], matrices[belongs]).sin().sum()
    for mine, wanted in zip(got, torch.autograd.grad(truth, (rows, matrices)), strict=True):
        assert_close(mine, wanted)


def test_a_model_in_float64_rounds_nowhere_to_float32() -> None:
    wide = Compared(CASTS, is_double=True)
    batch = wide.make_batch(2, seed=0)
    model = wide.build()
    with in_double():
        found = model(**batch)
    assert torch.get_default_dtype() == torch.float32
    weight = model.weight.detach()
    y = batch["x"] * weight * model.scale + torch.arange(7, dtype=torch.float64) / 3.0
    assert found.dtype == torch.float64
    assert float(found.detach()) == pytest.approx(float(torch.softmax(y, -1).square().sum() + 1), rel=1e-15)
    graph = trace(casts(), (), CASTS.make_batch(2, seed=0))
    doubled = traced_in_double(wide, graph)
    assert doubled.fingerprint == graph.fingerprint
    assert float(evaluate(doubled, batch, {"weight": weight})) == pytest.approx(float(found.detach()), rel=1e-15)


def test_a_model_that_drops_is_the_same_in_float64() -> None:
    source = resolve_model("gpt:layers=1,hidden=8,heads=2,vocab=16,seq=4,dropout=0.1")
    subject = VerifiedModel(source, masked=False)
    assert traced_in_double(Compared(subject, is_double=True), subject.trace(as_trained=True)) is not None
    assert traced_in_double(Compared(subject, is_double=True), subject.trace()) is not None


def test_a_model_that_fails_on_one_device_is_told_by_its_line() -> None:
    """Its table has fewer rows than its inputs ask for."""

    def model() -> nn.Module:
        return model_of(lambda self, ids: self.table(ids).square().mean(), table=nn.Embedding(2, 4))

    subject = OwnSubject(model, lambda size, _: {"ids": torch.full((size, 3), 7)})
    graph = trace(model(), (), subject.make_batch(2, seed=0))
    plan = autopar.search(graph, cluster="cpu:1x1", global_batch_size=2)
    said = r"test_verify\.py:\d+: One device alone cannot train .*IndexError.*fit the model"
    refuses(VerificationError, said, verify, subject, plan, graph, pool=None)


def run_of(global_batch_size: int) -> _Run:
    plan, pool = SimpleNamespace(global_batch_size=global_batch_size), None
    return _Run(plan=plan, steps=1, timeout_s=1.0, pool=pool, draws=None)


def drawing(noise: float = 0.0, generator: torch.Generator | None = None) -> nn.Module:
    layer = nn.Linear(3, 3)
    nn.init.normal_(layer.weight, generator=generator)
    return model_of(lambda self, x: self.layer(x + noise * torch.rand_like(x)).square().mean(), layer=layer)


def test_a_model_that_draws_noise_of_its_own_or_has_other_weights_each_time_is_no_reference() -> None:
    """Weights from a generator that no seed of torch's reaches, as of numpy."""
    check, own = run_of(4)._check_repeats, torch.Generator().manual_seed(3)
    check(OwnSubject(drawing, normal(3)))
    for said, model in (
        (r"One device gives two losses for one batch: .*Turn off what", partial(drawing, 0.1)),
        (r"gives other weights each time: 'layer\.weight'.*Seed in that function", partial(drawing, generator=own)),
    ):
        refuses(VerificationError, said, check, OwnSubject(model, normal(3)))


def noised() -> nn.Module:
    """Noise, a mask that is written into a tensor, and a shuffle; dropout that is off."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        kept = x.new_empty(len(x), 1).bernoulli_(0.5)
        order = torch.rand(len(x), x.shape[1], dtype=x.dtype).argsort(1)
        noise = nn.functional.dropout(torch.randn_like(x), 0.0)
        return (self.weight * (x * kept + noise).gather(1, order)).square().mean()

    return model_of(forward, weight=nn.Parameter(torch.linspace(0.3, 1.0, 8)))


def test_runs_of_one_device_draw_what_the_first_one_drew() -> None:
    """In float64 as well; and where ``one`` draws and no other, losses differ."""
    batches = [normal(8)(4, torch.Generator().manual_seed(seed)) for seed in range(3)]
    draws: reference.Draws = []
    first, second = trained_alone(noised(), batches, draws), trained_alone(noised(), batches, draws)
    assert [[draw.kind for draw in step] for step in draws] == 3 * [["bernoulli", "rand", "randn_like"]]
    assert first["losses"] == second["losses"] != trained_alone(noised(), batches)["losses"]
    wide = trained_alone(noised().double(), [{"x": batch["x"].double()} for batch in batches], draws)
    assert wide["losses"] == pytest.approx(first["losses"], rel=1e-5)
    assert [draw.value.dtype for draw in draws[0]] == 3 * [torch.float32]


def test_what_the_graph_draws_is_found_in_the_order_of_one_device() -> None:
    graph = trace(noised(), (), {"x": torch.zeros(2, 8)})
    made = [reference.Draw(kind, torch.zeros(shape)) for kind, shape in (
        ("uniform", (3,)), ("bernoulli", (4, 1)), ("rand", (4, 3)), ("rand", (4, 8)), ("randn_like", (4, 8)),
    )]  # fmt: skip
    places = reference.places_of_draws
    assert list(places(graph, made, 4).values()) == [1, 3, 4]
    refuses(VerificationError, r"does not draw .*\(aten\.rand_like|randn_like", places, graph, made[:4], 4)
    refuses(VerificationError, r"does not draw", places, graph, made[::-1], 4)


KINKED = OwnSubject(
    lambda: model_of(
        lambda self, x: (torch.relu(self.weight - 1.0) * 3 + self.weight * x).sum(), weight=nn.Parameter(torch.ones(()))
    ),
    lambda *_: {"x": torch.ones(1)},
)
"""A unit on the kink of its ReLU: a rounding of the weight turns its gradient on."""


def test_one_device_whose_parameters_move_by_a_rounding_shows_a_kink() -> None:
    """At the weight itself the gradient is 1; a rounding above, it is 4."""
    run = run_of(1)
    truth = run._reference(Compared(KINKED, is_double=True))
    alone = Confirmation(rows=(double(),), alone=row(gradient=0.0))

    def judged(gradient: float) -> VerifyReport:
        report = VerifyReport(steps=1, reference_losses=(1.0,), rows=(row(gradient=gradient),))
        return replace(report, confirmation=run._nudged(Compared(KINKED), alone, report, truth))

    kink = judged(3.0)
    assert kink.passed
    assert kink.verdict.endswith("one device is off by as much when its parameters move by a rounding")
    assert kink.confirmation.nudged[-1].gradient == pytest.approx(3.0)
    assert len(kink.confirmation.nudged) < NUDGES
    wrong = judged(31.0)
    assert len(wrong.confirmation.nudged) == NUDGES
    assert wrong.verdict.startswith("wrong in float32: ")


def shifted() -> nn.Module:
    """A shift that is taken out again: its gradient is zero but for rounding."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight + self.shift
        return (y - y.mean(0)).square().mul(x).sum()

    weight, shift = nn.Parameter(torch.linspace(0.3, 1.0, 64)), nn.Parameter(torch.full((64,), 0.1))
    return model_of(forward, weight=weight, shift=shift)


SHIFTED = OwnSubject(shifted, normal(64))


def test_rounding_in_float64_is_measured_by_one_device_in_float64() -> None:
    run = run_of(7)
    truth = run._reference(Compared(SHIFTED, is_double=True))

    def judged(error: float) -> Confirmation:
        found = Confirmation(rows=(double(gradient=error),), alone=row())
        return run._nudged_double(Compared(SHIFTED), found, truth)

    own = max(r.error for r in judged(9e-8).nudged_double)
    assert own < 1e-9  # of a gradient that is zero but for rounding
    assert judged(1.1e-9).agrees == (10 * own >= 1.1e-9)
    assert not judged(2e-7).agrees
    assert judged(2e-7).nudged_double == ()  # no rounding is as large: nothing is run
    assert judged(9e-10).agrees


def test_a_comparison_in_float64_alone_tells_rounding_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias before a batch norm has a gradient of nothing but rounding, which exceeded the tolerance."""
    run = run_of(1)
    truth = run._reference(Compared(KINKED, is_double=True))

    def judged(gradient: float) -> VerifyReport:
        report = VerifyReport(steps=1, reference_losses=(1.0,), rows=(double(gradient=gradient),))
        monkeypatch.setattr(_Run, "compared_in_double", lambda *_: (report, truth))
        return run.in_double(Compared(KINKED), trace(KINKED.build(), (), KINKED.make_batch(1, seed=0)))

    report = judged(9e-8)
    assert report.passed
    assert "one device alone, float64: the most in " in str(report)
    assert "the same plan in float64, against" not in str(report)
    assert not judged(2e-7).passed

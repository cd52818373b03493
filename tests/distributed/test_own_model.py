from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar import api
from autopar.errors import PlanError, UsageError
from autopar.plan.plan import FP64, Plan
from autopar.verification.against_one_device import verify
from autopar.verification.rank_pool import WorkerPool
from tests.support.distributed.layouts import equals_one_device
from tests.support.distributed.plans import estimated
from tests.support.distributed.subjects import OwnSubject
from tests.support.said import refuses


class Tagger(nn.Module):
    """Gives logits alone, times what stands in a list beside the tokens."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(32, 16), nn.Linear(16, 32), nn.Linear(32, 6)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, weights: Sequence[Tensor] = (), scale: float = 1.0) -> dict[str, Tensor]:
        logits = scale * self.head(self.drop(functional.gelu(self.hidden(self.embed(tokens)))))
        for weight in weights:
            logits = logits * weight[..., None]
        return {"logits": logits}


class Restless(Tagger):
    """Draws noise in every step."""

    def forward(self, tokens: Tensor, weights: Sequence[Tensor] = (), scale: float = 1.0) -> dict[str, Tensor]:
        return super().forward(tokens, [*weights, torch.rand_like(weights[0])], scale)


def tagging_loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), batch["tags"].flatten(), ignore_index=-100)


def distance(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return (output["logits"] - 1.0).square().mean()


def tagged(size: int, generator: torch.Generator) -> dict[str, Tensor]:
    tags = torch.randint(0, 6, (size, 5), generator=generator)
    tags[0, 1:] = -100
    return {"tokens": torch.randint(0, 32, (size, 5), generator=generator), "tags": tags}


def tagger(dtype: torch.dtype) -> nn.Module:
    return Tagger().to(dtype)


TAGGERS = {dtype: OwnSubject(partial(tagger, dtype), tagged) for dtype in (torch.float32, torch.float64)}


def dropping() -> nn.Module:
    return Tagger(0.5)


def examples() -> tuple[Tensor, list[Tensor], float]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (6, 5), generator=generator)
    return tokens, [torch.randn(6, 5, generator=generator) for _ in range(2)], 0.5


def parallelized(precision: str, pins: list[str]) -> tuple[float, dict[str, Tensor]]:
    """A search and one step in float32 or float64."""
    subject = TAGGERS[torch.float32 if precision == "fp32" else torch.float64]
    batch = subject.make_batch(8, seed=1)
    options = {"precision": precision, "loss_fn": tagging_loss, "pins": pins, "cluster": "cpu:1x4"}
    parallel = api.parallelize(subject.build(), example_inputs=batch, **options)
    return parallel.train_step(batch).item(), parallel.full_gradients()


GIVEN: dict[str, Any] = {"example_inputs": examples(), "loss_fn": distance}


def planned(model: nn.Module | None = None, **options: Any) -> Plan:
    asked = {"cluster": "cpu:1x2", "global_batch_size": 8, "pins": ["tp=2"], **GIVEN, **options}
    return estimated(model or dropping(), **asked)


@cache
def usual_plan() -> Plan:
    return planned()


def test_a_module_with_parametrizations_nested_inputs_dropout_and_noise_is_verified_and_stays_as_it_is() -> None:
    """Ranks draw the same noise."""
    model = Restless(0.5)
    torch.nn.utils.parametrizations.weight_norm(model.hidden)
    before = [parameter.clone() for parameter in model.parameters()]
    report = autopar.verify(model, planned(model), steps=2, **GIVEN)
    report.check()
    assert report.is_within
    assert len(report.rows) == 2
    assert "every rank agrees (allowed:" in str(report)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert model.drop.p == 0.5


def test_a_function_that_builds_it_does_as_well_and_a_plan_in_a_file(tmp_path: Path) -> None:
    plan = planned(precision="bf16", pins=["dp_shard=2"])
    plan.save(tmp_path / "plan.json")
    report = autopar.verify(dropping, tmp_path / "plan.json", steps=1, compare_in="fp64", **GIVEN)
    report.check()
    assert report.rows[0].precision == "fp64"


def with_a_lambda() -> nn.Module:
    model = dropping()
    model.activation = lambda x: x
    return model


@pytest.mark.parametrize(("model", "message"), [
    (with_a_lambda, "cannot be sent to the processes"),
    (lambda: dropping().to("meta"), "on the meta device"), (lambda: "dropping", "A str is no model"),
    (lambda: examples, "The function examples returns a tuple"),
])  # fmt: skip
def test_what_cannot_be_verified_is_said(model: Callable[[], Any], message: str) -> None:
    refuses(UsageError, message, autopar.verify, model(), usual_plan(), **GIVEN)


def test_a_plan_that_examples_processes_or_the_model_do_not_fit_is_refused() -> None:
    one = tuple(torch.utils._pytree.tree_map_only(torch.Tensor, lambda value: value[:1], examples()))
    plan, two = usual_plan(), planned(pins=["dp_shard=2"])
    many = planned(cluster="cpu:8x8", global_batch_size=64, pins=["dp_shard=64"])
    other = replace(plan, model=replace(plan.model, fingerprint="0" * 16))
    for kind, said, given, options in (
        (UsageError, "One example is too few for 2 data ranks", two, {"example_inputs": one}),
        (UsageError, "has 64 ranks, and verify starts at most 32", many, {}),
        (PlanError, "Tagger", other, {}),
    ):
        refuses(kind, said, autopar.verify, dropping(), given, **GIVEN | options)


@pytest.mark.parametrize("pins", [["tp=2", "dp_shard=2"], ["dp_shard=4", "zero=3"]], ids=["tp2 x dp2", "dp4 ZeRO 3"])
def test_a_plan_for_a_loss_beside_the_model_is_verified(pool: WorkerPool, pins: list[str]) -> None:
    subject = TAGGERS[torch.float32]
    options = {"example_inputs": subject.make_batch(8, seed=0), "loss_fn": tagging_loss, "global_batch_size": 8}
    plan = estimated(subject.build(), cluster="cpu:1x4", pins=pins, **options)
    graph = subject.trace(loss_fn=tagging_loss)
    assert graph.fingerprint == plan.model.fingerprint
    equals_one_device(pool, subject, plan, graph, loss_fn=tagging_loss)
    if "tp=2" in pins:
        exact = equals_one_device(pool, subject, plan, graph, loss_fn=tagging_loss, precision=FP64)
        assert exact.rows[0].precision == "fp64"


def test_another_loss_is_found_out(pool: WorkerPool) -> None:
    subject = TAGGERS[torch.float32]
    graph = subject.trace(loss_fn=lambda output, batch: 2.0 * tagging_loss(output, batch))
    plan = estimated(graph, cluster="cpu:1x2", global_batch_size=8, pins=["tp=2"])
    report = verify(subject, plan, graph, steps=2, pool=pool, run_timeout_s=300.0, loss_fn=tagging_loss, find="never")
    assert not report.passed


@pytest.mark.parametrize(("precision", "limit", "pins"), [
    ("fp32", 1e-5, []), ("fp64", 1e-12, ["tp=2", "pp=1", "hidden.weight=tp:S(0)"]),
], ids=["fp32", "fp64 on tp2"])  # fmt: skip
def test_parallelize_searches_and_runs_with_it(pool: WorkerPool, precision: str, limit: float, pins: list[str]) -> None:
    subject = TAGGERS[torch.float64]
    model, batch = subject.build(), subject.make_batch(8, seed=1)
    wanted = tagging_loss(model(batch["tokens"]), batch)
    wanted.backward()
    for loss, gradients in pool.run(parallelized, precision, pins, timeout_s=300.0):
        assert loss == pytest.approx(wanted.item(), rel=limit)
        assert all(g.dtype == (torch.float32 if precision == "fp32" else torch.float64) for g in gradients.values())
        for name, parameter in model.named_parameters():
            assert (gradients[name] - parameter.grad).abs().max() <= 10 * limit * parameter.grad.abs().max()

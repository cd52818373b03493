from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence

from autopar.errors import TraceError
from autopar.graph.graph import Graph
from autopar.graph.rewrites import compact
from autopar.models.graph_for_plan import for_batch
from autopar.plan.mesh import P
from autopar.planner.sharding.input_axes import mixes_samples, samples_apart, solve_batch
from autopar.rules.missing import complete
from autopar.tracing.trace import trace
from tests.support.lower.against_model import check
from tests.support.small_models import evaluate, model_of, same_as_the_model

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def of(loss: Loss) -> nn.Module:
    """Of logits [4, 3, 5] for classes [4, 3] and reals [4, 3, 5]."""
    head = nn.Linear(6, 5, dtype=torch.float64)
    return model_of(lambda self, x, classes, reals: loss(self.head(x), classes, reals), head=head)


def batch(samples: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, 5, (samples, 3), generator=generator)
    x, reals = (torch.randn(samples, 3, n, generator=generator, dtype=torch.float64) for n in (6, 5))
    return {"x": x, "classes": classes, "reals": reals}


WEIGHTS = torch.arange(1, 6, dtype=torch.float64)


def _ignoring(classes: Tensor) -> Tensor:
    return torch.where(classes > 1, classes, -100)


def _frames(logits: Tensor) -> Tensor:
    """Log-probabilities [12, 4, 5] of logits [4, 3, 5]."""
    return (logits.repeat_interleave(4, dim=1) * torch.arange(1.0, 13.0)[:, None]).log_softmax(-1).transpose(0, 1)


def _selected_pairs(loss: Callable[..., Tensor], y: Tensor, t: Tensor, mask: Tensor, **options: object) -> Tensor:
    return loss(y[mask], t[mask], **options)


APART: dict[str, Loss] = {
    "probabilities": lambda y, c, t: F.cross_entropy(y.flatten(0, 1), t.softmax(-1).flatten(0, 1)),
    "weighted probabilities": lambda y, c, t: F.cross_entropy(
        y.transpose(1, 2), t.softmax(-1).transpose(1, 2), WEIGHTS, label_smoothing=0.1
    ),
    "weighted": lambda y, c, t: F.cross_entropy(y.flatten(0, 1), _ignoring(c).flatten(), WEIGHTS, label_smoothing=0.1),
    "sum": lambda y, c, t: F.cross_entropy(y.transpose(1, 2), _ignoring(c), reduction="sum"),
    "absolute": lambda y, c, t: F.l1_loss(y, t),
    "weighted sum": lambda y, c, t: F.cross_entropy(y.transpose(1, 2), c, WEIGHTS, reduction="sum"),
    "flattened": lambda y, c, t: F.nll_loss(y.log_softmax(-1).view(-1, 5), _ignoring(c).view(-1)),
    "weighted flattened": lambda y, c, t: F.nll_loss(y.log_softmax(-1).view(-1, 5), _ignoring(c).view(-1), WEIGHTS),
    "of a mixture of softmaxes": lambda y, c, t: F.nll_loss(
        torch.logsumexp(torch.stack([y.log_softmax(-1), t.log_softmax(-1)]), 0).view(-1, 5), _ignoring(c).view(-1)
    ),
    "the sum of logarithms of a softmax": lambda y, c, t: F.nll_loss(
        y.softmax(-1).log().transpose(1, 2), _ignoring(c), reduction="sum"
    ),
    "weighted logarithms": lambda y, c, t: F.nll_loss(y.transpose(1, 2).log_softmax(1), c, WEIGHTS, reduction="sum"),
    "a scaled mean and numbers": lambda y, c, t: 2.0 - 2 * ((y * t).mean() / 3 - 1) + F.mse_loss(y, t),
    "variances": lambda y, c, t: F.gaussian_nll_loss(y, t, F.softplus(y) + 0.1),
    "distributions": lambda y, c, t: kl_divergence(
        Normal(y, F.softplus(y) + 0.1), Normal(torch.zeros(5), torch.ones(5))
    ).mean(),
    "a distribution of numbers": lambda y, c, t: -Normal(0.0, 2.0).log_prob(y - t).mean(),
    "CTC": lambda y, c, t: F.ctc_loss(_frames(y), c.clamp(min=1), [12] * len(c), (2,) * len(c)),
    "CTC of targets one after the other": lambda y, c, t: F.ctc_loss(
        _frames(y), c[c > 0], torch.full((len(c),), 12), (c > 0).sum(1), reduction="sum"
    ),
    "CTC of masked targets": lambda y, c, t: F.ctc_loss(
        _frames(y), c.masked_select(c != 4), torch.full((len(c),), 9), (c != 4).sum(-1), blank=4, zero_infinity=True
    ),
    "CTC of each": lambda y, c, t: nn.CTCLoss(reduction="none")(
        _frames(y), c.clamp(min=1), torch.full((len(c),), 12), torch.full((len(c),), 2)
    ).mean(),
    "of selected classes in a row": lambda y, c, t: _selected_pairs(
        F.cross_entropy, y.flatten(0, 1), c.flatten(), (c > 1).flatten()
    ),
    "the sum of selected classes": lambda y, c, t: _selected_pairs(
        F.cross_entropy, y, c, c != 2, weight=WEIGHTS, reduction="sum"
    ),
    "of selected reals": lambda y, c, t: _selected_pairs(F.smooth_l1_loss, y, t, t > 0, beta=0.5),
    "the sum of selected rows": lambda y, c, t: _selected_pairs(F.mse_loss, y, t, c > 1, reduction="sum"),
    "a mean of what is selected": lambda y, c, t: (y - t).square()[c > 1].mean() + (y * t).masked_select(t > 0).sum(),
    "a ratio of sums, and numbers": lambda y, c, t: 1.0 - (2.0 - (y - t).square().sum() / t.square().sum()),
    "counts": lambda y, c, t: F.poisson_nll_loss(y, c[..., None].expand_as(y), full=True, reduction="sum"),
    "hinges": lambda y, c, t: F.hinge_embedding_loss(y, t.sign(), margin=2.0),
    "cosine": lambda y, c, t: F.cosine_embedding_loss(y.flatten(0, 1), t.flatten(0, 1), (c.flatten() > 1) * 2 - 1, 0.2),
    "divergences": lambda y, c, t: F.kl_div(y.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="sum"),
    "margins": lambda y, c, t: F.multi_margin_loss(y.flatten(0, 1), c.flatten(), p=2, weight=WEIGHTS),
    "margins of labels": lambda y, c, t: F.multilabel_margin_loss(
        y.flatten(0, 1), F.pad(c.flatten()[:, None], (0, 4), value=-1)
    ),
}


@pytest.mark.parametrize("name", APART)
def test_a_loss_is_a_sum_over_samples(name: str) -> None:
    graph = same_as_the_model(of(APART[name]), batch())
    complete(graph)
    typing = solve_batch(compact(graph))
    assert typing.strategies[graph.loss.name].outputs[graph.loss.index] == P
    assert not mixes_samples(graph, typing)


REFUSED: dict[str, Loss] = {
    "two masks": lambda y, c, t: F.mse_loss(y[c > 1], t[c > 1]),
    "written to since": lambda y, c, t: _written_to(y * 1, c > 1).mean(),
    "two shapes": lambda y, c, t: _selected_pairs(F.mse_loss, y, t[..., :1], c > 1),
    "words of old": lambda y, c, t: _selected_pairs(F.l1_loss, y, t, c > 1, size_average=False),
    "a median of two masks": lambda y, c, t: F.mse_loss(y[c > 1], t[c > 1], reduction="median"),
    "median of classes": lambda y, c, t: F.cross_entropy(y[c > 1], c[c > 1], reduction="median"),
    "median of CTC": lambda y, c, t: F.ctc_loss(
        _frames(y), c.clamp(min=1), *(torch.full((len(c),), n) for n in (12, 3)), reduction="median"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_uses_of_what_is_selected_run_as_written_and_unknown_reductions_are_refused(name: str) -> None:
    if "median" not in name:
        (note,) = trace(of(REFUSED[name]), (), batch()).notes
        assert "the whole model" in note and "depends on the values of tensors" in note
        return
    said = "depends on the values of tensors" if name.startswith("a") else "median is not a valid value for reduction"
    with pytest.raises(TraceError, match=said):
        trace(of(REFUSED[name]), (), batch())


def test_a_mean_of_what_is_selected_is_summed_in_single_precision() -> None:
    given = {key: value.half() if value.is_floating_point() else value for key, value in batch().items()}
    graph = trace(of(lambda y, c, t: (y * 50)[c > 1].mean()).half(), (), given)
    (total,) = [op for op in graph.ops if op.target == "aten.sum.default"]
    assert total.spec.dtype == torch.float32


def _written_to(values: Tensor, mask: Tensor) -> Tensor:
    selected = values[mask]
    values.mul_(2.0)
    return selected


def test_targets_that_lengths_part_elsewhere_give_no_loss() -> None:
    """As many as are selected of all rows, but not of each."""

    def loss(y: Tensor, c: Tensor, t: Tensor) -> Tensor:
        return F.ctc_loss(_frames(y), c[c > 0], torch.full((len(c),), 12), (c > 0).sum(1).roll(1), reduction="sum")

    model, given = of(loss), batch()
    assert model(**given).isfinite()
    assert evaluate(trace(model, (), given), given, dict(model.named_parameters()), {}).isnan()


WEIGHTED: dict[str, Loss] = {
    **{name: loss for name, loss in APART.items() if "weighted" in name},
    "weighted each": lambda y, c, t: F.cross_entropy(y.transpose(1, 2), c, WEIGHTS, reduction="none").mean(),
    "weighted each of logarithms": lambda y, c, t: F.nll_loss(
        y.transpose(1, 2).log_softmax(1), c, WEIGHTS, reduction="none"
    ).mean(),
}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1e-2), (torch.float64, 1e-6)], ids=str)
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_in_single_fit_other_logits(name: str, dtype: Any, tolerance: float, monkeypatch: Any) -> None:
    """They are buffers as a rule, which stay as they are; fake tensors take the pair, kernels do not."""
    given = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch().items()}
    model = of(WEIGHTED[name])
    expected = model(**batch())
    wanted = torch.autograd.grad(expected, list(model.parameters()))
    model = model.to(dtype)
    monkeypatch.setitem(globals(), "WEIGHTS", WEIGHTS.float())
    parameters = dict(model.named_parameters())
    found = evaluate(trace(model, (), given), given, parameters, {})
    got = torch.autograd.grad(found, list(parameters.values()))
    assert found.item() == pytest.approx(expected.item(), rel=tolerance)
    for one, other in zip(got, wanted, strict=True):
        assert (one - other).abs().max() <= 2 * tolerance * other.abs().max()


def test_what_torch_checks_is_said_to_be_left_out() -> None:
    graph = trace(of(APART["variances"]), (), batch())
    assert any("are not made in the program" in note and "test_losses.py:" in note for note in graph.notes)


def test_a_loss_of_more_elements_than_two_samples_have_is_traced_at_the_global_batch() -> None:
    model = of(lambda y, c, t: F.cross_entropy(y.flatten(0, 1), c.flatten(), reduction="none").topk(10)[0].mean())
    tried: list[int] = []

    def trace_at(samples: int | None) -> Graph:
        tried.append(samples or 2)
        return trace(model, (), batch(tried[-1]), exact=samples is not None)

    graph = for_batch(trace_at, 8, samples_apart)
    assert tried[:2] == [2, 8]
    assert graph.mixing
    assert graph.inputs[0].spec.shape[0] == 8


def test_a_norm_over_all_dims_has_a_rule() -> None:
    model = of(lambda y, c, t: y.norm() + F.mse_loss(y, t))
    assert for_batch(lambda n: trace(model, (), batch(n or 4)), 4, samples_apart).mixing


def test_a_table_whose_logits_are_cut_along_the_sequence_is_padded_for_a_split() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        logits = self.head(self.table(ids))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    model = model_of(forward, table=nn.Embedding(9, 8), head=nn.Linear(8, 9, bias=False))
    plan = check(model, {"ids": torch.randint(0, 9, (4, 6))}, ["tp=2", "head.weight=tp:S(0)"])
    assert {(entry.parameter, entry.length) for entry in plan.padding} == {("table.weight", 10), ("head.weight", 10)}

import logging
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import UsageError
from autopar.runtime.parallel_model import ParallelModel
from autopar.tracing.trace import trace
from tests.support.close import assert_close
from tests.support.distributed.returning import Returning
from tests.support.parallel import alone
from tests.support.said import refuses
from tests.support.small_models import model_of

pytestmark = pytest.mark.usefixtures("one_rank")


@cache
def traced(kind: str) -> Any:
    return Returning(kind).trace()


def build(kind: str) -> tuple[ParallelModel, nn.Module]:
    model = Returning(kind).build()
    return alone(model, traced(kind), batch=8, micro=2), model


def batch(samples: int = 8) -> dict[str, Tensor]:
    return Returning("pair").make_batch(samples)


def test_labels_may_be_left_out() -> None:
    parallel, model = build("metrics")
    found = parallel.predict({"idx": batch()["idx"]})
    wanted = model.eval()(**batch())
    assert found.loss is None
    assert found.more["accuracy"] is None
    assert_close(found.logits, wanted.logits)
    assert torch.equal(found.more["guess"], wanted.more["guess"])
    with pytest.raises(UsageError, match=r"gather is 'no'\. Write gather=True or gather=False"):
        parallel.predict({"idx": batch()["idx"]}, gather="no")
    pair, _ = build("pair")
    pair.eval()
    logits, loss = pair(batch()["idx"], None)
    assert loss is None
    assert logits.shape == (8, 8, 30)
    with pytest.raises(UsageError, match=r"The inputs of the batch are not those of the plan.*Add idx"):
        parallel.predict({"targets": batch()["targets"]})


def test_predictions_leave_everything_as_it_was() -> None:
    """In training: dropout is off, and the next step draws as if nothing had been."""
    parallel, model = build("pair")
    other, _ = build("pair")
    given = batch()
    parallel.train_step(given)
    other.train_step(given)
    gradients = parallel.full_gradients()
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            logits, _ = parallel.predict(given)
        assert_close(logits, model.eval()(**given)[0])
        assert not logits.requires_grad
        assert not logits.is_inference()
    assert parallel.training
    for name, value in parallel.full_gradients().items():
        assert torch.equal(value, gradients[name]), name
    assert parallel.train_step(given).item() == other.train_step(given).item()


def test_where_a_function_makes_the_loss_a_call_gives_it_in_training_and_the_output_in_eval() -> None:
    parallel, model = build("scores")
    given = batch()
    loss = parallel(**given)
    loss.backward()
    assert parallel.step_count == 1
    parallel.eval()
    found = parallel(idx=given["idx"])
    assert_close(found["logits"], model.eval()(idx=given["idx"])["logits"])
    assert parallel(**given).keys() == {"logits"}
    by_hand = functional.cross_entropy(found["logits"].flatten(0, 1), given["targets"].flatten(), ignore_index=-1)
    assert parallel.evaluate(given).item() == pytest.approx(by_hand.item())


def test_a_batch_by_position_has_the_names_of_forward() -> None:
    parallel, _ = build("pair")
    given = batch()
    for call in (lambda: parallel(*given.values(), given["idx"]), lambda: parallel(given["idx"], idx=given["idx"])):
        refuses(UsageError, r"inputs were given by position\. Expected at most .*: idx, targets, got", call)
    refuses(UsageError, r"The batch was given as a dict without a name.*par\(\*\*batch\)", parallel, given)


def _noise(self: Any, x: Tensor) -> dict[str, Any]:
    h = self.inner(x)
    return {"loss": h.square().mean(), "h": h, "noise": torch.rand_like(h), "unused": 1}


def test_an_output_that_cannot_be_made_is_none_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = model_of(_noise, inner=nn.Linear(4, 4)), torch.randn(4, 4)
    graph = trace(model, kwargs={"x": x})
    parallel = alone(model, graph)
    with caplog.at_level(logging.WARNING, "autopar"):
        found = [parallel.predict({"x": x}) for _ in range(2)]
    assert all(one["noise"] is None for one in found)
    assert_close(found[0]["h"], model(x)["h"])
    assert caplog.text.count("an output of the model is None, noise: it draws random numbers") == 1


def test_a_class_inside_of_a_function_is_given_by_its_fields() -> None:
    @dataclass
    class Inside:
        loss: Tensor
        h: Tensor

    def forward(self: Any, x: Tensor) -> Inside:
        h = self.inner(x)
        return Inside(h.square().mean(), h)

    model, x = model_of(forward, inner=nn.Linear(4, 4)), torch.randn(4, 4)
    parallel = autopar.parallelize(model, cluster="cpu:1x1", example_inputs={"x": x})
    found = parallel.predict({"x": x})
    assert_close((found.loss, found.h), (model(x).loss, model(x).h))

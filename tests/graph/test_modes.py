"""Modules train as those of the model do: what is in ``eval()`` inside of a model that trains stays so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.errors import TraceError
from autopar.graph.evaluate import evaluate
from autopar.graph.trace import trace
from tests.distributed.oddities import Checkpointed, Force, Resting
from tests.lower import unusual as u


def test_a_batch_norm_in_eval_reads_its_statistics_and_keeps_samples_apart() -> None:
    model = Resting()
    graph = trace(model, (), u.batch())
    assert "modules in eval() stay so while the others train: inner.1, inner.3" in graph.notes
    targets = [op.target for op in graph.ops]
    assert "aten.batch_norm.default" in targets
    assert not graph.mixing and "autopar.dropout" not in targets
    batch = u.batch()
    loss = evaluate(graph, batch, dict(model.named_parameters()), dict(model.named_buffers()), model)
    torch.testing.assert_close(loss, model(**batch))


def test_a_model_in_eval_itself_trains_whole() -> None:
    graph = trace(Resting().eval(), (), u.batch())
    targets = [op.target for op in graph.ops]
    assert "autopar.batch_norm_running" in targets and "autopar.dropout" in targets
    assert not any("eval()" in note for note in graph.notes)


def test_what_is_checkpointed_is_traced_as_it_is() -> None:
    graph = trace(Checkpointed(), (), u.batch())
    assert {p.fqn for p in graph.parameters} == {name for name, _ in Checkpointed().named_parameters()}


class Forces(u.Around):
    def __init__(self) -> None:
        super().__init__(Force)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.first(x).square().sum(), x, create_graph=True)
        return super().forward(force, y)


def test_a_gradient_that_the_model_itself_takes_is_refused_and_one_of_a_module_is_a_region() -> None:
    batch = u.batch()
    batch["x"].requires_grad_()
    with pytest.raises(TraceError, match=r"gradient that forward takes itself.*autograd\.grad.*a module of its own"):
        trace(Forces(), (), batch)
    (note,) = trace(u.Around(Force), (), u.batch()).notes
    assert "opaque" in note and "inner" in note

"""Modules train as those of the model do: what is in ``eval()`` inside of a model that trains stays so."""

from __future__ import annotations

from autopar.graph.interpreter import evaluate
from autopar.tracing.trace import trace
from tests.support.close import assert_close
from tests.support.distributed.oddities import Resting
from tests.support.lower import unusual as u


def test_a_batch_norm_in_eval_reads_its_statistics_and_keeps_samples_apart() -> None:
    model = Resting()
    graph = trace(model, (), u.batch())
    assert "modules in eval() stay so while the others train: inner.1, inner.3" in graph.notes
    targets = [op.target for op in graph.ops]
    assert "aten.batch_norm.default" in targets
    assert not graph.mixing and "autopar.dropout" not in targets
    batch = u.batch()
    loss = evaluate(graph, batch, dict(model.named_parameters()), dict(model.named_buffers()), model)
    assert_close(loss, model(**batch))


def test_a_model_in_eval_itself_trains_whole() -> None:
    graph = trace(Resting().eval(), (), u.batch())
    targets = [op.target for op in graph.ops]
    assert "autopar.batch_norm_running" in targets and "autopar.dropout" in targets
    assert not any("eval()" in note for note in graph.notes)

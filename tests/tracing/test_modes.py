"""Modules train as those of the model do: what is in ``eval()`` inside of a model that trains stays so."""

from __future__ import annotations

from autopar.tracing.trace import trace
from tests.support.distributed.oddities import Resting
from tests.support.lower import unusual as u
from tests.support.small_models import same_as_the_model


def test_a_batch_norm_in_eval_reads_its_statistics_and_keeps_samples_apart() -> None:
    graph = same_as_the_model(Resting(), u.batch())
    assert "modules in eval() stay so while the others train: inner.1, inner.3" in graph.notes
    targets = [op.target for op in graph.ops]
    assert "aten.batch_norm.default" in targets
    assert not graph.mixing and "autopar.dropout" not in targets


def test_a_model_in_eval_itself_trains_whole() -> None:
    graph = trace(Resting().eval(), (), u.batch())
    targets = [op.target for op in graph.ops]
    assert "autopar.batch_norm_running" in targets and "autopar.dropout" in targets
    assert not any("eval()" in note for note in graph.notes)

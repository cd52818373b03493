"""Training programs that a trace has trouble with: gradients in forward, older checkpoints, packed sequences, modules in eval()."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autopar.errors import TraceError
from autopar.tracing.trace import trace
from tests.support.distributed.oddities import Checkpointed, Force, Resting
from tests.support.lower import unusual as u
from tests.support.small_models import model_of, same_as_the_model


def test_what_is_checkpointed_is_traced_as_it_is() -> None:
    same_as_the_model(Checkpointed(), u.batch())


class Forces(u.Around):
    def __init__(self) -> None:
        super().__init__(Force)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (force,) = torch.autograd.grad(self.first(x).square().sum(), x, create_graph=True)
        return super().forward(force, y)


def test_a_gradient_that_the_model_itself_takes_is_refused_and_one_of_a_module_is_a_region() -> None:
    batch = u.batch()
    batch["x"].requires_grad_()
    with pytest.raises(TraceError, match=r"gradient that forward takes itself.*autograd\.grad.*a separate module"):
        trace(Forces(), (), batch)
    graph = same_as_the_model(u.Around(Force), u.batch())
    assert "opaque" in graph.notes[0] and "inner" in graph.notes[0] and not graph.mixing


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(8, 4, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=x.shape[1])[0].mean(1)


def test_packed_sequences_of_a_module_run_as_written_though_no_length_may_be_0() -> None:
    torch.manual_seed(0)
    model = model_of(lambda self, x, lengths: self.inner(x, lengths).square().mean(), inner=Packed())
    graph = same_as_the_model(model, {"x": torch.randn(4, 6, 8), "lengths": torch.tensor([3, 6, 1, 2])})
    assert "opaque" in graph.notes[0] and not graph.mixing


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

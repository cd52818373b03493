from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from autopar.errors import TraceError
from autopar.tracing import convert
from autopar.tracing.trace import trace
from tests.support.distributed.oddities import Checkpointed, Force, Resting
from tests.support.lower import unusual as u
from tests.support.small_models import model_of, same_as_the_model


def test_what_is_checkpointed_is_traced_as_it_is() -> None:
    same_as_the_model(Checkpointed(), u.batch())


class Forces(u.Around):
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


def _packed(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=x.shape[1])[0].mean(1)


def test_packed_sequences_of_a_module_run_as_written_though_no_length_may_be_0() -> None:
    inner = model_of(_packed, cells=nn.GRU(8, 4, batch_first=True))
    model = model_of(lambda self, x, lengths: self.inner(x, lengths).square().mean(), inner=inner)
    graph = same_as_the_model(model, {"x": torch.randn(4, 6, 8), "lengths": torch.tensor([3, 6, 1, 2])})
    assert "opaque" in graph.notes[0] and not graph.mixing


def test_a_batch_norm_in_eval_reads_its_statistics_and_keeps_samples_apart_unless_the_model_is_in_eval_itself() -> None:
    graph = same_as_the_model(Resting(), u.batch())
    assert "modules in eval() stay so while the others train: inner.1, inner.3" in graph.notes
    targets = [op.target for op in graph.ops]
    assert "aten.batch_norm.default" in targets
    assert not graph.mixing and "autopar.dropout" not in targets
    whole = trace(Resting().eval(), (), u.batch())  # the model itself in eval()
    targets = [op.target for op in whole.ops]
    assert "autopar.batch_norm_running" in targets and "autopar.dropout" in targets
    assert not any("eval()" in note for note in whole.notes)


def test_batch_norm_is_one_operator_and_gives_its_running_statistics() -> None:
    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.linear(x))
        return {"y": y, "loss": y.exp().mean()}

    model = model_of(forward, linear=nn.Linear(4, 6, bias=False), norm=nn.BatchNorm1d(6)).double()
    graph = same_as_the_model(model, {"x": torch.randn(6, 4, dtype=torch.float64)})
    assert [op.target for op in graph.ops if "norm" in op.target] == ["autopar.batch_norm_running"]
    names = [m.buffer.removeprefix("b_norm_") for m in graph.mutations]
    assert names == ["running_mean", "running_var", "num_batches_tracked"]


@pytest.mark.parametrize("momentum", [0.1, None])
def test_instance_norms_give_their_running_statistics(momentum: float | None) -> None:
    norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True, momentum=momentum)
    model = model_of(lambda self, x: self.norm(x).pow(3).mean(), norm=norm).double()
    graph = same_as_the_model(model, {"x": torch.randn(6, 4, 5, dtype=torch.float64)}, steps=2)
    assert [m.buffer for m in graph.mutations] == ["b_norm_running_mean", "b_norm_running_var"]
    assert not graph.mixing


def picked() -> nn.Module:
    """The row of each sample at a place of its own, counted from the front or from the end."""

    def forward(self: Any, x: Tensor, place: Tensor) -> Tensor:
        return self.linear(x)[torch.arange(x.shape[0]), place].square().sum()

    return model_of(forward, linear=nn.Linear(4, 4))


def test_a_row_of_each_sample_is_a_gather() -> None:
    batch = {"x": torch.randn(3, 5, 4, dtype=torch.float64), "place": torch.tensor([0, -1, 3])}
    graph = same_as_the_model(picked().double(), batch)
    targets = [op.target for op in graph.ops]
    assert "aten.gather.default" in targets
    assert "aten.index.Tensor" not in targets


def test_a_call_that_no_form_fits_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(builder: object, call: object) -> None:
        raise RuntimeError("no such form")

    monkeypatch.setitem(convert._ALL_HANDLERS, "aten.index.Tensor", fails)
    batch = {"x": torch.ones(3, 5, 4), "place": torch.tensor([0, 1, 3])}
    with pytest.raises(TraceError, match="no such form") as caught:
        trace(picked(), (), batch)
    assert "test_regions.py" in caught.value.where
    assert "aten.index.Tensor" in caught.value.problem

import pickle
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.graph.elements import Leaf, Outputs
from autopar.graph.graph import Graph, Ref
from autopar.tracing.program_ends import Kept
from autopar.tracing.trace import trace
from tests.support import zoo
from tests.support.distributed.returning import Returning
from tests.support.small_models import model_of

KINDS = ["llama_tied", "t5", "mlp", "encoder", "handwritten"]


def described(graph: Graph) -> list[str]:
    parts = (*graph.inputs, *graph.parameters, *graph.prelude, *graph.ops, *graph.blocks, *graph.sums, *graph.mutations)
    held = [
        f"{b.name} {b.fqn} {b.spec} {None if b.value is None else b.value.flatten()[:64].tolist()}"
        for b in graph.buffers
    ]
    return [*map(str, parts), *held, str(graph.loss), graph.fingerprint, *graph.notes, graph.name, str(graph.exact)]


def _statistics(self: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Changes buffers, so that its program is decomposed, that of its outputs too."""
    h = self.norm(self.fold(x)).relu()
    features = functional.adaptive_avg_pool2d(h, 1).view(h.shape[0], -1)
    early = functional.layer_norm(features.view(-1, 2, 4), (4,)).view(-1, 8)
    logits = self.out(features.flatten(1))
    return {
        "loss": functional.cross_entropy(logits, y), "early": early, "shares": functional.softmax(logits, -1),
        "unit": functional.normalize(features, dim=-1),
    }  # fmt: skip


@pytest.mark.parametrize("kind", [*KINDS, "metrics", "statistics"])
def test_the_graph_is_what_it_is_without_outputs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators that only outputs need are none of the plan's: names, order, notes and fingerprint are those of the loss."""

    def traced() -> Graph:
        if kind in KINDS:
            model, batch = zoo.subject(kind, layers=1)
            return trace(model, (), batch)
        if kind == "metrics":
            return trace(Returning(kind).build(), kwargs=Returning(kind).make_batch(2))
        model = model_of(_statistics, fold=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(8), out=nn.Linear(8, 5))
        return trace(model, kwargs={"x": torch.randn(4, 3, 8, 8), "y": torch.arange(4)})

    found = traced()
    with monkeypatch.context() as patched:
        patched.setattr(Kept, "take", lambda self, output, loss: [])
        without = traced()
    assert described(found) == described(without)
    assert len(found.outputs.leaves) >= len(without.outputs.leaves) == 0


def outputs_of(model: nn.Module, **batch: Tensor) -> Outputs:
    found = trace(model, kwargs=batch).outputs
    assert pickle.loads(pickle.dumps(found)) == found
    return found


class Point(NamedTuple):
    """A structure inside of another one."""

    x: Tensor
    label: str


def _odd(self: Any, x: Tensor, y: Tensor) -> dict[str, Any]:
    """What is no tensor beside what is."""
    h = self.inner(x)
    loss = (h - y).square().mean()
    return {
        "loss": loss, "h": h, "same": h, "point": Point(h.relu(), "here"), "count": x.shape[0], "half": x.shape[0] / 2,
        "name": "odd", "object": object(), "unused": self.unused(h), "noise": torch.rand_like(h),
        "error": (h.detach() - y).abs().sum() / x.shape[0], "past_key_values": (h, h), "given": x,
    }  # fmt: skip


def test_what_is_kept_of_a_structure() -> None:
    model = model_of(_odd, inner=nn.Linear(4, 4), unused=nn.Linear(4, 2))
    odd = outputs_of(model, x=torch.randn(2, 4), y=torch.randn(2, 4))
    places = dict(zip(odd.structure.names, odd.structure.items, strict=True))
    assert places["loss"].kind == "loss"
    assert places["same"].index == places["h"].index
    assert places["point"].type == (Point.__module__, "Point")
    assert [(places[name].value, places[name].twice) for name in ("count", "half")] == [(2, 4), (1.0, 2.0)]
    assert (places["name"].value, places["object"].value, places["past_key_values"].kind) == ("odd", None, "value")
    leaves = {leaf.name: leaf for leaf in odd.leaves}
    assert leaves["given"] == Leaf(name="given", ref=Ref("x"), reads=("x",))
    assert leaves["error"].reads == ("x", "y")
    assert leaves["h"].reads == ("x",)
    assert leaves["noise"].ref is None
    assert "draws random numbers" in leaves["noise"].reason
    assert {p.fqn for p in odd.parameters} == {"unused.weight", "unused.bias"}
    # numbers that count samples follow the batch
    divided = {at: [op.args[1] for op in odd.ops_at(at) if op.target == "aten.div.Tensor"] for at in (2, 5, 8)}
    assert divided == {2: [2], 5: [5], 8: [8]}


def test_a_loss_alone_has_no_outputs_beside_it() -> None:
    model = model_of(lambda self, x, y: functional.cross_entropy(self.inner(x), y), inner=nn.Linear(4, 3))
    found = outputs_of(model, x=torch.randn(2, 4), y=torch.tensor([0, 1]))
    assert (found.structure.kind, found.leaves, found.taps) == ("loss", (), ())

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.graph.graph import Graph, Op, Ref, TensorSpec
from autopar.models.resolve import resolve_model
from autopar.tracing.blocks import find_blocks
from autopar.tracing.trace import trace
from tests.support.small_models import model_of
from tests.support.zoo import traced

SPEC = TensorSpec(shape=(2, 8), dtype=torch.float32, requires_grad=True)


def hashes(graph: Graph) -> list[str]:
    return [block.hash for block in graph.blocks]


@cache
def layers(family: str, count: int, **more: float) -> Graph:
    sizes = {"layers": count, "hidden": 32, "heads": 4, "vocab": 64, **more}
    return resolve_model(f"{family}:{','.join(f'{k}={v}' for k, v in sizes.items())}", sequence_length=8).trace()


@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("count", [1, 3])
def test_every_layer_is_a_block_between_embedding_and_head(family: str, count: int) -> None:
    graph = layers(family, count, **({"dropout": 0.5} if family == "gpt" else {}))  # salts are no part of a layer
    found = hashes(graph)
    assert len(found) == count + 2
    assert len(set(found[1:-1])) == 1
    assert len({found[0], found[1], found[-1]}) == 3
    stem = "transformer.h" if family == "gpt" else "model.layers"
    assert [b.label for b in graph.blocks[1:-1]] == [f"{stem}.{i}" for i in range(count)]
    for block in graph.blocks[1:]:
        assert [graph.spec(ref).shape for ref in graph.block_inputs(block)] == [(2, 8, 32)], "one tensor crosses a cut"
    embedding, *middle, head = (graph.block_ops(b) for b in graph.blocks)
    assert any(op.target == "aten.embedding.default" for op in embedding)
    assert all(op.target != "aten.embedding.default" for ops in (*middle, head) for op in ops)
    assert [op.target for op in head if "norm" in op.module or op.target == "autopar.cross_entropy_sum"]


def test_layers_hash_equally_however_many_there_are_and_whatever_the_names() -> None:
    assert hashes(layers("llama", 2))[1] == hashes(layers("llama", 3))[1]
    graph = layers("llama", 3)
    renamed = {op.name: f"q{i}" for i, op in enumerate(graph.ops)}
    renamed |= {p.name: f"w{i}" for i, p in enumerate(graph.parameters)}
    fresh = lambda ref: Ref(renamed.get(ref.name, ref.name), ref.index)
    ops = [
        replace(op.with_operands(tuple(map(fresh, op.operands))), name=renamed[op.name], source="", module="")
        for op in graph.ops
    ]
    known = {r for op in (*graph.prelude, *graph.ops) for r in op.operands}
    specs = {fresh(r): graph.spec(r) for r in known}
    specs |= {Ref(renamed[op.name]): op.spec for op in graph.ops}
    blocks = find_blocks(ops, specs, frozenset(renamed[p.name] for p in graph.parameters), fresh(graph.loss))
    assert [b.hash for b in blocks] == hashes(graph)


def test_a_literal_or_a_shape_makes_another_hash() -> None:
    plain = hashes(layers("gpt", 1))[1]
    assert hashes(layers("gpt", 1, heads=8))[1] != plain
    assert hashes(layers("gpt", 1, ffn=64))[1] != plain
    usual = "hf:gpt2?n_layer=1&n_embd=32&n_head=4&vocab_size=64"
    one, other = (resolve_model(usual + more, sequence_length=8) for more in ("", "&layer_norm_epsilon=0.1"))
    assert hashes(one.trace())[1] != hashes(other.trace())[1]


def _dropped(self: Any, x: Tensor) -> Tensor:
    y = self.down(self.up(x).tanh())
    if self.kept < 1:  # stochastic depth
        y = y / self.kept * (self.kept + torch.rand(len(x), 1)).floor()
    return x + y  # type: ignore[no-any-return]


def _layer(width: int, kept: float = 1.0) -> nn.Module:
    return model_of(_dropped, up=nn.Linear(4, width), down=nn.Linear(width, 4), kept=kept)


def _plain() -> nn.Module:
    """Calls nothing that a :func:`_layer` does not call as well."""
    return model_of(lambda self, x: x + self.down(self.up(x)), up=nn.Linear(4, 8), down=nn.Linear(8, 4))


def _in_order(self: Any, x: Tensor) -> Tensor:
    x = self.first(x)
    for stage in self.stages:
        for layer in stage:
            x = layer(x)
    return x.square().mean()


@pytest.mark.parametrize("other", [partial(_layer, 16), _plain])
@pytest.mark.parametrize("count", [3, 6, 8])
def test_layers_of_several_kinds_in_turn_are_blocks_of_their_own(count: int, other: Callable[[], nn.Module]) -> None:
    in_turn = nn.ModuleList([other() if i % 3 == 2 else _layer(8) for i in range(count)])
    graph = trace(model_of(_in_order, first=nn.Linear(4, 4), layers=in_turn, stages=[in_turn]), (torch.randn(2, 4),))
    first, *layers, last = graph.blocks
    assert [b.label for b in layers] == [f"layers.{i}" for i in range(count)]
    one, third = layers[0].hash, layers[2].hash
    assert [b.hash for b in layers] == [third if i % 3 == 2 else one for i in range(count)]
    assert len({first.hash, one, third, last.hash}) == 4
    assert all([graph.spec(ref).shape for ref in graph.block_inputs(b)] == [(2, 4)] for b in (*layers, last))


def test_blocks_begin_with_layers_below_modules_with_a_number_of_their_own() -> None:
    """As much crosses a cut in the midst of a layer, and the second half of the first layer is that of the others."""
    layers = [nn.Sequential(nn.Linear(6 if i == 0 else 4, 4), nn.Tanh(), nn.Linear(4, 4)) for i in range(6)]
    model = model_of(_in_order, first=nn.Identity(), stages=nn.ModuleList([nn.ModuleList(layers)]))
    graph = trace(model, (torch.randn(2, 6),))
    assert [b.label for b in graph.blocks[:6]] == [f"stages.0.{i}" for i in range(6)]
    assert len(set(hashes(graph)[1:6])) == 1


def test_layers_of_stochastic_depth_are_equal_blocks_under_the_names_of_their_own_modules() -> None:
    stages = [nn.ModuleList([_layer(8, 0.9 - 0.1 * i - 0.05 * k) for k in range(2)]) for i in range(3)]
    model = model_of(_in_order, first=nn.Linear(4, 4), stages=nn.ModuleList(stages))
    graph = trace(model, (torch.randn(2, 4),))
    assert [b.label for b in graph.blocks[1:-1]] == [f"stages.{i}.{k}" for i in range(3) for k in range(2)]
    assert len(set(hashes(graph)[1:-1])) == 1
    numbers = {op.args[1] for op in graph.ops if op.target == "aten.div.Tensor"}
    assert len(numbers) == 6, "each drops as it did"


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        (("conv1", "act", "fc1", "out", "fc2"), ["conv1+act", "fc1+out", "fc2"]),
        (("fc1", "fc2", "fc1"), ["fc1+fc2"]),  # a module that is called again ends nowhere
        (("encoder", "decoder"), ["encoder+decoder"]),
    ],
)
def test_without_repeats_modules_with_a_number_at_their_end_begin_blocks(names: list[str], labels: list[str]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        for i, name in enumerate(names):
            x = getattr(self.net, name)(x) ** (i + 2)  # no two calls are equal
        return x.mean()

    net = model_of(forward, **{name: nn.Linear(4, 4) for name in names})
    graph = trace(model_of(forward, net=net), (torch.randn(2, 4),))
    assert [block.label for block in graph.blocks] == labels
    assert [block.start for block in graph.blocks[1:]] == [block.stop for block in graph.blocks[:-1]]


@pytest.mark.slow
def test_encoder_and_decoder_are_both_found() -> None:
    found = hashes(traced("t5", layers=3))
    repeated = [h for h in found if found.count(h) > 1]
    assert len(repeated) == 4, "the first of three layers computes the positions for the others"
    assert len(set(repeated)) == 2


@settings(max_examples=30, deadline=None)
@given(
    body=st.lists(st.sampled_from(["relu", "tanh", "exp"]), min_size=1, max_size=5), count=st.integers(2, 6),
    before=st.integers(0, 3), after=st.integers(0, 3),
)  # fmt: skip
def test_blocks_partition_and_repeats_are_found(body: list[str], count: int, before: int, after: int) -> None:
    ops, specs, parameters = list[Op](), {Ref("x"): SPEC}, set[str]()
    for number, target in enumerate(["neg"] * before + ["mul", *body] * count + ["sin"] * after):
        args: tuple[Ref, ...] = (Ref(ops[-1].name) if ops else Ref("x"),)
        if target == "mul":
            parameters.add(f"w{number}")
            args += (Ref(f"w{number}"),)
        ops.append(Op(name=f"v{number}", target=f"aten.{target}.default", args=args, outputs=(SPEC,)))
        specs |= dict.fromkeys((Ref(f"v{number}"), *args), SPEC)
    blocks = find_blocks(ops, specs, frozenset(parameters), Ref(ops[-1].name))
    assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
    assert blocks[-1].stop == len(ops)
    repeated = [b for b in blocks if sum(o.hash == b.hash for o in blocks) > 1]
    assert len(repeated) == count
    assert all(b.stop - b.start == len(body) + 1 for b in repeated)
    assert (len(blocks) - count) == (before > 0) + (after > 0)

"""Small graphs for searches: made by hand, or traced of a MODEL."""

from functools import cache

import torch

from autopar import api
from autopar.graph.graph import Block, Graph, Op, Parameter, Ref, TensorSpec
from autopar.models.resolve import resolve_model
from autopar.plan.plan import PrecisionName
from tests.support.graphs_by_hand import graph_of_ops


def spec(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, requires_grad=grad)


def op(name: str, target: str, args: tuple[object, ...], *shape: int, grad: bool = True) -> Op:
    return Op(name=name, target=target, args=args, outputs=(spec(*shape, grad=grad),))


def mlp(*, layers: int = 1, batch: int = 4, width: int = 8, hidden: int = 16, turn: int = 0) -> Graph:
    """``layers`` times x + down(silu(up(x))), then the sum; every layer of number ``turn`` is twice as wide inside."""
    ops: list[Op] = [op("start", "aten.linear.default", (Ref("x"), Ref("w_in")), batch, width)]
    parameters = [Parameter(name="w_in", fqn="w_in", spec=spec(width, width))]
    blocks = [Block(index=0, start=0, stop=1, hash="in", label="start")]
    before = "start"
    for i in range(layers):
        is_wide = turn > 0 and (i + 1) % turn == 0
        inside = 2 * hidden if is_wide else hidden
        parameters += [
            Parameter(name=f"up{i}", fqn=f"layers.{i}.up", spec=spec(inside, width)),
            Parameter(name=f"down{i}", fqn=f"layers.{i}.down", spec=spec(width, inside)),
        ]
        ops += [
            op(f"a{i}", "aten.linear.default", (Ref(before), Ref(f"up{i}")), batch, inside),
            op(f"s{i}", "aten.silu.default", (Ref(f"a{i}"),), batch, inside),
            op(f"b{i}", "aten.linear.default", (Ref(f"s{i}"), Ref(f"down{i}")), batch, width),
            op(f"r{i}", "aten.add.Tensor", (Ref(before), Ref(f"b{i}")), batch, width),
        ]
        kind = "wide" if is_wide else "layer"
        blocks.append(Block(index=i + 1, start=len(ops) - 4, stop=len(ops), hash=kind, label=f"layers.{i}"))
        before = f"r{i}"
    ops.append(op("loss", "aten.sum.default", (Ref(before),)))
    blocks.append(Block(index=layers + 1, start=len(ops) - 1, stop=len(ops), hash="out", label="loss"))
    return graph_of_ops("mlp", ops, {"x": spec(batch, width, grad=False)}, parameters, blocks=tuple(blocks))


def attention(*, seq: int = 4, heads: int = 2) -> Graph:
    """One attention with shared input: q = k = v projections of x, attention over heads, sum."""
    names, batch, width, each = ("q", "k", "v"), 1, 4, 4 // heads
    parameters = [Parameter(name="w0", fqn="w0", spec=spec(width, width))]
    parameters += [Parameter(name=f"w{n}", fqn=f"attn.{n}", spec=spec(width, width)) for n in names]
    ops = [op("x2", "aten.linear.default", (Ref("x"), Ref("w0")), batch, seq, width)]
    for n in names:
        ops += [
            op(n, "aten.linear.default", (Ref("x2"), Ref(f"w{n}")), batch, seq, width),
            op(f"{n}v", "aten.view.default", (Ref(n), (batch, seq, heads, each)), batch, seq, heads, each),
            op(f"{n}t", "aten.transpose.int", (Ref(f"{n}v"), 1, 2), batch, heads, seq, each),
        ]
    core = (Ref("qt"), Ref("kt"), Ref("vt"))
    ops += [
        op("core", "aten.scaled_dot_product_attention.default", core, batch, heads, seq, each),
        op("loss", "aten.sum.default", (Ref("core"),)),
    ]
    return graph_of_ops("attention", ops, {"x": spec(batch, seq, width, grad=False)}, parameters)


def llama_block(
    *, seq: int = 4096, hidden: int = 8192, heads: int = 64, ffn: int = 28672, batch: int = 1, layers: int = 2
) -> Graph:
    """Llama-like layers (without rotary embedding) in bf16 between an embedding and a sum."""
    half = torch.bfloat16
    each = hidden // heads
    parameters: list[Parameter] = [Parameter(name="table", fqn="table", spec=spec(32000, hidden, dtype=half))]
    ops: list[Op] = []

    def add(name: str, target: str, args: tuple[object, ...], *shape: int) -> Ref:
        ops.append(Op(name=name, target=target, args=args, outputs=(spec(*shape, dtype=half),)))
        return Ref(name)

    def weight(name: str, *shape: int) -> Ref:
        parameters.append(Parameter(name=name, fqn=name, spec=spec(*shape, dtype=half)))
        return Ref(name)

    x = add("embedding", "aten.embedding.default", (Ref("table"), Ref("ids")), batch, seq, hidden)
    blocks = [Block(index=0, start=0, stop=1, hash="embedding", label="embedding")]
    flat, split = (batch, seq, hidden), (batch, heads, seq, each)
    for i in range(layers):
        start = len(ops)
        n = add(f"norm{i}", "aten.layer_norm.default", (x, (hidden,), weight(f"n{i}", hidden)), *flat)
        qkv = []
        for k in "qkv":
            y = add(f"{k}{i}", "aten.linear.default", (n, weight(f"w{k}{i}", hidden, hidden)), *flat)
            y = add(f"{k}v{i}", "aten.view.default", (y, (batch, seq, heads, each)), batch, seq, heads, each)
            qkv.append(add(f"{k}t{i}", "aten.transpose.int", (y, 1, 2), *split))
        y = add(f"core{i}", "aten.scaled_dot_product_attention.default", (*qkv, None, 0.0, True), *split)
        y = add(f"ct{i}", "aten.transpose.int", (y, 1, 2), batch, seq, heads, each)
        y = add(f"cv{i}", "aten.view.default", (y, flat), *flat)
        y = add(f"o{i}", "aten.linear.default", (y, weight(f"wo{i}", hidden, hidden)), *flat)
        x = add(f"h{i}", "aten.add.Tensor", (x, y), *flat)
        n = add(f"after{i}", "aten.layer_norm.default", (x, (hidden,), weight(f"na{i}", hidden)), *flat)
        g = add(f"gate{i}", "aten.linear.default", (n, weight(f"wg{i}", ffn, hidden)), batch, seq, ffn)
        g = add(f"silu{i}", "aten.silu.default", (g,), batch, seq, ffn)
        u = add(f"up{i}", "aten.linear.default", (n, weight(f"wu{i}", ffn, hidden)), batch, seq, ffn)
        g = add(f"mul{i}", "aten.mul.Tensor", (g, u), batch, seq, ffn)
        y = add(f"down{i}", "aten.linear.default", (g, weight(f"wd{i}", hidden, ffn)), *flat)
        x = add(f"out{i}", "aten.add.Tensor", (x, y), *flat)
        blocks.append(Block(index=i + 1, start=start, stop=len(ops), hash="layer", label=f"layers.{i}"))
    add("loss", "aten.sum.default", (x,))
    blocks.append(Block(index=layers + 1, start=len(ops) - 1, stop=len(ops), hash="loss", label="loss"))
    ids = TensorSpec(shape=(batch, seq), dtype=torch.int64)
    return graph_of_ops("llama", ops, {"ids": ids}, parameters, blocks=tuple(blocks))


@cache
def family(text: str, tokens: int, precision: PrecisionName = "fp32") -> Graph:
    """Of a MODEL without weights, traced once in a process."""
    source = resolve_model(text, sequence_length=tokens)
    return api.trace(source.model, example_inputs=source.example_inputs, precision=precision, name=source.name)

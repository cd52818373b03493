"""Test help: a small graph made by hand (two layers of linear, gelu, linear, add), and typings for it."""

from fractions import Fraction

import torch

from autopar.graph.graph import Block, Graph, Op, Parameter, Ref, TensorSpec
from autopar.plan.mesh import P, R, S, Type
from autopar.rules.strategy import Strategy, Typing
from tests.support.graphs_by_hand import graph_of_ops

BATCH, SEQ, HIDDEN, FFN, LAYERS = 4, 8, 16, 32, 2


def spec(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> TensorSpec:
    return TensorSpec(shape=shape, dtype=dtype, requires_grad=grad)


def op(name: str, target: str, *args: object, out: TensorSpec, **kwargs: object) -> Op:
    return Op(name=name, target=target, args=args, kwargs=tuple(kwargs.items()), outputs=(out,))


def mlp_graph(dropout: float = 0.0) -> Graph:
    """x -> for each layer x + linear(gelu(linear(x))) + bias -> sum of squares over the count of kept tokens."""
    hidden, ffn = spec(BATCH, SEQ, HIDDEN, grad=True), spec(BATCH, SEQ, FFN, grad=True)
    scalar = spec(grad=True)
    parameters: list[Parameter] = []
    ops: list[Op] = []
    blocks: list[Block] = []
    stream = Ref("x")
    for i in range(LAYERS):
        start = len(ops)
        shapes = {f"up{i}": (FFN, HIDDEN), f"up_bias{i}": (FFN,), f"down{i}": (HIDDEN, FFN), f"bias{i}": (HIDDEN,)}
        parameters += [Parameter(name=n, fqn=f"layers.{n}", spec=spec(*s, grad=True)) for n, s in shapes.items()]
        ops.append(op(f"h{i}", "aten.linear.default", stream, Ref(f"up{i}"), Ref(f"up_bias{i}"), out=ffn))
        ops.append(op(f"g{i}", "aten.gelu.default", Ref(f"h{i}"), out=ffn))
        down = Ref(f"g{i}")
        if dropout:
            ops.append(op(f"d{i}", "autopar.dropout", down, dropout, i, out=ffn))
            down = Ref(f"d{i}")
        ops.append(op(f"y{i}", "aten.linear.default", down, Ref(f"down{i}"), None, out=hidden))
        ops.append(op(f"z{i}", "aten.add.Tensor", Ref(f"y{i}"), Ref(f"bias{i}"), out=hidden))
        ops.append(op(f"r{i}", "aten.add.Tensor", stream, Ref(f"z{i}"), out=hidden))
        stream = Ref(f"r{i}")
        blocks.append(Block(index=i, start=start, stop=len(ops), hash=f"layer{min(i, 1)}", label=f"layers.{i}"))
    start = len(ops)
    ops.append(op("square", "aten.mul.Tensor", stream, stream, out=hidden))
    ops.append(op("total", "aten.sum.default", Ref("square"), out=scalar))
    ops.append(op("loss", "aten.div.Tensor", Ref("total"), Ref("count_as_float"), out=scalar))
    blocks.append(Block(index=LAYERS, start=start, stop=len(ops), hash="head", label=""))
    tokens = spec(BATCH, SEQ, dtype=torch.int64)
    prelude = (
        op("valid", "aten.ne.Scalar", Ref("keep"), 0, out=spec(BATCH, SEQ, dtype=torch.bool)),
        op("count", "aten.sum.default", Ref("valid"), out=spec(dtype=torch.int64)),
        op("count_as_float", "aten.to.dtype", Ref("count"), torch.float32, out=spec()),
    )
    inputs = {"x": spec(BATCH, SEQ, HIDDEN), "keep": tokens}
    return graph_of_ops("mlp", ops, inputs, parameters, blocks=tuple(blocks), prelude=prelude)


def strategy(name: str, inputs: tuple[Type, ...], output: Type, work: Fraction = Fraction(1)) -> Strategy:
    return Strategy(name=name, inputs=inputs, outputs=(output,), work=work)


def tensor_typing(size: int) -> Typing:
    """Megatron's: the hidden dim of each MLP is split, and between MLPs the sequence."""
    chosen: dict[str, Strategy] = {
        "square": strategy("b", (S(1), S(1)), S(1)),
        "total": strategy("b", (S(1),), P),
        "loss": strategy("b", (P, R), P),
    }
    parameters: dict[str, Type] = {}
    for i in range(LAYERS):
        chosen[f"h{i}"] = strategy("n", (R, S(0), S(0)), S(2))
        chosen[f"g{i}"] = chosen[f"d{i}"] = strategy("n", (S(2),), S(2))
        chosen[f"y{i}"] = strategy("k", (S(2), S(1)), P)
        chosen[f"z{i}"] = strategy("b", (S(1), R), S(1))
        chosen[f"r{i}"] = strategy("b", (S(1), S(1)), S(1))
        parameters |= {f"up{i}": S(0), f"up_bias{i}": S(0), f"down{i}": S(1)}
    return Typing(axis="tp", size=Fraction(size), strategies=chosen, parameters=parameters)

"""Small problems at random: a chain of few blocks on few devices, for which every plan can be priced."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from autopar.graph.graph import Argument, Block, Graph, Input, Op, Parameter, Ref, TensorSpec
from autopar.plan.plan import PrecisionName
from tools.campaigns.product import Small, typings

GPUS = ("h100-sxm5-80gb", "a100-sxm4-40gb", "a10g-24gb", "l4-24gb")
NIC_BYTES_PER_S = (1e9, 5e9, 25e9)
LAYOUTS_UNTIL = 30
"""Every third seed below has a problem whose layouts are free: they take the most time by far."""

MAX_LAYOUTS = 1000
"""Of a drawn model on two ranks of ``tp``: more take too long to price in all."""
TINY = ("linear", "silu", "linear", "gelu", "norm")
LARGE = ("mlp", "mlp", "glu", "linear", "normed")
CODES = {"linear": "L", "silu": "S", "gelu": "G", "norm": "N", "mlp": "M", "glu": "U", "normed": "R"}


@dataclass(slots=True)
class _Chain:
    """A graph under construction: values of [batch, rows, width] pass from block to block."""

    batch: int
    rows: int
    dtype: torch.dtype
    ops: list[Op] = field(default_factory=list)
    parameters: dict[str, Parameter] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)
    at: tuple[Ref, int] = (Ref("x"), 0)

    def op(self, target: str, args: Sequence[Argument], *shape: int) -> Ref:
        name = f"{target}{len(self.ops)}"
        spec = TensorSpec(shape=shape, dtype=self.dtype, requires_grad=True)
        overload = "Tensor" if target in ("add", "mul") else "default"
        self.ops.append(Op(name=name, target=f"aten.{target}.{overload}", args=tuple(args), outputs=(spec,)))
        return Ref(name)

    def weight(self, *shape: int, tied: bool = False) -> Ref:
        name = "tied" if tied else f"w{len(self.parameters)}"
        spec = TensorSpec(shape=shape, dtype=self.dtype, requires_grad=True)
        self.parameters.setdefault(name, Parameter(name=name, fqn=f"{name}.weight", spec=spec))
        return Ref(name)

    def linear(self, x: Ref, before: int, after: int, *, tied: bool = False) -> Ref:
        return self.op("linear", (x, self.weight(after, before, tied=tied)), self.batch, self.rows, after)

    def point(self, name: str, args: Sequence[Argument], width: int) -> Ref:
        return self.op(name, args, self.batch, self.rows, width)

    def norm(self, x: Ref, width: int) -> Ref:
        return self.point("layer_norm", (x, (width,), self.weight(width)), width)

    def block(self, kind: str, hidden: int, *, tied: bool = False, ends: bool = False) -> None:
        start, (x, width) = len(self.ops), self.at
        after = width
        if kind == "linear":
            after = width if tied else hidden
            y = self.linear(x, width, after, tied=tied)
        elif kind in ("silu", "gelu"):
            y = self.point(kind, (x,), width)
        elif kind == "norm":
            y = self.norm(x, width)
        else:
            y = self._layer(kind, x, width, hidden)
        if ends:
            self.op("sum", (y,))
        self.at = (y, after)
        text = f"{kind} {width} {after} {hidden} {tied} {ends} {start == 0}"
        index = len(self.blocks)
        self.blocks.append(Block(index=index, start=start, stop=len(self.ops), hash=text, label=f"layers.{index}"))

    def _layer(self, kind: str, x: Ref, width: int, hidden: int) -> Ref:
        """x + down(f(up(x))), with a norm before or a gate."""
        inner = self.norm(x, width) if kind == "normed" else x
        up = self.linear(inner, width, hidden)
        made = self.point("silu", (up,), hidden)
        if kind == "glu":
            made = self.point("mul", (made, self.linear(inner, width, hidden)), hidden)
        return self.point("add", (x, self.linear(made, hidden, width)), width)

    def graph(self, width: int) -> Graph:
        x = TensorSpec(shape=(self.batch, self.rows, width), dtype=self.dtype)
        name = "".join(CODES[block.hash.split()[0]] for block in self.blocks)
        return Graph(
            name=name,
            batch_size=self.batch,
            inputs=(Input(name="x", spec=x, batch_dim=0),),
            parameters=tuple(self.parameters.values()),
            buffers=(),
            prelude=(),
            ops=tuple(self.ops),
            blocks=tuple(self.blocks),
            loss=Ref(self.ops[-1].name),
            fingerprint=name,
        )


def draw(seed: int) -> Small:
    """A problem: with larger blocks, more cuts and no ``tp``, or (of some seeds) with layouts that are free."""
    rng = random.Random(seed)
    splits = seed % 3 == 0 and seed < LAYOUTS_UNTIL
    world = rng.choice((2, 2, 4) if splits else (2, 4, 4, 8))
    precision: PrecisionName = rng.choice(("fp32", "bf16"))
    graph = _layouts(rng, precision) if splits else _stages(rng, world, precision)
    while splits and len(list(islice(typings(graph, 2), MAX_LAYOUTS + 1))) > MAX_LAYOUTS:
        graph = _layouts(rng, precision)
    return Small(
        graph=graph,
        cluster=_cluster(rng, world, precision),
        global_batch_size=rng.choice((2, 4)) if splits else rng.choice((4, 8, 6) if world < 8 else (8,)),
        precision=precision,
        optimizer=rng.choice(("adamw", "sgd")),
        splits=splits,
        is_whole=not splits and seed % 2 == 0,
    )


def tiny() -> Small:
    """The least problem whose layouts are free: a norm and an activation on two ranks."""
    chain = _Chain(batch=2, rows=4095, dtype=torch.float32)
    chain.at = (Ref("x"), 4096)
    chain.block("norm", 4096)
    chain.block("silu", 4096, ends=True)
    return Small(graph=chain.graph(4096), cluster="a10g-24gb:1x2", global_batch_size=2)


def _cluster(rng: random.Random, world: int, precision: str) -> str:
    """GPUs of one or two nodes; in one of six (of float32) ranks of a CPU that may share its cores."""
    if precision == "fp32" and rng.random() < 1 / 6:
        return f"cpu:1x{world}?cores={rng.choice((world, world // 2))}"
    nodes = rng.choice((1, 2))
    text = f"{rng.choice(GPUS)}:{nodes}x{world // nodes}"
    return text if nodes == 1 else f"{text}?nic_bandwidth={rng.choice(NIC_BYTES_PER_S):g}"


def _chain(rng: random.Random, precision: str) -> _Chain:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return _Chain(batch=2, rows=rng.choice((256, 1024, 4096)), dtype=dtype)


def _layouts(rng: random.Random, precision: str) -> Graph:
    """Two to four blocks of one operator each; some of them have parameters."""
    count = rng.choice((2, 3, 4))
    chain, width = _chain(rng, precision), rng.choice((256, 1024, 4096))
    chain.rows -= count > 2  # an odd number: no split of rows
    chain.at = (Ref("x"), width)
    kinds = [rng.choice(TINY) for _ in range(count)]
    if not {"linear", "norm"} & {*kinds}:
        kinds[0] = "linear"
    for i, kind in enumerate(kinds):
        chain.block(kind, rng.choice((256, 1024, 4096)), ends=i == len(kinds) - 1)
    return chain.graph(width)


def _stages(rng: random.Random, world: int, precision: str) -> Graph:
    """Two to five blocks, equal or not; a weight that the first and the last share in one of six."""
    chain, width = _chain(rng, precision), rng.choice((512, 1024, 2048))
    chain.at = (Ref("x"), width)
    count = rng.choice((2, 3, 4, 5) if world < 8 else (2, 3, 4))
    equal, tied = rng.random() < 0.5, rng.random() < 1 / 6
    kinds = [kind for kind in LARGE if kind != "linear" or not tied]  # the others keep the width
    kind, hidden = rng.choice(kinds), rng.choice((512, 2048, 8192))
    for i in range(count):
        if tied and i in (0, count - 1):
            chain.block("linear", width, tied=True, ends=i == count - 1)
            continue
        if not equal:
            kind, hidden = rng.choice(kinds), rng.choice((512, 2048, 8192))
        chain.block(kind, hidden, ends=i == count - 1)
    return chain.graph(width)

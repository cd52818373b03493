"""Random small models: graphs of operators of the rule table, drawn step by step and run as they grow.

A step is a function of the builder. Whatever it draws goes through ``choose``, so that a model is a
list of small numbers: smaller numbers, smaller model. Samples stand along dim 0 (or a multiple of
them, where dims were merged into it). A step that does not fit what there is, or that would make a
value from which rounding could go two ways (a tie, a kink, a value too large), is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from autopar.graph.graph import Argument, Block, Buffer, Graph, Input, Op, Parameter, Ref, TensorSpec, digest
from autopar.graph.interpreter import run
from autopar.graph.operator_kinds import draws_random
from tools.campaigns.catalogue import LOSSES, STEPS, UnfitError

Choose = Callable[[int], int]
"""A number below its argument; 0 is the simplest choice."""

SIZES = (4, 2, 8, 6, 3, 5)
GAP = 1e-6
MAX_VALUE = 1e3


class Builder:
    """A graph under construction, with the value of every tensor."""

    def __init__(self, choose: Choose, batch: int, *, guarded: bool = True) -> None:
        self._choose, self.batch, self.guarded = choose, batch, guarded
        self.env: dict[Ref, Tensor] = {}
        self.inputs: list[Input] = []
        self.parameters: list[Parameter] = []
        self.buffers: list[Buffer] = []
        self.ops: list[Op] = []
        self.free: set[str] = set()
        self.values: list[Ref] = []
        self.count = 0
        self.is_random = False

    # --- leaves

    def input(self, *tail: int, kind: str = "x") -> Ref:
        """A tensor of the batch [batch, *tail]: ``x``, ``mask``, ``ids7`` below 7, ``labels7`` with some -100."""
        self.count += 1
        ref = Ref(f"{kind}_{self.count}")
        self.env[ref] = value_of(ref.name, (self.batch, *tail))
        self.inputs.append(Input(name=ref.name, spec=spec_of(self.env[ref]), batch_dim=0))
        self.free.add(ref.name)
        return ref

    def parameter(self, *shape: int) -> Ref:
        """A parameter, now and then one that there is."""
        known = [Ref(p.name) for p in self.parameters if p.spec.shape == shape]
        if known and self.choose(4) == 3:
            return known[self.choose(len(known))]
        self.count += 1
        ref = Ref(f"p_{self.count}")
        self.env[ref] = value_of(ref.name, shape).requires_grad_()
        self.parameters.append(Parameter(name=ref.name, fqn=f"m.{ref.name}", spec=spec_of(self.env[ref])))
        return ref

    def buffer(self, value: Tensor) -> Ref:
        self.count += 1
        ref = Ref(f"c_{self.count}")
        self.buffers.append(Buffer(name=ref.name, fqn="", spec=spec_of(value), value=value))
        self.env[ref] = value
        self.free.add(ref.name)
        return ref

    # --- operators

    def op(self, target: str, *args: Argument, **kwargs: Argument) -> Ref:
        """Calls an operator; the first of its outputs."""
        self.count += 1
        name = f"t_{self.count}"
        op = Op(name=name, target=target, args=args, kwargs=tuple(kwargs.items()), outputs=())
        try:
            with torch.random.fork_rng(devices=[], enabled=draws_random(target)):
                torch.default_generator.manual_seed(self.count)
                run([op], self.env)
        except (RuntimeError, IndexError, ValueError) as error:
            raise UnfitError(f"{target}: {error}") from error
        found = [self.env[Ref(name, i)] for i in range(len([r for r in self.env if r.name == name]))]
        if any(x.is_floating_point() and not (x.detach().abs() < MAX_VALUE).all() for x in found):
            raise UnfitError(f"{target}: too large")
        self.ops.append(replace(op, outputs=tuple(map(spec_of, found))))
        if draws_random(target):
            self.is_random = True
        elif all(r.name in self.free for r in op.operands):
            self.free.add(name)
        return Ref(name)

    def add(self, *refs: Ref) -> None:
        """Values for later steps to use."""
        self.values += refs

    def shape(self, ref: Ref) -> tuple[int, ...]:
        return tuple(self.env[ref].shape)

    def rank(self, ref: Ref) -> int:
        return self.env[ref].dim()

    # --- draws

    def choose(self, n: int) -> int:
        if n < 1:
            raise UnfitError("nothing to choose from")
        return self._choose(n)

    def pick(self, fits: Callable[[tuple[int, ...]], bool] = lambda shape: True) -> Ref:
        """A value whose shape fits, the latest first."""
        found = [r for r in reversed(self.values) if fits(self.shape(r))]
        if not found:
            raise UnfitError("no value fits")
        return found[self.choose(len(found))]

    def size(self) -> int:
        return SIZES[self.choose(len(SIZES))]

    def dim(self, ref: Ref) -> int:
        """A dim that does not count samples."""
        if self.rank(ref) < 2:
            raise UnfitError("samples alone")
        return self.rank(ref) - 1 - self.choose(self.rank(ref) - 1)

    def flip(self, one_in: int = 2) -> bool:
        return self.choose(one_in) == one_in - 1

    def of(self, *options: object) -> object:
        return options[self.choose(len(options))]

    # --- values that rounding must not tip over

    def _known(self) -> None:
        if self.is_random:  # other numbers are drawn when it runs
            raise UnfitError("values that are drawn")

    def apart(self, ref: Ref, dim: int) -> None:
        """Refuses values with a tie along ``dim``."""
        self._known()
        x = self.env[ref].detach()
        if self.guarded and x.shape[dim] > 1 and x.sort(dim).values.diff(dim=dim).abs().min() < GAP:
            raise UnfitError("a tie")

    def away_from(self, ref: Ref, *points: float) -> None:
        if points:
            self._known()
        x = self.env[ref].detach()
        if self.guarded and any(((x - point).abs() < GAP).any() for point in points):
            raise UnfitError("a kink")


def value_of(name: str, shape: tuple[int, ...]) -> Tensor:
    """The value of an input or a parameter: a function of its name."""
    known = re.fullmatch(r"(x|p|mask|ids\d+|labels\d+)_(\d+)", name)
    kind, number = known.groups() if known else ("p", str(int(digest(name), 16) % 2**31))  # a traced parameter
    generator = torch.Generator().manual_seed(int(number))
    if kind in ("x", "p"):
        return torch.randn(shape, dtype=torch.float64, generator=generator) * (1.0 if kind == "x" else 0.5)
    if kind == "mask":
        return torch.rand(shape, generator=generator) < 0.6
    value = torch.randint(0, int(kind.removeprefix("ids").removeprefix("labels")), shape, generator=generator)
    if kind.startswith("labels"):  # those that do not count stand unevenly: the first sample has most of them
        value[torch.rand(shape, generator=generator) < 0.2] = -100
        value[0][torch.rand(shape[1:], generator=generator) < 0.7] = -100
        value.view(-1)[-1] = 0
    return value


def spec_of(x: Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(x.shape), dtype=x.dtype, requires_grad=x.requires_grad)


def attempt(builder: Builder, step: Callable[[], None]) -> bool:
    """Takes a step, or leaves everything as it was."""
    was_random = builder.is_random
    lists: tuple[list[Any], ...] = (builder.inputs, builder.parameters, builder.buffers, builder.ops, builder.values)
    lengths, count, known, free = [len(x) for x in lists], builder.count, set(builder.env), set(builder.free)
    try:
        step()
    except UnfitError:
        for x, n in zip(lists, lengths, strict=True):
            del x[n:]
        builder.count, builder.free, builder.is_random = count, free, was_random
        for ref in set(builder.env) - known:
            del builder.env[ref]
        return False
    return True


def draw_model(choose: Choose, batch: int, *, max_steps: int = 10) -> tuple[Graph, Graph]:
    """A model twice: as it computes the whole batch, and as traced at a part of it.

    Raises:
        UnfitError: another model comes out at the smaller number of samples, or none at all.
    """
    taken: list[int] = []

    def noted(n: int) -> int:
        taken.append(choose(n))
        return taken[-1]

    def build(builder: Builder, count: int) -> list[list[int]]:
        steps = []
        builder.add(builder.input(builder.size(), builder.size()))
        for _ in range(count):
            mark = len(taken)
            if attempt(builder, lambda: STEPS[builder.choose(len(STEPS))](builder)):
                steps.append(taken[mark:])
        return steps

    count = 1 + choose(max_steps)
    builder = Builder(noted, batch)
    first = len(taken)
    steps = build(builder, count)
    head, mark = taken[first : first + 2], len(taken)
    loss = finish(builder)
    numbers = iter([*head, *(n for step in steps for n in step), *taken[mark:]])
    cuts = [choose(3) == 2 for _ in builder.ops]
    small = Builder(lambda n: min(next(numbers), n - 1), batch // (1, 2)[choose(2)], guarded=False)
    build(small, len(steps))
    if finish(small) != loss:
        raise UnfitError("another model at another number of samples")
    if [(o.name, o.target) for o in small.ops] != [(o.name, o.target) for o in builder.ops]:
        raise UnfitError("another model at another number of samples")
    return graph_of(builder, loss, cuts), graph_of(small, loss, cuts)


def finish(builder: Builder) -> Ref:
    """Everything that nothing reads goes into the loss, which needs a gradient."""
    read = {r for op in builder.ops for r in op.operands}
    ends = [r for r in dict.fromkeys(builder.values) if r not in read and builder.env[r].requires_grad]
    if not ends:
        value = builder.values[-1]
        ends = [builder.op("aten.mul.Tensor", value, builder.parameter(builder.shape(value)[-1]))]
    total: Ref | None = None
    for end in ends:
        term = LOSSES[builder.choose(len(LOSSES))](builder, end)
        total = term if total is None else builder.op("aten.add.Tensor", total, term)
    assert total is not None
    return total


def graph_of(builder: Builder, loss: Ref, cuts: list[bool]) -> Graph:
    """The graph without what the loss does not need; blocks end where ``cuts`` say."""
    needed, kept = {loss.name}, list[Op]()
    for op in reversed(builder.ops):
        if op.name in needed:
            kept.append(op)
            needed |= {r.name for r in op.operands}
    ops = [op for op in reversed(kept) if op.name not in builder.free]
    after = {op.name: cut for op, cut in zip(builder.ops, cuts, strict=True)}
    bounds = [0, *(i + 1 for i, op in enumerate(ops[:-1]) if after[op.name]), len(ops)]
    return Graph(
        name="fuzz",
        batch_size=builder.batch,
        inputs=tuple(x for x in builder.inputs if x.name in needed),
        parameters=tuple(x for x in builder.parameters if x.name in needed),
        buffers=tuple(x for x in builder.buffers if x.name in needed),
        prelude=tuple(op for op in reversed(kept) if op.name in builder.free),
        ops=tuple(ops),
        blocks=tuple(
            Block(index=i, start=a, stop=b, hash=f"block{i}", label=f"m.{i}")
            for i, (a, b) in enumerate(pairwise(bounds))
        ),
        loss=loss,
        fingerprint="fuzz",
    )

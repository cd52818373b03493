"""What a graph consists of, as plain data: references to tensors, operators, leaves and blocks, and what the model returns.

What the model returns stands beside the operators of the loss and changes nothing of them: a plan is searched, priced and checked
for the loss alone. A tensor is a value of the loss's operators wherever one is the same. What only outputs need is a list of
operators of its own, which run on complete values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod
from typing import Literal, TypeAlias

import torch

from autopar.plan.mesh import Type

Layout: TypeAlias = tuple[tuple[str, Type], ...]
"""Types of one tensor by axis, in the order in which the axes were applied."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor by the name of what makes it: an operator, an input, a parameter or a buffer.

    ``index`` counts the outputs of an operator that has several.
    """

    name: str
    index: int = 0

    def __hash__(self) -> int:
        """Of the name: references are looked up again and again, and few operators have several outputs."""
        return hash(self.name)

    def __str__(self) -> str:
        return self.name if self.index == 0 else f"{self.name}[{self.index}]"


Argument: TypeAlias = (
    "Ref | bool | int | float | complex | str | torch.dtype | torch.device | torch.memory_format"
    " | torch.layout | tuple[Argument, ...] | None"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Shape and dtype; ``requires_grad``: a gradient flows through this tensor in training."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def __hash__(self) -> int:
        """Of the shape: specs are looked up again and again, and few differ in anything else alone."""
        return hash(self.shape)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call: ``target`` as torch prints it (``aten.linear.default``) or ``autopar.NAME``.

    Attributes:
        name: unique in the graph; the name of its value in emitted code.
        args: nested tuples of :data:`Argument`; tensors are :class:`Ref`.
        outputs: one spec for each output.
        module: path of the ``nn.Module`` that made the call (``model.layers.0.mlp``).
        source: ``file.py:12`` of the user's code, or empty.
        layouts: for each output the (axis, type) pairs of the axes applied so far; empty before any.
    """

    name: str
    target: str
    args: tuple[Argument, ...]
    kwargs: tuple[tuple[str, Argument], ...] = ()
    outputs: tuple[TensorSpec, ...]
    module: str = ""
    source: str = ""
    layouts: tuple[Layout, ...] = ()
    _operands: tuple[Ref, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def operands(self) -> tuple[Ref, ...]:
        """Every tensor argument in order of appearance in ``args`` then ``kwargs``, repeats kept.

        A rule's ``Strategy.inputs`` has one type for each of these.
        """
        if self._operands is not None:
            return self._operands
        found: list[Ref] = []
        collect_refs(self.args, found)
        if self.kwargs:
            collect_refs((value for _, value in self.kwargs), found)
        operands = tuple(found)
        object.__setattr__(self, "_operands", operands)  # asked for again and again; follows from the other fields
        return operands

    @property
    def spec(self) -> TensorSpec:
        """The spec of the only (or first) output."""
        return self.outputs[0]

    def with_operands(self, refs: tuple[Ref, ...]) -> Op:
        """The same call on other tensors, one for each of :attr:`operands`."""
        if refs == self.operands:
            return self
        rest = iter(refs)
        args = tuple(map_refs(arg, lambda _: next(rest)) for arg in self.args)
        kwargs = tuple((key, map_refs(value, lambda _: next(rest))) for key, value in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor of the batch; ``batch_dim`` is the dim that counts samples, None if it has none."""

    name: str
    spec: TensorSpec
    batch_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The slice ``start:stop`` of dim ``dim`` of a model parameter."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Zeros behind the first ``length`` elements of dim ``dim``, so that it splits evenly; the model has no more."""

    dim: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A trained tensor, or a part of one where the model computes several projections from it.

    Attributes:
        name: unique in the graph, an identifier.
        fqn: the model's name for it (``model.layers.0.mlp.up_proj.weight``).
        aliases: further names of the same storage (tied weights).
        spec: shape and dtype of this part.
        part: None when this is the whole model parameter.
        layout: at rest, I or S(d) on each axis applied so far; ``spec`` is then the local shape.
        padding: None when the model's parameter is as long as this one.
        gradient_sum_axes: axes on which the gradient that backward leaves is a pending sum (the
            parameter is I at rest and used as R): summed once a step, not once a micro-batch.
    """

    name: str
    fqn: str
    spec: TensorSpec
    aliases: tuple[str, ...] = ()
    part: Part | None = None
    layout: Layout = ()
    padding: Padding | None = None
    gradient_sum_axes: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Unique and stable between plans: the name in checkpoints and in pins."""
        return self.fqn if self.part is None else f"{self.fqn}[{self.part.start}:{self.part.stop}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A constant tensor of the model, or one made when constants were folded (``value`` set then)."""

    name: str
    fqn: str
    spec: TensorSpec
    value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A buffer that training changes: after a step it holds what ``value`` was in it, the same for every sample.

    ``buffer`` is the name of one of :attr:`Graph.buffers`; whoever reads that name reads what the step began with.
    """

    buffer: str
    value: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Operators ``start:stop`` of :attr:`Graph.ops`; blocks partition them in order.

    Equal ``hash``: equal subgraphs (operators, literals, wiring, shapes), names aside. ``label``
    is for people: the common module path (``model.layers.3``).
    """

    index: int
    start: int
    stop: int
    hash: str
    label: str


def map_refs(argument: Argument, change: Callable[[Ref], Argument]) -> Argument:
    """``argument`` with every :class:`Ref` in it replaced, in order."""
    if isinstance(argument, Ref):
        return change(argument)
    if isinstance(argument, tuple):
        return tuple(map_refs(item, change) for item in argument)
    return argument


def collect_refs(arguments: Iterable[Argument], found: list[Ref]) -> None:
    """Every :class:`Ref` in ``arguments``, in order, appended to ``found``."""
    for argument in arguments:
        if type(argument) is Ref:
            found.append(argument)
        elif type(argument) is tuple:
            collect_refs(argument, found)


Kind: TypeAlias = Literal["tensor", "loss", "value", "tuple", "list", "mapping", "fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """One place in what a model returns.

    Attributes:
        kind: a tensor, the loss, a plain value (None for what is not kept), or what holds others: ``mapping`` by keys, ``fields``
            by the names of a class (a dataclass or a named tuple).
        index: of a tensor, among :attr:`Outputs.leaves`.
        value, twice: of a plain value, and what it is at twice the batch size (a count of samples).
        type: module and qualified name of the class, for what is no plain tuple, list or dict.
        names: of ``items``.
    """

    kind: Kind
    index: int = 0
    value: bool | int | float | str | None = None
    twice: bool | int | float | str | None = None
    type: tuple[str, str] = ("", "")
    names: tuple[str | int | bool | float, ...] = ()
    items: tuple[Structure, ...] = ()

    def all(self) -> Iterator[Structure]:
        """This place and all inside."""
        yield self
        for item in self.items:
            yield from item.all()

    @property
    def numbers(self) -> bool:
        """Whether numbers stand in it, which may count samples."""
        return any(type(place.value) in (int, float) for place in self.all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor that a model returns.

    Attributes:
        name: where it stands (``logits``, ``hidden_states.0``).
        ref: an output of :attr:`Outputs.ops`, a value of the graph's operators, an input, a parameter or a buffer; None where it cannot
            be made.
        reason: why not.
        reads: names of the batch's inputs that it depends on.
    """

    name: str
    ref: Ref | None
    reason: str = ""
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """What a model returns.

    Attributes:
        taps: values of the graph's operators that are kept, with their specs as traced.
        ops: operators that only outputs need, in order; for complete values at ``batch_size``.
        twice: the same at twice the batch size, where numbers in them may count samples; else empty.
        parameters: that ``ops`` read and the loss does not: no step changes them.
        buffers: that ``ops`` read.
    """

    structure: Structure
    leaves: tuple[Leaf, ...]
    batch_size: int
    taps: tuple[tuple[Ref, TensorSpec], ...] = ()
    ops: tuple[Op, ...] = ()
    twice: tuple[Op, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    buffers: tuple[Buffer, ...] = ()

    def ops_at(self, samples: int) -> tuple[Op, ...]:
        """The operators for as many samples."""
        if not self.twice or samples == self.batch_size:
            return self.ops
        more = Fraction(samples - self.batch_size, self.batch_size)
        return tuple(_between(one, two, more) for one, two in zip(self.ops, self.twice, strict=True))


def _between(one: Op, two: Op, more: Fraction) -> Op:
    def at(a: Argument, b: Argument) -> Argument:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return tuple(at(x, y) for x, y in zip(a, b, strict=True))
        return number_at(a, b, more) if isinstance(a, int | float) and isinstance(b, int | float) else a

    args = tuple(at(a, b) for a, b in zip(one.args, two.args, strict=True))
    kwargs = tuple((name, at(a, b)) for (name, a), (_, b) in zip(one.kwargs, two.kwargs, strict=True))
    return replace(one, args=args, kwargs=kwargs)


def number_at(one: float, two: float, more: Fraction) -> float:
    """A number that is ``one`` for a batch and ``two`` for twice as much, at ``1 + more`` batches.

    >>> number_at(32, 64, Fraction(3)), number_at(1, 3, Fraction(1, 2)), number_at(-1, -1, Fraction(5))
    (128, 2, -1)
    """
    if one == two:
        return one
    found = one + (two - one) * more
    return int(found) if isinstance(one, int) and isinstance(two, int) else float(found)


def same_calls(ops: Iterable[Op], others: Iterable[Op]) -> bool:
    """Whether two lists are the same operators on the same values, numbers aside."""
    return [*map(_without_numbers, ops)] == [*map(_without_numbers, others)]


def _without_numbers(op: Op) -> object:
    return op.target, op.operands, _shape_of(op.args), _shape_of(tuple(value for _, value in op.kwargs))


def _shape_of(argument: Argument) -> object:
    if isinstance(argument, tuple):
        return tuple(_shape_of(item) for item in argument)
    return type(argument).__name__ if isinstance(argument, int | float) else argument

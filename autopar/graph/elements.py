"""The elements of a graph as plain data: references to tensors, operators, leaves, blocks, and the outputs of the model.

Outputs of the model besides the loss do not affect the operators of the loss: plans are searched, priced and checked for the loss alone.
An output refers to a value of the loss's operators if it is one. Operators that only outputs need are in a separate list
(:attr:`Outputs.ops`) and run on complete values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from math import prod
from typing import Literal, TypeAlias

import torch

from autopar.plan.mesh import Type

Layout: TypeAlias = tuple[tuple[str, Type], ...]
"""Types of one tensor by axis, in the order in which the axes were applied."""


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a tensor by the name of its producer: an operator, an input, a parameter or a buffer.

    ``index`` selects one output of an operator that has several.
    """

    name: str
    index: int = 0

    def __hash__(self) -> int:
        """Hash the name alone: references are looked up often, and few operators have several outputs."""
        return hash(self.name)

    def __str__(self) -> str:
        return self.name if self.index == 0 else f"{self.name}[{self.index}]"


Argument: TypeAlias = (
    "Ref | bool | int | float | complex | str | torch.dtype | torch.device | torch.memory_format"
    " | torch.layout | tuple[Argument, ...] | None"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """The shape and dtype of a tensor; ``requires_grad`` says whether a gradient flows through it in training."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    def __hash__(self) -> int:
        """Hash the shape alone: specs are looked up often, and few differ only in dtype or gradient."""
        return hash(self.shape)

    @classmethod
    def of(cls, tensor: torch.Tensor, *, requires_grad: bool = False) -> TensorSpec:
        """Return the spec of a tensor."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=requires_grad)

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The size in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call of an operator.

    Attributes:
        name: the name of the operator, unique in the graph; its value has this name in emitted code.
        target: the function as torch prints it (``aten.linear.default``), or ``autopar.NAME``.
        args: the positional arguments, nested tuples of :data:`Argument`; tensors are :class:`Ref`.
        kwargs: the keyword arguments as pairs.
        outputs: the spec of each output.
        module: the path of the ``nn.Module`` that made the call (``model.layers.0.mlp``).
        source: the place in the user's code, as ``file.py:12``; empty if it is not known.
        layouts: the (axis, type) pairs of each output for the axes applied so far; empty before the first axis.
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
        """Every tensor argument in the order of ``args`` and then ``kwargs``, repeats included.

        ``Strategy.inputs`` of a rule has one type for each operand.
        """
        if self._operands is not None:
            return self._operands
        refs: list[Ref] = []
        collect_refs(self.args, refs)
        if self.kwargs:
            collect_refs((value for _, value in self.kwargs), refs)
        operands = tuple(refs)
        object.__setattr__(self, "_operands", operands)  # cached, as it is read often and depends only on frozen fields
        return operands

    @property
    def spec(self) -> TensorSpec:
        """The spec of the first output, which is the only one of most operators."""
        return self.outputs[0]

    @property
    def refs(self) -> tuple[Ref, ...]:
        """References to all outputs, in order."""
        return tuple(Ref(self.name, index) for index in range(len(self.outputs)))

    def renamed(self, others: Mapping[Ref, Ref]) -> Op:
        """Return the same call on the tensors that ``others`` has for some of its operands."""
        return self.with_operands(tuple(others.get(ref, ref) for ref in self.operands))

    def with_operands(self, refs: tuple[Ref, ...]) -> Op:
        """Return the same call on other tensors, one for each of :attr:`operands`."""
        if refs == self.operands:
            return self
        new_refs = iter(refs)
        args = tuple(map_refs(arg, lambda _: next(new_refs)) for arg in self.args)
        kwargs = tuple((key, map_refs(value, lambda _: next(new_refs))) for key, value in self.kwargs)
        return replace(self, args=args, kwargs=kwargs)

    def with_argument(self, position: int, name: str, value: Argument) -> Op:
        """Return the same call with another argument, which is given by position or by name; one that is not given is not added."""
        args = tuple(value if i == position else arg for i, arg in enumerate(self.args))
        return replace(self, args=args, kwargs=tuple((k, value if k == name else v) for k, v in self.kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor of the batch; ``batch_dim`` is the dim of samples, or None if it has none."""

    name: str
    spec: TensorSpec
    batch_dim: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The slice ``start:stop`` of dim ``dim`` of a parameter of the model."""

    dim: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Padding:
    """Padding of dim ``dim`` with zeros so that it splits evenly; the parameter of the model has ``length`` elements there."""

    dim: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A trained tensor of the model, or a part of it if the model computes several projections from one tensor.

    Attributes:
        name: an identifier, unique in the graph.
        fqn: the name in the model (``model.layers.0.mlp.up_proj.weight``).
        spec: the shape and dtype of this part; the local shape once axes are applied.
        aliases: further names of the same storage in the model (tied weights).
        part: the slice of the model's parameter; None for all of it.
        layout: the types at rest, I or S(d), on each axis applied so far.
        padding: the padding of this parameter; None if it is as long as that of the model.
        gradient_sum_axes: axes on which backward leaves the gradient as a pending sum, because the parameter is I at rest and read as R.
            It is summed once in a step, not for each micro-batch.
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
        """The name in checkpoints and pins; it is unique and the same for all plans."""
        return self.fqn if self.part is None else f"{self.fqn}[{self.part.start}:{self.part.stop}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer of the model, or a constant that folding has produced; the latter has a ``value``."""

    name: str
    fqn: str
    spec: TensorSpec
    value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutation:
    """A buffer that training changes: after a step it holds the value that ``value`` had in the step, which is the same for all samples.

    ``buffer`` is the name of one of :attr:`Graph.buffers`. Operators that read that name read the value from before the step.
    """

    buffer: str
    value: Ref


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What a model computes in ``eval()``, by the values of its training graph (:mod:`autopar.tracing.in_eval`).

    Dropout and torch's batch norms are not described here: the runtime knows what they do.

    Attributes:
        replaced: values that ``eval()`` does not compute, with the values that their readers use instead.
        unknown: why the training graph does not say what ``eval()`` computes; empty if it does.
        where: the place in the user's code that ``unknown`` is about.
    """

    replaced: tuple[tuple[Ref, Ref], ...] = ()
    unknown: str = ""
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The operators ``start:stop`` of :attr:`Graph.ops`; blocks partition them in order.

    Blocks of equal ``hash`` have equal operators, literals, wiring and shapes; only names differ. ``label`` is the common path of their
    modules (``model.layers.3``), for people.
    """

    index: int
    start: int
    stop: int
    hash: str
    label: str


def unused(hint: str, names: set[str]) -> str:
    """Reserve and return a name that is not among ``names``: ``hint``, or ``hint`` with a number.

    >>> unused("x", {"x", "x_1"})
    'x_2'
    """
    name = next(name for i in count() if (name := f"{hint}_{i}" if i else hint) not in names)
    names.add(name)
    return name


def map_refs(argument: Argument, change: Callable[[Ref], Argument]) -> Argument:
    """Return ``argument`` with every :class:`Ref` in it replaced by the result of ``change``, in order."""
    if isinstance(argument, Ref):
        return change(argument)
    if isinstance(argument, tuple):
        return tuple(map_refs(item, change) for item in argument)
    return argument


def collect_refs(arguments: Iterable[Argument], refs: list[Ref]) -> None:
    """Append every :class:`Ref` in ``arguments`` to ``refs``, in order."""
    for argument in arguments:
        if type(argument) is Ref:
            refs.append(argument)
        elif type(argument) is tuple:
            collect_refs(argument, refs)


def ancestors(ops: Iterable[Op], wanted: Iterable[Ref], stop: frozenset[Ref] = frozenset()) -> list[Op]:
    """Return the operators of ``ops`` that ``wanted`` depends on, in order; the search ends at the values in ``stop``."""
    needed = {ref.name for ref in wanted if ref not in stop}
    reached: list[Op] = []
    for op in reversed(list(ops)):
        if op.name in needed:
            reached.append(op)
            needed |= {ref.name for ref in op.operands if ref not in stop}
    return reached[::-1]


Kind: TypeAlias = Literal["tensor", "loss", "value", "tuple", "list", "mapping", "fields"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """One node in the nested structure that a model returns.

    Attributes:
        kind: a tensor, the loss, a plain value, or a container. A ``mapping`` has keys, and ``fields`` have the names of a class (a
            dataclass or a named tuple).
        index: the position of a tensor in :attr:`Outputs.leaves`.
        value: a plain value; None also stands for an object that is not returned.
        twice: the plain value at twice the batch size, which differs from ``value`` if it counts samples.
        type: the module and qualified name of a container's class, unless it is a plain tuple, list or dict.
        names: the keys or field names of ``items``.
        items: the children of a container.
    """

    kind: Kind
    index: int = 0
    value: bool | int | float | str | None = None
    twice: bool | int | float | str | None = None
    type: tuple[str, str] = ("", "")
    names: tuple[str | int | bool | float, ...] = ()
    items: tuple[Structure, ...] = ()

    def all(self) -> Iterator[Structure]:
        """Iterate over this node and all nodes below it."""
        yield self
        for item in self.items:
            yield from item.all()

    @property
    def numbers(self) -> bool:
        """Whether the structure holds numbers, which may count samples."""
        return any(type(place.value) in (int, float) for place in self.all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A tensor that a model returns.

    Attributes:
        name: the place in the returned structure (``logits``, ``hidden_states.0``).
        ref: an output of :attr:`Outputs.ops`, a value of the graph's operators, an input, a parameter or a buffer; None if the tensor
            cannot be computed.
        reason: why it cannot be computed.
        reads: names of the inputs of the batch that it depends on.
    """

    name: str
    ref: Ref | None
    reason: str = ""
    reads: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The outputs of a model.

    Attributes:
        structure: the nested structure that the model returns.
        leaves: the tensors in it.
        batch_size: the number of samples for which ``ops`` are.
        taps: values of the graph's operators that outputs need, with their specs as traced.
        ops: operators that only outputs need, in order; they run on complete values.
        twice: the same operators at twice the batch size if numbers in them may count samples, otherwise empty.
        parameters: parameters that ``ops`` read and the loss does not; no step changes them.
        buffers: buffers that ``ops`` read.
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
        """Return the operators for another number of samples; their numbers are extrapolated linearly."""
        if not self.twice or samples == self.batch_size:
            return self.ops
        more = Fraction(samples - self.batch_size, self.batch_size)
        return tuple(_op_at(once, twice, more) for once, twice in zip(self.ops, self.twice, strict=True))


def _op_at(once: Op, twice: Op, more: Fraction) -> Op:
    """Return an operator at ``1 + more`` batches from the same operator at one batch and at two."""

    def at(a: Argument, b: Argument) -> Argument:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return tuple(at(x, y) for x, y in zip(a, b, strict=True))
        return number_at(a, b, more) if isinstance(a, int | float) and isinstance(b, int | float) else a

    args = tuple(at(a, b) for a, b in zip(once.args, twice.args, strict=True))
    kwargs = tuple((name, at(a, b)) for (name, a), (_, b) in zip(once.kwargs, twice.kwargs, strict=True))
    return replace(once, args=args, kwargs=kwargs)


def number_at(once: float, twice: float, more: Fraction) -> float:
    """Return a number at ``1 + more`` batches that is ``once`` at one batch and ``twice`` at two, by linear extrapolation.

    >>> number_at(32, 64, Fraction(3)), number_at(1, 3, Fraction(1, 2)), number_at(-1, -1, Fraction(5))
    (128, 2, -1)
    """
    if once == twice:
        return once
    result = once + (twice - once) * more
    return int(result) if isinstance(once, int) and isinstance(twice, int) else float(result)


def same_calls(ops: Iterable[Op], others: Iterable[Op]) -> bool:
    """Return whether two lists have the same operators on the same values; numbers among the arguments may differ."""
    return [*map(_without_numbers, ops)] == [*map(_without_numbers, others)]


def _without_numbers(op: Op) -> object:
    kwargs = tuple(value for _, value in op.kwargs)
    return op.target, op.operands, _argument_without_numbers(op.args), _argument_without_numbers(kwargs)


def _argument_without_numbers(argument: Argument) -> object:
    """Return an argument with every number in it replaced by the name of its type."""
    if isinstance(argument, tuple):
        return tuple(_argument_without_numbers(item) for item in argument)
    return type(argument).__name__ if isinstance(argument, int | float) else argument

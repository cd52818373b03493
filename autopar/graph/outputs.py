"""What a model returns besides its loss, as plain data: the structure, and where the values of its tensors come from.

It stands beside the operators of the loss and changes nothing of them: a plan is searched, priced and checked for the loss alone.
A tensor is a value of the loss's operators wherever one is the same. What only outputs need is a list of operators of its own, which
run on complete values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, TypeAlias

from autopar.graph.elements import Argument, Buffer, Op, Parameter, Ref, TensorSpec

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
        whole: names of parameters of the model (``fqn``) that ``ops`` read and steps train.
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

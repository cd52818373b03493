"""What a graph consists of: references to tensors, operators, leaves and blocks, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

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

    def __eq__(self, other: object) -> bool:
        return type(other) is Ref and self.name == other.name and self.index == other.index

    def __str__(self) -> str:
        return self.name if self.index == 0 else f"{self.name}[{self.index}]"


Argument: TypeAlias = (
    "Ref | bool | int | float | str | torch.dtype | torch.device | torch.memory_format"
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

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is TensorSpec
            and self.shape == other.shape
            and self.dtype == other.dtype
            and self.requires_grad == other.requires_grad
        )

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
        _collect(self.args, found)
        if self.kwargs:
            _collect((value for _, value in self.kwargs), found)
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

    def reshaped(
        self,
        target: str,
        args: tuple[Argument, ...],
        kwargs: tuple[tuple[str, Argument], ...],
        outputs: tuple[TensorSpec, ...],
    ) -> Op:
        """The same call of the same tensors in other shapes, with other literals in ``args`` and ``kwargs``."""
        found = Op(
            name=self.name, target=target, args=args, kwargs=kwargs, outputs=outputs, module=self.module,
            source=self.source, layouts=self.layouts,
        )  # fmt: skip
        object.__setattr__(found, "_operands", self._operands)
        return found


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


def _collect(arguments: Iterable[Argument], found: list[Ref]) -> None:
    """Every :class:`Ref` in ``arguments``, in order, appended to ``found``."""
    for argument in arguments:
        if type(argument) is Ref:
            found.append(argument)
        elif type(argument) is tuple:
            _collect(argument, found)

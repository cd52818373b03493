"""The graph: operators over named tensors, as plain data.

A :class:`Graph` is what a traced model, one micro-batch of it, and one rank's part of that all
are: the passes of autopar take a graph and give a graph. Operators stand in topological order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import torch

from autopar.frozen import quickly
from autopar.layout import Type

Layout: TypeAlias = tuple[tuple[str, Type], ...]
"""Types of one tensor by axis, in the order in which the axes were applied."""


@quickly
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


@quickly
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


@quickly
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


@quickly
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


@dataclass(frozen=True, kw_only=True)  # no slots: the look-up index is cached on first use
class Graph:
    """A training step's forward pass, from a batch to a scalar loss.

    Attributes:
        name: of the model.
        batch_size: samples in the shapes that stand in this graph.
        prelude: operators that depend on inputs, buffers and constants alone: no parameter, no
            gradient. Every stage and rank repeats them.
        ops: the live operators.
        blocks: partition of ``ops``.
        loss: the scalar.
        sums: values of the prelude that are partial over the batch: before the rest of the graph
            runs they are summed over all micro-batches and data ranks (token counts). Whoever
            reads such a Ref reads the total.
        mutations: buffers that a step changes.
        fingerprint: of the traced model; passes keep it.
        notes: what a reader of the plan should know (opaque regions, operators without a rule).
        mixing: the operator by which samples meet, where they do: ``batch_size`` is then the global batch, and axis
            ``batch`` a group of ranks that each have all their samples in one micro-batch. Empty: samples are apart.
        exact: numbers may count samples, so that it is for a global batch of ``batch_size`` alone.
        pins: what the modules of the model carry for the plan (:mod:`autopar.marks`).
    """

    name: str
    batch_size: int
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    prelude: tuple[Op, ...]
    ops: tuple[Op, ...]
    blocks: tuple[Block, ...]
    loss: Ref
    sums: tuple[Ref, ...] = ()
    mutations: tuple[Mutation, ...] = ()
    fingerprint: str
    notes: tuple[str, ...] = ()
    mixing: str = ""
    exact: bool = False
    pins: tuple[str, ...] = ()

    def spec(self, ref: Ref) -> TensorSpec:
        """The spec of any tensor.

        Raises:
            KeyError: nothing of that name.
        """
        return self._index.made[ref.name][ref.index]

    def producer(self, ref: Ref) -> Op | None:
        """The operator that makes ``ref``; None for inputs, parameters and buffers."""
        return self._index.producers.get(ref.name)

    def parameter(self, name: str) -> Parameter:
        return self._index.parameters[name]

    def is_parameter(self, ref: Ref) -> bool:
        return ref.name in self._index.parameters

    def is_prelude(self, ref: Ref) -> bool:
        """True for inputs, buffers and values of the prelude: what every rank can make by itself."""
        return ref.name in self._index.free

    def block_ops(self, block: Block) -> tuple[Op, ...]:
        return self.ops[block.start : block.stop]

    def block_of(self, op_name: str) -> int:
        """Index of the block that holds a live operator."""
        return self._index.block_of[op_name]

    def block_parameters(self, block: Block) -> tuple[Parameter, ...]:
        """Parameters read in the block, in order of first use."""
        key = ("parameters", block.start, block.stop)
        if key not in self._index.of_block:
            known = self._index.parameters
            names = dict.fromkeys(r.name for op in self.block_ops(block) for r in op.operands if r.name in known)
            self._index.of_block[key] = tuple(known[name] for name in names)
        found: tuple[Parameter, ...] = self._index.of_block[key]
        return found

    def block_inputs(self, block: Block) -> tuple[Ref, ...]:
        """Live values of earlier blocks that this block reads, in order of first use."""
        key = ("inputs", block.start, block.stop)
        if key not in self._index.of_block:
            others = {op.name for op in self.block_ops(block)} | self._index.free | self._index.parameters.keys()
            refs = (r for op in self.block_ops(block) for r in op.operands)
            self._index.of_block[key] = tuple(dict.fromkeys(r for r in refs if r.name not in others))
        found: tuple[Ref, ...] = self._index.of_block[key]
        return found

    def block_prelude(self, block: Block) -> tuple[Ref, ...]:
        """Inputs, buffers and prelude values that this block reads, in order of first use."""
        refs = (r for op in self.block_ops(block) for r in op.operands)
        return tuple(dict.fromkeys(r for r in refs if self.is_prelude(r)))

    def block_outputs(self, block: Block) -> tuple[Ref, ...]:
        """Values of this block that later blocks (or the caller, the loss) read, in order of making."""
        key = ("outputs", block.start, block.stop)
        if key not in self._index.of_block:
            self._index.of_block[key] = tuple(
                ref
                for op in self.block_ops(block)
                for ref in (Ref(op.name, i) for i in range(len(op.outputs)))
                if ref == self.loss or self._index.last_use(ref) >= block.stop
            )
        found: tuple[Ref, ...] = self._index.of_block[key]
        return found

    def block_mutations(self, block: Block) -> tuple[Mutation, ...]:
        """Buffers whose new value this block makes."""
        inside = {op.name for op in self.block_ops(block)} if self.mutations else set()
        return tuple(m for m in self.mutations if m.value.name in inside)

    def users(self, ref: Ref) -> tuple[int, ...]:
        """Positions in ``ops`` of the live operators that read ``ref``, ascending."""
        return self._index.users.get(ref, ())

    def live_across(self, stop: int) -> tuple[Ref, ...]:
        """Live values made before position ``stop`` of ``ops`` and read at or after it, in order of making.

        What a stage that ends at ``stop`` sends to the next one; skip connections included.
        """
        return tuple(ref for made, last, ref in self._index.crossing(self.ops) if made < stop <= last)

    def look_up(self) -> None:
        """Make the look-ups by name and by block, which are else made when they are asked for: files of the graph have them."""
        for block in self.blocks:
            self.block_parameters(block)
            self.block_inputs(block)

    @property
    def num_parameters(self) -> int:
        return sum([prod(p.spec.shape) for p in self.parameters])

    @cached_property
    def _index(self) -> _Index:
        return _Index(self)

    @cached_property
    def passes(self) -> dict[object, Any]:
        """What passes found that follows from the graph alone, for whoever asks again; files and copies have none of it."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "passes"}

    def share_names(self, other: Graph, made: dict[str, tuple[TensorSpec, ...]]) -> None:
        """Take the look-ups by name of a graph with the same names and wiring and other shapes.

        Args:
            made: specs of all tensors of this graph, by the name of what makes them.
        """
        self.__dict__["_index"] = other._index.of_other_shapes(self, made)


class _Index:
    """Look-ups over one graph, made once."""

    __slots__ = ("_crossing", "block_of", "free", "made", "named", "of_block", "parameters", "producers", "users")

    def __init__(self, graph: Graph) -> None:
        leaves: tuple[Input | Parameter | Buffer, ...] = (*graph.inputs, *graph.parameters, *graph.buffers)
        self.producers = {op.name: op for op in (*graph.prelude, *graph.ops)}
        self.made: dict[str, tuple[TensorSpec, ...]] = {leaf.name: (leaf.spec,) for leaf in leaves}
        """By the name of what makes tensors their specs."""
        for name, op in self.producers.items():
            self.made[name] = op.outputs
        self.parameters = {p.name: p for p in graph.parameters}
        self.free = {leaf.name for leaf in leaves} - set(self.parameters) | {op.name for op in graph.prelude}
        users: dict[Ref, list[int]] = {}
        for position, op in enumerate(graph.ops):
            for ref in op.operands:
                known = users.get(ref)
                if known is None:
                    users[ref] = [position]
                elif known[-1] != position:
                    known.append(position)
        self.users = {ref: tuple(positions) for ref, positions in users.items()}
        self.block_of = {op.name: b.index for b in graph.blocks for op in graph.block_ops(b)}
        self._crossing: list[tuple[int, int, Ref]] | None = None
        self.of_block: dict[tuple[str, int, int], Any] = {}
        """What was asked for of the operators between two positions."""
        self.named: dict[str, Any] = {}
        """What passes found that follows from names, wiring and parameters, whatever the other shapes."""

    def __getstate__(self) -> dict[str, Any]:
        """Without what passes found, as that of a graph."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "named"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
        self.named = {}

    @property
    def refs(self) -> list[Ref]:
        """All tensors: leaves, then those of the prelude, then all others."""
        return [Ref(name, i) for name, specs in self.made.items() for i in range(len(specs))]

    def of_other_shapes(self, graph: Graph, made: dict[str, tuple[TensorSpec, ...]]) -> _Index:
        """The index of a graph with the same names, wiring and parameters."""
        found = copy(self)
        found.made, found.named = made, self.named
        found.producers = {op.name: op for op in (*graph.prelude, *graph.ops)}
        return found

    def crossing(self, ops: tuple[Op, ...]) -> list[tuple[int, int, Ref]]:
        """Of the live values that some operator reads: where each is made, where it is read last; in order of making."""
        if self._crossing is None:
            self._crossing = [
                (position, last, ref)
                for position, op in enumerate(ops)
                for ref in (Ref(op.name, i) for i in range(len(op.outputs)))
                if (last := self.last_use(ref)) >= 0
            ]
        return self._crossing

    def last_use(self, ref: Ref) -> int:
        """Position of the last live operator that reads ``ref``; -1 for none."""
        users = self.users.get(ref)
        return users[-1] if users else -1


def map_refs(argument: Argument, change: Callable[[Ref], Argument]) -> Argument:
    """``argument`` with every :class:`Ref` in it replaced, in order."""
    if isinstance(argument, Ref):
        return change(argument)
    if isinstance(argument, tuple):
        return tuple(map_refs(item, change) for item in argument)
    return argument


def digest(text: str) -> str:
    """A short stable hash for blocks and fingerprints."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _collect(arguments: Iterable[Argument], found: list[Ref]) -> None:
    """Every :class:`Ref` in ``arguments``, in order, appended to ``found``."""
    for argument in arguments:
        if type(argument) is Ref:
            found.append(argument)
        elif type(argument) is tuple:
            _collect(argument, found)

"""The graph: operators over named tensors as plain data, with look-ups of the producer and the readers of each tensor.

A traced model, one micro-batch of it, and one rank's part of that micro-batch are all a :class:`Graph`: passes of autopar take a graph and
return a graph. Operators are in topological order. The elements of a graph are defined in :mod:`autopar.graph.elements`, and can be
imported from this module as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from autopar.graph.elements import (
    Argument,
    Block,
    Buffer,
    Evaluation,
    Input,
    Layout,
    Mutation,
    Op,
    Outputs,
    Padding,
    Parameter,
    Part,
    Ref,
    TensorSpec,
    map_refs,
)

if TYPE_CHECKING:
    import networkx

T = TypeVar("T")

__all__ = [
    "Argument",
    "Block",
    "Buffer",
    "Evaluation",
    "Graph",
    "Input",
    "Layout",
    "Mutation",
    "Op",
    "Padding",
    "Parameter",
    "Part",
    "Ref",
    "TensorSpec",
    "digest",
    "map_refs",
]


class Index:
    """Look-up tables of one graph.

    Attributes:
        producers: the operator of each name.
        made: the specs of the outputs of each operator or leaf, by its name.
        parameters: the parameters by name.
        free: names of inputs, buffers and operators of the prelude, which depend on no parameter.
        users: for each tensor the positions in ``Graph.ops`` of the operators that read it, ascending.
        block_of: the index of the block of each live operator, by its name.
        read_between: cached results of :meth:`Graph.block_parameters`, by the block's ``start`` and ``stop``.
    """

    def __init__(self, graph: Graph) -> None:
        leaves: tuple[Input | Parameter | Buffer, ...] = (*graph.inputs, *graph.parameters, *graph.buffers)
        self.ops = graph.ops
        self.producers = {op.name: op for op in (*graph.prelude, *graph.ops)}
        self.made: dict[str, tuple[TensorSpec, ...]] = {leaf.name: (leaf.spec,) for leaf in leaves}
        self.made |= {name: op.outputs for name, op in self.producers.items()}
        self.parameters = {parameter.name: parameter for parameter in graph.parameters}
        self.free = {leaf.name for leaf in leaves} - set(self.parameters) | {op.name for op in graph.prelude}
        users: dict[Ref, list[int]] = {}
        for position, op in enumerate(graph.ops):
            for ref in dict.fromkeys(op.operands):
                users.setdefault(ref, []).append(position)
        self.users = {ref: tuple(positions) for ref, positions in users.items()}
        self.block_of = {op.name: block.index for block in graph.blocks for op in graph.block_ops(block)}
        self.read_between: dict[tuple[int, int], tuple[Parameter, ...]] = {}

    @property
    def refs(self) -> list[Ref]:
        """All tensors: leaves first, then outputs of the prelude, then outputs of live operators."""
        return [Ref(name, i) for name, specs in self.made.items() for i in range(len(specs))]

    @cached_property
    def crossing(self) -> list[tuple[int, int, Ref]]:
        """For each live value that an operator reads: the positions of its producer and its last reader, and the value; by producer."""
        return [
            (position, last, ref)
            for position, op in enumerate(self.ops)
            for ref in op.refs
            if (last := self.last_use(ref)) >= 0
        ]

    def last_use(self, ref: Ref) -> int:
        """Return the position of the last live operator that reads ``ref``; -1 if none does."""
        users = self.users.get(ref)
        return users[-1] if users else -1


@dataclass(frozen=True, kw_only=True)  # no slots: the look-up index is cached on first use
class Graph:
    """The forward pass of a training step, from a batch to a scalar loss.

    Attributes:
        name: the name of the model.
        batch_size: the number of samples in the shapes of this graph.
        prelude: operators that depend only on inputs, buffers and constants, and so have no gradient. Every stage and rank repeats them.
        ops: the live operators, which are all others.
        blocks: a partition of ``ops``.
        loss: the scalar loss.
        sums: values of the prelude that are partial sums over the batch, such as counts of tokens. They are summed over all micro-batches
            and data ranks before the rest of the graph runs, so that a reader of such a Ref reads the total.
        mutations: the buffers that a step changes.
        fingerprint: the hash of the traced model; passes keep it.
        notes: remarks for readers of the plan (opaque regions, operators without a rule).
        mixing: the operator in which samples depend on each other; empty if they are independent. With such an operator, ``batch_size`` is
            the global batch, and each data rank takes all its samples in one micro-batch.
        exact: whether constants or shapes may count samples, so that the graph holds only for a global batch of ``batch_size``.
        pins: the pins that modules of the model carry (:mod:`autopar.pins.on_modules`).
        outputs: what the model returns besides the loss; passes keep it as it was traced.
        evaluation: what the model computes in ``eval()``; None if that was not looked for.
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
    outputs: Outputs | None = None
    evaluation: Evaluation | None = None

    def spec(self, ref: Ref) -> TensorSpec:
        """Return the spec of any tensor of the graph.

        Raises:
            KeyError: the graph has no tensor of that name.
        """
        return self._index.made[ref.name][ref.index]

    def producer(self, ref: Ref) -> Op | None:
        """Return the operator that produces ``ref``; None for inputs, parameters and buffers."""
        return self._index.producers.get(ref.name)

    def parameter(self, name: str) -> Parameter:
        """Return the parameter of a name (``Parameter.name``)."""
        return self._index.parameters[name]

    def is_parameter(self, ref: Ref) -> bool:
        """Return whether a tensor is a parameter."""
        return ref.name in self._index.parameters

    def is_prelude(self, ref: Ref) -> bool:
        """Return whether a tensor is an input, a buffer or a value of the prelude, which every rank can compute by itself."""
        return ref.name in self._index.free

    def block_ops(self, block: Block) -> tuple[Op, ...]:
        """Return the operators of a block, in order."""
        return self.ops[block.start : block.stop]

    def block_of(self, op_name: str) -> int:
        """Return the index of the block that holds a live operator."""
        return self._index.block_of[op_name]

    def block_parameters(self, block: Block) -> tuple[Parameter, ...]:
        """Return the parameters that the block reads, in order of first use."""
        key, by_name = (block.start, block.stop), self._index.parameters
        if key not in self._index.read_between:
            names = dict.fromkeys(r.name for op in self.block_ops(block) for r in op.operands if r.name in by_name)
            self._index.read_between[key] = tuple(by_name[name] for name in names)
        return self._index.read_between[key]

    def block_inputs(self, block: Block) -> tuple[Ref, ...]:
        """Return the live values of earlier blocks that this block reads, in order of first use."""
        others = {op.name for op in self.block_ops(block)} | self._index.free | self._index.parameters.keys()
        refs = (r for op in self.block_ops(block) for r in op.operands)
        return tuple(dict.fromkeys(r for r in refs if r.name not in others))

    def block_prelude(self, block: Block) -> tuple[Ref, ...]:
        """Return the inputs, buffers and values of the prelude that this block reads, in training or in ``eval()``, in order of first use."""
        ops = self.block_ops(block)
        refs = [r for op in ops for r in op.operands]
        if self.evaluation is not None and self.evaluation.replaced:
            made = {op.name for op in ops}
            refs += [instead for ref, instead in self.evaluation.replaced if ref.name in made]
        return tuple(dict.fromkeys(r for r in refs if self.is_prelude(r)))

    def block_outputs(self, block: Block) -> tuple[Ref, ...]:
        """Return the values of this block that later blocks read, and the loss if it is among them, in order of production."""
        return tuple(
            ref
            for op in self.block_ops(block)
            for ref in op.refs
            if ref == self.loss or self._index.last_use(ref) >= block.stop
        )

    def block_mutations(self, block: Block) -> tuple[Mutation, ...]:
        """Return the mutations whose new value this block computes."""
        inside = {op.name for op in self.block_ops(block)} if self.mutations else set()
        return tuple(m for m in self.mutations if m.value.name in inside)

    def users(self, ref: Ref) -> tuple[int, ...]:
        """Return the positions in ``ops`` of the live operators that read ``ref``, ascending."""
        return self._index.users.get(ref, ())

    def live_across(self, stop: int) -> tuple[Ref, ...]:
        """Return the live values that are produced before position ``stop`` of ``ops`` and read at or after it, in order of production.

        These are the values that a stage which ends at ``stop`` sends to the next one, skip connections included.
        """
        return tuple(ref for produced, last, ref in self._index.crossing if produced < stop <= last)

    def without_gradient(self) -> dict[str, bool]:
        """Parameters that no gradient of the loss reaches, by name, as they only decide which values others take (``topk``, ``detach``).

        True: they are parts of a parameter of the model that one reaches, whose gradient is zero there, and not none.
        """
        reached = {self.loss}
        for op in reversed(self.ops):
            if not reached.isdisjoint(op.refs):
                reached.update(ref for ref in op.operands if self.spec(ref).requires_grad)
        trained = {p.fqn for p in self.parameters if Ref(p.name) in reached}
        return {p.name: p.fqn in trained for p in self.parameters if Ref(p.name) not in reached}

    @property
    def num_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum([p.spec.numel for p in self.parameters])

    @cached_property
    def _index(self) -> Index:
        return Index(self)

    @cached_property
    def passes(self) -> dict[object, Any]:
        """Cached results of passes that depend only on the graph, by function; neither they nor the index are pickled."""
        return {}

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, which is called once for each ``key`` and stored in :attr:`passes`."""
        if key not in self.passes:
            self.passes[key] = make()
        return cast("T", self.passes[key])

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_index", "passes")}

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """Return the graph as a networkx graph, for networkx's algorithms and for drawing.

        Nodes are leaves and operators by name, in topological order. Each has ``kind`` (``input``, ``parameter``, ``buffer``,
        ``prelude`` or ``op``), ``outputs`` (the specs of its tensors, see :class:`TensorSpec`) and ``num_bytes`` (their size).
        Operators also have ``target``, ``module`` and ``source``; live ones have ``block``, the index of their block. Parameters have
        ``fqn``, their name in the model.

        Edges go from the producer of a value to each of its readers, once for every time that it is read. They have ``output`` (the
        index among the producer's outputs) and ``num_bytes``. A value that is read as a total over the batch has such edges too.
        The networkx graph has the attributes ``name``, ``batch_size`` and ``loss`` (the name of the node that computes the loss).

        >>> import networkx
        >>> from autopar.models.resolve import resolve_model
        >>> graph = resolve_model("gpt:layers=2,hidden=32,heads=2,vocab=64", sequence_length=8).trace().to_networkx()
        >>> networkx.is_directed_acyclic_graph(graph), graph.nodes[graph.graph["loss"]]["kind"]
        (True, 'op')
        """
        import networkx  # slow to import, and only this method needs it

        result: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(
            name=self.name, batch_size=self.batch_size, loss=self.loss.name
        )
        for kind, leaves in (("input", self.inputs), ("parameter", self.parameters), ("buffer", self.buffers)):
            for leaf in leaves:
                fqn = {"fqn": leaf.fqn} if isinstance(leaf, Parameter) else {}
                result.add_node(leaf.name, kind=kind, outputs=(leaf.spec,), num_bytes=leaf.spec.num_bytes, **fqn)
        for i, op in enumerate((*self.prelude, *self.ops)):
            is_live = i >= len(self.prelude)
            num_bytes = sum(spec.num_bytes for spec in op.outputs)
            block = {"block": self.block_of(op.name)} if is_live else {}
            result.add_node(
                op.name, kind="op" if is_live else "prelude", outputs=op.outputs, num_bytes=num_bytes,
                target=op.target, module=op.module, source=op.source, **block,
            )  # fmt: skip
            for ref in op.operands:
                result.add_edge(ref.name, op.name, output=ref.index, num_bytes=self.spec(ref).num_bytes)
        return result


def digest(text: str) -> str:
    """Return a short stable hash, for blocks and fingerprints."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

"""The graph: operators over named tensors, as plain data; and look-ups over it: what makes a tensor, who reads it.

A :class:`Graph` is what a traced model, one micro-batch of it, and one rank's part of that all
are: the passes of autopar take a graph and give a graph. Operators stand in topological order.
What it consists of is in :mod:`autopar.graph.elements`, and can be imported from here as well.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from autopar.graph.elements import (
    Argument,
    Block,
    Buffer,
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

__all__ = [
    "Argument",
    "Block",
    "Buffer",
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
    """Look-ups over one graph, made once."""

    def __init__(
        self,
        *,
        leaves: tuple[Input | Parameter | Buffer, ...],
        prelude: tuple[Op, ...],
        ops: tuple[Op, ...],
        blocks: tuple[Block, ...],
    ) -> None:
        self.producers = {op.name: op for op in (*prelude, *ops)}
        self.made: dict[str, tuple[TensorSpec, ...]] = {leaf.name: (leaf.spec,) for leaf in leaves}
        """By the name of what makes tensors their specs."""
        self.made |= {name: op.outputs for name, op in self.producers.items()}
        self.parameters = {leaf.name: leaf for leaf in leaves if isinstance(leaf, Parameter)}
        self.free = {leaf.name for leaf in leaves} - set(self.parameters) | {op.name for op in prelude}
        users: dict[Ref, list[int]] = {}
        for position, op in enumerate(ops):
            for ref in dict.fromkeys(op.operands):
                users.setdefault(ref, []).append(position)
        self.users = {ref: tuple(positions) for ref, positions in users.items()}
        self.block_of = {op.name: b.index for b in blocks for op in ops[b.start : b.stop]}
        self.ops = ops
        self.read_between: dict[tuple[int, int], tuple[Parameter, ...]] = {}
        """Parameters that operators between two positions read, of those that were asked for."""

    @property
    def refs(self) -> list[Ref]:
        """All tensors: leaves, then those of the prelude, then all others."""
        return [Ref(name, i) for name, specs in self.made.items() for i in range(len(specs))]

    @cached_property
    def crossing(self) -> list[tuple[int, int, Ref]]:
        """Of the live values that some operator reads: where each is made, where it is read last; in order of making."""
        return [
            (position, last, ref)
            for position, op in enumerate(self.ops)
            for ref in (Ref(op.name, i) for i in range(len(op.outputs)))
            if (last := self.last_use(ref)) >= 0
        ]

    def last_use(self, ref: Ref) -> int:
        """Position of the last live operator that reads ``ref``; -1 for none."""
        users = self.users.get(ref)
        return users[-1] if users else -1


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
        pins: what the modules of the model carry for the plan (:mod:`autopar.pins.on_modules`).
        outputs: what the model returns besides the loss; passes keep it as it was traced.
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
        key, known = (block.start, block.stop), self._index.parameters
        if key not in self._index.read_between:
            names = dict.fromkeys(r.name for op in self.block_ops(block) for r in op.operands if r.name in known)
            self._index.read_between[key] = tuple(known[name] for name in names)
        return self._index.read_between[key]

    def block_inputs(self, block: Block) -> tuple[Ref, ...]:
        """Live values of earlier blocks that this block reads, in order of first use."""
        others = {op.name for op in self.block_ops(block)} | self._index.free | self._index.parameters.keys()
        refs = (r for op in self.block_ops(block) for r in op.operands)
        return tuple(dict.fromkeys(r for r in refs if r.name not in others))

    def block_prelude(self, block: Block) -> tuple[Ref, ...]:
        """Inputs, buffers and prelude values that this block reads, in order of first use."""
        refs = (r for op in self.block_ops(block) for r in op.operands)
        return tuple(dict.fromkeys(r for r in refs if self.is_prelude(r)))

    def block_outputs(self, block: Block) -> tuple[Ref, ...]:
        """Values of this block that later blocks (or the caller, the loss) read, in order of making."""
        return tuple(
            ref
            for op in self.block_ops(block)
            for ref in (Ref(op.name, i) for i in range(len(op.outputs)))
            if ref == self.loss or self._index.last_use(ref) >= block.stop
        )

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
        return tuple(ref for made, last, ref in self._index.crossing if made < stop <= last)

    def without_gradient(self) -> dict[str, bool]:
        """Parameters that no gradient of the loss reaches, by name, as they only decide which values others take (``topk``, ``detach``).

        True: they are parts of a parameter of the model that one reaches, whose gradient is zero there, and not none.
        """
        reached = {self.loss}
        for op in reversed(self.ops):
            if any(Ref(op.name, i) in reached for i in range(len(op.outputs))):
                reached.update(ref for ref in op.operands if self.spec(ref).requires_grad)
        trained = {p.fqn for p in self.parameters if Ref(p.name) in reached}
        return {p.name: p.fqn in trained for p in self.parameters if Ref(p.name) not in reached}

    @property
    def num_parameters(self) -> int:
        return sum([p.spec.numel for p in self.parameters])

    @cached_property
    def _index(self) -> Index:
        leaves: tuple[Input | Parameter | Buffer, ...] = (*self.inputs, *self.parameters, *self.buffers)
        return Index(leaves=leaves, prelude=self.prelude, ops=self.ops, blocks=self.blocks)

    @cached_property
    def passes(self) -> dict[object, Any]:
        """What passes found that follows from the graph alone, for whoever asks again; files and copies have none of it, nor look-ups."""
        return {}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_index", "passes")}

    def to_networkx(self) -> networkx.MultiDiGraph[str]:
        """The graph for networkx: its algorithms, and drawing.

        Nodes are the tensors and operators by name, in topological order. Each has ``kind``: ``input``, ``parameter``, ``buffer``,
        ``prelude`` or ``op``; ``outputs``, the specs (:class:`TensorSpec`) of the tensors that it makes; and ``num_bytes``, their
        size. Operators have ``target``, ``module`` and ``source`` also, live ones ``block``, the index of theirs; a parameter
        has ``fqn``, its name in the model.

        Edges go from what makes a value to what reads it, one for each time that it is read, and have ``output``, which of the
        maker's outputs it is, and ``num_bytes``. A value that is read as a total over the batch is an edge like any other.
        The graph itself has ``name``, ``batch_size`` and ``loss``, the name of the node that makes the loss.

        >>> import networkx
        >>> from autopar.models.resolve import resolve_model
        >>> graph = resolve_model("gpt:layers=2,hidden=32,heads=2,vocab=64", sequence_length=8).trace().to_networkx()
        >>> networkx.is_directed_acyclic_graph(graph), graph.nodes[graph.graph["loss"]]["kind"]
        (True, 'op')
        """
        import networkx  # only this needs it

        found: networkx.MultiDiGraph[str] = networkx.MultiDiGraph(
            name=self.name, batch_size=self.batch_size, loss=self.loss.name
        )
        for kind, leaves in (("input", self.inputs), ("parameter", self.parameters), ("buffer", self.buffers)):
            for leaf in leaves:
                more = {"fqn": leaf.fqn} if isinstance(leaf, Parameter) else {}
                found.add_node(leaf.name, kind=kind, outputs=(leaf.spec,), num_bytes=leaf.spec.num_bytes, **more)
        for i, op in enumerate((*self.prelude, *self.ops)):
            is_live = i >= len(self.prelude)
            num_bytes = sum(spec.num_bytes for spec in op.outputs)
            block = {"block": self.block_of(op.name)} if is_live else {}
            found.add_node(
                op.name, kind="op" if is_live else "prelude", outputs=op.outputs, num_bytes=num_bytes,
                target=op.target, module=op.module, source=op.source, **block,
            )  # fmt: skip
            for ref in op.operands:
                found.add_edge(ref.name, op.name, output=ref.index, num_bytes=self.spec(ref).num_bytes)
        return found


def digest(text: str) -> str:
    """A short stable hash for blocks and fingerprints."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]

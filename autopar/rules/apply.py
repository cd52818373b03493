"""Applies a typing of one axis: takes the graph that is common to all ranks of the axis and return the graph of one of them.

Every tensor gets the shape of one rank. Where an operator reads an operand in another type than it has, a change of type becomes an
operator of its own (:mod:`autopar.rules.local_calls`). The cost model and the search rely on where these stand:

- Each value has at most one change to each type in a *block*. Consumers in the block share it, and it stands right before the first of
  them. Blocks do not share changes: a value crosses blocks in the type in which it was produced.
- A value of the prelude changes its type once, in the prelude.
- A parameter that is I at rest and R at every use does not change: its gradient is left as a pending sum
  (``Parameter.gradient_sum_axes``). If other uses read it in other types, R is an explicit change.

On axis ``batch`` values of the prelude change from P to R before the step (``Graph.sums``). Live values change between P and I or R, and
with ``Graph.mixing`` from and to S as well, by :data:`OVER_DATA`. This is right for one micro-batch only (:func:`crosses_samples`).
Parameters are R where they are read there, and the data-parallel runtime sums their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction

from autopar.errors import InternalError, RuleError
from autopar.graph.elements import unused
from autopar.graph.graph import Argument, Block, Graph, Input, Layout, Op, Parameter, Ref, TensorSpec, digest
from autopar.graph.rewrites import signature
from autopar.plan.mesh import UNCHANGED, I, P, R, S, Type, conversion
from autopar.rules.grammar import replicate
from autopar.rules.local_calls import (
    BATCH,
    layout_of,
    localize,
    part_of,
)
from autopar.rules.strategy import Local, SampleSums, Strategy, Typing, check_part, check_strategy, is_zigzag

__all__ = ["BATCH", "OVER_DATA", "crosses_samples", "shard"]

OVER_DATA = "autopar.change_over_data"
"""The operator that changes a type over samples: over all data ranks, each of which has its samples in one micro-batch."""


def shard(
    graph: Graph,
    typing: Typing,
    *,
    global_batch_size: int | None = None,
    micro_batch_size: int | None = None,
    whole: bool = False,
) -> Graph:
    """Return the graph of one rank on ``typing.axis``.

    Args:
        graph: the graph, to which earlier axes are already applied.
        typing: a strategy for every live operator. Operators of the prelude without a strategy are R, as are inputs without a type; on axis
            ``batch`` inputs are split along their ``batch_dim``.
        global_batch_size: the samples of a step, for literals that count samples; for axis ``batch`` only.
        micro_batch_size: the samples of the returned graph; for axis ``batch`` only.
        whole: whether there is one data rank and one micro-batch, so that no type changes; for axis ``batch`` only.

    Raises:
        RuleError: a dim does not divide, or the loss is not a sum over samples; the error names the operator.
        InternalError: a strategy is missing, or there is no such change of type; the error names the operator.
    """
    return _Sharding(graph, typing, global_batch_size or graph.batch_size, whole=whole).run(micro_batch_size)


@dataclass(slots=True)
class _Section:
    """The operators under construction of the prelude or of one block.

    Attributes:
        ops: the operators so far.
        changed: the changes of type that its consumers share, by value and type.
    """

    ops: list[Op]
    changed: dict[tuple[Ref, Type], Ref]


class _Sharding:
    """The state of one :func:`shard`.

    Attributes:
        types, specs: the type and the local spec of each value so far.
        renamed: the changed values that replace the loss and the new values of buffers.
        pending: the names of the parameters that are I at rest and R at every use.
    """

    def __init__(self, graph: Graph, typing: Typing, global_batch_size: int, *, whole: bool) -> None:
        self.whole = whole
        self.graph, self.typing, self.axis = graph, typing, typing.axis
        self.is_batch = typing.axis == BATCH
        self.is_zigzag = is_zigzag(typing.strategies.values())
        self.count_scale = Fraction(global_batch_size, graph.batch_size) if self.is_batch else Fraction(1)
        self.types: dict[Ref, Type] = {}
        self.specs: dict[Ref, TensorSpec] = {}
        self.renamed: dict[Ref, Ref] = {}
        self.samples = SampleSums(graph=graph)
        self.names = set(graph._index.made)
        self.prelude = _Section([], {})
        self.pending: set[str] = set()

    def run(self, micro_batch_size: int | None) -> Graph:
        """Return the graph of one rank; see :func:`shard`."""
        graph = self.graph
        inputs = tuple(self._input(leaf) for leaf in graph.inputs)
        for buffer in graph.buffers:
            self._set(Ref(buffer.name), self.typing.inputs.get(buffer.name, R), buffer.spec)
        buffers = tuple(replace(b, spec=self.specs[Ref(b.name)]) for b in graph.buffers)
        for parameter in graph.parameters:
            at_rest = self.typing.parameters.get(parameter.name, I)
            self._set(Ref(parameter.name), at_rest, parameter.spec)
        self.pending = self._used_as_replicated()
        for op in graph.prelude:
            self._op(op, self.prelude)
        for ref in (m.value for m in graph.mutations if graph.is_prelude(m.value)):
            self._new_value(ref, self.prelude)
        ops, blocks = self._blocks()
        return replace(
            graph,
            batch_size=micro_batch_size if self.is_batch and micro_batch_size else graph.batch_size,
            inputs=inputs,
            parameters=tuple(map(self._parameter, graph.parameters)),
            buffers=buffers,
            prelude=tuple(self.prelude.ops),
            ops=ops,
            blocks=blocks,
            loss=self.renamed.get(graph.loss, graph.loss),
            sums=(*graph.sums, *self.samples.sums),
            mutations=tuple(replace(m, value=self.renamed.get(m.value, m.value)) for m in graph.mutations),
        )

    # --- leaves

    def _input(self, leaf: Input) -> Input:
        default = S(leaf.batch_dim) if self.is_batch and leaf.batch_dim is not None else R
        ref = Ref(leaf.name)
        self._set(ref, self.typing.inputs.get(leaf.name, default), leaf.spec)
        return replace(leaf, spec=self.specs[ref])

    def _used_as_replicated(self) -> set[str]:
        """Return the names of the parameters that are I at rest and that every live operator reads as R."""
        kinds_of: dict[str, set[str]] = {}
        for op in self.graph.ops:
            for ref, wanted in zip(op.operands, self._strategy(op).inputs, strict=True):
                if self.types.get(ref) == I and self.graph.is_parameter(ref):
                    kinds_of.setdefault(ref.name, set()).add(wanted.kind)
        return {name for name, kinds in kinds_of.items() if kinds == {"R"}}

    def _parameter(self, parameter: Parameter) -> Parameter:
        at_rest = self.types[Ref(parameter.name)]
        if at_rest.kind not in ("I", "S"):
            raise InternalError(f"A parameter is stored as {at_rest}, not as I or S(d)", where=parameter.fqn)
        if self.is_batch and at_rest != I:
            raise InternalError(f"A parameter is split over samples as {at_rest}", where=parameter.fqn)
        pending = parameter.name in self.pending and parameter.spec.requires_grad and not self.is_batch
        return replace(
            parameter,
            spec=self.specs[Ref(parameter.name)],
            layout=(*parameter.layout, (self.axis, at_rest)),
            gradient_sum_axes=(*parameter.gradient_sum_axes, self.axis) if pending else parameter.gradient_sum_axes,
        )

    # --- operators

    def _blocks(self) -> tuple[tuple[Op, ...], tuple[Block, ...]]:
        graph, ops, blocks = self.graph, list[Op](), list[Block]()
        for block in graph.blocks:
            section, start = _Section([], {}), len(ops)
            for op in graph.block_ops(block):
                self._op(op, section)
            for mutation in graph.block_mutations(block):
                self._new_value(mutation.value, section)
            if block.index == len(graph.blocks) - 1:
                self._loss(section)
            ops += section.ops
            text = f"{block.hash}|{self.axis}|{signature(section.ops, self.specs.__getitem__)}"
            blocks.append(replace(block, start=start, stop=len(ops), hash=digest(text)))
        return tuple(ops), tuple(blocks)

    def _op(self, op: Op, section: _Section) -> None:
        strategy, place = self._strategy(op), f"{op.name} ({op.target})"
        if len(strategy.inputs) != len(op.operands) or len(strategy.outputs) != len(op.outputs):
            raise InternalError(
                f"The strategy '{strategy.name}' does not give every operand and output a type", where=place
            )
        if self.is_zigzag:
            check_strategy(strategy, place)
        reads = zip(op.operands, strategy.inputs, strict=True)
        operands = tuple([self._converted(ref, wanted, op, section) for ref, wanted in reads])
        results = zip(op.outputs, strategy.outputs, strict=True)
        outputs = tuple([self._local(spec, kind, place) for spec, kind in results])
        local = Local(
            axis=self.axis,
            size=self.typing.size,
            operands=tuple([self.specs[ref] for ref in operands]),
            outputs=outputs,
            count_scale=self.count_scale,
        )
        earlier_layouts = op.layouts or ((),) * len(op.outputs)
        layouts: tuple[Layout, ...] = tuple(
            [(*layout, (self.axis, kind)) for layout, kind in zip(earlier_layouts, strategy.outputs, strict=True)]
        )
        section.ops.append(localize(op.with_operands(operands), strategy, local, layouts))
        for i, (kind, spec) in enumerate(zip(strategy.outputs, outputs, strict=True)):
            ref = Ref(op.name, i)
            self.types[ref], self.specs[ref] = kind, spec

    def _strategy(self, op: Op) -> Strategy:
        chosen = self.typing.strategies.get(op.name)
        if chosen is not None:
            return chosen
        if not self.is_batch and self.graph.is_prelude(Ref(op.name)):
            return replicate(op.operands, op.outputs)
        raise InternalError(f"The operator has no strategy on axis {self.axis}", where=f"{op.name} ({op.target})")

    def _loss(self, section: _Section) -> None:
        """Make the loss P over samples and I on any other axis: one number, which is differentiated once."""
        loss = self.graph.loss
        current = self.types[loss]
        if self.whole:
            return
        if self.is_batch:
            if current.kind in ("I", "R"):
                self.renamed[loss] = self._change(loss, P, section, place=str(loss))
            elif current != P:
                raise RuleError(
                    f"The loss is {current} on the batch, not a sum over samples",
                    where=f"{loss.name} ({self._module(loss)})",
                    fix="Use a loss that adds up or averages over the batch",
                )
        elif current != I:
            self.renamed[loss] = self._change(loss, I, section, place=str(loss))

    def _new_value(self, ref: Ref, section: _Section) -> None:
        """Make the new value of a buffer complete: the same on every rank and for all samples."""
        current = self.types[ref]
        if self.whole or current.kind in ("R", "I"):
            return
        if not self.is_batch:
            self.renamed[ref] = self._change(ref, R, section, place=str(ref))
            return
        self.samples.new_value(ref, current, in_prelude=section is self.prelude)

    # --- changes of type

    def _converted(self, ref: Ref, wanted: Type, op: Op, section: _Section) -> Ref:
        """Return the operand ``ref`` of ``op`` in type ``wanted``, and emits the change of type if there is none yet."""
        current = self.types[ref]
        if self.whole:
            return ref
        same = conversion(current, wanted, requires_grad=self.specs[ref].requires_grad) is UNCHANGED
        if self.is_batch and not self.samples.crosses(ref, current, wanted, same=same):
            self.samples.check(ref, current, wanted, op, same=same)
            return ref
        owner, place = self.prelude if self.graph.is_prelude(ref) else section, f"{op.name} ({op.target})"
        if self._is_leaf_part(ref, current):
            return self._from_checkpoint_order(ref, wanted, owner, place)
        if same:
            return ref
        if wanted == R and ref.name in self.pending:
            return ref
        if self.is_batch and current == P and owner is self.prelude:
            self.samples.read_as_partial[ref] = place
        return self._changed(ref, wanted, owner, place)

    def _changed(self, ref: Ref, wanted: Type, owner: _Section, place: str, source: Ref | None = None) -> Ref:
        """Return the change of ``ref`` that the consumers in ``owner`` share, and emits it if there is none yet.

        Args:
            ref: the value.
            wanted: its new type.
            owner: the section that the change belongs to.
            place: the operator that reads it, for messages.
            source: a change of ``ref`` to start from; by default ``ref`` itself.
        """
        if (ref, wanted) not in owner.changed:
            owner.changed[ref, wanted] = self._change(source or ref, wanted, owner, place, origin=ref)
        return owner.changed[ref, wanted]

    def _is_leaf_part(self, ref: Ref, current: Type) -> bool:
        """Return whether the value is a part of a leaf beside ring attention, which no operator may read as it is."""
        return self.is_zigzag and current.is_split and self.graph.producer(ref) is None

    def _from_checkpoint_order(self, ref: Ref, wanted: Type, owner: _Section, place: str) -> Ref:
        """Return a part of a leaf in type ``wanted``. A split one is in zig-zag order, and is cut from the complete tensor."""
        if not wanted.is_split:
            return self._changed(ref, wanted, owner, place)
        complete = self._changed(ref, I if self.specs[ref].requires_grad else R, owner, place)
        return self._changed(ref, wanted, owner, place, complete)

    def _change(self, ref: Ref, wanted: Type, section: _Section, place: str, origin: Ref | None = None) -> Ref:
        """Emit a change of type.

        Args:
            ref: the tensor whose type changes.
            wanted: its new type.
            section: where the operator is added.
            place: the operator that reads it, for messages.
            origin: the value of the original graph that ``ref`` is a change of; by default ``ref`` itself.
        """
        origin = origin or ref
        current, spec = self.types[ref], self.specs[ref]
        change = conversion(current, wanted, requires_grad=spec.requires_grad)
        if change is None or change is UNCHANGED:
            raise InternalError(
                f"On axis {self.axis} the tensor {ref} of type {current} cannot become {wanted}", where=place
            )
        arguments: tuple[Argument, ...] = (ref, self.axis, *change.arguments(current, wanted))
        target = change.target
        if self.is_batch:
            target, arguments = OVER_DATA, (ref, str(current), str(wanted))
        elif self.is_zigzag and (current.is_split or wanted.is_split) and not self._is_leaf_part(ref, current):
            target = target.replace("autopar.", "autopar.zigzag_")
        kind = f"{wanted.kind}{wanted.dim if wanted.is_split else ''}"
        name = unused(f"{origin.name}_{self.axis}_{kind}", self.names)
        unsplit = self.graph.spec(ref) if current.is_split else spec
        local = self._local(unsplit, wanted, place)
        section.ops.append(
            Op(
                name=name,
                target=target,
                args=arguments,
                outputs=(local,),
                module=self._module(origin),
                layouts=((*layout_of(self.graph, origin), (self.axis, wanted)),),
            )
        )
        self.types[Ref(name)], self.specs[Ref(name)] = wanted, local
        return Ref(name)

    # --- bookkeeping

    def _set(self, ref: Ref, kind: Type, spec: TensorSpec) -> None:
        """Record the type and the local spec of a leaf, whose parts are in the order of the checkpoint."""
        self.types[ref], self.specs[ref] = kind, self._part(spec, kind, ref.name)

    def _local(self, spec: TensorSpec, kind: Type, place: str) -> TensorSpec:
        """Return the local spec of a value that an operator produces."""
        if self.is_zigzag and kind.is_split and kind.dim < len(spec.shape):
            check_part(spec, kind, int(self.typing.size), place, axis=self.axis)
        return self._part(spec, kind, place)

    def _part(self, spec: TensorSpec, kind: Type, place: str) -> TensorSpec:
        return part_of(spec, kind, self.typing.size, place, axis=self.axis)

    def _module(self, ref: Ref) -> str:
        producer = self.graph.producer(ref)
        return producer.module if producer is not None else ""


def crosses_samples(graph: Graph) -> tuple[Op, ...]:
    """Return the changes of type over samples in a local graph. If there are any, each data rank has one micro-batch."""
    return tuple(op for op in (*graph.prelude, *graph.ops) if op.target == OVER_DATA)

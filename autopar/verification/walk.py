"""A walk along one rank's graph, forward over values and backward over gradients, to the first that is wrong.

The expected tensors are those of one device. A value of the rank's graph stands for a value of the traced graph, and its types say which
part of that value a rank has. A change of type stands for the value that it changes; the expected gradient of its output is the sum of
those that its readers pass back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from autopar.graph.graph import Block, Graph, Layout, Op, Ref
from autopar.lower.emit import read_layout
from autopar.lower.read_plan import local_graph_and_typings, whole_graph
from autopar.plan.mesh import DATA_AXES, R
from autopar.plan.plan import Plan
from autopar.rules.local_calls import layout_of
from autopar.verification.record import PRELUDE, Tape, Watch
from autopar.verification.slices import Mismatch, Split, gradient_layout, largest, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """The first wrong value or gradient.

    Attributes:
        kind: ``value``: the output ``ref`` of ``op`` is wrong. ``passed``: ``op`` passes a wrong gradient back to its operand ``ref``.
            ``read``: a place reads another value of ``ref`` than was computed. ``arrived``: the gradient of ``ref`` is not the sum of those
            that its readers pass back.
        place: the index of a block, or ``PRELUDE``.
        ref: the value or parameter.
        op: the operator; None for ``read``.
        mismatch: the size of the difference, and where it is.
    """

    kind: Literal["value", "passed", "read", "arrived"]
    place: int
    ref: Ref
    op: Op | None
    mismatch: Mismatch


class Trail:
    """The graphs of both sides under a plan, and the correspondence between them.

    Attributes:
        plan: the plan that is compared.
        local: one rank's graph for one micro-batch.
        typings: the typing of the graph on each axis.
        whole: one device's graph for the global batch.
        split: how the plan distributes tensors.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan = plan
        self.local, self.typings = local_graph_and_typings(plan, graph)
        self.whole = whole_graph(plan, graph)
        self.split = Split.of(plan.mesh, plan.num_micro_batches, self.local)
        self._traced_ops = {op.name for op in (*self.whole.prelude, *self.whole.ops)}

    # --- what is recorded: on ranks, and on one device

    def boundaries(self) -> tuple[Watch, Watch]:
        """Return what ranks and one device record in a first run.

        It is the values that pass from block to block, the gradients passed back to these and to parameters, and on ranks all of the
        prelude.
        """
        outputs = frozenset(ref for block in self.local.blocks for ref in self.local.block_outputs(block))
        origins = frozenset(self.origin(ref) for ref in outputs)
        prelude = frozenset(ref for op in self.local.prelude for ref in op.refs)
        places = frozenset((PRELUDE, *range(len(self.local.blocks))))
        local = self._edges(self.local, outputs, self.local.blocks)
        whole = self._edges(self.whole, origins, self.whole.blocks)
        return Watch(values=outputs | prelude, edges=local, places=places), Watch(values=origins, edges=whole)

    def inside(self, index: int) -> tuple[Watch, Watch]:
        """Return what ranks and one device record in a second run: everything in one block."""

        def watch(graph: Graph) -> Watch:
            ops = graph.block_ops(graph.blocks[index])
            edges = frozenset((op.name, position) for op in ops for position in range(len(op.operands)))
            return Watch(values=frozenset(ref for op in ops for ref in op.refs), edges=edges)

        return replace(watch(self.local), places=frozenset((index,))), watch(self.whole)

    def _edges(self, graph: Graph, outputs: frozenset[Ref], blocks: Sequence[Block]) -> frozenset[tuple[str, int]]:
        """Return the operands of blocks that are parameters or among ``outputs``, as operator name and position."""
        return frozenset(
            (op.name, position)
            for block in blocks
            for op in graph.block_ops(block)
            for position, ref in enumerate(op.operands)
            if ref in outputs or graph.is_parameter(ref)
        )

    # --- expected values and gradients

    def is_change(self, op: Op) -> bool:
        """Return whether the operator is a change of type, which the traced graph does not have."""
        return op.name not in self._traced_ops

    def origin(self, ref: Ref) -> Ref:
        """Return the value of the traced graph that ``ref`` stands for."""
        producer = self.local.producer(ref)
        while producer is not None and self.is_change(producer):
            ref = producer.operands[0]
            producer = self.local.producer(ref)
        return ref

    def gradient(self, ref: Ref, reference: Tape) -> Tensor | None:
        """Return the expected gradient of a value of the rank's graph, as a whole tensor; None where nothing is there to compare with.

        Args:
            ref: a value that is alive.
            reference: the tape of one device.
        """
        producer = self.local.producer(ref)
        if producer is None or not self.is_change(producer):
            return _or_zeros(reference.gradients.get((ref, 0)), self.whole, ref)
        parts = [
            self.passed(op, position, reference)
            for op in (self.local.ops[user] for user in self.local.users(ref))
            for position, operand in enumerate(op.operands)
            if operand == ref
        ]
        if ref == self.local.loss:
            parts.append(torch.ones((), dtype=self.local.spec(ref).dtype))
        present = [part for part in parts if part is not None]
        return torch.stack(present).sum(0) if present and len(present) == len(parts) else None

    def passed(self, op: Op, position: int, reference: Tape) -> Tensor | None:
        """Return the expected gradient that ``op`` passes back to one operand, as a whole tensor; None as in :meth:`gradient`."""
        if self.is_change(op):
            return self.gradient(Ref(op.name), reference)
        origin = self.origin(op.operands[position])
        earlier_uses = sum(self.origin(ref) == origin for ref in op.operands[:position])
        traced = self.whole.producer(Ref(op.name))
        assert traced is not None
        positions = [at for at, ref in enumerate(traced.operands) if ref == origin]
        if earlier_uses >= len(positions):
            return None
        return _or_zeros(reference.edges.get((op.name, positions[earlier_uses], 0)), self.whole, origin)

    # --- the walk

    def first(self, tapes: Sequence[Tape], reference: Tape, values: Mapping[Ref, Tensor]) -> Spot | None:
        """Return the first difference between the ranks' tapes and one device, or None.

        Elements that the loss of one device does not depend on count only if nothing else differs: rows that are masked out may hold
        anything.

        Args:
            tapes: one for each rank.
            reference: the tape of one device.
            values: all values of one device.
        """
        walk = _Walk(self, tapes, reference, values)
        return walk.forward(masked=True) or walk.backward() or walk.forward(masked=False)

    # --- texts

    def words(self, spot: Spot) -> tuple[str, str]:
        """Return what is wrong at a spot, and what agrees around it."""
        local, ref = self.local, spot.ref
        match spot.kind:
            case "value":
                output = f" (output {ref.index})" if ref.index else ""
                return f"the value that it makes{output}", "what it reads agrees"
            case "passed":
                to = f"parameter {local.parameter(ref.name).key}" if local.is_parameter(ref) else str(ref)
                return f"the gradient that it passes back to {to}", "all values and the gradient of what it makes agree"
            case "arrived":
                return f"the gradient that arrives at {ref}", "all values and what each reader passes back agree"
        if local.is_parameter(ref):
            return f"the value of parameter {local.parameter(ref.name).key} before the step", "no operator has run yet"
        if ref in local.sums:
            return f"{ref}, a sum over the global batch", "the samples of each rank agree"
        if any(leaf.name == ref.name for leaf in local.inputs):
            return f"the rank's part of the input {ref}", "no operator has run yet"
        return f"{ref}, as it arrives", "it agrees where it is made"

    def strategies(self, op: Op) -> tuple[tuple[str, str], ...]:
        """Return the strategy of an operator by axis; that of a change of type names its types."""
        strategies = [(t.axis, t.strategies[op.name].name) for t in self.typings if op.name in t.strategies]
        if self.is_change(op) and op.layouts:
            axis, kind = op.layouts[0][-1]
            before = dict(read_layout(self.local, op.operands[0])).get(axis, R)
            strategies.append((axis, f"change of type {before} to {kind}"))
        return tuple(strategies)

    def reads(self, op: Op) -> tuple[str, ...]:
        """Return the operands with their local shapes and types."""
        return tuple(self._described(ref, read_layout(self.local, ref)) for ref in op.operands)

    def makes(self, op: Op) -> tuple[str, ...]:
        """Return the outputs with their local shapes and types."""
        return tuple(self._described(ref, layout_of(self.local, ref)) for ref in op.refs)

    def _described(self, ref: Ref, layout: Layout) -> str:
        """Return the name of a value, its local shape and its types."""
        name = self.local.parameter(ref.name).key if self.local.is_parameter(ref) else str(ref)
        return f"{name} {list(self.local.spec(ref).shape)} {text(layout)}"

    def readers(self, fqn: str) -> tuple[Op, ...]:
        """Return the operators that read a model parameter."""
        names = {p.name for p in self.local.parameters if p.fqn == fqn}
        return tuple(op for op in self.local.ops if any(ref.name in names for ref in op.operands))

    def sum_axes(self, fqn: str) -> tuple[str, ...]:
        """Return the axes over which the gradient of a model parameter is summed once a step."""
        mesh = self.plan.mesh
        pending = {axis for p in self.local.parameters if p.fqn == fqn for axis in p.gradient_sum_axes}
        return tuple(axis for axis in (*DATA_AXES, *sorted(pending)) if getattr(mesh, axis) > 1)

    def stage_of(self, block: int) -> int:
        """Return the pipeline stage of a block."""
        return next(stage.index for stage in self.plan.stages if stage.start <= block < stage.stop)

    def ranks_of(self, place: int) -> tuple[int, ...]:
        """Return the ranks that run a block; all ranks for the prelude."""
        mesh = self.plan.mesh
        if place == PRELUDE:
            return tuple(range(mesh.world_size))
        pp_rank = self.plan.stages[self.stage_of(place)].pp_rank
        return tuple(rank for rank in range(mesh.world_size) if mesh.coordinate(rank)["pp"] == pp_rank)


class _Walk:
    """One comparison of the tapes of all ranks with one device."""

    def __init__(self, trail: Trail, tapes: Sequence[Tape], reference: Tape, values: Mapping[Ref, Tensor]) -> None:
        self.trail, self.local, self.split = trail, trail.local, trail.split
        self.tapes, self.reference, self.values = tapes, reference, values
        self.watch = tapes[0].watch
        self.gradient_scale = largest((*reference.gradients.values(), *reference.edges.values()))

    def forward(self, *, masked: bool) -> Spot | None:
        """Return the first wrong value.

        Args:
            masked: whether to leave out elements that the loss does not depend on.
        """
        for place in sorted(self.watch.places):
            for ref in dict.fromkeys(ref for tape in self.tapes for at, ref, _ in tape.reads if at == place):
                if (mismatch := self._read(place, ref)) is not None:
                    return Spot(kind="read", place=place, ref=ref, op=None, mismatch=mismatch)
            for op in self._ops(place):
                for ref in op.refs:
                    if ref in self.watch.values and (mismatch := self._value(place, op, ref, masked)) is not None:
                        return Spot(kind="value", place=place, ref=ref, op=op, mismatch=mismatch)
        return None

    def backward(self) -> Spot | None:
        """Return the first wrong gradient, from the loss on."""
        for place in sorted(self.watch.places - {PRELUDE}, reverse=True):
            for op in reversed(self._ops(place)):
                for ref in op.refs:
                    if ref in self.watch.values and (mismatch := self._arrived(place, ref)) is not None:
                        return Spot(kind="arrived", place=place, ref=ref, op=op, mismatch=mismatch)
                for position, ref in enumerate(op.operands):
                    if (op.name, position) in self.watch.edges:
                        mismatch = self._passed(place, op, position)
                        if mismatch is not None:
                            return Spot(kind="passed", place=place, ref=ref, op=op, mismatch=mismatch)
        return None

    def _ops(self, place: int) -> tuple[Op, ...]:
        """Return the operators of a place in order."""
        return self.local.prelude if place == PRELUDE else self.local.block_ops(self.local.blocks[place])

    def _read(self, place: int, ref: Ref) -> Mismatch | None:
        """Compare a leaf or a value of another place, as it was read."""
        pieces = self._present(place, lambda tape, number: tape.reads.get((place, ref, number)))
        is_parameter = self.local.is_parameter(ref)
        layout = self.local.parameter(ref.name).layout if is_parameter else read_layout(self.local, ref)
        whole = self.values[self.trail.origin(ref)]
        return self._order(ref).compare(pieces, whole, layout)

    def _value(self, place: int, op: Op, ref: Ref, masked: bool) -> Mismatch | None:
        """Compare an output of an operator; values that nothing reads are left out."""
        if place != PRELUDE and not self.local.users(ref) and ref != self.local.loss:
            return None
        pieces = self._present(place, lambda tape, number: tape.values.get((ref, number)))
        origin = self.trail.origin(ref)
        counts = self.reference.gradients.get((origin, 0)) if masked else None
        scale = largest(self.values[self.trail.origin(operand)] for operand in op.operands)
        return self.split.compare(pieces, self.values[origin], layout_of(self.local, ref), scale=scale, counts=counts)

    def _arrived(self, place: int, ref: Ref) -> Mismatch | None:
        """Compare the gradient of an output, summed over its readers."""
        whole = self.trail.gradient(ref, self.reference)
        pieces = self._all(place, lambda tape, number: tape.gradients.get((ref, number)))
        return self._gradient(pieces, whole, layout_of(self.local, ref), self._order(ref))

    def _passed(self, place: int, op: Op, position: int) -> Mismatch | None:
        """Compare the gradient that an operator passes back to one operand."""
        whole = self.trail.passed(op, position, self.reference)
        pieces = self._all(place, lambda tape, number: tape.edges.get((op.name, position, number)))
        ref = op.operands[position]
        return self._gradient(pieces, whole, read_layout(self.local, ref), self._order(ref))

    def _order(self, ref: Ref) -> Split:
        """Return how ``ref`` is distributed: parameters are never in zig-zag order."""
        return replace(self.split, zigzag_axes=frozenset()) if self.local.is_parameter(ref) else self.split

    def _gradient(
        self, pieces: Mapping[tuple[int, int], Tensor | None], whole: Tensor | None, layout: Layout, split: Split
    ) -> Mismatch | None:
        """Compare a gradient with the expected one; a gradient that is missing on all ranks is right where zeros are expected."""
        if whole is None or (all(piece is None for piece in pieces.values()) and not whole.any()):
            return None
        return split.compare(pieces, whole, gradient_layout(layout), scale=self.gradient_scale)

    def _all(self, place: int, get: Callable[[Tape, int], Tensor | None]) -> dict[tuple[int, int], Tensor | None]:
        """Return what every rank and micro-batch of a place has recorded, None where nothing was."""
        numbers = range(self.trail.plan.num_micro_batches)
        return {(rank, n): get(self.tapes[rank], n) for rank in self.trail.ranks_of(place) for n in numbers}

    def _present(self, place: int, get: Callable[[Tape, int], Tensor | None]) -> dict[tuple[int, int], Tensor | None]:
        """Return the records of a place that are there."""
        return {at: piece for at, piece in self._all(place, get).items() if piece is not None}


def _or_zeros(gradient: Tensor | None, graph: Graph, ref: Ref) -> Tensor | None:
    """Return a recorded gradient; zeros where none arrived at a value that requires one; None where it requires none."""
    spec = graph.spec(ref)
    if gradient is not None or not spec.requires_grad:
        return gradient
    return torch.zeros(spec.shape, dtype=spec.dtype)

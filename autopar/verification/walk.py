"""Walks along one rank's graph, forward over values and backward over gradients, to the first that is wrong.

What is right follows from one device: a value of the rank's graph stands for one of the traced graph (a change of type
for the value that it changes), and its part by the types. The gradient of what a change of type makes is the sum of
those that its readers pass back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from autopar.graph.graph import Block, Graph, Layout, Op, Ref
from autopar.lower.emit import layout_of, use_layout
from autopar.lower.read_plan import local_graph_and_typings, whole_graph
from autopar.plan.mesh import DATA_AXES, R
from autopar.plan.plan import Plan
from autopar.rules.apply import BATCH
from autopar.verification.record import PRELUDE, Tape, Watch
from autopar.verification.slices import Mismatch, Split, gradient_layout, largest, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where the walk ended.

    Attributes:
        kind: ``value``: ``op`` makes a wrong one; ``passed``: it passes a wrong gradient back to ``ref``; ``read``: a
            place reads another value than was made; ``arrived``: the gradient of ``ref`` is not the sum of those passed.
        place: a block, or ``PRELUDE``.
    """

    kind: Literal["value", "passed", "read", "arrived"]
    place: int
    ref: Ref
    op: Op | None
    mismatch: Mismatch

    @property
    def is_block(self) -> bool:
        """A block whose operators must be looked at one by one."""
        return self.place != PRELUDE and self.kind in ("value", "passed")


class Trail:
    """The graphs of both sides under a plan.

    Attributes:
        local: one rank's graph for one micro-batch.
        whole: one device's for the global batch.
        split: how the plan spreads tensors.
    """

    def __init__(self, plan: Plan, graph: Graph) -> None:
        self.plan = plan
        self.local, self.typings = local_graph_and_typings(plan, graph)
        self.whole = whole_graph(plan, graph)
        self.split = Split.of(plan.mesh, plan.num_micro_batches, self.local)
        self._own = {op.name for op in (*self.whole.prelude, *self.whole.ops)}

    # --- what to record: on ranks, and on one device

    def boundaries(self) -> tuple[Watch, Watch]:
        """Values that blocks hand on, the gradients passed back to them and to parameters, and all of the prelude."""
        made = frozenset(ref for block in self.local.blocks for ref in self.local.block_outputs(block))
        origins = frozenset(self.origin(ref) for ref in made)
        prelude = frozenset(ref for op in self.local.prelude for ref in _outputs(op))
        places = frozenset((PRELUDE, *range(len(self.local.blocks))))
        here = self._edges(self.local, made, self.local.blocks)
        there = self._edges(self.whole, origins, self.whole.blocks)
        return Watch(values=made | prelude, edges=here, places=places), Watch(values=origins, edges=there)

    def inside(self, index: int) -> tuple[Watch, Watch]:
        """Everything in one block."""

        def watch(graph: Graph) -> Watch:
            ops = graph.block_ops(graph.blocks[index])
            edges = frozenset((op.name, position) for op in ops for position in range(len(op.operands)))
            return Watch(values=frozenset(ref for op in ops for ref in _outputs(op)), edges=edges)

        return replace(watch(self.local), places=frozenset((index,))), watch(self.whole)

    def _edges(self, graph: Graph, made: frozenset[Ref], blocks: Sequence[Block]) -> frozenset[tuple[str, int]]:
        """Operands that are handed on or are parameters."""
        return frozenset(
            (op.name, position)
            for block in blocks
            for op in graph.block_ops(block)
            for position, ref in enumerate(op.operands)
            if ref in made or graph.is_parameter(ref)
        )

    # --- what is right

    def is_change(self, op: Op) -> bool:
        """Whether the operator is a change of type."""
        return op.name not in self._own

    def origin(self, ref: Ref) -> Ref:
        """The value of the traced graph that ``ref`` stands for."""
        producer = self.local.producer(ref)
        while producer is not None and self.is_change(producer):
            ref = producer.operands[0]
            producer = self.local.producer(ref)
        return ref

    def gradient(self, ref: Ref, own: Tape) -> Tensor | None:
        """Of a live value of the rank's graph, whole; None where there is none to compare with."""
        producer = self.local.producer(ref)
        if producer is None or not self.is_change(producer):
            return _or_zeros(own.gradients.get((ref, 0)), self.whole, ref)
        parts = [
            self.passed(op, position, own)
            for op in (self.local.ops[user] for user in self.local.users(ref))
            for position, operand in enumerate(op.operands)
            if operand == ref
        ]
        if ref == self.local.loss:
            parts.append(torch.ones((), dtype=self.local.spec(ref).dtype))
        known = [part for part in parts if part is not None]
        return torch.stack(known).sum(0) if known and len(known) == len(parts) else None

    def passed(self, op: Op, position: int, own: Tape) -> Tensor | None:
        """The gradient that ``op`` passes back to one operand, whole; None as above."""
        if self.is_change(op):
            return self.gradient(Ref(op.name), own)
        origin = self.origin(op.operands[position])
        before = sum(self.origin(ref) == origin for ref in op.operands[:position])
        traced = self.whole.producer(Ref(op.name))
        assert traced is not None
        same = [at for at, ref in enumerate(traced.operands) if ref == origin]
        if before >= len(same):
            return None
        return _or_zeros(own.edges.get((op.name, same[before], 0)), self.whole, origin)

    # --- the walk

    def first(self, tapes: Sequence[Tape], own: Tape, values: Mapping[Ref, Tensor]) -> Spot | None:
        """The first difference in what the ranks' ``tapes`` hold; ``own`` and ``values``: of one device.

        Elements on which the loss of one device does not depend count only if there is no other difference: rows that
        are masked out may hold anything.
        """
        walk = _Walk(self, tapes, own, values)
        return walk.forward(masked=True) or walk.backward() or walk.forward(masked=False)

    def layout(self, ref: Ref) -> Layout:
        """Types of a value where it is read."""
        if self.local.is_parameter(ref):
            return use_layout(self.local.parameter(ref.name))
        found = layout_of(self.local, ref)
        return tuple((axis, R if axis == BATCH else kind) for axis, kind in found) if ref in self.local.sums else found

    # --- in words

    def words(self, spot: Spot) -> tuple[str, str]:
        """What is wrong, and what is right beside it."""
        local, ref = self.local, spot.ref
        match spot.kind:
            case "value":
                return "the value that it makes" + (
                    f" (output {ref.index})" if ref.index else ""
                ), "what it reads agrees"
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
        """By axis; a change of type names its axis and itself."""
        found = [(t.axis, t.strategies[op.name].name) for t in self.typings if op.name in t.strategies]
        if self.is_change(op) and op.layouts:
            axis, kind = op.layouts[0][-1]
            before = dict(self.layout(op.operands[0])).get(axis, R)
            found.append((axis, f"change of type {before} to {kind}"))
        return tuple(found)

    def reads(self, op: Op) -> tuple[str, ...]:
        """Operands with types and local shapes."""
        return tuple(self._described(ref, self.layout(ref)) for ref in op.operands)

    def makes(self, op: Op) -> tuple[str, ...]:
        """Outputs likewise."""
        return tuple(self._described(ref, layout_of(self.local, ref)) for ref in _outputs(op))

    def _described(self, ref: Ref, layout: Layout) -> str:
        name = self.local.parameter(ref.name).key if self.local.is_parameter(ref) else str(ref)
        return f"{name} {list(self.local.spec(ref).shape)} {text(layout)}"

    def operands(self, op: Op) -> tuple[Ref, ...]:
        """What the operator reads, changes of type aside."""
        return tuple(self.origin(ref) for ref in op.operands)

    def readers(self, fqn: str) -> tuple[Op, ...]:
        """Operators that read a model parameter."""
        names = {p.name for p in self.local.parameters if p.fqn == fqn}
        return tuple(op for op in self.local.ops if any(ref.name in names for ref in op.operands))

    def sum_axes(self, fqn: str) -> tuple[str, ...]:
        """Axes over which the gradient of a model parameter is summed once a step."""
        mesh = self.plan.mesh
        pending = {axis for p in self.local.parameters if p.fqn == fqn for axis in p.gradient_sum_axes}
        return tuple(axis for axis in (*DATA_AXES, *sorted(pending)) if getattr(mesh, axis) > 1)

    def stage_of(self, block: int) -> int:
        """The pipeline stage of a block."""
        return next(stage.index for stage in self.plan.stages if stage.start <= block < stage.stop)

    def ranks_of(self, place: int) -> tuple[int, ...]:
        """Ranks that run a block; all of them for the prelude."""
        mesh = self.plan.mesh
        if place == PRELUDE:
            return tuple(range(mesh.world_size))
        pp_rank = self.plan.stages[self.stage_of(place)].pp_rank
        return tuple(rank for rank in range(mesh.world_size) if mesh.coordinate(rank)["pp"] == pp_rank)


class _Walk:
    """One comparison of all ranks with one device."""

    def __init__(self, trail: Trail, tapes: Sequence[Tape], own: Tape, values: Mapping[Ref, Tensor]) -> None:
        self.trail, self.local, self.split = trail, trail.local, trail.split
        self.tapes, self.own, self.values = tapes, own, values
        self.watch = tapes[0].watch
        self.gradient_scale = largest((*own.gradients.values(), *own.edges.values()))

    def forward(self, *, masked: bool) -> Spot | None:
        """The first wrong value."""
        for place in sorted(self.watch.places):
            for ref in dict.fromkeys(ref for tape in self.tapes for at, ref, _ in tape.reads if at == place):
                if (wrong := self._read(place, ref)) is not None:
                    return Spot(kind="read", place=place, ref=ref, op=None, mismatch=wrong)
            for op in self._ops(place):
                for ref in _outputs(op):
                    if ref in self.watch.values and (wrong := self._value(place, op, ref, masked)) is not None:
                        return Spot(kind="value", place=place, ref=ref, op=op, mismatch=wrong)
        return None

    def backward(self) -> Spot | None:
        """The first wrong gradient, from the loss on."""
        for place in sorted(self.watch.places - {PRELUDE}, reverse=True):
            for op in reversed(self._ops(place)):
                for ref in _outputs(op):
                    if ref in self.watch.values and (wrong := self._arrived(place, ref)) is not None:
                        return Spot(kind="arrived", place=place, ref=ref, op=op, mismatch=wrong)
                for position, ref in enumerate(op.operands):
                    if (op.name, position) in self.watch.edges:
                        wrong = self._passed(place, op, position)
                        if wrong is not None:
                            return Spot(kind="passed", place=place, ref=ref, op=op, mismatch=wrong)
        return None

    def _ops(self, place: int) -> tuple[Op, ...]:
        return self.local.prelude if place == PRELUDE else self.local.block_ops(self.local.blocks[place])

    def _read(self, place: int, ref: Ref) -> Mismatch | None:
        pieces = self._present(place, lambda tape, number: tape.reads.get((place, ref, number)))
        layout = self.local.parameter(ref.name).layout if self.local.is_parameter(ref) else self.trail.layout(ref)
        whole = self.values[self.trail.origin(ref)]
        return self._order(ref).compare(pieces, whole, layout)

    def _value(self, place: int, op: Op, ref: Ref, masked: bool) -> Mismatch | None:
        if place != PRELUDE and not self.local.users(ref) and ref != self.local.loss:
            return None
        pieces = self._present(place, lambda tape, number: tape.values.get((ref, number)))
        origin = self.trail.origin(ref)
        counts = self.own.gradients.get((origin, 0)) if masked else None
        scale = largest(self.values[self.trail.origin(operand)] for operand in op.operands)
        return self.split.compare(pieces, self.values[origin], layout_of(self.local, ref), scale=scale, counts=counts)

    def _arrived(self, place: int, ref: Ref) -> Mismatch | None:
        whole = self.trail.gradient(ref, self.own)
        pieces = self._all(place, lambda tape, number: tape.gradients.get((ref, number)))
        return self._gradient(pieces, whole, layout_of(self.local, ref), self._order(ref))

    def _passed(self, place: int, op: Op, position: int) -> Mismatch | None:
        whole = self.trail.passed(op, position, self.own)
        pieces = self._all(place, lambda tape, number: tape.edges.get((op.name, position, number)))
        ref = op.operands[position]
        return self._gradient(pieces, whole, self.trail.layout(ref), self._order(ref))

    def _order(self, ref: Ref) -> Split:
        return self.split.in_own_order if self.local.is_parameter(ref) else self.split

    def _gradient(
        self, pieces: Mapping[tuple[int, int], Tensor | None], whole: Tensor | None, layout: Layout, split: Split
    ) -> Mismatch | None:
        if whole is None or (all(piece is None for piece in pieces.values()) and not whole.any()):
            return None
        return split.compare(pieces, whole, gradient_layout(layout), scale=self.gradient_scale)

    def _all(self, place: int, get: Callable[[Tape, int], Tensor | None]) -> dict[tuple[int, int], Tensor | None]:
        numbers = range(self.trail.plan.num_micro_batches)
        return {(rank, n): get(self.tapes[rank], n) for rank in self.trail.ranks_of(place) for n in numbers}

    def _present(self, place: int, get: Callable[[Tape, int], Tensor | None]) -> dict[tuple[int, int], Tensor | None]:
        return {at: piece for at, piece in self._all(place, get).items() if piece is not None}


def _outputs(op: Op) -> Iterator[Ref]:
    return (Ref(op.name, index) for index in range(len(op.outputs)))


def _or_zeros(found: Tensor | None, graph: Graph, ref: Ref) -> Tensor | None:
    """A gradient that never came is zero; what needs none has none."""
    spec = graph.spec(ref)
    if found is not None or not spec.requires_grad:
        return found
    return torch.zeros(spec.shape, dtype=spec.dtype)

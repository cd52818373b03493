"""One block on one axis: the least cost for every combination of types at its boundary.

Blocks exchange values as they were made: a change of type belongs to the block that reads (see ``rules.apply``). So the
types of the values that cross a boundary are all that two blocks must agree on, and a block is one table over them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from math import prod
from typing import Protocol

from autopar import rules
from autopar.cost.operators.work import VIEWS
from autopar.errors import InfeasibleError
from autopar.graph.ir import Block, Graph, Op, Parameter, Ref, TensorSpec
from autopar.layout import I, P, R, Type
from autopar.planner.sharding.elimination import Marginal
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.strategy_energy import MAX_EXTRAS, Problem, Shared, rests_of, types_of
from autopar.planner.sharding.tables import FREE, Cost, Weights
from autopar.rules.conversions import collective_bytes, conversion, emitted_arguments
from autopar.rules.types import Local, Strategy

MAX_BOUNDARY_STATES = 1 << 14
"""Entries of a block's boundary table; past it, what crosses a boundary is never partial or replicated."""


Narrow = Callable[[Op, tuple[Strategy, ...]], tuple[Strategy, ...]]


class Pricing(Protocol):
    """What the layout search asks the cost model.

    ``changes_by_bytes``: changes of type cost the same for tensors of the same bytes, whatever their shapes and whichever of
    the dims after the first is split.
    """

    @property
    def changes_by_bytes(self) -> bool: ...

    def by_bytes(self, op: Op) -> bool:
        """Whether an operator costs the same at local shapes of the same bytes."""

    def op_cost(self, op: Op, operands: Sequence[TensorSpec]) -> Cost:
        """Seconds of one local operator, forward and backward, and bytes that it saves of its own making."""

    def collective_time_s(self, kind: str, num_bytes: int) -> float:
        """Seconds of a collective over the axis; bytes of the full tensor (all-to-all: of one rank's part)."""

    def saves(self, op: Op, operands: Sequence[TensorSpec]) -> Sequence[Ref]:
        """Operands and outputs that backward needs."""

    def gradient_bytes(self, spec: TensorSpec) -> int:
        """Bytes of a parameter's gradient as it is summed."""

    def state_bytes(self, spec: TensorSpec) -> float:
        """Bytes of a parameter with its gradient and optimizer states."""


@dataclass(slots=True)
class Saved:
    """What the operators of one graph keep for backward on one kind of device, by their names, whatever the axis.

    ``kept``: operands and outputs, parameters among them; ``storages``: those that they lie in, but for what is there anyway.
    """

    kept: dict[str, Sequence[Ref]] = field(default_factory=dict)
    storages: dict[str, Sequence[Ref]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Common:
    """What solvers share.

    ``structures``: those of equal structure, whatever they cost; ``changes``: those of equal size and pricing: costs of changes of type,
    by what these are of; ``saved``: those of one graph and device.
    """

    structures: Structures = field(default_factory=Structures)
    changes: dict[tuple[object, ...], Cost | None] = field(default_factory=dict)
    saved: Saved = field(default_factory=Saved)


@dataclass(slots=True)
class AxisCosts:
    """Prices of typings on an axis of ``size`` ranks.

    ``owners``: how many blocks read a parameter; each pays its share of what is paid once.
    ``narrow``: keeps those of an operator's strategies that it may take; None: all.
    ``changes``: of type, what they cost; may be those of other graphs at the same prices.
    ``structures``: may be those of other costs too.
    ``shared``: what problems at these prices have in common.
    ``saved``: what operators keep for backward; may be that of other costs of the same graph and device.
    """

    graph: Graph
    axis: str
    size: int
    pricing: Pricing
    owners: Mapping[str, int] = field(default_factory=dict)
    narrow: Narrow | None = None
    changes: dict[tuple[object, ...], Cost | None] = field(default_factory=dict)
    structures: Structures = field(default_factory=Structures)
    shared: Shared = field(init=False)
    _works: dict[int, tuple[Sequence[Strategy], list[Cost]]] = field(default_factory=dict)
    _kept: dict[object, list[Cost]] = field(default_factory=dict)
    saved: Saved = field(default_factory=Saved)
    parts: Fraction = field(init=False)
    _by_bytes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.parts = Fraction(self.size)
        self._by_bytes = self.pricing.changes_by_bytes
        self.shared = Shared(same=partial(_same, self.graph, self.owners, self._by_bytes), structures=self.structures)

    def saves(self, op: Op) -> Sequence[Ref]:
        """Storages that backward needs; what the batch brings and parameters are there anyway."""
        found = self.saved.storages.get(op.name)
        if found is None:
            kept = self.pricing.saves(op, tuple([self.graph.spec(ref) for ref in op.operands]))
            roots = dict.fromkeys([self.root(ref) for ref in kept])
            found = tuple([r for r in roots if not self.graph.is_parameter(r) and not self.graph.is_prelude(r)])
            self.saved.kept[op.name], self.saved.storages[op.name] = kept, found
        return found

    def root(self, ref: Ref) -> Ref:
        """The value whose storage ``ref`` lies in."""
        producer = self.graph.producer(ref)
        while producer is not None and producer.target in VIEWS:
            ref = producer.operands[0]
            producer = self.graph.producer(ref)
        return ref

    def operators(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> list[Cost]:
        """See :class:`autopar.planner.sharding.strategy_energy.Costs`."""
        if id(strategies) not in self._works:  # equal calls are offered the same strategies
            self._works[id(strategies)] = strategies, self._works_of(op, strategies)
        works = self._works[id(strategies)][1]
        if not saved:
            return works
        where: dict[Ref, tuple[bool, int]] = {Ref(op.name, i): (False, i) for i in range(len(op.outputs))}
        where |= {self.root(ref): (True, i) for i, ref in enumerate(op.operands)}
        kept = tuple([(self.graph.spec(ref).num_bytes, *where[ref]) for ref in saved])
        key = id(strategies), kept
        if key not in self._kept:
            self._kept[key] = [
                Cost(cost.time_s, 0.0, cost.saved_bytes + sum([
                    size * self._share((strategy.inputs if is_read else strategy.outputs)[i])
                    for size, is_read, i in kept
                ]))
                for strategy, cost in zip(strategies, works, strict=True)
            ]  # fmt: skip
        return self._kept[key]

    def _works_of(self, op: Op, strategies: Sequence[Strategy]) -> list[Cost]:
        """Of the same call at the same local shapes the work is the same, or where these have the same bytes."""
        known: dict[tuple[int | bool, ...], Cost] = {}
        found = []
        by_bytes = self.pricing.by_bytes(op)
        for strategy in strategies:
            if strategy.target or strategy.extra or strategy.communication:
                found.append(self._work(op, strategy))
                continue
            split: tuple[int | bool, ...] = tuple([t.dim for t in (*strategy.inputs, *strategy.outputs)])
            if by_bytes:
                split = tuple([dim >= 0 for dim in split])
            if split not in known:
                known[split] = self._work(op, strategy)
            found.append(known[split])
        return found

    def _work(self, op: Op, strategy: Strategy) -> Cost:
        """Work of one operator, and what it saves of its own making."""
        specs = [self.graph.spec(ref) for ref in op.operands]
        operands = tuple([self.local(s, t) for s, t in zip(specs, strategy.inputs, strict=True)])
        outputs = tuple([self.local(s, t) for s, t in zip(op.outputs, strategy.outputs, strict=True)])
        local = Local(axis=self.axis, size=self.parts, operands=operands, outputs=outputs)
        one = rules.localize(op, strategy, local)
        cost = self.pricing.op_cost(one, operands)
        time_s = cost.time_s
        for inside in strategy.communication:
            time_s += self.pricing.collective_time_s(inside.kind, inside.num_bytes)
        return Cost(time_s=time_s, saved_bytes=cost.saved_bytes, forward_s=cost.forward_s)

    def _share(self, kind: Type) -> float:
        return 1.0 / self.size if kind.is_split else 1.0

    def change(self, spec: TensorSpec, source: Type, target: Type) -> Cost | None:
        """A change of type, forward and backward; None where there is none."""
        if self._by_bytes:
            inner = source.dim > 0, target.dim > 0
            key: tuple[object, ...] = (
                spec.num_bytes,
                spec.requires_grad,
                source.kind,
                target.kind,
                source == target,
                *inner,
            )
        else:
            key = (spec, source, target)
        if key not in self.changes:
            self.changes[key] = self._change(spec, source, target)
        return self.changes[key]

    def _change(self, spec: TensorSpec, source: Type, target: Type) -> Cost | None:
        found = conversion(source, target, requires_grad=spec.requires_grad)
        if found is None:
            return None
        if not found.target:
            return FREE
        local = self.local(spec, source)
        args = (Ref("value"), *emitted_arguments(self.axis, source, target))
        call = Op(name="change", target=found.target, args=args, outputs=(self.local(spec, target),))
        copied = self.pricing.op_cost(call, (local,))
        forward_s, backward_s = self._sent_s(found.forward, spec), self._sent_s(found.backward, spec)
        return Cost(time_s=copied.time_s + forward_s + backward_s, forward_s=copied.forward_s + forward_s)

    def _sent_s(self, kind: str | None, spec: TensorSpec) -> float:
        if kind is None:
            return 0.0
        num_bytes = collective_bytes(kind, full_num_bytes=spec.num_bytes, size=self.size)
        return self.pricing.collective_time_s(kind, num_bytes)

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        """A parameter read in another type than the one at rest."""
        spec = parameter.spec
        if (rest, wanted) == (I, R) and spec.requires_grad:  # the sum is done once a step
            time_s = self.pricing.collective_time_s("all_reduce", self.pricing.gradient_bytes(spec))
            return Cost(step_s=time_s / self.owners.get(parameter.name, 1))
        if rest == I and wanted == P:
            return FREE  # kept on one rank: its gradient is whole on every rank
        return self.change(spec, rest, wanted)

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        """A parameter's state."""
        whole = self.pricing.state_bytes(self.local(parameter.spec, rest))
        return Cost(state_bytes=whole / self.owners.get(parameter.name, 1))

    def local(self, spec: TensorSpec, kind: Type) -> TensorSpec:
        """One rank's part."""
        if not kind.is_split:
            return spec
        shape = list(spec.shape)
        shape[kind.dim] //= self.size
        return TensorSpec(shape=tuple(shape), dtype=spec.dtype, requires_grad=spec.requires_grad)


def _same(graph: Graph, owners: Mapping[str, int], by_bytes: bool, ref: Ref) -> object:
    """Equal for values whose changes of type cost the same; nothing of the costs, which hold what asks for it."""
    spec = graph.spec(ref)
    if graph.is_parameter(ref):
        return spec, owners.get(ref.name, 1)
    return (spec.num_bytes, spec.requires_grad) if by_bytes else spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a block shares with others, by position: equal blocks share one table.

    ``inputs``, ``outputs``: values; ``shared``: parameters that other blocks read as well.
    """

    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    shared: tuple[str, ...]


class BlockProblem:
    """One block of a graph on one axis.

    Args:
        rests: allowed types at rest by parameter name, where pins restrict them.
        types: what each value at the boundary may be; see :func:`crossing_types`.
        boundary: what it has a table over; None: all that it shares with others.
    """

    def __init__(
        self,
        graph: Graph,
        block: Block,
        costs: AxisCosts,
        rests: Mapping[str, Sequence[Type]],
        types: Mapping[Ref, Sequence[Type]],
        boundary: Boundary | None = None,
    ) -> None:
        self.graph, self.block, self.costs, self.rests = graph, block, costs, rests
        self.boundary = boundary_of(graph, block, costs.owners) if boundary is None else boundary
        self.problem, self.keep = self._problem(types, MAX_EXTRAS)
        if self.problem.is_wide(self.keep):
            self.problem, self.keep = self._problem(types, 1)
        if self.problem.is_wide(self.keep):
            self.problem, self.keep = self._problem(types, 1, repeated(graph, block))

    def _problem(
        self, types: Mapping[Ref, Sequence[Type]], max_extras: int, alike: Mapping[str, object] | None = None
    ) -> tuple[Problem, tuple[int, ...]]:
        graph, block, costs = self.graph, self.block, self.costs
        problem = Problem(
            graph,
            costs,
            offered=self._offered,
            at_rest=self.rest_types,
            max_extras=max_extras,
            alike=alike,
            shared=costs.shared,
        )
        keep = [problem.arrival(ref, types[ref]) for ref in self.boundary.inputs]
        for op in graph.block_ops(block):
            problem.operator(op)
        problem.close()
        keep += [problem.departure(ref, types[ref]) for ref in self.boundary.outputs]
        keep += [problem.parameter(graph.parameter(name)) for name in self.boundary.shared]
        if graph.loss.name in problem.ops:
            loss = graph.spec(graph.loss)
            problem.end(graph.loss, lambda kind: costs.change(loss, kind, I))
        return problem, tuple(keep)

    def rest_types(self, parameter: Parameter) -> Sequence[Type]:
        """The types at rest that a parameter may have."""
        return self.rests.get(parameter.name) or rests_of(parameter.spec, self.costs.size)

    def solve_all(self, weights: Sequence[Weights]) -> list[Marginal]:
        """For each of these the table over (inputs, outputs, shared parameters)."""
        return self.problem.solve_all(self.keep, weights)

    def _offered(self, op: Op) -> tuple[Strategy, ...]:
        operands = tuple(self.graph.spec(ref) for ref in op.operands)
        size, narrow = self.costs.parts, self.costs.narrow
        offered = rules.strategies(op, operands, axis=self.costs.axis, size=size, fallback=True)
        kept = offered if narrow is None else narrow(op, offered)
        if not kept:
            raise InfeasibleError(
                "the pins leave each operator a strategy",
                value=f"{op.target} of {op.module or op.name} on {self.costs.axis}={size}",
                remedy="split experts over a degree that divides their number, or drop the pin of ep"
                if self.costs.axis == "tp"
                else "choose a degree that divides heads and sequence, or drop the pin of cp_attention",
            )
        return kept


def boundary_of(graph: Graph, block: Block, owners: Mapping[str, int]) -> Boundary:
    """What ``block`` shares with others; the loss is no output."""
    return Boundary(
        inputs=graph.block_inputs(block),
        outputs=tuple(ref for ref in graph.block_outputs(block) if ref != graph.loss or graph.users(ref)),
        shared=tuple(p.name for p in graph.block_parameters(block) if owners.get(p.name, 1) > 1),
    )


_REFINED = 2
"""How many operators back two operators of one line of code must be the same to count as one that is repeated."""


def repeated(graph: Graph, block: Block) -> dict[str, object]:
    """A key for each operator of ``block``, equal for what one line of code does again and again (a loop over time).

    Such operators then share one strategy: a choice for each step would be a problem too wide to solve, and layouts
    that change from step to step are not worth having. Literals (which step it is) do not count.
    """
    ops = graph.block_ops(block)
    keys: dict[str, object] = {
        op.name: (op.module, op.source, op.target, op.outputs, tuple(graph.spec(ref) for ref in op.operands))
        if op.source
        else op.name
        for op in ops
    }
    for _ in range(_REFINED):
        number: dict[object, int] = {}
        short = {name: number.setdefault(key, len(number)) for name, key in keys.items()}
        keys = {
            op.name: (short[op.name], *((short.get(ref.name, ref.name), ref.index) for ref in op.operands))
            for op in ops
        }
    return keys


def crossing_types(graph: Graph, boundaries: Iterable[Boundary], size: int) -> dict[Ref, tuple[Type, ...]]:
    """Types for the values that blocks share: all, or I and S alone at boundaries that too many values cross.

    A value is offered the same types by every block that it touches, or their tables would not fit together.
    """
    every: dict[Ref, tuple[Type, ...]] = {}
    narrow: set[Ref] = set()
    for boundary in boundaries:
        refs = (*boundary.inputs, *boundary.outputs)
        every |= {ref: types_of(graph.spec(ref), size) for ref in refs if ref not in every}
        if prod(len(every[ref]) for ref in refs) > MAX_BOUNDARY_STATES:
            narrow.update(refs)
    return {
        ref: tuple(t for t in types if t != P and (t != R or I not in types)) if ref in narrow else types
        for ref, types in every.items()
    }

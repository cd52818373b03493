"""One block on one axis: what the choices of its typing cost, and the least cost for every combination of types at its boundary.

:class:`AxisPricing` asks the cost model for one operator or collective; :class:`AxisCosts` puts the prices of a graph's choices together
from such answers, as :class:`autopar.planner.sharding.strategy_energy.Costs` asks for them.

Blocks exchange values as they were made: a change of type belongs to the block that reads (see ``rules.apply``). So the types of the values
that cross a boundary are all that two blocks must agree on, and a block is one table over them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod

from autopar.cost.blocks.block_cost import SENDING, messages
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.operators.operator_times import OperatorTimes, time_of_work
from autopar.cost.operators.work import VIEWS, is_elementwise, work
from autopar.errors import InfeasibleError
from autopar.graph.graph import Block, Graph, Op, Parameter, Ref, TensorSpec
from autopar.hardware.device import Device
from autopar.plan.mesh import I, Mesh, P, R, Type
from autopar.planner.sharding.elimination import Marginals
from autopar.planner.sharding.energy import FREE, Cost, Table, Weights
from autopar.planner.sharding.input_axes import BATCH
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.strategy_energy import MAX_EXTRAS, Problem, rests_of, types_of
from autopar.rules import table as rules
from autopar.rules.local_calls import collective_bytes, conversion, emitted_arguments, localize
from autopar.rules.strategy import Local, Strategy
from autopar.rules.table import without_refs

Narrow = Callable[[Op, tuple[Strategy, ...]], tuple[Strategy, ...]]
"""Keeps those of an operator's strategies that it may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPricing:
    """Prices of one axis of a mesh by the cost model.

    Attributes:
        state_bytes_per_element: of a parameter with gradient and optimizer states, on one rank of the data axes.
        gradient_itemsize: bytes of an element of a gradient sum.
        measured: times of operators that go before the roofline.
        collective_weight: what a second of a collective counts beside a second of work.
    """

    device: Device
    collectives: CollectiveModel
    mesh: Mesh
    axis: str
    state_bytes_per_element: float
    gradient_itemsize: int
    collective_weight: float = 1.0
    measured: OperatorTimes | None = None

    @property
    def changes_by_bytes(self) -> bool:
        """Whether changes of type, and elementwise operators, cost the same for tensors of the same bytes.

        Whatever their shapes, and whichever of the dims after the first is split; what was measured, was measured at a shape.
        """
        return self.measured is None

    def op_cost(self, op: Op, operands: Sequence[TensorSpec]) -> Cost:
        """Seconds of one local operator, forward and backward, and bytes that it saves of its own making."""
        done = work(op, operands, self.device.kernel_kind)
        time = time_of_work(done, op, self.device)
        if self.measured is not None:
            time = self.measured.time(op, operands, time)
        return Cost(time.forward_s + time.backward_s, 0.0, done.saved_bytes)

    def collective_time_s(self, kind: str, num_bytes: int, axis: str | None = None) -> float:
        """Seconds of a collective over the axis, or over another one; bytes of the full tensor (all-to-all: of one rank's part)."""
        return self.collective_weight * self.collectives.time_s(kind, num_bytes, self.mesh, (axis or self.axis,))

    def saves(self, op: Op, operands: Sequence[TensorSpec]) -> Sequence[Ref]:
        """Operands and outputs that backward needs."""
        done = work(op, operands, self.device.kernel_kind)
        kept = [op.operands[i] for i in done.saved]
        return (*kept, Ref(op.name)) if done.saves_output else tuple(kept)

    def gradient_bytes(self, spec: TensorSpec) -> int:
        """Bytes of a parameter's gradient as it is summed."""
        return spec.numel * self.gradient_itemsize

    def state_bytes(self, spec: TensorSpec) -> float:
        """Bytes of a parameter with its gradient and optimizer states."""
        return spec.numel * self.state_bytes_per_element


@dataclass(slots=True, kw_only=True)
class AxisCosts:
    """Choices and prices of typings on an axis of ``size`` ranks.

    Attributes:
        graph: before the axis is applied.
        owners: how many blocks read a parameter; each pays its share of what is paid once.
        rests: allowed types at rest by parameter name, where pins or :func:`narrow_boundaries` restrict them.
        narrow: keeps those of an operator's strategies that it may take; None: all.
        tables: see :class:`autopar.planner.sharding.strategy_energy.Costs`.
    """

    graph: Graph
    axis: str
    size: int
    pricing: AxisPricing
    owners: Mapping[str, int] = field(default_factory=dict)
    rests: Mapping[str, Sequence[Type]] = field(default_factory=dict)
    narrow: Narrow | None = None
    tables: dict[Hashable, tuple[Table, ...]] = field(default_factory=dict)
    _changes: dict[Hashable, Cost | None] = field(default_factory=dict)
    _calls: dict[Hashable, int] = field(default_factory=dict)
    _works: dict[tuple[int, Hashable], Cost] = field(default_factory=dict)
    parts: Fraction = field(init=False)

    def __post_init__(self) -> None:
        self.parts = Fraction(self.size)

    # --- choices

    def offered(self, op: Op) -> tuple[Strategy, ...]:
        """The strategies that an operator may take.

        Raises:
            InfeasibleError: pins leave it none.
        """
        operands = tuple([self.graph.spec(ref) for ref in op.operands])
        offered = rules.default_table().strategies(op, operands, axis=self.axis, size=self.parts, fallback=True)
        kept = offered if self.narrow is None else self.narrow(op, offered)
        if not kept:
            raise InfeasibleError(
                f"The pins leave no strategy to {op.target} on {self.axis}={self.size}",
                where=op.module or op.name,
                fix="Split experts over a degree that divides their number, or drop the pin of ep"
                if self.axis == "tp"
                else "Choose a degree that divides heads and sequence, or drop the pin of cp_attention",
            )
        return kept

    def rest_types(self, parameter: Parameter) -> Sequence[Type]:
        """The types at rest that a parameter may have."""
        return self.rests.get(parameter.name) or rests_of(parameter.spec, self.size)

    # --- operators

    def saves(self, op: Op) -> Sequence[Ref]:
        """Storages that backward needs; what the batch brings and parameters are there anyway."""
        kept = self.pricing.saves(op, tuple([self.graph.spec(ref) for ref in op.operands]))
        roots = dict.fromkeys([self._root(ref) for ref in kept])
        return tuple([r for r in roots if not self.graph.is_parameter(r) and not self.graph.is_prelude(r)])

    def _root(self, ref: Ref) -> Ref:
        """The value whose storage ``ref`` lies in."""
        producer = self.graph.producer(ref)
        while producer is not None and producer.target in VIEWS:
            ref = producer.operands[0]
            producer = self.graph.producer(ref)
        return ref

    def operators(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> list[Cost]:
        """See :class:`autopar.planner.sharding.strategy_energy.Costs`."""
        specs = tuple([self.graph.spec(ref) for ref in op.operands])
        call = op.target, without_refs(op.args), without_refs(op.kwargs), specs, op.outputs
        number = self._calls.setdefault(call, len(self._calls))
        by_bytes, works_by_class = self.pricing.changes_by_bytes and is_elementwise(op), self._works
        works = []
        for strategy in strategies:
            key = number, _local_class(strategy, by_bytes)
            if key not in works_by_class:
                works_by_class[key] = self._work(op, specs, strategy)
            works.append(works_by_class[key])
        if not saved:
            return works
        where: dict[Ref, tuple[bool, int]] = {Ref(op.name, i): (False, i) for i in range(len(op.outputs))}
        where |= {self._root(ref): (True, i) for i, ref in enumerate(op.operands)}
        kept = [(self.graph.spec(ref).num_bytes, *where[ref]) for ref in saved]
        return [
            Cost(cost.time_s, 0.0, cost.saved_bytes + sum([
                num_bytes / (self.size if (strategy.inputs if is_read else strategy.outputs)[i].is_split else 1)
                for num_bytes, is_read, i in kept
            ]))
            for strategy, cost in zip(strategies, works, strict=True)
        ]  # fmt: skip

    def _work(self, op: Op, specs: Sequence[TensorSpec], strategy: Strategy) -> Cost:
        """Work of one operator, and what it saves of its own making."""
        operands = tuple([self.local(s, t) for s, t in zip(specs, strategy.inputs, strict=True)])
        outputs = tuple([self.local(s, t) for s, t in zip(op.outputs, strategy.outputs, strict=True)])
        local = Local(axis=self.axis, size=self.parts, operands=operands, outputs=outputs)
        called = localize(op, strategy, local)
        cost = self.pricing.op_cost(called, operands)
        if op.target in SENDING:  # over axes that were applied before, or over these and this one
            sent = messages(called, dict(zip(called.operands, operands, strict=True)).__getitem__)
            sent_s = [self.pricing.collective_time_s(own.kind, own.num_bytes, own.axis) for own in sent]
        else:
            sent_s = [self.pricing.collective_time_s(own.kind, own.num_bytes) for own in strategy.communication]
        return Cost(cost.time_s + sum(sent_s), 0.0, cost.saved_bytes)

    def local(self, spec: TensorSpec, kind: Type) -> TensorSpec:
        """One rank's part."""
        if not kind.is_split:
            return spec
        shape = list(spec.shape)
        shape[kind.dim] //= self.size
        return TensorSpec(shape=tuple(shape), dtype=spec.dtype, requires_grad=spec.requires_grad)

    # --- changes of type

    def price_class(self, ref: Ref) -> Hashable:
        """See :class:`autopar.planner.sharding.strategy_energy.Costs`."""
        spec = self.graph.spec(ref)
        if self.graph.is_parameter(ref):
            return spec, self.owners.get(ref.name, 1)
        return (spec.num_bytes, spec.requires_grad) if self.pricing.changes_by_bytes else spec

    def change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        """A change of type, forward and backward; None where there is none."""
        spec = self.graph.spec(ref)
        key: Hashable = spec, source, target
        if self.pricing.changes_by_bytes:
            key = (
                spec.num_bytes, spec.requires_grad, source.kind, target.kind, source == target, source.dim > 0,
                target.dim > 0,
            )  # fmt: skip
        if key not in self._changes:
            self._changes[key] = self._change(spec, source, target)
        return self._changes[key]

    def _change(self, spec: TensorSpec, source: Type, target: Type) -> Cost | None:
        change = conversion(source, target, requires_grad=spec.requires_grad)
        if change is None:
            return None
        if not change.target:
            return FREE
        local = self.local(spec, source)
        args = (Ref("value"), *emitted_arguments(self.axis, source, target))
        call = Op(name="change", target=change.target, args=args, outputs=(self.local(spec, target),))
        copied_s = self.pricing.op_cost(call, (local,)).time_s
        return Cost(copied_s + self._sent_s(change.forward, spec) + self._sent_s(change.backward, spec))

    def _sent_s(self, kind: str | None, spec: TensorSpec) -> float:
        if kind is None:
            return 0.0
        num_bytes = collective_bytes(kind, full_num_bytes=spec.num_bytes, size=self.size)
        return self.pricing.collective_time_s(kind, num_bytes)

    # --- parameters

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        """A parameter read in another type than the one at rest."""
        spec = parameter.spec
        if (rest, wanted) == (I, R) and spec.requires_grad:  # the sum is done once a step
            time_s = self.pricing.collective_time_s("all_reduce", self.pricing.gradient_bytes(spec))
            return Cost(step_s=time_s / self.owners.get(parameter.name, 1))
        if rest == I and wanted == P:
            return FREE  # kept on one rank: its gradient is whole on every rank
        return self.change(Ref(parameter.name), rest, wanted)

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        """A parameter's state."""
        state_bytes = self.pricing.state_bytes(self.local(parameter.spec, rest))
        return Cost(state_bytes=state_bytes / self.owners.get(parameter.name, 1))


def _local_class(strategy: Strategy, by_bytes: bool) -> Hashable:
    """Equal for strategies of one call whose local operators cost the same: they have the same shapes, or as many bytes."""
    if strategy.target or strategy.extra or strategy.communication:
        return strategy.name
    split = [kind.dim for kind in (*strategy.inputs, *strategy.outputs)]
    return tuple([dim >= 0 for dim in split] if by_bytes else split)


MAX_BOUNDARY_STATES = 1 << 14
"""Entries of a block's boundary table; past it, what crosses the boundary is never partial or replicated, and has fewer types still."""

REFINEMENTS = 2
"""How many operators back two operators of one line of code must be the same to count as one that is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a block shares with others, by position: equal blocks share one table.

    Attributes:
        inputs, outputs: values.
        shared: names of parameters that other blocks read as well.
    """

    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    shared: tuple[str, ...]

    @property
    def keys(self) -> list[Ref | str]:
        """What the dims of the block's table are over: values by their reference, parameters by name."""
        return [*self.inputs, *self.outputs, *self.shared]


class BlockProblem:
    """The typing of one block of a graph on one axis.

    Args:
        costs: of the graph.
        types: what each value at the boundary may be; see :func:`crossing_types`.
        boundary: what it has a table over.
        structures: what is known of other problems.

    Attributes:
        keep: the variables of ``problem`` that the table is over, as :attr:`Boundary.keys`.
    """

    def __init__(
        self,
        block: Block,
        costs: AxisCosts,
        types: Mapping[Ref, Sequence[Type]],
        boundary: Boundary,
        structures: Structures,
    ) -> None:
        self.block, self.costs, self.boundary, self.structures = block, costs, boundary, structures
        self.problem, self.keep = self._problem(types, MAX_EXTRAS)
        if self.problem.is_wide(self.keep):
            alike = repeated(costs.graph, block)
            self.problem, self.keep = self._problem(types, 1, alike)
            if not self.problem.is_eliminated(self.keep):
                kept = self._reachable(types)
                self.costs = replace(costs, narrow=lambda op, _: kept[op.name])
                self.problem, self.keep = self._problem(types, 1, alike)
                if self.problem.is_wide(self.keep):
                    self.problem, self.keep = self._problem(types, 0, alike)

    def _problem(
        self, types: Mapping[Ref, Sequence[Type]], max_extras: int, alike: Mapping[str, object] | None = None
    ) -> tuple[Problem, tuple[int, ...]]:
        graph, costs = self.costs.graph, self.costs
        problem = Problem(graph, costs, max_extras=max_extras, alike=alike, structures=self.structures)
        keep = [problem.arrival(ref, types[ref]) for ref in self.boundary.inputs]
        for op in graph.block_ops(self.block):
            problem.operator(op)
        problem.close()
        keep += [problem.departure(ref, types[ref]) for ref in self.boundary.outputs]
        keep += [problem.parameter(graph.parameter(name)) for name in self.boundary.shared]
        if graph.loss.name in problem.ops:
            problem.end(graph.loss, lambda kind: costs.change(graph.loss, kind, I))
        return problem, tuple(keep)

    def _reachable(self, types: Mapping[Ref, Sequence[Type]]) -> dict[str, tuple[Strategy, ...]]:
        """The strategies of each operator that read no value in parts but as it is made or arrives: nothing is cut inside the block."""
        graph, made = self.costs.graph, {ref: {*types[ref]} for ref in self.boundary.inputs}
        kept: dict[str, tuple[Strategy, ...]] = {}
        for op in graph.block_ops(self.block):
            offered = self.costs.offered(op)
            uncut = [
                strategy for strategy in offered
                if all(not kind.is_split or kind in made.get(ref, (kind,))
                       for ref, kind in zip(op.operands, strategy.inputs, strict=True))
            ]  # fmt: skip
            kept[op.name] = tuple(uncut) or offered  # pins may leave others alone
            for index in range(len(op.outputs)):
                made[Ref(op.name, index)] = {strategy.outputs[index] for strategy in kept[op.name]}
        return kept

    def solve_all(self, weights: Sequence[Weights]) -> Marginals:
        """For each of these the table over (inputs, outputs, shared parameters)."""
        return self.problem.solve_all(self.keep, weights)


def boundary_of(graph: Graph, block: Block, owners: Mapping[str, int]) -> Boundary:
    """What ``block`` shares with others; the loss is no output.

    Args:
        owners: how many blocks read a parameter, by its name.
    """
    return Boundary(
        inputs=graph.block_inputs(block),
        outputs=tuple(ref for ref in graph.block_outputs(block) if ref != graph.loss or graph.users(ref)),
        shared=tuple(p.name for p in graph.block_parameters(block) if owners.get(p.name, 1) > 1),
    )


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
    for _ in range(REFINEMENTS):
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


def narrow_boundaries(
    costs: AxisCosts, boundaries: Iterable[Boundary], types: Mapping[Ref, tuple[Type, ...]]
) -> tuple[dict[Ref, tuple[Type, ...]], dict[str, Sequence[Type]]]:
    """Fewer types of what crosses boundaries whose tables would still be too large: of values, and of parameters at rest.

    A block that reads what several others made, beside parameters that they read as well, has a table over all of them. First
    parameters are whole at rest, the smallest first; then values are whole or split along their first dim after the samples;
    then values are whole: each until the table is small enough.
    """
    graph, found, rests = costs.graph, dict(types), dict(costs.rests)

    def bytes_of(key: Ref | str) -> int:
        return graph.spec(key).num_bytes if isinstance(key, Ref) else graph.parameter(key).spec.num_bytes

    def offered(key: Ref | str) -> Sequence[Type]:
        return found[key] if isinstance(key, Ref) else rests.get(key) or rests_of(graph.parameter(key).spec, costs.size)

    for boundary in boundaries:
        values = sorted((*boundary.inputs, *boundary.outputs), key=bytes_of)
        fewer: list[tuple[Ref | str, tuple[Type, ...]]] = [
            (name, (I,)) for name in sorted(boundary.shared, key=bytes_of) if name not in costs.rests
        ]
        fewer += [(ref, _whole_or_split(graph, ref, found[ref])) for ref in values]
        fewer += [(ref, found[ref][:1]) for ref in values]
        for key, left in fewer:
            if prod(len(offered(each)) for each in boundary.keys) <= MAX_BOUNDARY_STATES:
                break
            if isinstance(key, Ref):
                found[key] = left
            else:
                rests[key] = left
    return found, rests


def _whole_or_split(graph: Graph, ref: Ref, types: Sequence[Type]) -> tuple[Type, ...]:
    """Of the types of a value the first, which is whole, and a split along its first dim after that of the samples."""
    producer = graph.producer(ref)
    samples = dict(producer.layouts[ref.index]).get(BATCH) if producer is not None and producer.layouts else None
    return (*types[:1], *[t for t in types[1:] if t.is_split and t != samples][:1])

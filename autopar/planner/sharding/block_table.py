"""One block on one axis: the prices of its choices, and its least cost for every combination of types at its boundary.

:class:`AxisPricing` asks the cost model for the price of one operator or collective. :class:`AxisCosts` derives from these the prices of
all choices in a graph, as :class:`autopar.planner.sharding.strategy_energy.Costs` requires. :class:`BlockProblem` is the energy of one
block.

Blocks exchange values in the types in which they were produced: a change of type belongs to the block that reads the value (see
``rules.apply``). Two blocks must therefore agree on nothing but the types of the values that cross their boundary and the types at rest (as
they lie in memory between steps) of the parameters that both read. One table over these types says of a block all that others need.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from autopar.cost.blocks.block_cost import messages
from autopar.cost.network.collectives import CollectiveModel
from autopar.cost.operators.operator_times import OperatorTimes, time_of_work
from autopar.cost.operators.work import VIEWS, is_elementwise, work
from autopar.errors import InfeasibleError
from autopar.graph.graph import Block, Graph, Op, Parameter, Ref, TensorSpec
from autopar.hardware.device import Device
from autopar.plan.mesh import I, Mesh, P, R, Type, conversion
from autopar.planner.sharding.elimination import Marginals
from autopar.planner.sharding.energy import FREE, Cost, Table, Weights
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.strategy_energy import MAX_EXTRAS, TypingProblem, repetition_classes, rests_of
from autopar.rules import table as rules
from autopar.rules.local_calls import localize
from autopar.rules.strategy import Local, Strategy
from autopar.rules.table import without_refs

Narrow = Callable[[Op, tuple[Strategy, ...]], tuple[Strategy, ...]]
"""Returns the strategies that an operator may take out of those that the rules offer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisPricing:
    """Prices of operators and collectives on one axis of a mesh, by the cost model.

    Attributes:
        device: the device that runs the operators.
        collectives: the model of collectives.
        mesh: the mesh.
        axis: the axis whose typing is priced.
        state_bytes_per_element: bytes of an element of a parameter with its gradient and optimizer states, not sharded over data ranks.
        gradient_itemsize: bytes of an element of a gradient sum.
        collective_weight: factor on the seconds of collectives.
        measured: measured times of operators, which take precedence over the roofline; None if there are none.
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
    def prices_by_bytes(self) -> bool:
        """Whether changes of type and elementwise operators have equal costs for tensors of equal bytes.

        This holds whatever the shapes are and whichever of the dims after the first is split. It does not hold for measured times, which
        were taken at one shape.
        """
        return self.measured is None

    def op_cost(self, op: Op, operands: Sequence[TensorSpec]) -> Cost:
        """Return the cost of an operator as one rank runs it: seconds, forward and backward, and saved bytes of internal tensors."""
        done = work(op, operands, self.device.kernel_kind)
        time = time_of_work(done, op, self.device)
        if self.measured is not None:
            time = self.measured.time(op, operands, time)
        return Cost(time.forward_s + time.backward_s, 0.0, done.saved_bytes)

    def collective_time_s(self, kind: str, num_bytes: int, axis: str | None = None) -> float:
        """Return the weighted seconds of a collective over the axis, or over another one.

        Args:
            kind: the kind of collective.
            num_bytes: bytes of the full tensor; for an all-to-all bytes of the part of one rank.
            axis: the other axis; None is the axis that is priced.
        """
        return self.collective_weight * self.collectives.time_s(kind, num_bytes, self.mesh, (axis or self.axis,))

    def saves(self, op: Op, operands: Sequence[TensorSpec]) -> Sequence[Ref]:
        """Return the operands and outputs of an operator that backward needs."""
        done = work(op, operands, self.device.kernel_kind)
        kept = [op.operands[i] for i in done.saved]
        return (*kept, Ref(op.name)) if done.saves_output else tuple(kept)

    def gradient_bytes(self, spec: TensorSpec) -> int:
        """Return the bytes of the gradient of a parameter in the dtype in which it is summed."""
        return spec.numel * self.gradient_itemsize

    def state_bytes(self, spec: TensorSpec) -> float:
        """Return the bytes of a parameter with its gradient and optimizer states."""
        return spec.numel * self.state_bytes_per_element


@dataclass(slots=True, kw_only=True)
class AxisCosts:
    """Choices and prices of typings on an axis of ``size`` ranks; implements :class:`autopar.planner.sharding.strategy_energy.Costs`.

    Attributes:
        graph: the graph before the axis is applied.
        axis: the axis.
        size: the number of its ranks.
        pricing: the prices of operators and collectives.
        owners: how many blocks read each parameter, by its name; each block bears an equal share of its costs of state and gradient sums.
        rests: allowed types at rest by parameter name, where pins or the limit on boundary tables restrict them.
        narrow: restricts the strategies of operators; None restricts nothing.
        tables: see :class:`autopar.planner.sharding.strategy_energy.Costs`.
        exact_size: ``size`` as a fraction, as the rules expect it.
    """

    graph: Graph
    axis: str
    size: int
    pricing: AxisPricing
    owners: Mapping[str, int] = field(default_factory=dict)
    rests: Mapping[str, Sequence[Type]] = field(default_factory=dict)
    narrow: Narrow | None = None
    tables: dict[Hashable, tuple[Table, ...]] = field(default_factory=dict)
    _changes: dict[Hashable, Cost | None] = field(default_factory=dict)  # costs of changes of type
    _calls: dict[Hashable, int] = field(default_factory=dict)  # a number for each distinct call of an operator
    _op_costs: dict[tuple[int, Hashable], Cost] = field(default_factory=dict)  # by this number and class of strategy
    exact_size: Fraction = field(init=False)

    def __post_init__(self) -> None:
        self.exact_size = Fraction(self.size)

    # --- choices

    def offered(self, op: Op) -> tuple[Strategy, ...]:
        """Return the strategies that an operator may take.

        Raises:
            InfeasibleError: the pins leave it no strategy.
        """
        operands = tuple([self.graph.spec(ref) for ref in op.operands])
        offered = rules.default_table().strategies(op, operands, axis=self.axis, size=self.exact_size, fallback=True)
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
        """Return the types at rest that a parameter may have."""
        return self.rests.get(parameter.name) or rests_of(parameter.spec, self.size)

    # --- operators

    def saves(self, op: Op) -> Sequence[Ref]:
        """Return the values whose storage an operator keeps for backward, except parameters and the prelude, which are kept anyway."""
        kept = self.pricing.saves(op, tuple([self.graph.spec(ref) for ref in op.operands]))
        roots = dict.fromkeys([self._root(ref) for ref in kept])
        return tuple([r for r in roots if not self.graph.is_parameter(r) and not self.graph.is_prelude(r)])

    def _root(self, ref: Ref) -> Ref:
        """Return the value that ``ref`` is a view of, which owns the storage."""
        producer = self.graph.producer(ref)
        while producer is not None and producer.target in VIEWS:
            ref = producer.operands[0]
            producer = self.graph.producer(ref)
        return ref

    def operator_costs(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> list[Cost]:
        """Return the cost of an operator under each strategy; see :class:`autopar.planner.sharding.strategy_energy.Costs`."""
        specs = tuple([self.graph.spec(ref) for ref in op.operands])
        call = op.target, without_refs(op.args), without_refs(op.kwargs), specs, op.outputs
        number = self._calls.setdefault(call, len(self._calls))
        by_bytes, known_costs = self.pricing.prices_by_bytes and is_elementwise(op), self._op_costs
        costs = []
        for strategy in strategies:
            key = number, _local_class(strategy, by_bytes)
            if key not in known_costs:
                known_costs[key] = self._op_cost(op, specs, strategy)
            costs.append(known_costs[key])
        if not saved:
            return costs
        place_of: dict[Ref, tuple[bool, int]] = {ref: (False, ref.index) for ref in op.refs}
        place_of |= {self._root(ref): (True, i) for i, ref in enumerate(op.operands)}  # True: an operand
        saved_places = [(self.graph.spec(ref).num_bytes, *place_of[ref]) for ref in saved]
        return [
            Cost(cost.time_s, 0.0, cost.saved_bytes + sum([
                num_bytes / (self.size if (strategy.inputs if is_operand else strategy.outputs)[i].is_split else 1)
                for num_bytes, is_operand, i in saved_places
            ]))
            for strategy, cost in zip(strategies, costs, strict=True)
        ]  # fmt: skip

    def _op_cost(self, op: Op, specs: Sequence[TensorSpec], strategy: Strategy) -> Cost:
        """Return the cost of the call that one rank makes under a strategy, and of its collectives, without saved operands and outputs."""
        operands = tuple([self.local(s, t) for s, t in zip(specs, strategy.inputs, strict=True)])
        outputs = tuple([self.local(s, t) for s, t in zip(op.outputs, strategy.outputs, strict=True)])
        local = Local(axis=self.axis, size=self.exact_size, operands=operands, outputs=outputs)
        local_op = localize(op, strategy, local)
        cost = self.pricing.op_cost(local_op, operands)
        collectives = messages(local_op, dict(zip(local_op.operands, operands, strict=True)).__getitem__)
        sent_s = [self.pricing.collective_time_s(c.kind, c.num_bytes, c.axis) for c in collectives]
        return Cost(cost.time_s + sum(sent_s), 0.0, cost.saved_bytes)

    def local(self, spec: TensorSpec, kind: Type) -> TensorSpec:
        """Return the spec of the part of a tensor that one rank has."""
        if not kind.is_split:
            return spec
        shape = list(spec.shape)
        shape[kind.dim] //= self.size
        return TensorSpec(shape=tuple(shape), dtype=spec.dtype, requires_grad=spec.requires_grad)

    # --- changes of type

    def price_class(self, ref: Ref) -> Hashable:
        """Return a key that is equal for values with equal costs; see :class:`autopar.planner.sharding.strategy_energy.Costs`."""
        spec = self.graph.spec(ref)
        if self.graph.is_parameter(ref):
            return spec, self.owners.get(ref.name, 1)
        return (spec.num_bytes, spec.requires_grad) if self.pricing.prices_by_bytes else spec

    def change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        """Return the cost of a change of type, forward and backward; None where there is no such change."""
        spec = self.graph.spec(ref)
        key: Hashable = spec, source, target
        if self.pricing.prices_by_bytes:
            key = (  # splits of the first dim have prices of their own
                spec.num_bytes, spec.requires_grad, source.kind, target.kind, source == target, source.dim > 0,
                target.dim > 0,
            )  # fmt: skip
        if key not in self._changes:
            self._changes[key] = self._change(spec, source, target)
        return self._changes[key]

    def _change(self, spec: TensorSpec, source: Type, target: Type) -> Cost | None:
        """Return the cost of a change of type, worked out anew: that of its copies and of its collectives."""
        change = conversion(source, target, requires_grad=spec.requires_grad)
        if change is None:
            return None
        if not change.target:
            return FREE
        local = self.local(spec, source)
        args = (Ref("value"), self.axis, *change.arguments(source, target))
        call = Op(name="change", target=change.target, args=args, outputs=(self.local(spec, target),))
        copied_s = self.pricing.op_cost(call, (local,)).time_s
        return Cost(copied_s + self._collective_s(change.forward, spec) + self._collective_s(change.backward, spec))

    def _collective_s(self, kind: str | None, spec: TensorSpec) -> float:
        """Return the seconds of the collective of a change of type; 0 where it needs none."""
        if kind is None:
            return 0.0
        return self.pricing.collective_time_s(kind, spec.num_bytes // (self.size if kind == "all_to_all" else 1))

    # --- parameters

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        """Return the cost of reading a parameter of type ``rest`` at rest in the type ``wanted``; None where that is impossible."""
        spec = parameter.spec
        if (rest, wanted) == (I, R) and spec.requires_grad:  # the gradient is summed once a step
            time_s = self.pricing.collective_time_s("all_reduce", self.pricing.gradient_bytes(spec))
            return Cost(step_s=time_s / self.owners.get(parameter.name, 1))
        if rest == I and wanted == P:
            return FREE  # one rank contributes the value to the sum; the gradient is whole on every rank
        return self.change(Ref(parameter.name), rest, wanted)

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        """Return the cost of the state of a parameter."""
        state_bytes = self.pricing.state_bytes(self.local(parameter.spec, rest))
        return Cost(state_bytes=state_bytes / self.owners.get(parameter.name, 1))


def _local_class(strategy: Strategy, by_bytes: bool) -> Hashable:
    """Return a key that is equal for strategies of one call that give a rank tensors of equal shapes, or of equal bytes if ``by_bytes``."""
    if strategy.target:
        return strategy.name
    split_dims = [kind.dim for kind in (*strategy.inputs, *strategy.outputs)]
    return tuple([dim >= 0 for dim in split_dims] if by_bytes else split_dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a block shares with other blocks, in an order that equal blocks have in common.

    Attributes:
        inputs: values that it reads from other blocks.
        outputs: values that other blocks read.
        shared: names of parameters that other blocks read as well.
    """

    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    shared: tuple[str, ...]

    @property
    def keys(self) -> list[Ref | str]:
        """What each dim of the table of the block stands for: values by reference, parameters by name."""
        return [*self.inputs, *self.outputs, *self.shared]


class BlockProblem:
    """The typing of one block of a graph on one axis.

    If its elimination tables grow too large, choices are restricted step by step: values with several readers get fewer further types and
    repeated operators share a strategy; then values are not cut inside the block; then values get no further types.

    Args:
        block: the block.
        costs: the choices and prices of the graph.
        types: the types that each value at the boundary may have.
        boundary: what the block shares with others, over which its table is.
        structures: cache of what depends on the structure of problems alone.

    Attributes:
        problem: the energy of the block.
        keep: the variables of ``problem`` that the table is over, in the order of :attr:`Boundary.keys`.
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
            op_classes = repetition_classes(costs.graph, block)
            self.problem, self.keep = self._problem(types, 1, op_classes)
            if not self.problem.is_eliminated(self.keep):
                uncut = self._uncut_strategies(types)
                self.costs = replace(costs, narrow=lambda op, _: uncut[op.name])
                self.problem, self.keep = self._problem(types, 1, op_classes)
                if self.problem.is_wide(self.keep):
                    self.problem, self.keep = self._problem(types, 0, op_classes)

    def _problem(
        self, types: Mapping[Ref, Sequence[Type]], max_extras: int, op_classes: Mapping[str, object] | None = None
    ) -> tuple[TypingProblem, tuple[int, ...]]:
        """Return the energy of the block, and the variables of its table in the order of :attr:`Boundary.keys`."""
        graph, costs = self.costs.graph, self.costs
        problem = TypingProblem(graph, costs, max_extras=max_extras, op_classes=op_classes, structures=self.structures)
        keep = [problem.add_arrival(ref, types[ref]) for ref in self.boundary.inputs]
        for op in graph.block_ops(self.block):
            problem.add_operator(op)
        problem.connect_readers()
        keep += [problem.add_departure(ref, types[ref]) for ref in self.boundary.outputs]
        keep += [problem.add_parameter(graph.parameter(name)) for name in self.boundary.shared]
        if graph.loss.name in problem.ops:
            problem.add_end(graph.loss, lambda kind: costs.change(graph.loss, kind, I))
        return problem, tuple(keep)

    def _uncut_strategies(self, types: Mapping[Ref, Sequence[Type]]) -> dict[str, tuple[Strategy, ...]]:
        """Return for each operator the strategies that read each value whole, or split in a way in which it may be produced or arrive.

        No value is then cut inside the block: changed from whole to split, or from one split to another.
        """
        graph, produced = self.costs.graph, {ref: {*types[ref]} for ref in self.boundary.inputs}
        kept: dict[str, tuple[Strategy, ...]] = {}
        for op in graph.block_ops(self.block):
            offered = self.costs.offered(op)
            uncut = [
                strategy for strategy in offered
                if all(not kind.is_split or kind in produced.get(ref, (kind,))
                       for ref, kind in zip(op.operands, strategy.inputs, strict=True))
            ]  # fmt: skip
            kept[op.name] = tuple(uncut) or offered  # pins may leave only strategies that cut a value
            for index in range(len(op.outputs)):
                produced[Ref(op.name, index)] = {strategy.outputs[index] for strategy in kept[op.name]}
        return kept

    def solve_all(self, weights: Sequence[Weights]) -> Marginals:
        """Return the table of the block, over its inputs, outputs and shared parameters, under each of the weights."""
        return self.problem.solve_all(self.keep, weights)


def boundary_of(graph: Graph, block: Block, owners: Mapping[str, int]) -> Boundary:
    """Return what ``block`` shares with others; the loss is no output unless an operator reads it.

    Args:
        graph: the graph.
        block: one of its blocks.
        owners: how many blocks read each parameter, by its name.
    """
    return Boundary(
        inputs=graph.block_inputs(block),
        outputs=tuple(ref for ref in graph.block_outputs(block) if ref != graph.loss or graph.users(ref)),
        shared=tuple(p.name for p in graph.block_parameters(block) if owners.get(p.name, 1) > 1),
    )

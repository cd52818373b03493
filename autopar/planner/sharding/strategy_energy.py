"""The typing of some operators on one mesh axis as an energy: the cost of their strategies and of the changes of type between them.

The energy has these variables and tables:

- one variable for each operator, its strategy, with a table for its work and saved activations;
- one for each parameter, its type at rest (in which it lies in memory between steps: I or S(d)), with a table for its state;
- one for each value that comes from outside, the type in which it arrives;
- one for each value that several operators read: the type in which it is produced and the *set of further types* made from it, at most
  :data:`MAX_EXTRAS`. The set carries the cost of these changes, so that readers of the same type share one change, as ``rules.apply``
  shares it inside a block. A table forbids a reader whose type is neither the produced one nor in the set. A value with a single reader
  needs no such variable: it has a table over producer and reader.

In wide problems the repetitions of one operator (a loop over time) share one variable (``op_classes``), and so do their values.

Each cost has four parts that are weighted only when the energy is solved (:class:`autopar.planner.sharding.energy.Cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.graph.graph import Block, Graph, Op, Parameter, Ref, TensorSpec
from autopar.plan.mesh import I, P, R, S, Type
from autopar.planner.sharding.elimination import EnergySolver, Marginals, prepare
from autopar.planner.sharding.energy import FREE, Cost, Table, UnweightedFactor, Weights, cost_columns, summed_parts
from autopar.planner.sharding.resharding import Flow, Produced, Structures, Wanted, flow_to_many, flow_to_one, forbid
from autopar.rules.strategy import Strategy

MAX_EXTRAS = 2
"""Further types that one value with several readers may be changed to inside a block; wide blocks allow one, the widest none."""

WIDE_ENTRIES = 1 << 20
"""Entries of the largest elimination table (8 MiB of float64) above which a problem counts as wide."""

REPETITION_DEPTH = 2
"""Two operators of one line of code are repetitions of each other if their operands agree up to this many producers back."""

_Reader = tuple[Op, tuple[int, ...]]
"""An operator that reads a value, and the positions of the value among its operands."""


class Costs(Protocol):
    """The choices and prices that a problem needs; a cost of None means that a choice is not allowed.

    Attributes:
        tables: cache of the cost tables of flows (:mod:`autopar.planner.sharding.resharding`), by flow and price class.
    """

    @property
    def tables(self) -> dict[Hashable, tuple[Table, ...]]: ...

    def offered(self, op: Op) -> Sequence[Strategy]:
        """Return the strategies that an operator may take."""

    def rest_types(self, parameter: Parameter) -> Sequence[Type]:
        """Return the types at rest that a parameter may have."""

    def saves(self, op: Op) -> Sequence[Ref]:
        """Return the operands and outputs of an operator that backward needs."""

    def operator_costs(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> Sequence[Cost]:
        """Return the cost of an operator under each strategy, with what it saves for backward.

        Args:
            op: the operator.
            strategies: the strategies to price.
            saved: the values that it saves for backward and that no operator before it saved.
        """

    def change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        """Return the cost of changing the type of a value, forward and backward."""

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        """Return the cost of reading a parameter of type ``rest`` at rest in the type ``wanted``."""

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        """Return the cost of the state of a parameter."""

    def price_class(self, ref: Ref) -> Hashable:
        """Return a key that is equal for values whose changes of type cost the same, by which tables are cached."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A solution of a problem.

    Attributes:
        strategies: the strategy of each operator, by its name.
        parameters: the type at rest of each parameter, by its name.
    """

    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Type]


class TypingProblem:
    """The energy of a typing, which is built in this order.

    Add what arrives from outside, then the operators in graph order; call :meth:`connect_readers`; add what must hold for values that leave
    or end; then solve.

    Args:
        graph: the graph with the specs of values and the parameters.
        costs: the choices and prices.
        max_extras: the most further types that one value may be changed to.
        op_classes: a class of operators, by name; operators of one class take the same strategy where they are offered the same ones.
        structures: cache of what depends on the structure of problems alone.

    Attributes:
        states: the states of each variable: strategies, types, or types with sets of further types.
        factors: the tables of the energy.
        ops: the variable of each operator, by its name.
        arrivals: the variable of each value that comes from outside.
        rests: the variable of the type at rest of each parameter, by its name.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        *,
        max_extras: int = MAX_EXTRAS,
        op_classes: Mapping[str, object] | None = None,
        structures: Structures | None = None,
    ) -> None:
        self.graph, self.costs, self.max_extras = graph, costs, max_extras
        self.op_classes = op_classes or {}
        self.structures = Structures() if structures is None else structures
        self.states: list[Sequence[object]] = []
        self.factors: list[UnweightedFactor] = []
        self.ops: dict[str, int] = {}
        self.arrivals: dict[Ref, int] = {}
        self.rests: dict[str, int] = {}
        self._readers: dict[Ref, list[_Reader]] = {}
        self._saved: set[Ref] = set()
        self._variables: dict[object, int] = {}  # of operators and values, by their classes

    # --- building

    def add_arrival(self, ref: Ref, types: Sequence[Type]) -> int:
        """Add a variable for the type in which a value from outside arrives; return it."""
        self.arrivals[ref] = self._variable(types)
        return self.arrivals[ref]

    def add_parameter(self, parameter: Parameter) -> int:
        """Add a variable for the type at rest of a parameter, unless there is one; return it."""
        if parameter.name not in self.rests:
            types = self.costs.rest_types(parameter)
            v = self.rests[parameter.name] = self._variable(types)
            self._add_costs((v,), [self.costs.at_rest(parameter, t) for t in types])
        return self.rests[parameter.name]

    def add_operator(self, op: Op) -> None:
        """Add an operator and the parameters that it reads. A value that several operators save is charged to the first of them."""
        strategies = self.costs.offered(op)
        if op.name in self.op_classes:
            v = self._variable_of_class((self.op_classes[op.name], tuple(strategies)), strategies)
        else:
            v = self._variable(strategies)
        self.ops[op.name] = v
        newly_saved = [ref for ref in self.costs.saves(op) if ref not in self._saved]
        self._saved.update(newly_saved)
        self._add_costs((v,), self.costs.operator_costs(op, strategies, newly_saved))
        positions: dict[Ref, list[int]] = {}
        for i, ref in enumerate(op.operands):
            positions.setdefault(ref, []).append(i)
        for ref, indices in positions.items():
            self._readers.setdefault(ref, []).append((op, tuple(indices)))
            if self.graph.is_parameter(ref):
                self.add_parameter(self.graph.parameter(ref.name))

    def add_departure(self, ref: Ref, types: Sequence[Type]) -> int:
        """Add a variable for the type in which a value leaves, which is the type in which it is produced; return it."""
        leaving = self._variable(types)
        allowed = np.array([[produced == t for t in types] for produced in self._produced(ref)])
        self._add_allowed((self._source(ref), leaving), allowed)
        return leaving

    def require_same_type(self, a: Ref, b: Ref) -> None:
        """Require that two values are produced in the same type."""
        allowed = np.array([[x == y for y in self._produced(b)] for x in self._produced(a)])
        self._add_allowed((self._source(a), self._source(b)), allowed)

    def add_end(self, ref: Ref, cost: Callable[[Type], Cost | None]) -> None:
        """Add the cost of the type in which a value is produced that ends here (the loss, say); a cost of None forbids the type."""
        self._add_costs((self._source(ref),), [cost(t) for t in self._produced(ref)])

    def connect_readers(self) -> None:
        """Add the tables between producers and readers, once all operators are there; values of no known producer are read at no cost."""
        for ref, readers in self._readers.items():
            if ref.name in self.ops or ref in self.arrivals or ref.name in self.rests:
                self._connect(ref, readers)

    # --- solving

    def solve_all(self, keep: tuple[int, ...], weights: Sequence[Weights]) -> Marginals:
        """Return the least energy for every combination of the variables ``keep``, under each of the weights."""
        return self._solver(keep).solve_all([factor.weighted(weights) for factor in self.factors], len(weights))

    def is_wide(self, keep: tuple[int, ...]) -> bool:
        """Return whether the largest elimination table is so large that a problem of fewer choices is to be preferred."""
        return self._solver(keep).largest > WIDE_ENTRIES

    def is_eliminated(self, keep: tuple[int, ...]) -> bool:
        """Return whether elimination is possible; otherwise each entry over ``keep`` takes an integer program."""
        return self._solver(keep).steps is not None

    def _solver(self, keep: tuple[int, ...]) -> EnergySolver:
        """Return the solver of this energy, from the cache if its structure is known."""
        sizes = tuple([len(states) for states in self.states])
        scopes = tuple([factor.scope for factor in self.factors])
        return prepare(sizes, scopes, keep, cache=self.structures.solvers)

    def choice(self, assignment: Sequence[int]) -> Choice:
        """Return an assignment as strategies and types by name."""
        strategies = {name: self.states[v][assignment[v]] for name, v in self.ops.items()}
        parameters = {name: self.states[v][assignment[v]] for name, v in self.rests.items()}
        return Choice(strategies=strategies, parameters=parameters)  # type: ignore[arg-type]

    def time_s(self, assignment: Sequence[int]) -> float:
        """Return the seconds of the forward and backward of a micro-batch under an assignment: the first part of costs."""
        return float(sum([f.parts[0][tuple([assignment[v] for v in f.scope])] for f in self.factors]))

    # --- tables

    def _variable(self, states: Sequence[object]) -> int:
        self.states.append(states)
        return len(self.states) - 1

    def _variable_of_class(self, key: object, states: Sequence[object]) -> int:
        """Return the variable of a class of operators or values, which is added on the first call."""
        if key not in self._variables:
            self._variables[key] = self._variable(states)
        return self._variables[key]

    def _source(self, ref: Ref) -> int:
        """Return the variable that decides the type in which a value is produced."""
        if ref.name in self.ops:
            return self.ops[ref.name]
        return self.arrivals[ref] if ref in self.arrivals else self.rests[ref.name]

    def _produced(self, ref: Ref) -> Produced:
        """Return the type in which a value is produced, for each state of the variable that decides it."""
        states = self.states[self._source(ref)]
        if ref.name in self.ops:
            return tuple([s.outputs[ref.index] for s in states])  # type: ignore[attr-defined]
        return tuple(states)  # type: ignore[arg-type]

    def _wanted(self, op: Op, positions: tuple[int, ...], ref: Ref, produced: Produced) -> Wanted:
        """Return for each strategy of ``op`` the types in which it reads ``ref``, which is its operand at these positions.

        I and R are the same type for a value without gradient; they become the one in which the value is produced.
        """
        strategies: Sequence[Strategy] = self.states[self.ops[op.name]]  # type: ignore[assignment]
        wanted = [frozenset([s.inputs[i] for i in positions]) for s in strategies]
        if self.graph.spec(ref).requires_grad or ref.name in self.rests:
            return tuple(wanted)
        whole = I if I in produced and R not in produced else R
        return tuple([frozenset([whole if t in (I, R) else t for t in types]) for types in wanted])

    def _change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        """Return the cost of a change of type of a value or parameter."""
        if ref.name in self.rests:
            return self.costs.use(self.graph.parameter(ref.name), source, target)
        return self.costs.change(ref, source, target)

    def _connect(self, ref: Ref, readers: list[_Reader]) -> None:
        """Add the tables between the producer of a value and its readers."""
        source, produced = self._source(ref), self._produced(ref)
        wanted = tuple([self._wanted(op, positions, ref, produced) for op, positions in readers])
        flow, parts = self._flow(ref, produced, wanted)
        if len(readers) == 1:
            if parts:
                self._add_factor((source, self.ops[readers[0][0].name]), parts)
            return
        if not self.op_classes:
            tables = [(self.ops[op.name], allowed) for (op, _), allowed in zip(readers, flow.to_readers, strict=True)]
            self._add_value(self._variable(flow.states), source, parts, flow, tables)
            return
        # operators that share a variable also share the variables of the values that they produce
        by_reader = {
            (self.ops[op.name], wanted_types): allowed
            for (op, _), wanted_types, allowed in zip(readers, wanted, flow.to_readers, strict=True)
        }
        spec = self.graph.spec(ref) if ref.name in self.ops else ref  # decides the cost of its changes of type
        value_class = (source, ref.index, spec, frozenset(by_reader))
        is_new = value_class not in self._variables
        value = self._variable_of_class(value_class, flow.states)
        if is_new:
            tables = [(reader, allowed) for (reader, _), allowed in by_reader.items()]
            self._add_value(value, source, parts, flow, tables)
        elif parts:  # each value that shares the variable adds its cost
            self._add_factor((value,), parts)

    def _add_value(
        self, value: int, source: int, parts: tuple[Table, ...], flow: Flow, readers: Iterable[tuple[int, Table | None]]
    ) -> None:
        """Add the tables of the variable of a value that several operators read.

        Args:
            value: the variable.
            source: the variable that decides the type in which the value is produced.
            parts: the parts of the cost of its changes of type.
            flow: its flow.
            readers: the variable of each reader, and the table that forbids what the reader cannot read; None forbids nothing.
        """
        if parts:
            self._add_factor((value,), parts)
        for variable, table in ((source, flow.from_source), *readers):
            if table is not None:
                self._add_factor((variable, value), (table,))

    def _flow(self, ref: Ref, produced: Produced, wanted: tuple[Wanted, ...]) -> tuple[Flow, tuple[Table, ...]]:
        """Return the flow of a value to its readers and the parts of its cost table, both from the caches where they are known."""
        number = self.structures.number
        key: tuple[object, ...] = (number(produced), *[number(types) for types in wanted])
        if len(wanted) > 1:
            key = (*key, self.max_extras, self.graph.spec(ref).requires_grad, ref.name in self.rests)
        if key not in self.structures.flows:
            self.structures.flows[key] = self._new_flow(ref, produced, wanted)
        flow, priced_key = self.structures.flows[key], (key, self.costs.price_class(ref))
        if priced_key not in self.costs.tables:
            costs = [FREE, *[self._change(ref, source, target) for source, target in flow.changes]]
            self.costs.tables[priced_key] = summed_parts(flow.terms, costs)
        return flow, self.costs.tables[priced_key]

    def _new_flow(self, ref: Ref, produced: Produced, wanted: tuple[Wanted, ...]) -> Flow:
        """Return the flow of a value to its readers, worked out anew."""
        if len(wanted) == 1:
            return flow_to_one(produced, wanted[0])
        return flow_to_many(produced, wanted, self.max_extras, lambda a, b: self._change(ref, a, b) is not None)

    def _add_costs(self, scope: tuple[int, ...], costs: Sequence[Cost | None]) -> None:
        """Add a factor over one variable with a cost for each state; None forbids a state."""
        parts = tuple(cost_columns(costs))
        if parts:
            self._add_factor(scope, parts)

    def _add_allowed(self, scope: tuple[int, ...], allowed: NDArray[np.bool_]) -> None:
        """Add a factor that forbids what is not allowed."""
        table = forbid(allowed)
        if table is not None:
            self._add_factor(scope, (table,))

    def _add_factor(self, scope: tuple[int, ...], parts: tuple[Table, ...]) -> None:
        """Add a factor; a table over the same variable twice becomes its diagonal."""
        if len(scope) == 2 and scope[0] == scope[1]:
            scope, parts = scope[:1], tuple(np.diagonal(part).copy() for part in parts)
        self.factors.append(UnweightedFactor(scope, parts))


def types_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """Return every type that a value of this shape can have on an axis of ``size`` ranks."""
    splits = tuple(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0)
    return (I, R, P, *splits) if spec.requires_grad else (R, P, *splits)


def rests_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """Return the types at rest that a parameter can have: whole, or split along a dim that ``size`` divides."""
    return (I, *(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0))


def repetition_classes(graph: Graph, block: Block) -> dict[str, object]:
    """Return a class for each operator of a block, by name, that is equal for the repetitions of one line of code (a loop over time).

    Repeated operators share one strategy. A choice for each repetition would make the problem too wide to solve, and layouts that change
    from step to step are not worthwhile. Literal arguments, such as the index of the step, do not count. Starting from what the operators
    themselves have in common, classes are refined by those of their operands.
    """
    ops = graph.block_ops(block)
    classes: dict[str, object] = {
        op.name: (op.module, op.source, op.target, op.outputs, tuple(graph.spec(ref) for ref in op.operands))
        if op.source
        else op.name
        for op in ops
    }
    for _ in range(REPETITION_DEPTH):
        number_of_class: dict[object, int] = {}
        numbers = {name: number_of_class.setdefault(c, len(number_of_class)) for name, c in classes.items()}
        classes = {
            op.name: (numbers[op.name], *((numbers.get(ref.name, ref.name), ref.index) for ref in op.operands))
            for op in ops
        }
    return classes

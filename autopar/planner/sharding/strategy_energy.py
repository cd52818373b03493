"""A typing on one mesh axis as an energy: the cost of the strategies of some operators and of the changes of type between them.

The energy has these variables and tables:

- one variable for each operator, its strategy, with a table for its work and saved activations;
- one for each parameter, its type at rest (I or S(d)), with a table for its state;
- one for each value that comes from outside, the type in which it arrives;
- one for each value that several operators read: the type in which it is produced and the *set of further types* made from it, at most
  :data:`MAX_EXTRAS`. The set carries the cost of these changes, so that readers of the same type share one change, as ``rules.apply``
  shares it inside a block. A table forbids a reader whose type is neither the produced one nor in the set. A value with a single reader
  needs no such variable: it has a table over producer and reader.

Operators of one class (``op_classes``) share one variable (the steps of a loop over time), and so do their values.

Each cost has four parts that are weighted only when the energy is solved (:class:`autopar.planner.sharding.energy.Cost`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.graph.graph import Graph, Op, Parameter, Ref, TensorSpec
from autopar.plan.mesh import I, P, R, S, Type
from autopar.planner.sharding.elimination import EnergySolver, Marginals, prepare
from autopar.planner.sharding.energy import FREE, Cost, Table, UnweightedFactor, Weights, cost_columns, summed_parts
from autopar.planner.sharding.resharding import Flow, Produced, Structures, Wanted, flow_to_many, flow_to_one, forbid
from autopar.rules.strategy import Strategy

MAX_EXTRAS = 2
"""Further types that one value with several readers may be changed to inside a block; wide blocks allow one, the widest none."""

WIDE_ENTRIES = 1 << 20
"""Entries of the largest elimination table (8 MiB of float64) above which a problem counts as wide."""


class Costs(Protocol):
    """The choices and prices that a problem needs; a cost of None means that a choice is not allowed.

    Attributes:
        tables: cache of the cost tables of flows, by flow and price class; it serves all problems with these prices.
    """

    @property
    def tables(self) -> dict[Hashable, tuple[Table, ...]]: ...

    def offered(self, op: Op) -> Sequence[Strategy]:
        """Return the strategies that an operator may take."""

    def rest_types(self, parameter: Parameter) -> Sequence[Type]:
        """Return the types at rest that a parameter may have."""

    def saves(self, op: Op) -> Sequence[Ref]:
        """Return the operands and outputs of an operator that backward needs."""

    def operators(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> Sequence[Cost]:
        """Return the cost of the work of an operator under each strategy.

        Args:
            op: the operator.
            strategies: the strategies to price.
            saved: the values that it saves for backward and that no operator before it saved.
        """

    def change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        """Return the cost of changing the type of a value."""

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        """Return the cost of reading a parameter as ``wanted`` that is ``rest`` at rest."""

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        """Return the cost of the state of a parameter."""

    def price_class(self, ref: Ref) -> Hashable | None:
        """Return a key that is equal for values with the same changes of type at the same costs; None if no such key is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A solution of a problem.

    Attributes:
        strategies: the strategy of each operator, by its name.
        parameters: the type at rest of each parameter, by its name.
    """

    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Type]


class Problem:
    """The energy of a typing. Add the operators in graph order, call :meth:`close`, add what must hold at the boundary, then solve.

    Args:
        graph: the graph with the specs of values and the parameters.
        costs: the choices and prices.
        max_extras: the most further types that one value may be changed to.
        op_classes: a class of operators, by name; operators of one class take the same strategy where they are offered the same ones.
        structures: cache of what depends on the structure of problems alone.

    Attributes:
        states: the states of each variable.
        factors: the tables of the energy.
        ops: the variable of each operator, by its name.
        arrivals: the variable of each value that comes from outside.
        rests: the variable of each parameter, by its name.
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
        self._readers: dict[Ref, list[tuple[Op, tuple[int, ...]]]] = {}
        self._saved: set[Ref] = set()
        self._classes: dict[object, int] = {}

    # --- building

    def arrival(self, ref: Ref, types: Sequence[Type]) -> int:
        """Add a variable for the type in which a value from outside arrives; return it."""
        self.arrivals[ref] = self._variable(types)
        return self.arrivals[ref]

    def parameter(self, parameter: Parameter) -> int:
        """Return the variable for the type at rest of a parameter, which is added on the first call."""
        if parameter.name not in self.rests:
            types = self.costs.rest_types(parameter)
            v = self.rests[parameter.name] = self._variable(types)
            self._add((v,), [self.costs.at_rest(parameter, t) for t in types])
        return self.rests[parameter.name]

    def operator(self, op: Op) -> None:
        """Add an operator. A value that several operators save for backward is charged to the first of them."""
        strategies = self.costs.offered(op)
        if op.name in self.op_classes:
            v = self._variable_of_class((self.op_classes[op.name], tuple(strategies)), strategies)
        else:
            v = self._variable(strategies)
        self.ops[op.name] = v
        newly_saved = [ref for ref in self.costs.saves(op) if ref not in self._saved]
        self._saved.update(newly_saved)
        self._add((v,), self.costs.operators(op, strategies, newly_saved))
        positions: dict[Ref, list[int]] = {}
        for i, ref in enumerate(op.operands):
            positions.setdefault(ref, []).append(i)
        for ref, indices in positions.items():
            self._readers.setdefault(ref, []).append((op, tuple(indices)))
            if self.graph.is_parameter(ref):
                self.parameter(self.graph.parameter(ref.name))

    def departure(self, ref: Ref, types: Sequence[Type]) -> int:
        """Add a variable for the type in which a value leaves, which is the type in which it was produced; return it."""
        leaves = self._variable(types)
        self._add_allowed((self._source(ref), leaves), np.array([[m == t for t in types] for m in self._produced(ref)]))
        return leaves

    def same_type(self, a: Ref, b: Ref) -> None:
        """Require that two values have the same type."""
        allowed = np.array([[x == y for y in self._produced(b)] for x in self._produced(a)])
        self._add_allowed((self._source(a), self._source(b)), allowed)

    def end(self, ref: Ref, cost: Callable[[Type], Cost | None]) -> None:
        """Add the cost of the type in which ``ref`` is produced, for values that end here (the loss)."""
        self._add((self._source(ref),), [cost(t) for t in self._produced(ref)])

    def close(self) -> None:
        """Add the tables between producers and readers; call it once every operator is there."""
        for ref, readers in self._readers.items():
            if ref.name in self.ops or ref in self.arrivals or ref.name in self.rests:
                self._edges(ref, readers)

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
        """Return the seconds of the forward and backward of a micro-batch under an assignment."""
        return float(sum([f.parts[0][tuple([assignment[v] for v in f.scope])] for f in self.factors]))

    # --- tables

    def _variable(self, states: Sequence[object]) -> int:
        self.states.append(states)
        return len(self.states) - 1

    def _variable_of_class(self, key: object, states: Sequence[object]) -> int:
        """Return the variable of ``key``, which is added on the first call."""
        if key not in self._classes:
            self._classes[key] = self._variable(states)
        return self._classes[key]

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

    def _wanted(self, op: Op, where: tuple[int, ...], ref: Ref, produced: Produced) -> Wanted:
        """Return for each strategy of ``op`` the types in which it reads ``ref`` at the operand positions ``where``.

        I and R are the same type for a value without gradient; they become the one in which the value is produced.
        """
        strategies: Sequence[Strategy] = self.states[self.ops[op.name]]  # type: ignore[assignment]
        wanted = [frozenset([s.inputs[i] for i in where]) for s in strategies]
        if self.graph.spec(ref).requires_grad or ref.name in self.rests:
            return tuple(wanted)
        whole = I if I in produced and R not in produced else R
        return tuple([frozenset([whole if t in (I, R) else t for t in types]) for types in wanted])

    def _change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        """Return the cost of a change of type of a value or parameter."""
        if ref.name in self.rests:
            return self.costs.use(self.graph.parameter(ref.name), source, target)
        return self.costs.change(ref, source, target)

    def _edges(self, ref: Ref, readers: list[tuple[Op, tuple[int, ...]]]) -> None:
        """Add the tables between the producer of a value and its readers."""
        source, produced = self._source(ref), self._produced(ref)
        wanted = tuple([self._wanted(op, where, ref, produced) for op, where in readers])
        flow, parts = self._flow(ref, produced, wanted)
        if len(readers) == 1:
            if parts:
                self._append((source, self.ops[readers[0][0].name]), parts)
            return
        if not self.op_classes:
            pairs = [(self.ops[op.name], a) for (op, _), a in zip(readers, flow.to_readers, strict=True)]
            self._connect(self._variable(flow.states), source, parts, flow, pairs)
            return
        # operators that share a variable also share the variables of the values that they produce
        by_reader = {
            (self.ops[op.name], wanted_types): allowed
            for (op, _), wanted_types, allowed in zip(readers, wanted, flow.to_readers, strict=True)
        }
        spec = self.graph.spec(ref) if ref.name in self.ops else ref  # decides the cost of its changes of type
        value_class = (source, ref.index, spec, frozenset(by_reader))
        is_new = value_class not in self._classes
        value = self._variable_of_class(value_class, flow.states)
        if is_new:
            self._connect(value, source, parts, flow, [(reader, allowed) for (reader, _), allowed in by_reader.items()])
        elif parts:
            self._append((value,), parts)

    def _connect(
        self, value: int, source: int, parts: tuple[Table, ...], flow: Flow, readers: Iterable[tuple[int, Table | None]]
    ) -> None:
        """Add the tables of the variable of a value that several operators read."""
        if parts:
            self._append((value,), parts)
        for end, table in ((source, flow.from_source), *readers):
            if table is not None:
                self._append((end, value), (table,))

    def _flow(self, ref: Ref, produced: Produced, wanted: tuple[Wanted, ...]) -> tuple[Flow, tuple[Table, ...]]:
        """Return the flow of a value and the parts of its cost table, both from the caches where they are known."""
        price_class = self.costs.price_class(ref)
        if price_class is None:
            flow = self._new_flow(ref, produced, wanted)
            return flow, self._cost_parts(ref, flow)
        number = self.structures.number
        key: tuple[object, ...] = (number(produced), *[number(types) for types in wanted])
        if len(wanted) > 1:
            key = (*key, self.max_extras, self.graph.spec(ref).requires_grad, ref.name in self.rests)
        if key not in self.structures.flows:
            self.structures.flows[key] = self._new_flow(ref, produced, wanted)
        flow, priced_key = self.structures.flows[key], (key, price_class)
        if priced_key not in self.costs.tables:
            self.costs.tables[priced_key] = self._cost_parts(ref, flow)
        return flow, self.costs.tables[priced_key]

    def _new_flow(self, ref: Ref, produced: Produced, wanted: tuple[Wanted, ...]) -> Flow:
        """Return the flow of a value to its readers, worked out anew."""
        if len(wanted) == 1:
            return flow_to_one(produced, wanted[0])
        return flow_to_many(produced, wanted, self.max_extras, lambda a, b: self._change(ref, a, b) is not None)

    def _cost_parts(self, ref: Ref, flow: Flow) -> tuple[Table, ...]:
        """Return the parts of the cost table of a flow."""
        return summed_parts(flow.terms, [FREE, *[self._change(ref, source, target) for source, target in flow.changes]])

    def _add(self, scope: tuple[int, ...], costs: Sequence[Cost | None]) -> None:
        """Add a factor over one variable with a cost for each state; None forbids a state."""
        parts = tuple(cost_columns(costs))
        if parts:
            self._append(scope, parts)

    def _add_allowed(self, scope: tuple[int, ...], allowed: NDArray[np.bool_]) -> None:
        """Add a factor that forbids what is not allowed."""
        table = forbid(allowed)
        if table is not None:
            self._append(scope, (table,))

    def _append(self, scope: tuple[int, ...], parts: tuple[Table, ...]) -> None:
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

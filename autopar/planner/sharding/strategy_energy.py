"""A typing on one axis as an energy: what the strategies of some operators and the changes of type between them cost.

Variables, and the tables over them:

- one for each operator: its strategy; a table of its own for work and saved activations;
- one for each parameter: its type at rest (I or S(d)); a table of its own for its state;
- one for each value made elsewhere: its type as it arrives;
- one for each value that several operators read: its type as made, and the *set of further types* made from it, at
  most :data:`MAX_EXTRAS`. The set carries the cost of those changes, so that consumers which want the same type share
  one change, exactly as ``rules.apply`` shares it inside a block; a table forbids a consumer whose type is neither the
  one made nor in the set. A value with a single consumer needs no such variable: a table over maker and consumer.

Operators that the caller calls alike share one variable (the steps of a loop over time), and so do their values.

Every cost has four parts that are weighted only when the energy is made, so that one problem serves a whole sweep of
memory prices: seconds a micro-batch, seconds a step (gradient sums), bytes of saved activations, bytes of state.
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
"""Further types that one value with several readers may be changed to inside a block; one in wide blocks, none in the widest."""

WIDE_ENTRIES = 1 << 20
"""Entries of the largest table (8 MiB of float64) from which on a problem is wide."""


class Costs(Protocol):
    """What a problem must know of choices and prices; a cost of None where something is not allowed.

    ``tables``: of values between makers and readers, by what they follow from; kept for all problems with these prices.
    """

    @property
    def tables(self) -> dict[Hashable, tuple[Table, ...]]: ...

    def offered(self, op: Op) -> Sequence[Strategy]:
        """The strategies of an operator."""

    def rest_types(self, parameter: Parameter) -> Sequence[Type]:
        """The types at rest that a parameter may have."""

    def saves(self, op: Op) -> Sequence[Ref]:
        """Operands and outputs that backward needs."""

    def operators(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> Sequence[Cost]:
        """Work of one operator in each of these ways; ``saved``: what it saves for backward that no operator before it saved."""

    def change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        """A change of type of a value."""

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        """A parameter that is ``rest`` read as ``wanted``."""

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        """The state of a parameter."""

    def price_class(self, ref: Ref) -> Hashable | None:
        """Equal for values that have the same changes of type at the same costs; None: not known of any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A solution: names are of operators and parameters."""

    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Type]


class Problem:
    """The energy of a typing; add operators in order, then what must hold, then solve.

    Args:
        graph: for specs and parameters.
        costs: what may be chosen, and prices.
        max_extras: further types that one value may be changed to.
        alike: operators of one key take one strategy, where they are offered the same ones.
        structures: what is known of other problems, whatever they cost.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        *,
        max_extras: int = MAX_EXTRAS,
        alike: Mapping[str, object] | None = None,
        structures: Structures | None = None,
    ) -> None:
        self.graph, self.costs, self.max_extras = graph, costs, max_extras
        self.alike = alike or {}
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
        """A variable for the type in which a value made elsewhere arrives."""
        self.arrivals[ref] = self._variable(types)
        return self.arrivals[ref]

    def parameter(self, parameter: Parameter) -> int:
        """The variable for a parameter's type at rest; the same one for the same parameter."""
        if parameter.name not in self.rests:
            types = self.costs.rest_types(parameter)
            v = self.rests[parameter.name] = self._variable(types)
            self._add((v,), [self.costs.at_rest(parameter, t) for t in types])
        return self.rests[parameter.name]

    def operator(self, op: Op) -> None:
        """An operator; a value that several operators save for backward is charged to the first."""
        strategies = self.costs.offered(op)
        if op.name in self.alike:
            v = self._variable_of_class((self.alike[op.name], tuple(strategies)), strategies)
        else:
            v = self._variable(strategies)
        self.ops[op.name] = v
        first = [ref for ref in self.costs.saves(op) if ref not in self._saved]
        self._saved.update(first)
        self._add((v,), self.costs.operators(op, strategies, first))
        positions: dict[Ref, list[int]] = {}
        for i, ref in enumerate(op.operands):
            positions.setdefault(ref, []).append(i)
        for ref, where in positions.items():
            self._readers.setdefault(ref, []).append((op, tuple(where)))
            if self.graph.is_parameter(ref):
                self.parameter(self.graph.parameter(ref.name))

    def departure(self, ref: Ref, types: Sequence[Type]) -> int:
        """A variable for the type in which a value of these operators leaves: as it was made."""
        leaves = self._variable(types)
        self._add_allowed((self._source(ref), leaves), np.array([[m == t for t in types] for m in self._made(ref)]))
        return leaves

    def same_type(self, a: Ref, b: Ref) -> None:
        """Two values must have one type."""
        allowed = np.array([[x == y for y in self._made(b)] for x in self._made(a)])
        self._add_allowed((self._source(a), self._source(b)), allowed)

    def end(self, ref: Ref, cost: Callable[[Type], Cost | None]) -> None:
        """What the type in which ``ref`` is made costs at the end (the loss)."""
        self._add((self._source(ref),), [cost(t) for t in self._made(ref)])

    def close(self) -> None:
        """Add the tables between makers and readers, once every operator is there."""
        for ref, readers in self._readers.items():
            if ref.name in self.ops or ref in self.arrivals or ref.name in self.rests:
                self._edges(ref, readers)

    # --- solving

    def solve_all(self, keep: tuple[int, ...], weights: Sequence[Weights]) -> Marginals:
        """Under each of these the least energy for every combination of the variables ``keep``."""
        return self._ready(keep).solve_all([factor.weighted(weights) for factor in self.factors], len(weights))

    def is_wide(self, keep: tuple[int, ...]) -> bool:
        """Whether elimination takes tables so large that a problem of fewer choices is to be preferred."""
        return self._ready(keep).largest > WIDE_ENTRIES

    def is_eliminated(self, keep: tuple[int, ...]) -> bool:
        """Whether the tables of its elimination are small enough; else each entry over ``keep`` takes an integer program."""
        return self._ready(keep).steps is not None

    def _ready(self, keep: tuple[int, ...]) -> EnergySolver:
        sizes = tuple([len(states) for states in self.states])
        scopes = tuple([factor.scope for factor in self.factors])
        return prepare(sizes, scopes, keep, cache=self.structures.solvers)

    def choice(self, assignment: Sequence[int]) -> Choice:
        """An assignment by name."""
        strategies = {name: self.states[v][assignment[v]] for name, v in self.ops.items()}
        parameters = {name: self.states[v][assignment[v]] for name, v in self.rests.items()}
        return Choice(strategies=strategies, parameters=parameters)  # type: ignore[arg-type]

    def time_s(self, assignment: Sequence[int]) -> float:
        """Seconds of a micro-batch under an assignment."""
        return float(sum([f.parts[0][tuple([assignment[v] for v in f.scope])] for f in self.factors]))

    # --- tables

    def _variable(self, states: Sequence[object]) -> int:
        self.states.append(states)
        return len(self.states) - 1

    def _variable_of_class(self, key: object, states: Sequence[object]) -> int:
        """The variable of ``key``, made where there is none."""
        if key not in self._classes:
            self._classes[key] = self._variable(states)
        return self._classes[key]

    def _source(self, ref: Ref) -> int:
        """The variable that decides the type of a value as made."""
        if ref.name in self.ops:
            return self.ops[ref.name]
        return self.arrivals[ref] if ref in self.arrivals else self.rests[ref.name]

    def _made(self, ref: Ref) -> Produced:
        """For each state of the variable that decides the type of a value as made that type."""
        states = self.states[self._source(ref)]
        if ref.name in self.ops:
            return tuple([s.outputs[ref.index] for s in states])  # type: ignore[attr-defined]
        return tuple(states)  # type: ignore[arg-type]

    def _wanted(self, op: Op, where: tuple[int, ...], ref: Ref, made: Produced) -> Wanted:
        """For each strategy of ``op`` the types in which it reads ``ref``; I and R are one without gradient."""
        strategies: Sequence[Strategy] = self.states[self.ops[op.name]]  # type: ignore[assignment]
        wanted = [frozenset([s.inputs[i] for i in where]) for s in strategies]
        if self.graph.spec(ref).requires_grad or ref.name in self.rests:
            return tuple(wanted)
        home = I if I in made and R not in made else R
        return tuple([frozenset([home if t in (I, R) else t for t in types]) for types in wanted])

    def _change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        if ref.name in self.rests:
            return self.costs.use(self.graph.parameter(ref.name), source, target)
        return self.costs.change(ref, source, target)

    def _edges(self, ref: Ref, readers: list[tuple[Op, tuple[int, ...]]]) -> None:
        source, made = self._source(ref), self._made(ref)
        wanted = tuple([self._wanted(op, where, ref, made) for op, where in readers])
        flow, parts = self._flow(ref, made, wanted)
        if len(readers) == 1:
            if parts:
                self._append((source, self.ops[readers[0][0].name]), parts)
            return
        if not self.alike:
            pairs = [(self.ops[op.name], a) for (op, _), a in zip(readers, flow.to_readers, strict=True)]
            self._connect(self._variable(flow.states), source, parts, flow, pairs)
            return
        alike = {
            (self.ops[op.name], types): allowed
            for (op, _), types, allowed in zip(readers, wanted, flow.to_readers, strict=True)
        }
        spec = self.graph.spec(ref) if ref.name in self.ops else ref  # what changes of type cost
        place = (source, ref.index, spec, frozenset(alike))
        is_new = place not in self._classes
        value = self._variable_of_class(place, flow.states)
        if is_new:
            self._connect(value, source, parts, flow, [(reader, allowed) for (reader, _), allowed in alike.items()])
        elif parts:
            self._append((value,), parts)

    def _connect(
        self, value: int, source: int, parts: tuple[Table, ...], flow: Flow, readers: Iterable[tuple[int, Table | None]]
    ) -> None:
        """The tables of the variable of a value that several operators read."""
        if parts:
            self._append((value,), parts)
        for maker_or_reader, table in ((source, flow.from_source), *readers):
            if table is not None:
                self._append((maker_or_reader, value), (table,))

    def _flow(self, ref: Ref, made: Produced, wanted: tuple[Wanted, ...]) -> tuple[Flow, tuple[Table, ...]]:
        """What the types of maker and readers say of a value, and the table of what that costs."""
        price_class = self.costs.price_class(ref)
        if price_class is None:
            flow = self._new_flow(ref, made, wanted)
            return flow, self._parts(ref, flow)
        number = self.structures.number
        key: tuple[object, ...] = (number(made), *[number(types) for types in wanted])
        if len(wanted) > 1:
            key = (*key, self.max_extras, self.graph.spec(ref).requires_grad, ref.name in self.rests)
        if key not in self.structures.flows:
            self.structures.flows[key] = self._new_flow(ref, made, wanted)
        flow, priced = self.structures.flows[key], (key, price_class)
        if priced not in self.costs.tables:
            self.costs.tables[priced] = self._parts(ref, flow)
        return flow, self.costs.tables[priced]

    def _new_flow(self, ref: Ref, made: Produced, wanted: tuple[Wanted, ...]) -> Flow:
        if len(wanted) == 1:
            return flow_to_one(made, wanted[0])
        return flow_to_many(made, wanted, self.max_extras, lambda a, b: self._change(ref, a, b) is not None)

    def _parts(self, ref: Ref, flow: Flow) -> tuple[Table, ...]:
        """The table of a flow; a parameter is used even where it stays as it is."""
        return summed_parts(flow.terms, [FREE, *[self._change(ref, source, target) for source, target in flow.changes]])

    def _add(self, scope: tuple[int, ...], costs: Sequence[Cost | None]) -> None:
        """A factor over one variable; None forbids."""
        parts = tuple(cost_columns(costs))
        if parts:
            self._append(scope, parts)

    def _add_allowed(self, scope: tuple[int, ...], allowed: NDArray[np.bool_]) -> None:
        table = forbid(allowed)
        if table is not None:
            self._append(scope, (table,))

    def _append(self, scope: tuple[int, ...], parts: tuple[Table, ...]) -> None:
        """A factor; of a table over one variable twice the diagonal."""
        if len(scope) == 2 and scope[0] == scope[1]:
            scope, parts = scope[:1], tuple(np.diagonal(part).copy() for part in parts)
        self.factors.append(UnweightedFactor(scope, parts))


def types_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """Every type that a value of this shape can have on an axis of ``size`` ranks."""
    splits = tuple(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0)
    return (I, R, P, *splits) if spec.requires_grad else (R, P, *splits)


def rests_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """The types at rest that a parameter can have: whole, or split along a dim that divides."""
    return (I, *(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0))

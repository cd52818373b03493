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

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopar.graph.ir import Graph, Op, Parameter, Ref, TensorSpec
from autopar.layout import I, P, R, S, Type
from autopar.planner.sharding.elimination import Energy, Factor, Marginal, Prepared, Table, prepare
from autopar.planner.sharding.resharding import Flow, Structures, Wanted, forbidding, one_reader, several_readers
from autopar.planner.sharding.tables import FREE, Cost, Parted, Weights, columns_of
from autopar.rules.types import Strategy

MAX_EXTRAS = 2
"""Further types that one value may be changed to inside a block; one in blocks that are too wide for more."""


class Costs(Protocol):
    """What a problem must know of prices; None where something is not allowed."""

    def saves(self, op: Op) -> Sequence[Ref]:
        """Operands and outputs that backward needs."""

    def operators(self, op: Op, strategies: Sequence[Strategy], saved: Sequence[Ref]) -> Sequence[Cost]:
        """Work of one operator in each of these ways; ``saved``: what it saves for backward that no operator before it saved."""

    def change(self, spec: TensorSpec, source: Type, target: Type) -> Cost | None:
        """A change of type of a value."""

    def use(self, parameter: Parameter, rest: Type, wanted: Type) -> Cost | None:
        """A parameter that is ``rest`` read as ``wanted``."""

    def at_rest(self, parameter: Parameter, rest: Type) -> Cost:
        """The state of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A solution: names are of operators, parameters and values."""

    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Type]
    value: float


@dataclass(slots=True, kw_only=True)
class Shared:
    """What problems share.

    Attributes:
        same: equal for values whose changes of type cost the same, and whose types say which changes there are; None: nobody
            knows.
        tables: of flows at the costs that these problems have in common.
        changes: likewise what changes of type cost, by their numbers.
        structures: problems with other costs may share them too.
    """

    same: Callable[[Ref], object] | None = None
    tables: dict[object, tuple[Flow, tuple[Table, ...]]] = field(default_factory=dict)
    changes: dict[object, dict[int, Cost | None]] = field(default_factory=dict)
    structures: Structures = field(default_factory=Structures)


class Problem:
    """The energy of a typing; add operators in order, then what must hold, then solve.

    Args:
        graph: for specs and parameters.
        costs: prices.
        offered: the strategies of an operator.
        at_rest: the types at rest that a parameter may have.
        max_extras: further types that one value may be changed to.
        alike: operators of one key take one strategy, where they are offered the same ones.
        shared: what is known of other problems with the same costs.
    """

    def __init__(
        self,
        graph: Graph,
        costs: Costs,
        *,
        offered: Callable[[Op], Sequence[Strategy]],
        at_rest: Callable[[Parameter], Sequence[Type]],
        max_extras: int = MAX_EXTRAS,
        alike: Mapping[str, object] | None = None,
        shared: Shared | None = None,
    ) -> None:
        self.shared = Shared() if shared is None else shared
        self.max_extras = max_extras
        self.alike = alike or {}
        self.graph, self.costs = graph, costs
        self.offered, self.rest_types = offered, at_rest
        self.states: list[Sequence[object]] = []
        self.factors: list[Parted] = []
        self.ops: dict[str, int] = {}
        self.arrivals: dict[Ref, int] = {}
        self.rests: dict[str, int] = {}
        self._readers: dict[Ref, list[tuple[Op, tuple[int, ...]]]] = {}
        self._saved: set[Ref] = set()
        self.saves: dict[str, Sequence[Ref]] = {}
        """Of each operator what it saves for backward, whether one before it did or not."""
        self._classes: dict[object, int] = {}
        self._prepared: Prepared | None = None
        self._left: list[Parted] = []

    # --- building

    def arrival(self, ref: Ref, types: Sequence[Type]) -> int:
        """A variable for the type in which a value made elsewhere arrives."""
        self.arrivals[ref] = self._variable(types)
        return self.arrivals[ref]

    def parameter(self, parameter: Parameter) -> int:
        """The variable for a parameter's type at rest; the same one for the same parameter."""
        if parameter.name not in self.rests:
            types = self.rest_types(parameter)
            v = self.rests[parameter.name] = self._variable(types)
            self._add((v,), [self.costs.at_rest(parameter, t) for t in types])
        return self.rests[parameter.name]

    def operator(self, op: Op) -> None:
        """An operator; a value that several operators save for backward is charged to the first."""
        strategies = self.offered(op)
        if op.name in self.alike:
            v = self._shared((self.alike[op.name], tuple(strategies)), strategies)
        else:
            v = self._variable(strategies)
        self.ops[op.name] = v
        kept = self.costs.saves(op)
        first = [ref for ref in kept if ref not in self._saved]
        self._saved.update(first)
        self.saves[op.name] = kept
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
        source, made = self._source(ref)
        self._add_allowed((source, leaves), np.array([[m == t for t in types] for m in made]))
        return leaves

    def same_type(self, a: Ref, b: Ref) -> None:
        """Two values must have one type."""
        (va, ta), (vb, tb) = self._source(a), self._source(b)
        self._add_allowed((va, vb), np.array([[x == y for y in tb] for x in ta]))

    def end(self, ref: Ref, cost: Callable[[Type], Cost | None]) -> None:
        """What the type in which ``ref`` is made costs at the end (the loss)."""
        source, made = self._source(ref)
        self._add((source,), [cost(t) for t in made])

    def close(self) -> None:
        """Add the tables between makers and readers, once every operator is there."""
        for ref, readers in self._readers.items():
            if ref.name in self.ops or ref in self.arrivals or ref.name in self.rests:
                self._edges(ref, readers)

    # --- solving

    def solve_all(self, keep: tuple[int, ...], weights: Sequence[Weights]) -> list[Marginal]:
        """Under each of these the least energy for every combination of the variables ``keep``."""
        prepared = self._ready(keep)
        return prepared.solve_all([factor.weighed(weights) for factor in self._left], len(weights))

    def is_wide(self, keep: tuple[int, ...]) -> bool:
        """Whether elimination would need tables that are too large, so that an integer program has to do."""
        return self._ready(keep).order is None

    def _ready(self, keep: tuple[int, ...]) -> Prepared:
        if self._prepared is None or self._prepared.keep != keep:
            factors = tuple(
                [Factor(scope=f.scope, table=f.parts[0]) for f in self.factors]
            )  # what is forbidden is so at every price
            energy = Energy(sizes=tuple(len(s) for s in self.states), factors=factors)
            self._prepared = prepare(energy, keep, known=self.shared.structures.prepared)
            self._left = [factor.within(self._prepared) for factor in self.factors]
        return self._prepared

    def energy(self, weights: Weights) -> Energy:
        """All tables, weighted."""
        factors = tuple(Factor(scope=f.scope, table=f.weighed([weights])[0]) for f in self.factors)
        return Energy(sizes=tuple(len(s) for s in self.states), factors=factors)

    def choice(self, assignment: Sequence[int], value: float) -> Choice:
        """An assignment by name."""
        strategies = {name: self.states[v][assignment[v]] for name, v in self.ops.items()}
        parameters = {name: self.states[v][assignment[v]] for name, v in self.rests.items()}
        return Choice(strategies=strategies, parameters=parameters, value=value)  # type: ignore[arg-type]

    def time_s(self, assignment: Sequence[int]) -> float:
        """Seconds of a micro-batch under an assignment."""
        return float(sum([f.parts[0][tuple([assignment[v] for v in f.scope])] for f in self.factors]))

    # --- tables

    def _variable(self, states: Sequence[object]) -> int:
        self.states.append(states)
        return len(self.states) - 1

    def _shared(self, key: object, states: Sequence[object]) -> int:
        """The variable of ``key``, made where there is none."""
        if key not in self._classes:
            self._classes[key] = self._variable(states)
        return self._classes[key]

    def _variable_of(self, ref: Ref) -> int:
        """The variable that decides the type of a value as made."""
        if ref.name in self.ops:
            return self.ops[ref.name]
        return self.arrivals[ref] if ref in self.arrivals else self.rests[ref.name]

    def _source(self, ref: Ref) -> tuple[int, list[Type]]:
        """The variable that decides the type of a value as made, and that type for each of its states."""
        if ref.name in self.ops:
            v = self.ops[ref.name]
            return v, [s.outputs[ref.index] for s in self.states[v]]  # type: ignore[attr-defined]
        v = self._variable_of(ref)
        return v, list(self.states[v])  # type: ignore[arg-type]

    def _change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        if ref.name in self.rests:
            return self.costs.use(self.graph.parameter(ref.name), source, target)
        return self.costs.change(self.graph.spec(ref), source, target)

    def _edges(self, ref: Ref, readers: list[tuple[Op, tuple[int, ...]]]) -> None:
        source = self._variable_of(ref)
        made = self._made(ref)
        wanted = tuple([self._wanted(op, where, ref, made) for op, where in readers])
        flow = self._flow(ref, made, wanted)
        parts = self._costs(ref, flow)
        if len(readers) == 1:
            if parts:
                self._append((source, self.ops[readers[0][0].name]), parts)
            return
        if not self.alike:
            value = self._variable(flow.states)
            pairs = [(self.ops[op.name], a) for (op, _), a in zip(readers, flow.to_readers, strict=True)]
            self._connect(value, source, parts, flow, pairs)
            return
        alike = {
            (self.ops[op.name], own): allowed
            for (op, _), own, allowed in zip(readers, wanted, flow.to_readers, strict=True)
        }
        spec = self.graph.spec(ref) if ref.name in self.ops else ref  # what changes of type cost
        place = (source, ref.index, spec, frozenset(alike))
        is_new = place not in self._classes
        value = self._shared(place, flow.states)
        if is_new:
            self._connect(value, source, parts, flow, [(reader, allowed) for (reader, _), allowed in alike.items()])
        elif parts:
            self._append((value,), parts)

    def _connect(
        self,
        value: int,
        source: int,
        parts: tuple[Table, ...],
        flow: Flow,
        readers: Iterable[tuple[int, Table | None]],
    ) -> None:
        """The tables of the variable of a value that several operators read."""
        if parts:
            self._append((value,), parts)
        for maker_or_reader, table in ((source, flow.from_source), *readers):
            if table is not None:
                self._append((maker_or_reader, value), (table,))

    def _flow(self, ref: Ref, made: Sequence[Type], wanted: tuple[Wanted, ...]) -> Flow:
        """What the types of maker and readers say of a value."""
        if len(wanted) == 1:
            key: object = id(made), id(wanted[0])
        else:
            is_trained = self.graph.spec(ref).requires_grad
            key = id(made), *map(id, wanted), self.max_extras, is_trained, ref.name in self.rests
        flows, is_known = self.shared.structures.flows, len(wanted) == 1 or self.shared.same is not None
        found = flows.get(key) if is_known else None
        if found is None:
            if len(wanted) == 1:
                found = one_reader(made, wanted[0], self.shared.structures.numbers)
            else:
                allows = partial(self._allows, ref)
                numbers = self.shared.structures.numbers
                found = several_readers(made, wanted, self.max_extras, allows, numbers)
            if is_known:
                flows[key] = found
        return found

    def _costs(self, ref: Ref, flow: Flow) -> tuple[Table, ...]:
        """The table of a flow; a parameter is used even where it stays as it is."""
        if self.shared.same is None:
            return flow.sums.parts([FREE, *(self._change(ref, t, w) for t, w in flow.changes)])
        same = self.shared.same(ref), ref.name in self.rests
        key = id(flow), *same
        found = self.shared.tables.get(key)
        if found is None:
            known = self.shared.changes.setdefault(same, {})
            for number, (source, target) in zip(flow.numbers, flow.changes, strict=True):
                if number not in known:
                    known[number] = self._change(ref, source, target)
            parts = flow.sums.parts([FREE, *[known[number] for number in flow.numbers]])
            found = self.shared.tables[key] = flow, parts
        return found[1]

    def _allows(self, ref: Ref, source: Type, target: Type) -> bool:
        return self._change(ref, source, target) is not None

    def _made(self, ref: Ref) -> tuple[Type, ...]:
        """For each state of what decides the type of a value as made that type."""
        structures = self.shared.structures
        if ref.name in self.ops:
            return structures.made(self.states[self.ops[ref.name]], ref.index)  # type: ignore[arg-type]
        return structures.one(tuple(self.states[self._variable_of(ref)]))  # type: ignore[arg-type]

    def _wanted(self, op: Op, where: tuple[int, ...], ref: Ref, made: tuple[Type, ...]) -> Wanted:
        """For each strategy of ``op`` the types in which it reads ``ref``; I and R are one without gradient."""
        home = None
        if not self.graph.spec(ref).requires_grad and ref.name not in self.rests:
            home = I if I in made and R not in made else R
        return self.shared.structures.wanted(self.states[self.ops[op.name]], where, home)  # type: ignore[arg-type]

    def _add(self, scope: tuple[int, ...], costs: Sequence[Cost | None]) -> None:
        """A factor over one variable; None forbids."""
        parts = tuple(columns_of(costs))
        if parts:
            self._append(scope, parts)

    def _add_allowed(self, scope: tuple[int, ...], allowed: NDArray[np.bool_]) -> None:
        table = forbidding(allowed)
        if table is not None:
            self._append(scope, (table,))

    def _append(self, scope: tuple[int, ...], parts: tuple[Table, ...]) -> None:
        """A factor; of a table over one variable twice the diagonal."""
        if len(scope) == 2 and scope[0] == scope[1]:
            scope, parts = scope[:1], tuple(np.diagonal(part).copy() for part in parts)
        self.factors.append(Parted(scope, parts))


def types_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """Every type that a value of this shape can have on an axis of ``size`` ranks."""
    splits = tuple(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0)
    return (I, R, P, *splits) if spec.requires_grad else (R, P, *splits)


def rests_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """The types at rest that a parameter can have: whole, or split along a dim that divides."""
    return (I, *(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0))

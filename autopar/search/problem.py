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
from itertools import combinations
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.graph.ir import Graph, Op, Parameter, Ref, TensorSpec
from autopar.layout import I, P, R, S, Type
from autopar.rules.types import Strategy
from autopar.search.elimination import Energy, Factor, Marginal, Prepared, Table, prepare

MAX_EXTRAS = 2
"""Further types that one value may be changed to inside a block; one in blocks that are too wide for more."""

_T = TypeVar("_T")

Made = tuple[Type, frozenset[Type]]
"""A state of a value that several operators read: as made, and what else is made from it."""

_Value: TypeAlias = tuple[
    list[Made], tuple[Table, ...], NDArray[np.bool_], list[tuple[list[frozenset[Type]], NDArray[np.bool_]]]
]
"""Its states, their costs, which of them go with the maker's, and for each reader the types it wants and those that do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What one unit of each part of a cost is worth, in seconds of a micro-batch."""

    per_step_s: float = 0.0
    """For a second of once a step: one over the number of micro-batches."""
    saved_byte: float = 0.0
    state_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """Parts of a cost; see :class:`Weights`."""

    time_s: float = 0.0
    step_s: float = 0.0
    saved_bytes: float = 0.0
    state_bytes: float = 0.0


FREE = Cost()


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


@dataclass(frozen=True, slots=True)
class _Parted:
    """A factor whose table is weighted later."""

    scope: tuple[int, ...]
    parts: tuple[Table, ...]
    """Seconds, seconds a step, saved bytes, state bytes; later ones may be missing."""

    def weighed(self, weights: Sequence[Weights]) -> Table:
        """Under each of these, side by side; once where they are all the same."""
        scales = [(1.0, w.per_step_s, w.saved_byte, w.state_byte) for w in weights]
        table = self.parts[0][None]
        for i, part in enumerate(self.parts[1:], 1):
            factors = np.array([scale[i] for scale in scales])
            if factors.any() and part.any():
                table = table + factors.reshape(-1, *(1,) * part.ndim) * part
        return table

    def within(self, prepared: Prepared) -> _Parted:
        """Over the states alone that are left."""
        return _Parted(self.scope, tuple(prepared.restrict(self.scope, part) for part in self.parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A solution: names are of operators, parameters and values."""

    strategies: Mapping[str, Strategy]
    parameters: Mapping[str, Type]
    value: float


@dataclass(slots=True, kw_only=True)
class Shared:
    """What problems with the same costs share.

    Attributes:
        same: equal for values whose changes of type cost the same; None: nobody knows.
        tables: between makers and readers, by what they depend on.
        prepared: see :func:`autopar.search.elimination.prepare`; problems with other costs may share it too.
    """

    same: Callable[[Ref], object] | None = None
    tables: dict[object, Any] = field(default_factory=dict)
    prepared: dict[object, Prepared] | None = None


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
        self.factors: list[_Parted] = []
        self.ops: dict[str, int] = {}
        self.arrivals: dict[Ref, int] = {}
        self.rests: dict[str, int] = {}
        self._readers: dict[Ref, list[tuple[Op, tuple[int, ...]]]] = {}
        self._saved: set[Ref] = set()
        self._classes: dict[object, int] = {}
        self._prepared: Prepared | None = None
        self._left: list[_Parted] = []
        self._specs = graph._index.specs

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
                Factor(scope=f.scope, table=f.parts[0]) for f in self.factors
            )  # what is forbidden is so at every price
            energy = Energy(sizes=tuple(len(s) for s in self.states), factors=factors)
            self._prepared = prepare(energy, keep, known=self.shared.prepared)
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
        return float(sum(f.parts[0][tuple(assignment[v] for v in f.scope)] for f in self.factors))

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
        return self.costs.change(self._specs[ref], source, target)

    def _edges(self, ref: Ref, readers: list[tuple[Op, tuple[int, ...]]]) -> None:
        key = self._edge_key(ref, readers)
        if len(readers) == 1:
            parts = self.shared.tables.get(key) if key is not None else None
            if parts is None:
                parts = self._one_reader(ref, *readers[0])
                if key is not None:
                    self.shared.tables[key] = parts
            if parts:
                self._append((self._variable_of(ref), self.ops[readers[0][0].name]), parts)
            return
        found = self.shared.tables.get(key) if key is not None else None
        if found is None:
            found = self._several_readers(ref, readers)
            if key is not None:
                self.shared.tables[key] = found
        states, own, from_source, to_readers = found
        source = self._variable_of(ref)
        if not self.alike:
            value = self._variable(states)
            self._connect(
                value,
                source,
                own,
                from_source,
                ((self.ops[op.name], a) for (op, _), (_, a) in zip(readers, to_readers, strict=True)),
            )
            return
        pairs = {
            (self.ops[op.name], tuple(types)): allowed
            for (op, _), (types, allowed) in zip(readers, to_readers, strict=True)
        }
        spec = self._specs[ref] if ref.name in self.ops else ref  # what changes of type cost
        place = (source, ref.index, spec, frozenset(pairs))
        is_new = place not in self._classes
        value = self._shared(place, states)
        if is_new:
            self._connect(
                value, source, own, from_source, ((reader, allowed) for (reader, _), allowed in pairs.items())
            )
        elif own:
            self._append((value,), own)

    def _connect(
        self,
        value: int,
        source: int,
        own: tuple[Table, ...],
        from_source: NDArray[np.bool_],
        readers: Iterable[tuple[int, NDArray[np.bool_]]],
    ) -> None:
        """The tables of the variable of a value that several operators read."""
        if own:
            self._append((value,), own)
        self._add_allowed((source, value), from_source)
        for reader, allowed in readers:
            self._add_allowed((reader, value), allowed)

    def _edge_key(self, ref: Ref, readers: list[tuple[Op, tuple[int, ...]]]) -> object:
        """Equal for values whose tables are equal; None where that is not known. States of operators are known by their id."""
        if self.shared.same is None:
            return None
        made = (
            id(self.states[self.ops[ref.name]]) if ref.name in self.ops else tuple(self.states[self._variable_of(ref)])
        )
        read = tuple((id(self.states[self.ops[op.name]]), where) for op, where in readers)
        return self.max_extras, self.shared.same(ref), ref.name in self.rests, ref.index, made, read

    def _one_reader(self, ref: Ref, op: Op, where: tuple[int, ...]) -> tuple[Table, ...]:
        """The table over maker and reader."""
        kinds, place = _numbered(self._source(ref)[1])
        sets, which = _numbered(self._wanted(op, where, ref))
        known = self._changes(ref, kinds, {t for w in sets for t in w})
        return _parts([[self._sum(ref, t, w, known) for w in sets] for t in kinds], (place, which))

    def _several_readers(self, ref: Ref, readers: list[tuple[Op, tuple[int, ...]]]) -> _Value:
        """The states of a value that several operators read, their costs, and which of them go with maker and readers."""
        made = self._source(ref)[1]
        wanted = [self._wanted(op, where, ref) for op, where in readers]
        kinds = sorted(set(made) | {t for w in wanted for s in w for t in s})
        known = self._changes(ref, made, kinds)
        states = self._made_states(set(made), {t for w in wanted for s in w for t in s}, known)
        own = _parts([self._sum(ref, t, extras | {t}, known) for t, extras in states])
        bit = {t: 1 << i for i, t in enumerate(kinds)}
        of_state = np.array([bit[t] for t, _ in states])
        from_source = np.array([bit[t] for t in made])[:, None] == of_state
        has = of_state + np.array([sum(bit[e] for e in extras) for _, extras in states])
        to_readers = []
        for types in wanted:
            asked = np.array([sum(bit[t] for t in w) for w in types])
            to_readers.append((types, (asked[:, None] & ~has) == 0))
        return states, own, from_source, to_readers

    def _changes(
        self, ref: Ref, sources: Iterable[Type], targets: Iterable[Type]
    ) -> dict[tuple[Type, Type], Cost | None]:
        """What each change of a value costs; a parameter is used even where it stays as it is."""
        is_parameter = ref.name in self.rests
        return {
            (t, w): FREE if t == w else self._change(ref, t, w)
            for t in dict.fromkeys(sources)
            for w in targets
            if is_parameter or t != w
        }

    def _wanted(self, op: Op, where: tuple[int, ...], ref: Ref) -> list[frozenset[Type]]:
        """For each strategy of ``op`` the types in which it reads ``ref``; I and R are one without gradient."""
        strategies: Sequence[Strategy] = self.states[self.ops[op.name]]  # type: ignore[assignment]
        found = [frozenset(s.inputs[i] for i in where) for s in strategies]
        if self._specs[ref].requires_grad or ref.name in self.rests:
            return found
        made = set(self._source(ref)[1])
        home = I if I in made and R not in made else R
        return [frozenset(home if t in (I, R) else t for t in s) for s in found]

    def _made_states(
        self, made: set[Type], wanted: set[Type], known: Mapping[tuple[Type, Type], Cost | None]
    ) -> list[Made]:
        states: list[Made] = []
        for t in sorted(made):
            others = [w for w in sorted(wanted - {t}) if known[t, w] is not None]
            for count in range(min(self.max_extras, len(others)) + 1):
                states += [(t, frozenset(extras)) for extras in combinations(others, count)]
        return states

    def _sum(
        self, ref: Ref, source: Type, targets: frozenset[Type], known: Mapping[tuple[Type, Type], Cost | None]
    ) -> Cost | None:
        found = []
        for target in sorted(targets) if len(targets) > 1 else targets:
            if target != source or ref.name in self.rests:
                one = known[source, target]
                if one is None:
                    return None
                found.append(one)
        if len(found) < 2:
            return found[0] if found else FREE
        return Cost(
            sum(one.time_s for one in found),
            sum(one.step_s for one in found),
            sum(one.saved_bytes for one in found),
            sum(one.state_bytes for one in found),
        )

    def _add(self, scope: tuple[int, ...], costs: Sequence[Cost | None]) -> None:
        """A factor over one variable; None forbids."""
        parts = _parts(costs)
        if parts:
            self._append(scope, parts)

    def _add_allowed(self, scope: tuple[int, ...], allowed: NDArray[np.bool_]) -> None:
        if not allowed.all():
            self._append(scope, (np.where(allowed, 0.0, np.inf),))

    def _append(self, scope: tuple[int, ...], parts: tuple[Table, ...]) -> None:
        """A factor; of a table over one variable twice the diagonal."""
        if len(scope) == 2 and scope[0] == scope[1]:
            scope, parts = scope[:1], tuple(np.diagonal(part).copy() for part in parts)
        self.factors.append(_Parted(scope, parts))


def _parts(
    costs: Sequence[Cost | None] | Sequence[Sequence[Cost | None]], places: tuple[NDArray[np.intp], ...] = ()
) -> tuple[Table, ...]:
    """The parts of a table from costs in its shape, None where it forbids; empty where all is free.

    Args:
        places: for each variable, where it is given, the row or column of each of its states in ``costs``.
    """
    shape: list[int] = [len(costs)]
    flat: list[Cost | None] = []
    for entry in costs:
        if isinstance(entry, Cost) or entry is None:
            flat.append(entry)
        else:
            shape = [len(costs), len(entry)]
            flat += entry
    others = any(c is not None and (c.step_s or c.saved_bytes or c.state_bytes) for c in flat)
    if not others:
        times = np.array([np.inf if c is None else c.time_s for c in flat], dtype=np.float64)
        parts = [times.reshape(shape)] if times.any() else []
    else:
        table = np.array(
            [(np.inf, 0, 0, 0) if c is None else (c.time_s, c.step_s, c.saved_bytes, c.state_bytes) for c in flat],
            dtype=np.float64,
        ).reshape(-1, 4)
        used = table.any(axis=0)
        parts = [table[:, i].reshape(shape) for i in range(1 + int(np.flatnonzero(used)[-1]))]
    return tuple(part[np.ix_(*places)] if places else part for part in parts)


def _numbered(items: Iterable[_T]) -> tuple[list[_T], NDArray[np.intp]]:
    """The different ones, and for each its number among them."""
    known: dict[_T, int] = {}
    numbers = [known.setdefault(item, len(known)) for item in items]
    return list(known), np.array(numbers, dtype=np.intp)


def types_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """Every type that a value of this shape can have on an axis of ``size`` ranks."""
    splits = tuple(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0)
    return (I, R, P, *splits) if spec.requires_grad else (R, P, *splits)


def rests_of(spec: TensorSpec, size: int) -> tuple[Type, ...]:
    """The types at rest that a parameter can have: whole, or split along a dim that divides."""
    return (I, *(S(d) for d, n in enumerate(spec.shape) if n >= size and n % size == 0))

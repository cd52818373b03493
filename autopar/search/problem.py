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
from dataclasses import dataclass
from itertools import combinations
from typing import Protocol, TypeVar

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

    def operator(self, op: Op, strategy: Strategy, saved: Sequence[Ref]) -> Cost:
        """Work of one operator; ``saved``: what it saves for backward that no operator before it saved."""

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


class Problem:
    """The energy of a typing; add operators in order, then what must hold, then solve.

    Args:
        graph: for specs and parameters.
        costs: prices.
        offered: the strategies of an operator.
        at_rest: the types at rest that a parameter may have.
        max_extras: further types that one value may be changed to.
        alike: operators of one key take one strategy, where they are offered the same ones.
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
    ) -> None:
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
        v = self.ops[op.name] = self._shared((self.alike.get(op.name, op.name), tuple(strategies)), strategies)
        first = [ref for ref in self.costs.saves(op) if ref not in self._saved]
        self._saved.update(first)
        self._add((v,), [self.costs.operator(op, s, first) for s in strategies])
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
            self._prepared = prepare(self.energy(Weights()), keep)
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

    def _source(self, ref: Ref) -> tuple[int, list[Type]]:
        """The variable that decides the type of a value as made, and that type for each of its states."""
        if ref.name in self.ops:
            v = self.ops[ref.name]
            return v, [s.outputs[ref.index] for s in self.states[v]]  # type: ignore[attr-defined]
        v = self.arrivals[ref] if ref in self.arrivals else self.rests[ref.name]
        return v, list(self.states[v])  # type: ignore[arg-type]

    def _change(self, ref: Ref, source: Type, target: Type) -> Cost | None:
        if ref.name in self.rests:
            return self.costs.use(self.graph.parameter(ref.name), source, target)
        return self.costs.change(self._specs[ref], source, target)

    def _edges(self, ref: Ref, readers: list[tuple[Op, tuple[int, ...]]]) -> None:
        source, made = self._source(ref)
        wanted = [self._wanted(op, where, ref) for op, where in readers]
        if len(readers) == 1:
            kinds, place = _numbered(made)
            sets, which = _numbered(wanted[0])
            known = self._changes(ref, kinds, {t for w in sets for t in w})
            costs = [[self._sum(ref, t, w, known) for w in sets] for t in kinds]
            self._add((source, self.ops[readers[0][0].name]), costs, (place, which))
            return
        pairs = {(self.ops[op.name], tuple(types)): None for (op, _), types in zip(readers, wanted, strict=True)}
        kinds = sorted(set(made) | {t for w in wanted for s in w for t in s})
        known = self._changes(ref, made, kinds)
        states = self._made_states(set(made), {t for w in wanted for s in w for t in s}, known)
        spec = self._specs[ref] if self.alike and ref.name in self.ops else ref  # what changes of type cost
        key = (source, ref.index, spec, frozenset(pairs))
        is_new = key not in self._classes
        value = self._shared(key, states)
        self._add((value,), [self._sum(ref, t, extras | {t}, known) for t, extras in states])
        if not is_new:
            return
        bit = {t: 1 << i for i, t in enumerate(kinds)}
        of_state = np.array([bit[t] for t, _ in states])
        self._add_allowed((source, value), np.array([bit[t] for t in made])[:, None] == of_state)
        has = of_state + np.array([sum(bit[e] for e in extras) for _, extras in states])
        for reader, types in pairs:
            asked = np.array([sum(bit[t] for t in w) for w in types])
            self._add_allowed((reader, value), (asked[:, None] & ~has) == 0)

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

    def _add(
        self,
        scope: tuple[int, ...],
        costs: Sequence[Cost | None] | Sequence[Sequence[Cost | None]],
        places: tuple[NDArray[np.intp], ...] = (),
    ) -> None:
        """A factor from costs in the shape of its table; None forbids.

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
        table = np.array(
            [(np.inf, 0, 0, 0) if c is None else (c.time_s, c.step_s, c.saved_bytes, c.state_bytes) for c in flat],
            dtype=np.float64,
        ).reshape(-1, 4)
        parts = [table[:, i].reshape(shape) for i in range(4)]
        while len(parts) > 1 and not parts[-1].any():
            parts.pop()
        if any(part.any() for part in parts):
            self._append(scope, tuple(part[np.ix_(*places)] if places else part for part in parts))

    def _add_allowed(self, scope: tuple[int, ...], allowed: NDArray[np.bool_]) -> None:
        if not allowed.all():
            self._append(scope, (np.where(allowed, 0.0, np.inf),))

    def _append(self, scope: tuple[int, ...], parts: tuple[Table, ...]) -> None:
        """A factor; of a table over one variable twice the diagonal."""
        if len(scope) == 2 and scope[0] == scope[1]:
            scope, parts = scope[:1], tuple(np.diagonal(part).copy() for part in parts)
        self.factors.append(_Parted(scope, parts))


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

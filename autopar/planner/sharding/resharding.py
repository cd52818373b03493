"""How a value goes from its maker to its readers: which changes of type their choices ask for, whatever these cost.

It depends on the types in which it is made and read, which are the same for most micro-batch sizes and degrees: worked out
once, it serves all of their problems (:class:`Structures`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.layout import I, R, Type
from autopar.planner.sharding.elimination import Prepared, Table
from autopar.planner.sharding.tables import Sums
from autopar.rules.types import Strategy

Made = tuple[Type, frozenset[Type]]
"""A state of a value that several operators read: as made, and what else is made from it."""

Wanted = tuple[frozenset[Type], ...]
"""For each strategy of a reader the types in which it reads a value."""

Change = tuple[Type, Type]
"""From a type to another one."""

_T = TypeVar("_T", bound=Hashable)

MAX_KNOWN = 512
"""Flows that are kept for other models, by the types in which values are made and read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A value between its maker and its readers.

    Attributes:
        changes: of type that there may be, and their ``numbers``, equal for equal ones.
        sums: over maker and reader, of one reader; of several readers over the states of the value. Places among the costs
            are one more than those in ``changes``.
        states: of the value, where several operators read it; else none.
        from_source: a table that forbids states that do not go with those of the maker; None: all do.
        to_readers: likewise for each reader and its strategies.
    """

    changes: tuple[Change, ...]
    numbers: tuple[int, ...]
    sums: Sums
    states: Sequence[Made] = ()
    from_source: Table | None = None
    to_readers: tuple[Table | None, ...] = ()


class Structures:
    """What problems of equal structure share, whatever they cost.

    Attributes:
        prepared: see :func:`autopar.planner.sharding.elimination.prepare`.
        flows: of values, by the types in which they are made and read.
        numbers: of changes of type.
    """

    def __init__(self) -> None:
        self.prepared: dict[object, Prepared] = {}
        self.flows: dict[object, Flow] = {}
        # strategies are kept too, so that their ids stay their own
        self._made: dict[tuple[int, int], tuple[Sequence[Strategy], tuple[Type, ...]]] = {}
        self._wanted: dict[tuple[int, tuple[int, ...], Type | None], tuple[Sequence[Strategy], Wanted]] = {}
        self._same: dict[Hashable, Hashable] = {}
        self.numbers: dict[Change, int] = {}

    def one(self, value: _T) -> _T:
        """The same object for equal values."""
        return self._same.setdefault(value, value)  # type: ignore[return-value]

    def made(self, strategies: Sequence[Strategy], index: int) -> tuple[Type, ...]:
        """For each strategy of a maker the type of one of its outputs; the same object for equal ones."""
        key = id(strategies), index
        if key not in self._made:
            self._made[key] = strategies, self.one(tuple(s.outputs[index] for s in strategies))
        return self._made[key][1]

    def wanted(self, strategies: Sequence[Strategy], where: tuple[int, ...], home: Type | None) -> Wanted:
        """For each strategy of a reader the types in which it reads a value; the same object for equal ones.

        Args:
            where: positions of the value among its operands.
            home: I or R where these are one, because the value has no gradient: this one of them.
        """
        key = id(strategies), where, home
        if key not in self._wanted:
            found = [frozenset([s.inputs[i] for i in where]) for s in strategies]
            if home is not None:
                found = [frozenset([home if t in (I, R) else t for t in types]) for types in found]
            self._wanted[key] = strategies, self.one(tuple(found))
        return self._wanted[key][1]


def one_reader(made: Sequence[Type], wanted: Wanted, known: dict[Change, int]) -> Flow:
    """A table over maker and reader; ``known``: numbers of changes of type."""
    changes, sums = _read_by_one(tuple(made), wanted)
    return Flow(changes=changes, numbers=_numbers(changes, known), sums=sums)


@lru_cache(maxsize=MAX_KNOWN)
def _read_by_one(made: tuple[Type, ...], wanted: Wanted) -> tuple[tuple[Change, ...], Sums]:
    kinds, place = _numbered(made)
    sets, which = _numbered(wanted)
    changes: dict[Change, int] = {}
    entries = [[_terms(t, types, changes) for types in sets] for t in kinds]
    return tuple(changes), _sums(entries, (len(kinds), len(sets)), (place, which))


def several_readers(
    made: Sequence[Type],
    wanted: Sequence[Wanted],
    max_extras: int,
    allows: Callable[[Type, Type], bool],
    known: dict[Change, int],
) -> Flow:
    """The states of a value that several operators read, and which of them go with maker and readers.

    Args:
        max_extras: further types at most that it may be changed to.
        allows: whether there is a change of type.
        known: numbers of changes of type.
    """
    read = {t for own in wanted for types in own for t in types}
    allowed = tuple((t, tuple(w for w in sorted(read - {t}) if allows(t, w))) for t in sorted(set(made)))
    found = _read_by_several(tuple(made), tuple(wanted), max_extras, allowed)
    return replace(found, numbers=_numbers(found.changes, known))


@lru_cache(maxsize=MAX_KNOWN)
def _read_by_several(
    made: tuple[Type, ...],
    wanted: tuple[Wanted, ...],
    max_extras: int,
    allowed: tuple[tuple[Type, tuple[Type, ...]], ...],
) -> Flow:
    """A flow without its numbers; ``allowed``: for each type that is made those that it may be changed to."""
    read = {t for own in wanted for types in own for t in types}
    states: list[Made] = []
    for t, others in allowed:
        for count in range(min(max_extras, len(others)) + 1):
            states += [(t, frozenset(extras)) for extras in combinations(others, count)]
    changes: dict[Change, int] = {}
    entries = [[_terms(t, extras, changes)] for t, extras in states]
    bit = {t: 1 << i for i, t in enumerate(sorted(read | set(made)))}
    of_state = np.array([bit[t] for t, _ in states])
    has = of_state + np.array([sum(bit[e] for e in extras) for _, extras in states])
    to_readers = []
    for own in wanted:
        asked = np.array([sum(bit[t] for t in types) for types in own])
        to_readers.append(forbidding((asked[:, None] & ~has) == 0))
    return Flow(
        changes=tuple(changes),
        numbers=(),
        sums=_sums(entries, (len(states),), ()),
        states=states,
        from_source=forbidding(np.array([bit[t] for t in made])[:, None] == of_state),
        to_readers=tuple(to_readers),
    )


def _terms(source: Type, targets: frozenset[Type], changes: dict[Change, int]) -> list[int]:
    """Places of the changes from one type to others, numbered from 1 as they come up."""
    if len(targets) == 1:
        (target,) = targets
        return [] if target == source else [changes.setdefault((source, target), len(changes) + 1)]
    return [changes.setdefault((source, t), len(changes) + 1) for t in sorted(targets - {source})]


def forbidding(allowed: NDArray[np.bool_]) -> Table | None:
    """A table that costs nothing where something is allowed; None: everything is."""
    return None if allowed.all() else np.where(allowed, 0.0, np.inf)


def _numbers(changes: Iterable[Change], known: dict[Change, int]) -> tuple[int, ...]:
    return tuple([known.setdefault(change, len(known)) for change in changes])


def _sums(entries: Sequence[Sequence[list[int]]], shape: tuple[int, ...], places: tuple[NDArray[np.intp], ...]) -> Sums:
    """``places``: of the two dims, where they are given, the row or column of each state."""
    count = max([len(terms) for row in entries for terms in row], default=0)
    found = []
    for k in range(count):
        term = np.array([[terms[k] if k < len(terms) else 0 for terms in row] for row in entries], dtype=np.intp)
        found.append(term[places[0][:, None], places[1]] if places else term.reshape(shape))
    return Sums(tuple(found))


def _numbered(items: Iterable[_T]) -> tuple[list[_T], NDArray[np.intp]]:
    """The different ones, and for each its number among them."""
    known: dict[_T, int] = {}
    numbers = [known.setdefault(item, len(known)) for item in items]
    return list(known), np.array(numbers, dtype=np.intp)

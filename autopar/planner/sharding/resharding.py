"""How a value goes from its maker to its readers: which changes of type their choices ask for, whatever these cost.

It depends on the types alone in which the value is made and read, which are the same for most micro-batch sizes and degrees:
worked out once, it serves all of their problems (:class:`Structures`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.plan.mesh import Type
from autopar.planner.sharding.elimination import Prepared
from autopar.planner.sharding.energy import Table

Made = tuple[Type, ...]
"""For each state of a maker the type in which it makes a value."""

Wanted = tuple[frozenset[Type], ...]
"""For each strategy of a reader the types in which it reads a value."""

Held = tuple[Type, frozenset[Type]]
"""A state of a value that several operators read: its type as made, and what else is made from it."""

Change = tuple[Type, Type]
"""From a type to another one."""

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A value between its maker and its readers.

    Attributes:
        changes: of type that there may be.
        sums: see :func:`autopar.planner.sharding.energy.sums_of`; over maker and reader, of one reader; of several readers over
            the states of the value. Places among the costs are one more than those in ``changes``.
        states: of the value, where several operators read it; else none.
        from_source: a table that forbids states that do not go with those of the maker; None: all do.
        to_readers: likewise for each reader and its strategies.
    """

    changes: tuple[Change, ...]
    sums: tuple[NDArray[np.intp], ...]
    states: Sequence[Held] = ()
    from_source: Table | None = None
    to_readers: tuple[Table | None, ...] = ()


@dataclass(slots=True)
class Structures:
    """What problems of equal structure share, whatever they cost.

    Attributes:
        prepared: see :func:`autopar.planner.sharding.elimination.prepare`.
        flows: of values, by the numbers of the types in which they are made and read.
        numbers: of such types, equal for equal ones.
    """

    prepared: dict[object, Prepared] = field(default_factory=dict)
    flows: dict[object, Flow] = field(default_factory=dict)
    numbers: dict[Made | Wanted, int] = field(default_factory=dict)

    def number(self, types: Made | Wanted) -> int:
        """The number of these types."""
        return self.numbers.setdefault(types, len(self.numbers))


def one_reader(made: Made, wanted: Wanted) -> Flow:
    """The flow of a value that one operator reads."""
    kinds, place = _numbered(made)
    sets, which = _numbered(wanted)
    changes: dict[Change, int] = {}
    entries = [[_terms(t, types, changes) for types in sets] for t in kinds]
    sums = _sums(entries, (len(kinds), len(sets)), (place, which))
    return Flow(changes=tuple(changes), sums=sums)


def several_readers(
    made: Made, wanted: Sequence[Wanted], max_extras: int, allows: Callable[[Type, Type], bool]
) -> Flow:
    """The flow of a value that several operators read: its states, and which of them go with maker and readers.

    Args:
        max_extras: further types at most that it may be changed to.
        allows: whether there is a change of type.
    """
    read = {t for of_reader in wanted for types in of_reader for t in types}
    states: list[Held] = []
    for t in sorted(set(made)):
        others = [w for w in sorted(read - {t}) if allows(t, w)]
        for count in range(min(max_extras, len(others)) + 1):
            states += [(t, frozenset(extras)) for extras in combinations(others, count)]
    changes: dict[Change, int] = {}
    entries = [[_terms(t, extras, changes)] for t, extras in states]
    bit = {t: 1 << i for i, t in enumerate(sorted(read | set(made)))}
    of_state = np.array([bit[t] for t, _ in states])
    has = of_state + np.array([sum(bit[e] for e in extras) for _, extras in states])
    to_readers = []
    for of_reader in wanted:
        asked = np.array([sum(bit[t] for t in types) for types in of_reader])
        to_readers.append(forbidding((asked[:, None] & ~has) == 0))
    return Flow(
        changes=tuple(changes),
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


def _sums(
    entries: Sequence[Sequence[list[int]]], shape: tuple[int, ...], places: tuple[NDArray[np.intp], ...]
) -> tuple[NDArray[np.intp], ...]:
    """``places``: of the two dims, where they are given, the row or column of each state."""
    count = max([len(terms) for row in entries for terms in row], default=0)
    table_terms = []
    for k in range(count):
        term = np.array([[terms[k] if k < len(terms) else 0 for terms in row] for row in entries], dtype=np.intp)
        table_terms.append(term[places[0][:, None], places[1]] if places else term.reshape(shape))
    return tuple(table_terms)


def _numbered(items: Sequence[_T]) -> tuple[list[_T], NDArray[np.intp]]:
    """The different ones, and for each its number among them."""
    numbers: dict[_T, int] = {}
    places = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), np.array(places, dtype=np.intp)

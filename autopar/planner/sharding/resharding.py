"""How a value goes from its producer to its readers: the changes of type that each combination of their choices requires.

This depends only on the types in which the value is produced and read, not on costs. These types are the same for most micro-batch
sizes and degrees, so that a flow that was worked out once serves all of their problems (:class:`Structures`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.plan.mesh import Type
from autopar.planner.sharding.elimination import EnergySolver
from autopar.planner.sharding.energy import Table

Produced = tuple[Type, ...]
"""For each state of a producer the type in which it produces a value."""

Wanted = tuple[frozenset[Type], ...]
"""For each strategy of a reader the types in which it reads a value."""

ValueState = tuple[Type, frozenset[Type]]
"""A state of a value that several operators read: the type in which it is produced, and the set of further types that it is changed to."""

TypeChange = tuple[Type, Type]
"""The type before a change and the type after it."""

_T = TypeVar("_T", bound=Hashable)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """The changes of type of one value between its producer and its readers.

    Attributes:
        changes: all changes of type that may occur.
        terms: the changes that each entry of the cost table adds up, as arrays of indices for
            :func:`autopar.planner.sharding.energy.summed_parts`: index 0 is no change, index i + 1 is ``changes[i]``. With one reader the
            table is over the states of the producer and of the reader; with several readers it is over ``states``.
        states: the states of the value where several operators read it; else empty.
        from_source: table that forbids states that do not agree with the state of the producer; None where all agree.
        to_readers: the same for each reader and its strategies.
    """

    changes: tuple[TypeChange, ...]
    terms: tuple[NDArray[np.intp], ...]
    states: Sequence[ValueState] = ()
    from_source: Table | None = None
    to_readers: tuple[Table | None, ...] = ()


@dataclass(slots=True)
class Structures:
    """Results that problems of equal structure share, whatever their costs.

    Attributes:
        solvers: see :func:`autopar.planner.sharding.elimination.prepare`.
        flows: flows of values, by the numbers of the types in which they are produced and read.
        numbers: a number for each distinct tuple of types.
    """

    solvers: dict[object, EnergySolver] = field(default_factory=dict)
    flows: dict[object, Flow] = field(default_factory=dict)
    numbers: dict[Produced | Wanted, int] = field(default_factory=dict)

    def number(self, types: Produced | Wanted) -> int:
        """Return a number that is equal for equal tuples of types; it is a short key for them."""
        return self.numbers.setdefault(types, len(self.numbers))


def flow_to_one(produced: Produced, wanted: Wanted) -> Flow:
    """Return the flow of a value that one operator reads."""
    distinct_produced, produced_index = _numbered(produced)
    distinct_wanted, wanted_index = _numbered(wanted)
    changes: dict[TypeChange, int] = {}
    cells = [[_terms(t, types, changes) for types in distinct_wanted] for t in distinct_produced]
    terms = _term_arrays(cells, (len(distinct_produced), len(distinct_wanted)), (produced_index, wanted_index))
    return Flow(changes=tuple(changes), terms=terms)


def flow_to_many(
    produced: Produced, wanted: Sequence[Wanted], max_extras: int, allows: Callable[[Type, Type], bool]
) -> Flow:
    """Return the flow of a value that several operators read.

    Args:
        produced: the types in which it is produced.
        wanted: for each reader the types in which it reads the value.
        max_extras: the most further types that the value may be changed to.
        allows: whether a change from one type to another exists.
    """
    read_types = {t for of_reader in wanted for types in of_reader for t in types}
    states: list[ValueState] = []
    for t in sorted(set(produced)):
        targets = [w for w in sorted(read_types - {t}) if allows(t, w)]
        for count in range(min(max_extras, len(targets)) + 1):
            states += [(t, frozenset(extras)) for extras in combinations(targets, count)]
    changes: dict[TypeChange, int] = {}
    cells = [[_terms(t, extras, changes)] for t, extras in states]
    bit_of = {t: 1 << i for i, t in enumerate(sorted(read_types | set(produced)))}
    produced_bits = np.array([bit_of[t] for t, _ in states])
    available_bits = produced_bits + np.array([sum(bit_of[e] for e in extras) for _, extras in states])
    to_readers = []
    for of_reader in wanted:
        read_bits = np.array([sum(bit_of[t] for t in types) for types in of_reader])
        to_readers.append(forbid((read_bits[:, None] & ~available_bits) == 0))
    return Flow(
        changes=tuple(changes),
        terms=_term_arrays(cells, (len(states),), ()),
        states=states,
        from_source=forbid(np.array([bit_of[t] for t in produced])[:, None] == produced_bits),
        to_readers=tuple(to_readers),
    )


def _terms(source: Type, targets: frozenset[Type], changes: dict[TypeChange, int]) -> list[int]:
    """Return the indices of the changes from one type to others; new changes are numbered from 1 in order of appearance."""
    if len(targets) == 1:
        (target,) = targets
        return [] if target == source else [changes.setdefault((source, target), len(changes) + 1)]
    return [changes.setdefault((source, t), len(changes) + 1) for t in sorted(targets - {source})]


def forbid(allowed: NDArray[np.bool_]) -> Table | None:
    """Return a table that is zero where ``allowed`` is true and infinite elsewhere; None if everything is allowed."""
    return None if allowed.all() else np.where(allowed, 0.0, np.inf)


def _term_arrays(
    cells: Sequence[Sequence[list[int]]], shape: tuple[int, ...], expand: tuple[NDArray[np.intp], ...]
) -> tuple[NDArray[np.intp], ...]:
    """Return arrays of the n-th terms of all cells of a table.

    Args:
        cells: the terms of each cell, by row and column.
        shape: the shape of the table where ``expand`` is empty.
        expand: the row of each state of the first variable and the column of each state of the second one; empty where cells are states.
    """
    count = max([len(terms) for row in cells for terms in row], default=0)
    table_terms = []
    for k in range(count):
        term = np.array([[terms[k] if k < len(terms) else 0 for terms in row] for row in cells], dtype=np.intp)
        table_terms.append(term[expand[0][:, None], expand[1]] if expand else term.reshape(shape))
    return tuple(table_terms)


def _numbered(items: Sequence[_T]) -> tuple[list[_T], NDArray[np.intp]]:
    """Return the distinct items, and for each item its index among them."""
    numbers: dict[_T, int] = {}
    indices = [numbers.setdefault(item, len(numbers)) for item in items]
    return list(numbers), np.array(indices, dtype=np.intp)

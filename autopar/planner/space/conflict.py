"""Why there are no candidates: a smallest set of constraints that conflict, and what resolves it.

A set is found by deletion: a constraint without which there is still no candidate is not needed for the conflict (the deletion
filter of Chinneck and Dravnieks 1991, "Locating minimal infeasible constraint sets in linear programs"). Each trial asks
whether some combination of values keeps a set of constraints, without a table of all combinations: columns are joined one
after the other. A constraint is asked as soon as the columns are there that it reads, and a column that no other one reads
is left out, so that tables stay small: what is left of one is a projection of all combinations that keep the constraints
asked so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autopar.planner.space.candidates import (
    DEGREES,
    columns,
    cp_degrees,
    degrees_of,
    num_micro_batches,
    other_values,
    strict,
    values_of,
)
from autopar.planner.space.constraints import Column, Constraint, Problem, divisors, practice
from autopar.planner.space.pins import Pins

MAX_FREE_WORLD = 64
"""Up to this world size a conflict is looked for among all degrees; past it among those that multiply to the world
size, and combinations of what the pins name."""

COLUMNS = (
    *("tp", "cp", "pp", "dp_replicate", "dp_shard", "micro_batch", "zero", "schedule"),
    *("virtual_stages", "ep_data", "vocab_multiple"),
)
"""In the order in which they are combined: those first that most constraints read alone."""

_SAMPLES = ("micro_batch", "dp_replicate", "dp_shard")


def conflict(problem: Problem, pins: Pins) -> tuple[str, ...]:
    """Names of a smallest-by-inclusion set of constraints without any candidate; empty when there are candidates.

    Found by deletion: a constraint without which there is still no candidate is not needed for the conflict. What is not
    worth trying is named only where laws and pins leave candidates.
    """
    values, meshes = _open(problem, pins)
    for constraints in (strict(problem, pins), (*strict(problem, pins), *practice(problem, pins))):
        read = {c.name: (c, columns_of(c)) for c in constraints}

        def possible(names: Iterable[str], read: Mapping[str, Read] = read) -> bool:
            wanted = [read[name] for name in names]
            return any(any_row(mesh, values, wanted, problem.global_batch_size) for mesh in meshes)

        left = list(read)
        if possible(left):
            continue
        for name in list(read):
            without = [n for n in left if n != name]
            if not possible(without):
                left = without
        return tuple(left)
    return ()


def remedies(problem: Problem, pins: Pins, names: Iterable[str]) -> tuple[str, ...]:
    """What else than dropping a pin resolves a conflict of these names."""
    named, known = set(names), (*strict(problem, pins), *practice(problem, pins))
    return tuple(dict.fromkeys(c.remedy for c in known if c.name in named and c.remedy))


def _open(problem: Problem, pins: Pins) -> tuple[dict[str, Sequence[int]], list[dict[str, Column]]]:
    """What a conflict is looked for among: values of each column, and tables of degrees that are combined with those of others.

    A table without degrees takes these from their values.
    """
    world, degrees = problem.world_size, degrees_of(problem, pins)
    is_small = world <= MAX_FREE_WORLD
    usual = divisors(world) if is_small else (1, 2, world)
    free = {
        key: values_of(pins, key, cp_degrees(problem, pins) if key == "cp" and is_small else usual) for key in DEGREES
    }
    data = {n * m for n in free["dp_replicate"] for m in free["dp_shard"]}
    others = other_values(problem, pins, [*degrees, *((1, n, 1, 1, 1) for n in sorted(data))])
    return {**free, **others}, [{}] if is_small else [{}, columns(DEGREES, degrees)]


Read = tuple[Constraint, frozenset[str]]
"""A constraint and the columns that it reads."""


class _Asked(dict[str, Column]):
    """One row of ones that has the columns that were read."""

    def __missing__(self, name: str) -> Column:
        self[name] = np.ones(1, dtype=np.int64)
        return self[name]


def columns_of(constraint: Constraint) -> frozenset[str]:
    """The columns that a constraint reads, the same in every table."""
    asked = _Asked()
    constraint.holds(asked)
    return frozenset(asked.keys() - {"num_micro_batches"}).union(_SAMPLES if "num_micro_batches" in asked else ())


def any_row(
    table: Mapping[str, Column],
    values: Mapping[str, Sequence[int]],
    constraints: Sequence[Read],
    global_batch_size: int,
) -> bool:
    """Whether some row of ``table``, with a value of each other column, keeps all constraints.

    Args:
        table: rows that belong together; empty: there are none such.
        values: of each column.
    """
    held: dict[str, Column] = dict(table)
    left = list(constraints)
    rest = [name for name in COLUMNS if name not in held]
    if not all(values[name] for name in rest):
        return False
    while True:
        for one in [c for c in left if c[1] <= held.keys()]:
            left.remove(one)
            view = dict(held)
            if view.keys() >= set(_SAMPLES):
                view["num_micro_batches"] = num_micro_batches(view, global_batch_size)
            keep = one[0].holds(view)
            if not keep.any():
                return False
            held = {name: column[keep] for name, column in held.items()}
        if not left:
            return True
        held = _distinct({name: c for name, c in held.items() if any(name in read for _, read in left)})
        name = next(name for name in rest if any(name in read for _, read in left))
        rest.remove(name)
        held = _with(held, name, np.array(values[name], dtype=np.int64))


def _with(table: Mapping[str, Column], name: str, values: Column) -> dict[str, Column]:
    """Every row with every value."""
    rows = len(next(iter(table.values()))) if table else 1
    made = {key: np.repeat(column, len(values)) for key, column in table.items()}
    return {**made, name: np.tile(values, rows)}


def _distinct(table: dict[str, Column]) -> dict[str, Column]:
    """Each row once."""
    if not table:
        return table
    code = np.zeros(len(next(iter(table.values()))), dtype=np.int64)
    for column in table.values():
        kinds, which = np.unique(column, return_inverse=True)
        code = code * len(kinds) + which
    first = np.unique(code, return_index=True)[1]
    return {name: column[first] for name, column in table.items()}

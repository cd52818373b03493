"""Candidates: all that a problem and its pins leave; or where there are none, a smallest set of constraints that conflict.

Every constraint (:mod:`autopar.planner.space.constraints`) is a predicate over the columns of one table of combinations. Those that keep
all of them are the candidates; where there are none, :func:`conflict` finds which conflict. Columns are joined one after the other, and a
constraint is asked as soon as the columns are there that it reads, so that tables stay small.

A set that conflicts is found by deletion: a constraint without which there is still no candidate is not needed for the conflict (the
deletion filter of Chinneck and Dravnieks 1991, "Locating minimal infeasible constraint sets in linear programs"). Each trial asks whether
some combination of values keeps a set of constraints: a column that no other one reads is then left out, so that what is left of a table
is a projection of all combinations that keep the constraints asked so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from autopar.plan.mesh import Mesh
from autopar.plan.plan import Offload, ScheduleName
from autopar.plan.schedule import SCHEDULES
from autopar.planner.space.constraints import (
    Column,
    Constraint,
    Problem,
    Table,
    divisors,
    is_pinned,
    laws,
    pin_constraints,
    practice,
    sequence_laws,
    stage_constraints,
    usual_micro_batches,
)
from autopar.planner.space.pin_syntax import ChoicePin, NumberPin
from autopar.planner.space.pins import Pins

DEGREES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One choice of the outer search.

    Attributes:
        order: of the node groups along the ranks, empty: as the cluster has them.
        offload: what lives on the host.
        shares: samples that a data rank of each node group takes at once, in the order of ranks; ``micro_batch_size`` is then
            the largest. Empty: all take as many.
        moves: blocks may keep there what their backward needs.
        vocab_multiple: of the rows of each rank's part of a vocabulary, which is padded to it (:mod:`autopar.graph.rewrites`).
    """

    mesh: Mesh
    micro_batch_size: int
    num_micro_batches: int
    zero_stage: int
    schedule: ScheduleName
    virtual_stages: int
    order: tuple[int, ...] = ()
    offload: tuple[Offload, ...] = ()
    shares: tuple[int, ...] = ()
    moves: bool = False
    vocab_multiple: int = 1

    @property
    def on_host(self) -> tuple[str, ...]:
        """What lives or may live on the host, in words."""
        return (*self.offload, *(("activations",) if self.moves else ()))

    def __str__(self) -> str:
        samples = "-".join(map(str, self.shares)) or str(self.micro_batch_size)
        parts = [str(self.mesh), f"zero={self.zero_stage}", f"micro_batch={samples}"]
        if self.mesh.pp > 1:
            parts.append(self.schedule + (f" v={self.virtual_stages}" if self.virtual_stages > 1 else ""))
        if self.vocab_multiple > 1:
            parts.append(f"vocab_multiple={self.vocab_multiple}")
        if self.order:
            parts.append(f"node groups {'-'.join(map(str, self.order))}")
        if self.on_host:
            parts.append(f"{', '.join(self.on_host)} on the host")
        return ", ".join(parts)


def num_micro_batches(table: Table, global_batch_size: int) -> Column:
    """The column that follows from three others."""
    return global_batch_size // (table["micro_batch"] * table["dp_replicate"] * table["dp_shard"])


def candidates(problem: Problem, pins: Pins) -> list[Candidate]:
    """All candidates that keep every constraint, in a fixed order."""
    read = [(one, columns_of(one)) for one in (*strict(problem, pins), *practice(problem, pins))]
    degrees, batch = degrees_of(problem, pins), problem.global_batch_size
    table = rows_of(columns(DEGREES, degrees), other_values(problem, pins, degrees), read, batch, is_whole=True)
    if table is None:
        return []
    table["num_micro_batches"] = num_micro_batches(table, batch)
    kept: dict[str, list[int]] = {key: column.tolist() for key, column in table.items()}
    return [_candidate(kept, row) for row in range(len(kept["pp"]))]


def strict(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """Laws and pins: what a space may not lift."""
    return (
        *laws(problem),
        *sequence_laws(problem, pins),
        *pin_constraints(pins, problem.global_batch_size),
        *stage_constraints(problem, pins),
    )


def values_of(pins: Pins, key: str, usual: Sequence[int], around: Sequence[int] = (-1, 0, 1)) -> list[int]:
    """The usual values and those that pins name, with what is around these for inequalities: their neighbours."""
    named = [p.value + n for p in pins.pins if isinstance(p, NumberPin) and p.key == key for n in around]
    return sorted({*usual, *(value for value in named if value >= (0 if key == "zero" else 1))})


def cp_degrees(problem: Problem, pins: Pins) -> tuple[int, ...]:
    """Degrees of ``cp``."""
    found, space = divisors(problem.world_size), problem.space
    long = any(n >= space.cp_from for n in problem.sequences)
    return found if is_pinned(pins, "cp") else tuple(d for d in found if d <= space.max_cp) if long else (1,)


def degrees_of(problem: Problem, pins: Pins) -> list[tuple[int, ...]]:
    """All that multiply to the world size."""
    world, found = problem.world_size, divisors(problem.world_size)
    return [
        (pp, world // (pp * tp * cp * shard), shard, cp, tp)
        for pp in found
        for tp in found
        for cp in cp_degrees(problem, pins)
        if world % (pp * tp * cp) == 0
        for shard in divisors(world // (pp * tp * cp))
    ]


def other_values(problem: Problem, pins: Pins, degrees: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    """The values of what is chosen beside the degrees."""
    space, batch = problem.space, problem.global_batch_size
    data = sorted({d[1] * d[2] for d in degrees})
    parts = {m for d in data if batch % d == 0 for m in usual_micro_batches(space, batch // d)}
    micro = values_of(pins, "micro_batch", sorted(parts))
    if problem.mixes_samples:
        micro = sorted({*micro, *(s for s in {batch // d for d in data} if s)})
    for pin in pins.pins:  # a pinned number of micro-batches gives the micro-batch
        if isinstance(pin, NumberPin) and pin.key == "num_micro_batches" and pin.value:
            sizes = {batch // (pin.value * d) for d in data}
            micro = sorted({*micro, *(s for s in sizes if s)})
    named = tuple(p.value for p in pins.pins if isinstance(p, ChoicePin) and p.key == "schedule")
    return {
        "zero": values_of(pins, "zero", space.zero_stages),
        "micro_batch": micro,
        "schedule": sorted({SCHEDULES.index(n) for n in ("none", *space.schedules, *named)}),
        "virtual_stages": values_of(pins, "virtual_stages", (1, *space.virtual_stages)),
        "ep_data": values_of(pins, "ep_data", divisors(gcd(*(problem.experts or (1,)), problem.world_size))),
        # as far as it makes some vocabulary another length than 1 does
        "vocab_multiple": values_of(
            pins, "vocab_multiple", space.vocab_multiples if problem.vocabularies else (1,), (0,)
        ),
    }


def columns(names: Sequence[str], rows: Iterable[Sequence[int]]) -> dict[str, Column]:
    """Rows as columns by name."""
    found = np.array(list(rows), dtype=np.int64).reshape(-1, len(names))
    return {name: found[:, i] for i, name in enumerate(names)}


def _candidate(t: Mapping[str, Sequence[int]], row: int) -> Candidate:
    spread = t["ep_data"][row]
    schedule: ScheduleName = SCHEDULES[t["schedule"][row]]  # type: ignore[assignment]
    return Candidate(
        mesh=Mesh(**{axis: t[axis][row] for axis in DEGREES}, ep=spread, ep_data=spread),
        micro_batch_size=t["micro_batch"][row],
        num_micro_batches=t["num_micro_batches"][row],
        zero_stage=t["zero"][row],
        schedule=schedule,
        virtual_stages=t["virtual_stages"][row],
        vocab_multiple=t["vocab_multiple"][row],
    )


MAX_FREE_WORLD = 64
"""Up to this world size a conflict is looked for among all degrees; past it among those that multiply to the world
size, and combinations of what the pins name."""

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
            return any(rows_of(mesh, values, wanted, problem.global_batch_size) is not None for mesh in meshes)

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


def columns_of(constraint: Constraint) -> frozenset[str]:
    """The columns that a constraint reads, the same in every table."""
    asked = defaultdict[str, Column](lambda: np.ones(1, dtype=np.int64))  # has the columns that were read
    constraint.holds(asked)
    return frozenset(asked.keys() - {"num_micro_batches"}).union(_SAMPLES if "num_micro_batches" in asked else ())


def rows_of(
    table: Mapping[str, Column],
    values: Mapping[str, Sequence[int]],
    constraints: Sequence[Read],
    global_batch_size: int,
    *,
    is_whole: bool = False,
) -> dict[str, Column] | None:
    """The rows of ``table``, with each value of each other column, that keep all constraints; None: there are none.

    Args:
        table: rows that belong together; empty: there are none such.
        values: of each column.
        is_whole: rows have all columns; else those alone that were read last, each row once.
    """
    held: dict[str, Column] = dict(table)
    left = list(constraints)
    rest = [name for name in values if name not in held]
    if not all(values[name] for name in rest):
        return None
    while True:
        for one in [c for c in left if c[1] <= held.keys()]:
            left.remove(one)
            view = dict(held)
            if view.keys() >= set(_SAMPLES):
                view["num_micro_batches"] = num_micro_batches(view, global_batch_size)
            keep = one[0].holds(view)
            if not keep.any():
                return None
            held = {name: column[keep] for name, column in held.items()}
        asked = set(rest) if is_whole else {name for _, read in left for name in read}
        if not asked:
            return held
        if not is_whole:
            held = _distinct({name: column for name, column in held.items() if name in asked})
        name = next(name for name in rest if name in asked)
        rest.remove(name)
        held = _product(held, {name: np.array(values[name], dtype=np.int64)})


def _product(left: Table, right: Table) -> dict[str, Column]:
    """Every row of one table with every row of the other; a table without columns has one row."""
    rows, times = (len(next(iter(table.values()), (None,))) for table in (left, right))
    found = {name: np.repeat(column, times) for name, column in left.items()}
    return found | {name: np.tile(column, rows) for name, column in right.items()}


def _distinct(table: dict[str, Column]) -> dict[str, Column]:
    """Each row once."""
    if not table:
        return table
    return dict(zip(table, np.unique(np.stack(list(table.values())), axis=1), strict=True))

"""Candidates: all combinations of choices that satisfy a problem's constraints and pins, or a minimal conflict where there are none.

Every constraint (:mod:`autopar.planner.space.constraints`) is a predicate over the columns of one table of combinations. Columns are joined
one after the other, and a constraint is evaluated as soon as all columns that it reads are there, so that tables stay small.

:func:`conflict` uses the deletion filter of Chinneck and Dravnieks 1991, "Locating minimal infeasible constraint sets in linear programs":
a constraint is dropped from the set if there is still no candidate without it. Each trial asks only whether some combination satisfies a
set of constraints. So columns that no unchecked constraint reads are dropped, and equal rows are merged.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from autopar.plan.mesh import MESH_AXES, Mesh
from autopar.plan.plan import Offload
from autopar.plan.schedule import SCHEDULES, ScheduleName
from autopar.planner.space.constraints import (
    Column,
    Constraint,
    Problem,
    Table,
    divisors,
    is_pinned,
    pin_constraints,
    plan_constraints,
    sequence_constraints,
    stage_constraints,
    usual_constraints,
    usual_micro_batches,
)
from autopar.planner.space.pin_syntax import ChoicePin, NumberPin
from autopar.planner.space.pins import Pins


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """One combination of the choices that branch and bound searches; the layout and the stage cut are chosen for each candidate.

    Attributes:
        mesh: the degrees of all axes.
        micro_batch_size: the samples of a data rank's micro-batch.
        num_micro_batches: the number of micro-batches of a step.
        zero_stage: the ZeRO stage, 0 to 3.
        schedule: the pipeline schedule; ``none`` without a pipeline.
        virtual_stages: the number of stages of each pipeline rank.
        order: the node groups in the order of ranks, by position in the cluster; empty: the cluster's order.
        offload: what lives on the host.
        shares: the micro-batch size of a data rank of each node group, in the order of ranks; ``micro_batch_size`` is then the largest.
            Empty: equal for all.
        offloads_activations: whether blocks may keep their activations on the host between forward and backward; the stage cut decides which do.
        vocab_multiple: the multiple to which each rank's rows of a vocabulary are padded (:mod:`autopar.graph.rewrites`).
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
    offloads_activations: bool = False
    vocab_multiple: int = 1

    @property
    def on_host(self) -> tuple[str, ...]:
        """What lives or may live on the host, in words."""
        return (*self.offload, *(("activations",) if self.offloads_activations else ()))

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
    """Return the column of numbers of micro-batches, which follows from sizes of micro-batches and data degrees."""
    return global_batch_size // (table["micro_batch"] * table["dp_replicate"] * table["dp_shard"])


def candidates(problem: Problem, pins: Pins) -> list[Candidate]:
    """Return all candidates that satisfy every constraint, in a fixed order."""
    constraints = (*strict_constraints(problem, pins), *usual_constraints(problem, pins))
    scoped, batch = [(c, columns_read_by(c)) for c in constraints], problem.global_batch_size
    degrees = mesh_degrees(problem, pins)
    start, values = as_table(MESH_AXES, degrees), other_values(problem, pins, degrees)
    table = satisfying_rows(start, values, scoped, batch, all_columns=True)
    if table is None:
        return []
    table["num_micro_batches"] = num_micro_batches(table, batch)
    lists: dict[str, list[int]] = {key: column.tolist() for key, column in table.items()}
    return [_candidate(lists, row) for row in range(len(lists["pp"]))]


def strict_constraints(problem: Problem, pins: Pins) -> tuple[Constraint, ...]:
    """Return the constraints that hold in every space: those of every plan, and those of pins."""
    return (
        *plan_constraints(problem),
        *sequence_constraints(problem, pins),
        *pin_constraints(pins, problem.global_batch_size),
        *stage_constraints(problem, pins),
    )


def values_to_try(pins: Pins, key: str, usual: Sequence[int], around: Sequence[int] = (-1, 0, 1)) -> list[int]:
    """Return the usual values of a choice, and each number in a pin on it plus each offset of ``around`` (``tp>3`` may leave only 4)."""
    near_pins = [p.value + n for p in pins.pins if isinstance(p, NumberPin) and p.key == key for n in around]
    return sorted({*usual, *(value for value in near_pins if value >= (0 if key == "zero" else 1))})


def cp_degrees(problem: Problem, pins: Pins) -> tuple[int, ...]:
    """Return the degrees of ``cp`` to try."""
    degrees, space = divisors(problem.world_size), problem.space
    is_long = any(n >= space.cp_from for n in problem.sequences)
    return degrees if is_pinned(pins, "cp") else tuple(d for d in degrees if d <= space.max_cp) if is_long else (1,)


def mesh_degrees(problem: Problem, pins: Pins) -> list[tuple[int, ...]]:
    """Return all degrees of the axes, in the order of :data:`~autopar.plan.mesh.MESH_AXES`, that multiply to the world size."""
    world, degrees = problem.world_size, divisors(problem.world_size)
    return [
        (pp, world // (pp * tp * cp * shard), shard, cp, tp)
        for pp in degrees
        for tp in degrees
        for cp in cp_degrees(problem, pins)
        if world % (pp * tp * cp) == 0
        for shard in divisors(world // (pp * tp * cp))
    ]


def other_values(problem: Problem, pins: Pins, degrees: Sequence[Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the values to try of each choice other than the degrees of the mesh.

    Args:
        degrees: the degrees that are tried, as of :func:`mesh_degrees`; sizes of micro-batches depend on those of the data axes.
    """
    space, batch = problem.space, problem.global_batch_size
    data = sorted({replicate * shard for _, replicate, shard, _, _ in degrees})
    usual = {m for d in data if batch % d == 0 for m in usual_micro_batches(space, batch // d)}
    micro_batches = values_to_try(pins, "micro_batch", sorted(usual))
    if problem.mixes_samples:  # a data rank takes all of its samples in one micro-batch
        micro_batches = sorted({*micro_batches, *(s for s in {batch // d for d in data} if s)})
    for pin in pins.pins:  # a pinned number of micro-batches implies their size
        if isinstance(pin, NumberPin) and pin.key == "num_micro_batches" and pin.value:
            sizes = {batch // (pin.value * d) for d in data}
            micro_batches = sorted({*micro_batches, *(s for s in sizes if s)})
    pinned_schedules = tuple(p.value for p in pins.pins if isinstance(p, ChoicePin) and p.key == "schedule")
    return {
        "zero": values_to_try(pins, "zero", space.zero_stages),
        "micro_batch": micro_batches,
        "schedule": sorted({SCHEDULES.index(n) for n in ("none", *space.schedules, *pinned_schedules)}),
        "virtual_stages": values_to_try(pins, "virtual_stages", (1, *space.virtual_stages)),
        "ep_data": values_to_try(pins, "ep_data", divisors(gcd(*(problem.experts or (1,)), problem.world_size))),
        "vocab_multiple": values_to_try(
            pins, "vocab_multiple", space.vocab_multiples if problem.vocabularies else (1,), around=(0,)
        ),
    }


def as_table(names: Sequence[str], rows: Iterable[Sequence[int]]) -> dict[str, Column]:
    """Return rows as a table whose columns have these names."""
    table = np.array(list(rows), dtype=np.int64).reshape(-1, len(names))
    return {name: table[:, i] for i, name in enumerate(names)}


def _candidate(t: Mapping[str, Sequence[int]], row: int) -> Candidate:
    """Return the candidate of a row; the layout decides later whether experts are split over ``tp`` too."""
    ep_data = t["ep_data"][row]
    schedule = SCHEDULES[t["schedule"][row]]
    return Candidate(
        mesh=Mesh(**{axis: t[axis][row] for axis in MESH_AXES}, ep=ep_data, ep_data=ep_data),
        micro_batch_size=t["micro_batch"][row],
        num_micro_batches=t["num_micro_batches"][row],
        zero_stage=t["zero"][row],
        schedule=schedule,
        virtual_stages=t["virtual_stages"][row],
        vocab_multiple=t["vocab_multiple"][row],
    )


MAX_FREE_WORLD = 64
"""The world size up to which a conflict is searched among all combinations of degrees, whatever their product.

Above it these are tried: degrees that multiply to the world size, and combinations of 1, 2, the world size and the degrees near those of pins.
"""

_BATCH_COLUMNS = ("micro_batch", "dp_replicate", "dp_shard")
"""The columns from which ``num_micro_batches`` follows."""


def conflict(problem: Problem, pins: Pins) -> tuple[str, ...]:
    """Return the names of a minimal set of constraints that no candidate satisfies; empty if there are candidates.

    It is found by the deletion filter. Those that leave out the unlikely are in it only if there are candidates without them.
    """
    values, starts = _conflict_domain(problem, pins)
    strict = strict_constraints(problem, pins)
    for constraints in (strict, (*strict, *usual_constraints(problem, pins))):
        by_name = {c.name: (c, columns_read_by(c)) for c in constraints}

        def is_feasible(names: Iterable[str], by_name: Mapping[str, ScopedConstraint] = by_name) -> bool:
            chosen = [by_name[name] for name in names]
            return any(
                satisfying_rows(start, values, chosen, problem.global_batch_size) is not None for start in starts
            )

        remaining = list(by_name)
        if is_feasible(remaining):
            continue
        for name in list(by_name):
            without = [n for n in remaining if n != name]
            if not is_feasible(without):
                remaining = without
        return tuple(remaining)
    return ()


def remedies(problem: Problem, pins: Pins, names: Iterable[str]) -> tuple[str, ...]:
    """Return what resolves a conflict of constraints with these names, besides dropping a pin."""
    named, constraints = set(names), (*strict_constraints(problem, pins), *usual_constraints(problem, pins))
    return tuple(dict.fromkeys(c.remedy for c in constraints if c.name in named and c.remedy))


def _conflict_domain(problem: Problem, pins: Pins) -> tuple[dict[str, Sequence[int]], list[dict[str, Column]]]:
    """Return the combinations among which a conflict is searched: the values of each choice, and the tables to which they are joined.

    Joined to the empty table, degrees take all of their values, whatever the product, as a conflict may be without the constraint on it.
    """
    world, degrees = problem.world_size, mesh_degrees(problem, pins)
    is_small = world <= MAX_FREE_WORLD
    usual = divisors(world) if is_small else (1, 2, world)
    free_degrees = {
        key: values_to_try(pins, key, cp_degrees(problem, pins) if key == "cp" and is_small else usual)
        for key in MESH_AXES
    }
    data = {n * m for n in free_degrees["dp_replicate"] for m in free_degrees["dp_shard"]}
    others = other_values(problem, pins, [*degrees, *((1, n, 1, 1, 1) for n in sorted(data))])
    return {**free_degrees, **others}, [{}] if is_small else [{}, as_table(MESH_AXES, degrees)]


ScopedConstraint = tuple[Constraint, frozenset[str]]
"""A constraint and the columns that it reads."""


def columns_read_by(constraint: Constraint) -> frozenset[str]:
    """Return the columns that a constraint reads, which are the same for every table; :data:`_BATCH_COLUMNS` for ``num_micro_batches``."""
    table = defaultdict[str, Column](lambda: np.ones(1, dtype=np.int64))  # records the columns that are read
    constraint.holds(table)
    return frozenset(table.keys() - {"num_micro_batches"}).union(_BATCH_COLUMNS if "num_micro_batches" in table else ())


def satisfying_rows(
    table: Mapping[str, Column],
    values: Mapping[str, Sequence[int]],
    constraints: Sequence[ScopedConstraint],
    global_batch_size: int,
    *,
    all_columns: bool = False,
) -> dict[str, Column] | None:
    """Return the rows of ``table``, joined with all values of the other columns, that satisfy all constraints; None if there are none.

    Args:
        table: the columns and rows to start from; those of an empty table are all joined here.
        values: the values of each column; they are joined for the columns that ``table`` lacks.
        constraints: the constraints, each with the columns that it reads.
        global_batch_size: the samples of a step, from which ``num_micro_batches`` follows.
        all_columns: whether all columns are returned. If not, columns are dropped on the way, and only None or not None has a meaning.
    """
    rows: dict[str, Column] = dict(table)
    unchecked = list(constraints)
    unjoined = [name for name in values if name not in rows]
    if not all(values[name] for name in unjoined):
        return None
    while True:
        for ready in [c for c in unchecked if c[1] <= rows.keys()]:
            unchecked.remove(ready)
            view = dict(rows)
            if view.keys() >= set(_BATCH_COLUMNS):
                view["num_micro_batches"] = num_micro_batches(view, global_batch_size)
            keep = ready[0].holds(view)
            if not keep.any():
                return None
            rows = {name: column[keep] for name, column in rows.items()}
        needed = set(unjoined) if all_columns else {name for _, read in unchecked for name in read}
        if not needed:
            return rows
        if not all_columns:
            rows = _distinct({name: column for name, column in rows.items() if name in needed})
        name = next(name for name in unjoined if name in needed)
        unjoined.remove(name)
        rows = _product(rows, {name: np.array(values[name], dtype=np.int64)})


def _product(left: Table, right: Table) -> dict[str, Column]:
    """Return every row of one table joined with every row of the other; a table without columns has one row."""
    num_rows, num_copies = (len(next(iter(table.values()), (None,))) for table in (left, right))
    joined = {name: np.repeat(column, num_copies) for name, column in left.items()}
    return joined | {name: np.tile(column, num_rows) for name, column in right.items()}


def _distinct(table: dict[str, Column]) -> dict[str, Column]:
    """Return a table with each of its rows once; one without columns stays as it is."""
    if not table:
        return table
    return dict(zip(table, np.unique(np.stack(list(table.values())), axis=1), strict=True))

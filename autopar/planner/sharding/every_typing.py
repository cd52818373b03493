"""All typings of an axis, where they are few.

The solver minimises what adds up (:mod:`autopar.planner.sharding.block_chain`); the step of a plan does not quite: gathers hide
behind the block before, memory comes in steps. So the plan of a small problem may have a typing that no price makes best. A
space says up to how many typings are all tried (``Space.every``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from autopar.graph.ir import Ref
from autopar.layout import Type
from autopar.planner.sharding.block_chain import Assignment, AxisSolution, AxisSolver
from autopar.planner.sharding.block_table import BlockProblem
from autopar.planner.sharding.elimination import Entry, marginalise
from autopar.planner.sharding.tables import Weights

MAX_ENTRIES = 64
"""Combinations of a block's strategies, types at rest and types at its boundary that are looked through, for each typing wanted."""

_Assignments = Mapping[tuple[int, ...], Sequence[Assignment]]
"""For each combination of states at a block's boundary its assignments."""


def every_typing(solver: AxisSolver, most: int) -> list[AxisSolution] | None:
    """All typings of a compact graph on an axis; None where there are more than ``most``, or a block is too large to tell."""
    if any(_entries(block) > MAX_ENTRIES * most for block in solver.problems.values()):
        return None
    by_key = {key: _assignments(block) for key, block in solver.problems.items()}
    equal = dict[Ref, list[Ref]]()
    for a, b in solver.equal_values():
        equal.setdefault(a, []).append(b)
        equal.setdefault(b, []).append(a)
    found: list[AxisSolution] = []
    for assignments in _fitting(solver, [by_key[key] for key in solver.keys], equal):
        if len(found) == most:
            return None
        found.append(solver.solution(assignments))
    return found


def _variables(block: BlockProblem) -> tuple[int, ...]:
    """Those that a typing is made of, beside the changes of type that follow from them."""
    problem = block.problem
    return tuple(dict.fromkeys((*block.keep, *problem.ops.values(), *problem.rests.values())))


def _entries(block: BlockProblem) -> int:
    return prod(len(block.problem.states[v]) for v in _variables(block))


def _assignments(block: BlockProblem) -> _Assignments:
    """Each with the changes of type that take least time beside it."""
    marginals = marginalise(block.problem.energy(Weights()), _variables(block))
    entries = [Entry(0, tuple(index)) for index in np.argwhere(np.isfinite(marginals.tables[0])).tolist()]
    found: dict[tuple[int, ...], list[Assignment]] = {}
    for assignment in marginals.decode(entries):
        found.setdefault(tuple(assignment[v] for v in block.keep), []).append(assignment)
    return found


def _fitting(
    solver: AxisSolver, blocks: Sequence[_Assignments], equal: Mapping[Ref, Sequence[Ref]]
) -> Iterator[tuple[Assignment, ...]]:
    """Assignments of all blocks whose values and shared parameters have one type wherever they are."""

    def kind(key: Ref | str, state: int) -> Type | int:
        return solver.types[key][state] if isinstance(key, Ref) else state

    def after(i: int, types: dict[Ref | str, Type | int]) -> Iterator[tuple[Assignment, ...]]:
        if i == len(blocks):
            yield ()
            return
        for states, assignments in blocks[i].items():
            crossing = {key: kind(key, state) for key, state in zip(solver.boundaries[i].keys, states, strict=True)}
            both = types | crossing
            if all(types.get(key, t) == t for key, t in crossing.items()) and all(
                both.get(twin, t) == t
                for key, t in crossing.items()
                if isinstance(key, Ref)
                for twin in equal.get(key, ())
            ):
                for rest in after(i + 1, both):
                    for assignment in assignments:
                        yield (assignment, *rest)

    return after(0, {})

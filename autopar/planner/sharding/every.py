"""Everything, where it is little: all cuts with every choice of recompute, and all typings of an axis.

The solvers minimise what adds up (:mod:`autopar.planner.stages.stage_cut`, :mod:`autopar.planner.sharding.block_chain`); the step of a plan does not
quite: gathers hide behind the block before, messages between stages wait for each other, memory comes in steps. So the plan of
a small problem may be one that no solver names. A space says up to how many plans and typings are all tried (``Space.every``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from math import comb, prod

import numpy as np

from autopar.graph.ir import Ref
from autopar.layout import Type
from autopar.planner.sharding.block_chain import AxisSolution, AxisSolver
from autopar.planner.sharding.block_table import BlockProblem
from autopar.planner.sharding.elimination import marginalise
from autopar.planner.sharding.tables import Weights
from autopar.planner.stages.activation_modes import CutBlock
from autopar.planner.stages.stage_cut import Cut

MAX_ENTRIES = 64
"""Combinations of a block's strategies, types at rest and types at its boundary that are looked through, for each typing wanted."""


def count_plans(num_blocks: int, stages: int, choices: Sequence[int]) -> int:
    """Cuts into stages times choices of recompute; ``choices``: of each block."""
    return comb(num_blocks - 1, stages - 1) * prod(choices)


def every_cut(blocks: Sequence[CutBlock], stages: int, fixed: Mapping[int, int]) -> Iterator[Cut]:
    """All of them; ``fixed``: pinned stage by block index. Their times are left open."""
    n = len(blocks)
    modes = list(product(*([option.mode for option in block.options] for block in blocks)))
    for inner in combinations(range(1, n), stages - 1):
        stops = (*inner, n)
        if all(sum(stop <= i for stop in stops) == stage for i, stage in fixed.items()):
            for own in modes:
                yield Cut(stops=stops, modes=own, time_s=0.0)


def every_typing(solver: AxisSolver, most: int) -> list[AxisSolution] | None:
    """All typings of a compact graph on an axis; None where there are more than ``most``, or a block is too large to tell."""
    if any(_entries(block) > MAX_ENTRIES * most for block in solver.problems.values()):
        return None
    known = {key: _assignments(block) for key, block in solver.problems.items()}
    blocks = [known[key] for key in solver.keys]
    equal = dict[Ref, list[Ref]]()
    for a, b in solver.equal_values():
        equal.setdefault(a, []).append(b)
        equal.setdefault(b, []).append(a)
    found: list[AxisSolution] = []
    for own in _chained(solver, blocks, equal):
        if len(found) == most:
            return None
        found.append(solver.solution(own))
    return found


_Assignments = Mapping[tuple[int, ...], Sequence[tuple[int, ...]]]
"""For each combination of states at a block's boundary its assignments."""


def _variables(block: BlockProblem) -> tuple[int, ...]:
    """Those that a typing is made of, beside the changes of type that follow from them."""
    problem = block.problem
    return tuple(dict.fromkeys((*block.keep, *problem.ops.values(), *problem.rests.values())))


def _entries(block: BlockProblem) -> int:
    return prod(len(block.problem.states[v]) for v in _variables(block))


def _assignments(block: BlockProblem) -> _Assignments:
    """Each with the changes of type that take least time beside it."""
    problem, keep = block.problem, block.keep
    marginal = marginalise(problem.energy(Weights()), _variables(block))
    found: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for index in np.argwhere(np.isfinite(marginal.table)).tolist():
        assignment = marginal.decode(tuple(index))
        found.setdefault(tuple(assignment[v] for v in keep), []).append(assignment)
    return found


def _chained(
    solver: AxisSolver, blocks: Sequence[_Assignments], equal: Mapping[Ref, Sequence[Ref]]
) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Assignments of all blocks whose values and shared parameters have one type wherever they are."""
    keys = [solver.boundary_keys(i) for i in range(len(blocks))]

    def kind(key: Ref | str, state: int) -> Type | int:
        return solver.types[key][state] if isinstance(key, Ref) else state

    def after(i: int, types: dict[Ref | str, Type | int]) -> Iterator[tuple[tuple[int, ...], ...]]:
        if i == len(blocks):
            yield ()
            return
        for states, assignments in blocks[i].items():
            own = {key: kind(key, state) for key, state in zip(keys[i], states, strict=True)}
            fits = all(types.get(key, t) == t for key, t in own.items())
            both = types | own
            fits = fits and all(
                both.get(twin, t) == t for key, t in own.items() if isinstance(key, Ref) for twin in equal.get(key, ())
            )
            if fits:
                for rest in after(i + 1, both):
                    for assignment in assignments:
                        yield (assignment, *rest)

    return after(0, {})

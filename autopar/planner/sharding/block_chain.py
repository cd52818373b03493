"""Blocks put together: the types of what crosses their boundaries, by dynamic programming over the chain.

The chain is an energy itself: a variable for each value that crosses a boundary (and each parameter that several
blocks read), a table for each block. Elimination along a chain is dynamic programming over boundary types; skip
connections and tied weights merely make it wider. Equal blocks share one table. Inner blocks of a run stand for all
of theirs and share one layout (:mod:`autopar.graph.rewrites`).

The solver minimises what adds up; the step of a plan does not quite: gathers hide behind the block before, memory comes in
steps. So the plan of a small problem may have a typing that no price makes best. A space says up to how many typings are all
tried (``Space.every``), which :func:`every_typing` lists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from autopar.errors import InfeasibleError
from autopar.graph.graph import Block, Ref
from autopar.graph.rewrites import Compact
from autopar.plan.mesh import Type
from autopar.plan.plan import AxisTyping
from autopar.planner.sharding.block_table import (
    MAX_BOUNDARY_STATES,
    AxisCosts,
    BlockProblem,
    boundary_of,
    crossing_types,
    narrow_boundaries,
)
from autopar.planner.sharding.elimination import EnergySolver, Entry, Marginals, prepare
from autopar.planner.sharding.energy import Table, Weights
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.strategy_energy import Choice, rests_of
from autopar.rules.strategy import Strategy, Typing

Assignment = tuple[int, ...]
"""A state for each variable of a block's problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSolution:
    """A typing of a whole compact graph.

    Attributes:
        typing: of all operators and parameters.
        blocks: for each block of the compact graph its part, as plans write it.
        value: what it costs under the weights that it was found with.
        block_s: of each of these blocks seconds of a micro-batch, forward and backward, without what is done once a step.
    """

    typing: Typing
    blocks: tuple[AxisTyping, ...]
    value: float
    block_s: tuple[float, ...]

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for equal typings."""
        return tuple((b.strategies, b.parameters) for b in self.blocks)


class AxisSolver:
    """All typings of one micro-batch graph on one axis; solve it for one price of memory after the other.

    Args:
        compact: the compact graph before the axis is applied.
        costs: choices and prices of its operators and parameters.
        structures: what is known of other problems, whatever they cost; None: nothing.
    """

    def __init__(self, compact: Compact, costs: AxisCosts, structures: Structures | None = None) -> None:
        self.compact, self.costs, self.structures = compact, costs, structures or Structures()
        graph = compact.graph
        self.boundaries = [boundary_of(graph, block, costs.owners) for block in graph.blocks]
        self.types = crossing_types(graph, self.boundaries, costs.size)
        self.twins = self._untie()
        self.types, rests = narrow_boundaries(costs, self.boundaries, self.types)
        self.costs = replace(costs, rests=rests)
        self.problems: dict[Hashable, BlockProblem] = {}
        self.keys = [self._key(i) for i in range(len(graph.blocks))]
        for block, key, boundary in zip(graph.blocks, self.keys, self.boundaries, strict=True):
            if key not in self.problems:
                self.problems[key] = BlockProblem(block, self.costs, self.types, boundary, self.structures)

    def _untie(self) -> list[tuple[int, int]]:
        """Blocks that are one module called again, where its parameters are too many to have a table over their types.

        They get one layout: pairs of them whose values must have equal types, so that equal parameters come of it.
        """
        graph, alike = self.compact.graph, dict[Hashable, list[int]]()
        for i, block in enumerate(graph.blocks):
            names = tuple(p.name for p in graph.block_parameters(block))
            outputs = len(self.boundaries[i].outputs)
            alike.setdefault((block.hash, names, outputs, self._crossing(i)), []).append(i)
        pairs: list[tuple[int, int]] = []
        for group in alike.values():
            boundary = self.boundaries[group[0]]
            rests = [rests_of(graph.parameter(name).spec, self.costs.size) for name in boundary.shared]
            if prod(len(types) for types in (*self._crossing(group[0]), *rests)) <= MAX_BOUNDARY_STATES:
                continue
            kept = tuple(name for name in boundary.shared if self.costs.owners[name] != len(group))
            for i in group:
                self.boundaries[i] = replace(self.boundaries[i], shared=kept)
            pairs += pairwise(group)
        return pairs

    def _crossing(self, index: int) -> tuple[tuple[Type, ...], ...]:
        """The types that each value at a block's boundary may have."""
        boundary = self.boundaries[index]
        return tuple(self.types[ref] for ref in (*boundary.inputs, *boundary.outputs))

    def _key(self, index: int) -> Hashable:
        """Equal for blocks that have one table."""
        graph, boundary = self.compact.graph, self.boundaries[index]
        parameters = graph.block_parameters(graph.blocks[index])
        shared = tuple(p.name in boundary.shared and p.name for p in parameters)
        pinned = tuple(tuple(self.costs.rests.get(p.name, ())) for p in parameters)
        return graph.blocks[index].hash, shared, pinned, len(boundary.outputs), self._crossing(index)

    # --- solving

    def solve(self, weights: Weights) -> AxisSolution:
        """The best typing.

        Raises:
            InfeasibleError: none fits together.
        """
        return self.solve_all([weights])[0]

    def solve_all(self, weights: Sequence[Weights]) -> list[AxisSolution]:
        """The best typing under each of these.

        Raises:
            InfeasibleError: none fits together.
        """
        marginals = {key: problem.solve_all(weights) for key, problem in self.problems.items()}
        return self._together(marginals, len(weights))

    @cached_property
    def quickest(self) -> AxisSolution:
        """The typing of the quickest micro-batch, whatever it keeps.

        Raises:
            InfeasibleError: none fits together.
        """
        return self.solve(Weights())

    def _together(self, marginals: Mapping[Hashable, Marginals], count: int) -> list[AxisSolution]:
        """The best typings by the tables of the blocks under ``count`` weights."""
        counts = [len(members) for members in self.compact.members]
        tables = [marginals[key].tables * n for key, n in zip(self.keys, counts, strict=True)]
        variables, equal, prepared = self._chain
        best = prepared.solve_all([*tables, *(t[None] for t in equal)], count)
        if np.isinf(best.tables).any():
            raise InfeasibleError(
                f"No layouts of the blocks on axis {self.costs.axis} fit together",
                where=self.compact.graph.name,
                fix=f"Drop a pin of parameters, or pin {self.costs.axis}=1",
            )
        crossing = [[variables[key] for key in boundary.keys] for boundary in self.boundaries]
        wanted = [
            [Entry(i, tuple([chosen[v] for v in own])) for own in crossing]
            for i, chosen in enumerate(best.decode([Entry(i, ()) for i in range(count)]))
        ]
        asked: dict[Hashable, dict[Entry, None]] = {key: {} for key in self.problems}
        for entries in wanted:
            for key, entry in zip(self.keys, entries, strict=True):
                asked[key][entry] = None
        decoded = {
            key: dict(zip(entries, marginals[key].decode(list(entries)), strict=True)) for key, entries in asked.items()
        }
        return [
            self.solution([decoded[key][e] for key, e in zip(self.keys, entries, strict=True)], float(value))
            for entries, value in zip(wanted, best.tables, strict=True)
        ]

    def equal_values(self) -> Iterator[tuple[Ref, Ref]]:
        """Pairs of values that must have one type."""
        yield from self.compact.alike
        for i, j in self.twins:
            a, b = self.boundaries[i], self.boundaries[j]
            yield from zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)

    @cached_property
    def _chain(self) -> tuple[Mapping[Ref | str, int], list[Table], EnergySolver]:
        """What the energy of the chain has apart from the tables of the blocks.

        Variables of the values, by reference, and parameters, by name; tables that keep pairs of values of one type.
        """
        sizes: dict[Ref | str, int] = {}
        for boundary, key in zip(self.boundaries, self.keys, strict=True):
            block = self.problems[key]
            sizes |= zip(boundary.keys, [len(block.problem.states[v]) for v in block.keep], strict=True)
        variables = {key: v for v, key in enumerate(sizes)}
        scopes = [tuple([variables[key] for key in boundary.keys]) for boundary in self.boundaries]
        equal = []
        for a, b in self.equal_values():
            if a != b and a in variables and b in variables:
                scopes.append((variables[a], variables[b]))
                equal.append(np.array([[0.0 if x == y else np.inf for y in self.types[b]] for x in self.types[a]]))
        prepared = prepare(tuple(sizes.values()), tuple(scopes), (), cache=self.structures.solvers)
        return variables, equal, prepared

    # --- solutions

    def solution(self, assignments: Sequence[Assignment], value: float = 0.0) -> AxisSolution:
        """The typing of an assignment of each block's variables that fit together; ``value``: of its energy.

        Choices are of the block that a table was made for, carried over to each block that shares it.
        """
        graph, block_s = self.compact.graph, list[float]()
        strategies: dict[str, Strategy] = {}
        parameters: dict[str, Type] = {}
        blocks = []
        for block, key, assignment in zip(graph.blocks, self.keys, assignments, strict=True):
            solved, problem = self.problems[key].block, self.problems[key].problem
            choice = problem.choice(assignment)
            block_s.append(problem.time_s(assignment))
            typing = self._typing(block, solved, choice)
            strategies |= typing.strategies
            parameters |= typing.parameters
            blocks.append(self._written(solved, choice))
        typing_of_all = Typing(
            axis=self.costs.axis, size=Fraction(self.costs.size), strategies=strategies, parameters=parameters
        )
        return AxisSolution(typing=typing_of_all, blocks=tuple(blocks), value=value, block_s=tuple(block_s))

    def _typing(self, block: Block, solved: Block, choice: Choice) -> Choice:
        """A choice for a block under the names of one that is equal to it."""
        graph = self.compact.graph
        ops = zip(graph.block_ops(block), graph.block_ops(solved), strict=True)
        owned = zip(graph.block_parameters(block), graph.block_parameters(solved), strict=True)
        return Choice(
            strategies={op.name: choice.strategies[other.name] for op, other in ops},
            parameters={p.name: choice.parameters[other.name] for p, other in owned},
        )

    def _written(self, solved: Block, choice: Choice) -> AxisTyping:
        """A choice as plans write it: equal blocks have equal layouts."""
        graph = self.compact.graph
        return AxisTyping(
            axis=self.costs.axis,
            strategies=tuple(choice.strategies[op.name].name for op in graph.block_ops(solved)),
            parameters=tuple(choice.parameters[p.name] for p in graph.block_parameters(solved)),
        )


def owners_of(compact: Compact) -> Counter[str]:
    """How many blocks of a compact graph read a parameter, by its name."""
    graph = compact.graph
    return Counter(p.name for block in graph.blocks for p in graph.block_parameters(block))


MAX_ENTRIES = 64
"""Combinations of a block's strategies, types at rest and types at its boundary that are looked through, for each typing wanted."""

_Assignments = Mapping[tuple[int, ...], Sequence[Assignment]]
"""For each combination of states at a block's boundary its assignments."""


def every_typing(solver: AxisSolver, most: int) -> list[AxisSolution] | None:
    """All typings of a compact graph on an axis; None where there are more than ``most``, or a block is too large to tell."""
    for block in solver.problems.values():
        if prod(len(block.problem.states[v]) for v in _variables(block)) > MAX_ENTRIES * most:
            return None
    by_key = {key: _assignments(block) for key, block in solver.problems.items()}
    equal = dict[Ref, list[Ref]]()
    for a, b in solver.equal_values():
        equal.setdefault(a, []).append(b)
        equal.setdefault(b, []).append(a)
    solutions: list[AxisSolution] = []
    for assignments in _fitting(solver, [by_key[key] for key in solver.keys], equal):
        if len(solutions) == most:
            return None
        solutions.append(solver.solution(assignments))
    return solutions


def _variables(block: BlockProblem) -> tuple[int, ...]:
    """Those that a typing is made of, beside the changes of type that follow from them."""
    problem = block.problem
    return tuple(dict.fromkeys((*block.keep, *problem.ops.values(), *problem.rests.values())))


def _assignments(block: BlockProblem) -> _Assignments:
    """Each with the changes of type that take least time beside it."""
    marginals = block.problem.solve_all(_variables(block), [Weights()])
    entries = [Entry(0, tuple(index)) for index in np.argwhere(np.isfinite(marginals.tables[0])).tolist()]
    by_boundary: dict[tuple[int, ...], list[Assignment]] = {}
    for assignment in marginals.decode(entries):
        by_boundary.setdefault(tuple(assignment[v] for v in block.keep), []).append(assignment)
    return by_boundary


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

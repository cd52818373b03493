"""The typing of all blocks on one axis: the types of the values between them, by dynamic programming over their chain.

The chain is an energy itself. It has a variable for each value that crosses a block boundary and for each parameter that several blocks
read, and a table for each block. Elimination along the chain is dynamic programming over boundary types; skip connections and tied
weights only make the tables wider. Equal blocks share one table. The inner blocks of a run are represented by one block and share its
layout (:mod:`autopar.graph.rewrites`).

The solver minimises a sum, but the step of a plan is not quite one: gathers overlap with the block before, and freed memory saves time
only once a whole block need not recompute. The best plan of a small problem may therefore have a typing that is optimal at no price of
memory. :func:`autopar.planner.layouts.layout.every_typing` lists all typings of problems that have few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from autopar.errors import InfeasibleError
from autopar.graph.graph import Block, Graph, Ref
from autopar.graph.rewrites import Compact
from autopar.plan.mesh import I, P, R, Type
from autopar.plan.plan import AxisTyping
from autopar.planner.sharding.block_table import (
    AxisCosts,
    BlockProblem,
    Boundary,
    boundary_of,
)
from autopar.planner.sharding.elimination import EnergySolver, Entry, Marginals, prepare
from autopar.planner.sharding.energy import Table, Weights
from autopar.planner.sharding.input_axes import BATCH
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.strategy_energy import Choice, rests_of, types_of
from autopar.rules.strategy import Strategy, Typing

MAX_BOUNDARY_STATES = 1 << 14
"""Most entries of the boundary table of a block; above it values that cross the boundary are offered fewer types."""

Assignment = tuple[int, ...]
"""A state for each variable of the problem of a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSolution:
    """A typing of all blocks of a compact graph.

    Attributes:
        typing: the typing of all operators and parameters.
        blocks: the part of each block of the compact graph, as plans write it.
        value: its energy under the weights for which it was found.
        block_s: seconds of a micro-batch of each of these blocks, forward and backward, without the work of once a step.
    """

    typing: Typing
    blocks: tuple[AxisTyping, ...]
    value: float
    block_s: tuple[float, ...]

    @property
    def signature(self) -> tuple[object, ...]:
        """A key that is equal for equal typings."""
        return tuple((b.strategies, b.parameters) for b in self.blocks)


class AxisSolver:
    """Finds the best typings of one micro-batch graph on one axis, for any price of memory.

    Args:
        compact: the compact graph before the axis is applied.
        costs: the choices and prices of its operators and parameters.
        structures: cache of what depends on the structure of problems alone; None starts an empty one.

    Attributes:
        boundaries: what each block shares with others.
        types: the types that each value at a boundary may have; see :func:`crossing_types` and :func:`narrow_boundaries`.
        equal_blocks: pairs of blocks whose boundary values must have equal types; see :meth:`_untie`.
        problems: the problem of each distinct block, by its key.
        keys: for each block the key of its problem.
    """

    def __init__(self, compact: Compact, costs: AxisCosts, structures: Structures | None = None) -> None:
        self.compact, self.costs, self.structures = compact, costs, structures or Structures()
        graph = compact.graph
        self.boundaries = [boundary_of(graph, block, costs.owners) for block in graph.blocks]
        self.types = crossing_types(graph, self.boundaries, costs.size)
        self.equal_blocks = self._untie()
        self.types, rests = narrow_boundaries(costs, self.boundaries, self.types)
        self.costs = replace(costs, rests=rests)
        self.problems: dict[Hashable, BlockProblem] = {}
        self.keys = [self._key(i) for i in range(len(graph.blocks))]
        for block, key, boundary in zip(graph.blocks, self.keys, self.boundaries, strict=True):
            if key not in self.problems:
                self.problems[key] = BlockProblem(block, self.costs, self.types, boundary, self.structures)

    def _untie(self) -> list[tuple[int, int]]:
        """Take shared parameters out of the boundaries of repeated calls of one module where a table over their types would be too large.

        Such blocks get one layout instead. Returns pairs of them whose boundary values must have equal types, which makes the types of
        their parameters equal too.
        """
        graph, calls = self.compact.graph, dict[Hashable, list[int]]()
        for i, block in enumerate(graph.blocks):
            names = tuple(p.name for p in graph.block_parameters(block))
            outputs = len(self.boundaries[i].outputs)
            calls.setdefault((block.hash, names, outputs, self._boundary_types(i)), []).append(i)
        pairs: list[tuple[int, int]] = []
        for group in calls.values():
            boundary = self.boundaries[group[0]]
            rests = [rests_of(graph.parameter(name).spec, self.costs.size) for name in boundary.shared]
            if prod(len(types) for types in (*self._boundary_types(group[0]), *rests)) <= MAX_BOUNDARY_STATES:
                continue
            still_shared = tuple(name for name in boundary.shared if self.costs.owners[name] != len(group))
            for i in group:
                self.boundaries[i] = replace(self.boundaries[i], shared=still_shared)
            pairs += pairwise(group)
        return pairs

    def _boundary_types(self, index: int) -> tuple[tuple[Type, ...], ...]:
        """Return the types that each value at the boundary of a block may have."""
        boundary = self.boundaries[index]
        return tuple(self.types[ref] for ref in (*boundary.inputs, *boundary.outputs))

    def _key(self, index: int) -> Hashable:
        """Return a key that is equal for blocks that share one table."""
        graph, boundary = self.compact.graph, self.boundaries[index]
        parameters = graph.block_parameters(graph.blocks[index])
        shared = tuple(p.name in boundary.shared and p.name for p in parameters)
        pinned = tuple(tuple(self.costs.rests.get(p.name, ())) for p in parameters)
        return graph.blocks[index].hash, shared, pinned, len(boundary.outputs), self._boundary_types(index)

    # --- solving

    def solve(self, weights: Weights) -> AxisSolution:
        """Return the best typing under the weights.

        Raises:
            InfeasibleError: no layouts of the blocks fit together.
        """
        return self.solve_all([weights])[0]

    def solve_all(self, weights: Sequence[Weights]) -> list[AxisSolution]:
        """Return the best typing under each of the weights.

        Raises:
            InfeasibleError: no layouts of the blocks fit together.
        """
        marginals = {key: problem.solve_all(weights) for key, problem in self.problems.items()}
        return self._solve_chain(marginals, len(weights))

    @cached_property
    def quickest(self) -> AxisSolution:
        """The typing of the quickest micro-batch, whatever memory it needs.

        Raises:
            InfeasibleError: no layouts of the blocks fit together.
        """
        return self.solve(Weights())

    def _solve_chain(self, marginals: Mapping[Hashable, Marginals], count: int) -> list[AxisSolution]:
        """Return the best typings under each of ``count`` weights, from the tables of the blocks under these weights."""
        counts = [len(members) for members in self.compact.members]
        tables = [marginals[key].tables * n for key, n in zip(self.keys, counts, strict=True)]
        variables, equal, solver = self._chain
        best = solver.solve_all([*tables, *(t[None] for t in equal)], count)
        if np.isinf(best.tables).any():
            raise InfeasibleError(
                f"No layouts of the blocks on axis {self.costs.axis} fit together",
                where=self.compact.graph.name,
                fix=f"Drop a pin of parameters, or pin {self.costs.axis}=1",
            )
        boundary_variables = [[variables[key] for key in boundary.keys] for boundary in self.boundaries]
        entries_by_weights = [
            [Entry(i, tuple([chosen[v] for v in block_variables])) for block_variables in boundary_variables]
            for i, chosen in enumerate(best.decode([Entry(i, ()) for i in range(count)]))
        ]
        query: dict[Hashable, dict[Entry, None]] = {key: {} for key in self.problems}
        for entries in entries_by_weights:
            for key, entry in zip(self.keys, entries, strict=True):
                query[key][entry] = None
        decoded = {
            key: dict(zip(entries, marginals[key].decode(list(entries)), strict=True)) for key, entries in query.items()
        }
        return [
            self.solution([decoded[key][e] for key, e in zip(self.keys, entries, strict=True)], float(value))
            for entries, value in zip(entries_by_weights, best.tables, strict=True)
        ]

    def equal_values(self) -> Iterator[tuple[Ref, Ref]]:
        """Yield the pairs of values that must have the same type."""
        yield from self.compact.alike
        for i, j in self.equal_blocks:
            a, b = self.boundaries[i], self.boundaries[j]
            yield from zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)

    @cached_property
    def _chain(self) -> tuple[Mapping[Ref | str, int], list[Table], EnergySolver]:
        """The energy of the chain without the tables of the blocks.

        It consists of the variables of values (by reference) and parameters (by name), of tables that force pairs of values to one type,
        and of the solver.
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
        solver = prepare(tuple(sizes.values()), tuple(scopes), (), cache=self.structures.solvers)
        return variables, equal, solver

    # --- solutions

    def solution(self, assignments: Sequence[Assignment], value: float = 0.0) -> AxisSolution:
        """Return the typing that assignments of all blocks make, which must agree at the boundaries.

        Args:
            assignments: for each block the states of the variables of its problem.
            value: the energy of the typing.
        """
        graph, block_s = self.compact.graph, list[float]()
        strategies: dict[str, Strategy] = {}
        parameters: dict[str, Type] = {}
        blocks = []
        for block, key, assignment in zip(graph.blocks, self.keys, assignments, strict=True):
            solved_block, problem = self.problems[key].block, self.problems[key].problem
            choice = problem.choice(assignment)
            block_s.append(problem.time_s(assignment))
            typing = self._renamed(block, solved_block, choice)
            strategies |= typing.strategies
            parameters |= typing.parameters
            blocks.append(self._axis_typing(solved_block, choice))
        typing_of_all = Typing(
            axis=self.costs.axis, size=Fraction(self.costs.size), strategies=strategies, parameters=parameters
        )
        return AxisSolution(typing=typing_of_all, blocks=tuple(blocks), value=value, block_s=tuple(block_s))

    def _renamed(self, block: Block, solved: Block, choice: Choice) -> Choice:
        """Translate a choice for the block ``solved`` into the names of ``block``, which is equal to it."""
        graph = self.compact.graph
        ops = zip(graph.block_ops(block), graph.block_ops(solved), strict=True)
        parameters = zip(graph.block_parameters(block), graph.block_parameters(solved), strict=True)
        return Choice(
            strategies={op.name: choice.strategies[other.name] for op, other in ops},
            parameters={p.name: choice.parameters[other.name] for p, other in parameters},
        )

    def _axis_typing(self, solved: Block, choice: Choice) -> AxisTyping:
        """Return a choice for the block ``solved`` as plans write it; it holds for all blocks that are equal to it."""
        graph = self.compact.graph
        return AxisTyping(
            axis=self.costs.axis,
            strategies=tuple(choice.strategies[op.name].name for op in graph.block_ops(solved)),
            parameters=tuple(choice.parameters[p.name] for p in graph.block_parameters(solved)),
        )


def crossing_types(graph: Graph, boundaries: Iterable[Boundary], size: int) -> dict[Ref, tuple[Type, ...]]:
    """Return the types that each value at a block boundary may have.

    They are all types; at boundaries that too many values cross, one whole type (I, or R for values without gradient) and the splits.
    A value has the same types in all blocks that it touches, as their tables would not fit together otherwise.

    Args:
        graph: the graph.
        boundaries: the boundaries of its blocks.
        size: the number of ranks of the axis.
    """
    all_types: dict[Ref, tuple[Type, ...]] = {}
    crowded: set[Ref] = set()
    for boundary in boundaries:
        refs = (*boundary.inputs, *boundary.outputs)
        all_types |= {ref: types_of(graph.spec(ref), size) for ref in refs if ref not in all_types}
        if prod(len(all_types[ref]) for ref in refs) > MAX_BOUNDARY_STATES:
            crowded.update(refs)
    return {
        ref: tuple(t for t in types if t != P and (t != R or I not in types)) if ref in crowded else types
        for ref, types in all_types.items()
    }


def narrow_boundaries(
    costs: AxisCosts, boundaries: Iterable[Boundary], all_types: Mapping[Ref, tuple[Type, ...]]
) -> tuple[dict[Ref, tuple[Type, ...]], dict[str, Sequence[Type]]]:
    """Restrict the types at boundaries whose tables would still be too large.

    Such a table occurs where a block reads values of several others and parameters that they read as well. The restrictions below are
    applied one at a time, the smallest tensor first, until the table is small enough:

    1. parameters are whole at rest, unless they are pinned;
    2. values are whole or split along their first dim after the samples;
    3. values are whole.

    Args:
        costs: the choices and prices of the graph.
        boundaries: the boundaries of its blocks.
        all_types: the types of each value at a boundary so far.

    Returns:
        The types of each value at a boundary, and the types at rest of the parameters that are pinned or restricted.
    """
    graph, types, rests = costs.graph, dict(all_types), dict(costs.rests)

    def bytes_of(key: Ref | str) -> int:
        return graph.spec(key).num_bytes if isinstance(key, Ref) else graph.parameter(key).spec.num_bytes

    def offered(key: Ref | str) -> Sequence[Type]:
        return types[key] if isinstance(key, Ref) else rests.get(key) or rests_of(graph.parameter(key).spec, costs.size)

    for boundary in boundaries:
        values = sorted((*boundary.inputs, *boundary.outputs), key=bytes_of)
        restrictions: list[tuple[Ref | str, tuple[Type, ...]]] = [
            (name, (I,)) for name in sorted(boundary.shared, key=bytes_of) if name not in costs.rests
        ]
        restrictions += [(ref, _whole_or_split(graph, ref, types[ref])) for ref in values]
        restrictions += [(ref, types[ref][:1]) for ref in values]
        for key, restricted in restrictions:
            if prod(len(offered(each)) for each in boundary.keys) <= MAX_BOUNDARY_STATES:
                break
            if isinstance(key, Ref):
                types[key] = restricted
            else:
                rests[key] = restricted
    return types, rests


def _whole_or_split(graph: Graph, ref: Ref, types: Sequence[Type]) -> tuple[Type, ...]:
    """Return the first type of a value, which is whole, and a split along its first dim other than that of the samples."""
    producer = graph.producer(ref)
    batch_type = dict(producer.layouts[ref.index]).get(BATCH) if producer is not None and producer.layouts else None
    return (*types[:1], *[t for t in types[1:] if t.is_split and t != batch_type][:1])


def owners_of(compact: Compact) -> Counter[str]:
    """Return how many blocks of a compact graph read each parameter, by its name."""
    graph = compact.graph
    return Counter(p.name for block in graph.blocks for p in graph.block_parameters(block))

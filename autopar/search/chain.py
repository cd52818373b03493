"""Blocks put together: the types of what crosses their boundaries, by dynamic programming over the chain.

The chain is an energy itself: a variable for each value that crosses a boundary (and each parameter that several
blocks read), a table for each block. Elimination along a chain is dynamic programming over boundary types; skip
connections and tied weights merely make it wider. Equal blocks share one table. Inner blocks of a run stand for all
of theirs and share one layout (:mod:`autopar.search.classes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import prod

import numpy as np

from autopar.errors import InfeasibleError
from autopar.graph.ir import Ref
from autopar.layout import Type
from autopar.plan import AxisTyping
from autopar.rules.types import Strategy, Typing
from autopar.search.classes import Compact
from autopar.search.elimination import Energy, Factor, marginalise
from autopar.search.intra import (
    MAX_BOUNDARY_STATES,
    AxisCosts,
    BlockProblem,
    Boundary,
    Narrow,
    Pricing,
    boundary_of,
    crossing_types,
)
from autopar.search.problem import Choice, Weights, rests_of


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSolution:
    """A typing of a whole compact graph.

    ``value``: what it costs under the weights that it was found with; ``blocks``: for each block of the compact graph.
    """

    typing: Typing
    blocks: tuple[AxisTyping, ...]
    value: float

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for equal typings."""
        return tuple((b.strategies, b.parameters) for b in self.blocks)


class AxisSolver:
    """All typings of one micro-batch graph on one axis; solve it for one price of memory after the other.

    Args:
        compact: the compact graph before the axis is applied.
        rests: allowed types at rest by parameter name, where pins restrict them.
        narrow: keeps those of an operator's strategies that it may take; None: all.
    """

    def __init__(
        self,
        compact: Compact,
        *,
        axis: str,
        size: int,
        pricing: Pricing,
        rests: Mapping[str, Sequence[Type]] | None = None,
        narrow: Narrow | None = None,
    ) -> None:
        self.compact, self.axis, self.size = compact, axis, size
        self.rests = rests or {}
        graph = compact.graph
        owners: dict[str, int] = {}
        for block in graph.blocks:
            for parameter in graph.block_parameters(block):
                owners[parameter.name] = owners.get(parameter.name, 0) + 1
        self.costs = AxisCosts(graph=graph, axis=axis, size=size, pricing=pricing, owners=owners, narrow=narrow)
        self.boundaries = [boundary_of(graph, block, owners) for block in graph.blocks]
        self.types = crossing_types(graph, self.boundaries, size)
        self.twins = self._untie()
        self.problems: dict[object, BlockProblem] = {}
        self.of_block: list[BlockProblem] = []
        for i, block in enumerate(graph.blocks):
            key = self._key(i)
            if key not in self.problems:
                self.problems[key] = BlockProblem(graph, block, self.costs, self.rests, self.types, self.boundaries[i])
            self.of_block.append(self.problems[key])

    def _untie(self) -> list[tuple[int, int]]:
        """Blocks that are one module called again, where its parameters are too many to have a table over their types.

        They get one layout: pairs of them whose values must have equal types, so that equal parameters come of it.
        """
        graph, alike = self.compact.graph, dict[object, list[int]]()
        for i, block in enumerate(graph.blocks):
            names = tuple(p.name for p in graph.block_parameters(block))
            boundary = self.boundaries[i]
            crossing = tuple(self.types[ref] for ref in (*boundary.inputs, *boundary.outputs))
            alike.setdefault((block.hash, names, len(boundary.outputs), crossing), []).append(i)
        pairs: list[tuple[int, int]] = []
        for group in alike.values():
            boundary = self.boundaries[group[0]]
            values = prod(len(self.types[ref]) for ref in (*boundary.inputs, *boundary.outputs))
            rests = [rests_of(graph.parameter(name).spec, self.size) for name in boundary.shared]
            if values * prod(len(types) for types in rests) <= MAX_BOUNDARY_STATES:
                continue
            kept = tuple(name for name in boundary.shared if self.costs.owners[name] != len(group))
            for i in group:
                self.boundaries[i] = replace(self.boundaries[i], shared=kept)
            pairs += pairwise(group)
        return pairs

    def _key(self, index: int) -> object:
        graph, boundary = self.compact.graph, self.boundaries[index]
        parameters = graph.block_parameters(graph.blocks[index])
        shared = tuple(p.name in boundary.shared and p.name for p in parameters)
        pinned = tuple(tuple(self.rests.get(p.name, ())) for p in parameters)
        crossing = tuple(self.types[ref] for ref in (*boundary.inputs, *boundary.outputs))
        return graph.blocks[index].hash, shared, pinned, len(boundary.outputs), crossing

    def solve(self, weights: Weights) -> AxisSolution:
        """The best typing.

        Raises:
            InfeasibleError: none fits together.
        """
        graph = self.compact.graph
        tables = {id(p): p.solve(weights) for p in self.problems.values()}
        variables: dict[Ref | str, int] = {}
        sizes: list[int] = []
        factors: list[Factor] = []
        for i, boundary in enumerate(self.boundaries):
            table = tables[id(self.of_block[i])].table
            keys = _keys(boundary)
            for key, count in zip(keys, table.shape, strict=True):
                if key not in variables:
                    variables[key] = len(sizes)
                    sizes.append(count)
            scope = tuple(variables[key] for key in keys)
            factors.append(Factor(scope=scope, table=table * len(self.compact.members[i])))
        for a, b in (*self.compact.alike, *self._twin_values()):
            if a != b and a in variables and b in variables:
                factors.append(self._equal(a, b, variables))
        best = marginalise(Energy(sizes=tuple(sizes), factors=tuple(factors)), ())
        if np.isinf(best.table):
            raise InfeasibleError(f"the blocks have typings on axis {self.axis} that fit together", value=graph.name)
        chosen = best.decode(())
        choices = []
        for i, boundary in enumerate(self.boundaries):
            index = tuple(chosen[variables[k]] for k in _keys(boundary))
            problem = self.of_block[i]
            choices.append(problem.choice(tables[id(problem)], index))
        return self._solution(choices, float(best.table))

    def least_s(self) -> tuple[float, ...]:
        """For each block the time of a micro-batch in its quickest typing, whatever the others'."""
        least = {id(p): float(p.solve(Weights()).table.min()) for p in self.problems.values()}
        return tuple(least[id(problem)] for problem in self.of_block)

    def _twin_values(self) -> Iterator[tuple[Ref, Ref]]:
        for i, j in self.twins:
            a, b = self.boundaries[i], self.boundaries[j]
            yield from zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)

    def _equal(self, a: Ref, b: Ref, variables: Mapping[Ref | str, int]) -> Factor:
        table = np.array([[0.0 if x == y else np.inf for y in self.types[b]] for x in self.types[a]])
        return Factor(scope=(variables[a], variables[b]), table=table)

    def _solution(self, choices: Sequence[Choice], value: float) -> AxisSolution:
        """Choices of the block that a table was made for, carried over to each block that shares it."""
        graph = self.compact.graph
        strategies: dict[str, Strategy] = {}
        parameters: dict[str, Type] = {}
        blocks = []
        for i, block in enumerate(graph.blocks):
            model, choice = self.of_block[i].block, choices[i]
            pairs = zip(graph.block_ops(block), graph.block_ops(model), strict=True)
            mine = [(op.name, choice.strategies[other.name]) for op, other in pairs]
            owned = zip(graph.block_parameters(block), graph.block_parameters(model), strict=True)
            rests = [(p.name, choice.parameters[other.name]) for p, other in owned]
            strategies.update(mine)
            parameters.update(rests)
            blocks.append(
                AxisTyping(
                    axis=self.axis,
                    strategies=tuple(s.name for _, s in mine),
                    parameters=tuple(t for _, t in rests),
                    # those of the block solved for: equal blocks have equal layouts
                    parameter_names=tuple(p.key.removeprefix(f"{model.label}.") for p in graph.block_parameters(model)),
                    boundary=tuple(choice.strategies[r.name].outputs[r.index] for r in graph.block_outputs(model)),
                )
            )
        typing = Typing(axis=self.axis, size=Fraction(self.size), strategies=strategies, parameters=parameters)
        return AxisSolution(typing=typing, blocks=tuple(blocks), value=value)


def _keys(boundary: Boundary) -> list[Ref | str]:
    """What a block's table is over: values by their reference, parameters by name."""
    return [*boundary.inputs, *boundary.outputs, *boundary.shared]

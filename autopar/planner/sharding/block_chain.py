"""Blocks put together: the types of what crosses their boundaries, by dynamic programming over the chain.

The chain is an energy itself: a variable for each value that crosses a boundary (and each parameter that several
blocks read), a table for each block. Elimination along a chain is dynamic programming over boundary types; skip
connections and tied weights merely make it wider. Equal blocks share one table. Inner blocks of a run stand for all
of theirs and share one layout (:mod:`autopar.graph.compact`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import prod

import numpy as np

from autopar.errors import InfeasibleError
from autopar.graph.compact import Compact
from autopar.graph.ir import Ref
from autopar.layout import Type
from autopar.plan import AxisTyping
from autopar.planner.sharding.block_table import (
    MAX_BOUNDARY_STATES,
    AxisCosts,
    BlockProblem,
    Boundary,
    Common,
    Narrow,
    Pricing,
    boundary_of,
    crossing_types,
)
from autopar.planner.sharding.elimination import Energy, Factor, Prepared, Table, decode_all, prepare
from autopar.planner.sharding.strategy_energy import Choice, rests_of
from autopar.planner.sharding.tables import Weights
from autopar.rules.types import Strategy, Typing


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisSolution:
    """A typing of a whole compact graph.

    ``value``: what it costs under the weights that it was found with; ``blocks``: for each block of the compact graph;
    ``time_s``: of a micro-batch, forward and backward, of all blocks that the graph stands for, without what is done
    once a step; ``blocks_s``: of each block of the compact graph.
    """

    typing: Typing
    blocks: tuple[AxisTyping, ...]
    value: float
    time_s: float
    blocks_s: tuple[float, ...] = ()

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for equal typings."""
        return tuple((b.strategies, b.parameters) for b in self.blocks)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chain:
    """What the energy of the chain has apart from the tables of the blocks.

    ``variables``: of the values and parameters; ``equal``: tables that keep pairs of values of one type.
    """

    variables: Mapping[Ref | str, int]
    equal: tuple[Table, ...]
    prepared: Prepared


class AxisSolver:
    """All typings of one micro-batch graph on one axis; solve it for one price of memory after the other.

    Args:
        compact: the compact graph before the axis is applied.
        rests: allowed types at rest by parameter name, where pins restrict them.
        narrow: keeps those of an operator's strategies that it may take; None: all.
        common: what it shares with others; None: nothing.
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
        common: Common | None = None,
    ) -> None:
        self.compact, self.axis, self.size = compact, axis, size
        self.rests = rests or {}
        graph, common = compact.graph, common or Common()
        owners: dict[str, int] = {}
        for block in graph.blocks:
            for parameter in graph.block_parameters(block):
                owners[parameter.name] = owners.get(parameter.name, 0) + 1
        self.costs = AxisCosts(
            graph=graph,
            axis=axis,
            size=size,
            pricing=pricing,
            owners=owners,
            narrow=narrow,
            structures=common.structures,
            changes=common.changes,
            saved=common.saved,
        )
        self.boundaries = [boundary_of(graph, block, owners) for block in graph.blocks]
        self.types = crossing_types(graph, self.boundaries, size)
        self.twins = self._untie()
        self.problems: dict[object, BlockProblem] = {}
        self.keys = [self._key(i) for i in range(len(graph.blocks))]
        for block, key, boundary in zip(graph.blocks, self.keys, self.boundaries, strict=True):
            if key not in self.problems:
                self.problems[key] = BlockProblem(graph, block, self.costs, self.rests, self.types, boundary)
        self._made: _Chain | None = None
        self._least: dict[object, float] | None = None
        self._known: dict[tuple[tuple[int, ...], ...], AxisSolution] = {}
        self._chosen: dict[tuple[object, tuple[int, ...]], tuple[Choice, float]] = {}

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
        return self.solve_all([weights])[0]

    def solve_all(self, weights: Sequence[Weights]) -> list[AxisSolution]:
        """The best typing under each of these.

        Raises:
            InfeasibleError: none fits together.
        """
        tables = {key: problem.solve_all(weights) for key, problem in self.problems.items()}
        if self._least is None and weights[0] == Weights():
            self._least = {key: float(found[0].table.min()) for key, found in tables.items()}
        of_block = [tables[key] for key in self.keys]
        counts = [len(members) for members in self.compact.members]
        stacked = [np.stack([m.table for m in own]) * n for own, n in zip(of_block, counts, strict=True)]
        chain = self._chain([table[0] for table in stacked])
        every = chain.prepared.solve_all([*stacked, *(t[None] for t in chain.equal)], len(weights))
        if any(np.isinf(best.table) for best in every):
            law = f"the blocks have typings on axis {self.axis} that fit together"
            raise InfeasibleError(law, value=self.compact.graph.name)
        crossing = [[chain.variables[key] for key in _keys(boundary)] for boundary in self.boundaries]
        wanted = [
            [(own[i], tuple([chosen[v] for v in variables])) for own, variables in zip(of_block, crossing, strict=True)]
            for i, chosen in enumerate(decode_all([(best, ()) for best in every]))
        ]
        # equal blocks mostly have equal types at their boundaries
        once = {(id(marginal), index): (marginal, index) for blocks in wanted for marginal, index in blocks}
        decoded = dict(zip(once, decode_all(list(once.values())), strict=True))
        found = []
        for best, blocks in zip(every, wanted, strict=True):
            assignments = tuple([decoded[id(marginal), index] for marginal, index in blocks])
            found.append(replace(self.solution(assignments), value=float(best.table)))
        return found

    def solution(self, assignments: tuple[tuple[int, ...], ...]) -> AxisSolution:
        """The typing of an assignment of each block's variables that fit together."""
        if assignments not in self._known:
            self._known[assignments] = self._solution(assignments)
        return self._known[assignments]

    def boundary_keys(self, index: int) -> list[Ref | str]:
        """What the variables that a block's table is over stand for: values, and parameters by name."""
        return _keys(self.boundaries[index])

    def equal_values(self) -> Iterator[tuple[Ref, Ref]]:
        """Pairs of values that must have one type."""
        yield from self.compact.alike
        for i, j in self.twins:
            a, b = self.boundaries[i], self.boundaries[j]
            yield from zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True)

    def quickest(self) -> AxisSolution:
        """The typing of the quickest micro-batch, whatever it keeps.

        Raises:
            InfeasibleError: none fits together.
        """
        return self._quickest

    def least_s(self) -> tuple[float, ...]:
        """For each block of the compact graph seconds of a micro-batch below which no typing runs it."""
        self.quickest()
        assert self._least is not None
        return tuple(self._least[key] for key in self.keys)

    @cached_property
    def _quickest(self) -> AxisSolution:
        return self.solve(Weights())

    def _chain(self, tables: Sequence[Table]) -> _Chain:
        """The energy of the chain; what is forbidden in it is so at every price."""
        if self._made is None:
            variables: dict[Ref | str, int] = {}
            sizes: list[int] = []
            factors: list[Factor] = []
            for boundary, table in zip(self.boundaries, tables, strict=True):
                keys = _keys(boundary)
                for key, count in zip(keys, table.shape, strict=True):
                    if key not in variables:
                        variables[key] = len(sizes)
                        sizes.append(count)
                factors.append(Factor(scope=tuple(variables[key] for key in keys), table=table))
            equal = [
                self._equal(a, b, variables)
                for a, b in self.equal_values()
                if a != b and a in variables and b in variables
            ]
            prepared = prepare(
                Energy(sizes=tuple(sizes), factors=(*factors, *equal)), (), known=self.costs.structures.prepared
            )
            self._made = _Chain(variables=variables, equal=tuple(f.table for f in equal), prepared=prepared)
        return self._made

    def _equal(self, a: Ref, b: Ref, variables: Mapping[Ref | str, int]) -> Factor:
        table = np.array([[0.0 if x == y else np.inf for y in self.types[b]] for x in self.types[a]])
        return Factor(scope=(variables[a], variables[b]), table=table)

    def _solution(self, assignments: Sequence[tuple[int, ...]]) -> AxisSolution:
        """Choices of the block that a table was made for, carried over to each block that shares it."""
        graph, time_s = self.compact.graph, 0.0
        strategies: dict[str, Strategy] = {}
        parameters: dict[str, Type] = {}
        blocks, blocks_s = [], []
        for i, block in enumerate(graph.blocks):
            solved = self.problems[self.keys[i]]
            chosen = self.keys[i], assignments[i]
            if chosen not in self._chosen:
                self._chosen[chosen] = (
                    solved.problem.choice(assignments[i], 0.0),
                    solved.problem.time_s(assignments[i]),
                )
            model, (choice, own_s) = solved.block, self._chosen[chosen]
            time_s += len(self.compact.members[i]) * own_s
            blocks_s.append(own_s)
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
        return AxisSolution(typing=typing, blocks=tuple(blocks), value=0.0, time_s=time_s, blocks_s=tuple(blocks_s))


def _keys(boundary: Boundary) -> list[Ref | str]:
    """What a block's table is over: values by their reference, parameters by name."""
    return [*boundary.inputs, *boundary.outputs, *boundary.shared]

"""One block on one axis: the least cost for every combination of types at its boundary.

Blocks exchange values as they were made: a change of type belongs to the block that reads (see ``rules.apply``). So the
types of the values that cross a boundary are all that two blocks must agree on, and a block is one table over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from autopar.graph.graph import Block, Graph, Ref
from autopar.plan.mesh import I, P, R, Type
from autopar.planner.sharding.axis_costs import AxisCosts
from autopar.planner.sharding.elimination import Marginals
from autopar.planner.sharding.energy import Weights
from autopar.planner.sharding.resharding import Structures
from autopar.planner.sharding.strategy_energy import MAX_EXTRAS, Problem, types_of

MAX_BOUNDARY_STATES = 1 << 14
"""Entries of a block's boundary table; past it, what crosses a boundary is never partial or replicated."""

REFINEMENTS = 2
"""How many operators back two operators of one line of code must be the same to count as one that is repeated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What a block shares with others, by position: equal blocks share one table.

    Attributes:
        inputs, outputs: values.
        shared: names of parameters that other blocks read as well.
    """

    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]
    shared: tuple[str, ...]

    @property
    def keys(self) -> list[Ref | str]:
        """What the dims of the block's table are over: values by their reference, parameters by name."""
        return [*self.inputs, *self.outputs, *self.shared]


class BlockProblem:
    """The typing of one block of a graph on one axis.

    Args:
        costs: of the graph.
        types: what each value at the boundary may be; see :func:`crossing_types`.
        boundary: what it has a table over.
        structures: what is known of other problems.

    Attributes:
        keep: the variables of ``problem`` that the table is over, as :attr:`Boundary.keys`.
    """

    def __init__(
        self,
        block: Block,
        costs: AxisCosts,
        types: Mapping[Ref, Sequence[Type]],
        boundary: Boundary,
        structures: Structures,
    ) -> None:
        self.block, self.costs, self.boundary, self.structures = block, costs, boundary, structures
        self.problem, self.keep = self._problem(types, MAX_EXTRAS)
        if self.problem.is_wide(self.keep):
            self.problem, self.keep = self._problem(types, 1)
        if self.problem.is_wide(self.keep):
            self.problem, self.keep = self._problem(types, 1, repeated(costs.graph, block))

    def _problem(
        self, types: Mapping[Ref, Sequence[Type]], max_extras: int, alike: Mapping[str, object] | None = None
    ) -> tuple[Problem, tuple[int, ...]]:
        graph, costs = self.costs.graph, self.costs
        problem = Problem(graph, costs, max_extras=max_extras, alike=alike, structures=self.structures)
        keep = [problem.arrival(ref, types[ref]) for ref in self.boundary.inputs]
        for op in graph.block_ops(self.block):
            problem.operator(op)
        problem.close()
        keep += [problem.departure(ref, types[ref]) for ref in self.boundary.outputs]
        keep += [problem.parameter(graph.parameter(name)) for name in self.boundary.shared]
        if graph.loss.name in problem.ops:
            problem.end(graph.loss, lambda kind: costs.change(graph.loss, kind, I))
        return problem, tuple(keep)

    def solve_all(self, weights: Sequence[Weights]) -> Marginals:
        """For each of these the table over (inputs, outputs, shared parameters)."""
        return self.problem.solve_all(self.keep, weights)


def boundary_of(graph: Graph, block: Block, owners: Mapping[str, int]) -> Boundary:
    """What ``block`` shares with others; the loss is no output.

    Args:
        owners: how many blocks read a parameter, by its name.
    """
    return Boundary(
        inputs=graph.block_inputs(block),
        outputs=tuple(ref for ref in graph.block_outputs(block) if ref != graph.loss or graph.users(ref)),
        shared=tuple(p.name for p in graph.block_parameters(block) if owners.get(p.name, 1) > 1),
    )


def repeated(graph: Graph, block: Block) -> dict[str, object]:
    """A key for each operator of ``block``, equal for what one line of code does again and again (a loop over time).

    Such operators then share one strategy: a choice for each step would be a problem too wide to solve, and layouts
    that change from step to step are not worth having. Literals (which step it is) do not count.
    """
    ops = graph.block_ops(block)
    keys: dict[str, object] = {
        op.name: (op.module, op.source, op.target, op.outputs, tuple(graph.spec(ref) for ref in op.operands))
        if op.source
        else op.name
        for op in ops
    }
    for _ in range(REFINEMENTS):
        number: dict[object, int] = {}
        short = {name: number.setdefault(key, len(number)) for name, key in keys.items()}
        keys = {
            op.name: (short[op.name], *((short.get(ref.name, ref.name), ref.index) for ref in op.operands))
            for op in ops
        }
    return keys


def crossing_types(graph: Graph, boundaries: Iterable[Boundary], size: int) -> dict[Ref, tuple[Type, ...]]:
    """Types for the values that blocks share: all, or I and S alone at boundaries that too many values cross.

    A value is offered the same types by every block that it touches, or their tables would not fit together.
    """
    every: dict[Ref, tuple[Type, ...]] = {}
    narrow: set[Ref] = set()
    for boundary in boundaries:
        refs = (*boundary.inputs, *boundary.outputs)
        every |= {ref: types_of(graph.spec(ref), size) for ref in refs if ref not in every}
        if prod(len(every[ref]) for ref in refs) > MAX_BOUNDARY_STATES:
            narrow.update(refs)
    return {
        ref: tuple(t for t in types if t != P and (t != R or I not in types)) if ref in narrow else types
        for ref, types in every.items()
    }

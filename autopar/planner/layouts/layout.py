"""Layouts as data: what they depend on, typed layouts of all axes, and priced layouts with the costs of their blocks.

:func:`every_typing` lists all typings on one axis of problems that have at most ``Space.max_enumerated`` of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import numpy as np

from autopar.cost.model import BlockCost
from autopar.graph.graph import Ref
from autopar.plan.mesh import Mesh, Type
from autopar.plan.plan import PaddedParameter
from autopar.planner.sharding.block_chain import Assignment, AxisSolution, AxisSolver
from autopar.planner.sharding.block_table import BlockProblem
from autopar.planner.sharding.elimination import Entry
from autopar.planner.sharding.energy import Weights
from autopar.planner.space.candidates import Candidate
from autopar.rules.other_kernels import EXPERT_TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKey:
    """What a layout depends on: samples of a micro-batch and the degrees of the axes inside of the model.

    Attributes:
        micro_batch_size: samples of a micro-batch.
        ep_data: data ranks over which experts are split.
        cp: ranks of the context-parallel axis.
        tp: ranks of the tensor-parallel axis.
        vocab_multiple: the number that must divide the rows of the part of a vocabulary that each rank has.
    """

    micro_batch_size: int
    ep_data: int = 1
    cp: int = 1
    tp: int = 1
    vocab_multiple: int = 1

    @property
    def unsplit(self) -> LayoutKey:
        """The key of the same micro-batch without ``cp`` and ``tp``."""
        return replace(self, cp=1, tp=1)

    def mesh(self, world_size: int) -> Mesh:
        """Return a mesh of ``world_size`` ranks with these degrees; the groups of the inner axes are the same in every such mesh."""
        outside = max(world_size // (self.cp * self.tp), 1)
        return Mesh(dp_replicate=outside, cp=self.cp, tp=self.tp, ep=self.ep_data, ep_data=self.ep_data)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypedLayout:
    """A typing of the whole model on ``cp`` and ``tp``, before its blocks are priced.

    Attributes:
        key: what the layout depends on.
        kind: the kind of attention on ``cp``; empty where that axis has one rank.
        solution: the typing on ``tp``; None where that axis has one rank.
        identity: a text that is equal for equal layouts, in every process.
    """

    key: LayoutKey
    kind: str
    solution: AxisSolution | None
    identity: str = field(init=False)

    def __post_init__(self) -> None:
        signature = self.solution.signature if self.solution is not None else ""
        digest = hashlib.blake2b(repr(signature).encode(), digest_size=12).hexdigest()
        object.__setattr__(self, "identity", f"{self.key} {self.kind} {digest}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayout:
    """A layout of the whole model with the costs of its blocks.

    Attributes:
        key: as in :class:`TypedLayout`.
        kind: as in :class:`TypedLayout`.
        solution: as in :class:`TypedLayout`.
        identity: that of the typed layout; where costs are those of some node groups, their positions follow.
        sequence: the typing on ``cp``; None where that axis has one rank.
        costs: the cost of each block of the compact graph.
        keys: for each of these blocks a number that is equal for blocks of equal cost.
        prelude_s: seconds of the operators of the prelude, which every stage repeats.
        padding: the vocabularies that are padded, with their padded lengths.
        totals: bytes of each count of the global batch that the loss divides by.
        at_best: whether costs are those of devices at their best rates, which padding and alignment cannot improve.
        ranks: for each pipeline rank the layout at the prices of its devices; empty where all ranks have the same devices.
    """

    key: LayoutKey
    kind: str
    solution: AxisSolution | None
    identity: str
    sequence: AxisSolution | None
    costs: tuple[BlockCost, ...]
    keys: tuple[int, ...]
    prelude_s: float
    padding: tuple[PaddedParameter, ...] = ()
    totals: tuple[int, ...] = ()
    at_best: bool = False
    ranks: tuple[PricedLayout, ...] = ()

    def of_rank(self, pp_rank: int) -> PricedLayout:
        """Return the layout at the prices of the devices of a pipeline rank."""
        return self.ranks[pp_rank] if self.ranks else self


def layout_key_of(candidate: Candidate) -> LayoutKey:
    """Return the key of the layouts of a candidate."""
    mesh = candidate.mesh
    return LayoutKey(
        micro_batch_size=candidate.micro_batch_size,
        ep_data=mesh.ep_data,
        cp=mesh.cp,
        tp=mesh.tp,
        vocab_multiple=candidate.vocab_multiple,
    )


def expert_degree(layout: PricedLayout, tp: int) -> int:
    """Return the number of ranks over which a layout splits experts: those of ``ep_data``, times ``tp`` if any mixture is split over it."""
    strategies = layout.solution.typing.strategies.values() if layout.solution is not None else ()
    return layout.key.ep_data * (tp if any(strategy.target in EXPERT_TARGETS for strategy in strategies) else 1)


MAX_ENTRIES = 64
"""Combinations of the choices of a block (strategies, types at rest and at its boundary) that may be enumerated for each typing wanted."""

_Assignments = Mapping[tuple[int, ...], Sequence[Assignment]]
"""The assignments of a block by the states of its boundary variables."""


def every_typing(solver: AxisSolver, most: int) -> list[AxisSolution] | None:
    """Return all typings of a compact graph on an axis; None if there are more than ``most``, or if a block has too many choices.

    Args:
        solver: the solver of the axis.
        most: the most typings to return.
    """
    for block in solver.problems.values():
        if prod(len(block.problem.states[v]) for v in _variables(block)) > MAX_ENTRIES * most:
            return None
    assignments_by_key = {key: _assignments(block) for key, block in solver.problems.items()}
    equal = dict[Ref, list[Ref]]()
    for a, b in solver.equal_values():
        equal.setdefault(a, []).append(b)
        equal.setdefault(b, []).append(a)
    solutions: list[AxisSolution] = []
    for assignments in _consistent(solver, [assignments_by_key[key] for key in solver.keys], equal):
        if len(solutions) == most:
            return None
        solutions.append(solver.solution(assignments))
    return solutions


def _variables(block: BlockProblem) -> tuple[int, ...]:
    """Return the variables that make up a typing; the changes of type between them follow at least cost."""
    problem = block.problem
    return tuple(dict.fromkeys((*block.keep, *problem.ops.values(), *problem.rests.values())))


def _assignments(block: BlockProblem) -> _Assignments:
    """Return all assignments of a block, each with the quickest changes of type, by the states of the boundary variables."""
    marginals = block.problem.solve_all(_variables(block), [Weights()])
    entries = [Entry(0, tuple(index)) for index in np.argwhere(np.isfinite(marginals.tables[0])).tolist()]
    by_boundary: dict[tuple[int, ...], list[Assignment]] = {}
    for assignment in marginals.decode(entries):
        by_boundary.setdefault(tuple(assignment[v] for v in block.keep), []).append(assignment)
    return by_boundary


def _consistent(
    solver: AxisSolver, blocks: Sequence[_Assignments], equal: Mapping[Ref, Sequence[Ref]]
) -> Iterator[tuple[Assignment, ...]]:
    """Yield assignments of all blocks in which each boundary value and each shared parameter has the same type everywhere."""

    def kind(key: Ref | str, state: int) -> Type | int:
        return solver.types[key][state] if isinstance(key, Ref) else state

    def after(i: int, types: dict[Ref | str, Type | int]) -> Iterator[tuple[Assignment, ...]]:
        if i == len(blocks):
            yield ()
            return
        for states, assignments in blocks[i].items():
            crossing = {key: kind(key, state) for key, state in zip(solver.boundaries[i].keys, states, strict=True)}
            merged = types | crossing
            if all(types.get(key, t) == t for key, t in crossing.items()) and all(
                merged.get(other, t) == t
                for key, t in crossing.items()
                if isinstance(key, Ref)
                for other in equal.get(key, ())
            ):
                for remaining in after(i + 1, merged):
                    for assignment in assignments:
                        yield (assignment, *remaining)

    return after(0, {})

"""Layouts as data: what they depend on, typed layouts of all axes, and priced layouts with the costs of their blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

from autopar.cost.model import BlockCost
from autopar.plan.mesh import Mesh
from autopar.plan.plan import PaddedParameter
from autopar.planner.sharding.block_chain import AxisSolution
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

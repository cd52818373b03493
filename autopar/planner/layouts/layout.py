"""Layouts as data: what they depend on, typings of all axes, and typings with the costs of their blocks."""

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
        micro_batch_size: samples.
        ep_data: data ranks over which experts are split.
        cp, tp: ranks of these axes.
        vocab_multiple: of the rows of each rank's part of a vocabulary.
    """

    micro_batch_size: int
    ep_data: int = 1
    cp: int = 1
    tp: int = 1
    vocab_multiple: int = 1

    @property
    def unsplit(self) -> LayoutKey:
        """The same micro-batch with neither ``cp`` nor ``tp``."""
        return replace(self, cp=1, tp=1)

    def mesh(self, world_size: int) -> Mesh:
        """Of so many ranks with these degrees; groups of the inner axes are the same in every other."""
        outside = max(world_size // (self.cp * self.tp), 1)
        return Mesh(dp_replicate=outside, cp=self.cp, tp=self.tp, ep=self.ep_data, ep_data=self.ep_data)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypedLayout:
    """A typing of the whole model on ``cp`` and ``tp``, before its blocks are priced.

    Attributes:
        key: what it depends on.
        kind: of attention on ``cp``; empty where that axis has one rank.
        solution: the typing on ``tp``; None where that axis has one rank.
        identity: a text, equal for equal layouts in every process.
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
    """One layout of the whole model with the costs of its blocks.

    Attributes:
        key, kind, solution: as in :class:`TypedLayout`.
        identity: of the typed layout; with the devices behind it, where costs are those of some groups of devices.
        sequence: the typing on ``cp``; None where that axis has one rank.
        costs: of each block of the compact graph.
        keys: for each of these blocks a number, equal where the costs are equal.
        prelude_s: of the operators that every stage repeats.
        padding: of vocabularies.
        totals: bytes of each count of the global batch that the loss divides by.
        at_best: costs are those of devices at their best rates, which no padding and no alignment goes below.
        ranks: for each pipeline rank the layout as its devices run it; empty where they are alike.
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
        """The layout as the devices of a pipeline rank run it."""
        return self.ranks[pp_rank] if self.ranks else self


def layout_key_of(candidate: Candidate) -> LayoutKey:
    """What of a candidate a layout depends on."""
    mesh = candidate.mesh
    return LayoutKey(
        micro_batch_size=candidate.micro_batch_size,
        ep_data=mesh.ep_data,
        cp=mesh.cp,
        tp=mesh.tp,
        vocab_multiple=candidate.vocab_multiple,
    )


def expert_degree(layout: PricedLayout, tp: int) -> int:
    """Over how many ranks a layout splits experts: those of ``ep_data``, times ``tp`` where any mixture does."""
    chosen = layout.solution.typing.strategies.values() if layout.solution is not None else ()
    return layout.key.ep_data * (tp if any(strategy.target in EXPERT_TARGETS for strategy in chosen) else 1)

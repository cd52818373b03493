"""Layouts as the outer search sees them: what they depend on, drafts of them, and options with their costs."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost.model import BlockCost
from autopar.plan import PaddedParameter
from autopar.planner.sharding.block_chain import AxisSolution
from autopar.planner.space.candidates import Candidate
from autopar.rules.sharded import EXPERT_TARGETS


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutKey:
    """What a layout depends on: samples of a micro-batch and the degrees of the axes inside of the model.

    ``ep_data``: data ranks over which experts are split; ``vocab_multiple``: of the rows of each rank's part of a vocabulary.
    """

    micro_batch_size: int
    ep_data: int = 1
    cp: int = 1
    tp: int = 1
    vocab_multiple: int = 1

    @property
    def whole(self) -> LayoutKey:
        """The same micro-batch with neither ``cp`` nor ``tp``."""
        return replace(self, cp=1, tp=1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedLayout:
    """One layout of the whole model.

    Attributes:
        sequence: the typing on ``cp``; None where that axis has one rank.
        kind: of attention on ``cp``; empty likewise.
        solution: the typing on ``tp``; None where that axis has one rank.
        ep_data: data ranks over which experts are split.
        costs: of each block of the compact graph.
        keys: for each of these blocks a number, equal where the costs are equal.
        prelude_s: of the operators that every stage repeats.
        padding: of vocabularies.
        totals: bytes of each count of the global batch that the loss divides by.
        ranks: for each pipeline rank the layout as its devices run it; empty where they are alike.
    """

    sequence: AxisSolution | None
    kind: str
    solution: AxisSolution | None
    ep_data: int
    costs: tuple[BlockCost, ...]
    keys: tuple[int, ...]
    prelude_s: float
    padding: tuple[PaddedParameter, ...] = ()
    totals: tuple[int, ...] = ()
    ranks: tuple[PricedLayout, ...] = ()

    def of_rank(self, pp_rank: int) -> PricedLayout:
        """The layout as the devices of a pipeline rank run it."""
        return self.ranks[pp_rank] if self.ranks else self


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TypedLayout:
    """A layout before its blocks are priced.

    Attributes:
        split, kind, solution: as in :class:`PricedLayout`.
        time_s: no plan takes less for a micro-batch, forward and backward through all blocks; 0 where it is not known.
        numel: trained elements that the ranks of a pipeline hold together at least, those of ``dp_shard`` taken for one;
            experts over data ranks do not count.
    """

    split: LayoutKey
    kind: str
    solution: AxisSolution | None
    time_s: float = 0.0
    numel: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What one process of a search knows of the layouts of a split.

    Attributes:
        drafts: by the order of their loads, each with its layout where it is priced.
        quickest_s, least_s: see :class:`autopar.planner.layouts.catalogue.Layouts`; None: nobody asked.
    """

    drafts: tuple[tuple[tuple[int, int], tuple[tuple[TypedLayout, PricedLayout | None], ...]], ...] = ()
    quickest_s: float | None = None
    least_s: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the price of a layout depends on besides its split.

    ``num_micro_batches``: over which a gradient sum is spread; ``in_flight``: micro-batches that a stage holds. Only
    their orders of magnitude count.
    """

    num_micro_batches: int
    in_flight: int

    @property
    def order(self) -> tuple[int, int]:
        """Equal for loads of equal prices."""
        return _round(self.num_micro_batches), _round(self.in_flight)


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


def expert_degree(option: PricedLayout, tp: int) -> int:
    """Over how many ranks a layout splits experts: those of ``ep_data``, times ``tp`` where any mixture does."""
    chosen = option.solution.typing.strategies.values() if option.solution is not None else ()
    return option.ep_data * (tp if any(strategy.target in EXPERT_TARGETS for strategy in chosen) else 1)


def _round(n: int) -> int:
    """The power of 8 at or below: layouts change with the order of magnitude alone."""
    return int(8 ** ((n.bit_length() - 1) // 3))

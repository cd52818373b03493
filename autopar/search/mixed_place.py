"""Rows of the devices of one pipeline rank; see :mod:`autopar.search.mixed`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from autopar.cost.block import ParameterCost
from autopar.cost.model import BlockCost, CostModel, Step
from autopar.plan import Recompute
from autopar.search.bound_rows import BlockPrice, least_and_most_done
from autopar.search.candidates import Candidate
from autopar.search.classes import Compact
from autopar.search.lines import NOTHING, least_of
from autopar.search.mixed_rows import PlaceRow
from autopar.search.once import least_sums_s
from autopar.search.rows import RowMaker


class _Ends(NamedTuple):
    """Of a :class:`PlaceRow`; ``is_sure``: whether all stages can have equal numbers of blocks of the group."""

    prices: Sequence[BlockPrice]  # kept, so that their id stays their own
    group: BlockPrice
    num_blocks: int
    is_sure: bool
    is_one: bool
    before_s: tuple[float, ...]
    before_forward_s: tuple[float, ...]


class PlaceRows(RowMaker):
    """Rows of one part of a mixed cluster: every part takes the same group of equal blocks, the one with the most."""

    def __init__(
        self, compact: Compact, model: CostModel, *, modes: Sequence[Recompute], pinned: Mapping[int, Recompute],
        limit_bytes: int,
    ) -> None:  # fmt: skip
        super().__init__(compact, model, modes=modes, pinned=pinned, limit_bytes=limit_bytes)
        self._known_ends: dict[tuple[int, int], _Ends] = {}
        self._known_sums: dict[tuple[object, ...], tuple[Sequence[BlockCost], list[float]]] = {}

    def _sums_s(
        self, costs: Sequence[BlockCost], prices: Sequence[BlockPrice], largest: Sequence[int], step: Step
    ) -> list[float]:
        key = (*(id(cost.parameters) for cost in costs), id(self.model.data_parallel(step)))
        if key not in self._known_sums:  # of parameters alone; the blocks are kept, so that their ids stay their own
            self._known_sums[key] = costs, least_sums_s(self.model, costs, self.counts, step, others=True)
        return self._known_sums[key][1]

    def _tie_s(self, shared: Sequence[ParameterCost], step: Step) -> float:
        return 0.0  # between ranks of different devices, in an order that is not known here: see Placed

    def place_row(
        self, candidate: Candidate, prices: Sequence[BlockPrice], *, every_s: float, is_even: bool
    ) -> PlaceRow:
        """A candidate whose blocks have these prices.

        Args:
            every_s: of each stage and micro-batch besides.
            is_even: stages have equal numbers of blocks of the group, or one more.
        """
        mesh, degrees = candidate.mesh, (candidate.virtual_stages, candidate.num_micro_batches)
        ends = self._ends(prices, mesh.pp)
        in_flight, most_done = least_and_most_done(candidate.schedule, mesh.pp, *degrees)
        return PlaceRow(
            first=prices[0],
            last=prices[-1],
            group=ends.group,
            count=ends.num_blocks,
            alone=sum(self.counts) == 1,
            others=max(sum(self.counts) - 2 - ends.num_blocks, 0),
            before_s=ends.before_s,
            before_forward_s=ends.before_forward_s,
            least=ends.num_blocks // (mesh.pp * candidate.virtual_stages) if is_even and ends.is_sure else 0,
            every_s=every_s,
            limit_bytes=self.limit_bytes,
            schedule=candidate.schedule,
            virtual_stages=candidate.virtual_stages,
            num_micro_batches=candidate.num_micro_batches,
            waits=candidate.virtual_stages == 1,
            in_flight=in_flight,
            most_done=most_done,
            is_one=ends.is_one,
        )

    def _ends(self, prices: Sequence[BlockPrice], pp: int) -> _Ends:
        """What of a row is the same for all schedules."""
        if (id(prices), pp) not in self._known_ends:
            groups, inner = self.groups()
            own = max(groups, key=lambda ks: sum(inner[k] for k in ks), default=[])
            before = [prices[k] for k in self.class_of[: pp - 1]]
            self._known_ends[id(prices), pp] = _Ends(
                prices=prices,
                group=least_of(prices[k] for k in own) if own else NOTHING,
                num_blocks=sum(inner[k] for k in own),
                is_one=len({_recomputed(prices[k]) for k in own}) == 1,
                is_sure=len(groups) == 1 and not {self.class_of[0], self.class_of[-1]} & set(own),
                before_s=tuple(accumulate((price.time_s for price in before), initial=0.0)),
                before_forward_s=tuple(accumulate((price.forward_s for price in before), initial=0.0)),
            )
        return self._known_ends[id(prices), pp]


def _recomputed(price: BlockPrice) -> tuple[float, ...]:
    """What a price says of recompute."""
    return (
        price.held_bytes, price.held_again_bytes, price.again_s, price.more_byte_s, price.more_free_s, price.some_bytes,
        price.full_s,
    )  # fmt: skip

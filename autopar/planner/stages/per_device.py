"""Node groups that differ: prices of candidates for the devices of each pipeline rank (:mod:`autopar.planner.space.rank_orders`).

Layouts are solved at the prices of the slowest device; each stage is then priced on its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.model import CostModel, Step
from autopar.graph.compact import Compact
from autopar.plan import Recompute
from autopar.planner.bounds.bound_rows import BlockPrice
from autopar.planner.bounds.mixed_chains import Chains
from autopar.planner.bounds.mixed_place import PlaceRows, Works
from autopar.planner.bounds.mixed_rows import MixedRow, PlaceRow, holds, work_and_slowness, work_bound_s
from autopar.planner.bounds.once import at_both_ends, tie_s
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import PricedLayout, TypedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.rank_orders import origins


class Placed:
    """Candidates as the devices of each pipeline rank run them.

    Args:
        layouts: of the model on all node groups.
        model: of all node groups.
        modes, pinned: as for :class:`RowMaker`.
        is_even: the space has equal stages.
    """

    def __init__(
        self,
        layouts: Layouts,
        model: CostModel,
        *,
        modes: Sequence[Recompute],
        pinned: Mapping[int, Recompute],
        is_even: bool = False,
    ) -> None:
        self.layouts, self.model, self.modes, self.pinned = layouts, model, modes, pinned
        self.is_even = is_even
        self.compact: Compact = layouts.compact
        self.chains = Chains()
        self._rows: dict[frozenset[int], PlaceRows] = {}
        self._origins: dict[tuple[object, ...], tuple[frozenset[int], ...]] = {}
        self._known: dict[tuple[object, ...], list[BlockPrice]] = {}
        self._sent: dict[tuple[object, ...], tuple[tuple[float, ...], tuple[float, ...]]] = {}
        self._speeds: dict[tuple[object, ...], tuple[float, tuple[float, ...]]] = {}
        self._made: dict[tuple[object, ...], PlaceRow] = {}
        self._options: dict[tuple[int, tuple[frozenset[int], ...]], PricedLayout] = {}
        self._room: dict[tuple[frozenset[int], ...], float] = {}
        self._sizes: dict[int, tuple[PricedLayout, tuple[int, int]]] = {}
        self._shared: dict[int, tuple[PricedLayout, tuple[ParameterCost, ...]]] = {}
        self._alike: dict[tuple[ParameterCost, ...], tuple[ParameterCost, ...]] = {}
        self._tied: dict[tuple[object, ...], float] = {}
        self._known_works: dict[tuple[object, ...], tuple[tuple[PricedLayout, ...], Works]] = {}
        self._first: dict[tuple[object, ...], tuple[PricedLayout, MixedRow, float]] = {}

    def has(self, candidate: Candidate) -> bool:
        """Whether the pipeline ranks of a candidate differ; without a pipeline the slowest device is that of all."""
        return self.model.is_mixed and candidate.mesh.pp > 1

    def ordered(self, candidate: Candidate) -> CostModel:
        """The model of the cluster with its ranks in the candidate's order."""
        return self.model.in_order(candidate.order)

    def places(self, candidate: Candidate) -> tuple[frozenset[int], ...]:
        """For each pipeline rank the node groups that it lies on, by position in the cluster as given."""
        key = (candidate.order, candidate.mesh.pp, candidate.mesh.world_size)
        if key not in self._origins:
            self._origins[key] = origins(candidate, self.model.cluster)
        return self._origins[key]

    def limits(self, candidate: Candidate) -> tuple[int, ...]:
        """The largest predicted peak that fits on each pipeline rank."""
        spread = self.model.memory_spread
        return tuple(math.floor(part.memory_limit_bytes / spread) for part in self._parts(candidate))

    def tensor_limits(self, candidate: Candidate) -> tuple[float, ...]:
        """Likewise for tensors, what the device reserves left out."""
        parts = zip(self._parts(candidate), self.limits(candidate), strict=True)
        return tuple((limit - p.device.reserved_bytes) / (1 + p.device.fragmentation) for p, limit in parts)

    def option(self, candidate: Candidate, option: PricedLayout) -> PricedLayout:
        """A layout with its prices on each pipeline rank; as it is where it has them, or where ranks are alike."""
        if option.ranks or not self.has(candidate):
            return option
        places = self.places(candidate)
        if (id(option), places) not in self._options:
            ranks = tuple(self.layouts.on_device(option, self.model.part(own)) for own in places)
            self._options[id(option), places] = replace(option, ranks=ranks)
        return self._options[id(option), places]

    def step(self, step: Step, option: PricedLayout) -> Step:
        """How a candidate runs, with what each rank repeats."""
        return replace(step, preludes_s=tuple(own.prelude_s for own in option.ranks)) if option.ranks else step

    def least_s(self, option: PricedLayout) -> float:
        """Computation of one micro-batch, forward and backward, each block on the device that is fastest for it."""
        model = self.model
        groups = range(len(model.cluster.groups)) if model.is_mixed else ()
        options = [self.layouts.on_device(option, model.part(frozenset({i}))) for i in groups] or [option]
        times = [[cost.forward_s + cost.backward_s for cost in own.costs] for own in options]
        members = zip(*times, self.compact.members, strict=True)
        return float(sum(min(own) * len(blocks) for *own, blocks in members))

    # --- bounds

    def exact(self, candidate: Candidate, option: PricedLayout, step: Step) -> MixedRow:
        """A candidate in a layout."""
        return self._row(candidate, (option,), step)

    def least(self, candidate: Candidate, options: Sequence[PricedLayout], step: Step) -> MixedRow:
        """A candidate that takes less than in each of these layouts: each block is as the one for which it costs least of a kind."""
        return self._row(candidate, options, step)

    def ideal(self, candidate: Candidate, whole: PricedLayout, step: Step) -> MixedRow:
        """A candidate if ``cp`` and ``tp`` divided everything and sent nothing."""
        places, option = self.places(candidate), self.option(candidate, whole)
        prices: dict[frozenset[int], list[BlockPrice]] = {}
        for rank, own in enumerate(places):
            if own not in prices:
                prices[own] = self._maker(own).ideal_prices(step.mesh, option.ranks[rank], step)
        rows = {own: self._place_row(candidate, own, made, 0.0) for own, made in prices.items()}
        return self._mixed_row([rows[own] for own in places], [prices[own] for own in places])

    def first_s(self, candidate: Candidate, whole: PricedLayout, step: Step) -> float:
        """A bound of :meth:`ideal` that is found at once; infinite where all ranks together have too little memory.

        Only the memory depends on how the data axes run: one row is made for all candidates that differ in nothing else.
        """
        mesh, places = candidate.mesh, self.places(candidate)
        pipeline = (candidate.schedule, candidate.virtual_stages, candidate.num_micro_batches, candidate.order)
        key = (id(whole), mesh.cp, mesh.tp, mesh.pp, mesh.world_size, *pipeline)
        if key not in self._first:  # the layout is kept, so that its id stays its own
            row = self.ideal(candidate, whole, step)
            self._first[key] = whole, row, work_bound_s(row)
        _, row, bound_s = self._first[key]
        ranks = dict(zip(places, self.option(candidate, whole).ranks, strict=True))
        static = {own: self._maker(own).ideal_static_bytes(option, step) for own, option in ranks.items()}
        return bound_s if holds(row, [static[own] for own in places]) else math.inf

    def can_hold(self, candidate: Candidate, draft: TypedLayout, whole: PricedLayout, step: Step) -> bool:
        """Whether all pipeline ranks together may hold a layout that is not priced yet.

        Args:
            whole: the layout of the same micro-batch with neither ``cp`` nor ``tp``.
        """
        places = self.places(candidate)
        if places not in self._room:
            self._room[places] = sum(self.tensor_limits(candidate))
        return self._maker(places[0]).draft_bytes(candidate, draft, whole, step) <= self._room[places]

    def _row(self, candidate: Candidate, options: Sequence[PricedLayout], step: Step) -> MixedRow:
        """A candidate below each of some layouts."""
        places = self.places(candidate)
        rows: dict[frozenset[int], PlaceRow] = {}
        prices: dict[frozenset[int], list[BlockPrice]] = {}
        for rank, own in enumerate(places):
            if own not in rows:
                works = self._works(options, own, rank)
                prices[own] = self._prices(works, step, own)
                rows[own] = self._place_row(candidate, own, prices[own], works.every_s)
        sends, back = self._sends_s(candidate, options)
        return self._mixed_row(
            [rows[own] for own in places],
            [prices[own] for own in places],
            sends_s=sends[:-1],
            sends_back_s=back[:-1],
            around_s=sends[-1],
            around_back_s=back[-1],
            stage_bytes=float(min(self._sent_bytes(option)[0] for option in options)),
            tie_s=self._tie_s(candidate, options, step),
        )

    def _works(self, options: Sequence[PricedLayout], places: frozenset[int], rank: int) -> Works:
        """Of layouts on the devices of ``places``, on which pipeline rank ``rank`` lies."""
        key = places, *map(id, options)
        if key not in self._known_works:  # the layouts are kept, so that their ids stay their own
            part = self.model.part(places)
            own = [o.ranks[rank] if o.ranks else self.layouts.on_device(o, part) for o in options]
            self._known_works[key] = tuple(options), self._maker(places).works(own)
        return self._known_works[key][1]

    def _place_row(
        self, candidate: Candidate, places: frozenset[int], prices: list[BlockPrice], every_s: float
    ) -> PlaceRow:
        """The same for other orders."""
        key = id(prices), candidate.schedule, candidate.virtual_stages
        if key not in self._made:  # the prices are kept, so that their ids stay their own
            self._made[key] = self._maker(places).place_row(candidate, prices, every_s=every_s, is_even=self.is_even)
        return self._made[key]

    def _mixed_row(self, ranks: Sequence[PlaceRow], prices: Sequence[list[BlockPrice]], **messages: Any) -> MixedRow:
        """A row of these ranks, with the prices of each."""
        key = tuple(map(id, prices))
        if key not in self._speeds:  # the prices are kept, so that their ids stay their own
            self._speeds[key] = work_and_slowness(prices, [len(members) for members in self.compact.members])
        work_s, slowness = self._speeds[key]
        return MixedRow(ranks=tuple(ranks), work_s=work_s, slowness=slowness, **messages)

    def _tie_s(self, candidate: Candidate, options: Sequence[PricedLayout], step: Step) -> float:
        """What the first and the last rank take once a step to sum the gradients of parameters that both have, at the least."""
        return min(
            [self._tied_s(candidate, shared, step) for shared in {id(o): o for o in map(self._ties, options)}.values()]
        )

    def _ties(self, option: PricedLayout) -> tuple[ParameterCost, ...]:
        """Parameters that both ends have; the same object for equal ones."""
        if id(option) not in self._shared:  # the layout is kept, so that its id stays its own
            shared = at_both_ends(option.costs)
            self._shared[id(option)] = option, self._alike.setdefault(shared, shared)
        return self._shared[id(option)][1]

    def _tied_s(self, candidate: Candidate, shared: tuple[ParameterCost, ...], step: Step) -> float:
        key = id(shared), candidate.order, step.mesh, step.zero_stage
        if key not in self._tied:
            self._tied[key] = tie_s(self.ordered(candidate), shared, step) if shared else 0.0
        return self._tied[key]

    def _prices(self, works: Works, step: Step, places: frozenset[int]) -> list[BlockPrice]:
        """Of the blocks on devices of ``places``; the same for all schedules and orders."""
        key = (id(works), step.mesh, step.zero_stage, step.num_micro_batches, step.offload)
        if key not in self._known:
            self._known[key] = self._maker(places).prices(works, step)
        return self._known[key]

    def _sends_s(
        self, candidate: Candidate, options: Sequence[PricedLayout]
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """For each pipeline rank the least that a message to the next one takes, and one back; from the last one to the first."""
        mesh = candidate.mesh
        sizes = tuple(map(min, zip(*map(self._sent_bytes, options), strict=True)))
        key = (sizes, candidate.order, mesh.pp, mesh.world_size)
        if key not in self._sent:
            hops = self.ordered(candidate).collectives.hop_time_s
            there, back = (tuple(hops(size, mesh, rank) for rank in range(mesh.pp)) for size in sizes)
            self._sent[key] = there, back
        return self._sent[key]

    def _sent_bytes(self, option: PricedLayout) -> tuple[int, int]:
        """The least that a block sends to the next one, and gets back."""
        if id(option) not in self._sizes:  # the layout is kept, so that its id stays its own
            sent = [(cost.send_bytes, cost.send_gradient_bytes) for cost in option.costs[:-1]] or [(0, 0)]
            self._sizes[id(option)] = option, (min(there for there, _ in sent), min(back for _, back in sent))
        return self._sizes[id(option)][1]

    def _maker(self, places: frozenset[int]) -> PlaceRows:
        if places not in self._rows:
            part = self.model.part(places)
            limit = math.floor(part.memory_limit_bytes / self.model.memory_spread)
            self._rows[places] = PlaceRows(self.compact, part, modes=self.modes, pinned=self.pinned, limit_bytes=limit)
        return self._rows[places]

    def _parts(self, candidate: Candidate) -> tuple[CostModel, ...]:
        return self.ordered(candidate).parts(candidate.mesh)

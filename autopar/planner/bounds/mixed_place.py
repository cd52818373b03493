"""Rows of the devices of one pipeline rank; see :mod:`autopar.planner.stages.per_device`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from autopar.cost.model import BlockCost, CostModel, Step
from autopar.cost.step.data_parallel import exposed_s
from autopar.cost.step.stage_time import own_times
from autopar.graph.compact import Compact
from autopar.plan import Recompute
from autopar.planner.bounds.bound_rows import BlockPrice, least_and_most_done
from autopar.planner.bounds.lines import NOTHING, again_prices, least_of
from autopar.planner.bounds.mixed_rows import PlaceRow
from autopar.planner.bounds.once import at_both_ends, least_sums_s
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Works:
    """The blocks of a layout, or the least of several layouts, before it is known what the data axes of a pipeline add to them.

    Attributes:
        options: the layouts, which are kept, so that their ids stay their own.
        prices: of each block of the compact graph, as if the data axes cost nothing.
        behind_s: the longest backward of each, beside which the block before may gather.
        longest_s: the longest forward of all.
        every_s: of each stage and micro-batch besides.
        costs: of the blocks.
        costs_of: for each block those in these layouts, of equal parameters one.
    """

    options: tuple[PricedLayout, ...]
    prices: tuple[BlockPrice, ...]
    behind_s: tuple[float, ...]
    longest_s: float
    every_s: float
    costs: tuple[BlockCost, ...]
    costs_of: tuple[tuple[BlockCost, ...], ...]


class _Axes(NamedTuple):
    """What the data axes of a pipeline add to a block: to each micro-batch, in gathers of each backward and of the first forward."""

    every_s: float
    backward_s: float
    forward_s: float
    once_s: float
    static_bytes: float


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
        self._works: dict[tuple[int, ...], Works] = {}
        self._known_axes: dict[tuple[object, ...], tuple[BlockCost, _Axes]] = {}
        self._known_static: dict[tuple[object, ...], tuple[PricedLayout, float]] = {}
        self._known_sums: dict[tuple[object, ...], tuple[Sequence[BlockCost], list[float]]] = {}

    # --- prices

    def works(self, options: Sequence[PricedLayout]) -> Works:
        """Of the devices of this part; of several layouts the least of each block."""
        key = tuple(map(id, options))
        if key not in self._works:
            one = len(options) == 1
            self._works[key] = (
                self._made_works(options[0]) if one else _least_works([self.works((o,)) for o in options])
            )
        return self._works[key]

    def _made_works(self, option: PricedLayout) -> Works:
        shared = at_both_ends(option.costs)
        costs = self.private_costs(option)
        if shared:  # the rank of the last block has no other that brings these
            costs[-1] = option.costs[-1]
        alone = {id(cost): (cost,) for cost in costs}
        known: dict[tuple[object, ...], BlockPrice] = {}
        for cost, modes in zip(costs, self.modes, strict=True):
            if (id(cost), modes) not in known:
                known[id(cost), modes] = _work_price(cost, modes)
        return Works(
            options=(option,),
            prices=tuple(known[id(cost), modes] for cost, modes in zip(costs, self.modes, strict=True)),
            behind_s=tuple(own_times(cost, "full")[1] for cost in costs),
            longest_s=max(own_times(cost, "none")[0] for cost in costs),
            every_s=option.prelude_s,
            costs=tuple(costs),
            costs_of=tuple(alone[id(cost)] for cost in costs),
        )

    def prices(self, works: Works, step: Step) -> list[BlockPrice]:
        """Of the blocks of the compact graph, with what the data axes of a pipeline add: as :meth:`exact_prices`, and sums of gradients.

        Of several layouts none costs less: what is beside a gather, which hides it, is the longest of them, and sums are left out.
        """
        gathers, interference = self.model.of(step).data.gathers_always, self.model.device.interference
        sums_s = self._gradient_sums_s(works.costs, step) if len(works.options) == 1 else [0.0] * len(works.prices)
        known: dict[tuple[object, ...], BlockPrice] = {}
        found = []
        for k, (price, sum_s) in enumerate(zip(works.prices, sums_s, strict=True)):
            beside_s = max([works.behind_s[j] if j >= 0 else 0.0 for _, j in self.neighbours[k]]) if gathers else 0.0
            costs = works.costs_of[k]
            key = id(price), id(costs), sum_s, beside_s
            if key not in known:
                axes = [self._axes_of(cost, step) for cost in costs]
                own = axes[0] if len(axes) == 1 else _Axes(*map(min, *axes))
                added_s = min([self.model.of(step).block_adding_s(cost) for cost in costs])
                hidden_s = (1 - interference) * min(own.forward_s, works.longest_s)
                known[key] = replace(
                    price,
                    time_s=price.time_s + (own.every_s + exposed_s(own.backward_s, beside_s, interference) + added_s),
                    once_s=own.once_s + sum_s,
                    gather_s=own.forward_s - hidden_s,
                    static_bytes=own.static_bytes,
                )
            found.append(known[key])
        return found

    def _axes_of(self, cost: BlockCost, step: Step) -> _Axes:
        """Of a block's parameters alone, which many layouts have in common; of any number of micro-batches."""
        model, data = self.model, self.model.of(step).data
        key = id(cost.parameters), id(data), step.offload
        if key not in self._known_axes:  # the block is kept, so that their id stays their own
            unit = model.of(step).unit(cost)
            self._known_axes[key] = (
                cost,
                _Axes(
                    every_s=unit.hooks_s,
                    backward_s=unit.gather_s if data.gathers_always else 0.0,
                    forward_s=model.of(step).block_gather_s(cost),
                    once_s=model.of(step).block_once_s(cost),
                    static_bytes=model.of(step).block_static_bytes(cost),
                ),
            )
        return self._known_axes[key][1]

    def _gradient_sums_s(self, costs: Sequence[BlockCost], step: Step) -> list[float]:
        key = (*(id(cost.parameters) for cost in costs), self.model.of(step).data)
        if key not in self._known_sums:  # of parameters alone; the blocks are kept, so that their ids stay their own
            self._known_sums[key] = costs, least_sums_s(self.model, costs, self.counts, step, others=True)
        return self._known_sums[key][1]

    def ideal_static_bytes(self, whole: PricedLayout, step: Step) -> float:
        """Of each block of the group, as :meth:`ideal_prices` has them."""
        key = (id(whole), step.mesh, step.zero_stage, step.num_micro_batches, step.offload)
        if key not in self._known_static:  # the layout is kept, so that its id stays its own
            costs = self.private_costs(whole)
            own = {id(costs[k]): costs[k] for k in self.group}.values()
            least = min((self.model.of(step).block_static_bytes(cost) for cost in own), default=0)
            self._known_static[key] = whole, least / step.mesh.tp
        return self._known_static[key][1]

    # --- rows

    @cached_property
    def group(self) -> list[int]:
        """Blocks of the compact graph that are the group of equal ones with the most."""
        groups, inner = self.groups()
        return max(groups, key=lambda ks: sum(inner[k] for k in ks), default=[])

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
            (groups, inner), own = self.groups(), self.group
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


def _work_price(cost: BlockCost, modes: Sequence[Recompute]) -> BlockPrice:
    """A block's price if the data axes of a pipeline cost nothing."""
    times = [own_times(cost, mode) for mode in modes]
    seconds = [forward_s + backward_s for forward_s, backward_s in times]
    held, passing = [cost.kept_bytes(mode) for mode in modes], [cost.passing_bytes(mode) for mode in modes]
    return BlockPrice(
        time_s=min(seconds),
        forward_s=times[0][0],
        once_s=0.0,
        gather_s=0.0,
        static_bytes=0.0,
        held_bytes=max(held),
        held_again_bytes=min(held),
        passing_bytes=min(passing),
        lean_bytes=min(own + kept - min(held) for own, kept in zip(passing, held, strict=True)),
        **again_prices(seconds, held),
    )


def _least_works(every: Sequence[Works]) -> Works:
    """Below each of these."""
    least: dict[tuple[int, ...], BlockPrice] = {}
    costs: dict[tuple[int, ...], tuple[BlockCost, ...]] = {}
    blocks, costs_of = ([*zip(*own, strict=True)] for own in ([w.prices for w in every], [w.costs for w in every]))
    for prices, some in zip(blocks, costs_of, strict=True):
        if _ids(prices) not in least:
            own = least_of(prices)
            # what is no forward is backward: of that too the least, which another of them may have
            backward_s = min([price.time_s - price.forward_s for price in prices])
            least[_ids(prices)] = replace(own, time_s=own.forward_s + backward_s)
        if _ids(some) not in costs:
            costs[_ids(some)] = tuple({id(cost.parameters): cost for cost in some}.values())
    return Works(
        options=tuple(option for own in every for option in own.options),
        prices=tuple(least[_ids(prices)] for prices in blocks),
        behind_s=tuple(map(max, zip(*(own.behind_s for own in every), strict=True))),
        longest_s=max(own.longest_s for own in every),
        every_s=min(own.every_s for own in every),
        costs=every[0].costs,
        costs_of=tuple(costs[_ids(some)] for some in costs_of),
    )


def _ids(values: Sequence[object]) -> tuple[int, ...]:
    return tuple(map(id, values))

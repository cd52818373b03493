"""Rows of candidates in the best layout that any could be.

What the data axes add to each micro-batch follows from the parameters of a block, which need no pricing: no layout on ``tp``
has less than one part of each on a rank. Bytes that a collective moves beside work are
hidden but for the device's interference (see ``DataParallel``). Without a pipeline what runs beside a block is known from
those before and after it: X seconds of collectives beside work of T seconds, forward and backward, take X - (1 - i) min(X, T)
at the least, however they are divided. In a pipeline a stage's gathers may run beside any block of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import Step
from autopar.layout import Type
from autopar.planner.bounds.bound_rows import BlockPrice, Row
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate


@dataclass(frozen=True, slots=True, eq=False)
class _Added:
    """What the data axes add to the work of a block for one micro-batch.

    ``always_s``: whatever it is; ``moved_s``: of collectives that run beside it; ``is_beside``: no other block hides them.
    """

    always_s: float
    moved_s: float
    is_beside: bool
    interference: float

    def least_s(self, work_s: float) -> float:
        """Seconds of a block whose work takes no less than ``work_s``, forward and backward."""
        i, moved_s = self.interference, self.moved_s
        exposed_s = moved_s + i * work_s if self.is_beside else 0.0
        return self.always_s + max(work_s + i * moved_s, exposed_s)

    def again_s(self, work_s: float, again_s: float) -> float:
        """What recompute of ``again_s`` adds to such a block: part of it may run beside collectives that outlast the work.

        The longer the work, the less of it does: no less is added to any longer work.
        """
        return self.least_s(work_s + again_s) - self.least_s(work_s)

    def again_share(self, work_s: float) -> float:
        """The least part of recompute that is added to such a block."""
        return 1.0 if not self.is_beside or work_s >= self.moved_s else self.interference

    @property
    def floor_s(self) -> float:
        """The least that is added to any work."""
        return self.always_s + self.interference * self.moved_s


class LeastRows:
    """Rows below those of every layout, for the row maker of priced ones."""

    def __init__(self, rows: RowMaker) -> None:
        self.rows, self.model = rows, rows.model
        self._places: dict[
            int, tuple[PricedLayout, tuple[int, ...]]
        ] = {}  # the layout is kept, so that its id stays its own
        self._same: dict[tuple[ParameterCost, ...], tuple[ParameterCost, ...]] = {}
        self._whole: dict[int, tuple[PricedLayout, list[BlockCost]]] = {}  # likewise
        self._parts: dict[tuple[object, ...], BlockCost] = {}
        self._added: dict[tuple[object, ...], list[_Added]] = {}
        self._ideal: dict[tuple[object, ...], tuple[PricedLayout, list[BlockPrice], Row]] = {}  # likewise
        self._numel: dict[tuple[int, ...], float] = {}
        self._state: dict[tuple[object, ...], tuple[PricedLayout, float]] = {}  # likewise

    # --- the best of all layouts

    def is_too_large(
        self,
        candidate: Candidate,
        whole: PricedLayout,
        step_of: Callable[[Candidate, PricedLayout], Step],
        beside_bytes: float = 0.0,
    ) -> bool:
        """Whether all pipeline ranks together cannot hold a candidate in any layout.

        Args:
            step_of: how it runs; asked once for all its schedules.
            beside_bytes: that they need in passing, over what blocks keep at the least.
        """
        mesh = candidate.mesh
        key = (id(whole), mesh, candidate.zero_stage, candidate.num_micro_batches, candidate.offload)
        if key not in self._state:
            state = self.model.of(step_of(candidate, whole)).state_bytes_per_element() * self._numel_of(whole) / mesh.tp
            self._state[key] = whole, state
        held = self.rows.least_held_bytes(candidate, whole)
        return self._state[key][1] + held + beside_bytes > self.rows.limit_bytes * mesh.pp

    def _numel_of(self, whole: PricedLayout) -> float:
        """Trained elements of all blocks, experts over data ranks left out."""
        costs = self._costs(whole)
        key = tuple([id(cost.parameters) for cost in costs])  # kept, and the same ones for all micro-batches
        if key not in self._numel:
            total = 0
            for n, cost in zip(self.rows.counts, costs, strict=True):
                total += n * sum(p.numel for p in cost.parameters if p.trained and not p.spread)
            self._numel[key] = total
        return self._numel[key]

    def ideal(self, candidate: Candidate, whole: PricedLayout, step: Step) -> Row:
        """A candidate if ``cp`` and ``tp`` divided everything and sent nothing.

        Args:
            whole: the layout of the same micro-batch with neither axis.
        """
        row = self._ideal_of(candidate, whole, step)[1]
        if row.schedule == candidate.schedule and row.virtual_stages == candidate.virtual_stages:
            return row
        return replace(
            row,
            schedule=candidate.schedule,
            virtual_stages=candidate.virtual_stages,
            stage_gathers_s=(0.0,) * (candidate.mesh.pp * candidate.virtual_stages + 1),
        )

    def _ideal_of(self, candidate: Candidate, whole: PricedLayout, step: Step) -> tuple[list[BlockPrice], Row]:
        """Prices of the blocks, and a row, which but for the schedule is that of all candidates of these prices."""
        key = (id(whole), candidate.mesh, *_kind(step))
        if key not in self._ideal:
            parted, added = self._split(whole, step)
            ideal = self.rows.ideal_prices(candidate.mesh, whole, step)
            prices: list[BlockPrice] = []
            known: dict[tuple[int, int, int], BlockPrice] = {}
            for price, cost, own in zip(ideal, parted, added, strict=True):
                of = id(price), id(cost), id(own)
                if of not in known:
                    known[of] = _beside(price, own, self.model.of(step).block_once_s(cost))
                prices.append(known[of])
            row = self.rows.row(candidate, prices, [0.0] * len(prices), self._largest(whole), every_s=0.0)
            self._ideal[key] = whole, prices, row
        return self._ideal[key][1:]

    def least(
        self,
        candidate: Candidate,
        ideal: Row,
        whole: PricedLayout,
        step: Step,
        total_s: float,
        least_s: Sequence[float],
    ) -> Row:
        """An ideal row at times of work that no layout goes below.

        Args:
            whole: that it was made from.
            total_s: of all blocks.
            least_s: of each block of the compact graph.
        """
        added, counts = self._split(whole, step)[1], self.rows.counts
        times = [
            max(price.time_s, own.least_s(work_s))
            for price, own, work_s in zip(self._ideal_of(candidate, whole, step)[0], added, least_s, strict=True)
        ]
        total_s += sum(n * own.floor_s for n, own in zip(counts, added, strict=True))
        return replace(
            ideal,
            first=replace(ideal.first, time_s=times[0]),
            last=replace(ideal.last, time_s=times[-1]),
            group=replace(ideal.group, time_s=min((times[k] for k in self._largest(whole)), default=0.0)),
            total_s=max(ideal.total_s, total_s, sum(n * time_s for n, time_s in zip(counts, times, strict=True))),
            tells_apart=False,
        )

    # --- parameters

    def _split(self, whole: PricedLayout, step: Step) -> tuple[list[BlockCost], list[_Added]]:
        """Blocks with one part of each of their parameters on ``tp``, and what the data axes add to them."""
        parted = [self._part(cost, step.mesh.tp) for cost in self._costs(whole)]
        key = (*map(id, parted), *_kind(step))
        if key not in self._added:
            depends = self.model.of(step).data.sends_always  # on the blocks beside
            known = {(id(cost), k * depends): k for k, cost in enumerate(parted)}
            made = {of: self._added_of(parted, k, step) for of, k in known.items()}
            self._added[key] = [made[id(cost), k * depends] for k, cost in enumerate(parted)]
        return parted, self._added[key]

    def _added_of(self, costs: Sequence[BlockCost], k: int, step: Step) -> _Added:
        """Of block ``k`` of the compact graph."""
        data, unit = self.model.of(step).data, self.model.of(step).unit(costs[k])
        passes = 1 if data.is_pipelined else 2
        moved_s = unit.gather_s * data.gathers_always  # in a pipeline of the backward alone
        if not data.is_pipelined and data.sends_always:
            moved_s = min(self._beside_s(costs, before, after, step) for before, after in self.rows.neighbours[k])
        if self.model.collectives.is_measured:  # a table of times need not grow with bytes
            moved_s = 0.0
        always_s = passes * unit.hooks_s + self.model.of(step).block_adding_s(costs[k])
        return _Added(always_s, moved_s, not data.is_pipelined, self.model.device.interference)

    def _beside_s(self, costs: Sequence[BlockCost], before: int, after: int, step: Step) -> float:
        """Seconds of collectives beside a block between these: the next one's gather and reduction, the last one's gather."""
        data, found = self.model.of(step).data, 0.0
        if before >= 0:
            found += data.gathers_always * self.model.of(step).unit(costs[before]).gather_s
        if after >= 0:
            unit = self.model.of(step).unit(costs[after])
            found += data.gathers_always * unit.gather_s + data.reduces_always * unit.reduce_s
        return found

    def _costs(self, whole: PricedLayout) -> list[BlockCost]:
        """The blocks of a layout, those with equal parameters that bring the same ones as one object."""
        if id(whole) not in self._whole:
            costs = self.rows.private_costs(whole)
            same = [self._same.setdefault(cost.parameters, cost.parameters) for cost in costs]
            self._whole[id(whole)] = (
                whole,
                [
                    cost if own is cost.parameters else replace(cost, parameters=own)
                    for cost, own in zip(costs, same, strict=True)
                ],
            )
        return self._whole[id(whole)][1]

    def _part(self, cost: BlockCost, tp: int, rests: tuple[Type, ...] | None = None) -> BlockCost:
        """A block with the parameters alone that one rank of ``tp`` has; what else it says is of any block.

        Args:
            rests: types at rest; None: each as small as it can be.
        """
        key = (id(cost.parameters), tp, rests)
        if key not in self._parts:
            found = []
            for i, p in enumerate(cost.parameters):
                shape = list(p.shape)
                if rests is None:
                    shape = [p.numel // tp] if shape else []
                elif rests[i].is_split:
                    shape[rests[i].dim] //= tp
                found.append(replace(p, shape=tuple(shape)))
            self._parts[key] = replace(cost, parameters=tuple(found))
        return self._parts[key]

    def _largest(self, whole: PricedLayout) -> tuple[int, ...]:
        if id(whole) not in self._places:
            self._places[id(whole)] = whole, self.rows.largest(whole)
        return self._places[id(whole)][1]


def _beside(price: BlockPrice, added: _Added, once_s: float) -> BlockPrice:
    """The price of work as one of a block; ``once_s``: of its parameters."""
    work_s, share = price.time_s, added.again_share(price.time_s)
    return replace(
        price,
        time_s=added.least_s(work_s),
        again_s=added.again_s(work_s, price.again_s),
        least_again_s=added.again_s(work_s, price.least_again_s),
        full_s=added.again_s(work_s, price.full_s),
        more_byte_s=share * price.more_byte_s,
        more_free_s=share * price.more_free_s,
        once_s=once_s,
    )


def _kind(step: Step) -> tuple[object, ...]:
    """What of a step its prices depend on, whatever the schedule."""
    return (
        step.mesh, step.zero_stage, step.num_micro_batches, step.adds_gradients, step.offload,
    )  # fmt: skip

"""Rows of candidates in layouts that are not priced: in the best that any could be, or in a draft.

What the data axes add to each micro-batch follows from the parameters of a block, which need no pricing: no layout on ``tp``
has less than one part of each on a rank, and a draft says which are split. Bytes that a collective moves beside work are
hidden but for the device's interference (see ``DataParallel``). Without a pipeline what runs beside a block is known from
those before and after it: X seconds of collectives beside work of T seconds, forward and backward, take X - (1 - i) min(X, T)
at the least, however they are divided. In a pipeline a stage's gathers may run beside any block of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.cost.blocks.block_cost import BlockCost, ParameterCost
from autopar.cost.model import Step
from autopar.frozen import quickly, replaced
from autopar.layout import I, Type
from autopar.planner.bounds.bound_rows import BlockPrice, Row
from autopar.planner.bounds.lines import again_prices, least_of
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.types import Draft, Option
from autopar.planner.layouts.uncounted import Needs
from autopar.planner.space.candidates import Candidate


@quickly
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
        self._places: dict[int, tuple[Option, tuple[int, ...]]] = {}  # the layout is kept, so that its id stays its own
        self._same: dict[tuple[ParameterCost, ...], tuple[ParameterCost, ...]] = {}
        self._whole: dict[int, tuple[Option, list[BlockCost]]] = {}  # likewise
        self._parts: dict[tuple[object, ...], BlockCost] = {}
        self._added: dict[tuple[object, ...], list[_Added]] = {}
        self._ideal: dict[tuple[object, ...], tuple[Option, list[BlockPrice], Row]] = {}  # likewise
        self._numel: dict[tuple[int, ...], float] = {}
        self._state: dict[tuple[object, ...], tuple[Option, float]] = {}  # likewise
        self._drafted: dict[
            tuple[object, ...], tuple[Draft, tuple[BlockPrice, ...], float, float, float, float]
        ] = {}  # likewise

    # --- the best of all layouts

    def is_too_large(
        self,
        candidate: Candidate,
        whole: Option,
        step_of: Callable[[Candidate, Option], Step],
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
            state = self.model.state_bytes_per_element(step_of(candidate, whole)) * self._numel_of(whole) / mesh.tp
            self._state[key] = whole, state
        held = self.rows.least_held_bytes(candidate, whole)
        return self._state[key][1] + held + beside_bytes > self.rows.limit_bytes * mesh.pp

    def _numel_of(self, whole: Option) -> float:
        """Trained elements of all blocks, experts over data ranks left out."""
        costs = self._costs(whole)
        key = tuple([id(cost.parameters) for cost in costs])  # kept, and the same ones for all micro-batches
        if key not in self._numel:
            total = 0
            for n, cost in zip(self.rows.counts, costs, strict=True):
                total += n * sum(p.numel for p in cost.parameters if p.trained and not p.spread)
            self._numel[key] = total
        return self._numel[key]

    def ideal(self, candidate: Candidate, whole: Option, step: Step) -> Row:
        """A candidate if ``cp`` and ``tp`` divided everything and sent nothing.

        Args:
            whole: the layout of the same micro-batch with neither axis.
        """
        row = self._ideal_of(candidate, whole, step)[1]
        if row.schedule == candidate.schedule and row.virtual_stages == candidate.virtual_stages:
            return row
        return replaced(
            row,
            schedule=candidate.schedule,
            virtual_stages=candidate.virtual_stages,
            stage_gathers_s=(0.0,) * (candidate.mesh.pp * candidate.virtual_stages + 1),
        )

    def _ideal_of(self, candidate: Candidate, whole: Option, step: Step) -> tuple[list[BlockPrice], Row]:
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
                    known[of] = _beside(price, own, self.model.block_once_s(cost, step))
                prices.append(known[of])
            row = self.rows.row(candidate, prices, [0.0] * len(prices), self._largest(whole), every_s=0.0)
            self._ideal[key] = whole, prices, row
        return self._ideal[key][1:]

    def least(
        self, candidate: Candidate, ideal: Row, whole: Option, step: Step, total_s: float, least_s: Sequence[float]
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
        return replaced(
            ideal,
            first=replaced(ideal.first, time_s=times[0]),
            last=replaced(ideal.last, time_s=times[-1]),
            group=replaced(ideal.group, time_s=min((times[k] for k in self._largest(whole)), default=0.0)),
            total_s=max(ideal.total_s, total_s, sum(n * time_s for n, time_s in zip(counts, times, strict=True))),
            tells_apart=False,
        )

    # --- a draft

    def drafted(
        self, candidate: Candidate, ideal: Row, draft: Draft, whole: Option, step: Step, needs: Sequence[Needs] = ()
    ) -> Row:
        """A candidate in a layout with times and parameters of its blocks, but messages as in the best of all.

        Args:
            needs: of each block, where they are known; else memory is as in the best of all too.
        """
        key = (id(draft), bool(needs), candidate.mesh, *_kind(step))
        if key not in self._drafted:
            self._drafted[key] = draft, *self._drafted_prices(candidate, draft, whole, step, needs)
        _, (first, last, group), total_s, once_s, gathers_s, every_s = self._drafted[key]
        sent, back = (draft.send_bytes, draft.send_gradient_bytes) if candidate.mesh.pp > 1 else (0.0, 0.0)
        collectives = self.model.collectives
        return replaced(
            ideal,
            first=first,
            last=last,
            group=group if ideal.count else ideal.group,
            total_s=max(ideal.total_s, total_s),
            once_s=max(ideal.once_s, once_s),
            gathers_s=gathers_s,
            every_s=every_s,
            send_s=collectives.send_time_s(sent, candidate.mesh),
            send_back_s=collectives.send_time_s(back, candidate.mesh),
            stage_bytes=sent,
            tells_apart=False,
        )

    def _drafted_prices(
        self, candidate: Candidate, draft: Draft, whole: Option, step: Step, needs: Sequence[Needs]
    ) -> tuple[tuple[BlockPrice, ...], float, float, float, float]:
        """Of the first block, the last one, and the least of the largest group; of all their time, what they do once, gathers.

        And what the one stage without a pipeline takes besides for each micro-batch.
        """
        assert draft.solution is not None
        rests, tp = draft.solution.typing.parameters, draft.split.tp
        prices = []
        parts = [
            self._part(cost, tp, tuple([rests.get(p.name, I) for p in cost.parameters])) for cost in self._costs(whole)
        ]
        ideals = zip(self._ideal_of(candidate, whole, step)[0], draft.blocks_s, strict=True)
        for k, (price, work_s) in enumerate(ideals):
            part, added = parts[k], self._added_of(parts, k, step)
            known = self._needing(k, price, needs[k], added, work_s) if needs else {}
            prices.append(
                replaced(
                    price,
                    **known,
                    time_s=max(price.time_s, added.least_s(work_s)),
                    once_s=max(price.once_s, self.model.block_once_s(part, step)),
                    gather_s=self.model.device.interference * self.model.block_gather_s(part, step),
                    static_bytes=max(price.static_bytes, self.model.block_static_bytes(part, step)),
                )
            )
        places = self._largest(whole)
        group = least_of(prices[k] for k in places) if places else prices[0]
        counts = self.rows.counts
        total_s = sum(n * price.time_s for n, price in zip(counts, prices, strict=True))
        once_s = sum(n * price.once_s for n, price in zip(counts, prices, strict=True))
        gathers_s = sum(n * price.gather_s for n, price in zip(counts, prices, strict=True))
        # as in _added_of: a table of times need not grow with bytes
        is_known = step.mesh.pp == 1 and not self.model.collectives.is_measured
        every_s = self.model.ends_s(parts[0], parts[-1], step) if is_known else 0.0
        return (prices[0], prices[-1], group), total_s, once_s, gathers_s, every_s

    def _needing(self, k: int, price: BlockPrice, needs: Needs, added: _Added, work_s: float) -> dict[str, float]:
        """What is known of the price of a block that keeps what its backward needs on the device, if it may keep all of it."""
        modes = self.rows.modes[k]
        if "none" not in modes or self.rows.moves or self.rows.is_moved[k]:
            return {}
        if "selective" in modes:
            return _remaking(price, needs, added, work_s, may_be_full="full" in modes)
        return _needing(price, needs, added, work_s)

    # --- parameters

    def _split(self, whole: Option, step: Step) -> tuple[list[BlockCost], list[_Added]]:
        """Blocks with one part of each of their parameters on ``tp``, and what the data axes add to them."""
        parted = [self._part(cost, step.mesh.tp) for cost in self._costs(whole)]
        key = (*map(id, parted), *_kind(step))
        if key not in self._added:
            depends = self.model.sends_always(step)  # on the blocks beside
            known = {(id(cost), k * depends): k for k, cost in enumerate(parted)}
            made = {of: self._added_of(parted, k, step) for of, k in known.items()}
            self._added[key] = [made[id(cost), k * depends] for k, cost in enumerate(parted)]
        return parted, self._added[key]

    def floors_s(self, whole: Option, step: Step) -> tuple[float, float]:
        """What the data axes add to all blocks at the least, to each micro-batch and once a step.

        Args:
            whole: the layout with neither ``cp`` nor ``tp``.
        """
        parted, added = self._split(whole, step)
        always_s = sum(n * own.floor_s for n, own in zip(self.rows.counts, added, strict=True))
        blocks = {id(cost): cost for cost in parted}
        once = {key: self.model.block_once_s(cost, step) for key, cost in blocks.items()}
        return always_s, sum(n * once[id(cost)] for n, cost in zip(self.rows.counts, parted, strict=True))

    def _added_of(self, costs: Sequence[BlockCost], k: int, step: Step) -> _Added:
        """Of block ``k`` of the compact graph."""
        data, unit = self.model.data_parallel(step), self.model.data_unit(costs[k], step)
        passes = 1 if data.is_pipelined else 2
        moved_s = unit.gather_s * data.gathers_always  # in a pipeline of the backward alone
        if not data.is_pipelined and data.sends_always:
            moved_s = min(self._beside_s(costs, before, after, step) for before, after in self.rows.neighbours[k])
        if self.model.collectives.is_measured:  # a table of times need not grow with bytes
            moved_s = 0.0
        always_s = passes * unit.hooks_s + self.model.block_adding_s(costs[k], step)
        return _Added(always_s, moved_s, not data.is_pipelined, self.model.device.interference)

    def _beside_s(self, costs: Sequence[BlockCost], before: int, after: int, step: Step) -> float:
        """Seconds of collectives beside a block between these: the next one's gather and reduction, the last one's gather."""
        data, found = self.model.data_parallel(step), 0.0
        if before >= 0:
            found += data.gathers_always * self.model.data_unit(costs[before], step).gather_s
        if after >= 0:
            unit = self.model.data_unit(costs[after], step)
            found += data.gathers_always * unit.gather_s + data.reduces_always * unit.reduce_s
        return found

    def _costs(self, whole: Option) -> list[BlockCost]:
        """The blocks of a layout, those with equal parameters that bring the same ones as one object."""
        if id(whole) not in self._whole:
            costs = self.rows.private_costs(whole)
            same = [self._same.setdefault(cost.parameters, cost.parameters) for cost in costs]
            self._whole[id(whole)] = (
                whole,
                [
                    cost if own is cost.parameters else replaced(cost, parameters=own)
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
                found.append(replaced(p, shape=tuple(shape)))
            self._parts[key] = replaced(cost, parameters=tuple(found))
        return self._parts[key]

    def _largest(self, whole: Option) -> tuple[int, ...]:
        if id(whole) not in self._places:
            self._places[id(whole)] = whole, self.rows.largest(whole)
        return self._places[id(whole)][1]


def _beside(price: BlockPrice, added: _Added, once_s: float) -> BlockPrice:
    """The price of work as one of a block; ``once_s``: of its parameters."""
    work_s, share = price.time_s, added.again_share(price.time_s)
    return replaced(
        price,
        time_s=added.least_s(work_s),
        again_s=added.again_s(work_s, price.again_s),
        least_again_s=added.again_s(work_s, price.least_again_s),
        full_s=added.again_s(work_s, price.full_s),
        more_byte_s=share * price.more_byte_s,
        more_free_s=share * price.more_free_s,
        once_s=once_s,
    )


def _needing(price: BlockPrice, needs: Needs, added: _Added, work_s: float) -> dict[str, float]:
    """What of a price a block's needs are above; ``work_s``: of it without recompute.

    The longer the work, the more of what is recomputed shows beside collectives: least so at the least work.
    """
    again_s = added.again_s(work_s, needs.again_s)
    held = max(price.held_bytes, needs.saved_bytes)
    return {
        "again_s": max(price.again_s, again_s),
        "least_again_s": max(price.least_again_s, again_s),
        "full_s": max(price.full_s, again_s) if price.full_s else 0.0,
        "held_bytes": held,
        "some_bytes": held if price.some_bytes else 0.0,
        "lean_bytes": max(price.lean_bytes, held - price.held_again_bytes),
    }


def _remaking(price: BlockPrice, needs: Needs, added: _Added, work_s: float, *, may_be_full: bool) -> dict[str, float]:
    """As :func:`_needing` of a block that may recompute selectively: in the way that takes and keeps the least."""
    most = max(price.held_bytes, needs.saved_bytes)
    points = [(0.0, most), *((own_s, needs.saved_bytes - freed) for own_s, freed in needs.remade)]
    if may_be_full:
        points.append((needs.again_s, price.held_again_bytes))
    least = min(held for _, held in points)
    found = again_prices([added.again_s(work_s, own_s) for own_s, _ in points], [held for _, held in points])
    return {
        "more_byte_s": 0.0,
        "more_free_s": 0.0,
        "some_bytes": 0.0,
        "full_s": 0.0,
        **found,
        "held_bytes": most,
        "held_again_bytes": least,
        "lean_bytes": max(price.lean_bytes, most - least),
    }


def _kind(step: Step) -> tuple[object, ...]:
    """What of a step its prices depend on, whatever the schedule."""
    return (
        step.mesh, step.zero_stage, step.num_micro_batches, step.all_reduces, step.adds_gradients, step.offload,
    )  # fmt: skip

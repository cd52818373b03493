"""The floors of a candidate's blocks, the least time and memory of each: under perfect division, or in a priced layout.

What the data axes add to a micro-batch follows from a block's parameters and needs no pricing: no layout on ``tp`` puts less than a 1/tp
share of each on a rank. Collectives that overlap computation are hidden, but for the device's interference i (see ``DataParallel``).
Without a pipeline, the blocks before and after a block determine which collectives overlap it: collectives of X seconds that overlap work
of T seconds, forward and backward, add at least X - (1 - i) min(X, T), however they are divided between the passes. In a pipeline a stage's
gathers may overlap any of its blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.cost.model import BlockCost, CostModel, Step
from autopar.cost.step.step_model import Neighbours, StepModel
from autopar.plan.mesh import EXPERT_AXIS
from autopar.plan.plan import Recompute
from autopar.planner.bounds.instance import BlockFloor, FloorTable, ModeFloor, are_inside, at_both_ends, least_sums_s
from autopar.planner.layouts.layout import LayoutKey, PricedLayout
from autopar.planner.stages.cut_problem import BlockClasses
from autopar.rules.local_calls import SPREAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What the data axes add to a block's work for one micro-batch.

    Attributes:
        always_s: seconds that are added whatever the work is.
        moved_s: seconds of collectives that overlap the work.
        hides_alone: whether no other block can hide these collectives.
        interference: the fraction of a hidden collective by which the device's computation slows down.
    """

    always_s: float
    moved_s: float
    hides_alone: bool
    interference: float

    def least_s(self, work_s: float) -> float:
        """Return the least seconds of a block whose forward and backward take at least ``work_s``."""
        i, moved_s = self.interference, self.moved_s
        exposed_s = moved_s + i * work_s if self.hides_alone else 0.0
        return self.always_s + max(work_s + i * moved_s, exposed_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The share of a rank in a block that ``cp`` and ``tp`` divide perfectly.

    Attributes:
        forward_s: the seconds of its forward.
        work_s: the seconds of both passes.
        modes: for each mode the seconds of recompute, the bytes kept, and the passing bytes.
        part: the block with a 1/tp share of its parameters, the smallest that a rank may have.
    """

    forward_s: float
    work_s: float
    modes: list[tuple[float, float, float]]
    part: BlockCost


class BlockFloors:
    """Computes and caches the floors of one model's blocks on one kind of device.

    Args:
        blocks: the kinds of blocks of the model.
        model: the cost model of the device.
    """

    def __init__(self, blocks: BlockClasses, model: CostModel) -> None:
        self.blocks, self.model = blocks, model
        ends = [-1, *blocks.class_of, -1]
        self.neighbours: list[set[tuple[int, int]]] = [set() for _ in blocks.counts]
        """For each block of the compact graph, the blocks before and after those that it stands for; -1: there is none."""
        for before, k, after in zip(ends, blocks.class_of, ends[2:], strict=False):
            self.neighbours[k].add((before, after))
        self._costs: dict[PricedLayout, list[BlockCost]] = {}
        self._known_shares: dict[tuple[LayoutKey, PricedLayout], list[Share]] = {}
        self._split: dict[tuple[object, ...], tuple[FloorTable, list[tuple[Added, float]]]] = {}
        self._typed: dict[tuple[object, ...], FloorTable] = {}
        self._priced: dict[tuple[object, ...], tuple[FloorTable, float, float]] = {}

    # --- divided perfectly

    def perfect_split(self, unsplit: PricedLayout, step: Step, block_s: tuple[float, ...] = ()) -> FloorTable:
        """Return the floors as if ``cp`` and ``tp`` divided everything and blocks sent nothing but tokens to experts.

        Args:
            unsplit: the layout of the same micro-batch with neither axis.
            step: the step of the candidate.
            block_s: the seconds of each block in one typing; empty: for any typing.
        """
        key = (unsplit, *_kind(step))
        if key not in self._split:
            shares = self._shares(replace(unsplit.key, cp=step.mesh.cp, tp=step.mesh.tp), unsplit)
            parts, costs = [share.part for share in shares], self.costs(unsplit)
            added = [self._added_to(parts, k, step) for k in range(len(parts))]
            floors = map(partial(self._split_floor, step=step), costs, shares, added)
            self._split[key] = (
                FloorTable(blocks=tuple(floors)),
                [(one, share.work_s) for one, share in zip(added, shares, strict=True)],
            )
        table, work = self._split[key]
        if not block_s:
            return table
        if (*key, block_s) not in self._typed:
            more_s = [one.least_s(max(w, s)) - one.least_s(w) for (one, w), s in zip(work, block_s, strict=True)]
            typed = (replace(floor, more_s=own_s) for floor, own_s in zip(table.blocks, more_s, strict=True))
            self._typed[*key, block_s] = FloorTable(blocks=tuple(typed))
        return self._typed[*key, block_s]

    def _split_floor(self, cost: BlockCost, share: Share, added: Added, *, step: Step) -> BlockFloor:
        """Return the floor of a block from its share of a perfect division, and from what the data axes add."""
        on, tp = self.model.of(step), step.mesh.tp
        static_bytes, stepped_bytes = on.block_bytes(cost)
        return BlockFloor(
            forward_s=share.forward_s,
            modes=tuple(
                ModeFloor(
                    backward_s=added.least_s(share.work_s + recompute_s) - share.forward_s,
                    kept_bytes=kept, passing_bytes=passing,
                )
                for recompute_s, kept, passing in share.modes
            ),
            once_s=on.block_once_s(share.part),
            static_bytes=static_bytes / tp,
            stepped_bytes=stepped_bytes / tp,
        )  # fmt: skip

    def _shares(self, key: LayoutKey, unsplit: PricedLayout) -> list[Share]:
        """Return the share of a rank in each block under perfect division."""
        if (key, unsplit) not in self._known_shares:
            costs = zip(self.costs(unsplit), self.blocks.modes, strict=True)
            self._known_shares[key, unsplit] = [self._share(cost, modes, key) for cost, modes in costs]
        return self._known_shares[key, unsplit]

    def _travels_s(self, cost: BlockCost, key: LayoutKey) -> tuple[float, float, float]:
        """Return the least seconds in which tokens travel to experts of other data ranks and back: forward, backward, and full recompute.

        However the mixture is laid out on ``cp`` and ``tp``, each rank sends at least its share of the tokens, either over the data ranks
        or over those and ``tp``.
        """
        sent = [message for message in cost.messages if message.axis == SPREAD]
        collectives = self.model.collectives
        if not sent:
            return 0.0, 0.0, 0.0
        mesh, call_s = key.mesh(self.model.cluster.world_size), self.model.device.overheads.collective_s
        axes = [SPREAD, EXPERT_AXIS][: 1 + (key.tp > 1)]
        seconds = [
            call_s + min(collectives.time_s(m.kind, m.num_bytes // (key.cp * key.tp), mesh, (axis,)) for axis in axes)
            for m in sent
        ]
        forward_s = sum(sec for sec, m in zip(seconds, sent, strict=True) if not m.backward)
        recompute_s = sum(sec for sec, m in zip(seconds, sent, strict=True) if m.repeated and not m.backward)
        return forward_s, sum(seconds) - forward_s, recompute_s

    def _share(self, cost: BlockCost, modes: tuple[Recompute, ...], key: LayoutKey) -> Share:
        ranks, (travel_forward_s, travel_backward_s, travel_again_s) = key.cp * key.tp, self._travels_s(cost, key)
        # A measured part may be faster than its share of the whole (caches): before it is priced, nothing is known.
        share = 0.0 if ranks > 1 and self.model.measured is not None else 1.0 / ranks
        device = self.model.device
        byte_s = bool(share) / (device.memory_bandwidth_bytes_per_s * device.kernel_fraction)
        forward_s = cost.forward_s * share
        # Without other axes this is the layout itself; other layouts may recompute other operators.
        kept = [(cost.kept_bytes(mode) if ranks == 1 else _least_kept(cost, mode)) / ranks for mode in modes]
        seconds = {"none": 0.0, "selective": 0.0, "full": forward_s + travel_again_s}
        if "selective" in modes:
            # recomputed values are written again, whichever these are
            written_s = byte_s * (max(kept) - kept[modes.index("selective")])
            seconds["selective"] = cost.remade.time_s if ranks == 1 else written_s
        # A layout may need less passing memory than its share of the whole, but not less than what backward needs, kept or recomputed.
        needed = cost.kept_bytes("none") / ranks
        passing = [
            _least_passing(cost, m) if ranks == 1 else needed - size for m, size in zip(modes, kept, strict=True)
        ]
        work_s = (cost.forward_s + cost.backward_s) * share
        parameters = (replace(p, shape=(p.numel // key.tp,)) if p.shape else p for p in cost.parameters)
        return Share(
            forward_s=forward_s + travel_forward_s,
            work_s=work_s + travel_forward_s + travel_backward_s,
            modes=[(seconds[m], size, pass_) for m, size, pass_ in zip(modes, kept, passing, strict=True)],
            part=cost if key.tp == 1 else replace(cost, parameters=tuple(parameters)),
        )

    def _added_to(self, costs: Sequence[BlockCost], k: int, step: Step) -> Added:
        """Return what the data axes add to a block; ``costs`` have the parameters of a rank."""
        on = self.model.of(step)
        data, unit = on.data, on.unit(costs[k])
        passes = 1 if data.is_pipelined else 2
        moved_s = unit.gather_s * data.gathers_always  # in a pipeline only the backward's gather counts
        if not data.is_pipelined and data.sends_always:
            moved_s = min(self._overlapping_s(costs, before, after, on) for before, after in self.neighbours[k])
        return Added(
            always_s=passes * unit.hooks_s + on.block_adding_s(costs[k]),
            moved_s=moved_s,
            hides_alone=not data.is_pipelined,
            interference=self.model.device.interference,
        )

    def _overlapping_s(self, costs: Sequence[BlockCost], before: int, after: int, on: StepModel) -> float:
        """Return the seconds of collectives that overlap a block: the next block's gather and reduction, the previous block's gather."""
        data, seconds_s = on.data, 0.0
        if before >= 0:
            seconds_s += data.gathers_always * on.unit(costs[before]).gather_s
        if after >= 0:
            unit = on.unit(costs[after])
            seconds_s += data.gathers_always * unit.gather_s + data.reduces_always * unit.reduce_s
        return seconds_s

    # --- a priced layout

    def priced(self, layout: PricedLayout, step: Step) -> tuple[FloorTable, float, float]:
        """Return the floors of a priced layout, the least exposed seconds of a stage's first gather, and seconds of each rank once a step.

        No forward overlaps that gather. Sums of gradients are in the floors and in the seconds of a rank.
        """
        key = (layout, *_kind(step))
        if key not in self._priced:
            shared = at_both_ends(layout.costs) if step.mesh.pp > 1 else ()
            costs = [*self.costs(layout)]
            # No other block of the last rank counts the shared parameters.
            if shared and not are_inside(layout.costs, shared):
                costs[-1] = layout.costs[-1]
            floors, first_s = self._priced_blocks(layout, costs, step)
            more_s, rank_s = self._sums_s(layout, costs, [floor.once_s for floor in floors], step)
            table = FloorTable(
                blocks=tuple(
                    replace(floor, once_s=floor.once_s + sum_s) if sum_s else floor
                    for floor, sum_s in zip(floors, more_s, strict=True)
                )
            )
            self._priced[key] = table, first_s, rank_s
        return self._priced[key]

    def _sums_s(
        self, layout: PricedLayout, costs: Sequence[BlockCost], once_s: Sequence[float], step: Step
    ) -> tuple[list[float], float]:
        """Return what sums of gradients add once a step to each block and to a rank; no block's ``once_s`` becomes negative."""
        counts = self.blocks.counts
        others = sum(counts) - sum(counts[k] for k in self.blocks.largest(layout)) > 2
        sums_s, rank_s = least_sums_s(self.model, costs, counts, step, others=others)
        if any(floor_s + sum_s < 0 for floor_s, sum_s in zip(once_s, sums_s, strict=True)):
            return least_sums_s(self.model, costs, counts, step, others=True)
        return sums_s, rank_s

    def _priced_blocks(
        self, layout: PricedLayout, costs: Sequence[BlockCost], step: Step
    ) -> tuple[list[BlockFloor], float]:
        longest_s = max(cost.forward_s + cost.communication_forward_s for cost in costs)
        floors, first_s, on = [], float("inf"), self.model.of(step)
        for k, cost in enumerate(costs):
            pairs = self.neighbour_pairs(costs, k) if on.data.sends_always else []
            gather_s = on.block_gather_s(cost)
            hidden_s = (1 - self.model.device.interference) * min(gather_s, longest_s)
            first_s = min(first_s, hidden_s)
            floors.append(_priced_floor(on, cost, self.blocks.modes[k], gather_s - hidden_s, pairs))
        return floors, first_s

    def neighbour_pairs(self, costs: Sequence[BlockCost], k: int) -> list[Neighbours]:
        """Return the blocks before and after each of those that block ``k`` of the compact graph stands for."""
        return [(None if i < 0 else costs[i], None if j < 0 else costs[j]) for i, j in sorted(self.neighbours[k])]

    # --- costs

    def costs(self, layout: PricedLayout) -> list[BlockCost]:
        """Return the costs of blocks without parameters of earlier blocks, and without activations that are, or may be, on the host."""
        if layout not in self._costs:
            costs = []
            for k, cost in enumerate(layout.costs):
                if self.blocks.is_offloaded[k] or self.blocks.may_offload:
                    cost = replace(cost, saved_bytes=0, input_bytes=0, saved_input_bytes=0)
                costs.append(without_shared(cost) if k else cost)
            self._costs[layout] = costs
        return self._costs[layout]


def _priced_floor(
    on: StepModel, cost: BlockCost, modes: Sequence[Recompute], gather_s: float, neighbours: Sequence[Neighbours]
) -> BlockFloor:
    """Return the floor of a block whose gather in the step's first forward is exposed for ``gather_s`` seconds."""
    times = [on.block_time_s(cost, recompute=mode, neighbours=neighbours) for mode in modes]
    forward_s, adding_s = min(time.forward_s for time in times), on.block_adding_s(cost)
    static_bytes, stepped_bytes = on.block_bytes(cost)
    return BlockFloor(
        forward_s=forward_s,
        modes=tuple(
            ModeFloor(
                backward_s=time.forward_s + time.backward_s + adding_s - forward_s,
                kept_bytes=cost.kept_bytes(mode),
                passing_bytes=on.block_passing_bytes(cost, recompute=mode, neighbours=neighbours),
            )
            for time, mode in zip(times, modes, strict=True)
        ),
        gather_s=gather_s,
        once_s=on.block_once_s(cost),
        static_bytes=static_bytes,
        stepped_bytes=stepped_bytes,
    )


def without_shared(cost: BlockCost) -> BlockCost:
    """Return a block without parameters that other blocks read too: a rank with several of these blocks has them once."""
    parameters = tuple(p for p in cost.parameters if not p.shared)
    return cost if len(parameters) == len(cost.parameters) else replace(cost, parameters=parameters)


def _least_kept(cost: BlockCost, mode: Recompute) -> int:
    """Return the least bytes that a block keeps in any layout, over all its ranks; other layouts may recompute other operators."""
    return cost.remade.least_bytes if mode == "selective" else cost.kept_bytes(mode)


def _least_passing(cost: BlockCost, mode: Recompute) -> int:
    return 0 if mode == "selective" else cost.passing_bytes(mode)


def _kind(step: Step) -> tuple[object, ...]:
    """Return what the floors depend on in a step; the schedule is not part of it."""
    return step.mesh, step.zero_stage, step.num_micro_batches, step.adds_gradients, step.offload

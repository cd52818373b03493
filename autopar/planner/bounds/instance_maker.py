"""Makes the pipeline instances that relaxations read: a candidate under perfect division or in a priced layout, with its devices."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.model import CostModel, StageCost, Step
from autopar.plan.plan import Recompute
from autopar.planner.bounds.floors import BlockFloors
from autopar.planner.bounds.instance import FloorTable, PipelineInstance, are_inside, at_both_ends, runs_of, tie_s
from autopar.planner.layouts.layout import PricedLayout, TypedLayout
from autopar.planner.search import SearchContext
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.block_options import RankDevices
from autopar.planner.stages.cut_problem import BlockClasses

Places = frozenset[int]
"""The node groups that a pipeline rank lies on; several are priced as the slowest of them."""


class InstanceMaker:
    """Makes the pipeline instances of one search's candidates, and caches what candidates share.

    Args:
        context: the context of the search.
    """

    def __init__(self, context: SearchContext) -> None:
        self.context, self.rank_devices = context, RankDevices(context.layouts, context.model)
        self._everywhere = frozenset(range(len(context.model.cluster.groups)))
        self._blocks = {may_offload: BlockClasses(context, may_offload=may_offload) for may_offload in (False, True)}
        groups, _ = self._blocks[False].groups()
        self._runs = runs_of(context.layouts.compact.class_of)
        self._groups = tuple(tuple(group) for group in groups)
        self._floors: dict[tuple[CostModel, bool], BlockFloors] = {}

    def perfect_split(self, candidate: Candidate, typed: TypedLayout | None = None) -> PipelineInstance:
        """Return a candidate's instance as if ``cp`` and ``tp`` divided everything and blocks sent nothing but tokens to experts.

        Args:
            typed: a layout that is not priced, whose seconds of typed blocks raise the floors; None: floors for any layout.
        """
        unsplit = self.context.unsplit(candidate)
        step, tables = self.context.step(candidate, unsplit), {}
        block_s = typed.solution.block_s if typed is not None and typed.solution is not None else ()
        for places in dict.fromkeys(self.places(candidate)):
            tables[places] = self._of(places, candidate).perfect_split(self._on(places, unsplit), step, block_s)
        return self._instance(candidate, tables, step, unsplit)

    def priced(self, candidate: Candidate, layout: PricedLayout) -> PipelineInstance:
        """Return a candidate's instance in a priced layout."""
        if candidate.mesh.pp == 1:
            return self._one_rank(candidate, layout, self._of(self._everywhere, candidate))
        step, places_of_rank = self.context.step(candidate, layout), self.places(candidate)
        places = dict.fromkeys(places_of_rank)
        layouts = {groups: self._on(groups, layout) for groups in places}
        tables = {groups: self._of(groups, candidate).priced(layouts[groups], step) for groups in places}
        base = self._instance(candidate, {groups: table for groups, (table, _, _) in tables.items()}, step, layout)
        prelude_s = [layouts[groups].prelude_s for groups in places]
        there, back = _least([(cost.send_bytes, cost.send_gradient_bytes) for cost in layout.costs[:-1]] or [(0, 0)])
        sends_s, back_s = self._sent_s(candidate, there), self._sent_s(candidate, back)
        reads = [sum(read.values()) for read in self._reads(layout)]
        ranks_s = [once_s + tables[groups][2] for groups, once_s in zip(places_of_rank, base.ranks_s, strict=True)]
        shared = at_both_ends(layout.costs)
        tied_s = tie_s(
            self.context.model.in_order(candidate.order), shared, step, inside=are_inside(layout.costs, shared)
        )
        return replace(
            base,
            forward_s=tuple(prelude + stage_s for prelude, stage_s in zip(prelude_s, base.forward_s, strict=True)),
            first_s=min(first_s for _, first_s, _ in tables.values()),
            sends_s=sends_s,
            sends_back_s=back_s,
            sends_more_s=self._more_s(candidate, layout, sends_s, back_s),
            sent_bytes=float(there),
            read_bytes=float(min(reads[1:-1], default=0)),
            ranks_s=(ranks_s[0] + tied_s, *ranks_s[1:-1], ranks_s[-1] + tied_s),
            most_blocks=self._most_blocks(candidate, layout),
            ends=self._ends(candidate),
        )

    def _one_rank(self, candidate: Candidate, layout: PricedLayout, floors: BlockFloors) -> PipelineInstance:
        """Return the instance of a candidate without a pipeline, on the devices of ``floors``."""
        step, costs = self.context.step(candidate, layout), floors.costs(layout)
        forward_s = layout.prelude_s + floors.model.of(step).ends_s(costs[0], costs[-1])
        table, _, rank_s = floors.priced(layout, step)
        base = self._instance(candidate, {self._everywhere: table}, step, layout)
        read_bytes = float(sum(ChainMap(*self._reads(layout)).values()))
        return replace(
            base,
            forward_s=(forward_s,),
            limit_bytes=(self.rank_devices.tensor_bytes(floors.model),),
            read_bytes=read_bytes,
            ranks_s=(base.ranks_s[0] + rank_s,),
        )

    def _reads(self, layout: PricedLayout) -> list[dict[str, int]]:
        """Return the inputs and prelude values that each block of the model reads, in bytes; a stage keeps each once."""
        return [dict(layout.costs[k].prelude) for k in self.context.layouts.compact.class_of]

    def one_stage(self, candidate: Candidate, layout: PricedLayout, group: CostModel | None = None) -> PipelineInstance:
        """Return the instance of one rank without a pipeline, including what every step of it takes over the floors of its blocks.

        A step has parts that no single block's floor counts: gathers and reductions at both ends of the model, those of the last
        micro-batch, and sums in buckets. The more a block recomputes, the more of them it hides. So they are least where every block
        recomputes as much as it may, and what that step takes over its floors is a lower bound for any choice of recompute. Sums take as
        long as with the fastest bucket size.

        Args:
            layout: the layout, at the prices of the rank's devices.
            group: the cost model of one node group of a candidate with unequal shares; None: the rank is the slowest of all.
        """
        on = self._floors_on(group, may_offload=False) if group else self._of(self._everywhere, candidate)
        model, base = on.model, self._one_rank(candidate, layout, on)
        step, compact = self.context.step(candidate, layout), self.context.layouts.compact
        m, floors = base.num_micro_batches, base.floors[0].blocks
        slowest: list[Recompute] = []
        counted_s = m * base.forward_s[0] + base.first_s + base.ranks_s[0]
        for modes, floor, members in zip(self._blocks[False].modes, floors, compact.members, strict=True):
            seconds = [mode.backward_s for mode in floor.modes]
            place = seconds.index(max(seconds))
            slowest.append(modes[place])
            time_s = floor.forward_s + floor.modes[place].backward_s + floor.more_s
            counted_s += len(members) * (m * time_s + floor.gather_s + floor.once_s)
        blocks = tuple(layout.costs[k] for k in compact.class_of)
        stage = StageCost(blocks=blocks, recompute=tuple(slowest[k] for k in compact.class_of))
        sizes = self.context.buckets if model.sums_in_buckets([stage], step) else (step.bucket_bytes,)
        least_s = min(model.breakdown([stage], replace(step, bucket_bytes=size)).total_s for size in sizes)
        extra_s = max(least_s - counted_s, 0.0)
        return replace(base, first_s=base.first_s + extra_s)

    def _most_blocks(self, candidate: Candidate, layout: PricedLayout) -> float:
        """Return the most blocks of the largest group on a stage.

        Virtual stages on equal devices are cut as evenly as whole blocks allow.
        """
        if candidate.virtual_stages == 1 or self.rank_devices.is_mixed(candidate):
            return math.inf
        return self._blocks[False].most_blocks(layout, candidate.mesh.pp * candidate.virtual_stages)

    def _ends(self, candidate: Candidate) -> tuple[tuple[int, int], ...]:
        """Return the least and the largest number of blocks up to the end of each stage, if some block is pinned to a stage.

        A stage ends behind the blocks pinned to it and to earlier stages, and before those pinned to later stages.
        """
        pinned, blocks = self.context.stages.items(), len(self.context.layouts.compact.class_of)
        if not pinned:
            return ()
        num = candidate.mesh.pp * candidate.virtual_stages
        ends = []
        for s in range(num - 1):
            before, behind = ([i for i, stage in pinned if (stage > s) == is_later] for is_later in (False, True))
            ends.append((max(before, default=0) + 1, min(behind, default=blocks - 1)))
        return (*ends, (blocks, blocks))

    @property
    def has_several_groups(self) -> bool:
        """Whether the blocks between the first and the last one have different operators."""
        return len(self._groups) > 1

    # --- what stage cuts read of the same blocks

    @property
    def floors(self) -> BlockFloors:
        """The floors of blocks on the slowest device; only activations that pins put on the host are left out."""
        return self._floors_on(self.context.model, may_offload=False)

    def blocks_of(self, candidate: Candidate) -> BlockClasses:
        """Return which blocks of a candidate may form stages."""
        return self._blocks[candidate.offloads_activations]

    # --- devices

    def places(self, candidate: Candidate) -> tuple[Places, ...]:
        """Return for each pipeline rank the node groups that it lies on."""
        return (
            self.rank_devices.places(candidate)
            if self.rank_devices.is_mixed(candidate)
            else (self._everywhere,) * candidate.mesh.pp
        )

    def _of(self, places: Places, candidate: Candidate) -> BlockFloors:
        model, order = self.context.model.part(places), candidate.order
        # Which data ranks communicate depends on the order of node groups where a pipeline rank lies on several; elsewhere a rank holds
        # whole groups.
        if (
            order
            and self.rank_devices.is_mixed(candidate)
            and any(len(groups) > 1 for groups in self.places(candidate))
        ):
            model = self.context.model.in_order(order).part(frozenset(map(order.index, places)))
        return self._floors_on(model, may_offload=candidate.offloads_activations)

    def _floors_on(self, model: CostModel, *, may_offload: bool) -> BlockFloors:
        if (model, may_offload) not in self._floors:
            self._floors[model, may_offload] = BlockFloors(self._blocks[may_offload], model)
        return self._floors[model, may_offload]

    def _on(self, places: Places, layout: PricedLayout) -> PricedLayout:
        """Return a layout at the prices of the devices of these node groups."""
        return self.context.layouts.on_device(layout, self.context.model.part(places))

    def _instance(
        self, candidate: Candidate, tables: dict[Places, FloorTable], step: Step, layout: PricedLayout
    ) -> PipelineInstance:
        """Return the instance with floors of blocks by node groups, and with what any layout adds to stages and ranks.

        The number of tensors that a block sends is that of ``layout``, and of any other.
        """
        kinds = {places: i for i, places in enumerate(tables)}
        kind_of_rank = tuple(kinds[places] for places in self.places(candidate))
        pp, v = candidate.mesh.pp, candidate.virtual_stages
        models = [self.context.model.part(places) for places in tables]
        overheads = [model.device.overheads.of_actions(v) if pp > 1 else (0.0, 0.0) for model in models]
        there, back = _least([(len(cost.sends), len(cost.send_gradients)) for cost in layout.costs[:-1]] or [(0, 0)])
        return PipelineInstance(
            schedule=candidate.schedule,
            virtual_stages=v,
            num_micro_batches=candidate.num_micro_batches,
            runs=self._runs,
            groups=self._groups,
            floors=tuple(tables.values()),
            device_of_rank=kind_of_rank,
            limit_bytes=tuple(map(self.rank_devices.tensor_bytes, models)),
            forward_s=tuple(action_s + message_s * there for action_s, message_s in overheads),
            backward_s=tuple(action_s + message_s * back for action_s, message_s in overheads),
            ranks_s=tuple(models[kind].of(step).rank_once_s for kind in kind_of_rank),
        )

    # --- messages

    def _sent_s(self, candidate: Candidate, num_bytes: int) -> tuple[float, ...]:
        """Return the seconds of each pipeline rank's message of ``num_bytes`` to the next rank or back; the last sends to the first."""
        mesh, model = candidate.mesh, self.context.model.in_order(candidate.order)
        if not model.is_mixed:
            return (model.collectives.send_time_s(num_bytes, mesh),) * mesh.pp
        return tuple(model.collectives.send_time_s(num_bytes, mesh, rank) for rank in range(mesh.pp))

    def _more_s(
        self, candidate: Candidate, layout: PricedLayout, sends_s: Sequence[float], back_s: Sequence[float]
    ) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Return by how much the messages behind each kind of block are longer than the least ones; empty if they are equal."""
        sizes = [(cost.send_bytes, cost.send_gradient_bytes) for cost in layout.costs]
        if len(set(sizes[:-1])) <= 1:
            return ()
        of_kind = [(self._sent_s(candidate, there), self._sent_s(candidate, back)) for there, back in sizes]
        return tuple(
            tuple((max(there[r] - sends_s[r], 0.0), max(back[r] - back_s[r], 0.0)) for there, back in of_kind)
            for r in range(candidate.mesh.pp)
        )


def _least(there_and_back: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the least that a block sends to the next one, and receives back."""
    there, back = zip(*there_and_back, strict=True)
    return min(there), min(back)

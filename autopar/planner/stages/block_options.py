"""The prices of blocks for stage cuts: the seconds that a block takes and the bytes that it holds in each activation mode.

Where node groups differ, layouts are solved at the prices of the slowest device. Each stage is then priced on the devices of its pipeline
rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.model import BlockCost, CostModel, StageCost, Step
from autopar.cost.step.step_model import Neighbours
from autopar.graph.rewrites import Compact
from autopar.plan.plan import RECOMPUTES, Recompute
from autopar.planner.bounds.floors import BlockFloors, without_shared
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import PricedLayout
from autopar.planner.search import SearchContext
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.variants import origins
from autopar.planner.stages.recompute import (
    OFFLOADED,
    BlockOption,
    CutBlock,
    Mode,
    recompute_of,
    undominated,
    with_offloaded,
)
from autopar.planner.stages.stage_cut import CutBlocks


class BlockOptions:
    """The blocks of one model with their options; caches what candidates share.

    Args:
        context: the context of the search.
        floors: the floors of the model; their compact graph defines the classes of equal blocks.
    """

    def __init__(self, context: SearchContext, floors: BlockFloors) -> None:
        self.context, self.floors, self.class_of, self.model = context, floors, floors.blocks.class_of, floors.model
        self._host_costs: dict[BlockCost, BlockCost] = {}
        self._cut_blocks: dict[tuple[object, ...], CutBlocks] = {}

    def of_rank(self, layout: PricedLayout, step: Step, model: CostModel, *, may_offload: bool) -> CutBlocks:
        """Return the blocks as the devices of ``model`` run them; a block that is pinned to a mode has only this option.

        Args:
            layout: the layout with the prices of these devices.
            step: how the devices run it.
            model: the cost model of these devices.
            moves: whether blocks may keep on the host what they need; then only pinned blocks recompute selectively.
        """
        step_key = step.mesh, step.zero_stage, step.num_micro_batches, step.offload
        key = layout, model, step_key, may_offload
        if key not in self._cut_blocks:  # the options do not depend on the schedule
            self._cut_blocks[key] = CutBlocks(self._blocks(layout, step, model, may_offload=may_offload))
        return self._cut_blocks[key]

    def _blocks(self, layout: PricedLayout, step: Step, model: CostModel, *, may_offload: bool) -> list[CutBlock]:
        """Return the blocks in order; equal blocks with equal pins share one object."""
        by_key: dict[tuple[int, Recompute | None, bool], CutBlock] = {}
        blocks, neighbours = [], self._neighbours(layout) if model.of(step).data.sends_always else {}
        for index, (k, cost) in enumerate(zip(self.class_of, self.costs(layout), strict=True)):
            pinned = self.context.recompute.get(index)
            key = (layout.keys[k], pinned, cost.offloads)
            if key not in by_key:
                modes: tuple[Mode, ...] = (pinned,) if pinned else self.context.modes
                if may_offload and not cost.offloads:
                    modes = with_offloaded(modes) if not pinned or pinned == "none" else modes
                by_key[key] = self._block(len(by_key), cost, modes, step, model, neighbours.get(layout.keys[k], ()))
            blocks.append(by_key[key])
        return blocks

    def _neighbours(self, layout: PricedLayout) -> dict[int, list[Neighbours]]:
        """Return the blocks before and after the blocks of each key.

        They have the costs of floors, so that the time of a block never counts too much of its neighbours.
        """
        costs, neighbours = self.floors.costs(layout), dict[int, list[Neighbours]]()
        for k in range(len(costs)):
            neighbours.setdefault(layout.keys[k], []).extend(self.floors.neighbour_pairs(costs, k))
        return neighbours

    def costs(self, layout: PricedLayout) -> list[BlockCost]:
        """Return the cost of each block of the original graph."""
        costs = [layout.costs[k] for k in self.class_of]
        for index in self.context.offloaded:
            costs[index] = self._on_host(costs[index])
        return costs

    def _on_host(self, cost: BlockCost) -> BlockCost:
        """Return the cost of a block that keeps on the host what it needs.

        Equal blocks share one object, by which the cost model recognises equal stages.
        """
        if cost not in self._host_costs:
            self._host_costs[cost] = replace(cost, offloads=True)
        return self._host_costs[cost]

    def _block(
        self,
        key: int,
        cost: BlockCost,
        modes: tuple[Mode, ...],
        step: Step,
        model: CostModel,
        neighbours: Sequence[Neighbours],
    ) -> CutBlock:
        """Return a block with its options.

        Args:
            key: its key; equal for equal blocks.
            cost: its cost.
            modes: the activation modes that it may have.
            step: how the devices run it.
            model: the cost model of these devices.
            neighbours: the blocks that may stand next to it.
        """
        options, on = [], model.of(step)
        private_cost = without_shared(cost)
        adding_s = on.block_adding_s(private_cost)
        for mode in modes:
            recompute, mode_cost = recompute_of(mode), self._on_host(cost) if mode == OFFLOADED else cost
            time = on.block_time_s(cost, recompute=recompute, neighbours=neighbours)
            down_s = up_s = 0.0
            if moved_bytes := mode_cost.moved_bytes(recompute) if mode == OFFLOADED else 0:
                down_s = model.host.latency_s + moved_bytes / model.host.to_host_bytes_per_s
                up_s = model.host.latency_s + moved_bytes / model.host.to_device_bytes_per_s
            options.append(
                BlockOption(
                    mode=mode,
                    time_s=time.forward_s + time.backward_s + adding_s,
                    held_bytes=mode_cost.kept_bytes(recompute),
                    transient_bytes=mode_cost.passing_bytes(recompute) + moved_bytes,
                    forward_s=time.forward_s,
                    down_s=down_s,
                    up_s=up_s,
                )
            )
        once_s = on.block_once_s(private_cost)
        return CutBlock(
            key=key,
            options=undominated(options),
            static_bytes=on.block_bytes(cost)[0],
            once_s=once_s,
            more_s=once_s / step.num_micro_batches if self.model.is_mixed and step.mesh.pp > 1 else 0.0,
        )

    def stages(
        self, stops: Sequence[int], modes: Sequence[Mode], layout: PricedLayout, pp: int
    ) -> tuple[StageCost, ...]:
        """Return the stages that end at some blocks, as the devices of their ranks run them.

        Args:
            stops: the end of each stage.
            modes: the activation mode of each block.
            layout: the layout.
            pp: the number of pipeline ranks.
        """
        costs = [self.costs(rank_layout) for rank_layout in layout.ranks or (layout,)]
        if OFFLOADED in modes:
            costs = [
                [
                    self._on_host(cost) if mode == OFFLOADED else cost
                    for cost, mode in zip(rank_costs, modes, strict=True)
                ]
                for rank_costs in costs
            ]
        recompute = [recompute_of(mode) for mode in modes]
        return tuple(
            StageCost(blocks=tuple(costs[s % pp % len(costs)][start:stop]), recompute=tuple(recompute[start:stop]))
            for s, (start, stop) in enumerate(zip((0, *stops), stops, strict=False))
        )

    def fastest_modes(self) -> tuple[Recompute, ...]:
        """Return the quickest allowed mode of each block."""
        quickest = min(self.context.modes, key=RECOMPUTES.index)
        return tuple(self.context.recompute.get(index, quickest) for index in range(len(self.class_of)))


class RankDevices:
    """Layouts and limits of candidates on the devices of each pipeline rank.

    Args:
        layouts: the layouts of the model on all node groups.
        model: the cost model of all node groups.
    """

    def __init__(self, layouts: Layouts, model: CostModel) -> None:
        self.layouts, self.model = layouts, model
        self.compact: Compact = layouts.compact
        self._origins: dict[tuple[object, ...], tuple[frozenset[int], ...]] = {}

    def is_mixed(self, candidate: Candidate) -> bool:
        """Return whether the pipeline ranks of a candidate differ; without a pipeline the slowest device determines all ranks."""
        return self.model.is_mixed and candidate.mesh.pp > 1

    def places(self, candidate: Candidate) -> tuple[frozenset[int], ...]:
        """Return for each pipeline rank the node groups on which it lies, by their positions in the given cluster."""
        key = (candidate.order, candidate.mesh.pp, candidate.mesh.world_size)
        if key not in self._origins:
            self._origins[key] = origins(candidate, self.model.cluster)
        return self._origins[key]

    def fitting_bytes(self, part: CostModel) -> int:
        """Return the largest predicted peak that fits on the devices of some node groups.

        The uncertainty of the prediction is the widest interval of all devices.
        """
        return math.floor(part.memory_limit_bytes / self.model.memory_spread)

    def tensor_bytes(self, part: CostModel) -> float:
        """Return the bytes of tensors in the largest peak that fits, without what the device reserves and loses to fragmentation."""
        return (self.fitting_bytes(part) - part.device.reserved_bytes) / (1 + part.device.fragmentation)

    def priced(self, candidate: Candidate, layout: PricedLayout) -> PricedLayout:
        """Return a layout with its prices on each pipeline rank; the same layout if it has them or if all ranks have the same devices."""
        if layout.ranks or not self.is_mixed(candidate):
            return layout
        places = self.places(candidate)
        return replace(layout, ranks=tuple(self.layouts.on_device(layout, self.model.part(place)) for place in places))

    def step(self, step: Step, layout: PricedLayout) -> Step:
        """Return how a candidate runs, with the seconds of the prelude on each rank."""
        return replace(step, preludes_s=tuple(on_rank.prelude_s for on_rank in layout.ranks)) if layout.ranks else step

    def least_s(self, layout: PricedLayout) -> float:
        """Return the seconds of one micro-batch, forward and backward, with each block on the device that runs it fastest."""
        model = self.model
        groups = range(len(model.cluster.groups)) if model.is_mixed else ()
        on_groups = [self.layouts.on_device(layout, model.part(frozenset({i}))) for i in groups] or [layout]
        times = [[cost.forward_s + cost.backward_s for cost in device_times.costs] for device_times in on_groups]
        members = zip(*times, self.compact.members, strict=True)
        return float(sum(min(device_times) * len(blocks) for *device_times, blocks in members))

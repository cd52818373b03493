"""The blocks of a layout as stages are cut by them: in each activation mode the seconds that they take and the bytes that they hold.

Where node groups differ, layouts are solved at the prices of the slowest device; each stage is then priced on the devices of its
pipeline rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autopar.cost.model import BlockCost, CostModel, StageCost, Step
from autopar.cost.step.step_model import Beside
from autopar.graph.rewrites import Compact
from autopar.plan.plan import RECOMPUTES, Recompute
from autopar.planner.bounds.floors import BlockFloors, without_shared
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import PricedLayout
from autopar.planner.search import SearchContext
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.variants import origins
from autopar.planner.stages.recompute import MOVED, BlockOption, CutBlock, Mode, none_if_moved, undominated, with_moved
from autopar.planner.stages.stage_cut import CutBlocks


class BlockOptions:
    """The blocks of one model; remembers what candidates share.

    Args:
        context: of the search.
        floors: of the model, whose compact graph they are for.
    """

    def __init__(self, context: SearchContext, floors: BlockFloors) -> None:
        self.context, self.floors, self.class_of, self.model = context, floors, floors.blocks.class_of, floors.model
        self._on_hosts: dict[BlockCost, BlockCost] = {}
        self._made: dict[tuple[object, ...], CutBlocks] = {}

    def of_rank(self, layout: PricedLayout, step: Step, model: CostModel, *, moves: bool) -> CutBlocks:
        """The blocks as the devices of ``model`` run them; blocks pinned to a mode have one.

        Args:
            layout: with the prices of these devices.
            step: how they run.
            moves: blocks may keep on the host what they need, and none recomputes selectively where it is not pinned.
        """
        axes = step.mesh, step.zero_stage, step.num_micro_batches, step.offload
        key = layout, model, axes, moves
        if key not in self._made:  # asked again for other schedules
            self._made[key] = CutBlocks(self._blocks(layout, step, model, moves=moves))
        return self._made[key]

    def _blocks(self, layout: PricedLayout, step: Step, model: CostModel, *, moves: bool) -> list[CutBlock]:
        made: dict[tuple[int, Recompute | None, bool], CutBlock] = {}
        blocks, beside = [], self._beside(layout) if model.of(step).data.sends_always else {}
        for index, (k, cost) in enumerate(zip(self.class_of, self.costs(layout), strict=True)):
            pinned = self.context.recompute.get(index)
            key = (layout.keys[k], pinned, cost.offloads)
            if key not in made:
                modes: tuple[Mode, ...] = (pinned,) if pinned else self.context.modes
                if moves and not cost.offloads:
                    modes = with_moved(modes) if not pinned or pinned == "none" else modes
                made[key] = self._block(len(made), cost, modes, step, model, beside.get(layout.keys[k], ()))
            blocks.append(made[key])
        return blocks

    def _beside(self, layout: PricedLayout) -> dict[int, list[Beside]]:
        """The blocks that stand beside those of each key: what times say of them is never too much."""
        costs, found = self.floors.costs(layout), dict[int, list[Beside]]()
        for k in range(len(costs)):
            found.setdefault(layout.keys[k], []).extend(self.floors.beside(costs, k))
        return found

    def costs(self, layout: PricedLayout) -> list[BlockCost]:
        """Of each block of the original graph."""
        costs = [layout.costs[k] for k in self.class_of]
        for index in self.context.moved:
            costs[index] = self._on_host(costs[index])
        return costs

    def _on_host(self, cost: BlockCost) -> BlockCost:
        """The block with what it keeps on the host; the same object for equal blocks, by which stages are known again."""
        if cost not in self._on_hosts:
            self._on_hosts[cost] = replace(cost, offloads=True)
        return self._on_hosts[cost]

    def _block(
        self, key: int, cost: BlockCost, modes: tuple[Mode, ...], step: Step, model: CostModel, beside: Sequence[Beside]
    ) -> CutBlock:
        options = []
        private = without_shared(cost)
        adding_s = model.of(step).block_adding_s(private)
        for mode in modes:
            again, own = none_if_moved(mode), self._on_host(cost) if mode == MOVED else cost
            time = model.of(step).block_time_s(cost, recompute=again, beside=beside)
            down_s = up_s = 0.0
            if size := own.moved_bytes(again) if mode == MOVED else 0:
                down_s = model.host.latency_s + size / model.host.to_host_bytes_per_s
                up_s = model.host.latency_s + size / model.host.to_device_bytes_per_s
            options.append(
                BlockOption(
                    mode=mode,
                    time_s=time.forward_s + time.backward_s + adding_s,
                    held_bytes=own.kept_bytes(again),
                    transient_bytes=own.passing_bytes(again) + size,
                    forward_s=time.forward_s,
                    down_s=down_s,
                    up_s=up_s,
                )
            )
        once_s = model.of(step).block_once_s(private)
        return CutBlock(
            key=key,
            options=undominated(options),
            static_bytes=model.of(step).block_static_bytes(cost),
            once_s=once_s,
            more_s=once_s / step.num_micro_batches if self.model.is_mixed and step.mesh.pp > 1 else 0.0,
        )

    def stages(
        self, stops: Sequence[int], modes: Sequence[Mode], layout: PricedLayout, pp: int
    ) -> tuple[StageCost, ...]:
        """Stages that end at these blocks, as the devices of their ranks run them."""
        costs = [self.costs(own) for own in layout.ranks or (layout,)]
        if MOVED in modes:
            costs = [
                [self._on_host(cost) if mode == MOVED else cost for cost, mode in zip(own, modes, strict=True)]
                for own in costs
            ]
        again = [none_if_moved(mode) for mode in modes]
        return tuple(
            StageCost(blocks=tuple(costs[s % pp % len(costs)][start:stop]), recompute=tuple(again[start:stop]))
            for s, (start, stop) in enumerate(zip((0, *stops), stops, strict=False))
        )

    def fastest_modes(self) -> tuple[Recompute, ...]:
        """Of each block the one that takes the least time."""
        free = min(self.context.modes, key=RECOMPUTES.index)
        return tuple(self.context.recompute.get(index, free) for index in range(len(self.class_of)))

    def least_bytes(self, candidate: Candidate, layout: PricedLayout, step: Step) -> float:
        """Tensors of the fullest rank at least: the average rank, or a single block."""
        blocks = self.of_rank(layout, step, self.model, moves=candidate.moves).blocks
        own = [b.static_bytes + min(o.held_bytes for o in b.options) for b in blocks]
        alone = (b.static_bytes + min(o.held_bytes + o.transient_bytes for o in b.options) for b in blocks)
        return max(sum(own) / candidate.mesh.pp, *alone)


class Placed:
    """Candidates as the devices of each pipeline rank run them.

    Args:
        layouts: of the model on all node groups.
        model: of all node groups.
    """

    def __init__(self, layouts: Layouts, model: CostModel) -> None:
        self.layouts, self.model = layouts, model
        self.compact: Compact = layouts.compact
        self._origins: dict[tuple[object, ...], tuple[frozenset[int], ...]] = {}

    def is_mixed(self, candidate: Candidate) -> bool:
        """Whether the pipeline ranks of a candidate differ; without a pipeline the slowest device is that of all."""
        return self.model.is_mixed and candidate.mesh.pp > 1

    def places(self, candidate: Candidate) -> tuple[frozenset[int], ...]:
        """For each pipeline rank the node groups that it lies on, by position in the cluster as given."""
        key = (candidate.order, candidate.mesh.pp, candidate.mesh.world_size)
        if key not in self._origins:
            self._origins[key] = origins(candidate, self.model.cluster)
        return self._origins[key]

    def fitting_bytes(self, part: CostModel) -> int:
        """The largest predicted peak that fits on the devices of some node groups, by the widest interval of all devices."""
        return math.floor(part.memory_limit_bytes / self.model.memory_spread)

    def tensor_bytes(self, part: CostModel) -> float:
        """Likewise for tensors, what the device reserves left out."""
        return (self.fitting_bytes(part) - part.device.reserved_bytes) / (1 + part.device.fragmentation)

    def option(self, candidate: Candidate, option: PricedLayout) -> PricedLayout:
        """A layout with its prices on each pipeline rank; as it is where it has them, or where ranks are alike."""
        if option.ranks or not self.is_mixed(candidate):
            return option
        places = self.places(candidate)
        return replace(option, ranks=tuple(self.layouts.on_device(option, self.model.part(own)) for own in places))

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

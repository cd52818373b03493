"""Prices of the blocks of a layout for its stage cuts: in each mode of recompute the time that they take and the bytes that they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost.model import BlockCost, CostModel, Step
from autopar.cost.step.step_model import Beside
from autopar.plan import Recompute
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.activation_modes import (
    MOVED,
    BlockOption,
    Way,
    Ways,
    none_if_moved,
    useful,
    ways_of,
    with_moved,
)
from autopar.planner.stages.choices import CutShape
from autopar.planner.stages.per_device import Placed
from autopar.planner.stages.stage_cut import CutBlock, StageCutter

MAX_KEPT = 1_000_000
"""Choices of recompute of all cutters that are kept; past it they are made anew."""


class CutBlocks:
    """The blocks of one model as stages are cut by them; remembers what candidates share.

    Args:
        rows: of the model, whose compact graph and modes of recompute they are for.
        placed: what differs where ranks have different devices.
        space_modes: modes of recompute that the space allows.
        recompute, pinned: pinned modes and stages by block of the original graph.
        moved: blocks of it whose activations live on the host.
    """

    def __init__(
        self,
        rows: RowMaker,
        placed: Placed,
        *,
        space_modes: tuple[Recompute, ...],
        recompute: Mapping[int, Recompute],
        pinned: Mapping[int, int],
        moved: frozenset[int],
    ) -> None:
        self.rows, self.placed = rows, placed
        self.space_modes, self.recompute, self.pinned = space_modes, recompute, pinned
        self.class_of, self.model = rows.class_of, rows.model
        self.moved = moved
        self._moved: dict[int, tuple[BlockCost, BlockCost]] = {}
        self._shapes: dict[tuple[tuple[int, ...], tuple[Ways, ...]], CutShape] = {}
        self._cut: dict[tuple[object, ...], list[StageCutter]] = {}

    def cutters(
        self, candidate: Candidate, option: PricedLayout, step: Step, modes: tuple[Recompute, ...] | None = None
    ) -> list[StageCutter]:
        """For each pipeline rank the blocks as its devices run them; the same one for equal devices.

        Args:
            modes: of recompute; None: all of the space.
        """
        key = (
            id(option), candidate.order, step.mesh, step.zero_stage, step.num_micro_batches, step.offload,
            candidate.moves, modes,
        )  # fmt: skip
        found = self._cut.get(key)
        if found is None:
            parts = self.placed.ordered(candidate).parts(candidate.mesh)
            made: dict[int, StageCutter] = {}
            for rank, part in enumerate(parts):
                if id(part) not in made:
                    blocks = self.blocks(option.of_rank(rank), step, part, moves=candidate.moves, space_modes=modes)
                    made[id(part)] = self.cutter(blocks)
            found = [made[id(part)] for part in parts]
            if sum(len(own[0].time) for own in self._cut.values()) > MAX_KEPT:
                self._cut.clear()
            self._cut[key] = found  # asked again for other schedules
        return found

    def blocks(
        self, option: PricedLayout, step: Step, model: CostModel, *, moves: bool = False,
        space_modes: tuple[Recompute, ...] | None = None,
    ) -> list[CutBlock]:  # fmt: skip
        """Prices of the blocks for the cut; blocks pinned to a mode have one option.

        Args:
            moves: blocks may keep on the host what they need, and none recomputes selectively where it is not pinned.
            space_modes: of all others; None: all of the space.
        """
        made: dict[tuple[int, Recompute | None, bool], CutBlock] = {}
        blocks, beside = [], self._beside(option) if model.of(step).data.sends_always else {}
        for index, (k, cost) in enumerate(zip(self.class_of, self._costs(option), strict=True)):
            pinned = self.recompute.get(index)
            key = (option.keys[k], pinned, cost.offloads)
            if key not in made:
                modes: tuple[Way, ...] = (pinned,) if pinned else space_modes or self.space_modes
                if moves and not cost.offloads:
                    modes = with_moved(modes) if not pinned or pinned == "none" else modes
                made[key] = self._cut_block(len(made), cost, modes, step, model, beside.get(option.keys[k], ()))
            blocks.append(made[key])
        return blocks

    def _beside(self, option: PricedLayout) -> dict[int, list[Beside]]:
        """The blocks that stand beside those of each key: what times say of them is never too much."""
        costs, found = self.rows.private_costs(option), dict[int, list[Beside]]()
        for k in range(len(costs)):
            found.setdefault(option.keys[k], []).extend(self.rows.beside(costs, k))
        return found

    def _costs(self, option: PricedLayout) -> list[BlockCost]:
        """Of each block of the original graph."""
        costs = [option.costs[k] for k in self.class_of]
        for index in self.moved:
            costs[index] = self._on_host(costs[index])
        return costs

    def _on_host(self, cost: BlockCost) -> BlockCost:
        """The block with what it keeps on the host."""
        if id(cost) not in self._moved:  # the block is kept too, so that its id stays its own
            self._moved[id(cost)] = (cost, replace(cost, offloads=True))
        return self._moved[id(cost)][1]

    def cutter(self, blocks: Sequence[CutBlock]) -> StageCutter:
        """What cuts these blocks."""
        counts = Counter(b.key for b in blocks)
        one_of = {b.key: b.options for b in blocks}
        # nothing is traded among blocks of which there is one: so that more prices have the same shape
        ways = {k: ways_of(own) if counts[k] > 1 else Ways(len(own)) for k, own in one_of.items()}
        key = (tuple(b.key for b in blocks), tuple(ways.values()))
        if key not in self._shapes:
            self._shapes[key] = CutShape(key[0], ways, fixed=self.pinned)
        return StageCutter(blocks, shape=self._shapes[key])

    def _cut_block(
        self, key: int, cost: BlockCost, modes: tuple[Way, ...], step: Step, model: CostModel, beside: Sequence[Beside]
    ) -> CutBlock:
        options = []
        private = self.rows.without_shared(cost)
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
            options=useful(options),
            static_bytes=model.of(step).block_static_bytes(cost),
            once_s=once_s,
            more_s=once_s / step.num_micro_batches if self.model.is_mixed and step.mesh.pp > 1 else 0.0,
        )

"""What the blocks of a candidate take and hold at the least: divided perfectly, or in a priced layout.

What the data axes add to each micro-batch follows from the parameters of a block, which need no pricing: no layout on ``tp`` has less
than one part of each on a rank. Bytes that a collective moves beside work are hidden but for the device's interference (see
``DataParallel``). Without a pipeline what runs beside a block is known from those before and after it: X seconds of collectives
beside work of T seconds, forward and backward, take X - (1 - i) min(X, T) at the least, however they are divided. In a pipeline
a stage's gathers may run beside any block of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.model import BlockCost, CostModel, Step
from autopar.cost.step.step_model import Beside
from autopar.plan.mesh import EXPERT_AXIS
from autopar.plan.plan import Recompute
from autopar.planner.bounds.instance import BlockFloor, FloorTable, ModeFloor, are_inside, at_both_ends, least_sums_s
from autopar.planner.layouts.layout import LayoutKey, PricedLayout
from autopar.planner.stages.cut_problem import EqualBlocks
from autopar.rules.local_graphs import AXIS as EXPERTS_OVER_DATA


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """What the data axes add to the work of a block for one micro-batch.

    Attributes:
        always_s: whatever the work is.
        moved_s: of collectives that run beside it.
        is_beside: no other block hides them.
        interference: of the device.
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


class BlockFloors:
    """The floors of one model's blocks on one kind of device; remembers what candidates share.

    Args:
        blocks: of the model, by kind.
        model: prices of the device.
    """

    def __init__(self, blocks: EqualBlocks, model: CostModel) -> None:
        self.blocks, self.model = blocks, model
        ends = [-1, *blocks.class_of, -1]
        self.neighbours: list[set[tuple[int, int]]] = [set() for _ in blocks.counts]
        """Of each block of the compact graph those before and after the blocks that it stands for; -1: there is none."""
        for before, k, after in zip(ends, blocks.class_of, ends[2:], strict=False):
            self.neighbours[k].add((before, after))
        self._costs: dict[PricedLayout, list[BlockCost]] = {}
        self._parts: dict[tuple[tuple[ParameterCost, ...], int], tuple[ParameterCost, ...]] = {}
        self._ideal: dict[tuple[LayoutKey, PricedLayout], list[list[tuple[float, float, float]]]] = {}
        self._tables: dict[tuple[object, ...], FloorTable] = {}
        self._added: dict[tuple[object, ...], tuple[list[Added], list[BlockCost]]] = {}
        self._priced: dict[tuple[object, ...], tuple[FloorTable, float]] = {}

    # --- divided perfectly

    def perfect_split(self, unsplit: PricedLayout, step: Step, block_s: tuple[float, ...] = ()) -> FloorTable:
        """As if ``cp`` and ``tp`` divided everything and sent nothing but tokens to experts.

        Args:
            unsplit: the layout of the same micro-batch with neither axis.
            block_s: of each block what it takes in a typing; empty: in any.
        """
        key = (unsplit, *_kind(step), block_s)
        if key not in self._tables:
            tp = step.mesh.tp
            ideal = self._ideal_work(replace(unsplit.key, cp=step.mesh.cp, tp=tp), unsplit)
            added, parts = self._added_by(unsplit, step)
            self._tables[key] = FloorTable(
                blocks=tuple(
                    self._split_floor(cost, parts[k], ideal[k], added[k], step, tp, block_s[k] if block_s else 0.0)
                    for k, cost in enumerate(self.costs(unsplit))
                )
            )
        return self._tables[key]

    def _split_floor(
        self, cost: BlockCost, part: BlockCost, ideal: list[tuple[float, float, float]], added: Added,
        step: Step, tp: int, typed_s: float,
    ) -> BlockFloor:  # fmt: skip
        """Of a block, from seconds of work (forward first), bytes kept and in passing of each mode; ``typed_s``: of both passes at least."""
        (forward_s, work_s, _), *modes = ideal
        return BlockFloor(
            forward_s=forward_s,
            modes=tuple(
                ModeFloor(
                    backward_s=added.least_s(work_s + again_s) - forward_s, kept_bytes=kept, passing_bytes=passing
                )
                for again_s, kept, passing in modes
            ),
            more_s=added.least_s(max(work_s, typed_s)) - added.least_s(work_s),
            once_s=self.model.of(step).block_once_s(part),
            static_bytes=self.model.of(step).block_static_bytes(cost) / tp,
            stepped_bytes=self.model.of(step).block_stepped_bytes(cost) / tp,
        )

    def _ideal_work(self, key: LayoutKey, unsplit: PricedLayout) -> list[list[tuple[float, float, float]]]:
        """Of each block: seconds of a forward, of both passes, and a zero; then of each mode what recompute adds, keeps, and has in passing."""
        if (key, unsplit) not in self._ideal:
            costs = zip(self.costs(unsplit), self.blocks.modes, strict=True)
            self._ideal[key, unsplit] = [self._ideal_modes(cost, modes, key) for cost, modes in costs]
        return self._ideal[key, unsplit]

    def _travels_s(self, cost: BlockCost, key: LayoutKey) -> tuple[float, float, float]:
        """Seconds in which tokens travel to experts of other data ranks and back: forward, backward, and of a whole recompute.

        However the mixture is laid out on ``cp`` and ``tp``, each rank sends a part of the tokens at the least, to the data ranks
        alone or to those of ``tp`` too.
        """
        sent = [message for message in cost.messages if message.axis == EXPERTS_OVER_DATA]
        collectives = self.model.collectives
        if not sent or collectives.is_measured:  # a table of times need not grow with bytes
            return 0.0, 0.0, 0.0
        mesh, call_s = key.mesh(self.model.cluster.world_size), self.model.device.overheads.collective_s
        ways = [EXPERTS_OVER_DATA, EXPERT_AXIS][: 1 + (key.tp > 1)]
        seconds = [
            call_s + min(collectives.time_s(m.kind, m.num_bytes // (key.cp * key.tp), mesh, (axis,)) for axis in ways)
            for m in sent
        ]
        forward_s = sum(own for own, m in zip(seconds, sent, strict=True) if not m.backward)
        again_s = sum(own for own, m in zip(seconds, sent, strict=True) if m.repeated and not m.backward)
        return forward_s, sum(seconds) - forward_s, again_s

    def _ideal_modes(
        self, cost: BlockCost, modes: tuple[Recompute, ...], key: LayoutKey
    ) -> list[tuple[float, float, float]]:
        ranks, (there_s, back_s, again_s) = key.cp * key.tp, self._travels_s(cost, key)
        # a measured part may be quicker than its share of the whole (caches): then nothing is known before it is priced
        share = 0.0 if ranks > 1 and self.model.measured is not None else 1.0 / ranks
        device = self.model.device
        byte_s = bool(share) / (device.memory_bandwidth_bytes_per_s * device.kernel_fraction)
        forward_s = cost.forward_s * share
        # without other axes this is the layout; else what is made again may be other operators there
        kept = [(cost.kept_bytes(mode) if ranks == 1 else _least_kept(cost, mode)) / ranks for mode in modes]
        seconds = {"none": 0.0, "selective": 0.0, "full": forward_s + again_s}
        if "selective" in modes:
            # what is made again is written again, whichever layout says what that is
            written_s = byte_s * (max(kept) - kept[modes.index("selective")])
            seconds["selective"] = cost.remade.time_s if ranks == 1 else written_s
        # a layout may need less in passing than its share of the whole: but for what backward needs, kept or made again
        needed = cost.kept_bytes("none") / ranks
        passing = [_least_passing(cost, m) if ranks == 1 else needed - own for m, own in zip(modes, kept, strict=True)]
        work_s = (cost.forward_s + cost.backward_s) * share
        found = [(forward_s + there_s, work_s + there_s + back_s, 0.0)]
        return found + [(seconds[m], own, pass_) for m, own, pass_ in zip(modes, kept, passing, strict=True)]

    def _added_by(self, unsplit: PricedLayout, step: Step) -> tuple[list[Added], list[BlockCost]]:
        """What the data axes add to each block with one part of its parameters on ``tp``, and these blocks."""
        key = (unsplit, *_kind(step))
        if key not in self._added:
            tp = step.mesh.tp
            parts = [replace(cost, parameters=self._part(cost.parameters, tp)) for cost in self.costs(unsplit)]
            self._added[key] = [self._added_to(parts, k, step) for k in range(len(parts))], parts
        return self._added[key]

    def _added_to(self, costs: Sequence[BlockCost], k: int, step: Step) -> Added:
        data, unit = self.model.of(step).data, self.model.of(step).unit(costs[k])
        passes = 1 if data.is_pipelined else 2
        moved_s = unit.gather_s * data.gathers_always  # in a pipeline of the backward alone
        if not data.is_pipelined and data.sends_always:
            moved_s = min(self._beside_s(costs, before, after, step) for before, after in self.neighbours[k])
        if self.model.collectives.is_measured:  # a table of times need not grow with bytes
            moved_s = 0.0
        always_s = passes * unit.hooks_s + self.model.of(step).block_adding_s(costs[k])
        return Added(
            always_s=always_s, moved_s=moved_s, is_beside=not data.is_pipelined,
            interference=self.model.device.interference,
        )  # fmt: skip

    def _beside_s(self, costs: Sequence[BlockCost], before: int, after: int, step: Step) -> float:
        """Seconds of collectives beside a block between these: the next one's gather and reduction, the last one's gather."""
        data, found = self.model.of(step).data, 0.0
        if before >= 0:
            found += data.gathers_always * self.model.of(step).unit(costs[before]).gather_s
        if after >= 0:
            unit = self.model.of(step).unit(costs[after])
            found += data.gathers_always * unit.gather_s + data.reduces_always * unit.reduce_s
        return found

    def _part(self, parameters: tuple[ParameterCost, ...], tp: int) -> tuple[ParameterCost, ...]:
        """The parameters that one rank of ``tp`` has at the least."""
        if tp == 1:
            return parameters
        if (parameters, tp) not in self._parts:
            self._parts[parameters, tp] = tuple(
                replace(p, shape=(p.numel // tp,)) if p.shape else p for p in parameters
            )
        return self._parts[parameters, tp]

    # --- a priced layout

    def priced(self, layout: PricedLayout, step: Step) -> tuple[FloorTable, float]:
        """Of a layout whose blocks are priced, with sums of gradients; and what a stage's first gather takes longer, as no forward is beside it."""
        key = (layout, *_kind(step))
        if key not in self._priced:
            shared = at_both_ends(layout.costs) if step.mesh.pp > 1 else ()
            costs = [*self.costs(layout)]
            if shared and not are_inside(
                layout.costs, shared
            ):  # the rank of the last block has no other that brings these
                costs[-1] = layout.costs[-1]
            found, first_s = self._priced_blocks(layout, costs, step)
            more_s = self._sums_s(layout, costs, [floor.once_s for floor in found], step)
            table = FloorTable(
                blocks=tuple(
                    replace(floor, once_s=floor.once_s + own_s) if own_s else floor
                    for floor, own_s in zip(found, more_s, strict=True)
                )
            )
            self._priced[key] = table, first_s
        return self._priced[key]

    def _sums_s(
        self, layout: PricedLayout, costs: Sequence[BlockCost], once_s: Sequence[float], step: Step
    ) -> list[float]:
        """What sums of gradients add once a step to each block, none of whose terms is negative then."""
        counts = self.blocks.counts
        others = sum(counts) - sum(counts[k] for k in self.blocks.largest(layout)) > 2
        found = least_sums_s(self.model, costs, counts, step, others=others)
        if any(own_s + more_s < 0 for own_s, more_s in zip(once_s, found, strict=True)):
            return least_sums_s(self.model, costs, counts, step, others=True)
        return found

    def _priced_blocks(
        self, layout: PricedLayout, costs: Sequence[BlockCost], step: Step
    ) -> tuple[list[BlockFloor], float]:
        longest_s = max(cost.forward_s + cost.communication_forward_s for cost in costs)
        found, first_s = [], float("inf")
        matters = self.model.of(step).data.sends_always
        for k, cost in enumerate(costs):
            pairs = self.beside(costs, k) if matters else []
            gather_s = self.model.of(step).block_gather_s(cost)
            hidden_s = (1 - self.model.device.interference) * min(gather_s, longest_s)
            first_s = min(first_s, hidden_s)
            found.append(self._priced_floor(cost, step, self.blocks.modes[k], gather_s - hidden_s, pairs))
        return found, first_s

    def _priced_floor(
        self, cost: BlockCost, step: Step, modes: Sequence[Recompute], gather_s: float, beside: Sequence[Beside]
    ) -> BlockFloor:
        model = self.model
        times = [model.of(step).block_time_s(cost, recompute=mode, beside=beside) for mode in modes]
        passing = [model.of(step).block_passing_bytes(cost, recompute=mode, beside=beside) for mode in modes]
        forward_s, adding_s = min(time.forward_s for time in times), model.of(step).block_adding_s(cost)
        return BlockFloor(
            forward_s=forward_s,
            modes=tuple(
                ModeFloor(
                    backward_s=time.forward_s + time.backward_s + adding_s - forward_s,
                    kept_bytes=cost.kept_bytes(mode), passing_bytes=own,
                )
                for time, mode, own in zip(times, modes, passing, strict=True)
            ),
            gather_s=gather_s,
            once_s=model.of(step).block_once_s(cost),
            static_bytes=model.of(step).block_static_bytes(cost),
            stepped_bytes=model.of(step).block_stepped_bytes(cost),
        )  # fmt: skip

    def beside(self, costs: Sequence[BlockCost], k: int) -> list[Beside]:
        """The blocks before and after those that block ``k`` of the compact graph stands for."""
        return [(None if i < 0 else costs[i], None if j < 0 else costs[j]) for i, j in sorted(self.neighbours[k])]

    # --- costs

    def costs(self, layout: PricedLayout) -> list[BlockCost]:
        """Blocks without parameters that earlier ones have too; nothing kept where that is, or may be, on the host."""
        if layout not in self._costs:
            found = []
            for k, cost in enumerate(layout.costs):
                if self.blocks.is_moved[k] or self.blocks.moves:
                    cost = replace(cost, saved_bytes=0, input_bytes=0, saved_input_bytes=0)
                found.append(without_shared(cost) if k else cost)
            self._costs[layout] = found
        return self._costs[layout]


def without_shared(cost: BlockCost) -> BlockCost:
    """A block without parameters that others read too: a rank that holds several of those has them once."""
    own = tuple(p for p in cost.parameters if not p.shared)
    return cost if len(own) == len(cost.parameters) else replace(cost, parameters=own)


def _least_kept(cost: BlockCost, mode: Recompute) -> int:
    """Bytes that a block keeps at least in any layout, over its ranks: what is made again may be other operators there."""
    return cost.remade.least_bytes if mode == "selective" else cost.kept_bytes(mode)


def _least_passing(cost: BlockCost, mode: Recompute) -> int:
    return 0 if mode == "selective" else cost.passing_bytes(mode)


def _kind(step: Step) -> tuple[object, ...]:
    """What of a step its floors depend on, whatever the schedule."""
    return step.mesh, step.zero_stage, step.num_micro_batches, step.adds_gradients, step.offload

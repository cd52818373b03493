"""What blocks cost at least: shared by nobody, divided by everybody, in layouts that are not priced yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.model import BlockCost, CostModel, Step
from autopar.graph.compact import Compact
from autopar.mesh import Mesh
from autopar.plan import Recompute
from autopar.planner.bounds.bound_rows import BlockPrice, least_and_most_done
from autopar.planner.bounds.flow import least_flow_s
from autopar.planner.bounds.lines import again_prices
from autopar.planner.layouts.types import PricedLayout, TypedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.equal_blocks import EqualBlocks


class LeastPrices(EqualBlocks):
    """Blocks of one model on one cluster.

    Args:
        compact, modes, pinned, is_pinned, every: as for :class:`EqualBlocks`.
        model: the cost model.
        limit_bytes: of a device, reserves included.
        moved: blocks of the original graph whose activations live on the host.
    """

    def __init__(
        self,
        compact: Compact,
        model: CostModel,
        *,
        modes: Sequence[Recompute],
        pinned: Mapping[int, Recompute],
        limit_bytes: int,
        is_pinned: bool = False,
        moved: frozenset[int] = frozenset(),
        every: int = 0,
    ) -> None:
        super().__init__(compact, modes=modes, pinned=pinned, is_pinned=is_pinned, every=every)
        self.model = model
        device = model.device
        self.limit_bytes = (limit_bytes - device.reserved_bytes) / (1 + device.fragmentation)
        self.is_moved = [any(i in moved for i in members) for members in compact.members]
        self._lean: dict[int, tuple[BlockCost, BlockCost]] = {}
        self._private: dict[int, tuple[BlockCost, BlockCost]] = {}
        self._ideal: dict[tuple[int, tuple[Recompute, ...], int], tuple[BlockCost, dict[str, float]]] = {}
        self._held: dict[int, tuple[PricedLayout, float]] = {}  # the layout is kept too, so that its id stays its own
        self._prices: dict[tuple[object, ...], tuple[PricedLayout, list[BlockPrice], list[float]]] = {}  # likewise
        self._counted: dict[tuple[int, bool], tuple[PricedLayout, list[BlockCost], tuple[ParameterCost, ...]]] = {}

    def private_costs(self, option: PricedLayout, *, is_lean: bool = True) -> list[BlockCost]:
        costs = self._lean_costs(option) if is_lean else option.costs
        return [costs[0], *(self.without_shared(cost) for cost in costs[1:])]

    def _lean_costs(self, option: PricedLayout) -> list[BlockCost]:
        """As if blocks kept nothing where what some of their class keep lives on the host."""
        found = []
        for cost, moved in zip(option.costs, self.is_moved, strict=True):
            if moved and id(cost) not in self._lean:  # the block is kept too, so that its id stays its own
                self._lean[id(cost)] = (cost, replace(cost, saved_bytes=0, input_bytes=0, saved_input_bytes=0))
            found.append(self._lean[id(cost)][1] if moved else cost)
        return found

    def ideal_prices(self, mesh: Mesh, whole: PricedLayout, step: Step) -> list[BlockPrice]:
        """Prices of the blocks of the compact graph if ``cp`` and ``tp`` divided everything and sent nothing.

        Args:
            whole: the layout of the same micro-batch with neither axis.
        """
        key = (id(whole), mesh, step.mesh, step.zero_stage, step.num_micro_batches, step.offload)
        if key not in self._prices:  # whatever the schedule
            self._prices[key] = (whole, self._ideal_prices(mesh, whole, step), [])
        return self._prices[key][1]

    def _ideal_prices(self, mesh: Mesh, whole: PricedLayout, step: Step) -> list[BlockPrice]:
        known: dict[tuple[int, tuple[Recompute, ...]], BlockPrice] = {}
        prices = []
        for cost, modes in zip(self.private_costs(whole), self.modes, strict=True):
            key = id(cost), modes
            if key not in known:
                known[key] = BlockPrice(
                    once_s=self.model.of(step).block_once_s(cost) / mesh.tp,
                    static_bytes=self.model.of(step).block_static_bytes(cost) / mesh.tp,
                    **self._ideal_work(cost, modes, mesh.cp * mesh.tp),
                )
            prices.append(known[key])
        return prices

    def _ideal_work(self, cost: BlockCost, modes: tuple[Recompute, ...], ranks: int) -> dict[str, float]:
        """What of the ideal price of a block does not depend on the data axes."""
        key = id(cost), modes, ranks
        if key not in self._ideal:  # the block is kept too, so that its id stays its own
            self._ideal[key] = cost, self._ideal_work_of(cost, modes, ranks)
        return self._ideal[key][1]

    def _ideal_work_of(self, cost: BlockCost, modes: tuple[Recompute, ...], ranks: int) -> dict[str, float]:
        # a measured part may be quicker than its share of the whole (caches): then only 'least_s' bounds it from below
        share = 0.0 if ranks > 1 and self.model.measured is not None else 1.0 / ranks
        device = self.model.device
        byte_s = bool(share) / (device.memory_bandwidth_bytes_per_s * device.kernel_fraction)
        time_s = (cost.forward_s + cost.backward_s) * share
        forward_s = cost.forward_s * share
        # without other axes this is the layout
        kept = [(cost.kept_bytes(mode) if ranks == 1 else _least_kept(cost, mode)) / ranks for mode in modes]
        seconds = {"none": 0.0, "selective": 0.0, "full": forward_s}
        if "selective" in modes:
            # what is made again is written again, whichever layout says what that is
            written_s = byte_s * (max(kept) - kept[modes.index("selective")])
            seconds["selective"] = cost.remade.time_s if ranks == 1 else written_s
        # a layout may need less in passing than its share of the whole: but for what backward needs, kept or made again
        needed = cost.kept_bytes("none") / ranks
        passing = [_least_passing(cost, m) if ranks == 1 else needed - own for m, own in zip(modes, kept, strict=True)]
        return {
            "time_s": time_s + (forward_s if set(modes) == {"full"} else 0.0),
            "forward_s": forward_s,
            "gather_s": 0.0,
            "held_bytes": max(kept),
            "held_again_bytes": min(kept),
            "passing_bytes": min(passing),
            "lean_bytes": min(here + own - min(kept) for here, own in zip(passing, kept, strict=True)),
            **again_prices([seconds[mode] for mode in modes], kept),
        }

    def draft_s(self, candidate: Candidate, draft: TypedLayout, whole: PricedLayout, step: Step) -> float:
        """The bound of a candidate in a layout that is not priced yet; infinite where it cannot fit.

        Collectives of data axes are left out, and the memory of all pipeline ranks is taken together.

        Args:
            whole: the layout of the same micro-batch with neither ``cp`` nor ``tp``.
        """
        mesh = candidate.mesh
        if self.draft_bytes(candidate, draft, whole, step) > self.limit_bytes * mesh.pp:
            return float("inf")
        stages, m = mesh.pp * candidate.virtual_stages, candidate.num_micro_batches
        once_s = self.once_s(whole, step) / mesh.tp
        return max(least_flow_s(draft.time_s, m, mesh.pp, stages), (m * draft.time_s + once_s) / mesh.pp)

    def draft_bytes(self, candidate: Candidate, draft: TypedLayout, whole: PricedLayout, step: Step) -> float:
        """The least that all pipeline ranks hold together in a layout that is not priced yet; see :meth:`draft_s`."""
        return self.model.of(step).state_bytes_per_element() * draft.numel + self.least_held_bytes(candidate, whole)

    def least_held_bytes(self, candidate: Candidate, whole: PricedLayout) -> float:
        """The least that all pipeline ranks keep together between forwards and backwards."""
        return self._least_held(whole) * least_held(candidate) / (candidate.mesh.cp * candidate.mesh.tp)

    def once_s(self, whole: PricedLayout, step: Step) -> float:
        """What all blocks add to a step once, on a rank that has them whole; a parameter that several read counts once."""
        found = 0.0
        for k, (cost, n) in enumerate(zip(whole.costs, self.counts, strict=True)):
            found += n * self.model.of(step).block_once_s(self.without_shared(cost) if k else cost)
        return found

    def last_bytes(self, whole: PricedLayout) -> int:
        """What one rank that has all blocks whole needs in passing at the last one's peak, over the least that they keep."""
        last, modes = whole.costs[-1], self.modes[-1]
        least = min(_least_kept(last, mode) for mode in modes)
        return min(_least_passing(last, mode) + _least_kept(last, mode) for mode in modes) - least

    def _least_held(self, whole: PricedLayout) -> float:
        """Bytes of one micro-batch between forward and backward at least, of all blocks."""
        if id(whole) not in self._held:
            kept = [
                min(_least_kept(cost, mode) for mode in own)
                for cost, own in zip(self._lean_costs(whole), self.modes, strict=True)
            ]
            self._held[id(whole)] = (whole, float(sum(n * size for n, size in zip(self.counts, kept, strict=True))))
        return self._held[id(whole)][1]

    def without_shared(self, cost: BlockCost) -> BlockCost:
        """A block without parameters that others read too: a rank that holds several of those has them once."""
        found = self._private.get(id(cost))
        if found is None:  # the block is kept too, so that its id stays its own
            own = tuple(p for p in cost.parameters if not p.shared)
            found = (cost, cost if len(own) == len(cost.parameters) else replace(cost, parameters=own))
            self._private[id(cost)] = found
        return found[1]


def _least_kept(cost: BlockCost, mode: Recompute) -> int:
    """Bytes that a block keeps at least in any layout, over its ranks: what is made again may be other operators there."""
    return cost.remade.least_bytes if mode == "selective" else cost.kept_bytes(mode)


def _least_passing(cost: BlockCost, mode: Recompute) -> int:
    return 0 if mode == "selective" else cost.passing_bytes(mode)


def least_held(candidate: Candidate) -> int:
    """Micro-batches that each pipeline rank holds at some moment on every one of its stages, at least."""
    degrees = (candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches)
    return min(least_and_most_done(candidate.schedule, *degrees)[0])

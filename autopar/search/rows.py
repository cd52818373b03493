"""What the lower bounds are computed from: candidates in a layout, or in the best that any layout could be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.cost.model import BlockCost, CostModel, Step
from autopar.mesh import Mesh
from autopar.plan import Recompute
from autopar.search.bounds import BlockPrice, Row, least_flow_s
from autopar.search.candidates import Candidate
from autopar.search.classes import Compact
from autopar.search.options import Draft, Option

NOTHING = BlockPrice(
    time_s=0.0,
    again_s=0.0,
    once_s=0.0,
    static_bytes=0.0,
    held_bytes=0.0,
    held_again_bytes=0.0,
    passing_bytes=0.0,
)


class RowMaker:
    """Rows of one model on one cluster.

    Args:
        compact: the compact graph.
        model: the cost model.
        modes: of recompute that the space allows.
        pinned: modes of blocks of the original graph.
        limit_bytes: of a device, reserves included.
    """

    def __init__(
        self,
        compact: Compact,
        model: CostModel,
        *,
        modes: Sequence[Recompute],
        pinned: Mapping[int, Recompute],
        limit_bytes: int,
    ) -> None:
        self.compact, self.model = compact, model
        self.class_of = compact.class_of
        device = model.device
        self.limit_bytes = (limit_bytes - device.reserved_bytes) / (1 + device.fragmentation)
        self.modes = [
            tuple({m for i in members for m in ((pinned[i],) if i in pinned else modes)}) for members in compact.members
        ]
        self.counts = [len(members) for members in compact.members]
        self._private: dict[int, tuple[BlockCost, BlockCost]] = {}
        self._held: dict[int, tuple[Option, float]] = {}  # the layout is kept too, so that its id stays its own

    def exact(self, candidate: Candidate, option: Option, step: Step) -> Row:
        """A candidate in a layout."""
        return self.row(candidate, self.exact_prices(option, step), every_s=option.prelude_s)

    def exact_prices(self, option: Option, step: Step) -> list[BlockPrice]:
        """Prices of the blocks of the compact graph in a layout."""
        costs = [option.costs[0], *(self.without_shared(cost) for cost in option.costs[1:])]
        known: dict[tuple[int, tuple[Recompute, ...]], BlockPrice] = {}
        prices = []
        for k, cost in enumerate(costs):
            key = (id(cost), self.modes[k])
            if key not in known:
                known[key] = self._price(cost, step, self.modes[k])
            prices.append(known[key])
        return prices

    def ideal(self, candidate: Candidate, whole: Option, step: Step) -> Row:
        """A candidate if ``cp`` and ``tp`` divided everything and sent nothing.

        Args:
            whole: the layout of the same micro-batch with neither axis.
        """
        return self.row(candidate, self.ideal_prices(candidate.mesh, whole, step), every_s=0.0)

    def ideal_prices(self, mesh: Mesh, whole: Option, step: Step) -> list[BlockPrice]:
        """Prices of the blocks of the compact graph as in :meth:`ideal`."""
        ranks = mesh.cp * mesh.tp
        # a measured part may be quicker than its share of the whole (caches): then only 'least_s' bounds it from below
        share = 0.0 if ranks > 1 and self.model.measured is not None else 1.0 / ranks
        prices = []
        for k, cost in enumerate([whole.costs[0], *(self.without_shared(cost) for cost in whole.costs[1:])]):
            modes = self.modes[k]
            time_s = (cost.forward_s + cost.backward_s) * share
            again_s = cost.forward_s * share
            prices.append(
                BlockPrice(
                    time_s=time_s + (again_s if "none" not in modes else 0.0),
                    again_s=again_s if len(modes) > 1 else 0.0,
                    once_s=self.model.block_once_s(cost, step) / mesh.tp,
                    static_bytes=self.model.block_state(cost, step).total / mesh.tp,
                    held_bytes=max(cost.kept_bytes(mode == "full") for mode in modes) / ranks,
                    held_again_bytes=min(cost.kept_bytes(mode == "full") for mode in modes) / ranks,
                    passing_bytes=min(cost.passing_bytes(mode == "full") for mode in modes) / ranks,
                )
            )
        return prices

    def draft_s(self, candidate: Candidate, draft: Draft, whole: Option, step: Step) -> float:
        """The bound of a candidate in a layout that is not priced yet; infinite where it cannot fit.

        Collectives of data axes are left out, and the memory of all pipeline ranks is taken together.

        Args:
            whole: the layout of the same micro-batch with neither ``cp`` nor ``tp``.
        """
        mesh = candidate.mesh
        if self.draft_bytes(candidate, draft, whole, step) > self.limit_bytes * mesh.pp:
            return float("inf")
        stages = mesh.pp * candidate.virtual_stages
        return least_flow_s(draft.time_s, candidate.num_micro_batches, mesh.pp, stages)

    def draft_bytes(self, candidate: Candidate, draft: Draft, whole: Option, step: Step) -> float:
        """The least that all pipeline ranks hold together in a layout that is not priced yet; see :meth:`draft_s`."""
        held = self._least_held(whole) * min(least_in_flight(candidate)) / (candidate.mesh.cp * candidate.mesh.tp)
        return self.model.state_bytes_per_element(step) * draft.numel + held

    def _least_held(self, whole: Option) -> float:
        """Bytes of one micro-batch between forward and backward at least, of all blocks."""
        if id(whole) not in self._held:
            kept = [
                min(cost.kept_bytes(m == "full") for m in own)
                for cost, own in zip(whole.costs, self.modes, strict=True)
            ]
            self._held[id(whole)] = (whole, float(sum(n * size for n, size in zip(self.counts, kept, strict=True))))
        return self._held[id(whole)][1]

    def _price(self, cost: BlockCost, step: Step, modes: Sequence[Recompute]) -> BlockPrice:
        times = [self.model.block_time_s(cost, step, recompute=mode == "full") for mode in modes]
        seconds = [time.forward_s + time.backward_s for time in times]
        held = [cost.kept_bytes(mode == "full") for mode in modes]
        return BlockPrice(
            time_s=min(seconds),
            again_s=max(seconds) - min(seconds),
            once_s=self.model.block_once_s(cost, step),
            static_bytes=self.model.block_state(cost, step).total,
            held_bytes=max(held),
            held_again_bytes=min(held),
            passing_bytes=min(cost.passing_bytes(mode == "full") for mode in modes),
        )

    def row(self, candidate: Candidate, prices: Sequence[BlockPrice], *, every_s: float) -> Row:
        """A candidate whose blocks have these prices; ``every_s``: of each stage and micro-batch besides."""
        counts = list(self.counts)
        rows = list(zip(prices, counts, strict=True))
        inner = [*counts]
        inner[0] -= 1
        inner[-1] -= 1
        group, count = self._largest(prices, inner)
        mesh = candidate.mesh
        return Row(
            first=prices[0],
            last=prices[-1],
            group=group,
            count=count,
            alone=sum(counts) == 1,
            others=max(sum(counts) - 2 - count, 0),
            total_s=sum(price.time_s * n for price, n in rows),
            before_s=self._before(prices, mesh.pp),
            once_s=sum(price.once_s * n for price, n in rows),
            every_s=every_s,
            limit_bytes=self.limit_bytes,
            pp=mesh.pp,
            virtual_stages=candidate.virtual_stages,
            num_micro_batches=candidate.num_micro_batches,
            waits=candidate.virtual_stages == 1,
            in_flight=least_in_flight(candidate),
        )

    def _before(self, prices: Sequence[BlockPrice], pp: int) -> tuple[float, ...]:
        """Time of the first 0, 1, ... pp - 1 blocks."""
        times = (prices[k].time_s for k in self.class_of[: pp - 1])
        return tuple(accumulate(times, initial=0.0))

    def _largest(self, prices: Sequence[BlockPrice], counts: Sequence[int]) -> tuple[BlockPrice, int]:
        """The group of equal operators that takes longest, at the least price of any of its blocks."""
        groups: dict[str, list[int]] = {}
        for k, block in enumerate(self.compact.graph.blocks):
            if counts[k] > 0:
                groups.setdefault(block.hash, []).append(k)
        if not groups:
            return NOTHING, 0
        places = max(groups.values(), key=lambda own: self._weight(own, prices, counts))
        return least_of(prices[k] for k in places), sum(counts[k] for k in places)

    def _weight(self, places: Sequence[int], prices: Sequence[BlockPrice], counts: Sequence[int]) -> float:
        """What makes a group the largest."""
        return sum(counts[k] * prices[k].time_s for k in places)

    def without_shared(self, cost: BlockCost) -> BlockCost:
        """A block without parameters that others read too: a rank that holds several of those has them once."""
        found = self._private.get(id(cost))
        if found is None:  # the block is kept too, so that its id stays its own
            own = tuple(p for p in cost.parameters if not p.shared)
            found = (cost, cost if len(own) == len(cost.parameters) else replace(cost, parameters=own))
            self._private[id(cost)] = found
        return found[1]


def least_of(prices: Iterable[BlockPrice]) -> BlockPrice:
    """The least of each part."""
    found = list(prices)
    first = found[0]
    for other in found[1:]:
        first = BlockPrice(
            time_s=min(first.time_s, other.time_s),
            again_s=min(first.again_s, other.again_s),
            once_s=min(first.once_s, other.once_s),
            static_bytes=min(first.static_bytes, other.static_bytes),
            held_bytes=min(first.held_bytes, other.held_bytes),
            held_again_bytes=min(first.held_again_bytes, other.held_again_bytes),
            passing_bytes=min(first.passing_bytes, other.passing_bytes),
            first_s=min(first.first_s, other.first_s),
        )
    return first


def least_in_flight(candidate: Candidate) -> tuple[int, ...]:
    """Micro-batches that each pipeline rank holds at some moment on every one of its stages.

    With virtual stages those of the last one, when the first backward begins: the schedule takes rounds of
    micro-batches through one stage after the other.
    """
    m, pp, v = candidate.num_micro_batches, candidate.mesh.pp, candidate.virtual_stages
    match candidate.schedule:
        case "none":
            return (1,) * pp
        case "GPipe":
            return (m,) * pp
        case "1F1B":
            return tuple(min(m, pp - rank) for rank in range(pp))
        case "Interleaved1F1B":
            held = []
            per_round = m // max(1, m // pp)
            for rank in range(pp):
                before = min((v - 1) * per_round + 2 * (pp - 1 - rank), v * m - 1) + 1
                cycles, rest = divmod(before, per_round * v)
                last = min(max(rest - (v - 1) * per_round, 0), per_round)
                held.append(max(1, cycles * per_round + last))
            return tuple(held)

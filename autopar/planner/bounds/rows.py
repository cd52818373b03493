"""What the lower bounds are computed from: candidates in a layout, or in the best that any layout could be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

from autopar.cost.blocks.block_cost import ParameterCost
from autopar.cost.model import BlockCost, Step
from autopar.cost.step.step_model import Beside
from autopar.plan import Recompute
from autopar.planner.bounds.bound_rows import BlockPrice, Row
from autopar.planner.bounds.least_prices import LeastPrices
from autopar.planner.bounds.lines import NOTHING, again_prices, least_of, moving_price
from autopar.planner.bounds.once import at_both_ends, least_sums_s, tie_s
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate


class RowMaker(LeastPrices):
    """Rows of one model on one cluster."""

    @cached_property
    def neighbours(self) -> list[set[tuple[int, int]]]:
        """Of each block of the compact graph those before and after the blocks that it stands for; -1: there is none."""
        ends = [-1, *self.class_of, -1]
        found: list[set[tuple[int, int]]] = [set() for _ in self.counts]
        for before, k, after in zip(ends, self.class_of, ends[2:], strict=False):
            found[k].add((before, after))
        return found

    def exact(self, candidate: Candidate, option: PricedLayout, step: Step) -> Row:
        """A candidate in a layout."""
        costs, prices, alone_s = self.priced(option, step)
        sends = [cost for cost in costs[:-1] if cost.sends] if step.mesh.pp > 1 else []
        every_s = option.prelude_s + (self.model.of(step).ends_s(costs[0], costs[-1]) if step.mesh.pp == 1 else 0.0)
        row = self.row(candidate, prices, alone_s, self.largest(option), every_s=every_s)
        if not sends:
            return row
        sent, back = min(c.send_bytes for c in sends), min(c.send_gradient_bytes for c in sends)
        return replace(
            row,
            send_s=self.model.collectives.send_time_s(sent, step.mesh),
            send_back_s=self.model.collectives.send_time_s(back, step.mesh),
            stage_bytes=float(sent),
            most=self.most_blocks(option, row.pp * row.virtual_stages) if row.virtual_stages > 1 else math.inf,
        )

    def priced(self, option: PricedLayout, step: Step) -> tuple[list[BlockCost], list[BlockPrice], list[float]]:
        """Blocks of the compact graph with the parameters that count for them, and their prices as in :meth:`exact_prices`.

        With sums of gradients, and what both ends of a pipeline have.
        """
        costs, shared = self._counted_costs(option, step)
        prices, alone_s = self._known_prices(
            option, step, "summed", lambda: self._summed_prices(option, costs, shared, step)
        )
        return costs, prices, alone_s

    def _counted_costs(self, option: PricedLayout, step: Step) -> tuple[list[BlockCost], tuple[ParameterCost, ...]]:
        """Blocks of the compact graph with the parameters that count for them, and those that both ends of a pipeline have."""
        key = id(option), step.mesh.pp > 1
        if key not in self._counted:  # the layout is kept, so that its id stays its own
            shared = at_both_ends(option.costs) if step.mesh.pp > 1 else ()
            costs = self.private_costs(option, is_lean=not self.moves)
            if shared:  # the rank of the last block has no other that brings these
                costs[-1] = option.costs[-1]
            self._counted[key] = option, costs, shared
        return self._counted[key][1:]

    def _summed_prices(
        self, option: PricedLayout, costs: Sequence[BlockCost], shared: Sequence[ParameterCost], step: Step
    ) -> tuple[list[BlockPrice], list[float]]:
        prices, alone_s = self._exact_prices(costs, step)
        sums_s = self._sums_s(costs, prices, self.largest(option), step)
        both_s = self._tie_s(shared, step)
        for k, more_s in enumerate(sums_s):
            more_s += both_s * (k in (0, len(prices) - 1))
            if more_s:
                prices[k] = replace(prices[k], once_s=prices[k].once_s + more_s)
        return prices, alone_s

    def _sums_s(
        self, costs: Sequence[BlockCost], prices: Sequence[BlockPrice], largest: Sequence[int], step: Step
    ) -> list[float]:
        """What sums of gradients add to the prices of blocks, none of which is negative then."""
        others = sum(self.counts) - sum(self.counts[k] for k in largest) > 2
        found = least_sums_s(self.model, costs, self.counts, step, others=others)
        if any(price.once_s + more_s < 0 for price, more_s in zip(prices, found, strict=True)):
            return least_sums_s(self.model, costs, self.counts, step, others=True)
        return found

    def _tie_s(self, shared: Sequence[ParameterCost], step: Step) -> float:
        """What the first and the last rank take to sum the gradients of parameters that both have."""
        return tie_s(self.model, shared, step)

    def exact_prices(self, option: PricedLayout, step: Step) -> tuple[list[BlockPrice], list[float]]:
        """Of the blocks of the compact graph in a layout; and what their first gathers take longer with no forward beside."""
        return self._known_prices(
            option, step, "alone", lambda: self._exact_prices(self.private_costs(option, is_lean=not self.moves), step)
        )

    def _known_prices(
        self, option: PricedLayout, step: Step, kind: str, made: Callable[[], tuple[list[BlockPrice], list[float]]]
    ) -> tuple[list[BlockPrice], list[float]]:
        """Prices that were made before: they are the same whatever the schedule."""
        key = (
            kind, id(option), step.mesh, step.zero_stage, step.num_micro_batches, step.adds_gradients,
            step.offload,
        )  # fmt: skip
        if key not in self._prices:
            self._prices[key] = (option, *made())
        return self._prices[key][1:]

    def _exact_prices(self, costs: Sequence[BlockCost], step: Step) -> tuple[list[BlockPrice], list[float]]:
        longest_s = max(cost.forward_s + cost.communication_forward_s for cost in costs)
        known: dict[tuple[object, ...], tuple[BlockPrice, float]] = {}
        prices, alone_s = [], []
        matters = self.model.of(step).data.sends_always
        for k, cost in enumerate(costs):
            beside = self.beside(costs, k) if matters else ()
            key = (id(cost), self.modes[k], *((id(one), id(other)) for one, other in beside))
            if key not in known:
                known[key] = self._price(cost, step, self.modes[k], longest_s, beside)
            prices.append(known[key][0])
            alone_s.append(known[key][1])
        return self._moving(prices, costs) if self.moves else prices, alone_s

    def _moving(self, prices: Sequence[BlockPrice], costs: Sequence[BlockCost]) -> list[BlockPrice]:
        """Prices of blocks that may keep on the host what their backward needs; see :func:`moving_price`."""
        host = self.model.host
        copied = [(cost, host.latency_s + cost.saved_bytes / host.to_host_bytes_per_s) for cost in costs]
        some = max(range(len(costs)), key=lambda k: self.counts[k] * costs[k].forward_s)
        cost, down_s = copied[some]
        freed = cost.saved_bytes - cost.input_bytes
        share = min(1.0, prices[some].full_s * cost.saved_bytes / (freed * down_s)) if freed > 0 else 1.0
        return [
            moving_price(price, cost, share, down_s, is_free="none" in modes and set(modes) <= {"none", "full"})
            for price, (cost, down_s), modes in zip(prices, copied, self.modes, strict=True)
        ]

    def block_s(self, costs: Sequence[BlockCost], k: int, step: Step, mode: Recompute) -> float:
        """Forward and backward of a block of the compact graph, as its price has them."""
        beside = self.beside(costs, k) if self.model.of(step).data.sends_always else ()
        time = self.model.of(step).block_time_s(costs[k], recompute=mode, beside=beside)
        return time.forward_s + time.backward_s + self.model.of(step).block_adding_s(costs[k])

    def beside(self, costs: Sequence[BlockCost], k: int) -> list[Beside]:
        """The different blocks beside those that block ``k`` of the compact graph stands for."""
        found = ((None if i < 0 else costs[i], None if j < 0 else costs[j]) for i, j in self.neighbours[k])
        return [*{(id(before), id(after)): (before, after) for before, after in found}.values()]

    def _price(
        self, cost: BlockCost, step: Step, modes: Sequence[Recompute], longest_s: float, beside: Sequence[Beside]
    ) -> tuple[BlockPrice, float]:
        """The price of a block, and what its first gather takes longer if no forward is beside it.

        Args:
            longest_s: the longest forward that may be beside it.
            beside: blocks that stand before and after it.
        """
        times = [self.model.of(step).block_time_s(cost, recompute=mode, beside=beside) for mode in modes]
        adding_s = self.model.of(step).block_adding_s(cost)
        seconds = [time.forward_s + time.backward_s + adding_s for time in times]
        held = [cost.kept_bytes(mode) for mode in modes]
        passing = [self.model.of(step).block_passing_bytes(cost, recompute=mode, beside=beside) for mode in modes]
        gather_s = self.model.of(step).block_gather_s(cost)
        hidden_s = (1 - self.model.device.interference) * min(gather_s, longest_s)
        price = BlockPrice(
            time_s=min(seconds),
            forward_s=min(time.forward_s for time in times),
            once_s=self.model.of(step).block_once_s(cost),
            gather_s=gather_s - hidden_s,
            static_bytes=self.model.of(step).block_static_bytes(cost),
            held_bytes=max(held),
            held_again_bytes=min(held),
            passing_bytes=min(passing),
            lean_bytes=min(own + kept - min(held) for own, kept in zip(passing, held, strict=True)),
            **again_prices(seconds, held),
        )
        return price, hidden_s

    def row(
        self,
        candidate: Candidate,
        prices: Sequence[BlockPrice],
        alone_s: Sequence[float],
        places: Sequence[int],
        *,
        every_s: float,
    ) -> Row:
        counts = list(self.counts)
        rows = list(zip(prices, counts, strict=True))
        inner = [*counts]
        inner[0] -= 1
        inner[-1] -= 1
        group = least_of(prices[k] for k in places if inner[k]) if places else NOTHING
        count = sum(inner[k] for k in places)
        others = max(sum(counts) - 2 - count, 0)
        if self.moves and others:  # they may stand beside copies too
            group = replace(group, more_byte_s=0.0, more_free_s=0.0)
        mesh = candidate.mesh
        forward = [prices[k].forward_s for k in self.class_of[: mesh.pp - 1]]
        backward = [
            prices[k].time_s - prices[k].forward_s for k in reversed(self.class_of[len(self.class_of) - mesh.pp + 1 :])
        ]
        return Row(
            first=prices[0],
            last=prices[-1],
            group=group,
            count=count,
            alone=sum(counts) == 1,
            others=others,
            total_s=sum(price.time_s * n for price, n in rows),
            forward_s=sum(price.forward_s * n for price, n in rows),
            before_s=_sums(prices[k].time_s for k in self.class_of[: mesh.pp - 1]),
            before_forward_s=_sums(forward),
            after_backward_s=_sums(backward)[::-1],
            once_s=sum(price.once_s * n for price, n in rows),
            gathers_s=sum(price.gather_s * n for price, n in rows),
            stage_gathers_s=self._stage_gathers(alone_s, mesh.pp * candidate.virtual_stages),
            every_s=every_s,
            send_s=0.0,
            send_back_s=0.0,
            stage_bytes=0.0,
            limit_bytes=self.limit_bytes,
            most=math.inf,
            schedule=candidate.schedule,
            pp=mesh.pp,
            virtual_stages=candidate.virtual_stages,
            num_micro_batches=candidate.num_micro_batches,
        )

    def _stage_gathers(self, alone_s: Sequence[float], stages: int) -> tuple[float, ...]:
        """For 0, 1, ... ``stages`` stages the least that their first blocks' gathers take longer alone."""
        if not any(alone_s):
            return (0.0,) * (stages + 1)
        every = sorted((time_s, n) for time_s, n in zip(alone_s, self.counts, strict=True))
        return _sums([time_s for time_s, n in every for _ in range(n)][:stages])


def _sums(times: Iterable[float]) -> tuple[float, ...]:
    """Of the first 0, 1, ... all of these."""
    return tuple(accumulate(times, initial=0.0))

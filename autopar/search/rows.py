"""What the lower bounds are computed from: candidates in a layout, or in the best that any layout could be."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from autopar.cost.block import ParameterCost
from autopar.cost.block_model import Beside
from autopar.cost.model import BlockCost, CostModel, Step
from autopar.cost.stages import own_times
from autopar.mesh import Mesh
from autopar.plan import Recompute
from autopar.search.bound_rows import BlockPrice, Row, forwards_done
from autopar.search.candidates import Candidate
from autopar.search.classes import Compact
from autopar.search.every import count_plans
from autopar.search.flow import least_flow_s
from autopar.search.lines import NOTHING, again_prices, least_of, moving_price
from autopar.search.once import at_both_ends, least_sums_s, tie_s
from autopar.search.options import Draft, Option

LATE = 6
"""Parts of the pipeline's ranks, of which some have short first stages."""


class RowMaker:
    """Rows of one model on one cluster.

    Args:
        compact: the compact graph.
        model: the cost model.
        modes: of recompute that the space allows.
        pinned: modes of blocks of the original graph.
        limit_bytes: of a device, reserves included.
        moved: blocks of the original graph whose activations live on the host.
        is_pinned: pins say which stage holds some block.
        every: see ``Space.every``.
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
        self.is_pinned, self.every = is_pinned, every
        self.moves = False
        """Whether blocks may keep on the host what their backward needs, beside their modes of recompute."""
        self.compact, self.model = compact, model
        self.class_of = compact.class_of
        device = model.device
        self.limit_bytes = (limit_bytes - device.reserved_bytes) / (1 + device.fragmentation)
        self.modes = [
            tuple({m for i in members for m in ((pinned[i],) if i in pinned else modes)}) for members in compact.members
        ]
        self.counts = [len(members) for members in compact.members]
        ends = [-1, *self.class_of, -1]  # -1: there is none
        self.neighbours: list[set[tuple[int, int]]] = [set() for _ in self.counts]
        for before, k, after in zip(ends, self.class_of, ends[2:], strict=False):
            self.neighbours[k].add((before, after))
        self.is_moved = [any(i in moved for i in members) for members in compact.members]
        self._lean: dict[int, tuple[BlockCost, BlockCost]] = {}
        self._private: dict[int, tuple[BlockCost, BlockCost]] = {}
        self._ideal: dict[tuple[int, tuple[Recompute, ...], int], tuple[BlockCost, dict[str, float]]] = {}
        self._held: dict[int, tuple[Option, float]] = {}  # the layout is kept too, so that its id stays its own
        self._prices: dict[tuple[object, ...], tuple[Option, list[BlockPrice], list[float]]] = {}  # likewise

    def exact(self, candidate: Candidate, option: Option, step: Step) -> Row:
        """A candidate in a layout."""
        costs, prices, alone_s = self.priced(option, step)
        sends = [cost for cost in costs[:-1] if cost.sends] if step.mesh.pp > 1 else []
        every_s = option.prelude_s + (self.model.ends_s(costs[0], costs[-1], step) if step.mesh.pp == 1 else 0.0)
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

    def priced(self, option: Option, step: Step) -> tuple[list[BlockCost], list[BlockPrice], list[float]]:
        """Blocks of the compact graph with the parameters that count for them, and their prices as in :meth:`exact_prices`.

        With sums of gradients, and what both ends of a pipeline have.
        """
        shared = at_both_ends(option.costs) if step.mesh.pp > 1 else ()
        costs = self.private_costs(option, is_lean=not self.moves)
        if shared:  # the rank of the last block has no other that brings these
            costs[-1] = option.costs[-1]
        prices, alone_s = self._known_prices(
            option, step, "summed", lambda: self._summed_prices(option, costs, shared, step)
        )
        return costs, prices, alone_s

    def _summed_prices(
        self, option: Option, costs: Sequence[BlockCost], shared: Sequence[ParameterCost], step: Step
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

    def exact_prices(self, option: Option, step: Step) -> tuple[list[BlockPrice], list[float]]:
        """Of the blocks of the compact graph in a layout; and what their first gathers take longer with no forward beside."""
        return self._known_prices(
            option, step, "alone", lambda: self._exact_prices(self.private_costs(option, is_lean=not self.moves), step)
        )

    def _known_prices(
        self, option: Option, step: Step, kind: str, made: Callable[[], tuple[list[BlockPrice], list[float]]]
    ) -> tuple[list[BlockPrice], list[float]]:
        """Prices that were made before: they are the same whatever the schedule."""
        key = (
            kind, id(option), step.mesh, step.zero_stage, step.num_micro_batches, step.all_reduces, step.adds_gradients,
            step.offload,
        )  # fmt: skip
        if key not in self._prices:
            self._prices[key] = (option, *made())
        return self._prices[key][1:]

    def _exact_prices(self, costs: Sequence[BlockCost], step: Step) -> tuple[list[BlockPrice], list[float]]:
        longest_s = max(cost.forward_s + cost.communication_forward_s for cost in costs)
        known: dict[tuple[object, ...], tuple[BlockPrice, float]] = {}
        prices, alone_s = [], []
        matters = self.model.sends_always(step)
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
        beside = self.beside(costs, k) if self.model.sends_always(step) else ()
        time = self.model.block_time_s(costs[k], step, recompute=mode, beside=beside)
        return time.forward_s + time.backward_s + self.model.block_adding_s(costs[k], step)

    def beside(self, costs: Sequence[BlockCost], k: int) -> list[Beside]:
        """The different blocks beside those that block ``k`` of the compact graph stands for."""
        found = ((None if i < 0 else costs[i], None if j < 0 else costs[j]) for i, j in self.neighbours[k])
        return [*{(id(before), id(after)): (before, after) for before, after in found}.values()]

    def private_costs(self, option: Option, *, is_lean: bool = True) -> list[BlockCost]:
        costs = self._lean_costs(option) if is_lean else option.costs
        return [costs[0], *(self.without_shared(cost) for cost in costs[1:])]

    def _lean_costs(self, option: Option) -> list[BlockCost]:
        """As if blocks kept nothing where what some of their class keep lives on the host."""
        found = []
        for cost, moved in zip(option.costs, self.is_moved, strict=True):
            if moved and id(cost) not in self._lean:  # the block is kept too, so that its id stays its own
                self._lean[id(cost)] = (cost, replace(cost, saved_bytes=0, input_bytes=0, saved_input_bytes=0))
            found.append(self._lean[id(cost)][1] if moved else cost)
        return found

    def ideal_prices(self, mesh: Mesh, whole: Option, step: Step) -> list[BlockPrice]:
        """Prices of the blocks of the compact graph if ``cp`` and ``tp`` divided everything and sent nothing.

        Args:
            whole: the layout of the same micro-batch with neither axis.
        """
        key = (id(whole), mesh, step.mesh, step.zero_stage, step.num_micro_batches, step.all_reduces, step.offload)
        if key not in self._prices:  # whatever the schedule
            self._prices[key] = (whole, self._ideal_prices(mesh, whole, step), [])
        return self._prices[key][1]

    def _ideal_prices(self, mesh: Mesh, whole: Option, step: Step) -> list[BlockPrice]:
        known: dict[tuple[int, tuple[Recompute, ...]], BlockPrice] = {}
        prices = []
        for cost, modes in zip(self.private_costs(whole), self.modes, strict=True):
            key = id(cost), modes
            if key not in known:
                known[key] = BlockPrice(
                    once_s=self.model.block_once_s(cost, step) / mesh.tp,
                    static_bytes=self.model.block_static_bytes(cost, step) / mesh.tp,
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

    def draft_s(self, candidate: Candidate, draft: Draft, whole: Option, step: Step) -> float:
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

    def draft_bytes(self, candidate: Candidate, draft: Draft, whole: Option, step: Step) -> float:
        """The least that all pipeline ranks hold together in a layout that is not priced yet; see :meth:`draft_s`."""
        return self.model.state_bytes_per_element(step) * draft.numel + self.least_held_bytes(candidate, whole)

    def least_held_bytes(self, candidate: Candidate, whole: Option) -> float:
        """The least that all pipeline ranks keep together between forwards and backwards."""
        return self._least_held(whole) * least_held(candidate) / (candidate.mesh.cp * candidate.mesh.tp)

    def once_s(self, whole: Option, step: Step) -> float:
        """What all blocks add to a step once, on a rank that has them whole; a parameter that several read counts once."""
        found = 0.0
        for k, (cost, n) in enumerate(zip(whole.costs, self.counts, strict=True)):
            found += n * self.model.block_once_s(self.without_shared(cost) if k else cost, step)
        return found

    def last_bytes(self, whole: Option) -> int:
        """What one rank that has all blocks whole needs in passing at the last one's peak, over the least that they keep."""
        last, modes = whole.costs[-1], self.modes[-1]
        least = min(_least_kept(last, mode) for mode in modes)
        return min(_least_passing(last, mode) + _least_kept(last, mode) for mode in modes) - least

    def _least_held(self, whole: Option) -> float:
        """Bytes of one micro-batch between forward and backward at least, of all blocks."""
        if id(whole) not in self._held:
            kept = [
                min(_least_kept(cost, mode) for mode in own)
                for cost, own in zip(self._lean_costs(whole), self.modes, strict=True)
            ]
            self._held[id(whole)] = (whole, float(sum(n * size for n, size in zip(self.counts, kept, strict=True))))
        return self._held[id(whole)][1]

    def _price(
        self, cost: BlockCost, step: Step, modes: Sequence[Recompute], longest_s: float, beside: Sequence[Beside]
    ) -> tuple[BlockPrice, float]:
        """The price of a block, and what its first gather takes longer if no forward is beside it.

        Args:
            longest_s: the longest forward that may be beside it.
            beside: blocks that stand before and after it.
        """
        times = [self.model.block_time_s(cost, step, recompute=mode, beside=beside) for mode in modes]
        adding_s = self.model.block_adding_s(cost, step)
        seconds = [time.forward_s + time.backward_s + adding_s for time in times]
        held = [cost.kept_bytes(mode) for mode in modes]
        passing = [self.model.block_passing_bytes(cost, step, recompute=mode, beside=beside) for mode in modes]
        gather_s = self.model.block_gather_s(cost, step)
        hidden_s = (1 - self.model.device.interference) * min(gather_s, longest_s)
        price = BlockPrice(
            time_s=min(seconds),
            forward_s=min(time.forward_s for time in times),
            once_s=self.model.block_once_s(cost, step),
            gather_s=gather_s - hidden_s,
            static_bytes=self.model.block_static_bytes(cost, step),
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

    def largest(self, option: Option) -> tuple[int, ...]:
        """The blocks of the compact graph that are the group of equal operators that takes longest.

        The first and the last block of all are no part of it, unless they stand for others too.
        """
        groups, inner = self.groups()
        times = [sum(own_times(cost, recompute="none")) for cost in option.costs]
        return tuple(max(groups, key=lambda own: sum(inner[k] * times[k] for k in own), default=()))

    def groups(self) -> tuple[list[list[int]], list[int]]:
        """Blocks of the compact graph by equal operators; and how many each stands for, the first and last of all left out."""
        inner = [*self.counts]
        inner[0] -= 1
        inner[-1] -= 1
        found: dict[str, list[int]] = {}
        for k, block in enumerate(self.compact.graph.blocks):
            if inner[k] > 0:
                found.setdefault(block.hash, []).append(k)
        return list(found.values()), inner

    def most_blocks(self, option: Option, stages: int) -> float:
        """How many blocks of the largest group a virtual stage may hold: the model's time in whole blocks, split evenly.

        No law with one stage a rank, where pins say what stages hold, or where all cuts are tried.
        """
        places = self.largest(option)
        if self.is_pinned or not places or self.tries_all(stages):
            return math.inf
        times = [sum(own_times(cost, recompute="none")) for cost in option.costs]
        total_s = sum(n * time_s for n, time_s in zip(self.counts, times, strict=True))
        return math.ceil(math.floor(total_s / min(times[k] for k in places) + 1e-9) / stages)

    def tries_all(self, stages: int) -> bool:
        """Whether all cuts into so many stages with every choice of recompute are few enough to be priced."""
        choices = [len(self.modes[k]) + self.moves for k in self.class_of]
        return count_plans(len(self.class_of), stages, choices) <= self.every

    def even_stages(self, option: Option, pp: int, virtual_stages: int) -> list[list[NDArray[np.bool_]]]:
        """Ways to cut virtual stages: for each stage whether blocks i:j may be one, see :meth:`most_blocks`.

        Where blocks do not divide evenly, the first ways give those that are left to the middle of a rank's stages: the
        first and the last of them stand in the fill and the drain of the pipeline. A rank's first stages hold the most
        micro-batches, and the first ranks' more than others': theirs may go to their last stages. Of two stages a rank, the
        first ranks' first ones may be those that are short.
        """
        stages = pp * virtual_stages
        most = self.most_blocks(option, stages)
        if most == math.inf:
            return []
        places = set(self.largest(option))
        counted = np.concatenate([[0], np.cumsum([k in places for k in self.class_of])])
        held = counted[None, :] - counted[:, None]
        each, rest = divmod(int(counted[-1]), stages)
        even = [held <= most] * stages
        if not rest:
            return [even]
        count, fewer, larger = -(-rest // pp), held <= each, held <= each + 1
        if virtual_stages == 2:  # the pipeline fills sooner where the first stages are short
            shares = sorted({pp * k // LATE for k in range(1, LATE)} - {0})
            return [even, *([fewer if s < late else larger for s in range(stages)] for late in shares)]
        middle = set(sorted(range(virtual_stages), key=lambda turn: (abs(2 * turn - virtual_stages + 1), turn))[:count])
        last = set(range(virtual_stages - count, virtual_stages))
        ways = [
            [larger if s // pp in (last if s % pp < late else middle) else fewer for s in range(stages)]
            for late in sorted({0, 1, pp // 4}, reverse=True)
        ]
        return [*ways, even]

    def equal_stages(self, option: Option, stages: int) -> list[list[NDArray[np.bool_]]]:
        """The way to cut stages that hold equal numbers of blocks of the largest group, or one more; as in :meth:`even_stages`."""
        places = set(self.largest(option))
        counted = np.concatenate([[0], np.cumsum([k in places for k in self.class_of])])
        each, rest = divmod(int(counted[-1]), stages)
        held = counted[None, :] - counted[:, None]
        return [[(held >= each) & (held <= each + (rest > 0))] * stages]

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


def _sums(times: Iterable[float]) -> tuple[float, ...]:
    """Of the first 0, 1, ... all of these."""
    return tuple(accumulate(times, initial=0.0))


def least_held(candidate: Candidate) -> int:
    """Micro-batches that each pipeline rank holds at some moment on every one of its stages, at least."""
    degrees = (candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches)
    return int(forwards_done(candidate.schedule, *degrees).min())

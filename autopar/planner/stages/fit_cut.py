"""Stage cuts of one candidate in one layout: what fits, with how little recompute, and what the leanest cut needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import StageCost, Step
from autopar.cost.step.memory import kept_bytes
from autopar.errors import InfeasibleError
from autopar.plan import RECOMPUTES, Recompute
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.activation_modes import MOVED, Way, none_if_moved
from autopar.planner.stages.cut_blocks import CutBlocks
from autopar.planner.stages.fitting import MAX_CUTS, Fitting, busy_s, lightest, relaxable, relaxed
from autopar.planner.stages.per_device import Placed
from autopar.planner.stages.stage_cut import Cut, CutBlock, StageCutter
from autopar.planner.stages.turns import by_turns
from autopar.schedule import live_peaks, peak_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a layout gave no plan: too slow to matter, or too large; ``host_bytes``: what it needs of a host that has less."""

    needs_bytes: int = 0
    host_bytes: int = 0
    is_slow: bool = False


class Cuts(CutBlocks):
    """Stage cuts for one model and cluster; remembers what candidates share.

    Args:
        rows, placed, space_modes, recompute, pinned, moved: see :class:`CutBlocks`.
        buckets: sizes of what is summed together, of which a plan takes the quickest.
    """

    def __init__(
        self,
        rows: RowMaker,
        placed: Placed,
        *,
        space_modes: tuple[Recompute, ...],
        recompute: Mapping[int, Recompute],
        pinned: Mapping[int, int],
        moved: frozenset[int] = frozenset(),
        buckets: tuple[int, ...] = (),
    ) -> None:
        super().__init__(rows, placed, space_modes=space_modes, recompute=recompute, pinned=pinned, moved=moved)
        self.buckets = buckets
        self._held: dict[tuple[str, int, int, int], list[int]] = {}

    def fits(
        self,
        candidate: Candidate,
        option: PricedLayout,
        step: Step,
        cutters: Sequence[StageCutter],
        at_most_s: float,
        allowed: Sequence[NDArray[np.bool_]] | None,
        late_s: float,
    ) -> Fitting | Failure:
        """The first cut that fits, with less recompute, which takes no longer, where stages that share a rank leave some of its memory.

        Args:
            cutters: one for each pipeline rank.
            late_s: a cut that fits and takes as long is not wanted, as there is a quicker one.
        """
        limits, in_flight = self._limits(candidate)
        room, pp, v = self.placed.limits(candidate), candidate.mesh.pp, candidate.virtual_stages
        weighed = partial(
            self._weighed, candidate, option, step, cutters, at_most_s=at_most_s, late_s=late_s, in_flight=in_flight
        )
        needs = 0
        for _ in range(MAX_CUTS):
            cut = self._cut_once(candidate, option, step, cutters, in_flight, limits, allowed)
            if cut is None:
                break
            found = weighed(cut)
            if isinstance(found, Failure) or _spare(found, room) >= 0:
                return found
            needs = max(m.total for m in found.memory)
            spare = [limit - m.total for limit, m in zip(room, found.memory, strict=True)]
            limits = [n + 1.01 * min(spare[s % pp], 0) / v for s, n in enumerate(limits)]
        if self.placed.has(candidate) and v == 1:
            return Failure(needs_bytes=needs or self.leanest(candidate, option, step, cutters[0]))
        lean = self._lean(candidate, option, step, cutters, in_flight, allowed)
        if not lean:
            if self.pinned and not self._can_be_cut(cutters[0], pp * v):
                raise InfeasibleError("the stages that are pinned can be cut", value=f"{pp * v} stages")
            return Failure(needs_bytes=needs or self.leanest(candidate, option, step, cutters[0]))
        found_bytes = []
        for cut in lean:
            found = weighed(cut)
            if isinstance(found, Failure) or _spare(found, room) >= 0:
                return found
            found_bytes.append(max(m.total for m in found.memory))
        return Failure(needs_bytes=min(found_bytes))

    def _weighed(
        self, candidate: Candidate, option: PricedLayout, step: Step, cutters: Sequence[StageCutter], cut: Cut,
        *, at_most_s: float, late_s: float, in_flight: Sequence[int],
    ) -> Fitting | Failure:  # fmt: skip
        """A cut with its memory, which may be too much; with less recompute where that fits, and whether it is too slow."""
        pp, count, cutter = candidate.mesh.pp, candidate.num_micro_batches, cutters[0]
        orders = relaxable(cut, cutter, in_flight, pp) if candidate.virtual_stages > 1 else [[]] * pp
        least = lightest(cut, orders, cutter)
        light = partial(busy_s, least, cutter, pp, count, by_rank=cutters)
        if not any(orders) and light() >= at_most_s:
            return Failure(is_slow=True)
        if self.placed.has(candidate) and self._is_late(candidate, least, option, step, at_most_s):
            return Failure(is_slow=True)
        found = self.fitting(candidate, cut, option, step)
        if _spare(found, self.placed.limits(candidate)) < 0:
            return found
        if light(with_once=True) >= at_most_s:
            return Failure(is_slow=True)
        return self._lightened(candidate, option, step, cutter, found, orders, least, late_s)

    def lightened(
        self,
        candidate: Candidate,
        option: PricedLayout,
        step: Step,
        cutters: Sequence[StageCutter],
        found: Fitting,
        late_s: float,
    ) -> Fitting | Failure:
        """A cut that fits with less recompute where that fits too, or that it takes ``late_s`` at least."""
        orders = relaxable(found.cut, cutters[0], self._limits(candidate)[1], candidate.mesh.pp)
        least = lightest(found.cut, orders, cutters[0])
        return self._lightened(candidate, option, step, cutters[0], found, orders, least, late_s)

    def _lightened(
        self, candidate: Candidate, option: PricedLayout, step: Step, cutter: StageCutter,
        found: Fitting, orders: Sequence[Sequence[int]], least: Cut, late_s: float,
    ) -> Fitting | Failure:  # fmt: skip
        """:meth:`lightened` by blocks in these ``orders`` (:func:`relaxable`); ``least``: the cut with none of them recomputed."""
        if self._is_late(candidate, least, option, step, late_s):
            return Failure(is_slow=True)
        if not any(orders):
            return found
        refit = partial(self.fitting, candidate, option=option, step=step)
        return relaxed(found, orders, cutter, refit, self.placed.limits(candidate))

    def _lean(
        self, candidate: Candidate, option: PricedLayout, step: Step, cutters: Sequence[StageCutter],
        in_flight: Sequence[int], allowed: Sequence[NDArray[np.bool_]] | None,
    ) -> list[Cut]:  # fmt: skip
        """Stages of equal numbers of blocks, and those that are quickest in memory without end, all blocks as they need the least of it.

        They fit where equal shares of a rank's memory hold no cut: a stage with the loss needs more in passing than such a share.
        """
        pp, n = candidate.mesh.pp, len(cutters[0].blocks)
        stages = pp * candidate.virtual_stages
        cut = self._cut_once(candidate, option, step, cutters, in_flight, [float("inf")] * stages, allowed)
        if cut is None:
            return []
        even = evenly(n, stages)
        edges = enumerate(zip((0, *even), even, strict=False))
        may = not self.pinned and (allowed is None or all(allowed[s][start, stop] for s, (start, stop) in edges))
        found = []
        for stops, passes in product(dict.fromkeys([*([even] if may else []), cut.stops]), (0.0, 1.0)):
            modes: list[Way] = []  # what a block needs in passing may be beside what its stage holds, or in its place
            for s, (start, stop) in enumerate(zip((0, *stops), stops, strict=False)):
                for block in cutters[s % pp].blocks[start:stop]:
                    least = min(block.options, key=lambda o: in_flight[s] * o.held_bytes + passes * o.transient_bytes)
                    modes.append(least.mode)
            found.append(replace(cut, stops=stops, modes=tuple(modes)))
        return [*{(own.stops, own.modes): own for own in found}.values()]

    def by_turns(
        self, candidate: Candidate, first: Fitting, option: PricedLayout, step: Step, cutters: Sequence[StageCutter]
    ) -> list[Cut]:
        """A cut that fits with other blocks recomputed; see :func:`autopar.planner.stages.turns.by_turns`."""
        degrees = (candidate.schedule, candidate.mesh.pp, candidate.virtual_stages, candidate.num_micro_batches)
        pp, last = candidate.mesh.pp, candidate.mesh.pp * candidate.virtual_stages - 1
        return by_turns(
            first,
            cutters[0],
            lambda stage, s: kept_bytes(stage, receives=s > 0, sends=s < last),
            [peak_table(*degrees, rank) for rank in range(pp)],
            self.placed.tensor_limits(candidate),
        )

    def _is_late(self, candidate: Candidate, cut: Cut, option: PricedLayout, step: Step, at_most_s: float) -> bool:
        """Whether a cut takes too long, whatever memory it needs and whatever size its buckets have: quicker to find than what fits."""
        if at_most_s == float("inf"):
            return False
        model, made = self.placed.ordered(candidate), self.stages(cut.stops, cut.modes, option, step.mesh.pp)
        if model.breakdown(made, step).total_s < at_most_s:
            return False
        others = [size for size in self.buckets if size != step.bucket_bytes]
        if not others or not model.sums_in_buckets(made, step):
            return True
        return all(model.breakdown(made, replace(step, bucket_bytes=size)).total_s >= at_most_s for size in others)

    def _cut_once(
        self,
        candidate: Candidate,
        option: PricedLayout,
        step: Step,
        cutters: Sequence[StageCutter],
        in_flight: Sequence[int],
        limits: Sequence[float],
        allowed: Sequence[NDArray[np.bool_]] | None,
    ) -> Cut | None:
        if self.placed.has(candidate) and candidate.virtual_stages == 1:
            return self.placed.cut(
                candidate, option, step, cutters, in_flight=in_flight, limit_bytes=limits, allowed=allowed
            )
        return cutters[0].cut(
            candidate.mesh.pp * candidate.virtual_stages,
            in_flight=in_flight,
            limit_bytes=limits,
            num_micro_batches=candidate.num_micro_batches,
            allowed=allowed,
            by_rank=cutters,
        )

    def fitting(self, candidate: Candidate, cut: Cut, option: PricedLayout, step: Step) -> Fitting:
        made = self.stages(cut.stops, cut.modes, option, step.mesh.pp)
        return Fitting(cut=cut, made=made, memory=self.placed.ordered(candidate).memory(made, step))

    def _can_be_cut(self, cutter: StageCutter, stages: int) -> bool:
        """Whether the pinned stages alone allow a cut."""
        unlimited = [float("inf")] * stages
        return cutter.cut(stages, in_flight=[1] * stages, limit_bytes=unlimited, num_micro_batches=1) is not None

    def least_bytes(self, blocks: Sequence[CutBlock], candidate: Candidate) -> float:
        """Tensors of the fullest rank at least: the average rank, or a single block."""
        own = [b.static_bytes + min(o.held_bytes for o in b.options) for b in blocks]
        alone = (b.static_bytes + min(o.held_bytes + o.transient_bytes for o in b.options) for b in blocks)
        return max(sum(own) / candidate.mesh.pp, *alone)

    def leanest(self, candidate: Candidate, option: PricedLayout, step: Step, cutter: StageCutter) -> int:
        """Bytes of the fullest rank when blocks are spread evenly and recompute wherever they may."""
        n, stages = len(cutter.blocks), candidate.mesh.pp * candidate.virtual_stages
        stops = evenly(n, stages)
        modes = tuple(min(block.options, key=lambda o: o.held_bytes).mode for block in cutter.blocks)
        made = self.stages(stops, modes, option, candidate.mesh.pp)
        return max(m.total for m in self.placed.ordered(candidate).memory(made, step))

    def fastest_modes(self) -> tuple[Recompute, ...]:
        """Of each block the one that takes the least time."""
        free = min(self.space_modes, key=RECOMPUTES.index)
        return tuple(self.recompute.get(index, free) for index in range(len(self.class_of)))

    def stages(self, stops: Sequence[int], modes: Sequence[Way], option: PricedLayout, pp: int) -> list[StageCost]:
        costs = [self._costs(own) for own in option.ranks or (option,)]
        if MOVED in modes:
            costs = [
                [self._on_host(cost) if mode == MOVED else cost for cost, mode in zip(own, modes, strict=True)]
                for own in costs
            ]
        again = [none_if_moved(mode) for mode in modes]
        return [
            StageCost(
                blocks=tuple(costs[s % pp % len(costs)][start:stop]),
                recompute=tuple(again[start:stop]),
            )
            for s, (start, stop) in enumerate(zip((0, *stops), stops, strict=False))
        ]

    def _limits(self, candidate: Candidate) -> tuple[list[float], list[int]]:
        """Bytes that each stage may fill, and the micro-batches that it holds."""
        pp, v = candidate.mesh.pp, candidate.virtual_stages
        key = (candidate.schedule, pp, v, candidate.num_micro_batches)
        if key not in self._held:
            held = [0] * (pp * v)
            for rank in range(pp):
                for counts in live_peaks(*key, rank):
                    for turn, count in enumerate(counts):
                        held[turn * pp + rank] = max(held[turn * pp + rank], count)
            self._held[key] = held
        return [limit / v for limit in self.placed.tensor_limits(candidate)] * v, self._held[key]


def _spare(found: Fitting, room: Sequence[int]) -> int:
    """Bytes that the fullest rank leaves; below zero: that it has too much."""
    return min(limit - m.total for limit, m in zip(room, found.memory, strict=True))


def evenly(blocks: int, stages: int) -> tuple[int, ...]:
    """Where stages of as equal numbers of blocks as can be end."""
    return tuple(round((s + 1) * blocks / stages) for s in range(stages))

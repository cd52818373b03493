"""Stage cuts of pipelines whose ranks share cores: every cut, by its bound.

What one rank leaves of the cores another takes: a step is no sum and largest stage, by which stages are cut elsewhere
(:mod:`autopar.planner.stages.stage_cut`). A long stage costs little while the others have nothing to do and leave it the cores they
would take. So all cuts that the space allows are bounded side by side (:mod:`autopar.planner.bounds.core_bounds`), and predicted from the least
bound on until the next one is no quicker than the best. Where there are too many, blocks move from stage to stage beside it as
long as the step gets shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import Step
from autopar.cost.step.simulation import After, StageTimes, durations_of, sends_of, shared_ends_s
from autopar.planner.bounds.core_bounds import least_ends_s
from autopar.planner.bounds.cores import SharedCores
from autopar.planner.layouts.types import Option
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.activation_modes import Way
from autopar.planner.stages.equal_blocks import EqualBlocks
from autopar.planner.stages.fit_cut import Cuts, Failure, evenly
from autopar.planner.stages.fitting import Fitting
from autopar.planner.stages.uneven import exactly

MANY = 1 << 18
"""Actions of all cuts of a candidate up to which these are bounded."""

AHEAD = 16
"""Times as many first parts of cuts as there may be cuts, some of which the last stages rule out."""

ROUNDING = 1e-9
"""A bound of a cut is below its time up to this part of it."""

MaybeWay = Sequence[NDArray[np.bool_]] | None
Stops = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounded:
    """A cut with the quickest mode of every block.

    Attributes:
        least_s: the bound of a step with these stops, whatever its blocks recompute.
        times, after: of the stages and the ranks; what follows with the size of buckets that is quickest for each rank.
    """

    least_s: float
    stops: Stops
    times: tuple[StageTimes, ...]
    after: tuple[After, ...]


class CoreCuts:
    """The cuts of one model's candidates where ranks share cores.

    Args:
        cuts: makes them.
        cores: which candidates share.
        blocks: which blocks stages may hold.
        is_even: stages are equal by a law of the space.
    """

    def __init__(self, cuts: Cuts, cores: SharedCores, blocks: EqualBlocks, *, is_even: bool) -> None:
        self.cuts, self.cores, self.blocks, self.is_even = cuts, cores, blocks, is_even
        self._known: dict[tuple[Candidate, int], tuple[Option, list[Bounded] | None]] = {}

    def has(self, candidate: Candidate) -> bool:
        """Whether ranks share cores, and nothing is kept on the host."""
        shares = self.cores.are_shared and self.cores.speed(candidate) != 1.0
        return shares and not (
            self.cuts.placed.has(candidate) or candidate.on_host or candidate.moves or self.cuts.moved
        )

    def bound_s(self, candidate: Candidate, option: Option, step: Step) -> float:
        """The least bound of all cuts; 0 where there are too many."""
        every = self._every(candidate, option, step)
        return every[0].least_s if every else 0.0

    def tries(
        self,
        candidate: Candidate,
        option: Option,
        step: Step,
        ways: Iterable[MaybeWay],
        fits: Callable[[MaybeWay, float], Fitting | Failure],
    ) -> Iterator[Callable[[float], Fitting | Failure]]:
        """For each cut what gives it as far as it takes less than a time (stated, as if all ranks worked): see :meth:`Cuts.fits`.

        Those that balance the stages first. Where these need more memory than there is, no others are looked for.
        """
        speed, model, blocks = self.cores.speed(candidate), self.cores.model, len(self.blocks.class_of)
        found: dict[Stops, float] = {}
        may_fit = False

        def noted(way: MaybeWay, late_s: float, *, cut: Bounded | None = None) -> Fitting | Failure:
            nonlocal may_fit
            if cut is not None and late_s * speed <= max(cut.least_s, self._quickest_s(candidate, cut)):
                return Failure(is_slow=True)
            plan = fits(way, late_s * speed)
            may_fit |= isinstance(plan, Fitting) or plan.is_slow
            if isinstance(plan, Fitting):
                found[plan.cut.stops] = model.breakdown(plan.made, step).total_s
            return plan

        for way in ways:
            yield partial(noted, way)
        every = self._every(candidate, option, step) if may_fit else []
        for cut in every or ():
            if cut.least_s >= min(found.values(), default=math.inf):
                return
            if cut.stops not in found:
                yield partial(noted, exactly(cut.stops, blocks), cut=cut)
        if every is None:
            yield partial(noted, exactly(self._near(candidate, option, step), blocks))

    def _quickest_s(self, candidate: Candidate, cut: Bounded) -> float:
        """The step of a cut with the quickest mode of every block."""
        degrees = candidate.schedule, candidate.mesh.pp, candidate.num_micro_batches
        ends_s = shared_ends_s(*degrees, cut.times, cut.after, self.cores.model.device.core_share)
        return max(ends_s) * (1 - ROUNDING)

    def _every(self, candidate: Candidate, option: Option, step: Step) -> list[Bounded] | None:
        """All cuts by their bounds; None where there are too many."""
        key = candidate, id(option)
        if key not in self._known:  # the layout is kept, so that its id stays its own
            stages = candidate.mesh.pp * candidate.virtual_stages
            most = MANY // (2 * stages * candidate.num_micro_batches)
            found = _all_stops(len(self.blocks.class_of), stages, self._may(candidate, option), most)
            every = None if found is None else self._bounded(candidate, option, step, found)
            self._known[key] = option, every
        return self._known[key][1]

    def _may(self, candidate: Candidate, option: Option) -> Callable[[int, int, int], bool]:
        """Whether a stage may hold these blocks, by pins and the laws of the space."""
        pp, virtual_stages = candidate.mesh.pp, candidate.virtual_stages
        ways = self.blocks.even_stages(option, pp, virtual_stages) if virtual_stages > 1 else []
        if self.is_even:
            ways = self.blocks.equal_stages(option, pp * virtual_stages)
        pinned = self.cuts.pinned

        def may(stage: int, start: int, stop: int) -> bool:
            if any((start <= block < stop) != (own == stage) for block, own in pinned.items()):
                return False
            return not ways or any(bool(way[stage][start, stop]) for way in ways)

        return may

    def _near(self, candidate: Candidate, option: Option, step: Step) -> Stops:
        """Where stages end that begin with equal numbers of blocks, once no block on the next stage shortens the step.

        With the quickest mode of every block: the same stops whatever else is known.
        """
        pp, modes = candidate.mesh.pp, self._modes(candidate, option, step)

        def priced(stops: Stops) -> float:
            return self.cores.model.breakdown(self.cuts.stages(stops, modes, option, pp), step).total_s

        best = evenly(len(modes), pp * candidate.virtual_stages)
        known = {best: priced(best)}
        while True:
            known |= {stops: priced(stops) for stops in self._beside(candidate, option, best) if stops not in known}
            least = min(known, key=lambda stops: (known[stops], stops))
            if known[least] >= known[best]:
                return best
            best = least

    def _modes(self, candidate: Candidate, option: Option, step: Step) -> tuple[Way, ...]:
        """Of each block the one that takes the least time."""
        cutter = self.cuts.cutters(candidate, option, step)[0]
        return tuple(min(block.options, key=lambda option: option.time_s).mode for block in cutter.blocks)

    def _beside(self, candidate: Candidate, option: Option, stops: Stops) -> Iterator[Stops]:
        """Cuts with a block of one stage on one beside it."""
        may = self._may(candidate, option)
        for place in range(len(stops) - 1):
            for more in (-1, 1):
                moved = (*stops[:place], stops[place] + more, *stops[place + 1 :])
                edges = [*zip((0, *moved), moved, strict=False)]
                if all(start < stop and may(s, start, stop) for s, (start, stop) in enumerate(edges)):
                    yield moved

    def _bounded(self, candidate: Candidate, option: Option, step: Step, every: Sequence[Stops]) -> list[Bounded]:
        """These cuts, that of the least bound first."""
        model, pp = self.cores.model, candidate.mesh.pp
        modes = self._modes(candidate, option, step)
        known: dict[tuple[int, int, int], StageTimes] = {}
        follows: dict[Stops, After] = {}
        # what ranks sum of parameters of blocks on several of them depends on the stages of all
        inner = {*self.blocks.class_of[1:-1]}
        is_own = not any(p.shared for k in inner for p in option.costs[k].parameters)
        steps = [replace(step, bucket_bytes=size) for size in self.cuts.buckets or (step.bucket_bytes,)]
        pipelines: list[list[StageTimes]] = []
        after: list[list[After]] = []
        for stops in every:
            edges = [*zip((0, *stops), stops, strict=False)]
            spans = [(s, *edge) for s, edge in enumerate(edges)]
            by_rank = [(rank, *(place for edge in edges[rank::pp] for place in edge)) for rank in range(pp)]
            if not is_own or any(span not in known for span in spans) or any(own not in follows for own in by_rank):
                made = self.cuts.stages(stops, modes, option, pp)
                known |= zip(spans, model.times_of(made, step), strict=True)
                told = [model.after(made, own) for own in steps]
                follows |= {own: _least(some) for own, *some in zip(by_rank, *told, strict=True)}
            pipelines.append([known[span] for span in spans])
            after.append([follows[own] for own in by_rank])
        bounds_s = least_ends_s(
            (candidate.schedule, pp, candidate.virtual_stages, candidate.num_micro_batches),
            np.array([durations_of(times) for times in pipelines]).T,
            np.array([sends_of(times) for times in pipelines]).T,
            np.array([[rank.wait_s for rank in own] for own in after]).T,
            np.array([[rank.work_s for rank in own] for own in after]).T,
            model.device.core_share,
        )
        found = [
            Bounded(least_s=least_s * (1 - ROUNDING), stops=stops, times=tuple(times), after=tuple(own))
            for least_s, stops, times, own in zip(bounds_s.tolist(), every, pipelines, after, strict=True)
        ]
        return sorted(found, key=lambda cut: (cut.least_s, cut.stops))


def _least(some: Sequence[After]) -> After:
    """What follows on a rank at the least, with each size of buckets."""
    return After(wait_s=min(own.wait_s for own in some), work_s=min(own.work_s for own in some))


def _all_stops(blocks: int, stages: int, may: Callable[[int, int, int], bool], most: int) -> list[Stops] | None:
    """Where stages may end; None where there are more than ``most``."""
    found: list[Stops] = [()]
    for stage in range(stages):
        left = stages - 1 - stage
        stops = range(1, blocks - left + 1) if left else (blocks,)
        found = [
            (*before, stop)
            for before in found
            for stop in stops
            if stop > (start := before[-1] if before else 0) and may(stage, start, stop)
        ]
        if len(found) > AHEAD * most:
            return None
    return found if len(found) <= most else None

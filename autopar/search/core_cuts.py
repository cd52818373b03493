"""Stage cuts of pipelines whose ranks share cores: every cut, by its bound.

What one rank leaves of the cores another takes: a step is no sum and largest stage, by which stages are cut elsewhere
(:mod:`autopar.search.inter`). With more than half as many cores as pipeline ranks a long stage costs little where the others are
done. So all cuts that the space allows are bounded side by side (:mod:`autopar.search.core_bounds`), and predicted from the least
bound on until the next one is no quicker than the best. Where there are too many, blocks move from stage to stage as long as the step
gets shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import Step
from autopar.cost.pipeline import StageTimes, durations_of, sends_of
from autopar.search.candidates import Candidate
from autopar.search.core_bounds import least_ends_s
from autopar.search.cores import SharedCores
from autopar.search.cuts import Cuts, Failure
from autopar.search.equal_blocks import EqualBlocks
from autopar.search.fitting import Fitting
from autopar.search.inter import StageCutter
from autopar.search.options import Option
from autopar.search.uneven import exactly
from autopar.search.ways import Way

MANY = 4096
"""Cuts of a candidate up to which all are bounded."""

ROUNDING = 1e-9
"""A bound of a cut is below its time up to this part of it."""

MaybeWay = Sequence[NDArray[np.bool_]] | None
Stops = tuple[int, ...]


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
        self._known: dict[tuple[Candidate, int], tuple[Option, list[tuple[float, Stops]] | None]] = {}

    def has(self, candidate: Candidate) -> bool:
        """Whether ranks share cores, and nothing is kept on the host."""
        shares = self.cores.are_shared and self.cores.speed(candidate) != 1.0
        return shares and not (self.cuts.placed.has(candidate) or candidate.on_host or candidate.moves or self.cuts.moved)

    def bound_s(self, candidate: Candidate, option: Option, step: Step) -> float:
        """The least bound of all cuts; 0 where there are too many."""
        every = self._every(candidate, option, step)
        return every[0][0] if every else 0.0

    def tries(
        self,
        candidate: Candidate,
        option: Option,
        step: Step,
        ways: Iterable[MaybeWay],
        fits: Callable[[MaybeWay, float], Fitting | Failure],
    ) -> Iterator[Callable[[float], Fitting | Failure]]:
        """For each cut what gives it as far as it takes less than a time (stated, as if all ranks worked): see :meth:`Cuts.fits`.

        Those that balance the stages first. Where none of these fits, none is looked for.
        """
        speed, model = self.cores.speed(candidate), self.cores.model
        found: dict[Stops, float] = {}

        def noted(way: MaybeWay, late_s: float, *, least_s: float = 0.0) -> Fitting | Failure:
            if least_s >= late_s * speed:
                return Failure(is_slow=True)
            plan = fits(way, late_s * speed)
            if isinstance(plan, Fitting):
                found[plan.cut.stops] = model.breakdown(plan.made, step).total_s
            return plan

        for way in ways:
            yield partial(noted, way)
        if not found:
            return
        every, blocks = self._every(candidate, option, step), len(self.blocks.class_of)
        for least_s, stops in every or ():
            if least_s * (1 - ROUNDING) >= min(found.values()):
                return
            yield partial(noted, exactly(stops, blocks), least_s=least_s * (1 - ROUNDING))
        tried, best = {*found}, math.inf
        while every is None and min(found.values()) < best:
            best = min(found.values())
            place = min(found, key=lambda stops: found[stops])
            for stops in self._beside(candidate, option, place):
                if stops not in tried:
                    tried.add(stops)
                    yield partial(noted, exactly(stops, blocks))

    def _every(self, candidate: Candidate, option: Option, step: Step) -> list[tuple[float, Stops]] | None:
        """All cuts by their bounds; None where there are too many."""
        key = candidate, id(option)
        if key not in self._known:  # the layout is kept, so that its id stays its own
            stages = candidate.mesh.pp * candidate.virtual_stages
            found = _all_stops(len(self.blocks.class_of), stages, self._may(candidate, option))
            bounds_s = None if found is None else self._bounds_s(candidate, option, step, found)
            every = None if found is None or bounds_s is None else sorted(zip(bounds_s, found, strict=True))
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

    def _beside(self, candidate: Candidate, option: Option, stops: Stops) -> Iterator[Stops]:
        """Cuts with a block of one stage on one beside it."""
        may = self._may(candidate, option)
        for place in range(len(stops) - 1):
            for more in (-1, 1):
                moved = (*stops[:place], stops[place] + more, *stops[place + 1 :])
                edges = [*zip((0, *moved), moved, strict=False)]
                if all(start < stop and may(s, start, stop) for s, (start, stop) in enumerate(edges)):
                    yield moved

    def _bounds_s(self, candidate: Candidate, option: Option, step: Step, every: Sequence[Stops]) -> list[float]:
        """Of each cut, with the quickest mode of every block, and with any size of buckets."""
        model, pp = self.cores.model, candidate.mesh.pp
        modes = _quickest_modes(self.cuts.cutters(candidate, option, step)[0])
        known: dict[tuple[int, int, int], StageTimes] = {}
        follows: dict[Stops, float] = {}
        steps = [replace(step, bucket_bytes=size) for size in self.cuts.buckets or (step.bucket_bytes,)]
        pipelines: list[list[StageTimes]] = []
        after: list[list[float]] = []
        for stops in every:
            edges = [*zip((0, *stops), stops, strict=False)]
            spans = [(s, *edge) for s, edge in enumerate(edges)]
            by_rank = [(rank, *(place for edge in edges[rank::pp] for place in edge)) for rank in range(pp)]
            if any(span not in known for span in spans) or any(own not in follows for own in by_rank):
                made = self.cuts.stages(stops, modes, option, pp)
                known |= zip(spans, model.times_of(made, step), strict=True)
                told = [model.follows_s(made, own) for own in steps]
                for own, *some in zip(by_rank, *told, strict=True):
                    follows[own] = min(follows.get(own, math.inf), *some)
            pipelines.append([known[span] for span in spans])
            after.append([follows[own] for own in by_rank])
        return least_ends_s(
            (candidate.schedule, pp, candidate.virtual_stages, candidate.num_micro_batches),
            np.array([durations_of(times) for times in pipelines]).T,
            np.array([sends_of(times) for times in pipelines]).T,
            np.array(after).T,
            model.device.core_share,
            is_work=model.cluster.num_nodes == 1,
        ).tolist()  # type: ignore[no-any-return]


def _quickest_modes(cutter: StageCutter) -> tuple[Way, ...]:
    """Of each block the one that takes the least time."""
    return tuple(min(block.options, key=lambda option: option.time_s).mode for block in cutter.blocks)


def _all_stops(blocks: int, stages: int, may: Callable[[int, int, int], bool]) -> list[Stops] | None:
    """Where stages may end; None where there are more than :data:`MANY`."""
    if math.comb(blocks - 1, stages - 1) > 64 * MANY:
        return None
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
        if len(found) > 16 * MANY:
            return None
    return found if len(found) <= MANY else None

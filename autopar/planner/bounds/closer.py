"""Closer bounds of one candidate, for those that decide how far from the best a plan may be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from autopar.cost.model import CostModel, Step
from autopar.graph.ir import Graph
from autopar.plan import Recompute
from autopar.planner.bounds.bounding import Bounding
from autopar.planner.bounds.bounds import PRECISION as PRECISE
from autopar.planner.bounds.mixed_bounds import mixed_bounds
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.bounds.programs import program
from autopar.planner.bounds.row_bounds import row_bounds
from autopar.planner.bounds.unstaged import unstaged
from autopar.planner.branch_and_bound.mixed_closing import Opened
from autopar.planner.layouts.types import PricedLayout, TypedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space

ROUNDING = 1e-9
"""A bound of a cut is below its time up to this part of it."""

AGAIN = (1.0, 1.02, 1.1)
"""Times of the bound that is aimed at from which bounds are sought again: intervals that are cut elsewhere give others."""


class Closer(Bounding):
    """Bounds as of :class:`Bounding`, and closer ones for one candidate at a time."""

    def __init__(self, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> None:
        super().__init__(graph, model, global_batch_size=global_batch_size, pins=pins, space=space)
        self._closest: dict[tuple[Candidate, int], tuple[float, float]] = {}
        """Closest bounds, and the time that they were asked to be above."""

    def settled_s(self, candidate: Candidate, best_s: float, *, precision: float = PRECISE) -> float:
        """The bound of a candidate, up to ``best_s``: the same whatever was found before or together."""
        found, drafts = best_s, self._drafts(candidate)
        own = self._settled(candidate, drafts, best_s, precision)
        for draft, (bound_s, is_priced) in zip(drafts, own, strict=True):
            self._bounds[candidate, id(draft)] = bound_s, is_priced
            found = min(found, bound_s)
        return found

    def _settled(
        self, candidate: Candidate, drafts: Sequence[TypedLayout], best_s: float, precision: float
    ) -> list[tuple[float, bool]]:
        """In each layout, and whether that is of its priced blocks: not where it takes ``best_s`` without.

        All layouts of the candidate together, and nothing else: what rows are bounded with is always the same.
        """
        bounds_s = [self._draft_s(candidate, draft) for draft in drafts]
        is_priced = [bound_s < best_s for bound_s in bounds_s]
        maker = self.placed if self.placed.has(candidate) else self.rows_of(candidate)
        left = [i for i, own in enumerate(is_priced) if own]
        options = [self.layouts.option(drafts[i]) for i in left]
        exact = [maker.exact(candidate, option, self.step(candidate, option)) for option in options]
        found = self._row_bounds_s([candidate] * len(left), exact, best_s, precision=precision, settles=True)
        for i, bound_s in zip(left, found, strict=True):
            bounds_s[i] = max(bounds_s[i], bound_s)
        return [*zip(bounds_s, is_priced, strict=True)]

    def sharper_bound_s(self, candidate: Candidate, goal_s: float) -> float:
        """The bound of a candidate that was evaluated, closer for each of its layouts that is below ``goal_s``.

        By a linear program, with all of the step where there is one stage. As it is known where ranks differ, or where pins or the
        space say what stages hold. Likewise not remembered.
        """
        remembered = dict(self._bounds)
        known_s = self.known_bounds_s([candidate], goal_s, remembers=True)[0]
        drafts = sorted(self._drafts(candidate), key=lambda draft: self._bounds[candidate, id(draft)][0])
        bounds_s = [self._bounds[candidate, id(draft)][0] for draft in drafts]
        self._bounds = remembered
        if self.placed.has(candidate) or self.stages or self.moved or candidate.moves or self.space.equal_stages:
            return known_s
        found = math.inf
        sharper = self._unstaged_bound_s if candidate.mesh.pp == 1 else self._program_s
        for draft, bound_s in zip(drafts, bounds_s, strict=True):
            if bound_s < min(goal_s, found):
                bound_s = sharper(candidate, self.layouts.option(draft), bound_s, goal_s, min(goal_s, found))
            found = min(found, bound_s)
        return max(found, known_s)

    def _program_s(
        self, candidate: Candidate, option: PricedLayout, bound_s: float, goal_s: float, most_s: float
    ) -> float:
        made = program(self.rows, candidate, option, self.step(candidate, option))
        for share in AGAIN:
            bound_s = max(bound_s, row_bounds([made.row], share * goal_s)[0])
        return made.bound_s(bound_s, goal_s) if bound_s < most_s else bound_s

    def _unstaged_bound_s(
        self, candidate: Candidate, option: PricedLayout, bound_s: float, goal_s: float, most_s: float
    ) -> float:
        step = self.step(candidate, option)

        def step_s(modes: Sequence[Recompute]) -> float:
            (stage,) = self.blocks.stages((len(modes),), modes, option, 1)
            return self.model.breakdown([stage], step).total_s

        row = unstaged(self.rows, candidate, option, step, step_s)
        return max(bound_s, *(row_bounds([row], share * goal_s)[0] * (1 - ROUNDING) for share in AGAIN))

    def closest_s(self, candidate: Candidate, at_most_s: float) -> float:
        """Where devices differ the closest bound that is known: what it is depends on what was looked at before.

        Args:
            at_most_s: layouts are looked at until one is found that may take less.
        """
        drafts = self._least_first(candidate)
        found = [self._bounds[candidate, id(draft)][0] for draft in drafts]
        for i, draft in enumerate(drafts):
            found[i] = self._closest_s(candidate, draft, at_most_s)
            if found[i] < at_most_s:
                break
        return min(found, default=0.0)

    def _closest_s(self, candidate: Candidate, draft: TypedLayout, at_most_s: float) -> float:
        """In one layout."""
        bound = self._bound(candidate, draft, at_most_s)[0]
        key = candidate, id(draft)
        found, asked_s = self._closest.get(key, (0.0, math.inf))
        if self.differs and max(bound, found) < at_most_s < asked_s:
            option = self.layouts.option(draft)
            step = self.step(candidate, option)
            if candidate.mesh.pp == 1:
                found = self._unstaged_s(option, step)
            else:
                row = self.placed.exact(candidate, option, step)
                found = max(found, self.placed.chains.bound_s(row, at_most_s))
            self._closest[key] = found, at_most_s
        return max(bound, found)

    def opened(self, candidates: Sequence[Candidate], goal_s: float) -> list[Opened]:
        """Where devices differ: what of these may take less than ``goal_s``; of each the same, whatever was found before.

        Without stages the bound is the step itself, whatever memory it needs. Layouts that are known to take as long are left out.
        """
        rows: list[MixedRow] = []
        counts = [0] * len(candidates)
        for i, candidate in enumerate(candidates):
            if candidate.mesh.pp == 1:
                continue
            drafts = self._drafts(candidate)
            self._open([(candidate, draft) for draft in drafts], 0.0)
            for draft in drafts:
                if self._bounds[candidate, id(draft)][0] < goal_s:
                    option = self.layouts.option(draft)
                    rows.append(self.placed.exact(candidate, option, self.step(candidate, option)))
                    counts[i] += 1
        tested = zip(rows, mixed_bounds(rows, goal_s, only_test=True).tolist(), strict=True)
        found = []
        for candidate, count in zip(candidates, counts, strict=True):
            if candidate.mesh.pp == 1:
                bound_s = min(self._alone_s(candidate, goal_s), goal_s)
                found.append(Opened(first_s=bound_s, bound_s=bound_s))
                continue
            may = [(row, bound_s) for row, bound_s in islice(tested, count) if bound_s < goal_s]
            first_s = min((bound_s for _, bound_s in may), default=math.inf)
            found.append(Opened(first_s=min(first_s, goal_s), bound_s=goal_s, rows=tuple(row for row, _ in may)))
        return found

    def _alone_s(self, candidate: Candidate, goal_s: float) -> float:
        """Without stages."""
        bound_s = self.settled_s(candidate, goal_s)
        if bound_s >= goal_s:
            return bound_s
        options = [self.layouts.option(draft) for draft in self._drafts(candidate)]
        return max(bound_s, min(self._unstaged_s(option, self.step(candidate, option)) for option in options))

    def _unstaged_s(self, option: PricedLayout, step: Step) -> float:
        """Without a pipeline: the step with as little recompute as there may be."""
        modes = self.blocks.fastest_modes()
        (stage,) = self.blocks.stages((len(modes),), modes, option, 1)
        return self.model.breakdown([stage], step).total_s * (1 - ROUNDING)

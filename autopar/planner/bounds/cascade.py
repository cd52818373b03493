"""The lower bounds of a candidate, from the quickest to work out to the tightest.

| level | relaxation | floors of blocks |
|---|---|---|
| 0 | total work over total speed; total memory | divided perfectly over ``cp`` and ``tp``, of what is sent inside of the model the tokens that travel to experts alone |
| 1 | feasibility | likewise |
| 2 | feasibility | in each of the layouts that some price of memory makes best: divided perfectly, but for the seconds of typed blocks |
| 2 | feasibility | priced, where these do not exclude the layout |

Each is a function of the candidate and of the goal alone: the same alone and in company, and no lower when the goal rises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.planner.bounds.chain_program import chain_bound
from autopar.planner.bounds.chain_proof import ROUNDING, ChainProof
from autopar.planner.bounds.columns import side_by_side
from autopar.planner.bounds.feasibility import PRECISION, excluded, feasible_bounds
from autopar.planner.bounds.instance_maker import InstanceMaker
from autopar.planner.layouts.layout import TypedLayout
from autopar.planner.search import SearchContext
from autopar.planner.space.candidates import Candidate

LEVELS = 3
"""Of bounds; the last one is that of the priced layouts."""

COARSE = 0.03
"""The precision of bounds that are raised once more before a candidate is evaluated."""


class Cascade:
    """The bounds of one search's candidates; remembers what it has worked out.

    Args:
        context: of the search.
    """

    def __init__(self, context: SearchContext) -> None:
        self.context, self.maker = context, InstanceMaker(context)
        self._known: dict[tuple[Candidate, TypedLayout | None], tuple[float, float]] = {}
        """Bounds in a layout, or below all (None), and the goals up to which they were worked out."""

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """For each candidate seconds below which it has no plan, infinite where none fits; at ``goal_s`` it is excluded."""
        if level == 0:
            return self._work_s(candidates)
        if level < LEVELS - 1:
            return self._bounds_s([(c, None) for c in candidates], goal_s, COARSE)
        every = [self.context.known_layouts(c) for c in candidates]
        return [min(found, default=0.0) for found in self._of_layouts_s(candidates, every, goal_s)]

    def layout_bounds_s(self, candidate: Candidate, layouts: Sequence[TypedLayout], goal_s: float) -> list[float]:
        """As :meth:`bounds_s` of the last level, of one candidate in each of these layouts: the least one is of its priced blocks."""
        return self._of_layouts_s([candidate], [layouts], goal_s)[0]

    def closest_s(
        self,
        candidate: Candidate,
        goal_s: float,
        known: Sequence[ChainProof] = (),
        *,
        whole_s: float | None = 0.0,
        layouts: Sequence[TypedLayout] | None = None,
        rounds: int | None = None,
    ) -> tuple[float, tuple[ChainProof, ...]]:
        """As :meth:`bounds_s`, by the tightest relaxation that there is, with new proofs that may serve others of the same schedule.

        Args:
            known: such proofs.
            whole_s: up to here whole blocks are looked at; None: it is only asked whether the bound comes to the goal.
            layouts: of the candidate; None: all that may have its best plan.
            rounds: see :func:`chain_bound`.
        """
        proofs: list[ChainProof] = []
        layouts = self.context.known_layouts(candidate) if layouts is None else layouts
        found = self.layout_bounds_s(candidate, layouts, goal_s)
        for i in sorted(range(len(layouts)), key=found.__getitem__):
            typed = layouts[i]
            if found[i] >= goal_s or candidate.moves or self.context.moved:
                continue
            priced = self.context.layouts.price(typed)
            if candidate.mesh.pp == 1:
                one = self.maker.one_stage(candidate, priced)
                bound_s = (
                    float(feasible_bounds([one], goal_s)[0]) * (1 - ROUNDING) if one.holds_in_order() else math.inf
                )
                found[i] = max(found[i], bound_s)
            else:
                instance = self.maker.priced(candidate, priced)
                if candidate.virtual_stages == 1:
                    found[i] = max(found[i], float(feasible_bounds([instance], goal_s, whole=True)[0]))
                    if found[i] >= goal_s:
                        continue
                # of ranks that are alike, blocks in parts spread as whole ones do: integer programs take long there and raise little
                is_near = whole_s is not None and (found[i] >= whole_s or not self.maker.placed.is_mixed(candidate))
                aim_s = 0.0 if is_near else whole_s
                bound = chain_bound(instance, goal_s, (*known, *proofs), above_s=found[i], whole_s=aim_s, rounds=rounds)
                if bound is not None:
                    found[i] = max(found[i], min(bound.time_s, goal_s))
                    if bound.proof and all(bound.proof.weights != one.weights for one in (*known, *proofs)):
                        proofs.append(bound.proof)
            goal_s = min(goal_s, found[i])  # to which that of the candidate comes at most
        return min(found, default=0.0), tuple(proofs)

    def _work_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Of work alone, infinite where all ranks together have too little memory."""
        found = np.zeros(len(candidates))
        for places, columns in side_by_side([self.maker.perfect_split(c) for c in candidates]):
            found[places] = np.where(columns.holds(), columns.work_s(), np.inf)
        bounds_s: list[float] = found.tolist()
        return bounds_s

    def _of_layouts_s(
        self, candidates: Sequence[Candidate], layouts: Sequence[Sequence[TypedLayout]], goal_s: float
    ) -> list[list[float]]:
        """Layouts are priced, the one of the least bound first, until that of each candidate is priced or not below the goal."""
        found = self._typed_s(candidates, layouts, goal_s)
        left = [{*range(len(own))} for own in layouts]
        while True:
            asked: list[tuple[int, int]] = []
            for i, own in enumerate(found):
                least = min(range(len(own)), key=own.__getitem__, default=-1)
                if least in left[i] and own[least] < goal_s:
                    left[i].remove(least)
                    asked.append((i, least))
            if not asked:
                return found
            bounds_s = self._bounds_s([(candidates[i], layouts[i][j]) for i, j in asked], goal_s, PRECISION)
            for (i, j), bound_s in zip(asked, bounds_s, strict=True):
                found[i][j] = max(found[i][j], bound_s)

    def _typed_s(
        self, candidates: Sequence[Candidate], layouts: Sequence[Sequence[TypedLayout]], goal_s: float
    ) -> list[list[float]]:
        """Of layouts before they are priced: by their work, or the goal where what their blocks take as they are typed excludes them.

        It is asked of the candidate of the least bound first: what does not exclude that one has to be priced anyway.
        """
        if self.context.model.is_mixed:  # typed at the prices of the slowest device
            return [[0.0] * len(own) for own in layouts]
        found = [[self._work_of_s(c, typed) for typed in own] for c, own in zip(candidates, layouts, strict=True)]
        if math.isinf(goal_s):
            return found
        places: dict[TypedLayout, list[tuple[int, int]]] = {}
        for i, own in enumerate(layouts):
            for j, typed in enumerate(own):
                if typed.solution is not None and found[i][j] < goal_s and not self.context.layouts.is_priced(typed):
                    places.setdefault(typed, []).append((i, j))

        def excluded_at(asked: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
            return excluded([self.maker.perfect_split(candidates[i], layouts[i][j]) for i, j in asked], goal_s)

        first = [
            min(own, key=lambda at: self._known.get((candidates[at[0]], None), (0.0, 0.0))) for own in places.values()
        ]
        rest = [at for own, is_out in zip(places.values(), excluded_at(first), strict=True) if is_out for at in own]
        for (i, j), is_out in zip(rest, excluded_at(rest), strict=True):
            found[i][j] = goal_s if is_out else found[i][j]
        return found

    def _work_of_s(self, candidate: Candidate, typed: TypedLayout) -> float:
        """The work of a layout spread over ranks, and over stages one after the other."""
        if typed.solution is None:
            return 0.0
        counts = self.context.layouts.compact.members
        m, pp = candidate.num_micro_batches, candidate.mesh.pp
        work_s = sum(len(own) * block_s for own, block_s in zip(counts, typed.solution.block_s, strict=True))
        return max(m * work_s / pp, work_s / (1 - (1 - 1 / m) ** (pp * candidate.virtual_stages)))

    def _bounds_s(
        self, keys: Sequence[tuple[Candidate, TypedLayout | None]], goal_s: float, precision: float
    ) -> list[float]:
        """Feasibility bounds of candidates in layouts, or divided perfectly (None), each worked out as far as it was asked for."""
        asked = []
        for key in keys:
            bound_s, known_goal_s = self._known.get(key, (0.0, 0.0))
            if bound_s == known_goal_s < goal_s:  # excluded up to there, and not looked at beyond
                asked.append(key)
        made = [
            self.maker.priced(c, self.context.layouts.price(typed)) if typed else self.maker.perfect_split(c)
            for c, typed in asked
        ]
        found = feasible_bounds(made, goal_s, precision=precision).tolist()
        self._known.update((key, (bound_s, goal_s)) for key, bound_s in zip(asked, found, strict=True))
        return [min(self._known[key][0], goal_s) if math.isfinite(self._known[key][0]) else math.inf for key in keys]

"""The cascade of relaxations: the lower bounds of a candidate, from the cheapest to the tightest.

| level | relaxation | floors of blocks |
|---|---|---|
| 0 | total work over total speed; total memory | perfect division over ``cp`` and ``tp``; blocks send only tokens to experts |
| 1 | feasibility | as level 0 |
| 2 | feasibility, for each layout that is optimal at some price of memory | as level 0, with the seconds of the typed blocks |
| 2 | feasibility, for each layout that the row above does not exclude | priced |

A bound is a function of the candidate and of the goal alone. It does not depend on which other candidates are bounded in the same call, and
a higher goal never lowers it.
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
"""The number of levels; the last level prices layouts."""

COARSE = 0.03
"""The relative precision of bounds at levels that a later level tightens before a candidate is evaluated."""


class Cascade:
    """Computes and caches the bounds of one search's candidates.

    Args:
        context: the context of the search.
    """

    def __init__(self, context: SearchContext) -> None:
        self.context, self.maker = context, InstanceMaker(context)
        self._known: dict[tuple[Candidate, TypedLayout | None], tuple[float, float]] = {}
        """The bound of each candidate in a layout (None: in any layout), and the goal up to which it was computed; both in seconds."""

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """Return for each candidate a lower bound of its step time in seconds, infinite where no plan fits in memory.

        Bounds are computed up to ``goal_s``: a candidate whose bound reaches it is excluded.
        """
        if level == 0:
            return self._work_s(candidates)
        if level < LEVELS - 1:
            return self._bounds_s([(c, None) for c in candidates], goal_s, COARSE)
        layouts = [self.context.known_layouts(c) for c in candidates]
        return [min(row, default=0.0) for row in self._of_layouts_s(candidates, layouts, goal_s)]

    def layout_bounds_s(self, candidate: Candidate, layouts: Sequence[TypedLayout], goal_s: float) -> list[float]:
        """Return the bounds of the last level for one candidate in each of these layouts.

        The smallest of them is a bound of priced blocks, unless it reaches ``goal_s``.
        """
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
        """Return the tightest bound of a candidate in seconds, up to ``goal_s``, and the proofs that were found.

        The proofs may serve other candidates of the same schedule.

        Args:
            known: proofs for the candidate's schedule that are tried first.
            whole_s: on mixed clusters, integer programs over whole blocks raise the bound up to this time. None: the caller asks only
                whether the bound reaches the goal.
            layouts: the candidate's layouts to bound; None: all layouts that may have its best plan.
            rounds: the limit on linear programs, see :func:`chain_bound`.
        """
        proofs: list[ChainProof] = []
        layouts = self.context.known_layouts(candidate) if layouts is None else layouts
        lower = self.layout_bounds_s(candidate, layouts, goal_s)
        for i in sorted(range(len(layouts)), key=lower.__getitem__):
            typed = layouts[i]
            if lower[i] >= goal_s or candidate.offloads_activations or self.context.offloaded:
                continue
            priced = self.context.layouts.price(typed)
            if candidate.mesh.pp == 1:
                one = self.maker.one_stage(candidate, priced)
                bound_s = (
                    float(feasible_bounds([one], goal_s)[0]) * (1 - ROUNDING) if one.holds_in_order() else math.inf
                )
                lower[i] = max(lower[i], bound_s)
            else:
                instance = self.maker.priced(candidate, priced)
                if candidate.virtual_stages == 1:
                    lower[i] = max(lower[i], float(feasible_bounds([instance], goal_s, whole=True)[0]))
                    if lower[i] >= goal_s:
                        continue
                # Among equal ranks fractions of blocks spread as evenly as whole blocks: integer programs take long and raise little.
                is_near = whole_s is not None and (
                    lower[i] >= whole_s or not self.maker.rank_devices.is_mixed(candidate)
                )
                aim_s = 0.0 if is_near else whole_s
                bound = chain_bound(instance, goal_s, (*known, *proofs), above_s=lower[i], whole_s=aim_s, rounds=rounds)
                if bound is not None:
                    lower[i] = max(lower[i], min(bound.time_s, goal_s))
                    if bound.proof and all(bound.proof.weights != one.weights for one in (*known, *proofs)):
                        proofs.append(bound.proof)
            goal_s = min(goal_s, lower[i])  # the candidate's bound is the least over its layouts
        return min(lower, default=0.0), tuple(proofs)

    def _work_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """Return the bounds of total work, infinite where the memory of all ranks together is too small."""
        works = np.zeros(len(candidates))
        for places, columns in side_by_side([self.maker.perfect_split(c) for c in candidates]):
            works[places] = np.where(columns.holds(), columns.work_s(), np.inf)
        bounds_s: list[float] = works.tolist()
        return bounds_s

    def _of_layouts_s(
        self, candidates: Sequence[Candidate], layouts: Sequence[Sequence[TypedLayout]], goal_s: float
    ) -> list[list[float]]:
        """Return the bounds of each candidate's layouts.

        Layouts are priced in the order of their bounds, until each candidate's least bound is that of a priced layout or reaches the goal.
        """
        lower = self._typed_s(candidates, layouts, goal_s)
        unpriced = [{*range(len(row))} for row in layouts]
        while True:
            batch: list[tuple[int, int]] = []
            for i, row in enumerate(lower):
                least = min(range(len(row)), key=row.__getitem__, default=-1)
                if least in unpriced[i] and row[least] < goal_s:
                    unpriced[i].remove(least)
                    batch.append((i, least))
            if not batch:
                return lower
            bounds_s = self._bounds_s([(candidates[i], layouts[i][j]) for i, j in batch], goal_s, PRECISION)
            for (i, j), bound_s in zip(batch, bounds_s, strict=True):
                lower[i][j] = max(lower[i][j], bound_s)

    def _typed_s(
        self, candidates: Sequence[Candidate], layouts: Sequence[Sequence[TypedLayout]], goal_s: float
    ) -> list[list[float]]:
        """Bound layouts before they are priced: by their work, or by the goal where the seconds of their typed blocks exclude them.

        Exclusion is tested with the candidate of the least bound first: if that one is not excluded, the layout must be priced anyway.
        """
        if self.context.model.is_mixed:  # they are typed at the prices of the slowest device
            return [[0.0] * len(row) for row in layouts]
        lower = [[self._work_of_s(c, typed) for typed in row] for c, row in zip(candidates, layouts, strict=True)]
        if math.isinf(goal_s):
            return lower
        users: dict[TypedLayout, list[tuple[int, int]]] = {}
        for i, row in enumerate(layouts):
            for j, typed in enumerate(row):
                if typed.solution is not None and lower[i][j] < goal_s and not self.context.layouts.is_priced(typed):
                    users.setdefault(typed, []).append((i, j))

        def excluded_at(pairs: Sequence[tuple[int, int]]) -> NDArray[np.bool_]:
            return excluded([self.maker.perfect_split(candidates[i], layouts[i][j]) for i, j in pairs], goal_s)

        first = [
            min(row, key=lambda at: self._known.get((candidates[at[0]], None), (0.0, 0.0))) for row in users.values()
        ]
        rest = [at for row, is_out in zip(users.values(), excluded_at(first), strict=True) if is_out for at in row]
        for (i, j), is_out in zip(rest, excluded_at(rest), strict=True):
            lower[i][j] = goal_s if is_out else lower[i][j]
        return lower

    def _work_of_s(self, candidate: Candidate, typed: TypedLayout) -> float:
        """Return the work relaxation of a typed layout in seconds, as :meth:`~autopar.planner.bounds.columns.Columns.work_s` with equal ranks."""
        if typed.solution is None:
            return 0.0
        members = self.context.layouts.compact.members
        m, pp = candidate.num_micro_batches, candidate.mesh.pp
        work_s = sum(len(blocks) * block_s for blocks, block_s in zip(members, typed.solution.block_s, strict=True))
        return max(m * work_s / pp, work_s / (1 - (1 - 1 / m) ** (pp * candidate.virtual_stages)))

    def _bounds_s(
        self, keys: Sequence[tuple[Candidate, TypedLayout | None]], goal_s: float, precision: float
    ) -> list[float]:
        """Return feasibility bounds of candidates in layouts (None: perfect division), computed where not known up to the goal."""
        missing = []
        for key in keys:
            bound_s, known_goal_s = self._known.get(key, (0.0, 0.0))
            if bound_s == known_goal_s < goal_s:  # excluded at the earlier goal, unknown above it
                missing.append(key)
        instances = [
            self.maker.priced(c, self.context.layouts.price(typed)) if typed else self.maker.perfect_split(c)
            for c, typed in missing
        ]
        bounds_s = feasible_bounds(instances, goal_s, precision=precision).tolist()
        self._known.update((key, (bound_s, goal_s)) for key, bound_s in zip(missing, bounds_s, strict=True))
        return [min(self._known[key][0], goal_s) if math.isfinite(self._known[key][0]) else math.inf for key in keys]

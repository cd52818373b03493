"""The lower bounds of a candidate, from the quickest to work out to the tightest.

| level | the layout is | blocks and memory are |
|---|---|---|
| 0 | divided perfectly over ``cp`` and ``tp``, nothing sent inside of the model | those of the unsplit micro-batch |
| 1 | as 0, but no block is quicker than in its own quickest typing | likewise |
| 2 | each of those that some price of memory makes best | priced |

Each is a function of the candidate and of the goal alone: what is not possible in ``goal_s`` is not looked at more closely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autopar.cost.model import StageCost, Step
from autopar.errors import InfeasibleError
from autopar.plan import Recompute
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.bounds import PRECISION
from autopar.planner.bounds.least_rows import LeastRows
from autopar.planner.bounds.mixed_bounds import mixed_bounds
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.bounds.row_bounds import row_bounds
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.bounds.unstaged import unstaged
from autopar.planner.context import SearchContext, load_of
from autopar.planner.layouts.types import LayoutKey, Load, PricedLayout, TypedLayout, layout_key_of
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.host_offload import first_bound_s
from autopar.planner.stages.per_device import Placed

LEVELS = 3
"""Of bounds; the last one is that of the priced layouts."""

ROUNDING = 1e-9
"""A bound is below the time of its plan up to this part of it."""

COARSE = 1e-3
"""The precision of bounds that say which candidates are looked at more closely."""


class Cascade:
    """The bounds of one search's candidates; remembers what it has worked out.

    Args:
        context: of the search.
        placed: prices where the devices of pipeline ranks differ.
    """

    def __init__(self, context: SearchContext, placed: Placed) -> None:
        self.context, self.placed = context, placed
        space, compact = context.space, context.layouts.compact
        made = partial(
            RowMaker, compact, context.model, pinned=context.recompute, limit_bytes=context.model.fitting_bytes,
            is_pinned=bool(context.stages), every=0 if space.equal_stages else space.every,
        )  # fmt: skip
        self.rows = made(modes=context.modes, moved=context.moved)
        plain = tuple(mode for mode in context.modes if mode != "selective") or context.modes
        self.moving_rows = made(modes=plain, moved=frozenset(range(len(context.graph.blocks))))
        self.moving_rows.moves = True
        """Of candidates whose blocks may keep on the host what their backward needs; without a layout as if that cost nothing."""
        self.least_rows, self.least_moving_rows = LeastRows(self.rows), LeastRows(self.moving_rows)
        self._ideal: dict[Candidate, Row | MixedRow] = {}
        self._first_s: dict[Candidate, float] = {}
        self._host_s: dict[tuple[int, ...], float] = {}
        """What stepping on the host takes longer, of all blocks whole."""
        self._typed_s: dict[tuple[Candidate, TypedLayout], float] = {}
        self._priced_s: dict[tuple[Candidate, TypedLayout], tuple[float, float]] = {}
        """Bounds of priced layouts, and the goals up to which they were worked out."""

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """For each candidate seconds below which it has no plan, infinite where none fits; at ``goal_s`` or above it is excluded."""
        if level == 0:
            return self._perfect_split_s(candidates)
        if level == 1:
            return self._quickest_typing_s(candidates, goal_s)
        every = [self.context.known_layouts(c) for c in self._solved(candidates)]
        self._price([(c, typed) for c, own in zip(candidates, every, strict=True) for typed in own], goal_s)
        return [
            min((self._known_s(c, typed) for typed in own), default=0.0)
            for c, own in zip(candidates, every, strict=True)
        ]

    def layout_bounds_s(self, candidate: Candidate, layouts: Sequence[TypedLayout], goal_s: float) -> list[float]:
        """As :meth:`bounds_s` of the last level, of one candidate in each of these layouts."""
        self._price([(candidate, typed) for typed in layouts], goal_s)
        return [self._known_s(candidate, typed) for typed in layouts]

    def closest_s(self, candidate: Candidate, goal_s: float) -> float:
        """As :meth:`bounds_s`, by the tightest relaxation that there is."""
        layouts = self.context.known_layouts(candidate)
        found = self.layout_bounds_s(candidate, layouts, goal_s)
        for i, typed in enumerate(layouts):
            if found[i] < goal_s:
                priced = self.context.layouts.price(typed)
                step = self.context.step(candidate, priced)
                if self.placed.has(candidate):
                    mixed = self.placed.exact(candidate, priced, step)
                    found[i] = max(found[i], self.placed.chains.bound_s(mixed, goal_s, precision=COARSE))
                elif candidate.mesh.pp == 1 and not (candidate.moves or self.context.moved):
                    row = unstaged(self.rows, candidate, priced, step, partial(self._step_s, priced, step))
                    found[i] = max(found[i], row_bounds([row], goal_s, settles=True)[0] * (1 - ROUNDING))
        return min(found, default=0.0)

    def _step_s(self, layout: PricedLayout, step: Step, modes: Sequence[Recompute]) -> float:
        """Seconds of a step of all blocks on one stage."""
        blocks = tuple(layout.costs[k] for k in self.context.layouts.compact.class_of)
        stage = StageCost(blocks=blocks, recompute=tuple(modes))
        return self.context.model.breakdown([stage], step).total_s

    # --- the perfect split

    def _perfect_split_s(self, candidates: Sequence[Candidate]) -> list[float]:
        asked = [c for c in candidates if c not in self._first_s]
        here = [c for c in asked if not c.on_host]
        plain = [c for c in here if not self.placed.has(c) and not self._is_too_large(c)]
        found = dict(
            zip(plain, row_bounds([self.ideal(c) for c in plain], precision=COARSE, settles=True), strict=True)
        )
        for c in asked:
            if c.on_host:
                found[c] = self._offloaded_s(c)
            elif self.placed.has(c):
                unsplit = self.context.unsplit(c)
                found[c] = self.placed.first_s(c, unsplit, self.context.step(c, unsplit))
        self._first_s.update((c, found.get(c, math.inf)) for c in asked)
        return [self._first_s[c] for c in candidates]

    def know_first(self, candidates: Sequence[Candidate], bounds_s: Sequence[float]) -> None:
        """What the first level of another process gave."""
        self._first_s.update(zip(candidates, bounds_s, strict=True))

    def _is_too_large(self, candidate: Candidate) -> bool:
        """Whether it cannot fit in any layout for sure, where ranks are alike."""
        return self.least_rows_of(candidate).is_too_large(candidate, self.context.unsplit(candidate), self.context.step)

    def rows_of(self, candidate: Candidate) -> RowMaker:
        """What makes the rows of a candidate where ranks are alike."""
        return self.moving_rows if candidate.moves else self.rows

    def least_rows_of(self, candidate: Candidate) -> LeastRows:
        """What makes those below every layout."""
        return self.least_moving_rows if candidate.moves else self.least_rows

    def ideal(self, candidate: Candidate) -> Row | MixedRow:
        """The row of a candidate divided perfectly."""
        if candidate not in self._ideal:
            unsplit = self.context.unsplit(candidate)
            maker = self.placed if self.placed.has(candidate) else self.least_rows_of(candidate)
            self._ideal[candidate] = maker.ideal(candidate, unsplit, self.context.step(candidate, unsplit))
        return self._ideal[candidate]

    def _offloaded_s(self, candidate: Candidate) -> float:
        """The first bound of a candidate with something on the host."""
        twin, mesh = replace(candidate, offload=(), moves=False), candidate.mesh
        ideal = self.ideal(twin)
        assert isinstance(ideal, Row)
        if not candidate.offload:
            return first_bound_s(candidate, ideal, 0.0)
        key = (candidate.micro_batch_size, mesh.ep_data, mesh.dp_shard)
        if key not in self._host_s:
            unsplit = self.context.unsplit(candidate)
            here, there = (self.rows.once_s(unsplit, self.context.step(c, unsplit)) for c in (twin, candidate))
            self._host_s[key] = there - here
        return first_bound_s(candidate, ideal, self._host_s[key] / mesh.tp)

    # --- the quickest typing of each block

    def _quickest_typing_s(self, candidates: Sequence[Candidate], goal_s: float) -> list[float]:
        """Zero where this says no more than the perfect split."""
        rows: list[Row | MixedRow] = []
        places, found = [], [0.0] * len(candidates)
        for i, c in enumerate(candidates):
            row, key = self.ideal(c), layout_key_of(c)
            if isinstance(row, Row):
                if key.tp == key.cp == 1:
                    continue
                unsplit, layouts = self.context.unsplit(c), self.context.layouts
                quickest = layouts.quickest_s(key), layouts.least_s(key)
                row = self.least_rows_of(c).least(c, row, unsplit, self.context.step(c, unsplit), *quickest)
            rows.append(row)
            places.append(i)
        mixed = partial(mixed_bounds, at_most_s=goal_s, only_test=True, precision=0.04)
        bounds_s = row_bounds(rows, goal_s, precision=COARSE, settles=True, mixed=mixed)
        for i, bound_s in zip(places, bounds_s, strict=True):
            found[i] = bound_s
        return found

    # --- priced layouts

    def _solved(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """These, with the layouts that they have in common solved together."""
        loads: dict[LayoutKey, list[Load]] = {}
        for candidate in candidates:
            loads.setdefault(layout_key_of(candidate), []).append(load_of(candidate))
        for key, own in loads.items():
            try:
                self.context.layouts.typings.solve_ahead(key, [load.order for load in own])
            except InfeasibleError:  # told with its reason when the candidate is evaluated
                continue
        return candidates

    def _known_s(self, candidate: Candidate, typed: TypedLayout) -> float:
        return max(self._typed_bound_s(candidate, typed), self._priced_s.get((candidate, typed), (0.0, 0.0))[0])

    def _price(self, pairs: Sequence[tuple[Candidate, TypedLayout]], goal_s: float) -> None:
        """Bounds of candidates in layouts, where what is known is below ``goal_s`` and may be raised."""
        asked: list[tuple[Candidate, TypedLayout, PricedLayout]] = []
        for c, typed in pairs:
            bound_s, known_goal_s = self._priced_s.get((c, typed), (0.0, 0.0))
            is_open = bound_s == known_goal_s < goal_s  # excluded up to there, and not looked at beyond
            if is_open and self._typed_bound_s(c, typed) < goal_s:
                asked.append((c, typed, self.context.layouts.price(typed)))
        rows = [self.exact(c, priced) for c, _, priced in asked]
        found = row_bounds(rows, goal_s, precision=PRECISION, settles=True)
        for (c, typed, _), bound_s in zip(asked, found, strict=True):
            self._priced_s[c, typed] = min(bound_s, goal_s) if math.isfinite(bound_s) else bound_s, goal_s

    def exact(self, candidate: Candidate, layout: PricedLayout) -> Row | MixedRow:
        """The row of a candidate in a priced layout."""
        maker = self.placed if self.placed.has(candidate) else self.rows_of(candidate)
        return maker.exact(candidate, layout, self.context.step(candidate, layout))

    def _typed_bound_s(self, candidate: Candidate, typed: TypedLayout) -> float:
        """Of the time and the parameters that a layout has for sure before it is priced."""
        key = candidate, typed
        if key not in self._typed_s:
            unsplit = self.context.unsplit(candidate)
            step = self.context.step(candidate, unsplit)
            if self.placed.has(candidate):
                self._typed_s[key] = 0.0 if self.placed.can_hold(candidate, typed, unsplit, step) else math.inf
            elif not typed.time_s:
                self._typed_s[key] = 0.0
            else:
                self._typed_s[key] = self.rows_of(candidate).draft_s(candidate, typed, unsplit, step)
        return self._typed_s[key]

"""Lower bounds of candidates, from those of the quickest layouts of their blocks to those of their priced layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.graph.ir import Graph
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.first_bounding import COARSE, FirstBounding
from autopar.planner.bounds.mixed_bounds import impossible
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.layouts.types import LayoutKey, Load, TypedLayout, layout_key_of
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space

NEAR = 0.04
"""Of second bounds where there is a time to be below: these say which layouts are solved first, most of which are excluded."""


class Bounding(FirstBounding):
    """Lower bounds of candidates in their layouts."""

    def __init__(self, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> None:
        super().__init__(graph, model, global_batch_size=global_batch_size, pins=pins, space=space)
        self._bounds: dict[tuple[Candidate, int], tuple[float, bool]] = {}
        """Of a candidate in a layout, and whether it is of its priced blocks."""

    def least_bounds_s(self, candidates: Sequence[Candidate], at_most_s: float = float("inf")) -> list[float]:
        """For each candidate seconds below which no layout gives a plan: with collectives, each block at its quickest.

        Zero where this says no more than :meth:`ideal_bounds_s`.

        Args:
            at_most_s: see :func:`autopar.planner.bounds.bounds.bounds`.
        """
        rows: list[Row | MixedRow] = []
        known = [0.0] * len(candidates)
        places = []
        for i, c in enumerate(candidates):
            row = self._ideal_row(c)
            if isinstance(row, MixedRow):  # the quickest layout was found at the prices of the slowest device
                rows.append(row)
                places.append(i)
                continue
            split = layout_key_of(c.micro_batch_size, c.mesh)
            if split.tp == split.cp == 1:  # the ideal is the only layout
                continue
            whole = self._whole(c)
            quickest = self.layouts.quickest_s(split), self.layouts.least_s(split)
            rows.append(self.least_rows_of(c).least(c, row, whole, self.step(c, whole), *quickest))
            places.append(i)
        precision = COARSE if math.isinf(at_most_s) else NEAR
        some = [candidates[i] for i in places]
        found = self._row_bounds_s(some, rows, at_most_s, precision=precision, is_rough=True)
        for i, bound in zip(places, found, strict=True):
            known[i] = bound
        return known

    def bounds_s(self, candidates: Sequence[Candidate], at_most_s: float = float("inf")) -> list[float]:
        """For each candidate seconds below which none of its layouts gives a plan; infinite where none can fit.

        Args:
            at_most_s: layouts that are slower by a first bound are not priced: that bound is theirs.
        """
        loads: dict[LayoutKey, list[Load]] = {}
        for candidate in candidates:
            loads.setdefault(layout_key_of(candidate.micro_batch_size, candidate.mesh), []).append(load_of(candidate))
        for split, own in loads.items():
            try:
                self.layouts.solving.solve_ahead(split, own)
            except InfeasibleError:  # told with its reason when the candidate is evaluated
                continue
        every = [self._least_first(candidate) for candidate in candidates]
        self._test_least(candidates, every, at_most_s)
        for most in (1, math.inf):  # layouts are priced where their first bounds are below what the first one gives
            asked: list[tuple[Candidate, TypedLayout]] = []
            for candidate, drafts in zip(candidates, every, strict=True):
                priced = [
                    self._bounds[candidate, id(draft)][0] for draft in drafts if self._is_priced(candidate, draft)
                ]
                least = min([at_most_s, *priced])
                rest = [draft for draft in drafts if not self._is_priced(candidate, draft)]
                rest = [draft for draft in rest if self._bounds[candidate, id(draft)][0] < least]
                # where ranks differ it takes more to begin than to look at another, and few are below a time that is known
                at_once = most > 1 or (self.placed.has(candidate) and math.isfinite(at_most_s))
                asked += [(candidate, draft) for draft in (rest if at_once else rest[:1])]
            self._price(asked, at_most_s)
        return [
            min((self._bounds[c, id(draft)][0] for draft in drafts), default=0.0)
            for c, drafts in zip(candidates, every, strict=True)
        ]

    def known_bounds_s(
        self, candidates: Sequence[Candidate], at_most_s: float, *, remembers: bool = False
    ) -> list[float]:
        """For each candidate that was evaluated the bound of its layouts, each that is below ``at_most_s`` priced.

        Args:
            remembers: else what is found here is not: the order of later searches is that of the bounds that there were.
        """
        remembered = dict(self._bounds)
        self._price([(c, draft) for c in candidates for draft in self._drafts(c)], at_most_s)
        found = [min((self._bounds[c, id(d)][0] for d in self._drafts(c)), default=0.0) for c in candidates]
        if not remembers:
            self._bounds = remembered
        return found

    def _least_first(self, candidate: Candidate) -> list[TypedLayout]:
        """Its layouts by their first bounds."""
        drafts = self._drafts(candidate)
        self._open([(candidate, draft) for draft in drafts], 0.0)
        return sorted(drafts, key=lambda draft: self._bounds[candidate, id(draft)][0])

    def _test_least(
        self, candidates: Sequence[Candidate], every: Sequence[Sequence[TypedLayout]], at_most_s: float
    ) -> None:
        """Where ranks differ: candidates that take no less than ``at_most_s`` in any layout, each by one row below all of these."""
        if math.isinf(at_most_s):
            return
        rows: list[MixedRow] = []
        asked: list[tuple[Candidate, list[TypedLayout]]] = []
        for candidate, drafts in zip(candidates, every, strict=True):
            if self.placed.has(candidate):
                own = [draft for _, draft in self._open([(candidate, draft) for draft in drafts], at_most_s)]
                if len(own) > 1:  # of one it is the row of its priced blocks, which is made next
                    options = [self.layouts.option(draft) for draft in own]
                    rows.append(self.placed.least(candidate, options, self.step(candidate, options[0])))
                    asked.append((candidate, own))
        for (candidate, own), is_slow in zip(asked, impossible(rows, at_most_s).tolist(), strict=True):
            if is_slow:  # so is each by its own row, now or asked for in less time: the certificate depends on that
                self._bounds |= {(candidate, id(draft)): (at_most_s, False) for draft in own}

    def _is_priced(self, candidate: Candidate, draft: TypedLayout) -> bool:
        return self._bounds[candidate, id(draft)][1]

    def _price(self, pairs: Sequence[tuple[Candidate, TypedLayout]], at_most_s: float) -> None:
        """Bounds of candidates in layouts: of priced blocks where a first bound is below ``at_most_s``."""
        asked = []
        for candidate, draft in self._open(pairs, at_most_s):
            asked.append((candidate, draft, self.layouts.option(draft)))
        if not asked:
            return
        makers = [self.placed if self.placed.has(c) else self.rows_of(c) for c, _, _ in asked]
        rows = [maker.exact(c, o, self.step(c, o)) for maker, (c, _, o) in zip(makers, asked, strict=True)]
        some = [c for c, _, _ in asked]
        found = self._row_bounds_s(some, rows, at_most_s)
        for (candidate, draft, _), bound in zip(asked, found, strict=True):
            known, _ = self._bounds[candidate, id(draft)]
            self._bounds[candidate, id(draft)] = (max(bound, known), True)

    def _open(
        self, pairs: Sequence[tuple[Candidate, TypedLayout]], at_most_s: float
    ) -> list[tuple[Candidate, TypedLayout]]:
        """Those that are not priced, with a first bound below ``at_most_s``."""
        found = []
        for candidate, draft in pairs:
            key = (candidate, id(draft))
            if key not in self._bounds:
                self._bounds[key] = (self._draft_s(candidate, draft), False)
            known, is_priced = self._bounds[key]
            if not is_priced and known < at_most_s:
                found.append((candidate, draft))
        return found

    def _bound(self, candidate: Candidate, draft: TypedLayout, at_most_s: float = 0.0) -> tuple[float, bool]:
        self._price([(candidate, draft)], at_most_s)
        return self._bounds[candidate, id(draft)]

    def _drafts(self, candidate: Candidate) -> tuple[TypedLayout, ...]:
        """Its layouts before they are priced; none where there is none, which its evaluation explains."""
        try:
            return self.layouts.drafts(layout_key_of(candidate.micro_batch_size, candidate.mesh), load_of(candidate))
        except InfeasibleError:
            return ()

    def _draft_s(self, candidate: Candidate, draft: TypedLayout) -> float:
        if not draft.time_s and not self.placed.has(candidate):
            return 0.0
        whole = self._whole(candidate)
        step = self._whole_step(candidate, whole)
        if self.placed.has(candidate):
            return 0.0 if self.placed.can_hold(candidate, draft, whole, step) else float("inf")
        return self.rows_of(candidate).draft_s(candidate, draft, whole, step)

    def lower_bound_s(self, candidate: Candidate) -> float:
        """No plan with these degrees is faster, in any layout that a price of the space makes best."""
        return self.bounds_s([candidate])[0]


def load_of(candidate: Candidate) -> Load:
    """How many micro-batches a rank runs and holds at once, on which the price of memory depends."""
    in_flight = min(candidate.num_micro_batches, candidate.mesh.pp)
    return Load(num_micro_batches=candidate.num_micro_batches, in_flight=in_flight)

"""Lower bounds of candidates, from those that need no layout solved to those of their priced layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.cost.model import CostModel, Step
from autopar.errors import InfeasibleError
from autopar.graph.ir import Graph
from autopar.search.amounts import flops_per_sample, tokens_per_sample
from autopar.search.bound_rows import Row
from autopar.search.candidates import Candidate
from autopar.search.cuts import Cuts
from autopar.search.layouts import Layouts
from autopar.search.least_rows import LeastRows
from autopar.search.mixed import Placed
from autopar.search.mixed_bounds import impossible, mixed_bounds
from autopar.search.mixed_rows import MixedRow
from autopar.search.offload import first_bound_s
from autopar.search.options import Draft, Load, Option, Split, split_of
from autopar.search.pins import Pins
from autopar.search.rough import Rough
from autopar.search.row_bounds import plain_bounds, row_bounds
from autopar.search.rows import RowMaker
from autopar.search.space import Space
from autopar.weak import weakly

COARSE = 1e-3
"""Of bounds that say which candidates are looked at more closely, the precision."""

NEAR = 0.04
"""Of second bounds where there is a time to be below: these say which layouts are solved first, most of which are excluded."""

TESTED = 1e9
"""Of bounds of which only counts whether they are below a time."""

ROUGH = 0.04
"""Of those by which a first plan is looked for where ranks differ, when there is no time to be below yet."""


class Bounding:
    """Lower bounds of candidates for one model, cluster and batch; remembers what they share."""

    def __init__(self, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> None:
        self.graph, self.model, self.space = graph, model, space
        self.global_batch_size = global_batch_size
        self.layouts = Layouts(graph, model, global_batch_size=global_batch_size, pins=pins, space=space)
        self.buckets = pins.buckets(space.bucket_bytes)
        self.recompute, self.stages, self.moved = pins.recompute(graph), pins.stages(graph), pins.moved(graph)
        modes = space.recompute if not self.moved else tuple(m for m in space.recompute if m != "selective")
        self.flops_per_sample = flops_per_sample(self.layouts.compact, model)
        self.tokens_per_sample = tokens_per_sample(graph)
        self.limit_bytes = model.fitting_bytes
        made = partial(
            RowMaker, self.layouts.compact, model, pinned=self.recompute, limit_bytes=self.limit_bytes,
            is_pinned=bool(self.stages), every=0 if space.equal_stages else space.every,
        )  # fmt: skip
        self.rows = made(modes=modes, moved=self.moved)
        some = tuple(mode for mode in modes if mode != "selective") or modes
        self.moving_rows = made(modes=some, moved=frozenset(range(len(graph.blocks))))
        self.moving_rows.moves = True
        """Of candidates whose blocks may keep on the host what their backward needs; without a layout as if that cost nothing."""
        self.least_rows, self.least_moving_rows = LeastRows(self.rows), LeastRows(self.moving_rows)
        self.rough = Rough(self.least_rows, self.layouts, weakly(self.step), is_even=space.equal_stages)
        self.placed = Placed(self.layouts, model, modes=modes, pinned=self.recompute, is_even=space.equal_stages)
        self.cuts = Cuts(
            self.rows, self.placed, space_modes=modes, recompute=self.recompute, pinned=self.stages,
            moved=self.moved, buckets=self.buckets,
        )  # fmt: skip
        self._ideal: dict[Candidate, Row | MixedRow] = {}
        self._ideal_s: dict[Candidate, float] = {}
        self._whole_steps: dict[Candidate, Step] = {}
        self._host_s: dict[tuple[int, ...], float] = {}
        """What stepping on the host takes longer, of all blocks whole."""
        self._bounds: dict[tuple[Candidate, int], tuple[float, bool]] = {}
        """Of a candidate in a layout, and whether it is of its priced blocks."""

    @property
    def differs(self) -> bool:
        """Whether pipeline ranks may have different devices."""
        return self.model.is_mixed

    @property
    def by_rule(self) -> bool:
        """Whether each candidate has one layout, by a rule, and ranks are alike; then work is divided as in the ideal."""
        return self.layouts.by_rule and not self.differs and self.model.measured is None

    def step(self, candidate: Candidate, option: Option) -> Step:
        """How the cost model sees a candidate."""
        return Step(
            mesh=candidate.mesh,
            schedule=candidate.schedule,
            num_micro_batches=candidate.num_micro_batches,
            zero_stage=candidate.zero_stage,
            global_batch_size=self.global_batch_size,
            flops_per_sample=self.flops_per_sample,
            tokens_per_sample=self.tokens_per_sample,
            prelude_s=option.prelude_s,
            adds_gradients=True,
            totals=option.totals,
            bucket_bytes=self.buckets[0],
            offload=candidate.offload,
        )

    def work_bounds_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """For each candidate of :attr:`by_rule` seconds of its work alone, without a row; infinite where it cannot fit."""
        return [self._shared_s(c, *self.rough.work_s(c)) for c in candidates]

    def data_bounds_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """As :meth:`work_bounds_s`, of what may fit, with the data axes."""
        return [self._shared_s(c, *self.rough.data_s(c)) for c in candidates]

    def moved_bounds_s(self, candidates: Sequence[Candidate], at_most_s: float) -> dict[Candidate, float]:
        """As :meth:`data_bounds_s`, with the least of collectives on ``tp``, of those that this makes ``at_most_s`` or more."""
        if not self.by_rule or math.isinf(at_most_s):
            return {}
        found = {c: self._shared_s(c, *self.rough.moved_s(c)) for c in candidates if c.mesh.tp > 1 and not c.on_host}
        return {c: bound_s for c, bound_s in found.items() if at_most_s <= bound_s}

    def ideal_bounds_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """For each candidate seconds below which no layout gives a plan, found without solving any."""
        known = self._ideal_s
        asked = [c for c in candidates if c not in known]
        known.update(zip(asked, self._ideals_s(asked), strict=True))
        return [known[c] for c in candidates]

    def own_ideal_bounds_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """As :meth:`ideal_bounds_s`, found for these alone: those that are found together depend on which within their precision."""
        return self._ideals_s(candidates)

    def first_bounds_s(self, candidates: Sequence[Candidate], at_most_s: float) -> list[float]:
        """As :meth:`own_ideal_bounds_s`; of :attr:`by_rule` that of work and data axes, where it is ``at_most_s`` or more."""
        if not self.by_rule:
            return self.own_ideal_bounds_s(candidates)
        found: dict[Candidate, float] = {}
        for c in candidates:
            if not c.on_host:
                work_s = self.work_bounds_s([c])[0]
                bound_s = work_s if at_most_s <= work_s else max(work_s, self.data_bounds_s([c])[0])
                if at_most_s <= bound_s:
                    found[c] = bound_s
        others = [c for c in candidates if c not in found]
        found |= zip(others, self.own_ideal_bounds_s(others), strict=True)
        return [found[c] for c in candidates]

    def _ideals_s(self, candidates: Sequence[Candidate]) -> list[float]:
        here = [c for c in candidates if not c.on_host]
        placed = [c for c in here if self.placed.has(c)]
        plain = [c for c in here if not self.placed.has(c) and not self._is_too_large(c)]
        rows = [self._ideal_row(candidate) for candidate in plain]
        bounds_s = self._at_speed(plain, row_bounds(rows, precision=COARSE), rows)
        found = dict(zip(plain, bounds_s, strict=True))
        found |= {c: self._shared_s(c, self._first_s(c), 0.0) for c in placed}
        return [found[c] if c in found else self._offloaded_s(c) if c.on_host else math.inf for c in candidates]

    def _first_s(self, candidate: Candidate) -> float:
        """Where ranks differ."""
        whole = self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data)
        return self.placed.first_s(candidate, whole, self._whole_step(candidate, whole))

    def know_ideal_bounds(self, bounds_s: Mapping[Candidate, float]) -> None:
        """What :meth:`ideal_bounds_s` of another process gave."""
        self._ideal_s.update(bounds_s)

    def rows_of(self, candidate: Candidate) -> RowMaker:
        """What makes the rows of a candidate where ranks are alike."""
        return self.moving_rows if candidate.moves else self.rows

    def least_rows_of(self, candidate: Candidate) -> LeastRows:
        """What makes those below every layout."""
        return self.least_moving_rows if candidate.moves else self.least_rows

    def _is_too_large(self, candidate: Candidate) -> bool:
        """Whether it cannot fit in any layout for sure, where ranks are alike."""
        if self.placed.has(candidate):
            return False
        whole = self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data)
        return self.least_rows_of(candidate).is_too_large(candidate, whole, self.step)

    def _whole_step(self, candidate: Candidate, whole: Option) -> Step:
        """A candidate's step in the layout of its micro-batch with neither ``cp`` nor ``tp``."""
        found = self._whole_steps.get(candidate)
        if found is None:
            found = self._whole_steps[candidate] = self.step(candidate, whole)
        return found

    def _ideal_row(self, candidate: Candidate) -> Row | MixedRow:
        if candidate not in self._ideal:
            whole = self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data)
            maker = self.placed if self.placed.has(candidate) else self.least_rows_of(candidate)
            self._ideal[candidate] = maker.ideal(candidate, whole, self._whole_step(candidate, whole))
        return self._ideal[candidate]

    def _offloaded_s(self, candidate: Candidate) -> float:
        """The first bound of a candidate with something on the host."""
        twin, mesh = replace(candidate, offload=(), moves=False), candidate.mesh
        ideal = self._ideal_row(twin)
        assert isinstance(ideal, Row)
        if not candidate.offload:
            return self._shared_s(candidate, first_bound_s(candidate, ideal, 0.0), ideal.total_s)
        key = (candidate.micro_batch_size, mesh.ep_data, mesh.dp_shard)
        if key not in self._host_s:
            whole = self.layouts.whole(candidate.micro_batch_size, mesh.ep_data)
            here, there = (self.rows.once_s(whole, self.step(c, whole)) for c in (twin, candidate))
            self._host_s[key] = there - here
        bound_s = first_bound_s(candidate, ideal, self._host_s[key] / mesh.tp)
        return self._shared_s(candidate, bound_s, ideal.total_s)

    def least_bounds_s(self, candidates: Sequence[Candidate], at_most_s: float = float("inf")) -> list[float]:
        """For each candidate seconds below which no layout gives a plan: with collectives, each block at its quickest.

        Zero where this says no more than :meth:`ideal_bounds_s`.

        Args:
            at_most_s: see :func:`autopar.search.bounds.bounds`.
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
            split = split_of(c.micro_batch_size, c.mesh)
            if split.tp == split.cp == 1 or self.layouts.by_rule:  # the ideal is the only layout, or it is bounded next
                continue
            whole = self.layouts.whole(c.micro_batch_size, c.mesh.ep_data)
            quickest = self.layouts.quickest_s(split), self.layouts.least_s(split)
            rows.append(self.least_rows_of(c).least(c, row, whole, self.step(c, whole), *quickest))
            places.append(i)
        at_most_s /= self._least_speed(candidates)
        mixed = partial(mixed_bounds, at_most_s=at_most_s, only_test=True, precision=ROUGH)
        precision = COARSE if math.isinf(at_most_s) else NEAR
        found = row_bounds(rows, at_most_s, precision=precision, mixed=mixed)
        for i, bound in zip(places, self._at_speed([candidates[i] for i in places], found, rows), strict=True):
            known[i] = bound
        return known

    def bounds_s(self, candidates: Sequence[Candidate], at_most_s: float = float("inf")) -> list[float]:
        """For each candidate seconds below which none of its layouts gives a plan; infinite where none can fit.

        Args:
            at_most_s: layouts that are slower by a first bound are not priced, nor solved by a rule: that bound is theirs.
        """
        known = self.moved_bounds_s(candidates, at_most_s)
        others = [c for c in candidates if c not in known]
        known |= zip(others, self._solved_bounds_s(others, at_most_s) if others else (), strict=True)
        return [known[c] for c in candidates]

    def _solved_bounds_s(self, candidates: Sequence[Candidate], at_most_s: float) -> list[float]:
        """As :meth:`bounds_s`, by layouts that are solved."""
        loads: dict[Split, list[Load]] = {}
        for candidate in candidates:
            loads.setdefault(split_of(candidate.micro_batch_size, candidate.mesh), []).append(load_of(candidate))
        for split, own in loads.items():
            try:
                self.layouts.solving.solve_ahead(split, own)
            except InfeasibleError:  # told with its reason when the candidate is evaluated
                continue
        at_most_s /= self._least_speed(candidates)
        every = [self._least_first(candidate) for candidate in candidates]
        self._test_least(candidates, every, at_most_s)
        self._tell_slow(
            [(c, draft) for c, drafts in zip(candidates, every, strict=True) for draft in drafts], at_most_s
        )
        for most in (1, math.inf):  # layouts are priced where their first bounds are below what the first one gives
            asked: list[tuple[Candidate, Draft]] = []
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
            min((self._shared_s(c, self._bounds[c, id(draft)][0], draft.time_s) for draft in drafts), default=0.0)
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
        found = [
            min((self._shared_s(c, self._bounds[c, id(d)][0], d.time_s) for d in self._drafts(c)), default=0.0)
            for c in candidates
        ]
        if not remembers:
            self._bounds = remembered
        return found

    def _speed(self, candidate: Candidate) -> float:
        """The least part of their stated times that a pipeline's ranks take, where they share cores.

        See ``autopar.cost.model``; bounds inside of this class are of stated times, those that it gives are not.
        """
        return self.model.device.core_share if candidate.mesh.pp > 1 else 1.0

    def _least_speed(self, candidates: Sequence[Candidate]) -> float:
        return min(map(self._speed, candidates), default=1.0)

    def _shared_s(self, candidate: Candidate, bound_s: float, work_s: float) -> float:
        """A bound of stated times as one of the step: cores need as long as for the work of all ranks at least.

        ``work_s``: of one micro-batch through all stages, at the least.
        """
        speed = self._speed(candidate)
        if speed == 1.0:
            return bound_s
        return max(speed * bound_s, candidate.num_micro_batches * work_s / candidate.mesh.pp)

    def _at_speed(
        self, candidates: Sequence[Candidate], found: Iterable[float], rows: Sequence[Row | MixedRow]
    ) -> list[float]:
        works = (row.total_s if isinstance(row, Row) else 0.0 for row in rows)
        return [self._shared_s(*own) for own in zip(candidates, found, works, strict=True)]

    def _least_first(self, candidate: Candidate) -> list[Draft]:
        """Its layouts by their first bounds."""
        drafts = self._drafts(candidate)
        self._open([(candidate, draft) for draft in drafts], 0.0)
        return sorted(drafts, key=lambda draft: self._bounds[candidate, id(draft)][0])

    def _test_least(self, candidates: Sequence[Candidate], every: Sequence[Sequence[Draft]], at_most_s: float) -> None:
        """Where ranks differ: candidates that take no less than ``at_most_s`` in any layout, each by one row below all of these."""
        if math.isinf(at_most_s):
            return
        rows: list[MixedRow] = []
        asked: list[tuple[Candidate, list[Draft]]] = []
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

    def _is_priced(self, candidate: Candidate, draft: Draft) -> bool:
        return self._bounds[candidate, id(draft)][1]

    def _price(self, pairs: Sequence[tuple[Candidate, Draft]], at_most_s: float) -> None:
        """Bounds of candidates in layouts: of priced blocks where a first bound is below ``at_most_s``."""
        asked = []
        for candidate, draft in self._open(pairs, at_most_s):
            asked.append((candidate, draft, self.layouts.option(draft)))
        if not asked:
            return
        makers = [self.placed if self.placed.has(c) else self.rows_of(c) for c, _, _ in asked]
        rows = [maker.exact(c, o, self.step(c, o)) for maker, (c, _, o) in zip(makers, asked, strict=True)]
        for (candidate, draft, _), bound in zip(asked, row_bounds(rows, at_most_s), strict=True):
            known, _ = self._bounds[candidate, id(draft)]
            self._bounds[candidate, id(draft)] = (max(bound, known), True)

    def _open(self, pairs: Sequence[tuple[Candidate, Draft]], at_most_s: float) -> list[tuple[Candidate, Draft]]:
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

    def _tell_slow(self, pairs: Sequence[tuple[Candidate, Draft]], at_most_s: float) -> None:
        """Another first bound of those that take no less than ``at_most_s`` by the times and parameters of their blocks."""
        if math.isinf(at_most_s):
            return
        told = [own for own in self._open(pairs, at_most_s) if own[1].solution and not self.placed.has(own[0])]
        rows = [self._drafted_row(c, draft) for c, draft in told]
        for (c, draft), bound in zip(told, plain_bounds(rows, at_most_s, TESTED), strict=True):
            if bound >= at_most_s:
                self._bounds[c, id(draft)] = (bound, False)

    def _drafted_row(self, candidate: Candidate, draft: Draft) -> Row:
        """Of a layout before it is priced."""
        ideal = self._ideal_row(candidate)
        assert isinstance(ideal, Row)
        whole, needs = self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data), self.layouts.needs(draft)
        step = self.step(candidate, whole)
        return self.least_rows_of(candidate).drafted(candidate, ideal, draft, whole, step, needs)

    def _bound(self, candidate: Candidate, draft: Draft, at_most_s: float = 0.0) -> tuple[float, bool]:
        self._price([(candidate, draft)], at_most_s)
        return self._bounds[candidate, id(draft)]

    def _drafts(self, candidate: Candidate) -> tuple[Draft, ...]:
        """Its layouts before they are priced; none where there is none, which its evaluation explains."""
        try:
            return self.layouts.drafts(split_of(candidate.micro_batch_size, candidate.mesh), load_of(candidate))
        except InfeasibleError:
            return ()

    def _draft_s(self, candidate: Candidate, draft: Draft) -> float:
        if not draft.time_s and not self.placed.has(candidate):
            return 0.0
        whole = self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data)
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

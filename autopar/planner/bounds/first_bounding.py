"""First bounds of candidates, which need no layout solved, and what all bounds are made from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.cost.model import CostModel, Step
from autopar.graph.ir import Graph
from autopar.planner.bounds.bound_rows import Row
from autopar.planner.bounds.bounds import PRECISION
from autopar.planner.bounds.least_rows import LeastRows
from autopar.planner.bounds.mixed_bounds import mixed_bounds
from autopar.planner.bounds.mixed_rows import MixedRow
from autopar.planner.bounds.row_bounds import row_bounds
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.model_stats import flops_per_sample, tokens_per_sample
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.host_offload import first_bound_s
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.planner.stages.block_options import BlockOptions
from autopar.planner.stages.per_device import Placed

COARSE = 1e-3
"""Of bounds that say which candidates are looked at more closely, the precision."""

ROUGH = 0.04
"""Of those by which a first plan is looked for where ranks differ, when there is no time to be below yet."""


class FirstBounding:
    """First bounds of candidates for one model, cluster and batch; remembers what they share."""

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
        self.placed = Placed(self.layouts, model, modes=modes, pinned=self.recompute, is_even=space.equal_stages)
        self.blocks = BlockOptions(self.rows, space_modes=modes, recompute=self.recompute, moved=self.moved)
        self._ideal: dict[Candidate, Row | MixedRow] = {}
        self._ideal_s: dict[Candidate, float] = {}
        self._whole_steps: dict[Candidate, Step] = {}
        self._host_s: dict[tuple[int, ...], float] = {}
        """What stepping on the host takes longer, of all blocks whole."""

    @property
    def differs(self) -> bool:
        """Whether pipeline ranks may have different devices."""
        return self.model.is_mixed

    def step(self, candidate: Candidate, option: PricedLayout) -> Step:
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

    def ideal_bounds_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """For each candidate seconds below which no layout gives a plan, found without solving any."""
        known = self._ideal_s
        asked = [c for c in candidates if c not in known]
        known.update(zip(asked, self._ideals_s(asked), strict=True))
        return [known[c] for c in candidates]

    def own_ideal_bounds_s(self, candidates: Sequence[Candidate]) -> list[float]:
        """As :meth:`ideal_bounds_s`, found for these alone: those that are found together depend on which within their precision."""
        return self._ideals_s(candidates)

    def _ideals_s(self, candidates: Sequence[Candidate]) -> list[float]:
        here = [c for c in candidates if not c.on_host]
        placed = [c for c in here if self.placed.has(c)]
        plain = [c for c in here if not self.placed.has(c) and not self._is_too_large(c)]
        rows = [self._ideal_row(candidate) for candidate in plain]
        bounds_s = self._row_bounds_s(plain, rows, precision=COARSE)
        found = dict(zip(plain, bounds_s, strict=True))
        found |= {c: self._first_s(c) for c in placed}
        return [found[c] if c in found else self._offloaded_s(c) if c.on_host else math.inf for c in candidates]

    def _first_s(self, candidate: Candidate) -> float:
        """Where ranks differ."""
        whole = self._whole(candidate)
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
        whole = self._whole(candidate)
        return self.least_rows_of(candidate).is_too_large(candidate, whole, self.step)

    def _row_bounds_s(
        self,
        candidates: Sequence[Candidate],
        rows: Sequence[Row | MixedRow],
        at_most_s: float = math.inf,
        *,
        precision: float = PRECISION,
        settles: bool = False,
        is_rough: bool = False,
    ) -> list[float]:
        """Bounds of steps, each by its row; see :func:`row_bounds`.

        Args:
            at_most_s: of a step.
            is_rough: those whose devices differ are coarse, and only tested where there is a time to be below.
        """
        mixed = partial(mixed_bounds, at_most_s=at_most_s)
        if is_rough:
            mixed = partial(mixed, only_test=True, precision=ROUGH)
        return row_bounds(rows, at_most_s, precision=precision, settles=settles, mixed=mixed)

    def _whole(self, candidate: Candidate) -> PricedLayout:
        """The layout of its micro-batch with neither ``cp`` nor ``tp``."""
        return self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data)

    def _whole_step(self, candidate: Candidate, whole: PricedLayout) -> Step:
        """A candidate's step in the layout of its micro-batch with neither ``cp`` nor ``tp``."""
        found = self._whole_steps.get(candidate)
        if found is None:
            found = self._whole_steps[candidate] = self.step(candidate, whole)
        return found

    def _ideal_row(self, candidate: Candidate) -> Row | MixedRow:
        if candidate not in self._ideal:
            whole = self._whole(candidate)
            maker = self.placed if self.placed.has(candidate) else self.least_rows_of(candidate)
            self._ideal[candidate] = maker.ideal(candidate, whole, self._whole_step(candidate, whole))
        return self._ideal[candidate]

    def _offloaded_s(self, candidate: Candidate) -> float:
        """The first bound of a candidate with something on the host."""
        twin, mesh = replace(candidate, offload=(), moves=False), candidate.mesh
        ideal = self._ideal_row(twin)
        assert isinstance(ideal, Row)
        if not candidate.offload:
            return first_bound_s(candidate, ideal, 0.0)
        key = (candidate.micro_batch_size, mesh.ep_data, mesh.dp_shard)
        if key not in self._host_s:
            whole = self.layouts.whole(candidate.micro_batch_size, mesh.ep_data)
            here, there = (self.rows.once_s(whole, self.step(c, whole)) for c in (twin, candidate))
            self._host_s[key] = there - here
        return first_bound_s(candidate, ideal, self._host_s[key] / mesh.tp)

"""Node groups that differ: prices of candidates for the devices of each pipeline rank (:mod:`autopar.planner.space.rank_orders`).

Layouts are solved at the prices of the slowest device; each stage is then priced on its own.
"""

from __future__ import annotations

import math
from dataclasses import replace

from autopar.cost.model import CostModel, Step
from autopar.graph.compact import Compact
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.rank_orders import origins


class Placed:
    """Candidates as the devices of each pipeline rank run them.

    Args:
        layouts: of the model on all node groups.
        model: of all node groups.
    """

    def __init__(self, layouts: Layouts, model: CostModel) -> None:
        self.layouts, self.model = layouts, model
        self.compact: Compact = layouts.compact
        self._origins: dict[tuple[object, ...], tuple[frozenset[int], ...]] = {}
        self._options: dict[tuple[PricedLayout, tuple[frozenset[int], ...]], PricedLayout] = {}

    def has(self, candidate: Candidate) -> bool:
        """Whether the pipeline ranks of a candidate differ; without a pipeline the slowest device is that of all."""
        return self.model.is_mixed and candidate.mesh.pp > 1

    def ordered(self, candidate: Candidate) -> CostModel:
        """The model of the cluster with its ranks in the candidate's order."""
        return self.model.in_order(candidate.order)

    def places(self, candidate: Candidate) -> tuple[frozenset[int], ...]:
        """For each pipeline rank the node groups that it lies on, by position in the cluster as given."""
        key = (candidate.order, candidate.mesh.pp, candidate.mesh.world_size)
        if key not in self._origins:
            self._origins[key] = origins(candidate, self.model.cluster)
        return self._origins[key]

    def limits(self, candidate: Candidate) -> tuple[int, ...]:
        """The largest predicted peak that fits on each pipeline rank."""
        spread = self.model.memory_spread
        return tuple(math.floor(part.memory_limit_bytes / spread) for part in self._parts(candidate))

    def tensor_limits(self, candidate: Candidate) -> tuple[float, ...]:
        """Likewise for tensors, what the device reserves left out."""
        parts = zip(self._parts(candidate), self.limits(candidate), strict=True)
        return tuple((limit - p.device.reserved_bytes) / (1 + p.device.fragmentation) for p, limit in parts)

    def option(self, candidate: Candidate, option: PricedLayout) -> PricedLayout:
        """A layout with its prices on each pipeline rank; as it is where it has them, or where ranks are alike."""
        if option.ranks or not self.has(candidate):
            return option
        places = self.places(candidate)
        if (option, places) not in self._options:
            ranks = tuple(self.layouts.on_device(option, self.model.part(own)) for own in places)
            self._options[option, places] = replace(option, ranks=ranks)
        return self._options[option, places]

    def step(self, step: Step, option: PricedLayout) -> Step:
        """How a candidate runs, with what each rank repeats."""
        return replace(step, preludes_s=tuple(own.prelude_s for own in option.ranks)) if option.ranks else step

    def least_s(self, option: PricedLayout) -> float:
        """Computation of one micro-batch, forward and backward, each block on the device that is fastest for it."""
        model = self.model
        groups = range(len(model.cluster.groups)) if model.is_mixed else ()
        options = [self.layouts.on_device(option, model.part(frozenset({i}))) for i in groups] or [option]
        times = [[cost.forward_s + cost.backward_s for cost in own.costs] for own in options]
        members = zip(*times, self.compact.members, strict=True)
        return float(sum(min(own) * len(blocks) for *own, blocks in members))

    # --- bounds

    def _parts(self, candidate: Candidate) -> tuple[CostModel, ...]:
        return self.ordered(candidate).parts(candidate.mesh)

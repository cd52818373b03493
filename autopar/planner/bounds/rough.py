"""First bounds of candidates whose layouts follow a rule: of their work, with what the data axes add to it, with collectives on ``tp``.

Neither needs a row. Ranks are alike, and no layout divides work better than evenly. Where stages hold equal numbers of blocks
of the one group of equal ones, the last rank has its part of these and the last block of all: it begins when a micro-batch is
through the stages before, and when it ends the last backward has to pass them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autopar.cost.model import Step
from autopar.planner.bounds.flow import least_flow_s
from autopar.planner.bounds.least_rows import LeastRows
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.types import Option, split_of
from autopar.planner.space.candidates import Candidate

ROUNDING = 1e-9
"""A bound is below the time of its plan up to this part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """Seconds of one micro-batch with nothing split, forward and backward.

    ``total_s``: of all blocks; ``group_s``: of one of the group of equal ones, of which there are ``count``; ``last_s``: of the
    last block, where it is none of these.
    """

    total_s: float
    group_s: float = 0.0
    count: int = 0
    last_s: float = 0.0


class Rough:
    """First bounds for one model, cluster and batch.

    Args:
        rows: below those of every layout.
        layouts: by a rule.
        step_of: how a candidate runs.
        is_even: stages hold equal numbers of blocks of the largest group.
    """

    def __init__(
        self, rows: LeastRows, layouts: Layouts, step_of: Callable[[Candidate, Option], Step], *, is_even: bool
    ) -> None:
        self.rows, self.layouts, self.step_of, self.is_even = rows, layouts, step_of, is_even
        self._works: dict[int, tuple[Option, _Work]] = {}  # the layout is kept, so that its id stays its own

    def work_s(self, candidate: Candidate) -> tuple[float, float]:
        """The bound by work alone, infinite where the candidate cannot fit; and seconds of a micro-batch through all stages."""
        whole, mesh = self._whole(candidate), candidate.mesh
        alone = mesh.pp == mesh.cp == mesh.tp == 1
        beside = self.rows.rows.last_bytes(whole) if alone else 0
        if self.rows.is_too_large(candidate, whole, self.step_of, beside):
            return math.inf, 0.0
        work, ranks = self._work(whole), mesh.cp * mesh.tp
        total_s = work.total_s / ranks
        stages, m = mesh.pp * candidate.virtual_stages, candidate.num_micro_batches
        bound_s = least_flow_s(total_s, m, mesh.pp, stages)
        if self.is_even and candidate.virtual_stages == 1 and mesh.pp > 1:
            own_s = work.count // stages * work.group_s
            bound_s = max(bound_s, ((mesh.pp - 1) * own_s + m * (own_s + work.last_s)) / ranks)
        return bound_s * (1 - ROUNDING), total_s

    def data_s(self, candidate: Candidate, moved_s: float = 0.0) -> tuple[float, float]:
        """As :meth:`work_s`, of candidates that may fit, with the data axes.

        Args:
            moved_s: of collectives inside of the model, for one micro-batch through all stages.
        """
        whole, mesh, m = self._whole(candidate), candidate.mesh, candidate.num_micro_batches
        always_s, once_s = self.rows.floors_s(whole, self.step_of(candidate, whole))
        total_s = self._work(whole).total_s / (mesh.cp * mesh.tp) + moved_s + always_s
        flow_s = least_flow_s(total_s, m, mesh.pp, mesh.pp * candidate.virtual_stages)
        return max(flow_s, (m * total_s + once_s) / mesh.pp) * (1 - ROUNDING), total_s

    def moved_s(self, candidate: Candidate) -> tuple[float, float]:
        """As :meth:`data_s`, with the least of collectives on ``tp``."""
        return self.data_s(
            candidate, self.layouts.solving.least_moved_s(split_of(candidate.micro_batch_size, candidate.mesh))
        )

    def _whole(self, candidate: Candidate) -> Option:
        return self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data)

    def _work(self, whole: Option) -> _Work:
        if id(whole) not in self._works:
            self._works[id(whole)] = whole, self._work_of(whole)
        return self._works[id(whole)][1]

    def _work_of(self, whole: Option) -> _Work:
        maker = self.rows.rows
        times = [cost.forward_s + cost.backward_s for cost in whole.costs]
        total_s = sum(n * time_s for n, time_s in zip(maker.counts, times, strict=True))
        groups = maker.groups()[0]
        if len(groups) != 1:  # which of several is the largest may depend on the layout
            return _Work(total_s=total_s)
        places = groups[0]
        last = len(times) - 1
        return _Work(
            total_s=total_s,
            group_s=min(times[k] for k in places),
            count=sum(maker.counts[k] for k in places),
            last_s=0.0 if last in places else times[last],
        )

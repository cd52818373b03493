"""The best plan of one candidate in one layout: cut, fit, refine, simulate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autopar.errors import InfeasibleError
from autopar.plan.prediction import Memory
from autopar.planner.context import SearchContext
from autopar.planner.evaluate.evaluation import Evaluation
from autopar.planner.layouts.layout import PricedLayout
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.block_options import BlockOptions, Placed
from autopar.planner.stages.cut_problem import CutProblem, EqualBlocks, Failure, Fitting, Stops, fitted, leanest_bytes
from autopar.planner.stages.refinement import improved, refined
from autopar.planner.stages.stage_cut import Mask, every_cut

ROUNDING = 1e-9
"""Part of a plan's time up to which a bound may be above it."""


class LayoutPlans:
    """Plans of one model's candidates, layout by layout.

    Args:
        context: of the search.
        options: prices of blocks.
        placed: what differs where ranks have different devices.
        rows_of: which blocks may form stages.
    """

    def __init__(
        self, context: SearchContext, options: BlockOptions, placed: Placed, rows_of: Callable[[Candidate], EqualBlocks]
    ) -> None:
        self.context, self.options, self.placed, self.rows_of = context, options, placed, rows_of
        self.pinned, self.buckets = dict(context.stages), context.buckets

    def best(
        self, candidate: Candidate, layout: PricedLayout, at_most_s: float, *, may_fit: bool
    ) -> Evaluation | Failure:
        """The best plan, or why there is none: the same one whatever ``at_most_s`` is, as far as it is faster.

        Args:
            may_fit: False: by a bound none fits, and only what it needs is asked for.

        Raises:
            InfeasibleError: the stages that are pinned cannot be cut.
        """
        problem = self.problem(candidate, layout)
        if not may_fit and not self.pinned:
            return Failure(needs_bytes=leanest_bytes(problem))
        if self.rows_of(candidate).tries_all(problem.num_stages):
            return self._best_of_all(problem, at_most_s)
        best: Evaluation | None = None
        failures: list[Failure] = []
        seen: set[Stops] = set()
        for allowed in problem.allowed_stages:
            least_s = min(at_most_s, best.time_s if best else at_most_s)
            found = fitted(problem, allowed, math.inf if problem.devices_differ else least_s * (1 + ROUNDING))
            if isinstance(found, Fitting) and not self._host_fits(found.memory):
                found = Failure(host_bytes=max(memory.host for memory in found.memory))
            if isinstance(found, Failure):
                failures.append(found)
                continue
            if found.stops not in seen:  # several ways may say the same
                seen.add(found.stops)
                plan = self._plan(problem, refined(problem, found))
                best = plan if best is None or plan.time_s < best.time_s else best
        if best is None:
            return next((failure for failure in failures if failure.is_slow), failures[0])
        if problem.devices_differ:
            best = self._moved(problem, best)
        return self._bucketed(problem, best)

    def improved(self, found: Evaluation) -> Evaluation:
        """A plan whose stages are cut better still (:mod:`autopar.planner.stages.refinement`); never a slower one."""
        if found.candidate.mesh.pp == 1 or self.pinned or self.options.moved or self.context.space.equal_stages:
            return found
        problem = self.problem(found.candidate, found.option).with_buckets(found.bucket_bytes)
        if problem.devices_differ:  # its evaluation did so
            return found
        return self._bucketed(problem, self._moved(problem, found))

    def _moved(self, problem: CutProblem, found: Evaluation) -> Evaluation:
        plan = improved(problem, problem.fitting(found.stops, found.modes), found.time_s)
        other = self._plan(problem, plan)
        return other if other.time_s < found.time_s and self._host_fits(plan.memory) else found

    def problem(self, candidate: Candidate, layout: PricedLayout) -> CutProblem:
        """A candidate in a layout, as stages are cut for it."""
        layout = self.placed.option(candidate, layout)
        step = self.placed.step(self.context.step(candidate, layout), layout)
        model, mesh = self.placed.ordered(candidate), candidate.mesh
        options = tuple(
            self.options.of_rank(layout.of_rank(rank), step, part, moves=candidate.moves)
            for rank, part in enumerate(model.parts(mesh))
        )
        return CutProblem(
            candidate=candidate,
            step=step,
            layout=layout,
            model=model,
            block_options=options,
            memory_limits=self.placed.limits(candidate),
            tensor_limits=self.placed.tensor_limits(candidate),
            pinned=self.pinned,
            allowed_stages=tuple(self._allowed(candidate, layout)),
            stages_of=lambda stops, modes: self.options.stages(stops, modes, layout, mesh.pp),
        )

    def _allowed(self, candidate: Candidate, layout: PricedLayout) -> Sequence[Sequence[Mask] | None]:
        """Ways in which blocks may form stages, by the laws of the space."""
        rows, pp, v = self.rows_of(candidate), candidate.mesh.pp, candidate.virtual_stages
        if self.context.space.equal_stages:
            return rows.equal_stages(layout, pp * v)
        if v == 1 or layout.ranks:  # devices that differ hold what they are fast enough for
            return [None]
        return rows.even_stages(layout, pp, v) or [None]

    def _plan(self, problem: CutProblem, found: Fitting) -> Evaluation:
        return Evaluation(
            candidate=problem.candidate,
            option=problem.layout,
            stops=found.stops,
            modes=found.modes,
            prediction=problem.model.predict(found.made, problem.step, memory=found.memory),
            bucket_bytes=problem.step.bucket_bytes,
        )

    def _bucketed(self, problem: CutProblem, plan: Evaluation) -> Evaluation:
        """A plan with the size of buckets that is quickest and fits.

        Neither layouts nor cuts are chosen by it, and no bound counts what is summed in buckets.
        """
        made = problem.stages_of(plan.stops, plan.modes)
        if len(self.buckets) == 1 or not problem.model.sums_in_buckets(made, problem.step):
            return plan
        best = plan
        for size in self.buckets:
            other = problem.with_buckets(size)
            if size == plan.bucket_bytes or problem.model.breakdown(made, other.step).total_s >= best.time_s:
                continue
            found = other.fitting(plan.stops, plan.modes)
            if other.fits(found):
                best = self._plan(other, found)
        return best

    def _best_of_all(self, problem: CutProblem, at_most_s: float) -> Evaluation | Failure:
        """Every cut with every choice of recompute, by their bounds."""
        blocks = problem.block_options[0].blocks
        every = [
            (problem.busy_s(cut.stops, cut.modes), cut) for cut in every_cut(blocks, problem.num_stages, self.pinned)
        ]
        if not every:
            raise InfeasibleError(
                f"The pinned stages cannot be cut into {problem.num_stages} stages",
                fix="Drop a pin of stages, or pin another pp",
            )
        best: Evaluation | None = None
        needs, host, is_slow = [], 0, False
        for least_s, cut in sorted(every, key=lambda pair: pair[0]):
            if least_s * (1 - ROUNDING) >= (best.time_s if best else at_most_s):
                is_slow = True
                break
            own, found = self._in_buckets(problem, problem.fitting(cut.stops, cut.modes))
            if not self._host_fits(found.memory):
                host = max(host, *(memory.host for memory in found.memory))
                continue
            needs.append(max(memory.total for memory in found.memory))
            if own.fits(found):
                plan = self._bucketed(own, self._plan(own, found))
                if best is None or plan.time_s < best.time_s:
                    best = plan
        if best is None and host and not needs and not is_slow:
            return Failure(host_bytes=host)
        return best or Failure(needs_bytes=min(needs, default=0), is_slow=is_slow)

    def _in_buckets(self, problem: CutProblem, found: Fitting) -> tuple[CutProblem, Fitting]:
        """A cut with the first size of buckets with which it fits; as it is where it fits with none."""
        if not problem.fits(found) and problem.model.sums_in_buckets(found.made, problem.step):
            for size in self.buckets[1:]:
                other = problem.with_buckets(size)
                smaller = other.fitting(found.stops, found.modes)
                if other.fits(smaller):
                    return other, smaller
        return problem, found

    def _host_fits(self, memory: Sequence[Memory]) -> bool:
        model = self.context.model
        limit = model.host.memory_bytes if any(own.host for own in memory) else None
        return limit is None or all(own.host <= limit for own in memory)

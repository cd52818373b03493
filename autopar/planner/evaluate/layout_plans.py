"""The best plan of one candidate in one layout: cut, fit, refine, simulate; for unequal shares of data ranks, choose recompute.

A candidate whose data ranks take different numbers of samples has one layout, without a split inside the model, and no stages to cut. Only
what each block recomputes is left to choose, equally for all ranks. So its bounds are prices: at level 0 the computation of the slowest
group, at level 1 the step with the least recompute, and at level 2 what each group has to recompute to fit in its memory alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autopar.cost.model import CostModel, StageCost, Step, predict_shares, shared_memory, shared_step_s
from autopar.errors import InfeasibleError
from autopar.plan.plan import RECOMPUTES, Recompute
from autopar.plan.prediction import Memory
from autopar.planner.bounds.chain_proof import ROUNDING
from autopar.planner.bounds.feasibility import feasible_bounds
from autopar.planner.bounds.instance_maker import InstanceMaker
from autopar.planner.layouts.layout import LayoutKey, PricedLayout, layout_key_of
from autopar.planner.search import Evaluation, Misfit, SearchContext, needs_text
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.block_options import BlockOptions
from autopar.planner.stages.cut_problem import (
    EXCESS_FACTOR,
    MAX_CUTS,
    CutProblem,
    Failure,
    Fitting,
    fitted,
    leanest_bytes,
)
from autopar.planner.stages.exchange import exchanged
from autopar.planner.stages.recompute import recompute_of
from autopar.planner.stages.refinement import improved, refined
from autopar.planner.stages.stage_cut import Mask, cut, every_cut, stage_masks


class LayoutPlans:
    """Finds plans of one model's candidates in given layouts.

    Args:
        context: the context of the search.
        options: prices of blocks.
        maker: which blocks may form stages, and how ranks with different devices differ.
    """

    def __init__(self, context: SearchContext, options: BlockOptions, maker: InstanceMaker) -> None:
        self.context, self.options = context, options
        self.maker, self.rank_devices, self.blocks_of = maker, maker.rank_devices, maker.blocks_of
        self.pinned, self.buckets = dict(context.stages), context.buckets
        self._has_given_stages = bool(self.pinned or context.offloaded or context.space.equal_stages)

    def best(
        self, candidate: Candidate, layout: PricedLayout, at_most_s: float, *, may_fit: bool
    ) -> Evaluation | Failure:
        """Return the best plan, or why there is none; the plan does not depend on ``at_most_s`` as long as it is faster.

        Args:
            at_most_s: cuts that cannot be faster may be left out.
            may_fit: False if a bound says that no plan fits; then only the memory that it needs is computed.

        Raises:
            InfeasibleError: the pinned stages cannot be cut.
        """
        problem = self.problem(candidate, layout)
        if not may_fit and not self.pinned:
            return Failure(needs_bytes=leanest_bytes(problem))
        if self.blocks_of(candidate).tries_all(problem.num_stages):
            return self._best_of_all(problem, at_most_s)
        best: Evaluation | None = None
        failures: list[Failure] = []
        for allowed in problem.allowed_stages:
            fitting = fitted(problem, allowed)
            if isinstance(fitting, Fitting) and not self._host_fits(fitting.memory):
                fitting = Failure(host_bytes=max(memory.host for memory in fitting.memory))
            if isinstance(fitting, Failure):
                failures.append(fitting)
                continue
            plan = self._plan(problem, refined(problem, fitting))
            best = plan if best is None or plan.time_s < best.time_s else best
        if best is None:
            return failures[0]
        if problem.devices_differ:
            best = self._searched(improved, problem, best)
        elif candidate.virtual_stages > 1 and not self._has_given_stages:
            best = self._searched(partial(improved, is_quick=True), problem, best)
        return self._bucketed(problem, best)

    def improved(self, plan: Evaluation) -> Evaluation:
        """Return a plan with better cut stages, and recompute where it adds least to the step; never a slower plan.

        See :mod:`autopar.planner.stages.refinement` and :mod:`autopar.planner.stages.exchange`.
        """
        if plan.candidate.mesh.pp == 1:
            return plan
        problem = self.problem(plan.candidate, plan.layout).with_buckets(plan.bucket_bytes)
        # Given stages stay; where devices differ, the evaluation has already improved them to the end.
        if not self._has_given_stages and not problem.devices_differ:
            plan = self._searched(improved, problem, plan)
        return self._bucketed(problem, self._searched(exchanged, problem, plan))

    def _searched(
        self, search: Callable[[CutProblem, Fitting, float], Fitting], problem: CutProblem, plan: Evaluation
    ) -> Evaluation:
        """Return the plan that a local search finds from ``plan``; ``plan`` itself unless that is faster and fits in the host's memory."""
        fitting = search(problem, problem.fitting(plan.stops, plan.modes), plan.time_s)
        other = self._plan(problem, fitting)
        return other if other.time_s < plan.time_s and self._host_fits(fitting.memory) else plan

    def problem(self, candidate: Candidate, layout: PricedLayout) -> CutProblem:
        """Return the problem of cutting a candidate in a layout into stages."""
        floors = self.maker.priced(candidate, layout)
        layout = self.rank_devices.priced(candidate, layout)
        step = self.rank_devices.step(self.context.step(candidate, layout), layout)
        model, mesh = self.context.model.in_order(candidate.order), candidate.mesh
        parts = model.parts(mesh)
        options = tuple(
            self.options.of_rank(layout.of_rank(rank), step, part, may_offload=candidate.offloads_activations)
            for rank, part in enumerate(parts)
        )
        return CutProblem(
            candidate=candidate,
            step=step,
            layout=layout,
            model=model,
            block_options=options,
            memory_limits=tuple(map(self.rank_devices.fitting_bytes, parts)),
            tensor_limits=tuple(map(self.rank_devices.tensor_bytes, parts)),
            pinned=self.pinned,
            allowed_stages=tuple(self._allowed(candidate, layout)),
            floors=floors,
            stages_of=lambda stops, modes: self.options.stages(stops, modes, layout, mesh.pp),
        )

    def _allowed(self, candidate: Candidate, layout: PricedLayout) -> Sequence[Sequence[Mask] | None]:
        """Return the ways in which blocks may form stages under the constraints of the space; None: any."""
        rows, pp, v = self.blocks_of(candidate), candidate.mesh.pp, candidate.virtual_stages
        if self.context.space.equal_stages:
            return rows.equal_stages(layout, pp * v)
        if v == 1 or layout.ranks:  # the speed and memory of different devices decide their blocks
            return [None]
        return rows.even_stages(layout, pp, v) or [None]

    def _plan(self, problem: CutProblem, fitting: Fitting) -> Evaluation:
        return Evaluation(
            candidate=problem.candidate,
            layout=problem.layout,
            stops=fitting.stops,
            modes=fitting.modes,
            prediction=problem.model.predict(fitting.stages, problem.step, memory=fitting.memory),
            bucket_bytes=problem.step.bucket_bytes,
        )

    def _bucketed(self, problem: CutProblem, plan: Evaluation) -> Evaluation:
        """Return a plan with the fastest bucket size that fits.

        Bucket sizes decide neither layouts nor cuts, and bounds hold for every size.
        """
        stages = problem.stages_of(plan.stops, plan.modes)
        if len(self.buckets) == 1 or not problem.model.sums_in_buckets(stages, problem.step):
            return plan
        best = plan
        for size in self.buckets:
            other = problem.with_buckets(size)
            if size == plan.bucket_bytes or problem.model.breakdown(stages, other.step).total_s >= best.time_s:
                continue
            fitting = other.fitting(plan.stops, plan.modes)
            if other.fits(fitting):
                best = self._plan(other, fitting)
        return best

    def _best_of_all(self, problem: CutProblem, at_most_s: float) -> Evaluation | Failure:
        """Evaluate every cut with every choice of recompute, in the order of their bounds."""
        blocks = problem.block_options[0].blocks
        cuts = [
            (problem.busy_s(option.stops, option.modes), option)
            for option in every_cut(blocks, problem.num_stages, self.pinned)
        ]
        if not cuts:
            raise InfeasibleError(
                f"The pinned stages cannot be cut into {problem.num_stages} stages",
                fix="Drop a pin of stages, or pin another pp",
            )
        best: Evaluation | None = None
        needs, host, is_slow = [], 0, False
        for least_s, option in sorted(cuts, key=lambda pair: pair[0]):
            if least_s * (1 - ROUNDING) >= (best.time_s if best else at_most_s):
                is_slow = True
                break
            bucketed, fitting = self._in_buckets(problem, problem.fitting(option.stops, option.modes))
            if not self._host_fits(fitting.memory):
                host = max(host, *(memory.host for memory in fitting.memory))
                continue
            needs.append(max(memory.total for memory in fitting.memory))
            if bucketed.fits(fitting):
                plan = self._bucketed(bucketed, self._plan(bucketed, fitting))
                if best is None or plan.time_s < best.time_s:
                    best = plan
        if best is None and host and not needs and not is_slow:
            return Failure(host_bytes=host)
        return best or Failure(needs_bytes=min(needs, default=0), is_slow=is_slow)

    def _in_buckets(self, problem: CutProblem, fitting: Fitting) -> tuple[CutProblem, Fitting]:
        """Return a cut with the first bucket size with which it fits; unchanged where it fits with none."""
        if not problem.fits(fitting) and problem.model.sums_in_buckets(fitting.stages, problem.step):
            for size in self.buckets[1:]:
                other = problem.with_buckets(size)
                smaller = other.fitting(fitting.stops, fitting.modes)
                if other.fits(smaller):
                    return other, smaller
        return problem, fitting

    def _host_fits(self, memory: Sequence[Memory]) -> bool:
        model = self.context.model
        limit = model.host.memory_bytes if any(rank.host for rank in memory) else None
        return limit is None or all(rank.host <= limit for rank in memory)


Modes = tuple[Recompute, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """A candidate as each node group runs it, in the order of ranks."""

    models: tuple[CostModel, ...]
    layouts: tuple[PricedLayout, ...]
    steps: tuple[Step, ...]


class SharesEvaluator:
    """Evaluates candidates with unequal shares of data ranks.

    Args:
        context: the context of the search.
        options: prices of blocks.
        maker: makes the instances that relaxations read.
    """

    def __init__(self, context: SearchContext, options: BlockOptions, maker: InstanceMaker) -> None:
        self.context, self.options, self.maker = context, options, maker
        self.layouts, self.model = context.layouts, context.model
        self._shared: dict[Candidate, _Shared] = {}
        self._bounds: dict[tuple[int, Candidate], float] = {}

    def seconds(self, place: int, size: int, vocab_multiple: int = 1) -> float:
        """Return the seconds in which a node group computes a micro-batch, without collectives.

        Args:
            place: the position of the node group in the cluster as given.
            size: the samples of the micro-batch.
            vocab_multiple: the multiple to which the vocabulary is padded.
        """
        layout = self._layout(place, size, vocab_multiple)
        times = zip(layout.costs, self.layouts.compact.members, strict=True)
        return layout.prelude_s + sum((c.forward_s + c.backward_s) * len(blocks) for c, blocks in times)

    # --- bounds

    def bound_s(self, level: int, candidate: Candidate) -> float:
        """Return a lower bound of a candidate's step time in seconds, infinite where it does not fit; the module describes the levels."""
        if (level, candidate) not in self._bounds:
            bound = (self._computation_s, self._fastest_s, self._fitting_s)[level]
            self._bounds[level, candidate] = bound(candidate)
        return self._bounds[level, candidate]

    def _computation_s(self, candidate: Candidate) -> float:
        groups = zip(self._places(candidate), candidate.shares, strict=True)
        longest_s = max(self.seconds(place, share, candidate.vocab_multiple) for place, share in groups)
        return candidate.num_micro_batches * longest_s * (1 - ROUNDING)

    def _fastest_s(self, candidate: Candidate) -> float:
        parts = self._parts(candidate)
        cost = self._stages(parts, self.options.fastest_modes())
        return min(shared_step_s(parts.models, cost, row) for row in self._in_buckets(parts, cost)) * (1 - ROUNDING)

    def _fitting_s(self, candidate: Candidate) -> float:
        """Return the bound of the slowest group in its own memory, infinite where a group does not fit whatever it recomputes.

        All groups recompute the same, so that none takes less than it would alone. Where pins put activations on the host, this bound is
        unknown and that of level 1 is returned.
        """
        fastest_s = self.bound_s(1, candidate)
        if self.context.offloaded:
            return fastest_s
        parts = self._parts(candidate)
        instances = [self.maker.one_stage(candidate, *pair) for pair in zip(parts.layouts, parts.models, strict=True)]
        if not all(instance.holds_in_order() for instance in instances):
            return math.inf
        return max(fastest_s, float(max(feasible_bounds(instances))) * (1 - ROUNDING))

    # --- evaluation

    def evaluate(self, candidate: Candidate) -> Evaluation | Misfit:
        """Return the best plan of a candidate, or why there is none."""
        parts = self._parts(candidate)
        best: Evaluation | None = None
        needs: list[Memory] = []
        for modes in self._modes(parts):
            stages = self._stages(parts, modes)
            for steps in self._in_buckets(parts, stages):
                memory = shared_memory(parts.models, stages, steps)
                if not self._all_fit(parts, memory):
                    needs = memory
                    continue
                prediction = predict_shares(parts.models, stages, steps)
                if best is None or prediction.step_time_s < best.prediction.step_time_s:
                    best = Evaluation(
                        candidate=candidate,
                        layout=self.layouts.unsplit(layout_key_of(candidate)),
                        stops=(len(modes),),
                        modes=modes,
                        prediction=prediction,
                        bucket_bytes=steps[0].bucket_bytes,
                    )
        if best is not None:
            return best
        worst = max(zip(needs, parts.models, strict=True), key=lambda row: row[0].total / row[1].memory_limit_bytes)
        return Misfit(
            candidate=candidate,
            reason=f"memory: needs {needs_text(self.model, worst[0].total)}",
            needs_bytes=worst[0].total,
        )

    def _in_buckets(self, parts: _Shared, stages: Sequence[StageCost]) -> list[tuple[Step, ...]]:
        """Return the steps of the groups with each bucket size; with the first size alone where nothing is summed in buckets."""
        is_summed = parts.models[0].sums_in_buckets(stages[:1], parts.steps[0])
        sizes = self.context.buckets if is_summed else self.context.buckets[:1]
        return [tuple(replace(step, bucket_bytes=size) for step in parts.steps) for size in sizes]

    def _modes(self, parts: _Shared) -> list[Modes]:
        """Return the choices of recompute to evaluate: the fastest one alone where it fits, as no other is faster.

        Else these are what each group needs, the most that any group needs for each block, and all that blocks can recompute.
        """
        fastest = self.options.fastest_modes()
        if self._all_fit(parts, shared_memory(parts.models, self._stages(parts, fastest), parts.steps)):
            return [fastest]
        needed = [self._needed(*group) for group in zip(parts.models, parts.layouts, parts.steps, strict=True)]
        most = tuple(max(block, key=RECOMPUTES.index) for block in zip(*needed, strict=True))
        leanest = tuple(
            self.context.recompute.get(i, max(self.context.modes, key=RECOMPUTES.index)) for i in range(len(most))
        )
        return [*dict.fromkeys((*needed, most, leanest))]

    def _needed(self, model: CostModel, layout: PricedLayout, step: Step) -> Modes:
        """Return what one group has to recompute to fit; all that it can where that is not enough."""
        options = self.options.of_rank(layout, step, model, may_offload=False)
        room, limit = self.maker.rank_devices.fitting_bytes(model), self.maker.rank_devices.tensor_bytes(model)
        blocks = len(options.blocks)
        for _ in range(MAX_CUTS):
            solution = cut(
                [options], in_flight=[1], limit_bytes=[limit], num_micro_batches=step.num_micro_batches,
                allowed=stage_masks(blocks, 1, None, {}),
            )  # fmt: skip
            if solution is None:
                break
            spare = room - model.memory(self.options.stages((blocks,), solution.modes, layout, 1), step)[0].total
            if spare >= 0:
                return tuple(map(recompute_of, solution.modes))
            limit += EXCESS_FACTOR * spare
        return tuple(recompute_of(min(block.options, key=lambda o: o.held_bytes).mode) for block in options.blocks)

    def _all_fit(self, parts: _Shared, memory: Sequence[Memory]) -> bool:
        return all(
            m.total <= self.maker.rank_devices.fitting_bytes(model)
            for m, model in zip(memory, parts.models, strict=True)
        )

    # --- what groups do

    def _places(self, candidate: Candidate) -> Sequence[int]:
        """Return the positions of the node groups in the cluster as given, in the order of ranks."""
        return candidate.order or range(len(candidate.shares))

    def _layout(self, place: int, size: int, vocab_multiple: int) -> PricedLayout:
        split = LayoutKey(micro_batch_size=size, vocab_multiple=vocab_multiple)
        return self.layouts.on_device(self.layouts.unsplit(split), self.model.part(frozenset({place})))

    def _parts(self, candidate: Candidate) -> _Shared:
        if candidate not in self._shared:
            groups = zip(self._places(candidate), candidate.shares, strict=True)
            layouts = tuple(self._layout(place, share, candidate.vocab_multiple) for place, share in groups)
            steps = tuple(self.context.step(candidate, layout) for layout in layouts)
            models = self.model.in_order(candidate.order).alone
            self._shared[candidate] = _Shared(models=models, layouts=layouts, steps=steps)
        return self._shared[candidate]

    def _stages(self, parts: _Shared, modes: Modes) -> tuple[StageCost, ...]:
        """Return one stage of all blocks for each group, as that group runs it."""
        return tuple(self.options.stages((len(modes),), modes, layout, 1)[0] for layout in parts.layouts)

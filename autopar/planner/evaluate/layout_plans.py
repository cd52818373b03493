"""The best plan of one candidate in one layout: cut, fit, refine, simulate; of unequal shares of data ranks, recompute.

Candidates whose data ranks take different numbers of samples are bounded and evaluated beside all others. Such a candidate has one layout,
that of no split inside of the model, and no stages to cut: what is left to choose is what each block recomputes, for all ranks alike. So
its bounds are prices: first the computation of the group that takes longest, then the step with as little recompute as there may be, and
last what each group by itself has to recompute so that it fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.cost.model import CostModel, StageCost, Step, predict_shares, shared_memory, shared_step_s
from autopar.errors import InfeasibleError
from autopar.plan.plan import RECOMPUTES, Recompute
from autopar.plan.prediction import Memory
from autopar.planner.bounds.chain_proof import ROUNDING
from autopar.planner.bounds.feasibility import feasible_bounds
from autopar.planner.bounds.instance_maker import InstanceMaker
from autopar.planner.layouts.layout import LayoutKey, PricedLayout, layout_key_of
from autopar.planner.search import SLOW, Evaluation, Misfit, SearchContext, needs_text
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
from autopar.planner.stages.recompute import none_if_moved
from autopar.planner.stages.refinement import improved, refined
from autopar.planner.stages.stage_cut import Mask, cut, every_cut, stage_masks


class LayoutPlans:
    """Plans of one model's candidates, layout by layout.

    Args:
        context: of the search.
        options: prices of blocks.
        maker: which blocks may form stages, and what differs where ranks have different devices.
    """

    def __init__(self, context: SearchContext, options: BlockOptions, maker: InstanceMaker) -> None:
        self.context, self.options, self.placed, self.blocks_of = context, options, maker.placed, maker.blocks_of
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
        if self.blocks_of(candidate).tries_all(problem.num_stages):
            return self._best_of_all(problem, at_most_s)
        best: Evaluation | None = None
        failures: list[Failure] = []
        for allowed in problem.allowed_stages:
            found = fitted(problem, allowed)
            if isinstance(found, Fitting) and not self._host_fits(found.memory):
                found = Failure(host_bytes=max(memory.host for memory in found.memory))
            if isinstance(found, Failure):
                failures.append(found)
                continue
            plan = self._plan(problem, refined(problem, found))
            best = plan if best is None or plan.time_s < best.time_s else best
        if best is None:
            return failures[0]
        if problem.devices_differ:
            best = self._searched(improved, problem, best)
        return self._bucketed(problem, best)

    def improved(self, found: Evaluation) -> Evaluation:
        """A plan whose stages are cut better still, and recompute where it takes the least of a step; never a slower one.

        See :mod:`autopar.planner.stages.refinement` and :mod:`autopar.planner.stages.exchange`.
        """
        if found.candidate.mesh.pp == 1:
            return found
        problem = self.problem(found.candidate, found.option).with_buckets(found.bucket_bytes)
        is_given = self.pinned or self.context.moved or self.context.space.equal_stages
        if not is_given and not problem.devices_differ:  # else stages stay, or its evaluation did so
            found = self._searched(improved, problem, found)
        return self._bucketed(problem, self._searched(exchanged, problem, found))

    def _searched(
        self, search: Callable[[CutProblem, Fitting, float], Fitting], problem: CutProblem, found: Evaluation
    ) -> Evaluation:
        """The plan that a local search finds from another one, if it is faster."""
        plan = search(problem, problem.fitting(found.stops, found.modes), found.time_s)
        other = self._plan(problem, plan)
        return other if other.time_s < found.time_s and self._host_fits(plan.memory) else found

    def problem(self, candidate: Candidate, layout: PricedLayout) -> CutProblem:
        """A candidate in a layout, as stages are cut for it."""
        layout = self.placed.option(candidate, layout)
        step = self.placed.step(self.context.step(candidate, layout), layout)
        model, mesh = self.context.model.in_order(candidate.order), candidate.mesh
        parts = model.parts(mesh)
        options = tuple(
            self.options.of_rank(layout.of_rank(rank), step, part, moves=candidate.moves)
            for rank, part in enumerate(parts)
        )
        return CutProblem(
            candidate=candidate,
            step=step,
            layout=layout,
            model=model,
            block_options=options,
            memory_limits=tuple(map(self.placed.fitting_bytes, parts)),
            tensor_limits=tuple(map(self.placed.tensor_bytes, parts)),
            pinned=self.pinned,
            allowed_stages=tuple(self._allowed(candidate, layout)),
            stages_of=lambda stops, modes: self.options.stages(stops, modes, layout, mesh.pp),
        )

    def _allowed(self, candidate: Candidate, layout: PricedLayout) -> Sequence[Sequence[Mask] | None]:
        """Ways in which blocks may form stages, by the laws of the space."""
        rows, pp, v = self.blocks_of(candidate), candidate.mesh.pp, candidate.virtual_stages
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
            prediction=problem.model.predict(found.stages, problem.step, memory=found.memory),
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
            (problem.busy_s(one.stops, one.modes), one) for one in every_cut(blocks, problem.num_stages, self.pinned)
        ]
        if not every:
            raise InfeasibleError(
                f"The pinned stages cannot be cut into {problem.num_stages} stages",
                fix="Drop a pin of stages, or pin another pp",
            )
        best: Evaluation | None = None
        needs, host, is_slow = [], 0, False
        for least_s, one in sorted(every, key=lambda pair: pair[0]):
            if least_s * (1 - ROUNDING) >= (best.time_s if best else at_most_s):
                is_slow = True
                break
            own, found = self._in_buckets(problem, problem.fitting(one.stops, one.modes))
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
        if not problem.fits(found) and problem.model.sums_in_buckets(found.stages, problem.step):
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


Modes = tuple[Recompute, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """A candidate as each node group runs it, in the order of ranks."""

    models: tuple[CostModel, ...]
    options: tuple[PricedLayout, ...]
    steps: tuple[Step, ...]


class SharesEvaluator:
    """Evaluates candidates with unequal shares of data ranks.

    Args:
        context: of the search.
        options: prices of blocks.
        maker: of what relaxations read.
    """

    def __init__(self, context: SearchContext, options: BlockOptions, maker: InstanceMaker) -> None:
        self.context, self.options, self.maker = context, options, maker
        self.layouts, self.model = context.layouts, context.model
        self._alone: dict[tuple[int, ...], tuple[CostModel, ...]] = {}
        self._shared: dict[Candidate, _Shared] = {}
        self._bounds: dict[tuple[int, Candidate], float] = {}
        self._found: dict[Candidate, Evaluation | Misfit] = {}

    def seconds(self, place: int, size: int, vocab_multiple: int = 1) -> float:
        """Computation of a micro-batch on a node group, by its place in the cluster as given, collectives left out."""
        option = self._option(place, size, vocab_multiple)
        times = zip(option.costs, self.layouts.compact.members, strict=True)
        return option.prelude_s + sum((c.forward_s + c.backward_s) * len(blocks) for c, blocks in times)

    # --- bounds

    def bound_s(self, level: int, candidate: Candidate) -> float:
        """Seconds below which a candidate has no plan, infinite where none fits; each level as the module says."""
        if (level, candidate) not in self._bounds:
            made = (self._computation_s, self._fastest_s, self._fitting_s)[level]
            self._bounds[level, candidate] = made(candidate)
        return self._bounds[level, candidate]

    def _computation_s(self, candidate: Candidate) -> float:
        groups = zip(self._places(candidate), candidate.shares, strict=True)
        longest_s = max(self.seconds(place, share, candidate.vocab_multiple) for place, share in groups)
        return candidate.num_micro_batches * longest_s * (1 - ROUNDING)

    def _fastest_s(self, candidate: Candidate) -> float:
        parts = self._parts(candidate)
        made = self._stages(parts, self.options.fastest_modes())
        return min(shared_step_s(parts.models, made, own) for own in self._in_buckets(parts, made)) * (1 - ROUNDING)

    def _fitting_s(self, candidate: Candidate) -> float:
        """What the group takes that needs longest in its own memory, infinite where one does not fit whatever it recomputes.

        All groups recompute the same, so that none takes less than by itself. Of blocks that are pinned to the host it is not known.
        """
        fastest_s = self.bound_s(1, candidate)
        if self.context.moved:
            return fastest_s
        parts = self._parts(candidate)
        groups = [self.maker.of_group(candidate, *own) for own in zip(parts.options, parts.models, strict=True)]
        if not all(group.holds_in_order() for group in groups):
            return math.inf
        return max(fastest_s, float(max(feasible_bounds(groups))) * (1 - ROUNDING))

    # --- evaluation

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """The best plan of a candidate; see :meth:`autopar.planner.evaluate.evaluator.Evaluator.evaluate`."""
        if candidate not in self._found:
            if self.bound_s(1, candidate) >= at_most_s:
                return Misfit(candidate=candidate, reason=SLOW)
            self._found[candidate] = self._evaluated(candidate)
        return self._found[candidate]

    def _evaluated(self, candidate: Candidate) -> Evaluation | Misfit:
        parts = self._parts(candidate)
        best: Evaluation | None = None
        needs: list[Memory] = []
        for modes in self._modes(parts):
            made = self._stages(parts, modes)
            for steps in self._in_buckets(parts, made):
                memory = shared_memory(parts.models, made, steps)
                if not self._all_fit(parts, memory):
                    needs = memory
                    continue
                prediction = predict_shares(parts.models, made, steps)
                if best is None or prediction.step_time_s < best.prediction.step_time_s:
                    best = Evaluation(
                        candidate=candidate,
                        option=self.layouts.unsplit(layout_key_of(candidate)),
                        stops=(len(modes),),
                        modes=modes,
                        prediction=prediction,
                        bucket_bytes=steps[0].bucket_bytes,
                    )
        if best is not None:
            return best
        over = max(zip(needs, parts.models, strict=True), key=lambda own: own[0].total / own[1].memory_limit_bytes)
        return Misfit(
            candidate=candidate,
            reason=f"memory: needs {needs_text(self.model, over[0].total)}",
            needs_bytes=over[0].total,
        )

    def _in_buckets(self, parts: _Shared, made: Sequence[StageCost]) -> list[tuple[Step, ...]]:
        """The steps with each size of buckets; with the first one where nothing is summed in them."""
        is_summed = parts.models[0].sums_in_buckets(made[:1], parts.steps[0])
        sizes = self.context.buckets if is_summed else self.context.buckets[:1]
        return [tuple(replace(step, bucket_bytes=size) for step in parts.steps) for size in sizes]

    def _modes(self, parts: _Shared) -> list[Modes]:
        """What blocks may recompute: nothing; as much as each of the groups needs, or all of them; all that they can.

        The first alone where it fits: it is the quickest.
        """
        fastest = self.options.fastest_modes()
        if self._all_fit(parts, shared_memory(parts.models, self._stages(parts, fastest), parts.steps)):
            return [fastest]
        own = [self._needed(*group) for group in zip(parts.models, parts.options, parts.steps, strict=True)]
        most = tuple(max(block, key=RECOMPUTES.index) for block in zip(*own, strict=True))
        leanest = tuple(
            self.context.recompute.get(i, max(self.context.modes, key=RECOMPUTES.index)) for i in range(len(most))
        )
        return [*dict.fromkeys((*own, most, leanest))]

    def _needed(self, model: CostModel, option: PricedLayout, step: Step) -> Modes:
        """What one group has to recompute; what it can where that is not enough."""
        options = self.options.of_rank(option, step, model, moves=False)
        most, limit = self.maker.placed.fitting_bytes(model), self.maker.placed.tensor_bytes(model)
        blocks = len(options.blocks)
        for _ in range(MAX_CUTS):
            found = cut(
                [options], in_flight=[1], limit_bytes=[limit], num_micro_batches=step.num_micro_batches,
                allowed=stage_masks(blocks, 1, None, {}),
            )  # fmt: skip
            if found is None:
                break
            spare = most - model.memory(self.options.stages((blocks,), found.modes, option, 1), step)[0].total
            if spare >= 0:
                return tuple(map(none_if_moved, found.modes))
            limit += EXCESS_FACTOR * spare
        return tuple(none_if_moved(min(block.options, key=lambda o: o.held_bytes).mode) for block in options.blocks)

    def _all_fit(self, parts: _Shared, memory: Sequence[Memory]) -> bool:
        return all(
            m.total <= self.maker.placed.fitting_bytes(model) for m, model in zip(memory, parts.models, strict=True)
        )

    # --- what groups do

    def _places(self, candidate: Candidate) -> Sequence[int]:
        """Of the node groups in the order of ranks, in the cluster as given."""
        return candidate.order or range(len(candidate.shares))

    def _option(self, place: int, size: int, vocab_multiple: int) -> PricedLayout:
        split = LayoutKey(micro_batch_size=size, vocab_multiple=vocab_multiple)
        return self.layouts.on_device(self.layouts.unsplit(split), self.model.part(frozenset({place})))

    def _parts(self, candidate: Candidate) -> _Shared:
        if candidate not in self._shared:
            if candidate.order not in self._alone:
                self._alone[candidate.order] = self.model.in_order(candidate.order).alone()
            groups = zip(self._places(candidate), candidate.shares, strict=True)
            options = tuple(self._option(place, share, candidate.vocab_multiple) for place, share in groups)
            steps = tuple(self.context.step(candidate, option) for option in options)
            self._shared[candidate] = _Shared(models=self._alone[candidate.order], options=options, steps=steps)
        return self._shared[candidate]

    def _stages(self, parts: _Shared, modes: Modes) -> tuple[StageCost, ...]:
        """All blocks, as each group runs them."""
        return tuple(self.options.stages((len(modes),), modes, option, 1)[0] for option in parts.options)

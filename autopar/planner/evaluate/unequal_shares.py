"""Candidates whose data ranks take different numbers of samples, bounded and evaluated beside all others.

Such a candidate has one layout, that of no split inside of the model, and no stages to cut: what is left to choose is what
each block recomputes, for all ranks alike. So its bounds are prices: first the computation of the group that takes longest,
then the step with as little recompute as there may be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.cost.model import CostModel, StageCost, Step, predict_shares, shared_memory, shared_step_s
from autopar.plan.plan import RECOMPUTES, Recompute
from autopar.plan.prediction import Memory
from autopar.planner.context import SearchContext
from autopar.planner.evaluate.evaluation import SLOW, Evaluation, Misfit, needs_text
from autopar.planner.evaluate.layout_plans import ROUNDING
from autopar.planner.layouts.layout import LayoutKey, PricedLayout, layout_key_of
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.block_options import BlockOptions, Placed
from autopar.planner.stages.cut_problem import MAX_CUTS, MORE
from autopar.planner.stages.recompute import none_if_moved
from autopar.planner.stages.stage_cut import cut, stage_masks

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
        placed: prices on the devices of node groups.
        options: prices of blocks.
    """

    def __init__(self, context: SearchContext, placed: Placed, options: BlockOptions) -> None:
        self.context, self.placed, self.options = context, placed, options
        self.layouts, self.model = context.layouts, context.model
        self._alone: dict[tuple[int, ...], tuple[CostModel, ...]] = {}
        self._shared: dict[Candidate, _Shared] = {}
        self._least: dict[Candidate, float] = {}
        self._fastest: dict[Candidate, float] = {}
        self._found: dict[Candidate, Evaluation | Misfit] = {}

    def seconds(self, place: int, size: int, vocab_multiple: int = 1) -> float:
        """Computation of a micro-batch on a node group, by its place in the cluster as given, collectives left out."""
        option = self._option(place, size, vocab_multiple)
        times = zip(option.costs, self.layouts.compact.members, strict=True)
        return option.prelude_s + sum((c.forward_s + c.backward_s) * len(blocks) for c, blocks in times)

    # --- bounds

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """Seconds below which each candidate has no plan: of computation alone, then of the step with the least recompute."""
        return [self._computation_s(c) if level == 0 else self._fastest_s(c) for c in candidates]

    def _computation_s(self, candidate: Candidate) -> float:
        if candidate not in self._least:
            groups = zip(self._places(candidate), candidate.shares, strict=True)
            longest_s = max(self.seconds(place, share, candidate.vocab_multiple) for place, share in groups)
            self._least[candidate] = candidate.num_micro_batches * longest_s * (1 - ROUNDING)
        return self._least[candidate]

    def _fastest_s(self, candidate: Candidate) -> float:
        if candidate not in self._fastest:
            parts = self._parts(candidate)
            made = self._stages(parts, self.options.fastest_modes())
            time_s = shared_step_s(parts.models, made, parts.steps)
            self._fastest[candidate] = time_s * (1 - ROUNDING)
        return self._fastest[candidate]

    # --- evaluation

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """The best plan of a candidate; see :class:`PipelineEvaluator`."""
        if candidate not in self._found:
            if self._fastest_s(candidate) >= at_most_s:
                return Misfit(candidate=candidate, reason=SLOW)
            self._found[candidate] = self._evaluated(candidate)
        return self._found[candidate]

    def _evaluated(self, candidate: Candidate) -> Evaluation | Misfit:
        parts = self._parts(candidate)
        best: Evaluation | None = None
        needs: list[Memory] = []
        for modes in self._modes(parts):
            made = self._stages(parts, modes)
            for size in self.context.buckets:
                steps = tuple(replace(step, bucket_bytes=size) for step in parts.steps)
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
                        bucket_bytes=size,
                    )
                if not parts.models[0].sums_in_buckets(made[:1], parts.steps[0]):
                    break
        if best is not None:
            return best
        over = max(zip(needs, parts.models, strict=True), key=lambda own: own[0].total / own[1].memory_limit_bytes)
        return Misfit(
            candidate=candidate,
            reason=f"memory: needs {needs_text(self.model, over[0].total)}",
            needs_bytes=over[0].total,
        )

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
            self.context.recompute.get(i, max(self.options.space_modes, key=RECOMPUTES.index)) for i in range(len(most))
        )
        return [*dict.fromkeys((*own, most, leanest))]

    def _needed(self, model: CostModel, option: PricedLayout, step: Step) -> Modes:
        """What one group has to recompute; what it can where that is not enough."""
        options, device = self.options.of_rank(option, step, model, moves=False), model.device
        most = self._limit(model)
        limit = (most - device.reserved_bytes) / (1 + device.fragmentation)
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
            limit += MORE * spare
        return tuple(none_if_moved(min(block.options, key=lambda o: o.held_bytes).mode) for block in options.blocks)

    def _limit(self, model: CostModel) -> int:
        return math.floor(model.memory_limit_bytes / self.model.memory_spread)

    def _all_fit(self, parts: _Shared, memory: Sequence[Memory]) -> bool:
        return all(m.total <= self._limit(model) for m, model in zip(memory, parts.models, strict=True))

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
                self._alone[candidate.order] = self.placed.ordered(candidate).alone()
            groups = zip(self._places(candidate), candidate.shares, strict=True)
            options = tuple(self._option(place, share, candidate.vocab_multiple) for place, share in groups)
            steps = tuple(self.context.step(candidate, option) for option in options)
            self._shared[candidate] = _Shared(models=self._alone[candidate.order], options=options, steps=steps)
        return self._shared[candidate]

    def _stages(self, parts: _Shared, modes: Modes) -> tuple[StageCost, ...]:
        """All blocks, as each group runs them."""
        return tuple(self.options.stages((len(modes),), modes, option, 1)[0] for option in parts.options)

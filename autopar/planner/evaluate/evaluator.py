"""One candidate evaluated: its layouts, the stage cut with recompute, the predicted step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from autopar.cost.model import CostModel, Step
from autopar.errors import InfeasibleError
from autopar.plan import BUCKET_BYTES, Memory, Prediction
from autopar.planner.bounds.cascade import Cascade
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.context import SearchContext
from autopar.planner.layouts.types import PricedLayout
from autopar.planner.model_stats import readable
from autopar.planner.sharding.every import every_cut
from autopar.planner.space.candidates import Candidate
from autopar.planner.stages.activation_modes import Way
from autopar.planner.stages.fit_cut import Cuts, Failure
from autopar.planner.stages.fitting import Fitting, busy_s, once_s
from autopar.planner.stages.per_device import Placed
from autopar.planner.stages.stage_cut import Cut, StageCutter
from autopar.planner.stages.uneven import exactly

ROUNDING = 1e-9
"""A bound of a cut is below its time up to this part of it."""

BEGUN = 2
"""Micro-batches for each pipeline rank by which plans of twice as many and more are compared."""

FEW = 2
"""Of those that are compared so many are predicted."""

SLOW = "slower than the best plan by a bound"
"""The reason of a candidate that was left unfinished."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """A candidate that fits.

    ``stops``: where each stage ends; ``modes``: how each block recomputes, or that it keeps on the host what it needs; ``bucket_bytes``: of gradients summed together.
    """

    candidate: Candidate
    option: PricedLayout
    stops: tuple[int, ...]
    modes: tuple[Way, ...]
    prediction: Prediction
    bucket_bytes: int = BUCKET_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A candidate without a plan, and why; ``needs_bytes``: of the leanest that was tried, 0 where not known."""

    candidate: Candidate
    reason: str
    needs_bytes: int = 0


class PipelineEvaluator:
    """Evaluates candidates whose data ranks take equal shares.

    Args:
        context: of the search.
        cascade: bounds.
        cuts: of blocks into stages.
        placed: prices on the devices of each rank.
        rows: groups of equal blocks, without and with copies to the host.
    """

    def __init__(
        self, context: SearchContext, cascade: Cascade, cuts: Cuts, placed: Placed, rows: tuple[RowMaker, RowMaker]
    ) -> None:
        self.context, self.cascade, self.cuts = context, cascade, cuts
        self.placed, self.rows, self._rows = placed, rows[0], rows
        self.model, self.space, self.layouts = context.model, context.space, context.layouts
        self._done: dict[Candidate, Evaluation | Misfit] = {}

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """The best plan of a candidate: the same one whatever ``at_most_s`` is, as far as it is faster.

        Args:
            at_most_s: plans that cannot be faster than this are left unfinished (and then not remembered).
        """
        if candidate in self._done:
            return self._done[candidate]
        best: Evaluation | None = None
        failures: list[Failure] = []
        try:
            left = [*self.context.typed_layouts(candidate)]
            while left:
                least = min(at_most_s, best.prediction.step_time_s if best else at_most_s)
                bounds_s = self.cascade.layout_bounds_s(candidate, left, least)
                bound = min(bounds_s)
                draft = left.pop(bounds_s.index(bound))
                # one that cannot fit says how much it needs where there is nothing else to say
                if least <= bound and (bound < float("inf") or best or any(f.is_slow for f in failures)):
                    failures.append(Failure(is_slow=True))
                    continue
                found = self._plan(candidate, self.layouts.option(draft), least, fits=bound < float("inf"))
                if isinstance(found, Failure):
                    failures.append(found)
                elif best is None or found.prediction.step_time_s < best.prediction.step_time_s:
                    best = found
        except InfeasibleError as error:
            return self._remember(Misfit(candidate=candidate, reason=str(error)))
        cut_short = any(failure.is_slow for failure in failures)
        if best is not None:
            # of what takes longer, cuts were given up that may be quicker
            return best if best.prediction.step_time_s >= at_most_s else self._remember(best)
        if cut_short:
            return Misfit(candidate=candidate, reason=SLOW)
        on_device = [failure.needs_bytes for failure in failures if not failure.host_bytes]
        if not on_device:
            return self._remember(Misfit(candidate=candidate, reason=self._host_reason(failures)))
        least_bytes = min(on_device)
        reason = f"memory: needs {needs_text(self.model, least_bytes)}"
        return self._remember(Misfit(candidate=candidate, reason=reason, needs_bytes=least_bytes))

    def _host_reason(self, failures: Sequence[Failure]) -> str:
        least, has = min(failure.host_bytes for failure in failures), self.model.host.memory_bytes or 0
        return f"memory of the host: needs {readable(least)} of {readable(has)} a device"

    def hopeless(self, candidate: Candidate) -> Misfit | None:
        """Why no layout of a candidate can fit, found without solving any: ``cp`` and ``tp`` divide what one rank has at best."""
        if self.placed.has(candidate):
            return None  # what one rank has too much, a larger one may take
        option = self.context.unsplit(candidate)
        blocks = self.cuts.blocks(option, self.context.step(candidate, option), self.model, moves=candidate.moves)
        device = self.model.device
        least = self.cuts.least_bytes(blocks, candidate) / (candidate.mesh.cp * candidate.mesh.tp)
        needs = round(least * (1 + device.fragmentation)) + device.reserved_bytes
        if needs <= self.model.fitting_bytes:
            return None
        reason = f"memory: needs at least {needs_text(self.model, needs)}"
        return Misfit(candidate=candidate, reason=reason, needs_bytes=needs)

    def _remember(self, found: Evaluation | Misfit) -> Evaluation | Misfit:
        self._done[found.candidate] = found
        return found

    def _plan(
        self, candidate: Candidate, option: PricedLayout, at_most_s: float, *, fits: bool
    ) -> Evaluation | Failure:
        """The best plan of one layout, or why there is none; ``fits``: whether it may, by its bound."""
        step = self.context.step(candidate, option)
        if self.placed.has(candidate):
            option = self.placed.option(candidate, option)
            step = self.placed.step(step, option)
        cutters = self.cuts.cutters(candidate, option, step)
        if not fits and not self.context.stages:
            return Failure(needs_bytes=self.cuts.leanest(candidate, option, step, cutters[0]))
        if self._rows[candidate.moves].tries_all(candidate.mesh.pp * candidate.virtual_stages):
            return self._best_of_all(candidate, option, step, cutters, at_most_s)
        few = self._best_of_few(candidate, option, step, at_most_s)
        if few is not None:
            at_most_s = min(at_most_s, few.prediction.step_time_s)
        best, failures = self._quickest(candidate, option, step, cutters, at_most_s)
        if best is None or (few is not None and best[0].step_time_s >= few.prediction.step_time_s):
            return few or next((f for f in failures if f.is_slow), failures[0])
        return self.bucketed(candidate, option, best[1].cut, step, best[0])

    def _quickest(
        self, candidate: Candidate, option: PricedLayout, step: Step, cutters: Sequence[StageCutter], at_most_s: float
    ) -> tuple[tuple[Prediction, Fitting] | None, list[Failure]]:
        """Of the cuts of a layout the quickest that fits, and that with other blocks recomputed; and why others do not."""
        model = self.placed.ordered(candidate)
        bound = partial(busy_s, pp=candidate.mesh.pp, num_micro_batches=candidate.num_micro_batches, with_once=True)
        best: tuple[Prediction, Fitting] | None = None
        plans: list[tuple[Sequence[StageCutter], Fitting]] = []
        failures: list[Failure] = []
        late_s = at_most_s

        def predicted(plan: Fitting) -> tuple[Prediction, Fitting]:
            nonlocal late_s
            prediction = model.predict(plan.made, step, memory=plan.memory)
            # what follows has to be quicker still
            late_s = min(late_s, prediction.step_time_s * (1 + ROUNDING))
            return prediction, plan

        for own, fits in self._tries(candidate, option, step, cutters, at_most_s):
            plan = fits(late_s)
            if isinstance(plan, Failure):
                failures.append(plan)
            elif not self.host_fits(plan.memory):
                failures.append(Failure(host_bytes=max(m.host for m in plan.memory)))
            else:
                plans.append((own, plan))
                if bound(plan.cut, own[0], by_rank=own) >= late_s:
                    failures.append(Failure(is_slow=True))
                else:
                    best = _quicker(best, predicted(plan))
        limits = self.placed.limits(candidate)
        for own, plan in plans:
            made: dict[int, tuple[Prediction, Fitting]] = {}
            turns = self._turns(candidate, option, step, own, plan, late_s)
            for least_s, place, cut in sorted(turns, key=itemgetter(0, 1)):
                if least_s < late_s:
                    turned = self.cuts.fitting(candidate, cut, option, step)
                    if all_fit(turned.memory, limits):
                        made[place] = predicted(turned)
            for place in sorted(made):  # of those that take as long the first one, whichever was predicted first
                best = _quicker(best, made[place])
        return best, failures

    def _turns(
        self, candidate: Candidate, option: PricedLayout, step: Step, cutters: Sequence[StageCutter], plan: Fitting,
        late_s: float,
    ) -> list[tuple[float, int, Cut]]:  # fmt: skip
        """The cut of a plan with other blocks of its virtual stages recomputed; none where all take ``late_s`` at least.

        Where a step is long, the few that are done with its first micro-batches first: the same ones whatever ``late_s`` is. Where it
        is short, all of it is simulated for the bounds.

        Returns:
            Bounds in seconds, places and cuts.
        """
        if not self._takes_turns(candidate, plan.cut):
            return []
        model, pp, count = self.placed.ordered(candidate), candidate.mesh.pp, candidate.num_micro_batches
        bound = partial(busy_s, cutter=cutters[0], pp=pp, num_micro_batches=count, by_rank=cutters, with_once=True)
        cuts = self.cuts.by_turns(candidate, plan, option, step, cutters)
        turns = [(bound(cut), place, cut) for place, cut in enumerate(cuts)]
        if all(least_s >= late_s for least_s, _, _ in turns):
            return []
        made = [self.cuts.stages(cut.stops, cut.modes, option, pp) for cut in cuts]
        if count < 2 * BEGUN * pp:
            ends_s = (model.finishes_s(made, step, count) + once_s(plan.cut, cutters)).max(axis=1) * (1 - ROUNDING)
            return [(max(turn[0], end_s), *turn[1:]) for turn, end_s in zip(turns, ends_s.tolist(), strict=True)]
        if len(turns) <= FEW:
            return turns
        begun_s = model.finishes_s(made, step, BEGUN * pp).max(axis=1).tolist()
        return sorted(turns, key=lambda turn: begun_s[turn[1]])[:FEW]

    def _takes_turns(self, candidate: Candidate, cut: Cut) -> bool:
        """Whether other blocks of a cut may be recomputed for a shorter step."""
        is_plain = candidate.virtual_stages == 1 or self.placed.has(candidate) or candidate.moves
        return not is_plain and bool({"selective", "full"} & {*cut.modes})

    def _tries(
        self, candidate: Candidate, option: PricedLayout, step: Step, cutters: Sequence[StageCutter], at_most_s: float
    ) -> Iterator[tuple[Sequence[StageCutter], Callable[[float], Fitting | Failure]]]:
        """What a candidate's stages are cut by, each with what gives the cut of one of :meth:`_ways` up to a time.

        Where ranks differ, cuts are sought by hand. Those of virtual stages say what recomputes; where such a one does not fit,
        those without selective recompute are tried too.
        """
        is_mixed = self.placed.has(candidate)
        if is_mixed and not (self.context.stages or self.space.equal_stages or candidate.moves):
            refit = partial(self.cuts.fitting, candidate, option=option, step=step)
            found = self.placed.in_turns(candidate, option, step, cutters, refit)
            if found is not None:
                yield cutters, partial(self.cuts.lightened, candidate, option, step, cutters, found)
                return
        fits = partial(self.cuts.fits, candidate, option, step)
        for way in self._ways(candidate, option, step, self.placed):
            yield cutters, partial(fits, cutters, at_most_s, way)
        plain = self.placed.plain
        if is_mixed and plain is not None:
            own = self.cuts.cutters(candidate, option, step, tuple(plain.modes))
            for way in self._ways(candidate, option, step, plain):
                yield own, partial(fits, own, at_most_s, way)

    def _ways(
        self, candidate: Candidate, option: PricedLayout, step: Step, placed: Placed
    ) -> list[list[NDArray[np.bool_]] | None]:
        """How its blocks may be told apart by stages; None: as they are quickest."""
        if self.space.equal_stages:
            return [*self._rows[candidate.moves].equal_stages(option, candidate.mesh.pp * candidate.virtual_stages)]
        if self.placed.has(candidate):
            stops = None if self.context.stages else placed.stops_in_turns(candidate, option, step)
            return [None] if stops is None else [exactly(stops, len(self.rows.class_of)), None]
        if candidate.virtual_stages > 1:
            return [
                *self._rows[candidate.moves].even_stages(option, candidate.mesh.pp, candidate.virtual_stages)
            ] or [None]
        return [None]

    def bucketed(
        self, candidate: Candidate, option: PricedLayout, cut: Cut, step: Step, prediction: Prediction
    ) -> Evaluation:
        """A plan with the size of buckets that is quickest and fits; ``prediction``: with the first one.

        Neither layouts nor cuts are chosen by it, and no bound counts what is summed in buckets.
        """
        model, limits = self.placed.ordered(candidate), self.placed.limits(candidate)
        best = Evaluation(
            candidate=candidate,
            option=option,
            stops=cut.stops,
            modes=cut.modes,
            prediction=prediction,
            bucket_bytes=step.bucket_bytes,
        )
        if len(self.context.buckets) == 1:
            return best
        made = self.cuts.stages(cut.stops, cut.modes, option, candidate.mesh.pp)
        if not model.sums_in_buckets(made, step):
            return best
        for size in self.context.buckets:
            other = replace(step, bucket_bytes=size)
            if size == step.bucket_bytes or model.breakdown(made, other).total_s >= best.prediction.step_time_s:
                continue
            memory = model.memory(made, other)
            if all_fit(memory, limits):
                best = replace(best, prediction=model.predict(made, other, memory=memory), bucket_bytes=size)
        return best

    def _fitting(
        self, candidate: Candidate, option: PricedLayout, cut: Cut, step: Step, room: Sequence[int]
    ) -> tuple[Step, Fitting]:
        """A cut with the first size of buckets with which it fits; as the step has it where it fits with none."""
        usual = self.cuts.fitting(candidate, cut, option, step)
        if not all_fit(usual.memory, room) and self.model.sums_in_buckets(usual.made, step):
            for size in self.context.buckets[1:]:
                other = replace(step, bucket_bytes=size)
                found = self.cuts.fitting(candidate, cut, option, other)
                if all_fit(found.memory, room):
                    return other, found
        return step, usual

    def _best_of_all(
        self, candidate: Candidate, option: PricedLayout, step: Step, cutters: Sequence[StageCutter], at_most_s: float
    ) -> Evaluation | Failure:
        """Every cut with every choice of recompute, by their bounds."""
        pp, model, room = candidate.mesh.pp, self.placed.ordered(candidate), self.placed.limits(candidate)
        bound = partial(busy_s, cutter=cutters[0], pp=pp, num_micro_batches=candidate.num_micro_batches,
                        by_rank=cutters, with_once=True)  # fmt: skip
        every = [
            (bound(cut), cut)
            for cut in every_cut(cutters[0].blocks, pp * candidate.virtual_stages, self.context.stages)
        ]
        if not every:
            raise InfeasibleError(
                "the stages that are pinned can be cut", value=f"{pp * candidate.virtual_stages} stages"
            )
        best: Evaluation | None = None
        needs, host, is_slow = [], 0, False
        for least_s, cut in sorted(every, key=lambda pair: pair[0]):
            if least_s * (1 - ROUNDING) >= (best.prediction.step_time_s if best else at_most_s):
                is_slow = True
                break
            own, found = self._fitting(candidate, option, cut, step, room)
            if not self.host_fits(found.memory):
                host = max(host, *(memory.host for memory in found.memory))
                continue
            needs.append(max(memory.total for memory in found.memory))
            if not all_fit(found.memory, room):
                continue
            prediction = model.predict(found.made, own, memory=found.memory)
            plan = self.bucketed(candidate, option, cut, own, prediction)
            if best is None or plan.prediction.step_time_s < best.prediction.step_time_s:
                best = plan
        if best is None and host and not needs and not is_slow:
            return Failure(host_bytes=host)
        return best or Failure(needs_bytes=min(needs, default=0), is_slow=is_slow)

    def _best_of_few(
        self, candidate: Candidate, option: PricedLayout, step: Step, at_most_s: float
    ) -> Evaluation | None:
        """Where ranks differ and all cuts without selective recompute are few, the best of these."""
        plain, stages = self.placed.plain, candidate.mesh.pp * candidate.virtual_stages
        if plain is None or not self.placed.has(candidate) or not self.rows.tries_all(stages, without="selective"):
            return None
        cutters = self.cuts.cutters(candidate, option, step, tuple(plain.modes))
        found = self._best_of_all(candidate, option, step, cutters, at_most_s)
        return found if isinstance(found, Evaluation) else None

    def host_fits(self, memory: Sequence[Memory]) -> bool:
        limit = self.model.host.memory_bytes if any(m.host for m in memory) else None
        return limit is None or all(m.host <= limit for m in memory)


def _quicker(best: tuple[Prediction, Fitting] | None, other: tuple[Prediction, Fitting]) -> tuple[Prediction, Fitting]:
    return other if best is None or other[0].step_time_s < best[0].step_time_s else best


def all_fit(memory: Sequence[Memory], limits: Sequence[int]) -> bool:
    """Whether each rank has room for what it needs."""
    return all(m.total <= limit for m, limit in zip(memory, limits, strict=True))


def needs_text(model: CostModel, predicted_bytes: int) -> str:
    """The upper end of a predicted peak, which has to fit, and what there is."""
    return f"{readable(predicted_bytes * model.memory_spread)} of {memory_of_devices(model)}"


def memory_of_devices(model: CostModel) -> str:
    """What a device has, for people; from the smallest to the largest where they differ."""
    sizes = {device.memory_bytes for device in model.devices}
    return " to ".join(readable(size) for size in sorted({min(sizes), max(sizes)}))

"""The best plan of a search with its stages cut better still: blocks move between stages where that shortens the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from autopar.cost.model import StageCost
from autopar.planner.bounds.mixed_chains import adds_s
from autopar.planner.evaluate.evaluator import Evaluation, PipelineEvaluator, all_fit
from autopar.planner.stages.fit_cut import Failure
from autopar.planner.stages.fitting import Fitting
from autopar.planner.stages.mixed_polish import polished
from autopar.planner.stages.uneven import exactly, is_even, moved


def polished_plan(evaluator: PipelineEvaluator, found: Evaluation) -> Evaluation:
    """A plan whose stages are cut better still; the same one where its stages are given."""
    candidate, context, placed = found.candidate, evaluator.context, evaluator.placed
    if context.stages or context.moved or context.space.equal_stages:
        return found
    if not placed.has(candidate):
        return _moved(evaluator, found)
    option, model = found.option, placed.ordered(candidate)
    step, limits = placed.step(context.step(candidate, option), option), placed.limits(candidate)
    step = replace(step, bucket_bytes=found.bucket_bytes)

    def made(stops: Sequence[int]) -> list[StageCost]:
        return evaluator.cuts.stages(stops, found.modes, option, candidate.mesh.pp)

    def priced(stops: Sequence[int]) -> float:
        stages = made(stops)
        time_s = model.breakdown(stages, step).total_s
        if time_s >= found.prediction.step_time_s:
            return time_s
        memory = model.memory(stages, step)
        return time_s if all_fit(memory, limits) else float("inf")

    row = evaluator.placed.exact(candidate, option, step)

    def adding(sizes: Sequence[int]) -> list[float]:
        stops = tuple(accumulate(sizes))
        own = [found.modes[i:j] for i, j in zip((0, *stops), stops, strict=False)]
        full = [modes.count("full") for modes in own]
        some = [modes.count("selective") + count for modes, count in zip(own, full, strict=True)]
        return adds_s(row, sizes, some, full)

    sizes = [stop - start for start, stop in zip((0, *found.stops), found.stops, strict=False)]
    stops = polished(sizes, found.prediction.step_time_s, priced, adding)
    if stops == found.stops:
        return found
    return replace(found, stops=stops, prediction=model.predict(made(stops), step))


def _moved(evaluator: PipelineEvaluator, found: Evaluation) -> Evaluation:
    """A plan whose virtual stages have their blocks where the step is shorter, if they are not equal."""
    candidate, option = found.candidate, found.option
    counted = [k in evaluator.rows.largest(option) for k in evaluator.rows.class_of]
    if candidate.virtual_stages == 1 or is_even(found.stops, counted):
        return found
    model, step = evaluator.placed.ordered(candidate), evaluator.context.step(candidate, option)
    cutters = evaluator.cuts.cutters(candidate, option, step)
    tried: dict[tuple[int, ...], Fitting] = {}

    def priced(stops: tuple[int, ...]) -> float:
        way = exactly(stops, len(counted))
        plan = evaluator.cuts.fits(candidate, option, step, cutters, math.inf, way, math.inf)
        if isinstance(plan, Failure):
            return math.inf
        tried[stops] = plan
        return model.breakdown(plan.made, step).total_s

    def weights(stops: tuple[int, ...]) -> list[float]:
        (chain, *_) = model.longest_chains(tried[stops].made, step)
        return [float(weight) for weight in chain.forwards + 2.0 * chain.backwards]

    time_s = priced(found.stops)
    if time_s == math.inf:
        return found
    plan = tried[moved(found.stops, time_s, priced, weights)]
    prediction = model.predict(plan.made, step, memory=plan.memory)
    if prediction.step_time_s >= found.prediction.step_time_s or not evaluator.host_fits(plan.memory):
        return found
    return evaluator.bucketed(candidate, option, plan.cut, step, prediction)

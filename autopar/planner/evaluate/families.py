"""The kinds of candidates side by side: pipelines, and data ranks with unequal shares, each with an evaluator of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from autopar.cost.model import CostModel
from autopar.graph.ir import Graph
from autopar.planner.bounds.cascade import LEVELS, Cascade
from autopar.planner.bounds.chain_program import ChainProof
from autopar.planner.context import SearchContext
from autopar.planner.evaluate.evaluation import Evaluation, Misfit
from autopar.planner.evaluate.evaluator import PipelineEvaluator
from autopar.planner.evaluate.layout_plans import LayoutPlans
from autopar.planner.evaluate.unequal_shares import SharesEvaluator
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.planner.stages.block_options import BlockOptions, Placed


class Family(Protocol):
    """What the evaluator of one kind of candidates has."""

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """The best plan of a candidate: the same one whatever ``at_most_s`` is, as far as it is faster; or why there is none."""


class Evaluator:
    """Bounds and evaluates all candidates of a search.

    Args:
        context: of the search.
    """

    def __init__(self, context: SearchContext) -> None:
        self.context, self.model, self.layouts = context, context.model, context.layouts
        placed = Placed(context.layouts, context.model)
        self.cascade = Cascade(context)
        maker = self.cascade.maker
        options = BlockOptions(
            maker.floors, space_modes=context.modes, recompute=context.recompute, moved=context.moved
        )
        self.plans = LayoutPlans(context, options, placed, maker.blocks_of)
        self.pipelines = PipelineEvaluator(context, self.cascade, self.plans)
        self.shares = SharesEvaluator(context, placed, options)

    @classmethod
    def of(cls, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> Evaluator:
        """The evaluator of a model, cluster, batch and space."""
        return cls(SearchContext.of(graph, model, global_batch_size=global_batch_size, pins=pins, space=space))

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """For each candidate seconds below which it has no plan; see :class:`autopar.planner.bounds.cascade.Cascade`."""
        pipelines = iter(self.cascade.bounds_s(level, [c for c in candidates if not c.shares], goal_s))
        shares = iter(self.shares.bounds_s(level, [c for c in candidates if c.shares], goal_s))
        return [next(shares if c.shares else pipelines) for c in candidates]

    def closest_s(
        self, candidate: Candidate, goal_s: float, known: Sequence[ChainProof] = (), *, whole_s: float | None = 0.0
    ) -> tuple[float, tuple[ChainProof, ...]]:
        """The tightest bound of a candidate, up to ``goal_s``; see :class:`autopar.planner.bounds.cascade.Cascade`."""
        if candidate.shares:
            return min(self.shares.bounds_s(LEVELS - 1, [candidate])[0], goal_s), ()
        return self.cascade.closest_s(candidate, goal_s, known, whole_s=whole_s)

    def chained_s(self, candidate: Candidate, goal_s: float, *, whole_s: float | None = None) -> float:
        """Of a pipeline whose ranks differ; see :class:`PipelineEvaluator`."""
        return 0.0 if candidate.shares else self.pipelines.chained_s(candidate, goal_s, whole_s=whole_s)

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """The best plan of a candidate; see :class:`Family`."""
        family: Family = self.shares if candidate.shares else self.pipelines
        return family.evaluate(candidate, at_most_s=at_most_s)

    def hopeless(self, candidate: Candidate) -> Misfit | None:
        """Why no layout of a candidate can fit, found without solving any; None where that is not known."""
        return None if candidate.shares else self.pipelines.hopeless(candidate)

    def improved(self, found: Evaluation) -> Evaluation:
        """A plan with its stages cut better still; the same one where they are given, or data ranks take unequal shares."""
        return found if found.candidate.shares else self.plans.improved(found)

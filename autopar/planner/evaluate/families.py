"""The kinds of candidates side by side: pipelines, and data ranks with unequal shares, each with an evaluator of its own."""

from __future__ import annotations

import math
from functools import partial
from collections.abc import Sequence
from typing import Protocol

from autopar.cost.model import CostModel
from autopar.graph.ir import Graph
from autopar.planner.bounds.rows import RowMaker
from autopar.planner.bounds.chain_program import ChainProof
from autopar.planner.bounds.cascade import LEVELS, Cascade
from autopar.planner.context import SearchContext
from autopar.planner.evaluate.evaluator import Evaluation, Misfit, PipelineEvaluator
from autopar.planner.evaluate.polish import polished_plan
from autopar.planner.evaluate.unequal_shares import SharesEvaluator
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.planner.stages.fit_cut import Cuts
from autopar.planner.stages.per_device import Placed


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
        placed = Placed(
            context.layouts, context.model, modes=context.modes, pinned=context.recompute,
            is_even=context.space.equal_stages,
        )  # fmt: skip
        self.cascade = Cascade(context)
        rows = partial(
            RowMaker, context.layouts.compact, context.model, pinned=context.recompute,
            limit_bytes=context.model.fitting_bytes, is_pinned=bool(context.stages),
            every=0 if context.space.equal_stages else context.space.every,
        )  # fmt: skip
        plain = tuple(mode for mode in context.modes if mode != "selective") or context.modes
        every, moving = rows(modes=context.modes, moved=context.moved), rows(modes=plain)
        moving.moves = True
        cuts = Cuts(
            every, placed, space_modes=context.modes, recompute=context.recompute, pinned=context.stages,
            moved=context.moved, buckets=context.buckets,
        )  # fmt: skip
        self.pipelines = PipelineEvaluator(context, self.cascade, cuts, placed, (every, moving))
        self.shares = SharesEvaluator(context, placed, cuts)

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
        self, candidate: Candidate, goal_s: float, known: Sequence[ChainProof] = ()
    ) -> tuple[float, tuple[ChainProof, ...]]:
        """The tightest bound of a candidate, up to ``goal_s``; see :class:`autopar.planner.bounds.cascade.Cascade`."""
        if candidate.shares:
            return min(self.shares.bounds_s(LEVELS - 1, [candidate])[0], goal_s), ()
        return self.cascade.closest_s(candidate, goal_s, known)

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """The best plan of a candidate: the same one whatever ``at_most_s`` is, as far as it is faster; or why there is none."""


class Evaluator:
    """Bounds and evaluates all candidates of a search.

    Args:
        context: of the search.
    """

    def __init__(self, context: SearchContext) -> None:
        self.context, self.model, self.layouts = context, context.model, context.layouts
        placed = Placed(
            context.layouts, context.model, modes=context.modes, pinned=context.recompute,
            is_even=context.space.equal_stages,
        )  # fmt: skip
        self.cascade = Cascade(context)
        rows = partial(
            RowMaker, context.layouts.compact, context.model, pinned=context.recompute,
            limit_bytes=context.model.fitting_bytes, is_pinned=bool(context.stages),
            every=0 if context.space.equal_stages else context.space.every,
        )  # fmt: skip
        plain = tuple(mode for mode in context.modes if mode != "selective") or context.modes
        every, moving = rows(modes=context.modes, moved=context.moved), rows(modes=plain)
        moving.moves = True
        cuts = Cuts(
            every, placed, space_modes=context.modes, recompute=context.recompute, pinned=context.stages,
            moved=context.moved, buckets=context.buckets,
        )  # fmt: skip
        self.pipelines = PipelineEvaluator(context, self.cascade, cuts, placed, (every, moving))
        self.shares = SharesEvaluator(context, placed, cuts)

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
        self, candidate: Candidate, goal_s: float, known: Sequence[ChainProof] = ()
    ) -> tuple[float, tuple[ChainProof, ...]]:
        """The tightest bound of a candidate, up to ``goal_s``; see :class:`autopar.planner.bounds.cascade.Cascade`."""
        if candidate.shares:
            return min(self.shares.bounds_s(LEVELS - 1, [candidate])[0], goal_s), ()
        return self.cascade.closest_s(candidate, goal_s, known)

    def _gone(self) -> None:
        return (
            self.shares.bounds_s(last, [candidate])[0]
            if candidate.shares
            else self.cascade.closest_s(candidate, goal_s)
        )

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """The best plan of a candidate; see :class:`Family`."""
        family: Family = self.shares if candidate.shares else self.pipelines
        return family.evaluate(candidate, at_most_s=at_most_s)

    def hopeless(self, candidate: Candidate) -> Misfit | None:
        """Why no layout of a candidate can fit, found without solving any; None where that is not known."""
        return None if candidate.shares else self.pipelines.hopeless(candidate)

    def polished(self, found: Evaluation) -> Evaluation:
        """A plan with its stages cut better still."""
        return found if found.candidate.shares else polished_plan(self.pipelines, found)

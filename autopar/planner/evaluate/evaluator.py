"""Evaluates one candidate over its layouts, and bounds candidates.

Candidates are of two kinds: pipelines, and data ranks with unequal shares, which have an evaluator of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph
from autopar.planner.bounds.cascade import LEVELS, Cascade
from autopar.planner.bounds.chain_program import KEPT
from autopar.planner.bounds.chain_proof import ChainProof, Key, key_of
from autopar.planner.evaluate.layout_plans import LayoutPlans, SharesEvaluator
from autopar.planner.layouts.layout import TypedLayout
from autopar.planner.search import SLOW, Evaluation, Misfit, SearchContext, needs_text
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.planner.stages.block_options import BlockOptions
from autopar.planner.stages.cut_problem import Failure
from autopar.util.formatting import num_bytes

QUICK = 4
"""The limit on chain programs before evaluations where ranks are equal; only the first candidate of a schedule solves any."""


class Evaluator:
    """Bounds and evaluates all candidates of a search.

    Args:
        context: the context of the search.
    """

    def __init__(self, context: SearchContext) -> None:
        self.context, self.model, self.layouts = context, context.model, context.layouts
        self.cascade = Cascade(context)
        maker = self.cascade.maker
        options = BlockOptions(context, maker.floors)
        self.plans = LayoutPlans(context, options, maker)
        self.shares = SharesEvaluator(context, options, maker)
        self._done: dict[Candidate, Evaluation | Misfit] = {}
        self._proofs: dict[Key, list[ChainProof]] = {}

    @classmethod
    def of(cls, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> Evaluator:
        """Return the evaluator of a model, cluster, batch and space."""
        return cls(SearchContext.of(graph, model, global_batch_size=global_batch_size, pins=pins, space=space))

    # --- bounds

    def bounds_s(self, level: int, candidates: Sequence[Candidate], goal_s: float = math.inf) -> list[float]:
        """Return a lower bound of each candidate's step time in seconds; see :class:`autopar.planner.bounds.cascade.Cascade`."""
        pipelines = iter(self.cascade.bounds_s(level, [c for c in candidates if not c.shares], goal_s))
        return [self.shares.bound_s(level, c) if c.shares else next(pipelines) for c in candidates]

    def closest_s(
        self, candidate: Candidate, goal_s: float, known: Sequence[ChainProof] = (), *, whole_s: float = 0.0
    ) -> tuple[float, tuple[ChainProof, ...]]:
        """Return the tightest bound of a candidate, up to ``goal_s``; see :class:`autopar.planner.bounds.cascade.Cascade`."""
        if candidate.shares:
            return min(self.shares.bound_s(LEVELS - 1, candidate), goal_s), ()
        return self.cascade.closest_s(candidate, goal_s, known, whole_s=whole_s)

    def chained_s(self, candidate: Candidate, goal_s: float, *, layouts: Sequence[TypedLayout] | None = None) -> float:
        """Return the bound that the chains of its schedule give for a pipeline, up to ``goal_s``; 0 where it is not worth computing.

        Where ranks differ this bound is far tighter than the others. Where they are equal it is tighter only if blocks are of several
        groups, as those of an encoder and a decoder, whose order no other bound uses, or if stages are pinned. Few programs suffice then.

        The known proofs of a schedule depend on the order of earlier calls. So this bound is no part of the certificate, and decides no
        order. The arguments are those of :meth:`autopar.planner.bounds.cascade.Cascade.closest_s`.
        """
        is_tighter = self.model.is_mixed or self.cascade.maker.has_several_groups or self.context.stages
        if candidate.mesh.pp == 1 or not is_tighter:
            return 0.0
        known = self._proofs.setdefault(key_of(candidate), [])
        rounds = None if self.model.is_mixed else 0 if known else QUICK
        bound_s, proofs = self.cascade.closest_s(candidate, goal_s, known, whole_s=None, layouts=layouts, rounds=rounds)
        known += proofs
        del known[: len(known) - KEPT]
        return bound_s

    # --- plans

    def evaluate(self, candidate: Candidate, *, at_most_s: float = math.inf) -> Evaluation | Misfit:
        """Return the best plan of a candidate, or why there is none.

        Args:
            at_most_s: plans that cannot be faster are left unfinished, and such a result is not cached. The best plan does not depend on
                this time as long as it is faster.
        """
        if candidate in self._done:
            return self._done[candidate]
        if candidate.shares:
            if self.shares.bound_s(1, candidate) >= at_most_s:
                return Misfit(candidate=candidate, reason=SLOW)
            return self._remember(self.shares.evaluate(candidate))
        best: Evaluation | None = None
        failures: list[Failure] = []
        try:
            remaining = [*self.context.typed_layouts(candidate)]
            while remaining:
                least = min(at_most_s, best.time_s if best else at_most_s)
                bounds_s = self.cascade.layout_bounds_s(candidate, remaining, least)
                bound = min(bounds_s)
                typed = remaining.pop(bounds_s.index(bound))
                # A layout that cannot fit is evaluated only if nothing else explains the failure: it says how many bytes it needs.
                is_slow = least <= bound and (bound < math.inf or best or any(f.is_slow for f in failures))
                if is_slow or (math.isfinite(least) and self.chained_s(candidate, least, layouts=[typed]) >= least):
                    failures.append(Failure(is_slow=True))
                    continue
                layout = self.layouts.price(typed)
                plan = self.plans.best(candidate, layout, least, may_fit=bound < math.inf)
                if isinstance(plan, Failure):
                    failures.append(plan)
                elif best is None or plan.time_s < best.time_s:
                    best = plan
        except InfeasibleError as error:
            return self._remember(Misfit(candidate=candidate, reason=str(error)))
        cut_short = any(failure.is_slow for failure in failures)
        if best is not None:
            # cuts that were given up at ``at_most_s`` may be faster than a plan that takes longer
            return best if best.time_s >= at_most_s else self._remember(best)
        if cut_short:
            return Misfit(candidate=candidate, reason=SLOW)
        on_device = [failure.needs_bytes for failure in failures if not failure.host_bytes]
        if not on_device:
            least, has = min(failure.host_bytes for failure in failures), self.model.host.memory_bytes or 0
            reason = f"memory of the host: needs {num_bytes(least)} of {num_bytes(has)} a device"
            return self._remember(Misfit(candidate=candidate, reason=reason))
        least_bytes = min(on_device)
        reason = f"memory: needs {needs_text(self.model, least_bytes)}"
        return self._remember(Misfit(candidate=candidate, reason=reason, needs_bytes=least_bytes))

    def improved(self, plan: Evaluation) -> Evaluation:
        """Return a plan with better cut stages; the same plan where stages are given or data ranks take unequal shares."""
        return plan if plan.candidate.shares else self.plans.improved(plan)

    def _remember(self, result: Evaluation | Misfit) -> Evaluation | Misfit:
        self._done[result.candidate] = result
        return result

"""One candidate evaluated: its layouts, and the best plan in any of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.cost.model import CostModel
from autopar.errors import InfeasibleError
from autopar.graph.ir import Graph
from autopar.planner.bounds.bounding import load_of
from autopar.planner.bounds.closer import Closer
from autopar.planner.evaluate.evaluation import SLOW, Evaluation, Misfit
from autopar.planner.evaluate.layout_plans import LayoutPlans
from autopar.planner.layouts.types import TypedLayout, layout_key_of
from autopar.planner.model_stats import readable
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import Space
from autopar.planner.stages.cut_problem import Failure
from autopar.weak import weakly


class Evaluator(Closer):
    """Evaluates candidates for one model, cluster and batch."""

    def __init__(self, graph: Graph, model: CostModel, *, global_batch_size: int, pins: Pins, space: Space) -> None:
        super().__init__(graph, model, global_batch_size=global_batch_size, pins=pins, space=space)
        self.plans = LayoutPlans(
            self.blocks, self.placed, weakly(self.step), weakly(self.rows_of),
            pinned=self.stages, equal_stages=space.equal_stages, buckets=self.buckets,
        )  # fmt: skip
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
            left = [*self.layouts.drafts(layout_key_of(candidate.micro_batch_size, candidate.mesh), load_of(candidate))]
            while left:
                least = min(at_most_s, best.time_s if best else at_most_s)
                draft = self._next(candidate, left, least, is_first=not (best or failures))
                left.remove(draft)
                bound = self._closest_s(candidate, draft, least)
                # one that cannot fit says how much it needs where there is nothing else to say
                if least <= bound and (bound < float("inf") or best or any(f.is_slow for f in failures)):
                    failures.append(Failure(is_slow=True))
                    continue
                option = self.layouts.option(draft)
                found = self.plans.best(candidate, option, least, may_fit=bound < math.inf)
                if isinstance(found, Failure):
                    failures.append(found)
                elif best is None or found.time_s < best.time_s:
                    best = found
        except InfeasibleError as error:
            return self._remember(Misfit(candidate=candidate, reason=str(error)))
        cut_short = any(failure.is_slow for failure in failures)
        if best is not None:
            # of what takes longer, cuts were given up that may be quicker
            return best if best.time_s >= at_most_s else self._remember(best)
        if cut_short:
            return Misfit(candidate=candidate, reason=SLOW)
        on_device = [failure.needs_bytes for failure in failures if not failure.host_bytes]
        if not on_device:
            return self._remember(Misfit(candidate=candidate, reason=self._host_reason(failures)))
        least_bytes = min(on_device)
        reason = f"memory: needs {self._needs(least_bytes)}"
        return self._remember(Misfit(candidate=candidate, reason=reason, needs_bytes=least_bytes))

    def _next(
        self, candidate: Candidate, left: Sequence[TypedLayout], at_most_s: float, *, is_first: bool
    ) -> TypedLayout:
        """Of layouts the one of the least bound, which is priced if it may take less than ``at_most_s``.

        The first one alone, and then all that by their first bounds may take less than the plans that there are.
        """
        pairs = [(candidate, draft) for draft in left]
        asked = self._open(pairs, at_most_s)
        if is_first and len(asked) == len(left) and not self.placed.has(candidate):
            asked = [min(asked, key=lambda pair: self._bounds[candidate, id(pair[1])][0])]
        self._price(asked, at_most_s)
        return min(left, key=lambda draft: self._bounds[candidate, id(draft)][0])

    def _host_reason(self, failures: Sequence[Failure]) -> str:
        least, has = min(failure.host_bytes for failure in failures), self.model.host.memory_bytes or 0
        return f"memory of the host: needs {readable(least)} of {readable(has)} a device"

    def _needs(self, predicted_bytes: int) -> str:
        """The upper end of a predicted peak, which has to fit, and what there is."""
        return f"{readable(predicted_bytes * self.model.memory_spread)} of {memory_of_devices(self.model)}"

    def hopeless(self, candidate: Candidate) -> Misfit | None:
        """Why no layout of a candidate can fit, found without solving any: ``cp`` and ``tp`` divide what one rank has at best."""
        if self.placed.has(candidate):
            return None  # what one rank has too much, a larger one may take
        option = self.layouts.whole(candidate.micro_batch_size, candidate.mesh.ep_data)
        device = self.model.device
        least = self.blocks.least_bytes(candidate, option, self.step(candidate, option))
        least /= candidate.mesh.cp * candidate.mesh.tp
        needs = round(least * (1 + device.fragmentation)) + device.reserved_bytes
        if needs <= self.limit_bytes:
            return None
        reason = f"memory: needs at least {self._needs(needs)}"
        return Misfit(candidate=candidate, reason=reason, needs_bytes=needs)

    def _remember(self, found: Evaluation | Misfit) -> Evaluation | Misfit:
        self._done[found.candidate] = found
        return found

    def improved(self, found: Evaluation) -> Evaluation:
        """A plan whose stages are cut better still; the same one where its stages are given, or its data ranks take unequal shares."""
        return found if found.candidate.shares else self.plans.improved(found)


def memory_of_devices(model: CostModel) -> str:
    """What a device has, for people; from the smallest to the largest where they differ."""
    sizes = {device.memory_bytes for device in model.devices}
    return " to ".join(readable(size) for size in sorted({min(sizes), max(sizes)}))

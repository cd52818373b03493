"""From a graph to a plan: the pieces of the search put together, and an account of why it chose as it did."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from math import nextafter
from typing import TypeVar

from autopar.cost.model import CostModel
from autopar.cost.step.data_parallel import is_mixed
from autopar.errors import AutoparError, InfeasibleError, UsageError
from autopar.graph.ir import Graph
from autopar.plan import Plan
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.branch_and_bound import OuterSearch, on_device
from autopar.planner.branch_and_bound.collection import seldom_collected
from autopar.planner.branch_and_bound.ledger import Ledger
from autopar.planner.branch_and_bound.process_group import Crew, LostProcessError
from autopar.planner.branch_and_bound.rounds import Sampled
from autopar.planner.branch_and_bound.rules_of_thumb import seeds
from autopar.planner.evaluate.evaluator import Evaluation, Misfit, memory_of_devices
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.explain.alternatives import explain
from autopar.planner.explain.plan_writer import notes_of, plan_of, record_of
from autopar.planner.model_stats import readable
from autopar.planner.outcome import Limits, Outcome, Progress, peak_bytes
from autopar.planner.sharding.batch_axis import mixes_samples
from autopar.planner.sharding.sequence_axis import attention_heads, attention_sequences, has_written_attention
from autopar.planner.space.candidates import Candidate, Problem, candidates, conflict, remedies
from autopar.planner.space.data_shares import against, equally_shared, shared
from autopar.planner.space.host_offload import offloaded
from autopar.planner.space.pins import ChoicePin, NumberPin, ParameterPin, Pin, Pins, StagePin
from autopar.planner.space.preferences import usual
from autopar.planner.space.rank_orders import in_orders
from autopar.planner.studies.workers import Sharing, helpers
from autopar.planner.task import Task
from autopar.rules.missing import complete
from autopar.rules.spread import expert_counts

__all__ = ["Planner", "Task"]

Found = TypeVar("Found")

MAX_CONFLICT_TRIALS = 24
"""Candidates tried, leanest first, before a set of pins counts as too large for the memory."""


class Planner:
    """Plans for one task.

    Args:
        explains: False leaves out why there is no plan: without candidates there is then an empty pool, no error.

    Raises:
        UsageError: pins that name nothing of the model; a global batch below one.
        RuleError: an operator mixes samples.
    """

    @seldom_collected()
    def __init__(self, task: Task, *, explains: bool = True) -> None:
        pins = Pins.parse(dict.fromkeys((*task.graph.pins, *task.pins.texts)))
        task = replace(task, pins=pins, opaque=tuple(dict.fromkeys((*task.opaque, *pins.opaque))))
        self.task, self.start = task, time.monotonic()
        if not isinstance(task.global_batch_size, int) or task.global_batch_size < 1:
            raise UsageError(
                "the global batch is a whole number of samples, at least one", value=task.global_batch_size
            )
        if task.graph.exact and task.global_batch_size != task.graph.batch_size:
            raise UsageError(
                "a graph in which samples are counted or meet is for one global batch size",
                value=f"{task.global_batch_size}, traced at {task.graph.batch_size}",
                place=task.graph.mixing or task.graph.name,
                remedy="trace the model at this global batch, or give the model instead of its graph",
            )
        task.pins.check(task.graph)
        if not task.pins.allows("precision", task.precision.name):
            raise InfeasibleError(
                "pins and options agree",
                value=f"precision {task.precision.name} and {', '.join(_texts_on(task.pins, 'precision'))}",
                remedy="change one of them",
            )
        self.found = complete(task.graph, cache_dir=task.cache_dir)
        self.model = CostModel(task.cluster, task.precision, task.optimizer)
        self.evaluator = self._evaluator(task.pins, task.global_batch_size)
        layouts = self.evaluator.layouts
        same = layouts.compact.graph  # equal blocks have equal attention
        self.mixing = mixes_samples(same, layouts.batch)
        self.problem = Problem(
            world_size=task.cluster.world_size,
            devices_per_node=task.cluster.devices_per_node,
            global_batch_size=task.global_batch_size,
            num_blocks=len(task.graph.blocks),
            heads=attention_heads(same),
            key_heads=attention_heads(same, operand=1),
            sequences=attention_sequences(same),
            has_written_attention=has_written_attention(same),
            space=task.space,
            mixes_samples=bool(self.mixing),
            experts=expert_counts(task.graph),
            casts=is_mixed(task.precision),
            num_layers=_num_layers(task.graph),
        )
        self.pool = self._candidates(self.problem, task.pins)
        if not self.pool and explains:
            raise self._structural()

    def _candidates(self, problem: Problem, pins: Pins) -> list[Candidate]:
        task = self.task
        pool = in_orders(candidates(problem, pins), task.cluster, pins)
        equal = offloaded(equally_shared(pool, pins), task.cluster, pins, task.space.offload, task.optimizer)
        where = self.mixing[0].name if self.mixing else ""
        return [*equal, *shared(problem, pins, task.cluster, self.evaluator.shares.seconds, mixing=where)]

    def _evaluator(self, pins: Pins, global_batch_size: int) -> Evaluator:
        task = self.task
        return Evaluator.of(task.graph, self.model, global_batch_size=global_batch_size, pins=pins, space=task.space)

    # --- verbs

    @seldom_collected()
    def search(
        self,
        *,
        limits: Limits,
        sharing: Sharing | None = None,
        progress: Progress | None = None,
        processes: int = 1,
    ) -> Plan:
        """The fastest plan that fits.

        Args:
            sharing: with other processes or earlier searches; None: neither.
            processes: of this search where it does not share, this one included.

        Raises:
            InfeasibleError: there is none; names the smallest set of constraints that conflict.
            UsageError: the storage cannot be opened, or its study is of something else.
            KeyboardInterrupt: before any plan was found; later it ends the search with the best so far.
        """
        return self._together(processes if sharing is None else 1, partial(self._search, limits, sharing, progress))

    def _together(self, processes: int, search: Callable[[Crew], Found]) -> Found:
        """A search by several processes; by one where another is lost."""
        try:
            with Crew(processes) as crew:
                return search(crew)
        except LostProcessError as error:
            logging.getLogger("autopar").warning(
                "a process of the search ended early, one alone searches again: %s", error
            )
            return search(Crew())

    def _search(self, limits: Limits, sharing: Sharing | None, progress: Progress | None, crew: Crew) -> Plan:
        outcome = self._outcome(limits, sharing=sharing, progress=progress, crew=crew)
        if outcome.best is None:
            if outcome.finished and limits.max_step_time_s is not None:
                raise self._too_slow(outcome, limits.max_step_time_s)
            if not outcome.finished:
                raise InfeasibleError(
                    "a plan is found within the trials and the time that were given",
                    value=f"none of {outcome.evaluated} of {outcome.candidates} candidates fits",
                    remedy="raise trials or timeout_s",
                )
            raise self._too_large(outcome.misfits)
        return self._best_plan(outcome.best, outcome, crew)

    @seldom_collected()
    def fastest(self, limits: Limits, *, progress: Progress | None = None, processes: int = 1) -> Plan | None:
        """As :meth:`search`, but None instead of a reason where there is no plan."""
        return self._together(processes, partial(self._fastest, limits, progress))

    @property
    def is_sampled(self) -> bool:
        """Whether there are too many candidates to be searched to the end, and a sampler asks for a part of these."""
        return self.task.space.sampler != "none" and len(on_device(self.pool)) > self.task.space.exhaustive

    @seldom_collected()
    def several(self, limits: Limits) -> list[Plan]:
        """Plans of which none is better in time and memory, of those that NSGA-II asks for; the first one is :meth:`fastest`'s.

        Each with the certificate of that one: no plan of the space is faster.
        """
        from autopar.planner.branch_and_bound.several import several  # optuna is slow to import

        outcome, space = self._outcome(limits, sharing=None, progress=None, crew=Crew()), self.task.space
        if outcome.best is None:
            return []
        bounds = dict(enumerate(self.evaluator.bounds_s(0, self.pool)))
        first = seeds(self.pool, self.task.cluster.devices_per_node, lambda i: bounds[i] < float("inf"))
        first = {self.pool.index(outcome.best.candidate): "fastest", **first}
        below_s = float("inf") if limits.max_step_time_s is None else nextafter(limits.max_step_time_s, float("inf"))
        trials = limits.trials or space.trials
        found = several(
            self.evaluator, tuple(self.pool), first, trials=trials, seed=self.task.seed, below_s=below_s
        )  # fmt: skip
        least = peak_bytes(outcome.best.prediction)
        rest = [own for own in found if peak_bytes(own.prediction) < least]
        return [self._best_plan(own, outcome, Crew()) for own in (outcome.best, *rest)]

    def _fastest(self, limits: Limits, progress: Progress | None, crew: Crew) -> Plan | None:
        outcome = self._outcome(limits, sharing=None, progress=progress, crew=crew)
        return None if outcome.best is None else self._best_plan(outcome.best, outcome, crew)

    def _best_plan(self, best: Evaluation, outcome: Outcome, crew: Crew) -> Plan:
        return self._plan(crew.of_first(partial(self.evaluator.polished, best)), outcome, crew)

    @seldom_collected()
    def fits(self) -> bool:
        """Whether some plan fits in memory, however slow: the leanest that may are tried first."""
        bounds = self.evaluator.bounds_s(0, self.pool)
        may = [c for c, bound in zip(self.pool, bounds, strict=True) if bound < float("inf")]
        return any(isinstance(self.evaluator.evaluate(c), Evaluation) for c in sorted(may, key=_leanness))

    def least_time_s(self) -> float:
        """What one device would compute at least, in the micro-batches of the space: n devices take no less than 1/n of it."""
        most = self.task.global_batch_size
        layouts, placed = self.evaluator.layouts, self.evaluator.pipelines.placed
        sizes = [m for m in self.task.space.micro_batches if m <= most]
        return most * min((placed.least_s(layouts.whole(size, 1)) / size for size in sizes), default=0.0)

    def _outcome(self, limits: Limits, *, sharing: Sharing | None, progress: Progress | None, crew: Crew) -> Outcome:
        with ExitStack() as stack:
            ledger = None
            if sharing is not None:
                ledger = stack.enter_context(helpers(self.task, self.pool, sharing, limits))
            return self.outer(limits, ledger=ledger, progress=progress, crew=crew).run()

    def outer(
        self,
        limits: Limits,
        *,
        ledger: Ledger | None = None,
        progress: Progress | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        crew: Crew | None = None,
    ) -> OuterSearch:
        """The search over this planner's candidates."""
        return OuterSearch(
            self.evaluator,
            self.pool,
            exhaustive=self.task.space.exhaustive,
            trials=self.task.space.trials,
            sampling=Sampled(
                kind=self.task.space.sampler, seed=self.task.seed, node=self.task.cluster.devices_per_node
            ),
            limits=limits,
            ledger=ledger,
            progress=progress,
            is_wanted=is_wanted,
            crew=crew,
        )

    @seldom_collected()
    def estimate(self) -> Plan:
        """The plan that the pins describe; what they leave open is as usual (see ``usual``), as far as it fits.

        Raises:
            InfeasibleError: nothing fits.
        """
        misfits: list[Misfit] = []
        for candidate in sorted(self.pool, key=usual):
            found = self.evaluator.evaluate(candidate)
            if isinstance(found, Evaluation):
                bound = self.evaluator.bounds_s(LEVELS - 1, [candidate])[0]
                outcome = Outcome(
                    best=found,
                    candidates=1,
                    evaluated=len(misfits) + 1,
                    lower_bound_s=bound,
                    misfits=tuple(misfits),
                    finished=True,
                )
                return self._plan(found, outcome, Crew())
            misfits.append(found)
        raise self._too_large(misfits)

    def _plan(self, best: Evaluation, outcome: Outcome, crew: Crew) -> Plan:
        reasons = explain(self.evaluator, self.pool, best, crew)
        notes = notes_of(self.task, self.evaluator, best, outcome, self.found, self.mixing)
        record = record_of(best, outcome, reasons, time.monotonic() - self.start)
        return plan_of(self.task, self.evaluator, best, record, notes)

    # --- no plan

    def _structural(self) -> InfeasibleError:
        shares = against(self.problem, self.task.pins)
        if shares is not None:
            return shares
        names = conflict(self.problem, self.task.pins)
        ways = ("drop one of the pins named", *remedies(self.problem, self.task.pins, names))
        return InfeasibleError(
            "some plan satisfies all constraints",
            value="these conflict: " + "; ".join(names or (pin.text for pin in self.task.pins.pins)),
            remedy=", or ".join(ways),
        )

    def _too_slow(self, outcome: Outcome, most_s: float) -> InfeasibleError:
        bound = outcome.lower_bound_s
        found = f"none in {bound:.4g} s or less" if bound < float("inf") else "none fits in memory in any layout"
        return InfeasibleError(
            f"a plan takes at most {most_s:g} s a step",
            value=found if bound > most_s else f"none of {outcome.candidates} candidates",
            remedy="allow more time, or take more devices",
        )

    def _too_large(self, misfits: Iterable[Misfit]) -> AutoparError:
        """Deletion-based: a pin is named if without it (and those already found needless) something fits."""
        found = [m for m in misfits if m.needs_bytes]
        if not found:
            reasons = sorted({m.reason for m in misfits})
            pins = ", ".join(pin.text for pin in self.task.pins.pins if isinstance(pin, StagePin | ParameterPin))
            return InfeasibleError(
                "some plan satisfies all constraints",
                value=f"these conflict: {pins}; {'; '.join(reasons[:3])}",
                remedy="drop one of them",
            )
        left = self.task.pins
        for pin in self.task.pins.pins:
            without = left.without(pin.text)
            if not self._anything_fits(without, self.problem):
                left = without
        more = replace(self.problem, global_batch_size=self.task.global_batch_size * self.problem.world_size)
        least = min(m.needs_bytes for m in found)
        model = self.evaluator.model
        has, needs = memory_of_devices(model), readable(least * model.memory_spread)
        memory = f"{has} of memory a device (the leanest plan needs {needs})"
        batch = f"a global batch of {self.task.global_batch_size}"
        samples = (batch,) if self._anything_fits(left, more) else ()
        world = f"{self.problem.world_size} devices"
        return InfeasibleError(
            "some plan satisfies all constraints",
            value="these conflict: " + "; ".join((*left.texts, memory, world, *samples)),
            remedy=("drop one of the pins named, or take more devices" if left.texts else "take more or larger devices")
            + ", or search --space wide, where optimizers may live on the host" * self._may_offload(),
        )

    def _may_offload(self) -> bool:
        """Whether optimizers could live on the host, but the space has none there."""
        task = self.task
        tried = not task.space.offload and task.pins.allows("offload", "optimizer")
        return tried and len(offloaded(self.pool[:1], task.cluster, task.pins, ("optimizer",), task.optimizer)) > 1

    def _anything_fits(self, pins: Pins, problem: Problem) -> bool:
        pool = sorted(self._candidates(problem, pins), key=_leanness)
        evaluator = self._evaluator(pins, problem.global_batch_size)
        return any(isinstance(evaluator.evaluate(c), Evaluation) for c in pool[:MAX_CONFLICT_TRIALS])


def _num_layers(graph: Graph) -> int:
    """Blocks that have others equal to them."""
    counts = Counter(block.hash for block in graph.blocks)
    return sum(n for n in counts.values() if n > 1)


def _leanness(candidate: Candidate) -> tuple[int, ...]:
    mesh = candidate.mesh
    return (
        -len(candidate.on_host),
        -candidate.zero_stage,
        candidate.micro_batch_size,
        mesh.dp_replicate,
        -mesh.tp * mesh.cp,
        candidate.num_micro_batches if candidate.schedule == "GPipe" else 0,
        -mesh.pp,
        candidate.virtual_stages,
    )


def _texts_on(pins: Pins, key: str) -> list[str]:
    def named(pin: Pin) -> str:
        return pin.key if isinstance(pin, NumberPin | ChoicePin) else ""

    return [pin.text for pin in pins.pins if named(pin) == key]

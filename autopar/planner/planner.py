"""The planner: the steps from a graph to a plan.

1. Equal blocks are folded and the batch axis is typed (:class:`~autopar.planner.search.SearchContext`).
2. The space gives the candidates: mesh, micro-batch, ZeRO, schedule, order of devices, offload, shares.
3. Branch and bound takes the candidate of the least dual bound, and raises the bound or evaluates the candidate. It stops when no bound
   is below the incumbent; then the certificate closes the gap where it can (:mod:`autopar.planner.branch_and_bound`).
4. The best plan is improved locally and compared with its neighbours; one that is faster becomes the plan.
5. The plan is written with its certificate, the comparisons and notes. If there is none, :mod:`~autopar.planner.explain.answer` says why.
"""

from __future__ import annotations

import gc
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from math import inf, nextafter
from typing import TypeVar

from autopar.cost.model import CostModel
from autopar.cost.operators.operator_times import Recorder
from autopar.cost.step.data_parallel import is_mixed
from autopar.errors import InfeasibleError
from autopar.graph.graph import Graph, Op
from autopar.graph.operator_kinds import attention_heads, attention_sequences, has_written_attention
from autopar.graph.rewrites import vocabulary_sizes
from autopar.plan.plan import Plan
from autopar.planner.bounds.cascade import LEVELS
from autopar.planner.branch_and_bound.branch_and_bound import ROUNDING, BranchAndBound
from autopar.planner.branch_and_bound.frontier import Ledger
from autopar.planner.branch_and_bound.process_group import LostProcessError, ProcessGroup
from autopar.planner.branch_and_bound.sampling import Sampling, front
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.explain import answer
from autopar.planner.explain.answer import notes_of, plan_of, record_of
from autopar.planner.explain.reasons import Alternative, compare
from autopar.planner.layouts.catalogue import Layouts
from autopar.planner.layouts.layout import layout_key_of
from autopar.planner.search import Evaluation, Limits, Misfit, Outcome, Progress, Task, checked, peak_bytes
from autopar.planner.sharding.input_axes import mixes_samples
from autopar.planner.space.candidates import Candidate, candidates
from autopar.planner.space.constraints import Problem
from autopar.planner.space.pin_syntax import EQUAL
from autopar.planner.space.pins import Pins
from autopar.planner.space.preferences import leanness, seeds, usual
from autopar.planner.space.variants import SHARES, in_orders, offloaded, shared
from autopar.planner.studies.workers import Sharing, shared_study
from autopar.rules.local_calls import expert_counts
from autopar.rules.missing import complete

__all__ = ["Planner", "Task"]

T = TypeVar("T")


@contextmanager
def objects_set_aside() -> Iterator[None]:
    """Exclude the objects that exist already from garbage collection within the ``with`` block.

    A search keeps most of its objects, so the collector traverses all objects of the process again and again; those of torch and of the
    traced model are the most. Without this, searches take 1.0 to 2.7 times as long (``docs/adr/0023-planner.md``). If the caller has frozen
    objects itself, nothing is changed.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Planner:
    """The planner of one task.

    Args:
        explains: whether a task without candidates raises an error that says why. If not, the pool is empty.

    Attributes:
        start: the time at which planning began, by ``time.monotonic``.
        task: the task, with the pins of its graph.
        rules_found: the calls without a declared rule, with the rules that execution found.
        model: the cost model.
        evaluator: bounds and evaluates candidates.
        mixing: the operators that mix samples.
        problem: what the candidates depend on.
        pool: the candidates.

    Raises:
        UsageError: pins name nothing of the model, or the global batch is below one.
        RuleError: an operator mixes samples, and no strategy of it allows that.
        InfeasibleError: constraints leave no candidate; the message names a minimal set that conflicts.
    """

    @objects_set_aside()
    def __init__(self, task: Task, *, explains: bool = True) -> None:
        self.start = time.monotonic()
        self.task = task = checked(task)
        self.rules_found = complete(task.graph)
        self.model = CostModel(task.cluster, task.precision, task.optimizer)
        self.evaluator = self._evaluator(task.pins, task.global_batch_size)
        folded = self.evaluator.layouts.compact.graph  # equal blocks have equal attention
        self.mixing = mixes_samples(folded, self.evaluator.layouts.batch)
        self.problem = problem_of(task, folded, self.mixing, unaligned_fraction=self.model.unaligned_fraction)
        self.pool = self._candidates(self.problem, task.pins)
        if not self.pool and explains:
            raise answer.conflicting(self.problem, task.pins)

    def _evaluator(self, pins: Pins, global_batch_size: int) -> Evaluator:
        graph, space = self.task.graph, self.task.space
        return Evaluator.of(graph, self.model, global_batch_size=global_batch_size, pins=pins, space=space)

    def _candidates(self, problem: Problem, pins: Pins) -> list[Candidate]:
        task = self.task
        pool = in_orders(candidates(problem, pins), task.cluster, pins)
        pool = pool if pins.allows(SHARES, EQUAL) else []
        pool = offloaded(pool, task.cluster, pins, task.space.offload, task.optimizer)
        where = self.mixing[0].name if self.mixing else ""
        return [*pool, *shared(problem, pins, task.cluster, self.evaluator.shares.seconds, mixing=where)]

    # --- verbs

    @objects_set_aside()
    def search(
        self, *, limits: Limits, sharing: Sharing | None = None, progress: Progress | None = None, processes: int = 1
    ) -> Plan:
        """Return the fastest plan that fits.

        Args:
            limits: when to stop.
            sharing: how results are shared with other processes or earlier searches; None: not at all.
            progress: called after each candidate.
            processes: the number of processes of a search that is not shared, this one included.

        Raises:
            InfeasibleError: there is no plan; the message names a minimal set of constraints that conflict.
            UsageError: the storage cannot be opened, or its study has another identity.
            KeyboardInterrupt: the user interrupted before there was a plan. Later, an interrupt ends the search with its best plan.
        """

        def search(group: ProcessGroup) -> Plan:
            outcome = self._outcome(limits, sharing=sharing, progress=progress, group=group)
            if outcome.best is None:
                group.dissolve()
                raise answer.unfound(self.task, self.problem, self.pool, self.evaluator, outcome, limits, self._may_fit)
            return self._improved(outcome.best, outcome, group)

        return _together(1 if sharing is not None else processes, search)

    @objects_set_aside()
    def fastest(self, limits: Limits, *, processes: int = 1) -> Plan | None:
        """Return the plan of :meth:`search`, or None without a reason."""

        def search(group: ProcessGroup) -> Plan | None:
            outcome = self._outcome(limits, group=group)
            return None if outcome.best is None else self._improved(outcome.best, outcome, group)

        return _together(processes, search)

    @objects_set_aside()
    def front(self, limits: Limits) -> list[Plan]:
        """Return the Pareto front in time and memory among the candidates that NSGA-II asks for, after the plan of :meth:`fastest`.

        All plans have the certificate of the fastest one: no plan of the space is faster than its bound.
        """
        outcome, space = self._outcome(limits), self.task.space
        if outcome.best is None:
            return []
        may_fit = [bound_s < inf for bound_s in self.evaluator.bounds_s(0, self.pool)]
        first = {self.pool.index(outcome.best.candidate): "fastest"}
        first |= seeds(self.pool, self.task.cluster.devices_per_node, may_fit.__getitem__)
        most_s = inf if limits.max_step_time_s is None else nextafter(limits.max_step_time_s, inf)
        trials = limits.trials or space.trials
        evaluations = front(self.evaluator, self.pool, first, trials=trials, seed=self.task.sampler_seed, max_s=most_s)
        least = peak_bytes(outcome.best.prediction)
        leaner = [evaluation for evaluation in evaluations if peak_bytes(evaluation.prediction) < least]
        plans = [self._compared(self.evaluator.improved(evaluation), outcome) for evaluation in leaner]
        return [self._improved(outcome.best, outcome, ProcessGroup()), *plans]

    @objects_set_aside()
    def estimate(self) -> Plan:
        """Return the plan that the pins describe; choices that they leave open are as in the most usual candidate (:func:`usual`) that fits.

        Of the sizes of micro-batches that the pins leave open, the fastest is taken: none is usual at every batch.

        Raises:
            InfeasibleError: no candidate fits.
        """
        misfits: list[Misfit] = []
        for candidate in sorted(self.pool, key=usual):
            evaluated = self.evaluator.evaluate(candidate)
            if isinstance(evaluated, Evaluation):
                return self._estimated(evaluated, misfits)
            misfits.append(evaluated)
        raise answer.too_large(self.task, self.problem, self.pool, self.evaluator, misfits, self._may_fit)

    def _estimated(self, first: Evaluation, misfits: list[Misfit]) -> Plan:
        """Return the fastest plan among the first candidate that fits and those that differ from it in nothing but the micro-batch."""
        size, count = first.candidate.micro_batch_size, first.candidate.num_micro_batches
        alike = [c for c in self.pool if replace(c, micro_batch_size=size, num_micro_batches=count) == first.candidate]
        others = [c for c in alike if c != first.candidate]
        tried = [*misfits, first, *map(self.evaluator.evaluate, others)]
        fitting = [evaluated for evaluated in tried if isinstance(evaluated, Evaluation)]
        best = min(fitting, key=lambda evaluated: evaluated.time_s)
        outcome = Outcome(
            best=best,
            candidates=len(tried),
            evaluated=len(tried),
            lower_bound_s=min(self.evaluator.bounds_s(LEVELS - 1, alike)),
            misfits=tuple(evaluated for evaluated in tried if isinstance(evaluated, Misfit)),
            finished=True,
        )
        return self._compared(best, outcome)

    # --- the search

    @property
    def is_sampled(self) -> bool:
        """Whether a sampler chooses the candidates to evaluate, since there are too many to search to the end."""
        return self.task.space.sampler != "none" and self._is_large

    @property
    def _is_large(self) -> bool:
        """Whether there are too many candidates to search to the end; those with offload count only if there are no others."""
        num_on_device = sum(not candidate.on_host for candidate in self.pool)
        return (num_on_device or len(self.pool)) > self.task.space.exhaustive

    def branch_and_bound(
        self,
        limits: Limits,
        *,
        ledger: Ledger | None = None,
        progress: Progress | None = None,
        group: ProcessGroup | None = None,
    ) -> BranchAndBound:
        """Return the search over this planner's candidates."""
        task = self.task
        sampling = Sampling(
            kind=task.space.sampler if self._is_large else "none",
            seed=task.sampler_seed,
            devices_per_node=task.cluster.devices_per_node,
        )
        if limits.trials is None and self._is_large:
            limits = replace(limits, trials=task.space.trials)
        return BranchAndBound(
            self.evaluator, self.pool, limits=limits, sampling=sampling, ledger=ledger, group=group, progress=progress
        )  # fmt: skip

    def _outcome(
        self,
        limits: Limits,
        *,
        sharing: Sharing | None = None,
        progress: Progress | None = None,
        group: ProcessGroup | None = None,
    ) -> Outcome:
        with ExitStack() as stack:
            ledger = stack.enter_context(shared_study(self.task, self.pool, sharing, limits)) if sharing else None
            return self.branch_and_bound(limits, ledger=ledger, progress=progress, group=group).run()

    def _may_fit(self, pins: Pins, problem: Problem) -> bool:
        """Return whether a candidate fits under other pins or for another problem, among those that are likely to be leanest."""
        pool = sorted(self._candidates(problem, pins), key=leanness)
        evaluator = self._evaluator(pins, problem.global_batch_size)
        return any(isinstance(evaluator.evaluate(c), Evaluation) for c in pool[: answer.MAX_CONFLICT_TRIALS])

    # --- the plan

    def _improved(self, best: Evaluation, outcome: Outcome, group: ProcessGroup) -> Plan:
        """Return the plan of the best evaluation after local improvement; an alternative that is faster takes its place, until none is.

        The certificate holds for each of them, as it bounds all candidates. The plan of a search that the user interrupted stays as it is,
        since that takes as long as several evaluations.
        """
        if outcome.interrupted:
            return self._written(best, outcome, ())
        steps: list[str] = []
        best = group.broadcast(partial(self.evaluator.improved, best))
        while True:
            alternatives = compare(self.evaluator, self.pool, best, group)
            faster = _fastest(alternatives, best.prediction.step_time_s * (1 - ROUNDING))
            if faster is None:
                return self._written(best, outcome, (*steps, *map(str, alternatives)))
            before, best = best, faster
            saved = 1 - best.prediction.step_time_s / before.prediction.step_time_s
            steps.append(
                f"compared with the best plan of the search ({before.candidate}) this one was {saved:.1%} faster and took its place"
            )

    def _compared(self, best: Evaluation, outcome: Outcome) -> Plan:
        """Return the plan of an evaluation with its alternatives, which do not take its place."""
        return self._written(best, outcome, map(str, compare(self.evaluator, self.pool, best)))

    def _written(self, best: Evaluation, outcome: Outcome, reasons: Iterable[str]) -> Plan:
        notes = notes_of(self.task, self.evaluator, best, outcome, self.rules_found, self.mixing)
        record = record_of(best, outcome, tuple(reasons), time.monotonic() - self.start)
        return plan_of(self.task, self.evaluator, best, record, notes)


def problem_of(task: Task, graph: Graph, mixing: Sequence[Op], *, unaligned_fraction: float) -> Problem:
    """Return what the candidates of a task depend on.

    Args:
        graph: the graph of the model, with equal blocks folded.
        mixing: the operators that mix samples.
        unaligned_fraction: the part of a product's rate that unaligned rows leave, the least over the devices.
    """
    repeats = Counter(block.hash for block in task.graph.blocks)
    return Problem(
        world_size=task.cluster.world_size,
        devices_per_node=task.cluster.devices_per_node,
        global_batch_size=task.global_batch_size,
        num_blocks=len(task.graph.blocks),
        heads=attention_heads(graph),
        key_heads=attention_heads(graph, operand=1),
        sequences=attention_sequences(graph),
        has_written_attention=has_written_attention(graph),
        space=task.space,
        mixes_samples=bool(mixing),
        experts=expert_counts(task.graph),
        casts=is_mixed(task.precision),
        num_layers=sum(n for n in repeats.values() if n > 1),
        vocabularies=vocabulary_sizes(task.graph),
        unaligned_fraction=unaligned_fraction,
        staged=task.pins.staged(task.graph),
    )


def _fastest(alternatives: Iterable[Alternative], below_s: float) -> Evaluation | None:
    """Return the fastest evaluation of the alternatives that takes less than ``below_s``, the first of equal ones; None if there is none."""
    evaluated = [alternative.evaluation for alternative in alternatives if alternative.evaluation is not None]
    faster = [evaluation for evaluation in evaluated if evaluation.prediction.step_time_s < below_s]
    return min(faster, key=lambda evaluation: evaluation.prediction.step_time_s, default=None)


def _together(processes: int, search: Callable[[ProcessGroup], T]) -> T:
    """Return the result of a search by several processes; if one of them is lost, this process searches again alone."""
    try:
        with ProcessGroup(processes) as group:
            return search(group)
    except LostProcessError as error:
        logging.getLogger("autopar").warning("a process of the search ended early, one alone searches again: %s", error)
        return search(ProcessGroup())


def operator_calls(planner: Planner, *, progress: Progress | None = None) -> tuple[str, ...]:
    """Return every call at every local shape that the planner can price, as :func:`autopar.cost.operators.operator_times.encode` writes it.

    The planner computes the layouts of each micro-batch size with each degree of ``cp``, ``tp`` and expert spreading of its candidates, as in a
    search. A recorder takes the place of the measured times. It gets all strategies of all operators on ``tp``, and those of the best typing
    on ``cp``. Each call is returned once.

    Args:
        planner: the planner of a task; its cost model must not be used afterwards.
    """
    recorder = Recorder()
    planner.model.measured = recorder
    # New layouts: the planner's own hold results from choosing unequal shares, whose calls the recorder would miss.
    task = planner.task
    layouts = Layouts(
        task.graph, planner.model, global_batch_size=task.global_batch_size, pins=task.pins, space=task.space
    )
    keys = dict.fromkeys(
        replace(layout_key_of(c), micro_batch_size=size)
        for c in planner.pool
        for size in c.shares or (c.micro_batch_size,)
    )
    for done, key in enumerate(keys):
        if progress is not None:
            progress("laying out", done, len(keys))
        layouts.unsplit(key.unsplit)
        with suppress(InfeasibleError):  # no kind of attention fits the axis cp
            for typed in layouts.typed(key, num_micro_batches=1, in_flight=1):
                if typed.solution is None:
                    layouts.price(typed)
    return tuple(recorder.calls.values())

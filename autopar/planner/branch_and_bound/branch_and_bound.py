"""The search over the candidates: which are evaluated, in which order, and when the search may stop.

Candidates come in the order of their dual bounds (:mod:`autopar.planner.branch_and_bound.frontier`). The search stops when no bound is
below the step time of the incumbent, the best plan so far. Then the certificate raises the least bounds that are left.

The order depends on bounds alone, never on results. So several searches of the same candidates can share one ledger: each goes through
the same order, reads the results of the others and passes over the candidates that they are evaluating. In the end it evaluates those
that it passed over and that still have no result, whether their owner is slow or dead. The plan is therefore the same for any number of
searches and any timing. One search may also run in several processes (:mod:`autopar.planner.branch_and_bound.process_group`), each of
which takes the candidates of the layouts that it claims.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from autopar.errors import UsageError
from autopar.planner.bounds.chain_proof import ChainProof
from autopar.planner.branch_and_bound.frontier import Frontier, Ledger, LocalLedger, Result, close_gap
from autopar.planner.branch_and_bound.process_group import ProcessGroup
from autopar.planner.branch_and_bound.sampling import Question, Rounds, Sampling
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.layouts.layout import LayoutKey
from autopar.planner.search import SLOW, Evaluation, Limits, Misfit, Outcome, Progress
from autopar.planner.space.candidates import Candidate

PATIENCE = 8
"""The number of evaluations by this search after which it takes over a candidate that another search claimed and left without a result.

If a dead search had claimed the best candidate, its time would be missing, and many worse candidates would be evaluated until then.
"""

REPORT_S = 0.2
"""Seconds between two progress reports while this process waits for others."""

ROUNDING = 1e-6
"""The relative rounding error of bounds and times.

The bound of a plan is below its time up to rounding (1e-9 of it in the tests). The incumbent cuts off only what is slower by more than
this, so that ties do not depend on which candidate was evaluated first.
"""


class BranchAndBound:
    """One search over candidates.

    Args:
        evaluator: bounds and evaluates candidates.
        pool: the candidates.
        limits: when to stop.
        sampling: how a pool is sampled that is too large to be searched to the end; with a shared ledger also the source of the
            candidates that experts would try. None: neither.
        ledger: the results of candidates so far; None: an empty one in memory.
        group: the processes of this search; None: this process alone.
        progress: called after each candidate. An exception that it raises ends the search; a ``KeyboardInterrupt`` counts as an interrupt.

    Attributes:
        order: positions in the pool, in the order in which the search reached them.
        bounds: the dual bound of each candidate so far, in seconds.
        finished: False if a limit or an interrupt stopped the search.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        pool: Sequence[Candidate],
        *,
        limits: Limits,
        sampling: Sampling | None = None,
        ledger: Ledger | None = None,
        group: ProcessGroup | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.evaluator, self.pool, self.limits, self.progress = evaluator, tuple(pool), limits, progress
        self.group = ProcessGroup() if group is None else group
        self.ledger = LocalLedger(self.group) if ledger is None else ledger
        self.sampling = sampling
        self.rounds: Rounds | None = None
        if sampling is not None and sampling.kind != "none":
            self.rounds = sampling.rounds(self.pool, evaluator, self._limit_s(), ROUNDING)
        self.frontier = Frontier(
            evaluator, self.pool, self.group, self._cutoff_s if self.rounds is None else self.rounds.cutoff_s,
            primal=not self.ledger.is_shared and self.rounds is None,
        )  # fmt: skip
        self.bounds = self.frontier.bounds
        self.order: list[int] = []
        self.finished = True
        self._start = time.monotonic()
        self._max_trials = limits.trials or len(self.pool)
        self._plans: dict[int, Evaluation] = {}
        self._num_evaluated = 0
        self._passed_over: dict[int, int] = {}  # claimed by others, with the number of evaluations here before

    # --- the search

    def run(self) -> Outcome:
        """Search until the end, a limit or an interrupt (Ctrl-C), and return the best plan so far with the bounds.

        Raises:
            KeyboardInterrupt: the user interrupted the search before there was a plan.
            UsageError: the ledger has other times than this evaluator computes.
            LostProcessError: another process of the group ended.
        """
        interrupted = False
        try:
            self.work()
        except KeyboardInterrupt:
            self.finished, interrupted = False, True
            self.group.stop()
        self._exchange_results()
        if not interrupted:
            try:
                self._certify()
            except KeyboardInterrupt:
                self.finished, interrupted = False, True
        if interrupted:
            self.group.dissolve()
            if self._best_index() is None:
                raise KeyboardInterrupt
        return Outcome(
            best=self._best(),
            candidates=len(self.pool),
            evaluated=len(self.ledger.results),
            lower_bound_s=min(self.bounds.values(), default=0.0),
            misfits=tuple(self._misfits()),
            finished=self.finished,
            interrupted=interrupted,
        )

    def work(self) -> None:
        """Evaluate candidates until the end or a limit; the results are in the ledger."""
        self._compute_first_bounds()
        seeds: Mapping[int, str] = {}
        if self.sampling is not None and (self.ledger.is_shared or self.rounds is not None):
            seeds = self.sampling.seeds(self.pool, lambda i: math.isfinite(self.bounds[self.pool[i]]))
        self.ledger.expect(seeds)
        if self.rounds is None:
            self._search_best_first()
        else:
            self._search_in_rounds(self.rounds, seeds)
        self.ledger.finish(self._excluded_s)

    def _compute_first_bounds(self) -> None:
        """Compute the first bounds of all candidates; then fork the group where several processes are worth their start.

        A search that a limit on trials may stop is not forked: which candidates it reaches would depend on timing.
        """
        self.frontier.begin()
        is_exhaustive = len(self.pool) <= self._max_trials and self.rounds is None
        if is_exhaustive and len(self.pool) >= self.group.min_candidates:
            self.group.fork(self.frontier.keys)

    def _search_best_first(self) -> None:
        """Evaluate candidates in the order of their bounds, until no bound is below the incumbent."""
        self.ledger.read()
        for i in self.frontier.walk():
            if len(self.order) >= self._max_trials or self._must_stop():
                self.finished = False
                break
            self.order.append(i)
            self.group.count(len(self.order))
            self.ledger.read()
            if not self._is_settled(i):
                if self.ledger.is_claimed(i):
                    self._passed_over[i] = self._num_evaluated
                else:
                    self._evaluate(i)
            self._report()
            self._evaluate_passed_over(PATIENCE)
        self._evaluate_passed_over(0)
        self._report()
        while not self.group.others_wait(REPORT_S):
            self._report()

    def _evaluate_passed_over(self, patience: int) -> None:
        """Evaluate the candidates that were passed over at least ``patience`` evaluations ago and still have no result."""
        for i, num_before in list(self._passed_over.items()):
            if self._num_evaluated - num_before < patience:
                return
            self.ledger.read()
            if not self._is_settled(i):
                if self._must_stop():
                    self.finished = False
                    return
                self._evaluate(i)
            del self._passed_over[i]

    def _evaluate(self, index: int, limit_s: float | None = None) -> None:
        """Evaluate a candidate and record the result.

        Args:
            limit_s: the time in seconds up to which a plan counts; None: up to the incumbent, ties included.
        """
        candidate = self.pool[index]
        self.ledger.claim(index, self.bounds[candidate])
        try:
            # Ties with the incumbent are worked out to the end, so that the order of evaluation does not matter.
            at_most_s = self._cutoff_s() * (1 + ROUNDING) if limit_s is None else limit_s
            evaluated = self.evaluator.evaluate(candidate, at_most_s=at_most_s)
            self._num_evaluated += 1
            if isinstance(evaluated, Evaluation):
                self._plans[index] = evaluated
            self.ledger.record(index, _result(evaluated, at_most_s))
        except (Exception, KeyboardInterrupt):
            self.ledger.release(index)
            raise

    # --- search by a sampler

    def _search_in_rounds(self, rounds: Rounds, seeds: Mapping[int, str]) -> None:
        """Evaluate the questions of the sampler and of the order of bounds, round by round.

        Other searches may be at another round; their results come through the ledger.
        """
        rounds.begin(self.bounds, seeds, self.frontier.walk())
        self.finished = False
        while questions := rounds.ask(self._max_trials - len(self.order)):
            for takes_over in (False, True):  # candidates that other searches have claimed come last
                for question in questions:
                    if self._must_stop():
                        return
                    self.ledger.read()
                    if not takes_over and question.bound_s is None:
                        self.order.append(question.index)
                    self._answer(question, takes_over=takes_over)
                    self._report()
            rounds.tell(questions, self.ledger.results)
        self.finished = rounds.is_done

    def _answer(self, question: Question, *, takes_over: bool) -> None:
        """Evaluate the candidate of a question, or record the bound that excludes it.

        Args:
            takes_over: whether to do so even if another search has claimed the candidate.
        """
        index = question.index
        if question.is_answered(self.ledger.results.get(index)):
            return
        if self.ledger.is_claimed(index) and not takes_over:
            return
        if question.bound_s is None:
            self._evaluate(index, question.limit_s)
        else:
            self.ledger.claim(index, question.bound_s)
            self.ledger.record(index, Result(at_least_s=question.bound_s))

    # --- the certificate

    def _exchange_results(self) -> None:
        """Exchange bounds, results and plans, so that every process has those of all."""
        if not self.group.is_forked:
            return
        bounds = {
            i: self.bounds[self.pool[i]] for key, part in self.frontier.parts.items() if self._owns(key) for i in part
        }
        index = self._best_index()
        best = {index: self._plans[index]} if index in self._plans else {}
        local = (bounds, self.ledger.results, self.order, self.finished, best, self.frontier.visited)
        self.order = []
        for raised, results, order, finished, plans, visited in self.group.allgather(local):
            self.bounds |= {self.pool[i]: bound for i, bound in raised.items()}
            for i, result in results.items():
                self.ledger.record(i, result)
            self.order += order
            self.finished &= finished
            self._plans |= plans
            self.frontier.visited |= visited  # the certificate depends on it, and must be the same in all processes

    def _certify(self) -> None:
        """Raise the least bounds of the candidates that may still be faster than the incumbent."""
        if math.isfinite(self.ledger.incumbent_s):
            visited = self.frontier.visited | {*self.order}
            close_gap(self.pool, self.bounds, self.ledger.incumbent_s, visited, self._closest_s)

    def _closest_s(
        self, index: int, goal_s: float, known: Sequence[ChainProof]
    ) -> tuple[float, tuple[ChainProof, ...]]:
        """Return the tightest bound of a candidate in seconds and new proofs, computed by the process that owns its layouts."""
        compute = partial(self.evaluator.closest_s, self.pool[index], goal_s, known, whole_s=goal_s)
        return self.group.broadcast(compute, self.group.owner(self.frontier.keys[index]))

    def _owns(self, key: LayoutKey) -> bool:
        return self.group.owner(key) == self.group.rank

    def _excluded_s(self, index: int) -> float | None:
        """Return a lower bound in seconds of a candidate that was not evaluated; None unless the search has reached its end."""
        return max(self.bounds[self.pool[index]], self._cutoff_s()) if self.finished else None

    # --- the incumbent

    def _cutoff_s(self) -> float:
        """Return the seconds that a plan must be below. Ties within rounding are below it: the order of the pool decides between them."""
        return min(self.ledger.incumbent_s * (1 + ROUNDING), self._limit_s())

    def _limit_s(self) -> float:
        most_s = self.limits.max_step_time_s
        return math.inf if most_s is None else math.nextafter(most_s, math.inf)

    def _best_index(self) -> int | None:
        """Return the first candidate of the pool among those with the least time; bounds may depend on which candidates were bounded together."""
        limit_s = self._limit_s()
        timed = [(result.time_s, i) for i, result in self.ledger.results.items() if result.time_s is not None]
        return min((pair for pair in timed if pair[0] < limit_s), default=(0.0, None))[1]

    def _best(self) -> Evaluation | None:
        """Return the plan of the best candidate; it is evaluated again where another search found it."""
        index = self._best_index()
        if index is None:
            return None
        time_s, plan = self.ledger.results[index].time_s, self._plans.get(index)
        assert time_s is not None
        if plan is not None and plan.prediction.step_time_s == time_s:
            return plan
        again = self.evaluator.evaluate(self.pool[index])
        actual = again.prediction.step_time_s if isinstance(again, Evaluation) else again.reason
        if not isinstance(again, Evaluation) or abs(again.prediction.step_time_s - time_s) > ROUNDING * time_s:
            raise UsageError(
                f"The study holds {time_s} s for this candidate, but it takes {actual}{' s' * isinstance(again, Evaluation)} here",
                where=str(self.pool[index]),
                fix="Take another study name or storage",
            )
        return again

    def _misfits(self) -> Iterator[Misfit]:
        for i, result in sorted(self.ledger.results.items()):
            if result.time_s is None:
                yield Misfit(candidate=self.pool[i], reason=result.reason or SLOW, needs_bytes=result.needs_bytes)

    # --- progress and limits

    def _is_settled(self, index: int) -> bool:
        result = self.ledger.results.get(index)
        return result is not None and result.settles(self._cutoff_s())

    def _must_stop(self) -> bool:
        most_s = self.limits.search_timeout_s
        return self.group.is_stopped or (most_s is not None and time.monotonic() - self._start >= most_s)

    def _report(self) -> None:
        if self.progress is not None and self.group.rank == 0:
            incumbent_s = self.ledger.incumbent_s
            best = f", best {incumbent_s:.3g} s" if math.isfinite(incumbent_s) else ""
            done = len(self.order) + self.group.num_done_elsewhere
            may_fit = sum(map(math.isfinite, self.bounds.values()))
            self.progress(f"searching{best}", done, min(may_fit, self._max_trials))


def _result(evaluated: Evaluation | Misfit, at_most_s: float) -> Result:
    """Return the result of an evaluation under a limit in seconds, above which times are not worked out to the end."""
    if isinstance(evaluated, Evaluation):
        time_s = evaluated.prediction.step_time_s
        if time_s < at_most_s:
            return Result(time_s=time_s, peak_memory_bytes=evaluated.prediction.peak_memory_bytes)
        return Result(at_least_s=at_most_s)
    if evaluated.reason == SLOW:
        return Result(at_least_s=at_most_s)
    return Result(reason=evaluated.reason, needs_bytes=evaluated.needs_bytes)

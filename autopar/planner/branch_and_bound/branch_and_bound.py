"""Branch and bound over the candidates: which are evaluated, in which order, and when the search may stop.

Best first: candidates come in the order of their dual bounds (:mod:`autopar.planner.branch_and_bound.frontier`), and the
search stops when no bound is below the time of the incumbent, the best plan found. What no bound excludes and nobody
evaluated is left to the certificate (:mod:`autopar.planner.branch_and_bound.frontier`).

The order depends on bounds alone, never on what was evaluated. So several searches of the same candidates can share one
ledger (:mod:`autopar.planner.branch_and_bound.frontier`): each goes through the same order, takes what others have found,
passes over what they are evaluating, and in the end evaluates what it passed over and what still has no result, whether its
owner is slow or dead. The plan is the one that a search alone would have chosen, whatever the number of searches and their
timing. One search may also be several processes (:mod:`autopar.planner.branch_and_bound.process_group`), each with the
candidates of the layouts that it claims.
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
"""Evaluations of its own after which a search takes over a candidate that another has claimed without a result. Without the
time of the best candidate, which a dead search may have claimed, many worse ones would be evaluated."""

REPORT_S = 0.2
"""Seconds between two reports while other processes are still at work."""

ROUNDING = 1e-6
"""A bound is below the time of its plan up to rounding (1e-9 of it in the tests). The incumbent cuts off only what is above
it by more than this part of it, so that ties do not depend on which candidate was evaluated first."""


class BranchAndBound:
    """One search over candidates.

    Args:
        evaluator: bounds and evaluates candidates.
        pool: the candidates.
        limits: when to stop.
        sampling: what asks for a part of a pool that is too large to be searched to the end, and what experts would try, which a
            shared ledger shows; None: neither.
        ledger: what is known of the candidates; None for one of its own.
        group: the processes of this search; None for this one alone.
        progress: told after each candidate. What it raises ends the search; a ``KeyboardInterrupt`` as an interrupt does.

    Attributes:
        order: positions in the pool, as the search came to them.
        bounds: the dual bounds so far, in seconds.
        finished: whether neither a limit nor an interrupt stopped the search.
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
            scouts=not self.ledger.is_shared and self.rounds is None,
        )  # fmt: skip
        self.bounds = self.frontier.bounds
        self.order: list[int] = []
        self.finished = True
        self._start = time.monotonic()
        self._max_trials = limits.trials or len(self.pool)
        self._plans: dict[int, Evaluation] = {}
        self._num_evaluated = 0
        self._passed_over: dict[int, int] = {}  # claimed by others; with the evaluations made here until then

    # --- the search

    def run(self) -> Outcome:
        """Search until the end, a limit or an interrupt (Ctrl-C), which gives the best plan so far.

        Raises:
            KeyboardInterrupt: there is no plan yet.
            UsageError: the ledger has other times than this evaluator gives.
            LostProcessError: another process of the group ended.
        """
        interrupted = False
        try:
            self.work()
        except KeyboardInterrupt:
            if not self.frontier.parts:  # while first bounds are exchanged: no plan, and no meeting that all come to
                raise
            self.finished, interrupted = False, True
            self.group.stop()
        self._meet()
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
        """Evaluate candidates until the end or a limit; what is found stands in the ledger."""
        self._begin()
        seeds: Mapping[int, str] = {}
        if self.sampling is not None and (self.ledger.is_shared or self.rounds is not None):
            seeds = self.sampling.seeds(self.pool, lambda i: math.isfinite(self.bounds[self.pool[i]]))
        self.ledger.expect(seeds)
        if self.rounds is None:
            self._search_best_first()
        else:
            self._search_in_rounds(self.rounds, seeds)
        self.ledger.finish(self._excluded_s)

    def _begin(self) -> None:
        """First bounds of all; where several processes are worth it, from here on they do the work.

        Not where the search ends before it is done: which candidates it came to would depend on timing.
        """
        is_whole = len(self.pool) <= self._max_trials and self.rounds is None
        if is_whole and len(self.pool) >= self.group.min_candidates:
            self.group.fork(self.frontier.keys)
        self.frontier.begin()

    def _search_best_first(self) -> None:
        """Candidates in the order of their bounds, until none is below the incumbent."""
        self.ledger.read()
        for i in self.frontier.walk():
            if len(self.order) >= self._max_trials or self._is_late():
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
            self._catch_up(PATIENCE)
        self._catch_up(0)
        self._report()
        while not self.group.others_wait(REPORT_S):
            self._report()

    def _catch_up(self, patience: int) -> None:
        """Evaluate what was passed over and still has no result ``patience`` evaluations later."""
        for i, before in list(self._passed_over.items()):
            if self._num_evaluated - before < patience:
                return
            self.ledger.read()
            if not self._is_settled(i):
                if self._is_late():
                    self.finished = False
                    return
                self._evaluate(i)
            del self._passed_over[i]

    def _evaluate(self, index: int, limit_s: float | None = None) -> None:
        """Evaluate a candidate; ``limit_s``: of a question; else what is faster than the incumbent, or as fast."""
        candidate = self.pool[index]
        self.ledger.claim(index, self.bounds[candidate])
        try:
            # what takes no longer than the incumbent gets its own time: then it does not matter which came first
            at_most_s = self._cutoff_s() * (1 + ROUNDING) if limit_s is None else limit_s
            found = self.evaluator.evaluate(candidate, at_most_s=at_most_s)
            self._num_evaluated += 1
            if isinstance(found, Evaluation):
                self._plans[index] = found
            self.ledger.record(index, _result(found, at_most_s))
        except (Exception, KeyboardInterrupt):
            self.ledger.release(index)
            raise

    # --- by a sampler

    def _search_in_rounds(self, rounds: Rounds, seeds: Mapping[int, str]) -> None:
        """Questions of a sampler and of the order of bounds; others may be at another round: the ledger has what they found."""
        rounds.begin(self.bounds, seeds, self.frontier.walk())
        self.finished = False
        while questions := rounds.ask(self._max_trials - len(self.order)):
            for takes_over in (False, True):  # what others evaluate, when all else is done
                for question in questions:
                    if self._is_late():
                        return
                    self.ledger.read()
                    if not takes_over and question.bound_s is None:
                        self.order.append(question.index)
                    self._answer(question, takes_over=takes_over)
                    self._report()
            rounds.tell(questions, self.ledger.results)
        self.finished = rounds.is_done

    def _answer(self, question: Question, *, takes_over: bool) -> None:
        """Evaluate what is asked, or record that a bound excludes it; ``takes_over``: also what another search has claimed."""
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

    def _meet(self) -> None:
        """What each process has found becomes known to all."""
        if not self.group.is_forked:
            return
        bounds = {
            i: self.bounds[self.pool[i]] for key, own in self.frontier.parts.items() if self._owns(key) for i in own
        }
        index = self._best_index()
        best = {index: self._plans[index]} if index in self._plans else {}
        mine = (bounds, self.ledger.results, self.order, self.finished, best, self.frontier.given)
        self.order = []
        for raised, results, order, finished, plans, given in self.group.allgather(mine):
            self.bounds |= {self.pool[i]: bound for i, bound in raised.items()}
            for i, result in results.items():
                self.ledger.record(i, result)
            self.order += order
            self.finished &= finished
            self._plans |= plans
            self.frontier.given |= given  # the certificate goes by it, in all processes alike

    def _certify(self) -> None:
        """Raise the least bounds of what may still be faster than the incumbent."""
        if math.isfinite(self.ledger.incumbent_s):
            asked = self.frontier.given | {*self.order}
            close_gap(self.pool, self.bounds, self.ledger.incumbent_s, asked, self._closest_s)

    def _closest_s(
        self, index: int, goal_s: float, known: Sequence[ChainProof]
    ) -> tuple[float, tuple[ChainProof, ...]]:
        """The tightest bound of a candidate, by the process that has worked out its layouts."""
        ask = partial(self.evaluator.closest_s, self.pool[index], goal_s, known, whole_s=goal_s)
        return self.group.broadcast(ask, self.group.owner(self.frontier.keys[index]))

    def _owns(self, key: LayoutKey) -> bool:
        return self.group.owner(key) == self.group.rank

    def _excluded_s(self, index: int) -> float | None:
        """What a candidate takes at least that was not evaluated, once the search has come to its end."""
        return max(self.bounds[self.pool[index]], self._cutoff_s()) if self.finished else None

    # --- the incumbent

    def _cutoff_s(self) -> float:
        """What a plan has to be faster than. Ties within rounding are evaluated, for the order to decide."""
        return min(self.ledger.incumbent_s * (1 + ROUNDING), self._limit_s())

    def _limit_s(self) -> float:
        most_s = self.limits.max_step_time_s
        return math.inf if most_s is None else math.nextafter(most_s, math.inf)

    def _best_index(self) -> int | None:
        """Of the candidates of the least time the first of the pool: bounds may depend on which were asked for together."""
        limit_s = self._limit_s()
        timed = [(result.time_s, i) for i, result in self.ledger.results.items() if result.time_s is not None]
        return min((own for own in timed if own[0] < limit_s), default=(0.0, None))[1]

    def _best(self) -> Evaluation | None:
        """The plan of the best candidate, made here where another search found it."""
        index = self._best_index()
        if index is None:
            return None
        time_s, plan = self.ledger.results[index].time_s, self._plans.get(index)
        assert time_s is not None
        if plan is not None and plan.prediction.step_time_s == time_s:
            return plan
        again = self.evaluator.evaluate(self.pool[index])
        here = again.prediction.step_time_s if isinstance(again, Evaluation) else again.reason
        if not isinstance(again, Evaluation) or abs(again.prediction.step_time_s - time_s) > ROUNDING * time_s:
            raise UsageError(
                f"The study holds {time_s} s for this candidate, but it takes {here}{' s' * isinstance(again, Evaluation)} here",
                where=str(self.pool[index]),
                fix="Take another study name or storage",
            )
        return again

    def _misfits(self) -> Iterator[Misfit]:
        for i, result in sorted(self.ledger.results.items()):
            if result.time_s is None:
                yield Misfit(candidate=self.pool[i], reason=result.reason or SLOW, needs_bytes=result.needs_bytes)

    # --- whether to go on

    def _is_settled(self, index: int) -> bool:
        result = self.ledger.results.get(index)
        return result is not None and result.settles(self._cutoff_s())

    def _is_late(self) -> bool:
        most_s = self.limits.search_timeout_s
        return self.group.is_stopped or (most_s is not None and time.monotonic() - self._start >= most_s)

    def _report(self) -> None:
        if self.progress is not None and self.group.rank == 0:
            incumbent_s = self.ledger.incumbent_s
            best = f", best {incumbent_s:.3g} s" if math.isfinite(incumbent_s) else ""
            done = len(self.order) + self.group.num_done_elsewhere
            may_fit = sum(map(math.isfinite, self.bounds.values()))
            self.progress(f"searching{best}", done, min(may_fit, self._max_trials))


def _result(found: Evaluation | Misfit, at_most_s: float) -> Result:
    """The result of an evaluation under a limit, above which times are not worked out to the end."""
    if isinstance(found, Evaluation):
        time_s = found.prediction.step_time_s
        if time_s < at_most_s:
            return Result(time_s=time_s, peak_memory_bytes=found.prediction.peak_memory_bytes)
        return Result(at_least_s=at_most_s)
    if found.reason == SLOW:
        return Result(at_least_s=at_most_s)
    return Result(reason=found.reason, needs_bytes=found.needs_bytes)

"""The outer search: which candidates are evaluated, in which order, and when it may stop.

Branch and bound, best first: candidates come in order of their lower bound (:mod:`autopar.planner.bounds.bounds`), and the search
stops when none is below the best plan found. Where there are too many to go on to the end, those with the least bounds
are evaluated.

The order depends on bounds alone, never on what was evaluated. Several searches of the same candidates can therefore
share one ledger (:mod:`autopar.planner.branch_and_bound.ledger`): each goes through the same order, takes what others have found, passes
over what they are evaluating, and at the end evaluates what it passed over and what has still no outcome, whether its
owner is slow or dead. The plan is that of the candidate which one search alone would have chosen, whatever the number of
searches and their timing (``docs/adr/0010-one-order.md``). One search may also be several processes
(:mod:`autopar.planner.branch_and_bound.process_group`), each with the candidates of the layouts that it takes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from autopar.errors import UsageError
from autopar.planner.branch_and_bound.certificate import close_gap
from autopar.planner.branch_and_bound.collection import seldom_collected
from autopar.planner.branch_and_bound.frontier import Frontier
from autopar.planner.branch_and_bound.ledger import Ledger, Told
from autopar.planner.branch_and_bound.process_group import Crew
from autopar.planner.branch_and_bound.rounds import Question, Rounds, Sampled
from autopar.planner.evaluate.evaluator import SLOW, Evaluation, Misfit
from autopar.planner.evaluate.families import Evaluator
from autopar.planner.layouts.types import LayoutKey
from autopar.planner.outcome import Limits, Outcome, Progress
from autopar.planner.space.candidates import Candidate
from autopar.weak import weakly

MAX_EXPLAINED = 24
"""Candidates of which it is worked out what memory they would need, where no plan fits."""

PATIENCE = 8
"""Evaluations of its own after which a search takes over a candidate that another has claimed and not told of: without the
time of the best candidate, which a dead search may have claimed, many worse ones would be evaluated."""

ROUNDING = 1e-6
"""A bound is below the time of its plan up to rounding (1e-9 of it in the tests): the best time cuts off only what is above it
by more than this part of it, so that ties do not depend on which was evaluated first."""


class OuterSearch:
    """One search over candidates.

    Args:
        evaluator: evaluates them.
        pool: the candidates.
        exhaustive: up to so many are searched to the end.
        trials: of a larger pool, where ``limits`` says nothing.
        sampling: what asks for a part of a larger pool; None: bounds alone decide.
        ledger: what is known of the candidates; None for one of its own.
        is_wanted: asked between evaluations; the search stops where it says no.
        crew: the processes of this search; None for this one alone.
    """

    def __init__(  # noqa: PLR0913  keywords of one call
        self,
        evaluator: Evaluator,
        pool: Sequence[Candidate],
        *,
        exhaustive: int,
        trials: int,
        limits: Limits,
        sampling: Sampled | None = None,
        ledger: Ledger | None = None,
        progress: Progress | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        crew: Crew | None = None,
    ) -> None:
        self.evaluator, self.pool = evaluator, tuple(pool)
        self.limits, self.progress, self.is_wanted = limits, progress, is_wanted
        self.sampling = sampling
        self.crew = Crew() if crew is None else crew
        self.ledger = self.crew.ledger() if ledger is None else ledger
        is_large = len(on_device(self.pool)) > exhaustive
        self.trials = limits.trials or (trials if is_large else len(self.pool))
        self.start = time.monotonic()
        is_sampled = sampling is not None and sampling.kind != "none" and is_large
        self.rounds: Rounds | None = None
        if is_sampled and sampling is not None:
            self.rounds = sampling.rounds(self.pool, evaluator, self._limit_s(), ROUNDING)
        best_s = weakly(self._best_s) if self.rounds is None else self.rounds.below_s
        scouts = not self.ledger.is_shared and self.rounds is None
        self.frontier = Frontier(evaluator, self.pool, self.crew, best_s, scouts=scouts)
        self.bounds = self.frontier.bounds
        self.order: list[int] = []  # positions in the pool, as the search came to them
        self.finished = True
        self._plans: dict[int, Evaluation] = {}
        self._hopeless: list[Misfit] = []
        self._made = 0
        self._passed: dict[int, int] = {}  # what others had claimed, with the evaluations made until then

    def run(self) -> Outcome:
        """Search until the end, a limit or an interrupt (Ctrl-C), which gives the best plan so far.

        Raises:
            KeyboardInterrupt: there is no plan yet.
            UsageError: the ledger has other times than this evaluator gives.
            LostProcessError: another process of the crew ended.
        """
        interrupted = False
        try:
            self.work()
        except KeyboardInterrupt:
            if (
                not self.frontier.parts
            ):  # while first bounds are exchanged: there is no plan, and no meeting that all come to
                raise
            self.finished, interrupted = False, True
            self.crew.stop()
        self._meet()
        try:
            if not interrupted:
                self._close_gap()
                if math.isinf(self.ledger.least_s) and self.finished and self.limits.max_step_time_s is None:
                    self.crew.dissolve()
                    self._explain_misfits()
        except KeyboardInterrupt:
            self.finished, interrupted = False, True
        if interrupted:
            self.crew.dissolve()
            if self._chosen() is None:
                raise KeyboardInterrupt
        return Outcome(
            best=self._best(),
            candidates=len(self.pool),
            evaluated=len(self.ledger.found),
            lower_bound_s=min(self.bounds.values(), default=0.0),
            misfits=(*self._misfits(), *self._hopeless),
            finished=self.finished,
            interrupted=interrupted,
        )

    @seldom_collected()
    def work(self) -> None:
        """Search until the end or a limit; what is found stands in the ledger."""
        for _ in self.steps():
            pass

    def steps(self) -> Iterator[None]:
        """The search, with a pause wherever another may get ahead of it."""
        self._begin()
        asked = self.sampling if self.ledger.is_shared or self.rounds is not None else None
        seeds = {} if asked is None else asked.seeds(self.pool, lambda i: math.isfinite(self.bounds[self.pool[i]]))
        self.ledger.expect(seeds)
        yield from self._turns() if self.rounds is None else self._sampled(self.rounds, seeds)
        self.ledger.tidy(self._excluded_s)

    def _turns(self) -> Iterator[None]:
        """In order of bounds alone."""
        self.ledger.read()
        for i in self.frontier.walk():
            if len(self.order) >= self.trials or self._is_late():
                self.finished = False
                break
            self.order.append(i)
            self.crew.came_to(len(self.order))
            yield
            self.ledger.read()
            if self._is_settled(i):
                self._report()
            elif self.ledger.is_running(i):
                self._passed[i] = self._made
            else:
                yield from self._evaluate(i)
            yield from self._catch_up(PATIENCE)
        yield from self._catch_up(0)

    def _excluded_s(self, index: int) -> float | None:
        """What a candidate takes at least that was not evaluated, once the search has come to its end."""
        return max(self.bounds[self.pool[index]], self._best_s()) if self.finished else None

    def _sampled(self, rounds: Rounds, seeds: Mapping[int, str]) -> Iterator[None]:
        """The search in rounds: others may be at another one, and take what they find of this one from the ledger."""
        rounds.begin(self.bounds, seeds, self.frontier.walk())
        self.finished = False
        while questions := rounds.ask(self.trials - len(self.order)):
            for last in (False, True):  # what others evaluate, when all else is done
                for question in questions:
                    if self._is_late():
                        return
                    yield
                    self.ledger.read()
                    if not last and question.bound_s is None:
                        self.order.append(question.index)
                    yield from self._answer(question, waits=not last)
            rounds.tell(questions, self.ledger.found)
        self.finished = rounds.is_done

    def _answer(self, question: Question, *, waits: bool) -> Iterator[None]:
        """Evaluate what is asked, or say that a bound excludes it; ``waits``: not what another search has claimed."""
        index = question.index
        told = self.ledger.found.get(index)
        if question.is_answered(told) or (waits and self.ledger.is_running(index)):
            self._report()
        elif question.bound_s is not None:
            at_least_s = question.bound_s
            self.ledger.claim(index, at_least_s)
            try:
                yield
                self.ledger.tell(index, Told(at_least_s=at_least_s))
            except (Exception, KeyboardInterrupt):
                self.ledger.release(index)
                raise
        else:
            yield from self._evaluate(index, question.limit_s)

    def _begin(self) -> None:
        """First bounds of all; where several processes are worth it, from here on they do the work.

        Not where the search ends before it is done: which candidates it came to would depend on timing.
        """
        is_whole = len(self.pool) <= self.trials and self.rounds is None
        if is_whole and len(self.pool) >= self.crew.many:
            self.crew.fork(dict.fromkeys(self.frontier.keys))
        self.frontier.begin()

    def _meet(self) -> None:
        """What other processes have found becomes known to all."""
        if not self.crew.is_forked:
            return
        own = {
            i: self.bounds[self.pool[i]]
            for split in self.frontier.parts
            if self._owns(split)
            for i in self.frontier.parts[split]
        }
        index = self._chosen()
        best = {index: self._plans[index]} if index in self._plans else {}
        orders: list[int] = []
        for bounds, found, order, finished, plans in self.crew.gather(
            (own, self.ledger.found, self.order, self.finished, best)
        ):
            self.bounds |= {self.pool[i]: bound for i, bound in bounds.items()}
            for i, told in found.items():
                self.ledger.tell(i, told)
            orders += order
            self.finished &= finished
            self._plans |= plans
        self.order = orders

    @property
    def open(self) -> list[Candidate]:
        """Candidates that may have a plan."""
        return [c for c in self.pool if math.isfinite(self.bounds[c])]

    def _catch_up(self, patience: int) -> Iterator[None]:
        """Evaluate what was passed over and still has no outcome ``patience`` evaluations later."""
        for i, before in list(self._passed.items()):
            if self._made - before < patience:
                return
            yield
            self.ledger.read()
            if not self._is_settled(i):
                if self._is_late():
                    self.finished = False
                    return
                yield from self._evaluate(i)
            del self._passed[i]

    def _evaluate(self, index: int, limit_s: float | None = None) -> Iterator[None]:
        """``limit_s``: that of a question; else what is faster than the best or as fast."""
        candidate = self.pool[index]
        self.ledger.claim(index, self.bounds[candidate])
        try:
            yield
            # what takes no longer than the best is told its own time: then it does not matter which was evaluated first
            at_most_s = self._best_s() * (1 + ROUNDING) if limit_s is None else limit_s
            found = self.evaluator.evaluate(candidate, at_most_s=at_most_s)
            self._made += 1
            if isinstance(found, Evaluation):
                self._plans[index] = found
            yield
            self.ledger.tell(index, _told(found, at_most_s))
        except (Exception, KeyboardInterrupt):
            self.ledger.release(index)
            raise
        self._report()

    def _close_gap(self) -> None:
        """Raise the least bounds of what may be faster than the best plan."""
        if math.isfinite(self.ledger.least_s):
            close_gap(self.pool, self.bounds, self.ledger.least_s, {*self.order}, self._closest_s)

    def _closest_s(self, index: int, goal_s: float) -> float:
        """Asked of the process that has worked out a candidate's layouts."""
        ask = partial(self.evaluator.closest_s, self.pool[index], goal_s)
        return self.crew.of_owner(self.frontier.keys[index], ask)

    def _owns(self, split: LayoutKey) -> bool:
        return self.crew.owner(split) == self.crew.rank

    def _explain_misfits(self) -> None:
        """What the least of the candidates that cannot fit would need."""
        lost = [i for i in range(len(self.pool)) if i not in self.ledger.found]
        found = [self.evaluator.hopeless(self.pool[i]) for i in lost]
        self._hopeless = [misfit for misfit in found if misfit is not None]
        for i in [i for i, misfit in zip(lost, found, strict=True) if misfit is None][:MAX_EXPLAINED]:
            for _ in self._evaluate(i):
                pass

    def _misfits(self) -> Iterator[Misfit]:
        for i, told in sorted(self.ledger.found.items()):
            if told.time_s is None:
                yield Misfit(candidate=self.pool[i], reason=told.reason or SLOW, needs_bytes=told.needs_bytes)

    # --- the best

    def _chosen(self) -> int | None:
        """Of the candidates of the least time the first of the pool: bounds may depend on which were asked for together."""
        limit_s = self._limit_s()
        timed = [(told.time_s, i) for i, told in self.ledger.found.items() if told.time_s is not None]
        return min((own for own in timed if own[0] < limit_s), default=(0.0, None))[1]

    def _best(self) -> Evaluation | None:
        """The plan of the chosen candidate, made here where another search found it."""
        index = self._chosen()
        if index is None:
            return None
        time_s, found = self.ledger.found[index].time_s, self._plans.get(index)
        assert time_s is not None
        if found is not None and found.prediction.step_time_s == time_s:
            return found
        again = self.evaluator.evaluate(self.pool[index])
        here = again.prediction.step_time_s if isinstance(again, Evaluation) else again.reason
        if not isinstance(again, Evaluation) or abs(again.prediction.step_time_s - time_s) > ROUNDING * time_s:
            raise UsageError("a study holds what this search would find", value=f"{time_s} s, here {here}",
                             place=str(self.pool[index]), remedy="take another study name or storage")  # fmt: skip
        return again

    def _best_s(self) -> float:
        """What a plan has to be faster than: ties within rounding are evaluated, for the order to decide."""
        return min(self.ledger.least_s * (1 + ROUNDING), self._limit_s())

    def _limit_s(self) -> float:
        most = self.limits.max_step_time_s
        return math.inf if most is None else math.nextafter(most, math.inf)

    def _is_settled(self, index: int) -> bool:
        told = self.ledger.found.get(index)
        return told is not None and told.settles(self._best_s())

    def _is_late(self) -> bool:
        late = self.limits.timeout_s is not None and time.monotonic() - self.start >= self.limits.timeout_s
        return late or self.crew.is_stopped or not self.is_wanted()

    def _report(self) -> None:
        if self.progress is not None and self.crew.rank == 0:
            best = f", best {self.ledger.least_s:.3g} s" if math.isfinite(self.ledger.least_s) else ""
            done = len(self.order) + self.crew.num_done
            self.progress(f"searching{best}", done, min(len(self.open), self.trials))


def on_device(pool: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those that count in saying whether a pool is large: with nothing on the host, where there are any."""
    return [candidate for candidate in pool if not candidate.on_host] or pool


def _told(found: Evaluation | Misfit, at_most_s: float) -> Told:
    """An outcome of an evaluation under a limit, above which times are not worked out to the end."""
    if isinstance(found, Evaluation):
        time_s = found.prediction.step_time_s
        if time_s < at_most_s:
            return Told(time_s=time_s, peak_memory_bytes=found.prediction.peak_memory_bytes)
        return Told(at_least_s=at_most_s)
    if found.reason == SLOW:
        return Told(at_least_s=at_most_s)
    return Told(reason=found.reason, needs_bytes=found.needs_bytes)

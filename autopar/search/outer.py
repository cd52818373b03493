"""The outer search: which candidates are evaluated, in which order, and when it may stop.

Branch and bound, best first: candidates come in order of their lower bound (:mod:`autopar.search.bounds`), and the search
stops when none is below the best plan found. Where there are too many to go on to the end, those with the least bounds
are evaluated.

The order depends on bounds alone, never on what was evaluated. Several searches of the same candidates can therefore
share one ledger (:mod:`autopar.search.ledger`): each goes through the same order, takes what others have found, passes
over what they are evaluating, and at the end evaluates what it passed over and what has still no outcome, whether its
owner is slow or dead. The plan is that of the candidate which one search alone would have chosen, whatever the number of
searches and their timing (``docs/adr/0010-one-order.md``). One search may also be several processes
(:mod:`autopar.search.crew`), each with the candidates of the layouts that it takes.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator, Sequence

from autopar.errors import UsageError
from autopar.search.candidates import Candidate
from autopar.search.closest import Closest
from autopar.search.collection import seldom_collected
from autopar.search.crew import Crew
from autopar.search.evaluate import SLOW, Evaluation, Evaluator, Misfit
from autopar.search.ledger import Ledger, Told
from autopar.search.options import Split, split_of
from autopar.search.outcome import Limits, Outcome, Progress

MAX_EXPLAINED = 24
"""Candidates of which it is worked out what memory they would need, where no plan fits."""

LEVELS = 2
"""Bounds that a candidate can have after its first one."""

FAR = 3.0
"""Times the least bound of all from which on layouts that need no solving are not looked at first."""

EARLY = 3
"""Candidates that are tried by their second bounds while there is no plan: third bounds are found sooner with a time to be below."""

SCOUTS = 8
"""Candidates by whose best one there is a first plan before the bounds of those of the same layouts are worked out, where
pipeline ranks differ."""

FEW_SAMPLES = 2
"""Of a micro-batch, up to which all layouts are looked at first where pipeline ranks differ."""

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
        ledger: Ledger | None = None,
        progress: Progress | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        crew: Crew | None = None,
    ) -> None:
        self.evaluator, self.pool = evaluator, tuple(pool)
        self.limits, self.progress, self.is_wanted = limits, progress, is_wanted
        self.crew = Crew() if crew is None else crew
        self.ledger = self.crew.ledger() if ledger is None else ledger
        on_device = sum(not candidate.on_host for candidate in self.pool) or len(self.pool)
        self.trials = limits.trials or (len(self.pool) if on_device <= exhaustive else trials)
        self.start = time.monotonic()
        self.bounds: dict[Candidate, float] = {}
        self.closest = Closest(evaluator, self.pool)
        self.order: list[int] = []  # positions in the pool, as the search came to them
        self.finished = True
        self._plans: dict[int, Evaluation] = {}
        self._hopeless: list[Misfit] = []
        self._made = 0
        self._passed: dict[int, int] = {}  # what others had claimed, with the evaluations made until then
        self._parts: dict[Split, list[int]] = {}  # positions of candidates that share their layouts

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
            if not self._parts:  # while first bounds are exchanged: there is no plan, and no meeting that all come to
                raise
            self.finished, interrupted = False, True
            self.crew.stop()
        self._meet()
        try:
            if not interrupted:
                self._sharpen()
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
            lower_bound_s=self.closest.least_s(self.bounds, self.ledger.found),
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
        self.ledger.read()
        for i in self._best_first():
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
            elif self.closest.is_slow(i, self._best_s()):
                self._report()
            else:
                yield from self._evaluate(i)
            yield from self._catch_up(PATIENCE)
        yield from self._catch_up(0)

    def _begin(self) -> None:
        """First bounds of all; where several processes are worth it, from here on they do the work.

        Not where the search ends before it is done: which candidates it came to would depend on timing.
        """
        if len(self.pool) <= self.trials and len(self.pool) >= self.crew.many:
            self.crew.fork(dict.fromkeys(self._split(i) for i in range(len(self.pool))))
        whole: dict[tuple[int, int], list[int]] = {}
        for i, candidate in enumerate(self.pool):
            whole.setdefault((candidate.micro_batch_size, candidate.mesh.ep_data), []).append(i)
        mine = sorted(i for own in self.crew.share(list(whole.values()), len) for i in own)
        bounds = self.evaluator.ideal_bounds_s([self.pool[i] for i in mine])
        first: dict[int, float] = {}
        for found, options in self.crew.gather((dict(zip(mine, bounds, strict=True)), self.evaluator.layouts.wholes)):
            first |= found
            self.evaluator.layouts.know(options)
        self.bounds = {candidate: first[i] for i, candidate in enumerate(self.pool)}
        alike: dict[Split, list[int]] = {}
        for i, candidate in enumerate(self.pool):
            if math.isfinite(self.bounds[candidate]):
                alike.setdefault(self._split(i), []).append(i)
        least_s = {split: min(self.bounds[self.pool[k]] for k in own) for split, own in alike.items()}
        tells = not self.evaluator.differs  # first bounds, of what is quick
        order = sorted(alike, key=lambda split: (not split.cp == split.tp == 1, tells * least_s[split]))
        self._parts = {split: alike[split] for split in order}

    def _split(self, index: int) -> Split:
        """Equal for candidates that share their layouts."""
        return split_of(self.pool[index].micro_batch_size, self.pool[index].mesh)

    def _meet(self) -> None:
        """What other processes have found becomes known to all."""
        if not self.crew.is_forked:
            return
        own = {i: self.bounds[self.pool[i]] for split in self._parts if self._owns(split) for i in self._parts[split]}
        index = self._chosen()
        best = {index: self._plans[index]} if index in self._plans else {}
        orders: list[int] = []
        for bounds, found, order, finished, plans, known in self.crew.gather(
            (own, self.ledger.found, self.order, self.finished, best, self.closest.known)
        ):
            self.bounds |= {self.pool[i]: bound for i, bound in bounds.items()}
            for i, told in found.items():
                self.ledger.tell(i, told)
            orders += order
            self.finished &= finished
            self._plans |= plans
            self.closest.known |= known
        self.order = orders

    @property
    def open(self) -> list[Candidate]:
        """Candidates that may have a plan."""
        return [c for c in self.pool if math.isfinite(self.bounds[c])]

    def _best_first(self) -> Iterator[int]:
        """Candidates that may be faster than the best plan, in order of their bounds and then of the pool.

        The first bound of a candidate needs no layout, the second the quickest one of each block, the third those that
        the prices of memory make best: each is asked for only when the one before it is the least of all. A search
        that is alone also tries the best of those that share their layouts as soon as it has their last bounds: the
        sooner there is a good plan, the fewer bounds are asked for. What is chosen in the end is the same.
        """
        heap = [(self.bounds[c], 0, i) for i, c in enumerate(self.pool) if math.isfinite(self.bounds[c])]
        heapq.heapify(heap)
        level = {i: 0 for _, _, i in heap}
        given = set[int]()
        far_s = FAR * min((bound for bound, _, _ in heap), default=0.0)
        for split, own in self._parts.items():
            near = split.cp == split.tp == 1 and min(self.bounds[self.pool[k]] for k in own) < far_s
            # nothing to solve: a first plan to be faster than costs little; where ranks differ, first bounds tell too
            # little, and the pipelines with the most micro-batches give a good one
            first = near or (split.micro_batch_size <= FEW_SAMPLES and self.evaluator.differs)
            if first and self.crew.takes(split):
                self._raise(own, 0, level, heap)
                if self.evaluator.differs and math.isinf(
                    self._best_s()
                ):  # bounds cost many times less where there is a time to be below
                    few = heapq.nsmallest(SCOUTS, own, key=lambda k: (self.bounds[self.pool[k]], k))
                    self._raise(few, 1, level, heap)
                    yield from self._dive(few, given)
                self._raise(own, 1, level, heap)
                yield from self._dive(own, given)
                if near and math.isfinite(self._best_s()):  # the next one costs little too, and is often faster
                    yield from self._dive([k for k in own if k not in given], given)
        tried = 0
        while heap:
            bound, made, i = heapq.heappop(heap)
            if bound >= self._best_s():
                return
            if made < level[i] or i in given or not self.crew.takes(self._split(i)):
                continue
            if made == LEVELS:
                given.add(i)
                yield i
                continue
            mine = self._parts[self._split(i)]
            self._raise(mine, made, level, heap)
            early = made + 1 < LEVELS and math.isinf(self._best_s()) and tried < EARLY
            tried += early
            if early or made + 1 == LEVELS:
                yield from self._dive(mine, given)

    def _raise(
        self, places: Sequence[int], made: int, level: dict[int, int], heap: list[tuple[float, int, int]]
    ) -> None:
        """The next bound of those of these candidates that have ``made`` and may still be the best."""
        best_s = self._best_s()
        asked = [k for k in places if level[k] == made and self.bounds[self.pool[k]] < best_s]
        some = [self.pool[k] for k in asked]
        ask = self.evaluator.least_bounds_s if made == 0 else self.evaluator.bounds_s
        found = ask(some, best_s)
        for k, bound in zip(asked, found, strict=True):
            level[k] = made + 1
            self.bounds[self.pool[k]] = max(self.bounds[self.pool[k]], bound)
            if math.isfinite(bound):
                heapq.heappush(heap, (self.bounds[self.pool[k]], made + 1, k))

    def _dive(self, places: Sequence[int], given: set[int]) -> Iterator[int]:
        """The one that may be the best of these; not where the order is shared, in which it would depend on timing."""
        first = min(places, key=lambda k: (self.bounds[self.pool[k]], k), default=-1)
        if first < 0:
            return
        if not self.ledger.is_shared and first not in given and self.bounds[self.pool[first]] < self._best_s():
            given.add(first)
            yield first

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

    def _evaluate(self, index: int) -> Iterator[None]:
        candidate = self.pool[index]
        self.ledger.claim(index, self.bounds[candidate])
        try:
            yield
            # what takes no longer than the best is told its own time: then it does not matter which was evaluated first
            at_most_s = self._best_s() * (1 + ROUNDING)
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

    def _sharpen(self) -> None:
        """The last bounds of what may be faster than the best, which were asked for before it was known; then closer ones."""
        best_s = self._best_s()
        if math.isinf(best_s):
            return
        asked = {c: i for i in self.order if self.bounds[c := self.pool[i]] < best_s}
        mine = [c for c, i in asked.items() if self._owns(self._split(i))]
        known = dict(zip(mine, self.evaluator.known_bounds_s(mine, best_s), strict=True))
        for found in self.crew.gather(known):
            self.bounds |= {c: max(self.bounds[c], bound) for c, bound in found.items()}
        self.closest.raise_least(self.bounds, self.ledger.found, best_s, asked, self._of_owner)

    def _of_owner(self, index: int, ask: Callable[[], float]) -> float:
        """Asked of the process that has worked out a candidate's layouts."""
        return self.crew.of_owner(self._split(index), ask)

    def _owns(self, split: Split) -> bool:
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

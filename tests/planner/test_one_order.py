"""Searches that share a ledger choose what one search alone chooses, however they interleave and whichever die."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.planner.branch_and_bound.branch_and_bound import PATIENCE, BranchAndBound
from autopar.planner.branch_and_bound.frontier import Result
from autopar.planner.evaluate.evaluator import Evaluator
from autopar.planner.search import SLOW, Evaluation, Limits, Misfit
from autopar.planner.space.candidates import Candidate
from tests.support.planner.interleaved import Board, Known, View, candidate, in_turns, interleave


def search(known: Known, ledger: View | None = None, **limits: Any) -> BranchAndBound:
    pool = [candidate(i) for i in range(len(known.bounds))]
    return BranchAndBound(cast("Evaluator", known), pool, limits=Limits(**limits), ledger=ledger)


def chosen(found: BranchAndBound) -> int | None:
    best = found.run().best
    return None if best is None else best.candidate.mesh.dp_shard - 1


@st.composite
def problems(draw: st.DrawFn) -> Known:
    """Few different numbers, so that bounds and times tie; some bounds are above their times by rounding."""
    n = draw(st.integers(1, 24))
    bounds = draw(st.lists(st.integers(1, 6).map(float), min_size=n, max_size=n))
    above = draw(st.lists(st.sampled_from([0.0, 0.0, 1.0, 2.0, -1e-9, 1e-9, float("inf")]), min_size=n, max_size=n))
    times = [b * (1 + a) for b, a in zip(bounds, above, strict=True)]
    return Known(bounds=bounds, times=times)


@given(
    known=problems(),
    workers=st.integers(1, 4),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40)), max_size=120),
    trials=st.none() | st.integers(1, 10),
)
def test_any_interleaving_with_deaths_gives_the_choice_of_one(
    known: Known, workers: int, turns: list[tuple[int, int]], trials: int | None
) -> None:
    """A turn is a worker's next step; one in forty kills it, wherever it stands, with its claim left behind."""
    alone = chosen(search(Known(known.bounds, known.times), View(Board()), trials=trials))
    if trials is None:  # else a search without a study spends some of them out of order
        assert chosen(search(Known(known.bounds, known.times))) == alone
    board = Board()

    def make(known: Known) -> BranchAndBound:
        return search(known, View(board), trials=trials)

    running = {w: in_turns(known, make)[1] for w in range(1, workers)}
    last, last_turns = in_turns(known, make)
    interleave(turns, running, last_turns, deadly=40)
    index = last._best_index()
    assert index == alone


@pytest.mark.parametrize(
    ("bounds", "times", "choice"),
    [
        ([3.0, 2.0, 2.0], [3.0, 3.0, 3.0], 0),  # ties go to the first of the pool, though others come first
        ([1.0, 2.0], [2.0, 2.0 - 2e-9], 1),  # a bound of 2.0 does not end a search that has found 2.0
        ([2.0 - 1e-9, 2.0], [2.0, 2.0 - 2e-9], 1),
        ([1.0, 1.5], [2.0, 2.0 - 1e-9], 1),  # just below the best
    ],
)
def test_one_search_chooses_as_several_do(bounds: list[float], times: list[float], choice: int) -> None:
    board = Board(results=[(1, Result(time_s=times[1]))])
    assert chosen(search(Known(bounds, times), View(board))) == chosen(search(Known(bounds, times))) == choice


def test_what_others_found_is_not_evaluated_again() -> None:
    known = Known(bounds=[1.0, 1.0, 1.0, 5.0], times=[2.0, 3.0, float("inf"), 6.0])
    board = Board()
    first = search(known, View(board))
    assert chosen(first) == 0
    again = search(Known(known.bounds, known.times), View(board))
    outcome = again.run()
    assert outcome.best is not None
    assert outcome.evaluated == 3
    assert [m.reason for m in outcome.misfits] == [SLOW, "memory"]
    assert again.evaluator.asked == [0]  # type: ignore[attr-defined]  the winner, for its plan


def test_a_slow_candidate_of_a_stricter_search_is_evaluated_by_a_laxer_one() -> None:
    known = Known(bounds=[1.0, 1.5], times=[2.0, 3.0])
    board = Board()
    strict = search(known, View(board), max_step_time_s=1.75)
    assert chosen(strict) is None
    assert chosen(search(known, View(board))) == 0


def test_claims_of_the_dead_are_taken_over_after_a_while() -> None:
    """The best candidate is claimed and never told: few of the worse ones are evaluated before it."""
    known = Known(bounds=[1.0] + [1.5] * 100, times=[1.25] + [9.0] * 100)
    board = Board(claimed={0: 1})
    found = search(known, View(board))
    assert chosen(found) == 0
    assert len(set(known.asked)) == 1 + PATIENCE


def test_an_interrupt_gives_the_best_so_far_and_gives_back_its_claim() -> None:
    class Interrupted(Known):
        def evaluate(self, found: Candidate, *, at_most_s: float = float("inf")) -> Evaluation | Misfit:
            if self._index(found) == 2:
                raise KeyboardInterrupt
            return super().evaluate(found, at_most_s=at_most_s)

    known = Interrupted(bounds=[1.0, 1.5, 2.0, 2.5], times=[4.0, 3.0, 2.5, 2.75])
    board = Board()
    outcome = search(known, View(board)).run()
    assert outcome.best is not None
    assert outcome.best.prediction.step_time_s == 3.0
    assert outcome.interrupted
    assert not outcome.finished
    assert not board.claimed
    with pytest.raises(KeyboardInterrupt):
        search(Interrupted(bounds=[3.0, 3.0, 1.0], times=[float("inf"), 4.0, 4.0])).run()


def test_times_of_another_evaluator_are_refused() -> None:
    board = Board(results=[(0, Result(time_s=1.5))])
    with pytest.raises(UsageError, match=r"holds 1\.5 s .* takes 2\.0 s here\. Take another study name"):
        search(Known(bounds=[1.0], times=[2.0]), View(board)).run()

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.trial import TrialState

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.plan.mesh import Mesh
from autopar.planner.branch_and_bound.branch_and_bound import PATIENCE, BranchAndBound
from autopar.planner.branch_and_bound.frontier import Result
from autopar.planner.branch_and_bound.optuna_sampler import Encoding, Sampler
from autopar.planner.branch_and_bound.sampling import Sampling
from autopar.planner.planner import Planner
from autopar.planner.search import SLOW, Evaluation, Limits, Misfit
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.preferences import rules, seeds
from autopar.planner.space.space import SamplerName, load_space
from tests.support.planner.interleaved import Board, Known, View, candidate, interleave
from tests.support.planner.tasks import task_of
from tests.support.said import refuses


def search(known: Known, ledger: View | None = None, **limits: Any) -> BranchAndBound:
    pool = [candidate(i) for i in range(len(known.bounds))]
    return BranchAndBound(known, pool, limits=Limits(**limits), ledger=ledger)


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
def test_interleaved_searches_choose_as_one(
    known: Known, workers: int, turns: list[tuple[int, int]], trials: Any
) -> None:
    """A turn is a worker's next step; one in forty kills it, wherever it stands, with its claim left behind."""
    alone = chosen(search(Known(known.bounds, known.times), View(Board()), trials=trials))
    if trials is None:  # else a search without a study spends some of them out of order
        assert chosen(search(Known(known.bounds, known.times))) == alone
    board = Board()
    last = interleave(known, lambda known: search(known, View(board), trials=trials), workers, turns, deadly=40)
    assert last._best_index() == alone


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


def test_what_others_found_is_not_evaluated_again_but_what_was_slow_for_a_stricter_search() -> None:
    known = Known(bounds=[1.0, 1.0, 1.0, 5.0], times=[2.0, 3.0, float("inf"), 6.0])
    board = Board()
    assert chosen(search(known, View(board))) == 0
    again = search(Known(known.bounds, known.times), View(board))
    outcome = again.run()
    assert outcome.best is not None and outcome.evaluated == 3
    assert [m.reason for m in outcome.misfits] == [SLOW, "memory"]
    assert again.evaluator.asked == [0]  # the winner, for its plan
    known = Known(bounds=[1.0, 1.5], times=[2.0, 3.0])
    board = Board()
    assert chosen(search(known, View(board), max_step_time_s=1.75)) is None
    assert chosen(search(known, View(board))) == 0


def test_claims_of_the_dead_are_taken_over_after_a_while() -> None:
    """The best candidate is claimed and never told: few of the worse ones are evaluated before it."""
    known = Known(bounds=[1.0] + [1.5] * 100, times=[1.25] + [9.0] * 100)
    board = Board(claimed={0: 1})
    assert chosen(search(known, View(board))) == 0
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
    assert outcome.best.prediction.step_time_s == 3.0
    assert outcome.interrupted and not outcome.finished
    assert not board.claimed
    with pytest.raises(KeyboardInterrupt):
        search(Interrupted(bounds=[3.0, 3.0, 1.0], times=[float("inf"), 4.0, 4.0])).run()


def test_times_of_another_evaluator_are_refused() -> None:
    board = Board(results=[(0, Result(time_s=1.5))])
    said = r"holds 1\.5 s .* takes 2\.0 s here\. Take another study name"
    refuses(UsageError, said, search(Known(bounds=[1.0], times=[2.0]), View(board)).run)


# --- with a sampler

NEEDS_CMAES = pytest.mark.skipif(find_spec("cmaes") is None, reason="needs cmaes: pip install 'autopar[cmaes]'")
KINDS = ["tpe", "nsga2", pytest.param("cmaes", marks=NEEDS_CMAES)]
TRIALS = 20


def distinct(index: int) -> Candidate:
    """No two have equal choices; ``dp_shard`` says which it is."""
    pp, schedule = 1 + index % 4, "1F1B" if index % 4 else "none"
    mesh = Mesh(tp=1 + index % 3, pp=pp, dp_shard=1 + index)
    return Candidate(
        mesh=mesh, micro_batch_size=1 + index % 2, num_micro_batches=1, zero_stage=index % 4, schedule=schedule,
        virtual_stages=1,
    )  # fmt: skip


class Seeded(Sampling):
    __slots__ = ()

    def seeds(self, pool: Sequence[Candidate], may_fit: Any) -> dict[int, str]:
        return {i: "rule" for i in (len(pool) // 2, len(pool) - 1) if may_fit(i)}


def sampled(
    known: Known, ledger: View | None, kind: SamplerName, *, seed: int = 0, trials: int = TRIALS
) -> BranchAndBound:
    options: Any = {"limits": Limits(trials=trials), "ledger": ledger, "sampling": Seeded(kind=kind, seed=seed)}
    return BranchAndBound(known, [distinct(i) for i in range(len(known.bounds))], **options)


def loose(seed: int, size: int = 60) -> Known:
    """Bounds that say little: far below the times, and in another order."""
    rng = np.random.default_rng(seed)
    times = rng.uniform(1.0, 3.0, size)
    times[rng.random(size) < 0.2] = np.inf
    bounds = np.where(np.isinf(times), 0.5, times) * rng.uniform(0.2, 0.9, size)
    return Known(bounds=bounds.tolist(), times=times.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(
    problem=st.integers(0, 10),
    workers=st.integers(1, 4),
    turns=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=150),
)
@settings(max_examples=15, deadline=None)
def test_interleaved_searches_plan_as_one(kind: SamplerName, problem: int, workers: int, turns: list[Any]) -> None:
    """A turn is a worker's next step; one in sixty kills it, wherever it stands, with its claim left behind."""
    known = loose(problem)
    alone = sampled(Known(known.bounds, known.times), None, kind)
    alone.work()
    board = Board()
    last = interleave(known, lambda known: sampled(known, View(board), kind), workers, turns, deadly=60)
    assert (last.order, last._best_index(), last.finished) == (alone.order, alone._best_index(), alone.finished)


def test_another_seed_asks_for_others() -> None:
    one, other = (sampled(loose(3), None, "tpe", seed=seed) for seed in (0, 1))
    one.work()
    other.work()
    assert one.order != other.order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("problem", range(6))
def test_nothing_is_asked_twice_or_evaluated_that_a_bound_excludes(kind: SamplerName, problem: int) -> None:
    known = loose(problem)
    known.bounds = [min(b * 1.5, t) for b, t in zip(known.bounds, known.times, strict=True)]
    board = Board()
    made = sampled(known, View(board), kind, trials=40)
    made.work()
    for found in (made.order, known.asked):
        assert len(set(found)) == len(found)
    assert made.order[:2] == [30, 59][: len(made.order)] or np.isinf(known.times[30]) or np.isinf(known.times[59])
    first = [known.times[i] for i in (30, 59) if i in known.asked]
    for i in known.asked[2:]:
        assert known.bounds[i] * 0.5 < min(first) * (1 + 1e-6)
    for i, result in [(i, result) for i, result in board.results if i not in known.asked]:  # with a bound that holds
        assert result.at_least_s <= known.times[i]
    if made.finished:
        assert min(known.times) == min(known.times[i] for i in known.asked)


@pytest.mark.parametrize("kind", KINDS)
def test_where_bounds_are_tight_the_search_ends_with_the_best(kind: SamplerName) -> None:
    known = loose(5)
    known.bounds = [0.95 * t if np.isfinite(t) else np.inf for t in known.times]
    made = sampled(known, None, kind, trials=1000)
    outcome = made.run()
    assert outcome.finished
    assert outcome.lower_bound_s <= min(known.times) == outcome.best.prediction.step_time_s
    assert len(made.order) < 30


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_alone_asks_for_everything_once(kind: SamplerName) -> None:
    pool = [distinct(i) for i in range(40)]
    sampler = Sampler(kind, pool, seed=0)
    sampler.enqueue(7, "rule")
    sampler.enqueue(9, "rule")
    bounds = np.where(np.arange(40) == 9, 5.0, 0.0)
    asked = []
    while (index := sampler.ask(bounds, 4.0)) is not None:
        asked.append(index)
        sampler.tell(index, [1.0 + index] if index % 3 else None, 4.0 if index % 2 else np.inf)
    assert asked[0] == 7 and sorted(asked) == [i for i in range(40) if i != 9]
    trials = sampler.study.get_trials(deepcopy=False)
    (pruned,) = [t for t in trials if t.intermediate_values == {0: 5.0}]
    assert (pruned.state, pruned.params) == (TrialState.PRUNED, sampler.encoding.params(9))
    outside = [t for t in trials if "reason" in t.user_attrs]
    assert outside and all(t.state == TrialState.FAIL and t.value is None for t in outside)
    assert {t.state for t in trials} <= {TrialState.PRUNED, TrialState.FAIL, TrialState.COMPLETE}


@pytest.mark.parametrize("is_numeric", [False, True])
def test_the_nearest_candidate_to_its_own_values_is_itself(is_numeric: bool) -> None:
    pool = [distinct(i) for i in range(40)]
    encoding = Encoding(pool, is_numeric=is_numeric)
    for i in range(40):
        own = encoding.params(i)
        distances = encoding.distances(own)
        assert int(distances.argmin()) == i and distances[i] < 1e-9
        assert np.delete(distances, i).min() > 0.01
        trial = optuna.trial.create_trial(params=own, distributions=encoding.distributions, value=1.0)
        assert trial.params == own
    is_float = {k: isinstance(d, optuna.distributions.FloatDistribution) for k, d in encoding.distributions.items()}
    assert is_float["tp"] == is_float["zero"] == is_numeric and not is_float["schedule"]


@pytest.mark.skipif(find_spec("cmaes") is not None, reason="cmaes is installed")
def test_a_sampler_whose_package_is_missing_is_named_with_the_remedy(graph: Graph) -> None:
    space = replace(load_space("quick"), sampler="cmaes", exhaustive=1)
    said = r"Missing package cmaes.* pip install 'autopar\[cmaes\]'"
    refuses(UsageError, said, Planner(task_of(graph, space=space)).search, limits=Limits())


def planner_of(graph: Graph, sampler: SamplerName, trials: int = 12) -> Planner:
    space = replace(load_space("default"), sampler=sampler, exhaustive=1, trials=trials)
    return Planner(task_of(graph, space=space))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_real_pool_the_plan_is_no_worse_than_by_bounds_alone(graph: Graph, kind: SamplerName) -> None:
    plain, tuned = planner_of(graph, "none"), planner_of(graph, kind)
    before, after = plain.branch_and_bound(Limits()).run(), tuned.branch_and_bound(Limits()).run()
    assert len(plain.pool) > 4 * TRIALS - 10
    assert after.best.prediction.step_time_s <= before.best.prediction.step_time_s
    every = [e for c in plain.pool if isinstance(e := plain.evaluator.evaluate(c), Evaluation)]
    least_s = min(e.prediction.step_time_s for e in every)
    assert after.lower_bound_s <= least_s * (1 + 1e-9)
    assert least_s <= after.best.prediction.step_time_s


def test_seeds_are_what_the_rules_say_of_the_pool(graph: Graph) -> None:
    planner = planner_of(graph, "tpe")
    found = seeds(planner.pool, 4, lambda i: True)
    texts = [str(planner.pool[i]) for i in found]
    assert texts[0] == "dp_shard=4, zero=1, micro_batch=1"
    assert set(found.values()) <= {rule.name for rule in rules(4)} and len(found) >= 3
    assert seeds(planner.pool, 4, lambda i: False) == {}
    fsdp = next(i for i in found if "torchtitan" in found[i])
    assert planner.pool[fsdp].zero_stage == 3
    smaller = seeds(planner.pool, 4, lambda i: planner.pool[i].micro_batch_size < planner.pool[fsdp].micro_batch_size)
    (least,) = [i for i in smaller if "torchtitan" in smaller[i]]
    assert planner.pool[least].micro_batch_size < planner.pool[fsdp].micro_batch_size


def test_a_share_of_nothing_for_bounds_ends_when_all_is_asked() -> None:
    known = loose(2, 20)
    sampling = Sampling(kind="tpe", by_bounds=0, by_sampler=8)
    pool = [distinct(i) for i in range(20)]
    outcome = BranchAndBound(known, pool, limits=Limits(trials=1000), sampling=sampling).run()
    assert outcome.finished and outcome.best.prediction.step_time_s == min(known.times)

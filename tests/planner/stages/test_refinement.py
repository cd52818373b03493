from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.plan.plan import Recompute
from autopar.planner.planner import Planner
from autopar.planner.search import Evaluation, Misfit
from autopar.planner.space.candidates import Candidate
from autopar.planner.space.space import load_space
from autopar.planner.stages.cut_problem import CutProblem, Fitting, allows, evenly, fitted
from autopar.planner.stages.exchange import exchanged
from autopar.planner.stages.recompute import Mode
from autopar.planner.stages.refinement import RankCovers, improved, refined
from tests.support.clusters import two_kinds
from tests.support.planner.graphs import family, mlp
from tests.support.planner.tasks import planner_of

TWO: tuple[Recompute, ...] = ("none", "full")
THREE: tuple[Recompute, ...] = ("none", "selective", "full")

# memory for some of the recompute of 16 layers; a short step, and a long one whose choices are compared when it has begun
CASES = [(modes, batch, memory) for modes in (TWO, THREE) for batch in (16, 64) for memory in ("431MB", "433MB")]
BY_CASE = pytest.mark.parametrize(("modes", "batch", "memory"), CASES, ids=lambda own: str(own).replace("'", ""))
Better = Callable[[CutProblem, Fitting], Fitting]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return family("gpt:layers=16,hidden=64,heads=4,vocab=512", 64)


def planner(graph: Graph, cluster: Cluster, modes: tuple[Recompute, ...], batch: int, pins: list[str]) -> Planner:
    space = replace(load_space("default"), recompute=modes, max_enumerated=0)
    return planner_of(graph, *pins, cluster=cluster, global_batch_size=batch, space=space)


def of_equal_ranks(graph: Graph, modes: tuple[Recompute, ...], batch: int, memory: str) -> Planner:
    pins = ["pp=4", "schedule=Interleaved1F1B", "tp=1", "micro_batch=2"]
    return planner(graph, Cluster.parse(f"cpu:1x4?memory={memory}"), modes, batch, pins)


def of_two_kinds() -> Planner:
    memory = 400 * 2**20 + 3_000_000
    cluster = two_kinds(factor=3.0, slow_memory=memory, fast_memory=memory)
    return planner(mlp(layers=8, batch=2, width=64, hidden=256), cluster, THREE, 16, [])


def problems(made: Planner) -> Iterator[CutProblem]:
    """All candidates with a pipeline in all their layouts."""
    evaluator = made.evaluator
    for candidate in made.pool:
        if candidate.mesh.pp > 1:
            for typed in evaluator.context.known_layouts(candidate):
                yield evaluator.plans.problem(candidate, evaluator.layouts.price(typed))


def cuts(made: Planner) -> Iterator[tuple[CutProblem, Fitting]]:
    for problem in problems(made):
        for allowed in problem.allowed_stages:
            found = fitted(problem, allowed)
            if isinstance(found, Fitting):
                yield problem, found


def by_exchanges(problem: CutProblem, found: Fitting) -> Fitting:
    return exchanged(problem, found, problem.time_s(found))


def check_never_slower(made: Planner, better: Better) -> None:
    """What ``better`` makes of a cut fits and is never slower, of some cuts quicker."""
    quicker = 0
    for problem, found in cuts(made):
        assert problem.fits(found)
        other = better(problem, found)
        assert other.stops == found.stops
        assert problem.fits(other)
        before_s, after_s = problem.time_s(found), problem.time_s(other)
        assert after_s <= before_s
        quicker += after_s < before_s
    assert quicker


@pytest.mark.parametrize("better", [refined, by_exchanges])
@BY_CASE
def test_recompute_that_is_chosen_again_fits_and_is_never_slower(
    graph: Graph, modes: tuple[Recompute, ...], batch: int, memory: str, better: Better
) -> None:
    check_never_slower(of_equal_ranks(graph, modes, batch, memory), better)


def test_refined_recompute_fits_and_is_never_slower_where_devices_differ() -> None:
    check_never_slower(of_two_kinds(), refined)


def tight_cuts(graph: Graph) -> Iterator[tuple[CutProblem, Fitting]]:
    """Two stages a rank, on two devices with memory for some of what blocks keep that do not recompute."""
    pins = ["pp=2", "schedule=Interleaved1F1B", "tp=1", "micro_batch=2", "virtual_stages=2"]
    free, cut = next(cuts(planner(graph, Cluster.parse("cpu:1x2?memory=2GB"), TWO, 16, pins)))
    lean = free.fitting(cut.stops, ["full"] * free.num_blocks)
    most, least = (max(memory.total for memory in own.memory) for own in (cut, lean))
    for share in (0.2, 0.5, 0.8):
        memory = (least + share * (most - least)) * free.model.memory_spread
        yield from cuts(planner(graph, Cluster.parse(f"cpu:1x2?memory={memory / 1e6:.3f}MB"), TWO, 16, pins))


def choices(problem: CutProblem, found: Fitting) -> Iterator[tuple[tuple[int, ...], Fitting]]:
    """Every number of blocks that recompute on each stage of a cut, and the cut with them."""
    edges = [0, *found.stops]
    for counts in product(*(range(size + 1) for size in np.diff(edges))):
        modes: list[Mode] = [*problem.quickest_modes(found.stops)]
        for start, count in zip(edges, counts, strict=False):
            modes[start : start + count] = ["full"] * count
        yield counts, problem.fitting(found.stops, modes)


def test_no_other_choice_of_two_modes_takes_less_of_its_rank(graph: Graph) -> None:
    compared = 0
    for problem, found in tight_cuts(graph):
        fewest = [float("inf")] * problem.pp
        for counts, made in choices(problem, found):
            spare = problem.spare_bytes(made)
            for rank in range(problem.pp):
                if spare[rank] >= 0:
                    fewest[rank] = min(fewest[rank], sum(counts[rank :: problem.pp]))
        edges, modes = [0, *found.stops], refined(problem, found).modes
        for rank in range(problem.pp):
            stages = range(rank, problem.num_stages, problem.pp)
            own = sum(modes[edges[s] : edges[s + 1]].count("full") for s in stages)
            assert own <= fewest[rank] + 1  # at most the last step of a cover more
        compared += "full" in found.modes
    assert compared


def test_exchanges_regain_what_the_worst_choice_loses(graph: Graph) -> None:
    for problem, found in tight_cuts(graph):
        every = [(problem.time_s(made), made) for _, made in choices(problem, found) if problem.fits(made)]
        (best_s, _), (worst_s, worst) = (choose(every, key=lambda one: one[0]) for choose in (min, max))
        assert worst_s > 1.05 * best_s
        assert problem.time_s(by_exchanges(problem, worst)) - best_s < 0.2 * (worst_s - best_s)


@BY_CASE
def test_a_plan_is_one_whatever_is_known(graph: Graph, modes: tuple[Recompute, ...], batch: int, memory: str) -> None:
    """Searches that share their work know other times at the same candidate, whatever the number of their processes."""

    def evaluated(candidate: Candidate, at_most_s: float = float("inf")) -> Evaluation | Misfit:
        return of_equal_ranks(graph, modes, batch, memory).evaluator.evaluate(candidate, at_most_s=at_most_s)

    for candidate in of_equal_ranks(graph, modes, batch, memory).pool:
        found = evaluated(candidate)
        for factor in (1.5, 1.02, 1.001, 1 + 1e-8):
            again = evaluated(candidate, found.time_s * factor)
            assert again.prediction == found.prediction
            assert (again.stops, again.modes, again.bucket_bytes) == (found.stops, found.modes, found.bucket_bytes)
        for factor in (1.0, 0.999, 0.9):
            slow = evaluated(candidate, factor * found.time_s)
            assert not isinstance(slow, Evaluation) or slow.time_s >= factor * found.time_s


def test_a_cut_is_never_below_its_bound(graph: Graph) -> None:
    for problem, found in [*cuts(of_equal_ranks(graph, THREE, 16, "433MB")), *cuts(of_two_kinds())]:
        assert problem.busy_s(found.stops, found.modes) <= problem.time_s(found) * (1 + 1e-9)


def test_what_ranks_recompute_is_the_same_remembered_from_other_cuts(graph: Graph) -> None:
    """Of all cuts in which a block of even stages has moved: memory as the memory model counts it, modes as of a cut alone."""
    some = 0
    for made in (of_equal_ranks(graph, THREE, 16, "433MB"), of_two_kinds()):
        for problem in [own for own in problems(made) if own.candidate.virtual_stages == 2]:
            sizes = np.diff((0, *evenly(problem.num_blocks, problem.num_stages)))
            one, covers = np.eye(len(sizes), dtype=int), RankCovers(problem)
            for less, more in product(np.flatnonzero(sizes > 1).tolist(), range(len(sizes))):
                stops = tuple(np.cumsum(sizes - one[less] + one[more]).tolist())
                found, alone = covers.fitting(stops), RankCovers(problem).fitting(stops)
                assert (found is None) == (alone is None)
                if found is not None and alone is not None:
                    again = problem.fitting(stops, alone.modes)
                    assert problem.fits(again)
                    assert (found.stops, found.modes, found.memory) == (stops, alone.modes, again.memory)
                    assert found.stages == again.stages
                    some += {*found.modes} > {"none"}
    assert some


@pytest.mark.slow
def test_local_search_shortens_the_step_and_keeps_what_is_allowed(graph: Graph) -> None:
    shorter = 0
    for made in (of_equal_ranks(graph, TWO, 16, "600MB"), of_two_kinds()):
        for problem in problems(made):
            stops = evenly(problem.num_blocks, problem.num_stages)
            first = problem.fitting(stops, problem.quickest_modes(stops))
            masks = problem.masks()
            if not problem.fits(first) or not any(allows(own, stops) for own in masks):
                continue
            time_s = problem.time_s(first)
            quick = improved(problem, first, time_s, is_quick=True)
            found = improved(problem, first, time_s)
            assert problem.fits(quick) and problem.time_s(found) <= problem.time_s(quick) <= time_s
            assert problem.fits(found)
            assert np.diff((0, *found.stops)).min() >= 1
            assert any(allows(own, found.stops) for own in masks)
            shorter += problem.time_s(found) < time_s
    assert shorter

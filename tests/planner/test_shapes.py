from dataclasses import replace
from typing import Any

import pytest

from autopar.cost.operators.operator_times import Recorder, decode, key_of
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.link import OperatorTable, OperatorTime
from autopar.planner.planner import Planner, operator_calls
from autopar.planner.search import Evaluation, Limits, Misfit
from tests.support.clusters import two_kinds, with_device
from tests.support.planner.graphs import family, mlp
from tests.support.planner.tasks import planner_of

CLUSTER = Cluster.parse("cpu:1x4")


@pytest.fixture(scope="module")
def graph() -> Graph:
    return family("gpt:layers=4,hidden=32,heads=4,vocab=64", 16)


def planner(graph: Graph, cluster: Cluster = CLUSTER, pins: tuple[str, ...] = ()) -> Planner:
    return planner_of(graph, *pins, cluster=cluster, global_batch_size=8)


def test_what_is_collected_is_what_planning_every_candidate_asks_for(graph: Graph) -> None:
    collected = {key_of(*decode(call)) for call in operator_calls(planner(graph))}
    asking = planner(graph)
    recorder = asking.model.measured = Recorder()
    for candidate in asking.pool:
        asking.evaluator.evaluate(candidate)
    assert {c.mesh.tp for c in asking.pool} == {1, 2, 4}
    assert set(recorder.calls) == collected


def test_every_share_of_a_batch_is_collected(graph: Graph) -> None:
    made = planner(graph, two_kinds(1, 1), ("data_shares!=equal",))
    sizes = {share for candidate in made.pool for share in candidate.shares}
    assert {2, 3, 5} <= sizes  # 2 is one by which shares are chosen, before operators are collected
    calls = operator_calls(made)
    counts = {sum(f"[{size},16,32]" in call for call in calls) for size in sizes - {1}}
    assert len(counts) == 1 and min(counts) > 5  # one sample has the shape of positions, too


def test_a_plan_on_measured_operators_says_so_and_costs_what_they_take(graph: Graph) -> None:
    calls = operator_calls(planner(graph, pins=("tp=1",)))
    times = tuple(OperatorTime(call=call, forward_s=1e-3, backward_s=2e-3) for call in calls)
    cluster = with_device(CLUSTER, operators=OperatorTable(times=times, provenance="example"))
    plan = planner(graph, cluster, ("tp=1", "pp=1", "micro_batch=2")).estimate()
    (note,) = [n for n in plan.notes if "measured" in n]
    said, of = note.split(" of ")[0].split()[-1], note.split(" of ")[1].split()[0]
    assert said == of
    compute_s = plan.predicted.breakdown.compute_s
    assert compute_s / plan.num_micro_batches == pytest.approx(int(of) * 3e-3, rel=0.05)
    split = planner(graph, cluster, ("tp=4", "pp=1")).estimate()
    (note,) = [n for n in split.notes if "measured" in n]
    assert "interpolated" in note or "scaled" in note
    assert not [n for n in planner(graph, pins=("tp=4", "pp=1")).estimate().notes if "measured" in n]


@pytest.mark.parametrize("quicker", [2, 4])
def test_the_best_is_found_when_parts_are_quicker_than_their_share(graph: Graph, quicker: int) -> None:
    """Whole operators take long, parts of one degree a tenth, of the other a thousandth: no bound may count on shares."""
    keys = {tp: {key_of(*decode(c)): c for c in operator_calls(planner(graph, pins=(f"tp={tp}",)))} for tp in (1, 2, 4)}
    seconds = {2: 1e-4, 4: 1e-4, quicker: 1e-6, 1: 1e-1}
    times = {c: seconds[tp] for tp in (4, 2, 1) for c in keys[tp].values()}  # unsplit ones are those of tp=1
    entries = tuple(OperatorTime(call=call, forward_s=s, backward_s=s) for call, s in times.items())
    cluster = with_device(CLUSTER, operators=OperatorTable(times=entries, provenance="example"))
    best = planner(graph, cluster).search(limits=Limits()).predicted.step_time_s
    every = planner(graph, cluster)
    found = [every.evaluator.evaluate(candidate) for candidate in every.pool]
    assert best == pytest.approx(min(f.prediction.step_time_s for f in found if isinstance(f, Evaluation)))


SPREAD = 0.2


def two_ranks(*, spread: float = 0.0, **device: Any) -> Planner:
    cluster = with_device(Cluster.parse("cpu:1x2"), memory_uncertainty=spread, **device)
    return planner_of(mlp(layers=4, batch=2, width=64, hidden=256), cluster=cluster, global_batch_size=8)


def replicated(made: Planner) -> Any:
    return made.evaluator.evaluate(next(c for c in made.pool if c.mesh.dp_replicate == 2))


def test_what_fits_by_its_middle_alone_does_not_fit_and_bounds_stay_below_prices() -> None:
    found = replicated(two_ranks(spread=SPREAD)).prediction
    peak = found.peak_memory_bytes
    assert found.peak_memory_interval_bytes == (round(peak / (1 + SPREAD)), round(peak * (1 + SPREAD)))
    assert found.fits
    free = replicated(two_ranks()).prediction
    assert replace(free, peak_memory_interval_bytes=()).fits  # as of an older version: by its middle
    limit = round(free.peak_memory_bytes * 1.1)
    assert replicated(two_ranks(memory_bytes=limit)).prediction == replace(free, memory_limit_bytes=limit)
    unsure = replicated(two_ranks(memory_bytes=limit, spread=SPREAD))
    if isinstance(unsure, Misfit):
        assert unsure.needs_bytes * (1 + SPREAD) > limit
    else:  # a leaner plan
        assert unsure.prediction.peak_memory_bytes * (1 + SPREAD) <= limit + 1
        assert unsure.prediction.step_time_s > free.step_time_s
    tight = two_ranks(memory_bytes=round(free.peak_memory_bytes * 1.25), spread=SPREAD)
    found = replicated(tight)
    assert tight.evaluator.closest_s(found.candidate, float("inf"))[0] <= found.prediction.step_time_s

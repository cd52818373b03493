"""Fronts of plans against every size and every limit of memory searched one by one."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InfeasibleError, UsageError
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import scaled
from autopar.planner.search import Evaluation, peak_bytes
from autopar.questions.comparisons import MEMORY_STEP, Point, front, parse_objectives, undominated
from autopar.questions.sizing import Ask, sizes_of
from tests.questions.test_sizing import ASK, KIND, alone
from tests.support.cli_runner import Run
from tests.support.example_plans import llama_plan


def point(time_s: float, head_room: float, num_devices: int) -> Point:
    plan = llama_plan()
    plan = replace(plan, predicted=replace(plan.predicted, step_time_s=time_s))
    return Point(cluster="c", num_devices=num_devices, plan=plan, head_room=head_room)


SMALL = st.integers(1, 4)


@given(st.lists(st.tuples(SMALL, SMALL, SMALL), min_size=1, max_size=12))
def test_what_is_left_is_what_nothing_beats(values: list[tuple[int, int, int]]) -> None:
    points = [point(float(t), -float(m), d) for t, m, d in values]
    objectives = ("time", "memory", "devices")
    kept = [p.values(objectives) for p in undominated(points, objectives)]
    every = {p.values(objectives) for p in points}
    best = {v for v in every if not any(o != v and all(a <= b for a, b in zip(o, v, strict=True)) for o in every)}
    assert len(kept) == len(set(kept))
    assert set(kept) == best


def test_time_against_devices_is_that_of_every_size() -> None:
    found = front(ASK, ("time", "devices"))
    plans = {size: alone(ASK, size) for size in sizes_of(KIND)}
    times = {size: plan.predicted.step_time_s for size, plan in plans.items() if plan}
    expected = [
        size for size, time_s in times.items()
        if not any(times[other] <= time_s for other in list(times)[: list(times).index(size)])
    ]  # fmt: skip
    assert sorted(p.cluster for p in found) == sorted(expected)
    assert [p.plan.predicted.step_time_s for p in found] == sorted(times[size] for size in expected)


def test_less_memory_costs_time_and_every_point_is_the_fastest_under_its_limit() -> None:
    ask = replace(ASK, cluster="h100-sxm5-80gb:1x2", global_batch_size=2**17, pins=("pp=1",))
    found, cluster = front(ask, ("time", "memory")), Cluster.parse(ask.cluster)
    assert len(found) > 1
    assert found[0].plan.predicted.step_time_s == _time_s(ask, cluster)
    for before, after in pairwise(found):
        assert after.plan.predicted.step_time_s > before.plan.predicted.step_time_s
        assert 1 - after.head_room <= MEMORY_STEP * (1 - before.head_room)
        own = scaled(cluster, {"device.memory": (1 - after.head_room) * (1 + 1e-9)})
        assert _time_s(ask, own) == after.plan.predicted.step_time_s
    least = scaled(cluster, {"device.memory": MEMORY_STEP * (1 - found[-1].head_room)})
    assert alone(ask, least) is None


def _time_s(ask: Ask, cluster: Cluster) -> float:
    plan = alone(ask, cluster)
    assert plan is not None
    return plan.predicted.step_time_s


def sampled(tmp_path: Path, trials: int) -> Ask:
    shipped = (Path(__file__).parents[2] / "search" / "default.toml").read_text(encoding="utf-8")
    own = shipped.replace("exhaustive = 20000", "exhaustive = 1").replace("trials = 300", f"trials = {trials}")
    own = own.replace('sampler = "tpe"', 'sampler = "nsga2"')
    path = tmp_path / "own.toml"
    path.write_text(own, encoding="utf-8")
    return replace(ASK, cluster="h100-sxm5-80gb:1x2", global_batch_size=2**17, space=str(path))


def test_a_sampled_front_is_that_of_all_candidates_once_all_are_asked(tmp_path: Path) -> None:
    ask = sampled(tmp_path, 10_000)
    cluster = Cluster.parse(ask.cluster)
    found = front(ask, ("time", "memory"))
    planner = ask.planner(cluster)
    every = [e.prediction for c in planner.pool if isinstance(e := planner.evaluator.evaluate(c), Evaluation)]
    values = {(p.step_time_s, peak_bytes(p)) for p in every}
    best = {v for v in values if not any(o != v and o[0] <= v[0] and o[1] <= v[1] for o in values)}
    assert len(best) > 1
    assert {(p.plan.predicted.step_time_s, peak_bytes(p.plan.predicted)) for p in found} == best


def test_a_sampled_front_is_on_the_exact_one_or_behind_it(tmp_path: Path) -> None:
    ask = sampled(tmp_path, 10)
    exact, cluster = replace(ask, space="default"), Cluster.parse(ask.cluster)
    found = front(ask, ("time", "memory"))
    again = front(ask, ("time", "memory"))
    assert [p.plan.predicted for p in found] == [p.plan.predicted for p in again]
    assert found[0].plan.predicted.step_time_s >= _time_s(exact, cluster)
    for one in found:
        own = scaled(cluster, {"device.memory": (1 - one.head_room) * (1 + 1e-9)})
        assert _time_s(exact, own) <= one.plan.predicted.step_time_s * (1 + 1e-9)


def test_a_price_joins_time_and_devices() -> None:
    found = front(ASK, ("time", "price"), {"h100-sxm5-80gb": 3.6e3})
    for one in found:
        assert one.cost == pytest.approx(one.num_devices * one.plan.predicted.step_time_s)
    costs = [one.cost for one in found]
    assert costs == sorted(costs, key=lambda cost: -(cost or 0.0))  # what is slower is cheaper
    with pytest.raises(UsageError, match="--price: Missing price"):
        front(ASK, ("time", "price"))


@pytest.mark.parametrize(
    ("text", "message"),
    [("time", "two different"), ("time,time", "two different"), ("time,memroy", "memory")],
)
def test_objectives_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_objectives(text)


def test_nothing_fits() -> None:
    ask: Ask = replace(ASK, cluster="h100-sxm5-80gb:1x1?memory=1GB")
    with pytest.raises(InfeasibleError, match="No plan fits"):
        front(ask, ("time", "memory"))


@pytest.mark.slow
def test_the_command_prints_a_row_for_each(run: Run) -> None:
    model = "gpt:layers=2,hidden=64,heads=4,vocab=96,seq=32"
    arguments = ["pareto", model, "--cluster", "cpu:1x4", "--global-batch", "8"]
    data = json.loads(run(*arguments, "--objectives", "time,devices", "--json").out)
    assert data["front"][0]["plan"]
    counts = [row["num_devices"] for row in data["front"]]
    assert counts == sorted(counts, reverse=True)
    text = run(*arguments, "--objectives", "time,devices").out
    assert "memory left" in text
    assert run(*arguments, "--objectives", "time").code == 2

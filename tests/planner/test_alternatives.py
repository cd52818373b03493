import gc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.graph.graph import Graph
from autopar.hardware.cluster import Cluster
from autopar.hardware.describe import with_free_links
from autopar.planner.branch_and_bound.process_group import ProcessGroup, can_fork
from autopar.planner.explain.reasons import compare
from autopar.planner.layouts.layout import layout_key_of
from autopar.planner.planner import Planner, objects_set_aside
from autopar.planner.search import Evaluation, Limits, Outcome
from autopar.planner.space.pins import Pins
from autopar.planner.space.space import load_space
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import task_of
from tests.support.said import refuses


def evaluations(planner: Planner) -> list[Evaluation]:
    found = [planner.evaluator.evaluate(candidate) for candidate in planner.pool]
    return [one for one in found if isinstance(one, Evaluation)]


def slow_search(planner: Planner, monkeypatch: pytest.MonkeyPatch, bound: float = 0.5) -> Evaluation:
    """The search of this planner ends with its slowest candidate, as one does that a limit stops."""
    every = evaluations(planner)
    slowest = max(every, key=lambda one: one.prediction.step_time_s)
    bound_s = bound * min(one.prediction.step_time_s for one in every)
    tried = {"candidates": len(planner.pool), "evaluated": 1}
    outcome = Outcome(best=slowest, lower_bound_s=bound_s, misfits=(), finished=False, **tried)
    monkeypatch.setattr(planner, "_outcome", lambda limits, **given: outcome)
    return slowest


def test_an_alternative_that_is_faster_becomes_the_plan(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(task_of(graph))
    slowest = slow_search(planner, monkeypatch)
    alternatives = compare(planner.evaluator, planner.pool, slowest)
    faster = [one.evaluation.prediction.step_time_s for one in alternatives if one.evaluation is not None]
    assert min(faster) < slowest.prediction.step_time_s
    plan = planner.search(limits=Limits())
    assert plan.predicted.step_time_s <= min(faster)
    said = [reason for reason in plan.search.reasons if "took its place" in reason]
    assert said and str(slowest.candidate) in said[0]
    assert not any(" faster (" in reason for reason in plan.search.reasons)
    least_s = min(one.prediction.step_time_s for one in evaluations(Planner(task_of(graph))))
    assert plan.search.lower_bound_s == pytest.approx(least_s / 2)
    assert plan.search.gap == pytest.approx(plan.predicted.step_time_s / plan.search.lower_bound_s - 1)


def test_a_plan_below_the_bound_says_so_in_its_certificate(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = []
    for bound in (1.0, 1.01):
        planner = Planner(task_of(graph, pins=Pins.parse(["pp=1"])))
        slow_search(planner, monkeypatch, bound)
        notes.append([note for note in planner.search(limits=Limits()).notes if "certificate" in note])
    assert [len(found) for found in notes] == [0, 1]


def test_one_that_is_not_faster_leaves_the_plan(graph: Graph) -> None:
    whole = Planner(task_of(graph)).search(limits=Limits())
    assert not any("took its place" in reason for reason in whole.search.reasons)
    reasons = whole.search.reasons
    assert reasons and all("slower" in one or "no plan" in one or "0 s (0.0 %)" in one for one in reasons)
    estimated = Planner(task_of(graph)).estimate()  # the plan of pins stays, though others are faster
    assert not any("took its place" in reason for reason in estimated.search.reasons)


@pytest.mark.skipif(not can_fork(), reason="processes are copied on Linux alone")
def test_several_processes_put_the_same_plan_in_its_place(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []
    for size in (1, 3):
        planner = Planner(task_of(graph))
        slow_search(planner, monkeypatch)
        outcome = planner._outcome(Limits())
        with ProcessGroup(size) as group:
            group.fork([layout_key_of(c) for c in planner.pool[::2]])
            for candidate in planner.pool:
                group.claim(layout_key_of(candidate))
            plans.append(planner._improved(outcome.best, outcome, group))
    assert plans[0].predicted == plans[1].predicted and plans[0].search.reasons == plans[1].search.reasons


def test_objects_come_back_after_a_search_but_those_that_a_caller_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    before, inside = gc.get_freeze_count(), []
    planner = Planner(task_of(mlp(layers=2)))
    monkeypatch.setattr(planner, "_outcome", lambda *a, **k: inside.append(gc.get_freeze_count()) or 1 / 0)
    refuses(ZeroDivisionError, "", planner.search, limits=Limits())
    assert inside[0] > 10_000
    assert gc.get_freeze_count() == before == 0
    gc.freeze()
    try:
        count = gc.get_freeze_count()  # it falls where one of these is freed meanwhile, and is zero where all come back
        with objects_set_aside():
            assert 0 < gc.get_freeze_count() <= count
        assert 0 < gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()


# --- notes


_square, _power = (lambda y, batch: y.square().mean()), (lambda y, batch: y.pow(2).mean())


@cache
def graph_of(loss_fn: Any, precision: Any) -> Graph:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    return autopar.trace(model, example_inputs=[torch.randn(4, 8)], loss_fn=loss_fn, precision=precision)


def notes(about: str, *, precision: Any = "fp32", loss_fn: Any = _square, **options: Any) -> tuple[str, ...]:
    given = {"cluster": "cpu:1x2", "global_batch_size": 4, "pins": ["tp=2"], "precision": precision, **options}
    return tuple(note for note in autopar.search(graph_of(loss_fn, precision), **given).notes if about in note)


def test_a_plan_says_what_all_ranks_repeat() -> None:
    (note,) = notes("repeated on each")
    assert note.startswith("100% of the FLOPs are repeated on each of the 2 ranks of tp (0, 2)")
    assert notes("repeated on each", cluster=with_free_links(Cluster.parse("cpu:1x2"))) == ()


@pytest.mark.slow
def test_a_plan_with_full_recompute_says_that_the_space_has_no_selective_one(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "search/default.toml").read_text().replace('name = "default"', 'name = "mine"')
    full, both = tmp_path / "full.toml", tmp_path / "both.toml"
    full.write_text(text.replace('recompute = ["none", "selective", "full"]', 'recompute = ["full"]'))
    both.write_text(text.replace('recompute = ["none", "selective", "full"]', 'recompute = ["selective", "full"]'))
    about = "no selective recompute"
    (note,) = notes(about, space=str(full))
    assert note.startswith(f"blocks recompute fully, as the space mine has {about}: the space default has")
    assert "selective" in load_space("default").recompute
    assert notes(about, space=str(both)) == notes(about, pins=["tp=2", "recompute=full"], space=str(full)) == ()
    assert notes(about) == ()  # nothing is made again


def test_what_may_leave_the_range_of_float16_is_named_and_a_precision_that_the_device_has() -> None:
    (note,) = notes("autocast", precision="fp16", loss_fn=_power)
    assert note.startswith("computed in float16, where autocast would in float32: aten.pow.Tensor_Scalar of ")
    assert not notes("autocast", precision="bf16", loss_fn=_power)
    for cluster, name in (("v100-sxm2-32gb:1x2", "fp16"), ("h100-sxm5-80gb:1x2", "bf16")):
        (note,) = notes("computed in float32", cluster=cluster)
        assert f"precision {name} " in note

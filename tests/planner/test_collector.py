"""Objects that are there before a search are set aside from the collector of cycles, and come back after it."""

from __future__ import annotations

import gc

import pytest

from autopar.planner.planner import Planner, objects_set_aside
from autopar.planner.search import Limits
from tests.support.planner.graphs import mlp
from tests.support.planner.tasks import task_of


def test_objects_come_back_after_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    before, inside = gc.get_freeze_count(), []
    planner = Planner(task_of(mlp(layers=2)))
    monkeypatch.setattr(planner, "_outcome", lambda *a, **k: inside.append(gc.get_freeze_count()) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        planner.search(limits=Limits())
    assert inside[0] > 10_000
    assert gc.get_freeze_count() == before == 0


def test_what_a_caller_has_set_aside_stays_so() -> None:
    gc.freeze()
    try:
        count = gc.get_freeze_count()  # it falls where one of these is freed meanwhile, and is zero where all come back
        with objects_set_aside():
            assert 0 < gc.get_freeze_count() <= count
        assert 0 < gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()

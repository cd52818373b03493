"""What a search made is gone with it, without a collection of cycles: one took a tenth of the search's time in the end."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.cluster import Cluster
from autopar.planner.outcome import Limits
from autopar.planner.planner import Planner
from autopar.planner.space.space import load_space
from tests.planner.graphs import mlp
from tests.planner.test_study import task_of

MIXED = """name = "two"
[[group]]
device = "a100-sxm4-40gb"
num_nodes = 1
devices_per_node = 2
[[group]]
device = "v100-sxm2-32gb"
num_nodes = 1
devices_per_node = 2
"""


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="default"),
        pytest.param({"space": load_space("quick")}, id="quick"),
        pytest.param({"cluster": "two"}, id="mixed"),
    ],
)
def test_nothing_is_left_in_circles(fields: dict[str, object], tmp_path: Path) -> None:
    if "cluster" in fields:
        (tmp_path / "cluster.toml").write_text(MIXED, encoding="utf-8")
        fields = fields | {"cluster": Cluster.load(tmp_path / "cluster.toml")}
    planner = Planner(task_of(mlp(layers=2), **fields))
    planner.search(limits=Limits())
    parts = (planner, planner.evaluator, planner.evaluator.layouts, planner.evaluator.layouts.typings, planner.model)
    left = [weakref.ref(part) for part in parts]
    solvers = [weakref.ref(solver) for solver in planner.evaluator.layouts.typings._solvers.values()]
    del planner, parts
    assert [r for r in (*left, *solvers) if r() is not None] == []

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.graph.graph import Graph
from autopar.plan.plan import FP16
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations import lit
from tests.support.integrations.ranks import ACCUMULATED, graph_in, plan_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]


@cache
def wanted(accumulated: int) -> dict[str, Any]:
    return lit.alone(Path("unused"), {"accumulate_grad_batches": accumulated})


@pytest.mark.parametrize(("name", "accumulated"), ACCUMULATED)
def test_it_trains_as_one_process(pair: WorkerPool, graph: Graph, tmp_path: Path, name: str, accumulated: int) -> None:
    options = {"accumulate_grad_batches": accumulated}
    ranks = pair.run(lit.parallel, plan_of(name, graph), graph, str(tmp_path), options, timeout_s=200.0)
    expected = wanted(accumulated)
    assert len(expected["seen"]) == 8
    for found in ranks:
        for part in ("seen", "validated", "logged"):
            assert_close(found[part], expected[part], 1e-5, place=part)


def test_a_training_in_fp16_scales_and_clips_as_the_plan_says(pair: WorkerPool, tmp_path: Path) -> None:
    graph = graph_in("fp16")
    plan = plan_of("ZeRO 3", graph, precision=FP16)
    options = {"accumulate_grad_batches": 2, "precision": "16-mixed"}
    for found in pair.run(lit.parallel, plan, graph, str(tmp_path), options, timeout_s=100.0):
        assert_close(found["seen"], wanted(2)["seen"], 2e-2)


@pytest.mark.parametrize(("first", "second"), [("tp2", "pp2"), ("ZeRO 3", "tp2")])
def test_it_goes_on_under_another_plan(pair: WorkerPool, graph: Graph, tmp_path: Path, first: str, second: str) -> None:
    begin = {"epochs": 1, "saving": True, "tensorboard": True}
    pair.run(lit.parallel, plan_of(first, graph), graph, str(tmp_path), begin, timeout_s=200.0)
    last = tmp_path / "last.ckpt"
    assert (last / "autopar.json").is_file() or last.is_dir()
    goes_on = {"epochs": 2, "resume": str(last)}
    ranks = pair.run(lit.parallel, plan_of(second, graph), graph, str(tmp_path), goes_on, timeout_s=200.0)
    expected = wanted(1)
    for found in ranks:
        assert_close(found["seen"], expected["seen"][4:], 2e-5)
        assert_close(found["validated"], expected["validated"][1:], 2e-5)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in files)
    (metrics,) = (path for path in files if path.name == "metrics.csv")
    assert metrics.read_text().count("\n") > 4


def test_what_would_go_wrong_is_refused(pair: WorkerPool, graph: Graph, tmp_path: Path) -> None:
    for said in pair.run(lit.refused, plan_of("tp2", graph), graph, str(tmp_path), timeout_s=200.0):
        assert said[0].startswith(
            "The LightningModule has no parallel model. Write in configure_model of the LightningModule: "
        )
        assert said[1].startswith(
            "The LightningModule has parameters outside of the parallel model (other.weight, other.bias)"
        )
        assert said[2].startswith("A LightningModule with several optimizers is not supported.")

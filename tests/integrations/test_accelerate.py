from functools import cache
from pathlib import Path
from typing import Any

import pytest

from autopar.graph.graph import Graph
from autopar.plan.plan import FP16, FP64
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations import accelerated
from tests.support.integrations.ranks import ACCUMULATED, graph_in, plan_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]


@cache
def wanted(count: int) -> dict[str, Any]:
    return accelerated.alone(count)


@pytest.mark.parametrize(("name", "count"), ACCUMULATED)
def test_a_loop_equals_one_process(pair: WorkerPool, graph: Graph, name: str, count: int) -> None:
    """The order of samples too, though ranks had different seeds."""
    ranks = pair.run(accelerated.parallel, plan_of(name, graph), graph, count, timeout_s=200.0)
    expected = wanted(count)["steps"]
    assert [step[-1] for step in expected] == [8, 8, 8, 3] * 2
    for found in ranks:
        for number, (mine, theirs) in enumerate(zip(found["steps"], expected, strict=True)):
            assert_close(mine, theirs, 1e-5, place=f"step {number}")


def test_a_loop_in_fp16_scales_and_clips_as_the_plan_says(pair: WorkerPool) -> None:
    """Norms are those of the loss, not of the scaled one; no step is skipped."""
    graph = graph_in("fp16")
    plan = plan_of("pp2", graph, precision=FP16)
    for found in pair.run(accelerated.parallel, plan, graph, 2, "fp16", timeout_s=100.0):
        assert_close([step[:3] for step in found["steps"]], [step[:3] for step in wanted(2)["steps"]], 2e-2)


def test_what_would_not_train_it_says_what_does(pair: WorkerPool, graph: Graph) -> None:
    for said in pair.run(accelerated.given_to_others, plan_of("tp2", graph), graph, timeout_s=100.0):
        assert [text.split(".")[0] for text in said] == [
            "A parallel model was given to accelerate's Accelerator",
            "A parallel model was given to transformers",
            "The Accelerator of autopar was given a Linear, not a parallel model",
            "This Accelerator has no parallel model",
            "The precision that the training loop asks for and that of the plan does not match",
        ]
        assert "Use autopar.integrations.accelerate.Accelerator in its place" in said[0]
        assert "Use autopar.integrations.hf.Trainer in its place" in said[1]


def test_a_loop_goes_on_in_an_epoch_under_another_plan(pair: WorkerPool, tmp_path: Path) -> None:
    """With ``par.dataloader``, whose ranks load different samples under data parallelism; in float64 but for the loss."""
    folder, graph = str(tmp_path / "state"), graph_in("fp64")

    def ranks(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        plan = plan_of(name, graph, precision=FP64)
        return pair.run(accelerated.parallel, plan, graph, 2, None, options, timeout_s=100.0)

    (whole, _) = ranks("tp2", {})
    for found in ranks("ZeRO 3", {"save_after": (6, folder)}):
        assert_close([step[:3] for step in found["steps"]], [step[:3] for step in whole["steps"][:6]], 1e-6)
    for found in ranks("pp2", {"resume": folder}):
        assert_close(found["steps"], whole["steps"][6:], 1e-6)

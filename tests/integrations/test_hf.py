from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from autopar.graph.graph import Graph
from autopar.plan.plan import BF16
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations import hf
from tests.support.integrations.ranks import ACCUMULATED, graph_in, plan_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(240)]


@cache
def wanted(accumulated: int) -> dict[str, Any]:
    return hf.alone("unused", {"gradient_accumulation_steps": accumulated}, metrics=False)


@cache
def undisturbed() -> dict[str, Any]:
    return hf.alone("unused", {}, metrics=True)


def assert_logs_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [sorted(log) for log in found] == [sorted(log) for log in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5), theirs["step"]


@pytest.mark.parametrize(("name", "accumulated"), ACCUMULATED)
def test_logs_equal_one_process(pair: WorkerPool, graph: Graph, tmp_path: Path, name: str, accumulated: int) -> None:
    changes = {"gradient_accumulation_steps": accumulated}
    ranks = pair.run(
        hf.parallel, plan_of(name, graph), graph, str(tmp_path), changes, {"metrics": False}, timeout_s=200.0
    )
    expected = wanted(accumulated)
    assert len(expected["logs"]) == (8 if accumulated == 1 else 4) + 2 + 1
    for found in ranks:
        assert_logs_close(found["logs"], expected["logs"])
        assert found["called"] == expected["called"]
        assert_close(found["train_loss"], expected["train_loss"], 1e-5)


@pytest.mark.parametrize(("first", "second"), [("tp2", "pp2"), ("ZeRO 3", "tp2")])
def test_it_goes_on_under_another_plan(pair: WorkerPool, graph: Graph, tmp_path: Path, first: str, second: str) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1, "report_to": ["tensorboard"]}
    begun = pair.run(
        hf.parallel, plan_of(first, graph), graph, str(tmp_path), changes, {"metrics": True, "stop_after": 5}
    )
    assert begun[0]["called"] == {"step": 5, "evaluate": 2, "save": 1}
    (tmp_path / "checkpoint-7").mkdir()  # one that was being written when the job was killed
    ranks = pair.run(
        hf.parallel, plan_of(second, graph), graph, str(tmp_path), changes, {"metrics": True, "resume": True}
    )
    expected = undisturbed()
    for found in ranks:
        assert_logs_close(found["logs"][:-1], expected["logs"][:-1])
        assert found["called"] == {"step": 5, "evaluate": 2, "save": 2}  # at the end too
        assert_close(found["test"], expected["test"], 2e-5)
        assert_close(torch.tensor(found["predictions"]), torch.tensor(expected["predictions"]), 1e-3)
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert any("tfevents" in name for name in files)
    assert [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", "optimizer.pt"))] == []
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-8"]


def test_the_best_model_is_loaded_at_the_end(pair: WorkerPool, graph: Graph, tmp_path: Path) -> None:
    changes = {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2, "learning_rate": 3e-2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False,
    }  # fmt: skip
    ranks = pair.run(
        hf.parallel, plan_of("ZeRO 3", graph), graph, str(tmp_path / "parallel"), changes, {"metrics": True}
    )
    expected = hf.alone(str(tmp_path / "alone"), changes, metrics=True)
    assert expected["logs"][-2]["eval_loss"] > min(log.get("eval_loss", 9.0) for log in expected["logs"])
    for found in ranks:
        assert_close(found["test"], expected["test"], 1e-4)


def test_a_training_may_ask_for_the_precision_of_the_plan(pair: WorkerPool, tmp_path: Path) -> None:
    graph = graph_in("bf16")
    plan = plan_of("tp2", graph, precision=BF16)
    changes = {"bf16": True, "num_train_epochs": 1}
    options = {"metrics": False}
    expected = hf.alone(str(tmp_path), {"num_train_epochs": 1}, **options)["logs"]
    for found in pair.run(hf.parallel, plan, graph, str(tmp_path), changes, options, timeout_s=100.0):
        for mine, theirs in zip(found["logs"][:4], expected[:4], strict=True):
            assert_close([mine["loss"], mine["grad_norm"]], [theirs["loss"], theirs["grad_norm"]], 5e-2)


def test_what_the_plan_has_settled_is_refused(pair: WorkerPool, graph: Graph, tmp_path: Path) -> None:
    for said in pair.run(hf.refused, plan_of("tp2", graph), graph, str(tmp_path), timeout_s=100.0):
        assert [text.split(". ")[0] for text in said] == [
            "The Trainer of autopar was given a GPT2LMHeadModel, not a parallel model",
            "The batch of the Trainer (for which all ranks are one device) and that of the plan does not match",
            "A loss that the Trainer computes (compute_loss_func, label_smoothing_factor) is not supported",
            "The precision that the training loop asks for and that of the plan does not match",
            "TrainingArguments(gradient_checkpointing=...) with a parallel model is not supported",
            "Another batch size or model in the course of a training (auto_find_batch_size, model_init) is not supported",
            f"No complete checkpoint in {tmp_path}",
        ]

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.plan.plan import BF16, Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations.ranks import ACCUMULATED, BATCH, SUBJECT, Texts, as_parallel, forget, graph_in, plan_of
from tests.support.said import said

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy", "epoch", "step")


def arguments(folder: str, **changes: Any) -> transformers.TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "per_device_eval_batch_size": BATCH, "num_train_epochs": 2,
        "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5, "logging_steps": 1, "eval_strategy": "epoch", "save_strategy": "no",
        "optim": "adamw_torch", "report_to": [], "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
        "seed": 5,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=folder, **{**options, **changes})


def accuracy(found: transformers.EvalPrediction) -> dict[str, float]:
    labels, logits = found.label_ids[:, 1:], found.predictions[:, :-1]
    counted = labels != -100
    return {"accuracy": float((logits.argmax(-1) == labels)[counted].mean())}


class Steps(transformers.TrainerCallback):
    """Counts what it is called for; stops after some steps."""

    def __init__(self, stop_after: int | None) -> None:
        self.stop_after, self.called = stop_after, Counter[str]()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.called["step"] += 1
        if self.stop_after == state.global_step:
            control.should_training_stop = True

    def on_evaluate(self, *_: Any, **__: Any) -> None:
        self.called["evaluate"] += 1

    def on_save(self, *_: Any, **__: Any) -> None:
        self.called["save"] += 1


def trained(
    trainer_class: Any, model: Any, folder: str, changes: dict[str, Any], *, metrics: bool,
    stop_after: int | None = None, resume: bool = False,
) -> dict[str, Any]:  # fmt: skip
    steps = Steps(stop_after)
    trainer = trainer_class(
        model=model, args=arguments(folder, **changes), train_dataset=Texts(), eval_dataset=Texts(13, seed=12),
        compute_metrics=accuracy if metrics else None, callbacks=[steps],
    )  # fmt: skip
    done = trainer.train(resume_from_checkpoint=resume or None)
    logs = [{k: v for k, v in log.items() if k in NUMBERS} for log in trainer.state.log_history]
    found = {"logs": logs, "train_loss": done.training_loss, "called": steps.called, "flos": trainer.state.total_flos}
    if metrics:
        predicted = trainer.predict(Texts(11, seed=13))
        found |= {"predictions": np.asarray(predicted.predictions), "test": predicted.metrics["test_loss"]}
    return found


def alone(folder: str, changes: dict[str, Any], **options: Any) -> dict[str, Any]:
    forget()
    return trained(transformers.Trainer, SUBJECT.build(), folder, changes, **options)


def parallel(plan: Plan, graph: Graph, folder: str, changes: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    from autopar.integrations.hf import Trainer

    with as_parallel(plan, graph) as par:
        return trained(Trainer, par, folder, changes, **options)


def refused(plan: Plan, graph: Graph, folder: str) -> list[str]:
    """What is said where the Trainer is asked for what the plan has settled, or for what it cannot do."""
    from autopar.integrations.hf import Trainer

    found = []
    asked: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
        (SUBJECT.build(), {}, {}), (None, {"per_device_train_batch_size": 4}, {}),
        (None, {}, {"compute_loss_func": lambda *_: 0}), (None, {"bf16": True}, {}),
        (None, {"gradient_checkpointing": True}, {}), (None, {"auto_find_batch_size": True}, {}),
    ]  # fmt: skip
    with as_parallel(plan, graph) as par:
        for given, changes, options in asked:
            forget()
            options |= {"train_dataset": Texts(), "eval_dataset": Texts()}
            found.append(said(UsageError, Trainer, given or par, arguments(folder, **changes), **options))
        trainer = Trainer(par, arguments(folder), train_dataset=Texts(), eval_dataset=Texts())
        found.append(said(UsageError, trainer.train, resume_from_checkpoint=True))
    return found


@cache
def wanted(accumulated: int) -> dict[str, Any]:
    return alone("unused", {"gradient_accumulation_steps": accumulated}, metrics=False)


@cache
def undisturbed() -> dict[str, Any]:
    return alone("unused", {}, metrics=True)


def assert_logs_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [sorted(log) for log in found] == [sorted(log) for log in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5), theirs["step"]


@pytest.mark.parametrize(("name", "accumulated"), ACCUMULATED)
def test_logs_equal_one_process(pair: WorkerPool, graph: Graph, tmp_path: Path, name: str, accumulated: int) -> None:
    changes = {"gradient_accumulation_steps": accumulated}
    ranks = pair.run(parallel, plan_of(name, graph), graph, str(tmp_path), changes, {"metrics": False}, timeout_s=300.0)
    expected = wanted(accumulated)
    assert len(expected["logs"]) == (8 if accumulated == 1 else 4) + 2 + 1
    for found in ranks:
        assert_logs_close(found["logs"], expected["logs"])
        assert found["called"] == expected["called"]
        assert_close(found["train_loss"], expected["train_loss"], 1e-5)
        assert found["flos"] == pytest.approx(expected["flos"], rel=1e-9)
        assert found["flos"] > 0


def test_it_goes_on_under_another_plan(pair: WorkerPool, graph: Graph, tmp_path: Path) -> None:
    changes = {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1, "report_to": ["tensorboard"]}
    begun = pair.run(
        parallel, plan_of("ZeRO 3", graph), graph, str(tmp_path), changes, {"metrics": True, "stop_after": 5}
    )
    assert begun[0]["called"] == {"step": 5, "evaluate": 2, "save": 1}
    (tmp_path / "checkpoint-7").mkdir()  # one that was being written when the job was killed
    ranks = pair.run(parallel, plan_of("tp2", graph), graph, str(tmp_path), changes, {"metrics": True, "resume": True})
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
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "save_steps": 2, "learning_rate": 3e-2,
        "load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": False,
    }  # fmt: skip
    ranks = pair.run(parallel, plan_of("ZeRO 3", graph), graph, str(tmp_path / "parallel"), changes, {"metrics": True})
    expected = alone(str(tmp_path / "alone"), changes, metrics=True)
    assert expected["logs"][-2]["eval_loss"] > min(log.get("eval_loss", 9.0) for log in expected["logs"])
    for found in ranks:
        assert_close(found["test"], expected["test"], 1e-4)


def test_a_training_may_ask_for_the_precision_of_the_plan(pair: WorkerPool, tmp_path: Path) -> None:
    graph = graph_in("bf16")
    plan = plan_of("tp2", graph, precision=BF16)
    changes = {"bf16": True, "num_train_epochs": 1}
    options = {"metrics": False}
    expected = alone(str(tmp_path), {"num_train_epochs": 1}, **options)["logs"]
    for found in pair.run(parallel, plan, graph, str(tmp_path), changes, options, timeout_s=300.0):
        for mine, theirs in zip(found["logs"][:4], expected[:4], strict=True):
            assert_close([mine["loss"], mine["grad_norm"]], [theirs["loss"], theirs["grad_norm"]], 5e-2)


def test_what_the_plan_has_settled_is_refused(pair: WorkerPool, graph: Graph, tmp_path: Path) -> None:
    for texts in pair.run(refused, plan_of("tp2", graph), graph, str(tmp_path), timeout_s=300.0):
        assert [text.split(". ")[0] for text in texts] == [
            "The Trainer of autopar was given a GPT2LMHeadModel, not a parallel model",
            "The batch of the Trainer (for which all ranks are one device) and that of the plan does not match",
            "A loss that the Trainer computes (compute_loss_func, label_smoothing_factor) is not supported",
            "The precision that the training loop asks for and that of the plan does not match",
            "TrainingArguments(gradient_checkpointing=...) with a parallel model is not supported",
            "Another batch size or model in the course of a training (auto_find_batch_size, model_init) is not supported",
            f"No complete checkpoint in {tmp_path}",
        ]

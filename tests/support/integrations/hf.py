"""Trainings by Hugging Face's Trainer, by itself and with a parallel model."""

from collections import Counter
from typing import Any

import numpy as np
import transformers

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.plan.plan import Plan
from tests.support.integrations.ranks import BATCH, SUBJECT, Texts, as_parallel, forget
from tests.support.said import said

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
    trainer_class: Any,
    model: Any,
    folder: str,
    changes: dict[str, Any],
    *,
    metrics: bool,
    stop_after: int | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    steps = Steps(stop_after)
    trainer = trainer_class(
        model=model, args=arguments(folder, **changes), train_dataset=Texts(), eval_dataset=Texts(13, seed=12),
        compute_metrics=accuracy if metrics else None, callbacks=[steps],
    )  # fmt: skip
    done = trainer.train(resume_from_checkpoint=resume or None)
    logs = [{k: v for k, v in log.items() if k in NUMBERS} for log in trainer.state.log_history]
    found = {"logs": logs, "train_loss": done.training_loss, "called": steps.called}
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

"""Hugging Face's Trainer in parallel: ``torchrun --nproc-per-node 2 examples/train_hf.py --cluster cpu:1x2 --pin tp=2``."""

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import Dataset
from train_gpt2 import BATCH, SEQUENCE, TOKENS, build_model, make_batch
from transformers import EvalPrediction, TrainingArguments

import autopar
from autopar.integrations.hf import Trainer


class Windows(Dataset):
    """Parts of a text, without the last ones or these alone."""

    def __init__(self, *, is_training: bool) -> None:
        parts = TOKENS[: len(TOKENS) // SEQUENCE * SEQUENCE].unflatten(0, (-1, SEQUENCE))
        self.parts = parts[:-20] if is_training else parts[-20:]

    def __len__(self) -> int:
        return len(self.parts)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.parts[i], "labels": self.parts[i]}


def accuracy(found: EvalPrediction) -> dict[str, float]:
    """Return how many characters are foretold."""
    return {"accuracy": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean())}


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", help="as in `autopar search`; this machine, measured, when left out")
    parser.add_argument("--pin", action="append", default=[], help="of the plan")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="out/hf")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--record", help="JSON file for losses")
    options = parser.parse_args()
    model = build_model()
    par = autopar.parallelize(model, cluster=options.cluster, pins=options.pin, example_inputs=make_batch(0))
    arguments = TrainingArguments(
        options.folder,
        per_device_train_batch_size=BATCH,  # to the Trainer all ranks are one device
        per_device_eval_batch_size=BATCH,
        max_steps=options.steps,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=1,
        save_steps=20,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=30,
        report_to="none",  # or "tensorboard"
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    train, validation = Windows(is_training=True), Windows(is_training=False)
    trainer = Trainer(par, arguments, train_dataset=train, eval_dataset=validation, compute_metrics=accuracy)
    trainer.train(resume_from_checkpoint=options.resume)
    found = trainer.evaluate()
    trainer.save_model(f"{options.folder}/model")  # for GPT2LMHeadModel.from_pretrained
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if par.is_main_process and options.record:
        Path(options.record).write_text(json.dumps({"losses": [*losses, found["eval_loss"]]}))


if __name__ == "__main__":
    main()

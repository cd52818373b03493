"""A loop by accelerate in parallel: ``torchrun --nproc-per-node 2 examples/train_accelerate.py --cluster cpu:1x2 --pin zero=3``."""

import argparse
import json
from pathlib import Path

import torch
from train_gpt2 import build_model, make_batch
from train_hf import Windows

import autopar
from autopar.integrations.accelerate import Accelerator, step_loss


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", help="as in `autopar search`; this machine, measured, when left out")
    parser.add_argument("--pin", action="append", default=[], help="of the plan")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="out/accelerate")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--record", help="JSON file for losses")
    options = parser.parse_args()
    par = autopar.parallelize(build_model(), cluster=options.cluster, pins=options.pin, example_inputs=make_batch(0))
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    optimizer = torch.optim.AdamW(par.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    loader = par.dataloader(Windows(is_training=True), seed=0)
    model, optimizer, loader, scheduler = accelerator.prepare(par, optimizer, loader, scheduler)
    if options.resume:
        accelerator.load_state(options.folder)
    losses = []
    while len(losses) < options.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = step_loss(model, batch)  # under any plan; with one pipeline stage also: model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == options.steps:
                break
    accelerator.save_state(options.folder)
    if accelerator.is_main_process and options.record:
        Path(options.record).write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()

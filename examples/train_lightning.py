"""Lightning in parallel: ``torchrun --nproc-per-node 2 examples/train_lightning.py --cluster cpu:1x2 --pin pp=2``."""

import argparse
import json
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from train_gpt2 import build_model, make_batch
from train_hf import Windows

import autopar
from autopar.integrations.lightning import AutoparStrategy, step_loss


class Lit(pl.LightningModule):
    """A LightningModule as for one device, but for two lines: where the model is made, and what training_step returns."""

    def __init__(self, cluster: str | None, pins: list[str]) -> None:
        super().__init__()
        self.cluster, self.pins, self.losses = cluster, pins, []
        self.model = build_model()

    def configure_model(self) -> None:
        if not isinstance(self.model, autopar.ParallelModel):
            self.model = autopar.parallelize(
                self.model, cluster=self.cluster, pins=self.pins, example_inputs=make_batch(0)
            )

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss = step_loss(self.model, batch)  # under any plan; with one pipeline stage also: self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        self.log("val_loss", self.model(**batch).loss)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> object:
        return self.model.dataloader(Windows(is_training=True), seed=0)

    def val_dataloader(self) -> object:
        return torch.utils.data.DataLoader(Windows(is_training=False), batch_size=16)


def main() -> None:
    """One rank of the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cluster", help="as in `autopar search`; this machine, measured, when left out")
    parser.add_argument("--pin", action="append", default=[], help="of the plan")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default="out/lightning")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--record", help="JSON file for losses")
    options = parser.parse_args()
    lit = Lit(options.cluster, options.pin)
    trainer = pl.Trainer(
        strategy=AutoparStrategy(),
        devices=1,  # each process has one; torchrun says how many processes there are
        max_steps=options.steps,
        gradient_clip_val=1.0,
        callbacks=[ModelCheckpoint(options.folder, save_last=True, every_n_train_steps=20)],
        default_root_dir=options.folder,
        val_check_interval=30,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        enable_progress_bar=False,
        logger=False,  # or TensorBoardLogger(...)
    )
    trainer.fit(lit, ckpt_path=f"{options.folder}/last.ckpt" if options.resume else None)
    if trainer.is_global_zero and options.record:
        Path(options.record).write_text(json.dumps({"losses": lit.losses}))


if __name__ == "__main__":
    main()

"""Trainings by Lightning, on one device and with a parallel model: the same LightningModule."""

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.integrations.loss import step_loss
from autopar.plan.plan import Plan
from tests.support.integrations.ranks import BATCH, SUBJECT, Texts
from tests.support.parallel import on_rank
from tests.support.said import said
from tests.support.scripts import as_under_torchrun


class Lit(pl.LightningModule):
    """Trains the subject; with a plan, in parallel."""

    def __init__(self, plan: Plan | None = None, graph: Graph | None = None) -> None:
        super().__init__()
        self.plan, self.graph = plan, graph
        self.model: nn.Module = SUBJECT.build()
        self.seen: list[tuple[float, float]] = []
        self.validated: list[float] = []

    def configure_model(self) -> None:
        if self.plan is not None and self.graph is not None:
            self.model = on_rank(self.model, self.plan, self.graph)
            self.plan = None

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss = step_loss(self.model, batch)
        self.log("train_loss", loss)
        self.seen.append((loss.item(), self.optimizers().param_groups[0]["lr"]))
        return loss

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        loss = self.model(**batch).loss
        self.log("val_loss", loss, batch_size=len(batch["input_ids"]))

    def on_validation_epoch_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val_loss"].item())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def trained(lit: Lit, folder: str, *, epochs: int = 2, resume: str | None = None, **options: Any) -> dict[str, Any]:
    saves = ModelCheckpoint(dirpath=folder, save_last=True, monitor="val_loss", save_top_k=1)
    saving = options.pop("saving", False)
    options.setdefault("gradient_clip_val", 0.5)
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, log_every_n_steps=1, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, callbacks=[saves] if saving else [],
        enable_checkpointing=saving, default_root_dir=folder, **{"logger": False, **options},
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of workers, and others of Lightning's advice
        trainer.fit(
            lit,
            DataLoader(Texts(), batch_size=BATCH),
            DataLoader(Texts(13, seed=12), batch_size=BATCH),
            ckpt_path=resume,
        )
    return {"seen": lit.seen, "validated": lit.validated, "logged": trainer.callback_metrics["train_loss"].item()}


def parallel(plan: Plan, graph: Graph, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    from autopar.integrations.lightning import AutoparStrategy

    if options.pop("tensorboard", False):
        options["logger"] = [TensorBoardLogger(folder, name="tb"), CSVLogger(folder, name="csv")]
    with as_under_torchrun():
        return trained(Lit(plan, graph), folder, strategy=AutoparStrategy(), **options)


def alone(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    return trained(Lit(), str(folder), **options)


class WithOthers(Lit):
    """Has a layer beside the parallel model."""

    def configure_model(self) -> None:
        super().configure_model()
        self.other = nn.Linear(2, 2)


class WithTwoOptimizers(Lit):
    automatic_optimization = False  # Lightning refuses them otherwise

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def refused(plan: Plan, graph: Graph, folder: str) -> list[str]:
    from autopar.integrations.lightning import AutoparStrategy

    modules = Lit(), WithOthers(plan, graph), WithTwoOptimizers(plan, graph)
    with as_under_torchrun():
        return [
            said(UsageError, trained, one, folder, strategy=AutoparStrategy(), gradient_clip_val=None)
            for one in modules
        ]

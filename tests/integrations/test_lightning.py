import warnings
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.integrations.loss import step_loss
from autopar.plan.plan import FP16, Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations.ranks import ACCUMULATED, BATCH, SUBJECT, Texts, graph_in, plan_of
from tests.support.parallel import on_rank
from tests.support.said import said
from tests.support.scripts import as_under_torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


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
            lit, DataLoader(Texts(), batch_size=BATCH), DataLoader(Texts(13, seed=12), batch_size=BATCH),
            ckpt_path=resume,
        )  # fmt: skip
    return {"seen": lit.seen, "validated": lit.validated, "logged": trainer.callback_metrics["train_loss"].item()}


def parallel(plan: Plan, graph: Graph, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    from autopar.integrations.lightning import AutoparStrategy

    if options.pop("tensorboard", False):
        options["logger"] = [TensorBoardLogger(folder, name="tb"), CSVLogger(folder, name="csv")]
    with as_under_torchrun():
        return trained(Lit(plan, graph), folder, strategy=AutoparStrategy(), **options)


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


@cache
def wanted(accumulated: int) -> dict[str, Any]:
    return trained(Lit(), "unused", accumulate_grad_batches=accumulated)


@pytest.mark.parametrize(("name", "accumulated"), ACCUMULATED)
def test_it_trains_as_one_process(pair: WorkerPool, graph: Graph, tmp_path: Path, name: str, accumulated: int) -> None:
    options = {"accumulate_grad_batches": accumulated}
    ranks = pair.run(parallel, plan_of(name, graph), graph, str(tmp_path), options, timeout_s=300.0)
    expected = wanted(accumulated)
    assert len(expected["seen"]) == 8
    for found in ranks:
        for part in ("seen", "validated", "logged"):
            assert_close(found[part], expected[part], 1e-5, place=part)


def test_a_training_in_fp16_scales_and_clips_as_the_plan_says(pair: WorkerPool, tmp_path: Path) -> None:
    graph = graph_in("fp16")
    plan = plan_of("ZeRO 3", graph, precision=FP16)
    options = {"accumulate_grad_batches": 2, "precision": "16-mixed"}
    for found in pair.run(parallel, plan, graph, str(tmp_path), options, timeout_s=300.0):
        assert_close(found["seen"], wanted(2)["seen"], 2e-2)


def test_it_goes_on_under_another_plan(pair: WorkerPool, graph: Graph, tmp_path: Path) -> None:
    begin = {"epochs": 1, "saving": True, "tensorboard": True}
    pair.run(parallel, plan_of("tp2", graph), graph, str(tmp_path), begin, timeout_s=300.0)
    last = tmp_path / "last.ckpt"
    assert {"checkpoint.json", "plan.json"} <= {path.name for path in last.iterdir()}
    goes_on = {"epochs": 2, "resume": str(last)}
    ranks = pair.run(parallel, plan_of("pp2", graph), graph, str(tmp_path), goes_on, timeout_s=300.0)
    expected = wanted(1)
    for found in ranks:
        assert_close(found["seen"], expected["seen"][4:], 2e-5)
        assert_close(found["validated"], expected["validated"][1:], 2e-5)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("tfevents" in path.name for path in files)
    (metrics,) = (path for path in files if path.name == "metrics.csv")
    assert metrics.read_text().count("\n") > 4


def test_what_would_go_wrong_is_refused(pair: WorkerPool, graph: Graph, tmp_path: Path) -> None:
    for texts in pair.run(refused, plan_of("tp2", graph), graph, str(tmp_path), timeout_s=300.0):
        for text, start in zip(texts, (
            "The LightningModule has no parallel model. Write in configure_model of the LightningModule: ",
            "The LightningModule has parameters outside of the parallel model (other.weight, other.bias)",
            "A LightningModule with several optimizers is not supported.",
        ), strict=True):  # fmt: skip
            assert text.startswith(start)

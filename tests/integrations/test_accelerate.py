from functools import cache
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.integrations.loss import step_loss
from autopar.plan.plan import FP16, FP64, Plan
from autopar.verification.rank_pool import WorkerPool
from tests.support.close import assert_close
from tests.support.integrations.ranks import ACCUMULATED, BATCH, SUBJECT, Texts, as_parallel, forget, graph_in, plan_of
from tests.support.said import said

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def loop(
    accelerator: Any, model: nn.Module, loader: Any, *, epochs: int = 2, save_after: tuple[int, str] | None = None,
    resume: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps: list[tuple[float, float, float, int]] = []
    begin = 0
    if resume is not None:
        accelerator.load_state(resume)
        begin = loader.state_dict()["epoch"]
    for epoch in range(begin, epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = step_loss(model, batch)
                accelerator.backward(loss)
                norm = torch.tensor(0.0)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            mean = accelerator.reduce(loss.detach(), "mean")
            count = len(accelerator.gather_for_metrics(batch["labels"]))
            steps.append((mean.item(), norm.item(), scheduler.get_last_lr()[0], count))
            if save_after is not None and len(steps) == save_after[0]:
                accelerator.save_state(save_after[1])
                return {"steps": steps}
    return {"steps": steps}


def shuffled_with(seed: int) -> DataLoader[Any]:
    torch.manual_seed(seed)
    return DataLoader(Texts(), batch_size=BATCH, shuffle=True)


@cache
def wanted(accumulated: int) -> dict[str, Any]:
    """Of one process."""
    forget()
    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulated, dataloader_config=config, cpu=True)
    return loop(accelerator, SUBJECT.build(), shuffled_with(3))


def parallel(
    plan: Plan, graph: Graph, accumulated: int, precision: str | None = None, own: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One rank; ``own``: options of the loop with a loader of the parallel model."""
    from autopar.integrations.accelerate import Accelerator

    with as_parallel(plan, graph) as par:
        accelerator = Accelerator(gradient_accumulation_steps=accumulated, cpu=True, mixed_precision=precision)
        if own is not None:
            return loop(accelerator, par, par.dataloader(Texts(), seed=4), **own)
        return loop(accelerator, par, shuffled_with(3 + par.rank))


def given_to_others(plan: Plan, graph: Graph) -> list[str]:
    """What is said where a parallel model is given to what would not train it."""
    import transformers

    from autopar.integrations.accelerate import Accelerator

    found = []
    with as_parallel(plan, graph) as par:
        arguments = transformers.TrainingArguments("unused", use_cpu=True, report_to=[])
        for attempt in (
            lambda: accelerate.Accelerator(cpu=True).prepare(par),
            lambda: transformers.Trainer(model=par, args=arguments, train_dataset=Texts()),
            lambda: Accelerator(cpu=True).prepare(nn.Linear(2, 2)),
            lambda: Accelerator(cpu=True).clip_grad_norm_(par.parameters(), 1.0),
            lambda: Accelerator(cpu=True, mixed_precision="bf16").prepare(par),
        ):
            forget()
            found.append(said(UsageError, attempt))
    return found


@pytest.mark.parametrize(("name", "count"), ACCUMULATED)
def test_a_loop_equals_one_process(pair: WorkerPool, graph: Graph, name: str, count: int) -> None:
    """The order of samples too, though ranks had different seeds."""
    ranks = pair.run(parallel, plan_of(name, graph), graph, count, timeout_s=300.0)
    expected = wanted(count)["steps"]
    assert [step[-1] for step in expected] == [8, 8, 8, 3] * 2
    for found in ranks:
        for number, (mine, theirs) in enumerate(zip(found["steps"], expected, strict=True)):
            assert_close(mine, theirs, 1e-5, place=f"step {number}")


def test_a_loop_in_fp16_scales_and_clips_as_the_plan_says(pair: WorkerPool) -> None:
    """Norms are those of the loss, not of the scaled one; no step is skipped."""
    graph = graph_in("fp16")
    plan = plan_of("pp2", graph, precision=FP16)
    for found in pair.run(parallel, plan, graph, 2, "fp16", timeout_s=300.0):
        assert_close([step[:3] for step in found["steps"]], [step[:3] for step in wanted(2)["steps"]], 2e-2)


def test_what_would_not_train_it_says_what_does(pair: WorkerPool, graph: Graph) -> None:
    for texts in pair.run(given_to_others, plan_of("tp2", graph), graph, timeout_s=300.0):
        assert [text.split(".")[0] for text in texts] == [
            "A parallel model was given to accelerate's Accelerator",
            "A parallel model was given to transformers",
            "The Accelerator of autopar was given a Linear, not a parallel model",
            "This Accelerator has no parallel model",
            "The precision that the training loop asks for and that of the plan does not match",
        ]
        assert "Use autopar.integrations.accelerate.Accelerator in its place" in texts[0]
        assert "Use autopar.integrations.hf.Trainer in its place" in texts[1]


def test_a_loop_goes_on_in_an_epoch_under_another_plan(pair: WorkerPool, tmp_path: Path) -> None:
    """With ``par.dataloader``, whose ranks load different samples under data parallelism; in float64 but for the loss."""
    folder, graph = str(tmp_path / "state"), graph_in("fp64")

    def ranks(name: str, options: dict[str, Any]) -> list[dict[str, Any]]:
        plan = plan_of(name, graph, precision=FP64)
        return pair.run(parallel, plan, graph, 2, None, options, timeout_s=300.0)

    (whole, _) = ranks("tp2", {})
    for found in ranks("ZeRO 3", {"save_after": (6, folder)}):
        assert_close([step[:3] for step in found["steps"]], [step[:3] for step in whole["steps"][:6]], 1e-6)
    for found in ranks("pp2", {"resume": folder}):
        assert_close(found["steps"], whole["steps"][6:], 1e-6)

"""A loop by accelerate, on one device and with a parallel model: the same but for which Accelerator it is."""

from typing import Any

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader

from autopar.errors import UsageError
from autopar.graph.graph import Graph
from autopar.integrations.loss import step_loss
from autopar.plan.plan import Plan
from tests.support.integrations.ranks import BATCH, SUBJECT, Texts, as_parallel, forget
from tests.support.said import said


def loop(
    accelerator: Any,
    model: nn.Module,
    loader: Any,
    *,
    epochs: int = 2,
    save_after: tuple[int, str] | None = None,
    resume: str | None = None,
) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    steps: list[tuple[float, float, float, int]] = []
    if resume is not None:
        accelerator.load_state(resume)
    begin = loader.state_dict()["epoch"] if resume is not None else 0
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


def alone(accumulated: int) -> dict[str, Any]:
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
